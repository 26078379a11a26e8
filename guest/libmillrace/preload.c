/* libmillrace-preload.so: sendfile(2) of an unmodified program becomes a pipe where it pays.
 *
 * A pipe is tried for a regular file and a blocking TCP socket from MILLRACE_MIN_BYTES on. Whatever
 * cannot be piped goes to the original, so that the program sees what it always sees; a pipe that moved
 * less than was asked for is a short count, as sendfile(2) has them too. */
#define _GNU_SOURCE
#include "millrace.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

#define DEFAULT_MIN_BYTES (64 * 1024)
/* What sendfile(2) moves at most in one call. */
#define MAX_COUNT 0x7ffff000
/* Without an agent or a host's offer nobody is asked again for so long. */
#define PAUSE_S 1

typedef ssize_t sendfile64_function(int, int, off64_t *, size_t);

static _Atomic(sendfile64_function *) original;
static _Atomic size_t min_bytes = DEFAULT_MIN_BYTES;
static _Atomic time_t not_before;

__attribute__((constructor)) static void at_start(void)
{
	const char *text = getenv("MILLRACE_MIN_BYTES");
	char *end;

	atomic_store(&original, (sendfile64_function *)dlsym(RTLD_NEXT, "sendfile64"));
	if (text && *text) {
		unsigned long long value = strtoull(text, &end, 10);

		/* Zero bytes are never piped: sendfile(2) of them is a question. */
		if (*end == '\0')
			atomic_store(&min_bytes, value > 0 ? (size_t)value : 1);
	}
}

static ssize_t call_original(int out_fd, int in_fd, off64_t *offset, size_t count)
{
	sendfile64_function *function = atomic_load(&original);

	/* A call of another library's constructor, before ours. */
	if (!function)
		return syscall(SYS_sendfile, out_fd, in_fd, offset, count);
	return function(out_fd, in_fd, offset, count);
}

static time_t now_s(void)
{
	struct timespec now;

	return clock_gettime(CLOCK_MONOTONIC_COARSE, &now) == 0 ? now.tv_sec : 0;
}

/* A socket that waits for ever in sendfile(2): so may a pipe. */
static int is_blocking_tcp(int fd)
{
	int protocol = 0;
	socklen_t len = sizeof(protocol);
	struct timeval timeout = {0};
	int flags;

	if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) < 0 || protocol != IPPROTO_TCP)
		return 0;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0 || flags & O_NONBLOCK)
		return 0;
	len = sizeof(timeout);
	return getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, &len) == 0 && timeout.tv_sec == 0 &&
	       timeout.tv_usec == 0;
}

static int pays(int out_fd, int in_fd, const off64_t *offset, size_t count)
{
	struct stat stat;

	return count >= atomic_load(&min_bytes) && (!offset || *offset >= 0) &&
	       now_s() >= atomic_load(&not_before) && is_blocking_tcp(out_fd) &&
	       fstat(in_fd, &stat) == 0 && S_ISREG(stat.st_mode);
}

/* 1 with sendfile's result, or 0: nothing was moved, the original is to be called. */
static int try_pipe(int out_fd, int in_fd, off64_t *offset, size_t count, ssize_t *result)
{
	int64_t at = offset ? *offset : 0;
	int64_t moved = millrace_pipe(out_fd, in_fd, offset ? &at : NULL,
				      count < MAX_COUNT ? count : MAX_COUNT);
	int reason = millrace_reason();

	if (moved > 0) {
		if (offset)
			*offset = at;
		*result = (ssize_t)moved;
		return 1;
	}
	if (reason == MILLRACE_NO_AGENT || reason == MILLRACE_NOT_OFFERED ||
	    reason == MILLRACE_HOST_GONE)
		atomic_store(&not_before, now_s() + PAUSE_S);
	*result = -1;
	return !millrace_may_fall_back(reason);
}

EXPORT ssize_t sendfile64(int out_fd, int in_fd, off64_t *offset, size_t count)
{
	int error = errno;
	ssize_t result;

	if (pays(out_fd, in_fd, offset, count) &&
	    try_pipe(out_fd, in_fd, offset, count, &result)) {
		if (result >= 0)
			errno = error;
		return result;
	}
	errno = error;
	return call_original(out_fd, in_fd, offset, count);
}

EXPORT ssize_t sendfile(int out_fd, int in_fd, off_t *offset, size_t count)
{
	off64_t at = offset ? *offset : 0;
	ssize_t result;

	/* Where off_t has 32 bits, a file it can name has no more. */
	result = sendfile64(out_fd, in_fd, offset ? &at : NULL, count);
	if (offset)
		*offset = (off_t)at;
	return result;
}
