/* Who refused pipes, so that a busy server does not ask for each file again. */
#define _GNU_SOURCE
#include "shim.h"

#include <time.h>

/* After this many milliseconds things may have changed: an agent started, a writer gone. */
#define PAUSE_MS 1000
/* The same where it is about others' pipes, which end soon. */
#define SHORT_PAUSE_MS 50
#define FOR_GOOD INT64_MAX
/* Files and file systems that are remembered; another takes an older one's place. */
#define FILES 64

struct file {
	dev_t dev;
	ino_t ino; /* 0: the whole file system */
	int64_t until_ms;
};

static struct file files[FILES];
static int64_t host_until_ms;

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct file *place(dev_t dev, ino_t ino)
{
	return &files[(dev * 31 + ino) % FILES];
}

static int file_is_refused(dev_t dev, ino_t ino, int64_t now)
{
	const struct file *file = place(dev, ino);

	return file->dev == dev && file->ino == ino && now < file->until_ms;
}

int shim_may_ask(struct entry *entry, ino_t socket_ino, dev_t file_dev, ino_t file_ino)
{
	int64_t now = now_ms();

	if (now < host_until_ms || file_is_refused(file_dev, file_ino, now) ||
	    file_is_refused(file_dev, 0, now))
		return 0;
	if (!entry || !(atomic_load(&entry->bits) & REFUSED) || entry->refused_ino != socket_ino)
		return 1;
	return now >= entry->refused_until_ms;
}

void shim_refused(struct entry *entry, ino_t socket_ino, dev_t file_dev, ino_t file_ino, int reason)
{
	int64_t until = now_ms() + PAUSE_MS;

	switch (reason) {
	case MILLRACE_END_OF_FILE:
	case MILLRACE_COMPLETE:
		return;
	case MILLRACE_NO_AGENT:
	case MILLRACE_NOT_OFFERED:
	case MILLRACE_HOST_GONE:
		host_until_ms = until;
		return;
	case MILLRACE_FILE_SYSTEM:
	case MILLRACE_SELF_TEST:
	case MILLRACE_STACKED:
	case MILLRACE_NO_DISK:
	case MILLRACE_DISK_FORMAT:
	case MILLRACE_DISK_FAILED:
		*place(file_dev, 0) = (struct file){file_dev, 0, until};
		return;
	case MILLRACE_NOT_A_FILE:
	case MILLRACE_BAD_EXTENTS:
	case MILLRACE_EXTENTS:
	case MILLRACE_NO_LEASE:
	case MILLRACE_LEASE_BROKEN:
	case MILLRACE_CACHED:
		*place(file_dev, file_ino) = (struct file){file_dev, file_ino, until};
		return;
	case MILLRACE_NO_FLOW:
	case MILLRACE_FLOW_CLOSED:
	case MILLRACE_FLOW_OPTIONS:
	case MILLRACE_FLOW_RESET:
	case MILLRACE_NOT_TCP:
	case MILLRACE_MPTCP:
	case MILLRACE_ULP:
	case MILLRACE_PAIR_UNSUPPORTED:
		until = FOR_GOOD;
		break;
	case MILLRACE_TOO_MANY:
	case MILLRACE_AGENT_BUSY:
		until += SHORT_PAUSE_MS - PAUSE_MS;
		break;
	default:
		/* Of the connection, and it may pass. */
		break;
	}
	if (!entry)
		return;
	entry->refused_ino = socket_ino;
	entry->refused_until_ms = until;
	atomic_fetch_or(&entry->bits, REFUSED);
}
