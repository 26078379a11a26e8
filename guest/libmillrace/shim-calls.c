/* Calls that affect a descriptor's pipe: they close it, or write to it by other means. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4u
#endif

#define ANY_BIT (~0u)
/* Period with which a wait for a pipe's end checks whether another thread has read the answer. */
#define RECHECK_MS 50

/* Forgets descriptors. Returns 0 when none of them has state. */
COLD static int forget_range(int first, int last)
{
	if (shim_last_set >= first && shim_last_set <= last)
		shim_last_set = -1;
	if (!shim_lock_if_owner())
		return 0;
	shim_forget(first, last);
	shim_unlock();
	return 1;
}

/* Returns the first of the shim's own descriptors in a range, or -1. The program must not close
 * them. */
static int find_first_own(unsigned first, unsigned last)
{
	unsigned known_len = atomic_load(&shim_known_len);
	int end = (int)(last < known_len ? last + 1 : known_len);

	for (int fd = (int)first; fd < end; fd++)
		if (shim_has_bits(fd, IS_PIPE))
			return fd;
	return -1;
}

/* Forgets before the close, since another thread may get the number at once. */
EXPORT HOT int close(int fd)
{
	/* The program does not know the shim's own descriptors: it closes every number. */
	if (shim_has_bits(fd, IS_PIPE)) {
		errno = EBADF;
		return -1;
	}
	if (shim_has_bits(fd, ANY_BIT))
		(void)forget_range(fd, fd);
	return ORIGINAL(close)(fd);
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	if ((unsigned)flags & CLOSE_RANGE_CLOEXEC || first > last || first > INT_MAX ||
	    !forget_range((int)first, last <= INT_MAX ? (int)last : INT_MAX))
		return ORIGINAL(close_range)(first, last, flags);
	for (int own; (own = find_first_own(first, last)) >= 0; first = (unsigned)own + 1) {
		if ((unsigned)own > first &&
		    ORIGINAL(close_range)(first, (unsigned)own - 1, flags) < 0)
			return -1;
		if ((unsigned)own == last)
			return 0;
	}
	return ORIGINAL(close_range)(first, last, flags);
}

EXPORT void closefrom(int first)
{
	int is_known = forget_range(first > 0 ? first : 0, INT_MAX);

	for (int own;
	     is_known && (own = find_first_own(first > 0 ? (unsigned)first : 0, INT_MAX)) >= 0;) {
		for (first = first > 0 ? first : 0; first < own; first++)
			(void)ORIGINAL(close)(first);
		first = own + 1;
	}
	ORIGINAL(closefrom)(first);
}

/* True when a copy of old may replace new. The pipe of new ends before, while the number is
 * still the socket's; its other state is forgotten after, since the call may fail. */
static int may_replace(int old, int new)
{
	if (shim_has_bits(new, IS_PIPE)) {
		errno = EBUSY;
		return 0;
	}
	if (old != new && shim_has_bits(new, HAS_PIPE) && fcntl(old, F_GETFD) >= 0)
		(void)forget_range(new, new);
	return 1;
}

EXPORT int dup2(int old, int new)
{
	int result = may_replace(old, new) ? ORIGINAL(dup2)(old, new) : -1;

	if (result >= 0 && old != new && shim_has_bits(new, ANY_BIT))
		(void)forget_range(new, new);
	return result;
}

EXPORT int dup3(int old, int new, int flags)
{
	int result = may_replace(old, new) ? ORIGINAL(dup3)(old, new, flags) : -1;

	if (result >= 0 && shim_has_bits(new, ANY_BIT))
		(void)forget_range(new, new);
	return result;
}

/* Waits for the end of a pipe. Returns 1 when one still runs, and the writer does not want to
 * wait. */
COLD static int wait_for_end(int fd, int is_patient)
{
	struct entry *entry = shim_find(fd);
	int is_running, own_fd;

	for (;;) {
		if (!shim_has_bits(fd, HAS_PIPE) || !shim_lock())
			return 0;
		shim_send_gathered(fd, entry);
		is_running = shim_is_pipe_running(fd, entry);
		own_fd = is_running ? entry->pipe->fd : -1;
		shim_unlock();
		if (!is_running)
			return 0;
		if (!is_patient && fcntl(fd, F_GETFL) & O_NONBLOCK)
			return 1;
		/* Another thread may read the answer. */
		(void)poll(&(struct pollfd){.fd = own_fd, .events = POLLIN}, 1, RECHECK_MS);
	}
}

/* Keeps writes out of a running pipe: they would land in the middle of it. A program that got
 * EAGAIN from sendfile does not write; if one does, it gets EAGAIN again. The socket may block
 * by now. */
COLD static int wait_for_turn(int fd)
{
	if (!wait_for_end(fd, 0))
		return 0;
	errno = EAGAIN;
	return 1;
}

INLINE int must_wait(int fd)
{
	return shim_has_bits(fd, HAS_PIPE) && wait_for_turn(fd);
}

