/* libmillrace-preload.so: turns sendfile(2) of an unmodified program into a pipe where that
 * pays.
 *
 * A pipe is tried for a regular file of the break-even size or more (shim-least.c) and a TCP
 * socket, which blocks or is in an epoll set (see shim.h), or another file (shim-copy.c). All
 * other calls go to the original, so that the program sees its usual results. A pipe that moved
 * less than the count is a short count, which sendfile(2) has too. Parts of a file that are too
 * small for a pipe may be sent together (shim-gather.c). */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

/* Longest time in which a program gets no event of its socket. Servers close connections on
 * which nothing was written for some ten seconds or more; so the bytes of a slow client are
 * reported in parts. */
#define PART_MS 5000
/* Calls in vain after which each further one pauses: such a program does not wait for the epoll
 * set. */
#define MANY_ASKED 16
#define ASKED_PAUSE_MS 1

/* Arguments of a sendfile call, and facts about its descriptors. */
struct call {
	int out_fd;
	int in_fd;
	off64_t *offset;
	size_t count;
	struct stat in;
	struct stat out;
	int is_little; /* the rest of the file is too small to pay */
};

enum socket_kind { NO_PIPE, BLOCKS, DOES_NOT_BLOCK };

/* Whether both sides may still send, which the agent requires. Checked here, since a program
 * that got EAGAIN while the agent was asked would see its client's end of stream first, and give
 * up. */
static int is_established(int fd)
{
	/* First member of struct tcp_info. */
	uint8_t state = 0;
	socklen_t len = sizeof(state);

	return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &state, &len) == 0 && state == TCP_ESTABLISHED;
}

/* A blocking socket may wait for ever in sendfile(2): so may a pipe. */
static enum socket_kind kind_of(int fd)
{
	int protocol = 0;
	socklen_t len = sizeof(protocol);
	struct timeval timeout = {0};
	int flags;

	if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) < 0 ||
	    protocol != IPPROTO_TCP ||
	    !is_established(fd))
		return NO_PIPE;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return NO_PIPE;
	if (flags & O_NONBLOCK)
		return DOES_NOT_BLOCK;
	len = sizeof(timeout);
	if (getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, &len) < 0 || timeout.tv_sec != 0 ||
	    timeout.tv_usec != 0)
		return NO_PIPE;
	return BLOCKS;
}

/* Takes the bytes moved by a finished pipe. The program that got EAGAIN repeats the same call;
 * if it makes another, or the number of bytes moved is not known, the connection cannot go on. */
static ssize_t take_moved(const struct call *call, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	size_t len = call->count < (size_t)pipe->moved ? call->count : (size_t)pipe->moved;

	if (pipe->lost || call->in.st_dev != pipe->ends.in_dev ||
	    call->in.st_ino != pipe->ends.in_ino ||
	    shim_position(call->in_fd, call->offset) != pipe->at) {
		errno = EIO;
		return -1;
	}
	pipe->at += (int64_t)len;
	pipe->moved -= (int64_t)len;
	shim_move_position(call->in_fd, call->offset, pipe->at);
	if (pipe->moved == 0) {
		/* A program with edge-triggered events may take a short count for a full buffer,
		 * and wait. */
		if (len < call->count && (entry->events & (EPOLLET | EPOLLONESHOT)) == EPOLLET)
			shim_unmask(call->out_fd, entry);
		shim_drop_pipe(entry);
	}
	return (ssize_t)len;
}

/* Part of a file that a call sends. The call must be known to have a file and a socket. */
static struct shim_part part_of(const struct call *call)
{
	struct shim_part part = {.out_fd = call->out_fd, .in_fd = call->in_fd};

	part.ends = shim_ends_of(&call->in, &call->out);
	part.at = shim_position(call->in_fd, call->offset);
	part.left = part.at < 0 ? 0 : call->in.st_size - part.at;
	part.len = part.left < (int64_t)call->count ? part.left : (int64_t)call->count;
	return part;
}

/* Adds a part to the gathered ones, or begins to gather. Needs the lock. Returns sendfile's
 * result, or 0. */
static ssize_t gather(struct call *call, struct entry *entry)
{
	struct shim_part part;
	int64_t taken;

	if (fstat(call->in_fd, &call->in) < 0 || !S_ISREG(call->in.st_mode))
		return 0;
	part = part_of(call);
	taken = shim_gather(&part, entry);
	if (taken > 0)
		shim_move_position(call->in_fd, call->offset, part.at + taken);
	return (ssize_t)taken;
}

