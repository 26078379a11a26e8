/* Calls that mean something for a descriptor's pipe: it is closed, or written to by other means. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4u
#endif

#define ANY (~0u)

APART static void forget(int first, int last)
{
	if (!shim_lock_own())
		return;
	shim_forget(first, last);
	shim_unlock();
}

/* Before, since another thread may get the number at once. */
EXPORT int close(int fd)
{
	/* Of our own a program knows nothing: it closes all that there are. */
	if (shim_has(fd, IS_PIPE)) {
		errno = EBADF;
		return -1;
	}
	if (shim_has(fd, ANY))
		forget(fd, fd);
	return NEXT(close)(fd);
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	if (!((unsigned)flags & CLOSE_RANGE_CLOEXEC) && first <= last && first <= INT_MAX)
		forget((int)first, last <= INT_MAX ? (int)last : INT_MAX);
	return NEXT(close_range)(first, last, flags);
}

EXPORT void closefrom(int first)
{
	forget(first > 0 ? first : 0, INT_MAX);
	NEXT(closefrom)(first);
}

/* True when a copy of old may take the place of new. Its pipe ends before, while the number is still the
 * socket's; what else is known of it is forgotten after, since the call may fail. */
static int may_replace(int old, int new)
{
	if (shim_has(new, IS_PIPE)) {
		errno = EBUSY;
		return 0;
	}
	if (old != new && shim_has(new, HAS_PIPE) && fcntl(old, F_GETFD) >= 0)
		forget(new, new);
	return 1;
}

EXPORT int dup2(int old, int new)
{
	int result = may_replace(old, new) ? NEXT(dup2)(old, new) : -1;

	if (result >= 0 && old != new && shim_has(new, ANY))
		forget(new, new);
	return result;
}

EXPORT int dup3(int old, int new, int flags)
{
	int result = may_replace(old, new) ? NEXT(dup3)(old, new, flags) : -1;

	if (result >= 0 && shim_has(new, ANY))
		forget(new, new);
	return result;
}

/* What is written during a pipe would come in the middle of it. A program that got EAGAIN from sendfile
 * does not do it; if one does, it gets EAGAIN again. */
APART static int wait_its_turn(int fd)
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
		if (fcntl(fd, F_GETFL) & O_NONBLOCK)
			break;
		/* It may block by now. */
		(void)poll(&(struct pollfd){.fd = own_fd, .events = POLLIN}, 1, -1);
	}
	errno = EAGAIN;
	return 1;
}

static int must_wait(int fd)
{
	return shim_has(fd, HAS_PIPE) && wait_its_turn(fd);
}

EXPORT ssize_t write(int fd, const void *bytes, size_t len)
{
	return must_wait(fd) ? -1 : NEXT(write)(fd, bytes, len);
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count)
{
	return must_wait(fd) ? -1 : NEXT(writev)(fd, parts, count);
}

EXPORT ssize_t send(int fd, const void *bytes, size_t len, int flags)
{
	return must_wait(fd) ? -1 : NEXT(send)(fd, bytes, len, flags);
}

EXPORT ssize_t sendto(int fd, const void *bytes, size_t len, int flags, __CONST_SOCKADDR_ARG address,
		      socklen_t address_len)
{
	return must_wait(fd) ? -1 : NEXT(sendto)(fd, bytes, len, flags, address, address_len);
}

EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return must_wait(fd) ? -1 : NEXT(sendmsg)(fd, message, flags);
}

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags)
{
	return must_wait(fd) ? -1 : NEXT(sendmmsg)(fd, messages, count, flags);
}

/* The rest of the bytes is not wanted, if the program does not believe them to be sent. */
EXPORT int shutdown(int fd, int how)
{
	struct entry *entry = shim_find(fd);

	if (how != SHUT_RD && shim_has(fd, HAS_PIPE) && shim_lock()) {
		shim_send_gathered(fd, entry);
		if (shim_pipe_runs(fd, entry) && entry->pipe->gathered) {
			entry->pipe->is_shut = 1;
			shim_unlock();
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

/* 1 when it is kept for the end of the pipe and is not to be set now. */
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

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	if (level == IPPROTO_TCP && (name == TCP_CORK || name == TCP_NODELAY) && value &&
	    len >= sizeof(int) && shim_has(fd, HAS_PIPE) && keep_option(fd, name, *(const int *)value))
		return 0;
	return NEXT(setsockopt)(fd, level, name, value, len);
}
