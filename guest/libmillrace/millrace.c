/* Interface for programs: pipes by the guest's agent. */
#define _GNU_SOURCE
#include "exchange.h"

#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#define EXPORT __attribute__((visibility("default")))

static __thread int last_reason;

static int fill_request(struct request *request, size_t count,
			const struct millrace_options *options)
{
	struct millrace_options settings = MILLRACE_OPTIONS;

	if (options) {
		if (options->size < sizeof(settings)) {
			errno = EINVAL;
			return -1;
		}
		settings = *options;
	}
	if (count > INT64_MAX || settings.in_offset < MILLRACE_OWN_POSITION ||
	    settings.out_offset < MILLRACE_OWN_POSITION) {
		errno = EINVAL;
		return -1;
	}
	*request = (struct request){
	    .magic = htole32(AGENT_MAGIC),
	    .version = htole16(AGENT_VERSION),
	    .op = htole16(OP_PIPE),
	    .timeout_ms = htole32(settings.timeout_ms),
	    .source_offset = htole64((uint64_t)settings.in_offset),
	    .sink_offset = htole64((uint64_t)settings.out_offset),
	    .len_bytes = htole64(count),
	};
	return 0;
}

EXPORT int64_t millrace_pipe_options(int out_fd, int in_fd, size_t count,
				     const struct millrace_options *options)
{
	struct millrace_result result;
	struct request request;
	int fds[2] = {in_fd, out_fd};
	int error = errno;
	int cancel;

	last_reason = MILLRACE_MALFORMED;
	if (fill_request(&request, count, options) < 0)
		return -1;
	/* A thread that is cancelled in here would never release its connection. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = millrace_exchange(&request, fds).result;
	pthread_setcancelstate(cancel, NULL);
	last_reason = result.reason;
	errno = error;
	if (result.moved == 0 && result.error != 0) {
		errno = result.error;
		return -1;
	}
	return result.moved;
}

EXPORT int64_t millrace_pipe(int out_fd, int in_fd, int64_t *offset, size_t count)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	int64_t moved;

	if (offset) {
		if (*offset < 0) {
			last_reason = MILLRACE_MALFORMED;
			errno = EINVAL;
			return -1;
		}
		options.in_offset = *offset;
	}
	moved = millrace_pipe_options(out_fd, in_fd, count, &options);
	if (moved > 0 && offset)
		*offset += moved;
	return moved;
}

EXPORT int millrace_pipe_start(int out_fd, int in_fd, size_t count,
			       const struct millrace_options *options)
{
	struct connection connection;
	struct outcome outcome;
	struct request request;
	int fds[2] = {in_fd, out_fd};
	int error = errno;

	last_reason = MILLRACE_MALFORMED;
	if (fill_request(&request, count, options) < 0)
		return -1;
	if (millrace_send_request(&connection, &request, fds, SOCK_NONBLOCK, &outcome) < 0) {
		last_reason = outcome.result.reason;
		errno = outcome.result.error ? outcome.result.error : EIO;
		return -1;
	}
	millrace_detach_connection(&connection);
	last_reason = MILLRACE_COMPLETE;
	errno = error;
	return connection.fd;
}

EXPORT int millrace_pipe_status(int fd, struct millrace_result *result)
{
	struct outcome outcome;
	int error = errno;
	int status = millrace_read_answer(fd, MSG_DONTWAIT, &outcome);

	if (status < 0) {
		if (errno == EBADF || errno == ENOTSOCK)
			return -1;
		outcome = millrace_make_failure(MILLRACE_LOST, EIO);
		status = 1;
	}
	if (status > 0) {
		*result = outcome.result;
		last_reason = result->reason;
	}
	errno = error;
	return status;
}

static struct outcome send_query(void)
{
	struct request request = millrace_make_query();
	struct outcome outcome;
	int error = errno;
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	outcome = millrace_exchange(&request, NULL);
	pthread_setcancelstate(cancel, NULL);
	last_reason = outcome.result.reason;
	errno = error;
	return outcome;
}

EXPORT int millrace_available(void)
{
	return send_query().result.reason == MILLRACE_COMPLETE;
}

EXPORT int64_t millrace_min_bytes(void)
{
	return (int64_t)send_query().min_bytes_kib * 1024;
}

EXPORT int millrace_reason(void)
{
	return last_reason;
}

EXPORT const char *millrace_reason_text(int reason)
{
	switch (reason) {
#define REASON(name, number, error, text)                                             \
	case number:                                                                  \
		return text;
#include "millrace-reasons.h"
#undef REASON
	default:
		return "an unknown reason";
	}
}

EXPORT int millrace_may_fall_back(int reason)
{
	return reason != MILLRACE_LOST && reason != MILLRACE_CANCELLED &&
	       reason != MILLRACE_TIMED_OUT;
}