static ssize_t again(void)
{
	errno = EAGAIN;
	return -1;
}

/* Handles a call during or after a pipe. Needs the lock. Returns 1 with sendfile's result. */
static int go_on(struct call *call, struct entry *entry, ssize_t *result)
{
	if (!entry->pipe || fstat(call->out_fd, &call->out) < 0)
		return 0;
	/* Another socket has the number: the first was closed without a call that the shim sees. */
	if (entry->pipe->ends.out_ino != call->out.st_ino)
		shim_forget(call->out_fd, call->out_fd);
	if (entry->pipe && entry->pipe->file >= 0) {
		*result = gather(call, entry);
		if (*result > 0)
			return 1;
		shim_send_gathered(call->out_fd, entry);
	}
	if (shim_pipe_runs(call->out_fd, entry)) {
		entry->pipe->asked++;
		*result = again();
		return 1;
	}
	if (!entry->pipe || fstat(call->in_fd, &call->in) < 0)
		return 0;
	*result = take_moved(call, entry);
	return 1;
}

/* Returns true once after a pipe that moved nothing. */
static int is_originals_turn(struct entry *entry)
{
	int once = entry->once;

	entry->once = 0;
	return once;
}

int shim_uncork(int fd)
{
	int cork = 0;
	socklen_t len = sizeof(cork);

	if (getsockopt(fd, IPPROTO_TCP, TCP_CORK, &cork, &len) < 0 || !cork)
		return -1;
	(void)syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_CORK, &(int){0}, sizeof(int));
	return 1;
}

static void cork_again(int fd, int cork)
{
	if (cork >= 0)
		(void)syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_CORK, &cork, sizeof(cork));
}

/* Waits for a pipe whose end the epoll set cannot report, as the set is full. */
static void wait_for(int fd, struct entry *entry)
{
	while (shim_pipe_runs(fd, entry))
		(void)poll(&(struct pollfd){.fd = entry->pipe->fd, .events = POLLIN}, 1, -1);
}

/* Begins a pipe that runs beside the program. Needs the lock. 1: it runs; 0: the original is to
 * be called; -1: it is over already. */
static int begin(const struct call *call, struct entry *entry)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	struct shim_ends ends = shim_ends_of(&call->in, &call->out);
	struct shim_pipe *pipe = shim_new_pipe(&ends, shim_position(call->in_fd, call->offset));

	if (!pipe)
		return 0;
	/* The set no longer has the socket: that was closed without a call that the shim sees. */
	if (pipe->at < 0 || shim_mask(call->out_fd, entry) < 0) {
		shim_spare_pipe(pipe);
		return 0;
	}
	options.in_offset = pipe->at;
	options.timeout_ms = PART_MS;
	pipe->cork = shim_uncork(call->out_fd);
	entry->pipe = pipe;
	entry->pipes++;
	pipe->fd = millrace_pipe_start(call->out_fd, call->in_fd, call->count, &options);
	if (pipe->fd < 0) {
		shim_refused(entry, &pipe->ends, millrace_reason());
		cork_again(call->out_fd, pipe->cork);
		shim_unmask(call->out_fd, entry);
		shim_drop_pipe(entry);
		return 0;
	}
	atomic_fetch_or(&entry->bits, HAS_PIPE);
	shim_mark_own(pipe->fd, call->out_fd);
	if (shim_watch(call->out_fd, entry) == 0)
		return 1;
	wait_for(call->out_fd, entry);
	return -1;
}

/* Begins a pipe to a non-blocking socket. Needs the lock. Returns 1 with sendfile's result, or
 * 0. */
static int pipe_beside(struct call *call, struct entry *entry, ssize_t *result)
{
	if ((atomic_load(&entry->bits) & (IN_SET | IN_MORE)) != IN_SET)
		return 0;
	switch (begin(call, entry)) {
	case 0:
		return 0;
	case 1:
		*result = again();
		return 1;
	default:
		return go_on(call, entry, result);
	}
}

/* Runs a pipe to a blocking socket. Returns 1 with sendfile's result, or 0: nothing was moved. */
static int pipe_and_wait(const struct call *call, ssize_t *result)
{
	struct shim_ends ends = shim_ends_of(&call->in, &call->out);
	int64_t at = shim_position(call->in_fd, call->offset);
	int64_t moved;
	int reason;

	moved = millrace_pipe(call->out_fd, call->in_fd, call->offset ? &at : NULL, call->count);
	reason = millrace_reason();
	if (moved > 0) {
		if (call->offset)
			*call->offset = at;
		*result = (ssize_t)moved;
		return 1;
	}
	if (shim_lock()) {
		shim_refused(shim_make(call->out_fd), &ends, reason);
		shim_unlock();
	}
	*result = -1;
	return !millrace_may_fall_back(reason);
}

