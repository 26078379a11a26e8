/* Requests to the agent and its answers. */
#define _GNU_SOURCE
#include "exchange.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

static int send_request(int fd, const struct request *request, const int *fds)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct iovec iov = {.iov_base = (void *)request, .iov_len = sizeof(*request)};
	struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t sent;

	if (fds) {
		memset(&control, 0, sizeof(control));
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(2 * sizeof(int));
		memcpy(CMSG_DATA(&control.header), fds, 2 * sizeof(int));
	}
	do
		sent = sendmsg(fd, &message, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	return sent == (ssize_t)sizeof(*request) ? 0 : -1;
}

int millrace_read_answer(int fd, int flags, struct outcome *outcome)
{
	struct answer answer;
	ssize_t len = recv(fd, &answer, sizeof(answer), flags | MSG_TRUNC);

	if (len < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	if (len != (ssize_t)sizeof(answer) || le32toh(answer.magic) != AGENT_MAGIC ||
	    le16toh(answer.version) != AGENT_VERSION || le64toh(answer.moved_bytes) > INT64_MAX) {
		errno = EPROTO;
		return -1;
	}
	*outcome = (struct outcome){
	    .result = {
		.moved = (int64_t)le64toh(answer.moved_bytes),
		.error = (int32_t)le32toh(answer.error),
		.reason = le16toh(answer.reason),
	    },
	    .min_bytes_kib = le32toh(answer.min_bytes_kib),
	};
	return 1;
}

/* Waits for the answer. A signal without SA_RESTART ends the pipe, as it ends sendfile(2): the
 * agent is asked to end it and answers with the bytes moved until then. 0, or -1 when the agent
 * exits without an answer. */
static int wait_answer(int fd, struct outcome *outcome, int *interrupted)
{
	int status;

	*interrupted = 0;
	while ((status = millrace_read_answer(fd, 0, outcome)) == 0) {
		if (!*interrupted)
			shutdown(fd, SHUT_WR);
		*interrupted = 1;
	}
	/* An answer may follow the error that the agent did not accept the request. */
	if (status < 0 && millrace_read_answer(fd, MSG_DONTWAIT, outcome) <= 0)
		return -1;
	if (*interrupted && outcome->result.moved == 0 &&
	    outcome->result.reason == MILLRACE_CANCELLED)
		outcome->result.error = EINTR;
	return 0;
}

struct outcome millrace_make_failure(int reason, int error)
{
	return (struct outcome){.result = {.reason = reason, .error = error}};
}

/* Reads why a request could not be sent. */
static struct outcome read_refusal(int fd, int error)
{
	struct outcome outcome;

	if (error == EBADF)
		return millrace_make_failure(MILLRACE_NOT_PERMITTED, EBADF);
	/* The agent has closed the connection, perhaps after it has sent a reason. */
	for (int i = 0; i < 2; i++)
		if (millrace_read_answer(fd, MSG_DONTWAIT, &outcome) > 0)
			return outcome;
	return millrace_make_failure(MILLRACE_NO_AGENT, EOPNOTSUPP);
}

int millrace_send_request(struct connection *connection, const struct request *request,
			  const int *fds, int flags, struct outcome *outcome)
{
	for (int attempt = 0; attempt <= POOL_LEN; attempt++) {
		int is_fresh, error;

		if (millrace_take_connection(connection, attempt == POOL_LEN, flags) < 0) {
			*outcome = errno == EAGAIN
				       ? millrace_make_failure(MILLRACE_AGENT_BUSY, EAGAIN)
				       : millrace_make_failure(MILLRACE_NO_AGENT, EOPNOTSUPP);
			return -1;
		}
		if (send_request(connection->fd, request, fds) == 0)
			return 0;
		error = errno;
		is_fresh = connection->is_fresh;
		*outcome = read_refusal(connection->fd, error);
		millrace_return_connection(connection, 1);
		if (is_fresh || error == EBADF)
			return -1;
	}
	return -1;
}

/* Whether the agent serves a new connection: it may refuse one after connect(2) has succeeded. */
static int is_served(const struct connection *connection, int timeout_ms, int *reason)
{
	struct pollfd answer = {.fd = connection->fd, .events = POLLIN};
	struct request request = millrace_make_query();
	struct outcome outcome;

	*reason = MILLRACE_NO_AGENT;
	if (send_request(connection->fd, &request, NULL) < 0 || poll(&answer, 1, timeout_ms) != 1 ||
	    millrace_read_answer(connection->fd, MSG_DONTWAIT, &outcome) <= 0)
		return 0;
	*reason = outcome.result.reason;
	return outcome.result.reason == MILLRACE_COMPLETE;
}

int millrace_take_served_connection(struct connection *connection, int timeout_ms, int *reason)
{
	char byte;

	*reason = MILLRACE_NO_AGENT;
	for (int attempt = 0; attempt <= POOL_LEN; attempt++) {
		int is_usable;

		if (millrace_take_connection(connection, attempt == POOL_LEN, SOCK_NONBLOCK) < 0)
			return -1;
		/* A connection of the pool was served before, unless the agent has closed it. */
		if (connection->is_fresh)
			is_usable = is_served(connection, timeout_ms, reason);
		else
			is_usable = !millrace_is_expired(connection) &&
				  recv(connection->fd, &byte, sizeof(byte),
				       MSG_PEEK | MSG_DONTWAIT) < 0 &&
				  errno == EAGAIN;
		if (is_usable && connection->slot)
			return 0;
		if (is_usable)
			*reason = MILLRACE_AGENT_BUSY;
		millrace_return_connection(connection, 1);
		if (connection->is_fresh)
			return -1;
	}
	return -1;
}

int millrace_send_behind(struct connection *connection, int out_fd, int in_fd, int64_t start,
			 int64_t len)
{
	struct request request = {
	    .magic = htole32(AGENT_MAGIC),
	    .version = htole16(AGENT_VERSION),
	    .op = htole16(OP_PIPE),
	    .flags = htole32(FLAG_BEHIND),
	    .source_offset = htole64((uint64_t)start),
	    .sink_offset = htole64(UINT64_MAX),
	    .len_bytes = htole64((uint64_t)len),
	};
	int fds[2] = {in_fd, out_fd};

	/* The number may belong to another file by now. */
	if (!millrace_is_pooled(connection)) {
		millrace_detach_connection(connection);
		return -1;
	}
	if (send_request(connection->fd, &request, fds) < 0) {
		millrace_return_connection(connection, 1);
		return -1;
	}
	millrace_detach_connection(connection);
	return 0;
}

struct outcome millrace_exchange(const struct request *request, const int *fds)
{
	struct connection connection;
	struct outcome outcome;
	int interrupted;
	int is_lost;

	if (millrace_send_request(&connection, request, fds, 0, &outcome) < 0)
		return outcome;
	is_lost = wait_answer(connection.fd, &outcome, &interrupted) < 0;
	/* An agent that died may have moved bytes: their number is not known. */
	if (is_lost)
		outcome = fds ? millrace_make_failure(MILLRACE_LOST, EIO)
			      : millrace_make_failure(MILLRACE_NO_AGENT, EOPNOTSUPP);
	millrace_return_connection(&connection, is_lost || interrupted);
	return outcome;
}

struct request millrace_make_query(void)
{
	return (struct request){
	    .magic = htole32(AGENT_MAGIC),
	    .version = htole16(AGENT_VERSION),
	    .op = htole16(OP_QUERY),
	};
}
