/* Refusals of pipes, noted so that a busy server does not request a pipe for each file again.
 *
 * They are noted for both ends together. The agent does not say which of two files was the
 * cause, and one that cannot be written by a pipe may well be read by one. */
#define _GNU_SOURCE
#include "shim.h"

#include <time.h>

/* Milliseconds after which a refusal may have ended: an agent starts, a writer closes the file. */
#define REFUSAL_MS 1000
/* Milliseconds for refusals because of other pipes, which end soon. */
#define SHORT_REFUSAL_MS 50
#define FOREVER INT64_MAX
/* Pairs of files or file systems that are noted; a further one replaces an older one. */
#define MAX_PAIRS 64

/* File, or a whole file system with ino 0, and its sink: all zero for a socket. */
struct pair {
	dev_t in_dev;
	ino_t in_ino;
	dev_t out_dev;
	ino_t out_ino;
	int64_t until_ms;
};

static struct pair pairs[MAX_PAIRS];
static int64_t host_until_ms;
/* End of a refusal of pipes between files: a host may lack these alone. */
static int64_t copies_until_ms;

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct pair make_file_pair(const struct shim_ends *ends)
{
	struct pair pair = {.in_dev = ends->in_dev, .in_ino = ends->in_ino};

	if (ends->out_is_file) {
		pair.out_dev = ends->out_dev;
		pair.out_ino = ends->out_ino;
	}
	return pair;
}

static struct pair make_file_system_pair(const struct shim_ends *ends)
{
	struct pair pair = make_file_pair(ends);

	pair.in_ino = pair.out_ino = 0;
	return pair;
}

static struct pair *find_place(const struct pair *pair)
{
	return &pairs[(pair->in_dev * 31 + pair->in_ino + pair->out_dev * 37 + pair->out_ino * 41) %
		      MAX_PAIRS];
}

static int is_refused(struct pair pair, int64_t now)
{
	const struct pair *stored = find_place(&pair);

	return stored->in_dev == pair.in_dev && stored->in_ino == pair.in_ino &&
	       stored->out_dev == pair.out_dev && stored->out_ino == pair.out_ino &&
	       now < stored->until_ms;
}

static void remember_pair(struct pair pair, int64_t until_ms)
{
	pair.until_ms = until_ms;
	*find_place(&pair) = pair;
}

int shim_may_request(struct entry *entry, const struct shim_ends *ends)
{
	int64_t now = now_ms();

	if (now < host_until_ms || is_refused(make_file_pair(ends), now) ||
	    is_refused(make_file_system_pair(ends), now))
		return 0;
	if (ends->out_is_file)
		return now >= copies_until_ms;
	if (!entry || !(atomic_load(&entry->bits) & REFUSED) || entry->refused_ino != ends->out_ino)
		return 1;
	return now >= entry->refused_until_ms;
}

/* Handles reasons that belong to the connection. */
static void note_connection_refusal(struct entry *entry, const struct shim_ends *ends, int reason)
{
	int64_t until_ms = now_ms() + REFUSAL_MS;

	switch (reason) {
	case MILLRACE_NO_FLOW:
	case MILLRACE_FLOW_CLOSED:
	case MILLRACE_FLOW_OPTIONS:
	case MILLRACE_FLOW_RESET:
	case MILLRACE_NOT_TCP:
	case MILLRACE_MPTCP:
	case MILLRACE_ULP:
	case MILLRACE_OTHER_NETWORK:
	case MILLRACE_PAIR_UNSUPPORTED:
		until_ms = FOREVER;
		break;
	case MILLRACE_TOO_MANY:
	case MILLRACE_AGENT_BUSY:
		until_ms += SHORT_REFUSAL_MS - REFUSAL_MS;
		break;
	default:
		/* The reason may pass. */
		break;
	}
	if (!entry)
		return;
	entry->refused_ino = ends->out_ino;
	entry->refused_until_ms = until_ms;
	atomic_fetch_or(&entry->bits, REFUSED);
}

/* Handles reasons of a copy that do not belong to the file systems. */
static void note_copy_refusal(const struct shim_ends *ends, int reason)
{
	int64_t now = now_ms();

	switch (reason) {
	case MILLRACE_PAIR_UNSUPPORTED:
		copies_until_ms = now + REFUSAL_MS;
		break;
	case MILLRACE_TOO_MANY:
	case MILLRACE_AGENT_BUSY:
		copies_until_ms = now + SHORT_REFUSAL_MS;
		break;
	default:
		remember_pair(make_file_pair(ends), now + REFUSAL_MS);
	}
}

void shim_note_refusal(struct entry *entry, const struct shim_ends *ends, int reason)
{
	int64_t until_ms = now_ms() + REFUSAL_MS;

	switch (reason) {
	case MILLRACE_END_OF_FILE:
	case MILLRACE_COMPLETE:
	case MILLRACE_TOO_SMALL:
		return;
	case MILLRACE_NO_AGENT:
	case MILLRACE_NOT_OFFERED:
	case MILLRACE_HOST_GONE:
		host_until_ms = until_ms;
		return;
	case MILLRACE_FILE_SYSTEM:
	case MILLRACE_SELF_TEST:
	case MILLRACE_STACKED:
	case MILLRACE_NO_DISK:
	case MILLRACE_DISK_FORMAT:
	case MILLRACE_DISK_FAILED:
		remember_pair(make_file_system_pair(ends), until_ms);
		return;
	case MILLRACE_NOT_A_FILE:
	case MILLRACE_BAD_EXTENTS:
	case MILLRACE_EXTENTS:
	case MILLRACE_NO_LEASE:
	case MILLRACE_LEASE_BROKEN:
	case MILLRACE_CACHED:
		remember_pair(make_file_pair(ends), until_ms);
		return;
	default:
		break;
	}
	if (ends->out_is_file)
		note_copy_refusal(ends, reason);
	else
		note_connection_refusal(entry, ends, reason);
}