static int pipe_to_socket(struct call *call, ssize_t *result)
{
	struct shim_ends ends = shim_ends_of(&call->in, &call->out);
	enum socket_kind kind = kind_of(call->out_fd);
	struct entry *entry;
	int is_done = 0;
	int may_ask;

	if (kind == NO_PIPE || !shim_lock())
		return 0;
	entry = shim_find(call->out_fd);
	may_ask = shim_may_ask(entry, &ends);
	if (may_ask && entry && kind == DOES_NOT_BLOCK)
		is_done = pipe_beside(call, entry, result);
	shim_unlock();
	if (may_ask && kind == BLOCKS)
		is_done = pipe_and_wait(call, result);
	return is_done;
}

/* Gathers a part that is too small for a pipe, of a file that is not. Returns 1 with sendfile's
 * result, or 0. */
static int try_gathering(struct call *call, ssize_t *result)
{
	struct entry *entry = shim_find(call->out_fd);
	struct shim_part part = part_of(call);
	int is_possible;

	if (!S_ISSOCK(call->out.st_mode) || !entry || kind_of(call->out_fd) != DOES_NOT_BLOCK ||
	    !shim_lock())
		return 0;
	is_possible = !entry->pipe &&
		      (atomic_load(&entry->bits) & (IN_SET | IN_MORE)) == IN_SET &&
		      shim_may_ask(entry, &part.ends);
	*result = is_possible ? gather(call, entry) : 0;
	shim_unlock();
	if (!is_possible || *result > 0)
		return is_possible;
	/* The original may wait for a disk. The next part begins where it ends. */
	*result = NEXT(sendfile64)(call->out_fd, call->in_fd, call->offset, call->count);
	if (shim_lock()) {
		shim_sent(&part, entry, *result);
		shim_unlock();
	}
	return 1;
}

/* Tries a pipe for a call. Returns 1 with sendfile's result, or 0. */
static int try_pipe(struct call *call, ssize_t *result)
{
	int64_t at, left;

	if (fstat(call->in_fd, &call->in) < 0 || !S_ISREG(call->in.st_mode))
		return 0;
	at = shim_position(call->in_fd, call->offset);
	left = call->in.st_size - at;
	call->is_little = left <= 0 || !shim_pays((uint64_t)left);
	if (at < 0 || call->is_little || fstat(call->out_fd, &call->out) < 0)
		return 0;
	/* Programs may ask for more bytes than the file has. */
	if (!shim_pays((uint64_t)left < call->count ? (uint64_t)left : call->count))
		return try_gathering(call, result);
	if (S_ISREG(call->out.st_mode)) {
		struct shim_copy copy = {call->in_fd, call->out_fd, call->offset, NULL,
					 call->count, call->in,	    call->out};

		return shim_copy(&copy, result);
	}
	return S_ISSOCK(call->out.st_mode) && pipe_to_socket(call, result);
}

/* Pauses a program that repeats its call: in poll(2), where that reports room in the socket, or
 * not at all. */
static void pause_if_asked_often(int asked, int own_fd)
{
	int error = errno;

	if (asked >= MANY_ASKED)
		(void)poll(&(struct pollfd){.fd = own_fd, .events = POLLIN}, 1, ASKED_PAUSE_MS);
	errno = error;
}

/* Goes on with an earlier pipe or part. Returns 1 with sendfile's result, 0, or -1: it is the
 * original's turn. */
static int try_going_on(struct call *call, ssize_t *result)
{
	struct entry *entry = shim_find(call->out_fd);
	int asked, own_fd, is_done;

	if (!shim_has(call->out_fd, HAS_PIPE | REFUSED) || !shim_lock())
		return 0;
	is_done = go_on(call, entry, result);
	if (!is_done && is_originals_turn(entry))
		is_done = -1;
	asked = entry->pipe ? entry->pipe->asked : 0;
	own_fd = entry->pipe ? entry->pipe->fd : -1;
	shim_unlock();
	if (own_fd >= 0)
		pause_if_asked_often(asked, own_fd);
	return is_done;
}