EXPORT HOT ssize_t write(int fd, const void *bytes, size_t len)
{
	return must_wait(fd) ? -1 : ORIGINAL(write)(fd, bytes, len);
}

EXPORT HOT ssize_t writev(int fd, const struct iovec *parts, int count)
{
	return must_wait(fd) ? -1 : ORIGINAL(writev)(fd, parts, count);
}

EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
	return must_wait(fd) ? -1 : ORIGINAL(pwritev2)(fd, parts, count, offset, flags);
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
	return must_wait(fd) ? -1 : ORIGINAL(pwritev64v2)(fd, parts, count, offset, flags);
}

EXPORT ssize_t splice(int in_fd, off64_t *in_offset, int out_fd, off64_t *out_offset, size_t len,
		      unsigned flags)
{
	return must_wait(out_fd)
		       ? -1
		       : ORIGINAL(splice)(in_fd, in_offset, out_fd, out_offset, len, flags);
}

EXPORT HOT ssize_t send(int fd, const void *bytes, size_t len, int flags)
{
	return must_wait(fd) ? -1 : ORIGINAL(send)(fd, bytes, len, flags);
}

EXPORT HOT ssize_t sendto(int fd, const void *bytes, size_t len, int flags,
			  __CONST_SOCKADDR_ARG address, socklen_t address_len)
{
	return must_wait(fd) ? -1 : ORIGINAL(sendto)(fd, bytes, len, flags, address, address_len);
}

/* Whether a pipe of gathered parts, which the program believes to be sent, goes to it. */
static int has_gathered(int fd)
{
	struct entry *entry = shim_find(fd);
	int has_parts;

	if (!shim_has_bits(fd, HAS_PIPE) || !shim_lock())
		return 0;
	has_parts = entry->pipe && entry->pipe->gathered_bytes > 0;
	shim_unlock();
	return has_parts;
}

/* Finishes gathered bytes of sockets that are passed on: the receiver may write to one at once,
 * and they come first. */
COLD static void finish_passed_sockets(const struct msghdr *message)
{
	struct msghdr copy = *message;

	for (struct cmsghdr *part = CMSG_FIRSTHDR(&copy); part; part = CMSG_NXTHDR(&copy, part)) {
		size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		int fd;

		if (part->cmsg_len < CMSG_LEN(0) || part->cmsg_level != SOL_SOCKET ||
		    part->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
			if (has_gathered(fd))
				(void)wait_for_end(fd, 1);
		}
	}
}

INLINE void prepare_passing(const struct msghdr *message)
{
	if (atomic_load(&shim_known_len) > 0 && message && message->msg_controllen > 0)
		finish_passed_sockets(message);
}

EXPORT HOT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	prepare_passing(message);
	return must_wait(fd) ? -1 : ORIGINAL(sendmsg)(fd, message, flags);
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags)
{
	for (unsigned i = 0; messages && i < count; i++)
		prepare_passing(&messages[i].msg_hdr);
	return must_wait(fd) ? -1 : ORIGINAL(sendmmsg)(fd, messages, count, flags);
}

/* Cancels the pipe: the program does not want the rest of its bytes, unless it believes them to be
 * sent. */
EXPORT int shutdown(int fd, int how)
{
	struct entry *entry = shim_find(fd);

	if (how != SHUT_RD && shim_has_bits(fd, HAS_PIPE) && shim_lock()) {
		shim_send_gathered(fd, entry);
		if (shim_is_pipe_running(fd, entry) && entry->pipe->gathered_bytes) {
			int is_in_set = entry->pipe->set >= 0;

			entry->pipe->is_shut = 1;
			shim_unlock();
			if (!is_in_set)
				(void)wait_for_end(fd, 1);
			return how == SHUT_RDWR ? ORIGINAL(shutdown)(fd, SHUT_RD) : 0;
		}
		if (shim_is_pipe_running(fd, entry)) {
			shim_note_refusal(entry, &entry->pipe->ends, MILLRACE_FLOW_CLOSED);
			shim_unmask_output(fd, entry);
			shim_drop_pipe(entry);
		}
		shim_unlock();
	}
	return ORIGINAL(shutdown)(fd, how);
}

/* Notes a socket option for the end of the pipe. Returns 1 when it is not to be set now. */
COLD static int defer_option(int fd, int name, int value)
{
	struct entry *entry = shim_find(fd);
	int is_deferred = 0;

	if (!shim_lock())
		return 0;
	if (shim_is_pipe_running(fd, entry) && name == TCP_CORK) {
		entry->pipe->cork = value != 0;
		is_deferred = 1;
	} else if (shim_is_pipe_running(fd, entry)) {
		entry->pipe->nodelay = value != 0;
	}
	shim_unlock();
	return is_deferred;
}

EXPORT HOT int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	if (shim_has_bits(fd, HAS_PIPE) && level == IPPROTO_TCP &&
	    (name == TCP_CORK || name == TCP_NODELAY) && value && len >= sizeof(int) &&
	    defer_option(fd, name, *(const int *)value))
		return 0;
	return ORIGINAL(setsockopt)(fd, level, name, value, len);
}
