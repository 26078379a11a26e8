/* Asks the guest's agent for pipes.
 *
 * Connections to the agent are kept for the next call: a small table for the whole process, of
 * which a call takes one for itself. It needs no lock, nothing at the end of a thread, and a child of
 * fork(2) finds all of it to close. A program may have closed our descriptors (daemons close all) and
 * have others with these numbers: each is known by its inode too and looked at before use. */
#define _GNU_SOURCE
#include "millrace.h"
#include "protocol.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* Connections kept. Further calls at the same time make their own and close it. */
#define MAX_KEPT 16

enum slot_state { SLOT_FREE, SLOT_IDLE, SLOT_BUSY };

struct slot {
	_Atomic int state;
	int fd;
	dev_t dev;
	ino_t ino;
};

/* A connection that a call has: slot is NULL for one that is not kept. */
struct connection {
	int fd;
	int fresh;
	struct slot *slot;
};

static struct slot slots[MAX_KEPT];
static _Atomic pid_t owner;
static __thread int last_reason;

static int is_ours(const struct slot *slot)
{
	struct stat stat;

	return fstat(slot->fd, &stat) == 0 && S_ISSOCK(stat.st_mode) && stat.st_dev == slot->dev &&
	       stat.st_ino == slot->ino;
}

/* In a child: the connections are the parent's. Calls nothing but what is async-signal-safe. */
static void after_fork(void)
{
	for (int i = 0; i < MAX_KEPT; i++) {
		if (atomic_load(&slots[i].state) != SLOT_FREE && is_ours(&slots[i]))
			close(slots[i].fd);
		atomic_store(&slots[i].state, SLOT_FREE);
	}
	atomic_store(&owner, getpid());
}

__attribute__((constructor)) static void at_start(void)
{
	atomic_store(&owner, getpid());
	/* Without it a child notices at its first call. */
	(void)pthread_atfork(NULL, NULL, after_fork);
}

/* With SOCK_NONBLOCK it fails rather than wait for an agent that is behind. */
static int connect_agent(int flags)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = AGENT_SOCKET};
	const char *other = secure_getenv("MILLRACE_AGENT_SOCKET");
	int fd;

	if (other && strlen(other) < sizeof(address.sun_path))
		strcpy(address.sun_path, other);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0);
	if (fd < 0)
		return -1;
	while (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		int error = errno;

		if (error == EINTR)
			continue;
		close(fd);
		errno = error;
		return -1;
	}
	/* It was for connecting alone. */
	if (flags & SOCK_NONBLOCK)
		(void)fcntl(fd, F_SETFL, 0);
	return fd;
}

/* Keeps a new connection if there is room. */
static void keep(struct connection *connection)
{
	struct stat stat;

	if (fstat(connection->fd, &stat) < 0)
		return;
	for (int i = 0; i < MAX_KEPT; i++) {
		int expected = SLOT_FREE;
		struct slot *slot = &slots[i];

		if (!atomic_compare_exchange_strong(&slot->state, &expected, SLOT_BUSY))
			continue;
		slot->fd = connection->fd;
		slot->dev = stat.st_dev;
		slot->ino = stat.st_ino;
		connection->slot = slot;
		return;
	}
}

static int take_kept(struct connection *connection)
{
	for (int i = 0; i < MAX_KEPT; i++) {
		int expected = SLOT_IDLE;
		struct slot *slot = &slots[i];

		if (!atomic_compare_exchange_strong(&slot->state, &expected, SLOT_BUSY))
			continue;
		if (is_ours(slot)) {
			*connection = (struct connection){.fd = slot->fd, .slot = slot};
			return 0;
		}
		atomic_store(&slot->state, SLOT_FREE);
	}
	return -1;
}

static int take(struct connection *connection, int only_fresh, int flags)
{
	if (atomic_load(&owner) != getpid())
		after_fork();
	if (!only_fresh && take_kept(connection) == 0)
		return 0;
	*connection = (struct connection){.fd = connect_agent(flags), .fresh = 1};
	if (connection->fd < 0)
		return -1;
	keep(connection);
	return 0;
}

static void give_back(struct connection *connection, int broken)
{
	if (broken || !connection->slot) {
		close(connection->fd);
		if (connection->slot)
			atomic_store(&connection->slot->state, SLOT_FREE);
	} else {
		atomic_store(&connection->slot->state, SLOT_IDLE);
	}
}

/* Begins to keep the connection of a pipe that is over. */
void millrace_keep_connection(int fd)
{
	struct connection connection = {.fd = fd};

	if (atomic_load(&owner) == getpid())
		keep(&connection);
	give_back(&connection, 0);
}

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

