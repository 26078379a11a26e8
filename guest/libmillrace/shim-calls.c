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

#define ANY (~0u)
/* Period in which a wait for a pipe's end checks whether another thread has read the answer. */
#define LOOK_AGAIN_MS 50

/* Forgets descriptors. Returns 0 when none of them has state. */
APART static int forget(int first, int last)
{
	if (shim_waited_in >= first && shim_waited_in <= last)
		shim_waited_in = -1;
	if (!shim_lock_own())
		return 0;
	shim_forget(first, last);
	shim_unlock();
	return 1;
}

/* Returns the first of the shim's own descriptors in a range, or -1. The program must not close
 * them. */
static int first_own(unsigned first, unsigned last)
{
	unsigned known = atomic_load(&shim_known);
	int end = (int)(last < known ? last + 1 : known);

	for (int fd = (int)first; fd < end; fd++)
		if (shim_has(fd, IS_PIPE))
			return fd;
	return -1;
}

/* Forgets before the close, since another thread may get the number at once. */
EXPORT HOT int close(int fd)
{
	/* The program does not know the shim's own descriptors: it closes every number. */
	if (shim_has(fd, IS_PIPE)) {
		errno = EBADF;
		return -1;
	}
	if (shim_has(fd, ANY))
		(void)forget(fd, fd);
	return NEXT(close)(fd);
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	if ((unsigned)flags & CLOSE_RANGE_CLOEXEC || first > last || first > INT_MAX ||
	    !forget((int)first, last <= INT_MAX ? (int)last : INT_MAX))
		return NEXT(close_range)(first, last, flags);
	for (int own; (own = first_own(first, last)) >= 0; first = (unsigned)own + 1) {
		if ((unsigned)own > first && NEXT(close_range)(first, (unsigned)own - 1, flags) < 0)
			return -1;
		if ((unsigned)own == last)
			return 0;
	}
	return NEXT(close_range)(first, last, flags);
}

EXPORT void closefrom(int first)
{
	int is_known = forget(first > 0 ? first : 0, INT_MAX);

	for (int own;
	     is_known && (own = first_own(first > 0 ? (unsigned)first : 0, INT_MAX)) >= 0;) {
		for (first = first > 0 ? first : 0; first < own; first++)
			(void)NEXT(close)(first);
		first = own + 1;
	}
	NEXT(closefrom)(first);
}

/* True when a copy of old may replace new. The pipe of new ends before, while the number is
 * still the socket's; its other state is forgotten after, since the call may fail. */
static int may_replace(int old, int new)
{
	if (shim_has(new, IS_PIPE)) {
		errno = EBUSY;
		return 0;
	}
	if (old != new && shim_has(new, HAS_PIPE) && fcntl(old, F_GETFD) >= 0)
		(void)forget(new, new);
	return 1;
}

EXPORT int dup2(int old, int new)
{
	int result = may_replace(old, new) ? NEXT(dup2)(old, new) : -1;

	if (result >= 0 && old != new && shim_has(new, ANY))
		(void)forget(new, new);
	return result;
}

EXPORT int dup3(int old, int new, int flags)
{
	int result = may_replace(old, new) ? NEXT(dup3)(old, new, flags) : -1;

	if (result >= 0 && shim_has(new, ANY))
		(void)forget(new, new);
	return result;
}

/* Waits for the end of a pipe. Returns 1 when one still runs, and the writer does not want to
 * wait. */
APART static int wait_for_end(int fd, int is_patient)
{
	struct entry *entry = shim_find(fd);
	int runs, own_fd;

	for (;;) {
		if (!shim_has(fd, HAS_PIPE) || !shim_lock())
			return 0;
		shim_send_gathered(fd, entry);
		runs = shim_pipe_runs(fd, entry);
		own_fd = runs ? entry->pipe->fd : -1;
		shim_unlock();
		if (!runs)
			return 0;
		if (!is_patient && fcntl(fd, F_GETFL) & O_NONBLOCK)
			return 1;
		/* Another thread may read the answer. */
		(void)poll(&(struct pollfd){.fd = own_fd, .events = POLLIN}, 1, LOOK_AGAIN_MS);
	}
}

/* Keeps writes out of a running pipe: they would land in the middle of it. A program that got
 * EAGAIN from sendfile does not write; if one does, it gets EAGAIN again. The socket may block
 * by now. */
APART static int wait_its_turn(int fd)
{
	if (!wait_for_end(fd, 0))
		return 0;
	errno = EAGAIN;
	return 1;
}

