/* Break-even size of pipes: the fewest bytes for which a pipe pays.
 *
 * It comes from MILLRACE_MIN_BYTES, or from the agent, which has measured it. The query to the
 * agent blocks no call: one call sends it, and a later one that is large enough finds the
 * answer. */
#define _GNU_SOURCE
#include "exchange.h"
#include "shim.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Break-even size until one is known: some milliseconds of a guest's work, against the start of
 * a pipe. */
#define DEFAULT_BREAK_EVEN_BYTES (1024 * 1024)
/* Least bytes of a call that may read the clock and send a query to the agent. */
#define MIN_QUERY_BYTES (64 * 1024)
/* Time for which an answer is valid, and time to the next query when there was no answer: the
 * agent's measurement changes slowly. */
#define REFRESH_MS 60000
/* Calls of which one reads the clock while no answer is due: calls with parts are many. */
#define REFRESH_CALLS 16

_Atomic uint64_t shim_gate_bytes = MIN_QUERY_BYTES;
_Atomic uint64_t shim_break_even_bytes = DEFAULT_BREAK_EVEN_BYTES;
_Atomic int shim_refresh_countdown;

static int is_fixed;
/* Process whose thread refreshes the size; other threads use the known value. A child of fork(2)
 * may find its parent's number and its parent's query, which it leaves alone. */
static _Atomic pid_t refresher_pid;
static struct connection query;
static pid_t query_pid;
/* Time before which there is neither a query to send nor an answer to read. */
static _Atomic int64_t next_refresh_ms;

__attribute__((constructor)) static void read_environment(void)
{
	const char *text = getenv("MILLRACE_MIN_BYTES");
	char *end;
	unsigned long long value;

	if (!text || !*text)
		return;
	value = strtoull(text, &end, 10);
	if (*end != '\0')
		return;
	/* Zero bytes are never piped: sendfile(2) of them is a probe. */
	value = value > 0 ? value : 1;
	is_fixed = 1;
	atomic_store(&shim_break_even_bytes, value);
	atomic_store(&shim_gate_bytes, value < MIN_QUERY_BYTES ? value : MIN_QUERY_BYTES);
}

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void send_query(void)
{
	struct request request = millrace_make_query();
	struct outcome outcome;

	if (millrace_send_request(&query, &request, NULL, SOCK_NONBLOCK, &outcome) < 0)
		return;
	/* A connection without a slot could not be told from another file of its number later. */
	if (query.slot)
		query_pid = getpid();
	else
		millrace_return_connection(&query, 1);
}

static void read_answer(void)
{
	struct outcome outcome = {0};
	uint64_t bytes;
	int status = -1;

	/* The program may have closed it. */
	if (millrace_is_pooled(&query)) {
		status = millrace_read_answer(query.fd, MSG_DONTWAIT, &outcome);
		if (status == 0)
			return;
		millrace_return_connection(&query, status < 0);
	} else {
		millrace_detach_connection(&query);
	}
	query_pid = 0;
	bytes = (uint64_t)outcome.min_bytes_kib * 1024;
	/* An agent that does not know, or has exited, leaves the known value. */
	if (bytes == 0)
		return;
	atomic_store(&shim_break_even_bytes, bytes);
	atomic_store(&shim_gate_bytes, bytes < MIN_QUERY_BYTES ? bytes : MIN_QUERY_BYTES);
}

/* Refreshes the break-even size. Returns 1 when a query is open, whose answer the next call may
 * find. */
static int refresh(void)
{
	int64_t now = now_ms();
	int error = errno;
	pid_t self, holder;
	int is_open;

	if (now < atomic_load(&next_refresh_ms))
		return 0;
	self = getpid();
	holder = atomic_load(&refresher_pid);
	if (holder == self || !atomic_compare_exchange_strong(&refresher_pid, &holder, self))
		return 1;
	if (query_pid == self)
		read_answer();
	else
		send_query();
	is_open = query_pid == self;
	atomic_store(&next_refresh_ms, is_open ? 0 : now + REFRESH_MS);
	atomic_store(&refresher_pid, 0);
	errno = error;
	return is_open;
}

COLD void shim_refresh_break_even(void)
{
	int countdown = is_fixed ? INT_MAX : refresh() ? 0 : REFRESH_CALLS;

	atomic_store(&shim_refresh_countdown, countdown);
}