/* 1 with an answer, 0 when there is none yet, -1 when there will be none. */
static int read_answer(int fd, int flags, struct millrace_result *result)
{
	struct answer answer;
	ssize_t got = recv(fd, &answer, sizeof(answer), flags | MSG_TRUNC);

	if (got < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	if (got != (ssize_t)sizeof(answer) || le32toh(answer.magic) != AGENT_MAGIC ||
	    le16toh(answer.version) != AGENT_VERSION || le64toh(answer.moved_bytes) > INT64_MAX) {
		errno = EPROTO;
		return -1;
	}
	result->moved = (int64_t)le64toh(answer.moved_bytes);
	result->reason = le16toh(answer.reason);
	result->error = (int32_t)le32toh(answer.error);
	return 1;
}

/* A signal without SA_RESTART ends the pipe, as it ends sendfile(2): the agent is asked for the end and
 * says what was moved until then. 0, or -1 when the agent has gone without an answer. */
static int wait_answer(int fd, struct millrace_result *result, int *interrupted)
{
	int got;

	*interrupted = 0;
	while ((got = read_answer(fd, 0, result)) == 0) {
		if (!*interrupted)
			shutdown(fd, SHUT_WR);
		*interrupted = 1;
	}
	/* An answer may lie behind the error that the agent did not take the request. */
	if (got < 0 && read_answer(fd, MSG_DONTWAIT, result) <= 0)
		return -1;
	if (*interrupted && result->moved == 0 && result->reason == MILLRACE_CANCELLED)
		result->error = EINTR;
	return 0;
}

static struct millrace_result failed(int reason, int error)
{
	return (struct millrace_result){.reason = reason, .error = error};
}

/* What a request is answered with that could not be sent on a new connection. */
static struct millrace_result refused(int fd, int error)
{
	struct millrace_result result;

	if (error == EBADF)
		return failed(MILLRACE_NOT_PERMITTED, EBADF);
	/* The agent has closed it: it may have said why before. */
	for (int i = 0; i < 2; i++)
		if (read_answer(fd, MSG_DONTWAIT, &result) > 0)
			return result;
	return failed(MILLRACE_NO_AGENT, EOPNOTSUPP);
}

/* Sends a request on a kept connection, or on a new one: the agent closes those that are idle for
 * long. 0, or -1 with the result. */
static int send_somewhere(struct connection *connection, const struct request *request,
			  const int *fds, int flags, struct millrace_result *result)
{
	for (int attempt = 0; attempt <= MAX_KEPT; attempt++) {
		int fresh, error;

		if (take(connection, attempt == MAX_KEPT, flags) < 0) {
			*result = errno == EAGAIN ? failed(MILLRACE_AGENT_BUSY, EAGAIN)
						  : failed(MILLRACE_NO_AGENT, EOPNOTSUPP);
			return -1;
		}
		if (send_request(connection->fd, request, fds) == 0)
			return 0;
		error = errno;
		fresh = connection->fresh;
		*result = refused(connection->fd, error);
		give_back(connection, 1);
		if (fresh || error == EBADF)
			return -1;
	}
	return -1;
}

static struct millrace_result exchange(const struct request *request, const int *fds)
{
	struct connection connection;
	struct millrace_result result;
	int interrupted;
	int gone;

	if (send_somewhere(&connection, request, fds, 0, &result) < 0)
		return result;
	gone = wait_answer(connection.fd, &result, &interrupted) < 0;
	/* An agent that died may have moved bytes: nobody knows. */
	if (gone)
		result = fds ? failed(MILLRACE_LOST, EIO) : failed(MILLRACE_NO_AGENT, EOPNOTSUPP);
	give_back(&connection, gone || interrupted);
	return result;
}

static int fill(struct request *request, size_t count, const struct millrace_options *options)
{
	struct millrace_options all = MILLRACE_OPTIONS;

	if (options) {
		if (options->size < sizeof(all)) {
			errno = EINVAL;
			return -1;
		}
		all = *options;
	}
	if (count > INT64_MAX || all.in_offset < MILLRACE_OWN_POSITION ||
	    all.out_offset < MILLRACE_OWN_POSITION) {
		errno = EINVAL;
		return -1;
	}
	*request = (struct request){
	    .magic = htole32(AGENT_MAGIC),
	    .version = htole16(AGENT_VERSION),
	    .op = htole16(OP_PIPE),
	    .timeout_ms = htole32(all.timeout_ms),
	    .source_offset = htole64((uint64_t)all.in_offset),
	    .sink_offset = htole64((uint64_t)all.out_offset),
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
	if (fill(&request, count, options) < 0)
		return -1;
	/* A thread that is cancelled inside would keep its connection for ever. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	result = exchange(&request, fds);
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
	struct millrace_result result;
	struct request request;
	int fds[2] = {in_fd, out_fd};
	int error = errno;

	last_reason = MILLRACE_MALFORMED;
	if (fill(&request, count, options) < 0)
		return -1;
	if (send_somewhere(&connection, &request, fds, SOCK_NONBLOCK, &result) < 0) {
		last_reason = result.reason;
		errno = result.error ? result.error : EIO;
		return -1;
	}
	/* It is the caller's now. */
	if (connection.slot)
		atomic_store(&connection.slot->state, SLOT_FREE);
	last_reason = MILLRACE_COMPLETE;
	errno = error;
	return connection.fd;
}

EXPORT int millrace_pipe_status(int fd, struct millrace_result *result)
{
	int error = errno;
	int got = read_answer(fd, MSG_DONTWAIT, result);

	if (got < 0) {
		if (errno == EBADF || errno == ENOTSOCK)
			return -1;
		*result = failed(MILLRACE_LOST, EIO);
		got = 1;
	}
	if (got > 0)
		last_reason = result->reason;
	errno = error;
	return got;
}

EXPORT int millrace_available(void)
{
	struct request request = {
	    .magic = htole32(AGENT_MAGIC),
	    .version = htole16(AGENT_VERSION),
	    .op = htole16(OP_QUERY),
	};
	int error = errno;
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	last_reason = exchange(&request, NULL).reason;
	pthread_setcancelstate(cancel, NULL);
	errno = error;
	return last_reason == MILLRACE_COMPLETE;
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