/* Notes where a part of `sent` bytes has ended. A file with too few bytes left is marked, for
 * this part and those behind it: one check is enough. */
INLINE void note_end(struct entry *entry, int in_fd, off64_t end, ssize_t sent, int is_little)
{
	int of_little = ~in_fd;

	/* Without a branch. */
	is_little |= (atomic_load_explicit(&entry->last_in, memory_order_relaxed) == of_little) &
		     (atomic_load_explicit(&entry->last_end, memory_order_relaxed) == end - sent);
	atomic_store_explicit(&entry->last_in, is_little ? of_little : in_fd, memory_order_relaxed);
	atomic_store_explicit(&entry->last_end, end, memory_order_relaxed);
}

/* Whether a call may go on with a file although it is too small for a pipe. Of a first part
 * nothing is checked. */
INLINE int is_worth_a_look(const struct entry *entry, int in_fd, const off64_t *offset,
			   size_t count)
{
	static const off64_t nowhere = -1;
	const off64_t *at = offset ? offset : &nowhere;

	/* Without a branch. */
	return (offset == NULL) | shim_pays(count) |
	       ((atomic_load_explicit(&entry->last_in, memory_order_relaxed) == in_fd) &
		(atomic_load_explicit(&entry->last_end, memory_order_relaxed) == *at));
}

/* Handles calls that may not be the original's alone: an earlier pipe or part exists, or
 * is_worth. */
APART static ssize_t look(int out_fd, int in_fd, off64_t *offset, size_t count, int is_worth)
{
	int error = errno;
	ssize_t result = 0;
	struct call call;
	int is_done;

	call.out_fd = out_fd;
	call.in_fd = in_fd;
	call.offset = offset;
	call.count = count < SHIM_MAX_COUNT ? count : SHIM_MAX_COUNT;
	call.is_little = 0;
	is_done = try_going_on(&call, &result);
	if (is_done == 0 && is_worth)
		is_done = try_pipe(&call, &result);
	if (is_done <= 0) {
		errno = error;
		result = NEXT(sendfile64)(out_fd, in_fd, offset, count);
	} else if (result >= 0) {
		errno = error;
	}
	if (offset && result > 0 && count >= atomic_load(&shim_gate_bytes) &&
	    shim_has(out_fd, IN_SET))
		note_end(shim_look_up(out_fd), in_fd, *offset, result, call.is_little);
	return result;
}

/* Whether a file has too few bytes left for a pipe of gathered parts: then no other check is
 * needed. Inlined, and by the kernel's own call: most files that are sent in parts are small. */
INLINE int has_little_left(int in_fd, off64_t at, size_t count)
{
	int64_t least = (int64_t)atomic_load_explicit(&shim_least_bytes, memory_order_relaxed);
	struct stat in;

	return (int64_t)count < least && syscall(SYS_fstat, in_fd, &in) == 0 &&
	       in.st_size - at < least;
}

EXPORT HOT_FIRST ssize_t sendfile64(int out_fd, int in_fd, off64_t *offset, size_t count)
{
	struct entry *entry = shim_look_up(out_fd);
	int is_large = count >= atomic_load_explicit(&shim_gate_bytes, memory_order_relaxed);
	int is_worth = is_large && is_worth_a_look(entry, in_fd, offset, count);
	int is_little = 0;
	ssize_t result;

	if (is_worth | (shim_bits(entry, HAS_PIPE | REFUSED) != 0)) {
		is_little = offset && !shim_bits(entry, HAS_PIPE | REFUSED) &&
			    has_little_left(in_fd, *offset, count);
		if (!is_little)
			return look(out_fd, in_fd, offset, count, is_worth);
	}
	result = NEXT(sendfile64)(out_fd, in_fd, offset, count);
	if (is_large & (result > 0) & (shim_bits(entry, IN_SET) != 0))
		note_end(entry, in_fd, *offset, result, is_little);
	return result;
}

EXPORT HOT ssize_t sendfile(int out_fd, int in_fd, off_t *offset, size_t count)
{
	off64_t at;
	ssize_t result;

	if (sizeof(off_t) == sizeof(off64_t))
		return sendfile64(out_fd, in_fd, (off64_t *)offset, count);
	/* Where off_t has 32 bits, the files that it can address are no longer. */
	at = offset ? *offset : 0;
	result = sendfile64(out_fd, in_fd, offset ? &at : NULL, count);
	if (offset)
		*offset = (off_t)at;
	return result;
}
