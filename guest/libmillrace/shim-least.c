/* Break-even size of pipes: from how many bytes on one pays.
 *
 * It comes from MILLRACE_MIN_BYTES, or from the agent, which has measured it. The question to
 * the agent blocks no call: one call sends it, and a later one that is large enough finds the
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
#define DEFAULT_LEAST_BYTES (1024 * 1024)
/* Least bytes of a call that may read the clock, and ask the agent. */
#define ASK_BYTES (64 * 1024)
/* Time for which an answer holds. So does a missing one: the agent's measurement changes slowly. */
#define ASK_AGAIN_MS 60000
/* Calls with parts of files are many: while no answer is due, one of this many reads the clock. */
#define LOOK_CALLS 16

_Atomic uint64_t shim_gate_bytes = ASK_BYTES;
_Atomic uint64_t shim_least_bytes = DEFAULT_LEAST_BYTES;
_Atomic int shim_answers_left;

static int is_fixed;
/* Process whose thread asks; other threads use the known value. A child of fork(2) may find its
 * parent's number, and its parent's question, which it leaves alone. */
static _Atomic pid_t busy;
static struct connection question;
static pid_t asker;
/* Time before which there is neither a question to send nor an answer to read. */
static _Atomic int64_t look_at_ms;

__attribute__((constructor)) static void at_start(void)
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
	atomic_store(&shim_least_bytes, value);
	atomic_store(&shim_gate_bytes, value < ASK_BYTES ? value : ASK_BYTES);
}

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void ask(void)
{
	struct request request = millrace_query();
	struct outcome outcome;

	if (millrace_send(&question, &request, NULL, SOCK_NONBLOCK, &outcome) < 0)
		return;
	/* An unkept connection could later not be told from another file of its number. */
	if (question.slot)
		asker = getpid();
	else
		millrace_give_back(&question, 1);
}

static void look_for_answer(void)
{
	struct outcome outcome = {0};
	uint64_t bytes;
	int got = -1;

	/* The program may have closed it. */
	if (millrace_is_kept(&question)) {
		got = millrace_read_answer(question.fd, MSG_DONTWAIT, &outcome);
		if (got == 0)
			return;
		millrace_give_back(&question, got < 0);
	} else {
		millrace_let_go(&question);
	}
	asker = 0;
	bytes = (uint64_t)outcome.min_bytes_kib * 1024;
	/* An agent that does not know, or has exited, leaves the known value. */
	if (bytes == 0)
		return;
	atomic_store(&shim_least_bytes, bytes);
	atomic_store(&shim_gate_bytes, bytes < ASK_BYTES ? bytes : ASK_BYTES);
}

/* Updates the break-even size. Returns 1 when a question is open, whose answer the next call may
 * find. */
static int refresh(void)
{
	int64_t now = now_ms();
	int error = errno;
	pid_t self, other;
	int is_open;

	if (now < atomic_load(&look_at_ms))
		return 0;
	self = getpid();
	other = atomic_load(&busy);
	if (other == self || !atomic_compare_exchange_strong(&busy, &other, self))
		return 1;
	if (asker == self)
		look_for_answer();
	else
		ask();
	is_open = asker == self;
	atomic_store(&look_at_ms, is_open ? 0 : now + ASK_AGAIN_MS);
	atomic_store(&busy, 0);
	errno = error;
	return is_open;
}

APART void shim_look_again(void)
{
	int left = is_fixed ? INT_MAX : refresh() ? 0 : LOOK_CALLS;

	atomic_store(&shim_answers_left, left);
}