INLINE int must_wait(int fd)
{
	return shim_has(fd, HAS_PIPE) && wait_its_turn(fd);
}

EXPORT HOT ssize_t write(int fd, const void *bytes, size_t len)
{
	return must_wait(fd) ? -1 : NEXT(write)(fd, bytes, len);
}

EXPORT HOT ssize_t writev(int fd, const struct iovec *parts, int count)
{
	return must_wait(fd) ? -1 : NEXT(writev)(fd, parts, count);
}

EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
	return must_wait(fd) ? -1 : NEXT(pwritev2)(fd, parts, count, offset, flags);
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
	return must_wait(fd) ? -1 : NEXT(pwritev64v2)(fd, parts, count, offset, flags);
}

EXPORT ssize_t splice(int in_fd, off64_t *in_offset, int out_fd, off64_t *out_offset, size_t len,
		      unsigned flags)
{
	return must_wait(out_fd)
		       ? -1
		       : NEXT(splice)(in_fd, in_offset, out_fd, out_offset, len, flags);
}

EXPORT HOT ssize_t send(int fd, const void *bytes, size_t len, int flags)
{
	return must_wait(fd) ? -1 : NEXT(send)(fd, bytes, len, flags);
}

EXPORT HOT ssize_t sendto(int fd, const void *bytes, size_t len, int flags,
			  __CONST_SOCKADDR_ARG address, socklen_t address_len)
{
	return must_wait(fd) ? -1 : NEXT(sendto)(fd, bytes, len, flags, address, address_len);
}

/* Whether a pipe of gathered parts, which the program believes to be sent, goes to it. */
static int has_gathered(int fd)
{
	struct entry *entry = shim_find(fd);
	int is_so;

	if (!shim_has(fd, HAS_PIPE) || !shim_lock())
		return 0;
	is_so = entry->pipe && entry->pipe->gathered > 0;
	shim_unlock();
	return is_so;
}

/* Finishes gathered bytes of sockets that are passed on: the receiver may write to one at once,
 * and they come first. */
APART static void finish_passed(const struct msghdr *message)
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

INLINE void before_passing(const struct msghdr *message)
{
	if (atomic_load(&shim_known) > 0 && message && message->msg_controllen > 0)
		finish_passed(message);
}

EXPORT HOT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	before_passing(message);
	return must_wait(fd) ? -1 : NEXT(sendmsg)(fd, message, flags);
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags)
{
	for (unsigned i = 0; messages && i < count; i++)
		before_passing(&messages[i].msg_hdr);
	return must_wait(fd) ? -1 : NEXT(sendmmsg)(fd, messages, count, flags);
}

/* The rest of the bytes is not wanted, unless the program believes it to be sent. */
EXPORT int shutdown(int fd, int how)
{
	struct entry *entry = shim_find(fd);

	if (how != SHUT_RD && shim_has(fd, HAS_PIPE) && shim_lock()) {
		shim_send_gathered(fd, entry);
		if (shim_pipe_runs(fd, entry) && entry->pipe->gathered) {
			int is_heard = entry->pipe->set >= 0;

			entry->pipe->is_shut = 1;
			shim_unlock();
			if (!is_heard)
				(void)wait_for_end(fd, 1);
			return how == SHUT_RDWR ? NEXT(shutdown)(fd, SHUT_RD) : 0;
		}
		if (shim_pipe_runs(fd, entry)) {
			shim_refused(entry, &entry->pipe->ends, MILLRACE_FLOW_CLOSED);
			shim_unmask(fd, entry);
			shim_drop_pipe(entry);
		}
		shim_unlock();
	}
	return NEXT(shutdown)(fd, how);
}

/* Keeps a socket option for the end of the pipe. Returns 1 when it is not to be set now. */
APART static int keep_option(int fd, int name, int value)
{
	struct entry *entry = shim_find(fd);
	int is_kept = 0;

	if (!shim_lock())
		return 0;
	if (shim_pipe_runs(fd, entry) && name == TCP_CORK) {
		entry->pipe->cork = value != 0;
		is_kept = 1;
	} else if (shim_pipe_runs(fd, entry)) {
		entry->pipe->nodelay = value != 0;
	}
	shim_unlock();
	return is_kept;
}

EXPORT HOT int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	if (shim_has(fd, HAS_PIPE) && level == IPPROTO_TCP &&
	    (name == TCP_CORK || name == TCP_NODELAY) && value && len >= sizeof(int) &&
	    keep_option(fd, name, *(const int *)value))
		return 0;
	return NEXT(setsockopt)(fd, level, name, value, len);
}
