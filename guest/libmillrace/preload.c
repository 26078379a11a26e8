/* libmillrace-preload.so: turns sendfile(2) of an unmodified program into a pipe where that
 * pays.
 *
 * A pipe is tried for a regular file of the break-even size or more (shim-break-even.c) and a TCP
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

/* Time limit of a pipe, during which a program gets no event of its socket. Servers close
 * connections on which nothing was written for some ten seconds or more; so the bytes of a slow
 * client are reported in parts. */
#define PIPE_TIMEOUT_MS 5000
/* Calls in vain after which each further call pauses: such a program does not wait for the epoll
 * set. */
#define MAX_RETRIES 16
#define RETRY_PAUSE_MS 1

/* Arguments of a sendfile call, and facts about its descriptors. */
struct call {
	int out_fd;
	int in_fd;
	off64_t *offset;
	size_t count;
	struct stat in;
	struct stat out;
	int is_rest_small; /* a pipe of the rest of the file does not pay */
};

enum socket_kind { SOCKET_UNSUITABLE, SOCKET_BLOCKING, SOCKET_NONBLOCKING };

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

/* Classifies a socket. A blocking one may wait for ever in sendfile(2): so may a pipe. */
static enum socket_kind get_socket_kind(int fd)
{
	int protocol = 0;
	socklen_t len = sizeof(protocol);
	struct timeval timeout = {0};
	int flags;

	if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) < 0 ||
	    protocol != IPPROTO_TCP ||
	    !is_established(fd))
		return SOCKET_UNSUITABLE;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return SOCKET_UNSUITABLE;
	if (flags & O_NONBLOCK)
		return SOCKET_NONBLOCKING;
	len = sizeof(timeout);
	if (getsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, &len) < 0 || timeout.tv_sec != 0 ||
	    timeout.tv_usec != 0)
		return SOCKET_UNSUITABLE;
	return SOCKET_BLOCKING;
}

/* Takes the bytes moved by a finished pipe. The program that got EAGAIN repeats the same call;
 * if it makes another, or the number of bytes moved is not known, the connection cannot go on. */
static ssize_t take_result(const struct call *call, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	size_t moved = (size_t)pipe->moved_bytes;
	size_t len = call->count < moved ? call->count : moved;

	if (pipe->is_lost || call->in.st_dev != pipe->ends.in_dev ||
	    call->in.st_ino != pipe->ends.in_ino ||
	    shim_get_position(call->in_fd, call->offset) != pipe->start) {
		errno = EIO;
		return -1;
	}
	pipe->start += (int64_t)len;
	pipe->moved_bytes -= (int64_t)len;
	shim_move_position(call->in_fd, call->offset, pipe->start);
	if (pipe->moved_bytes == 0) {
		/* A program with edge-triggered events may take a short count for a full buffer,
		 * and wait. */
		if (len < call->count && (entry->events & (EPOLLET | EPOLLONESHOT)) == EPOLLET)
			shim_unmask_output(call->out_fd, entry);
		shim_drop_pipe(entry);
	}
	return (ssize_t)len;
}

/* Makes the part of a file that a call sends. The call must have a file and a socket. */
static struct shim_part make_part(const struct call *call)
{
	struct shim_part part = {.out_fd = call->out_fd, .in_fd = call->in_fd};

	part.ends = shim_get_ends(&call->in, &call->out);
	part.start = shim_get_position(call->in_fd, call->offset);
	part.remaining = part.start < 0 ? 0 : call->in.st_size - part.start;
	part.len = part.remaining < (int64_t)call->count ? part.remaining : (int64_t)call->count;
	return part;
}

/* Adds a part to the gathered ones, or begins to gather. Needs the lock. Returns sendfile's
 * result, or 0. */
static ssize_t gather_part(struct call *call, struct entry *entry)
{
	struct shim_part part;
	int64_t gathered;

	if (fstat(call->in_fd, &call->in) < 0 || !S_ISREG(call->in.st_mode))
		return 0;
	part = make_part(call);
	gathered = shim_gather(&part, entry);
	if (gathered > 0)
		shim_move_position(call->in_fd, call->offset, part.start + gathered);
	return (ssize_t)gathered;
}

static ssize_t fail_with_eagain(void)
{
	errno = EAGAIN;
	return -1;
}

/* Handles a call during or after a pipe. Needs the lock. Returns 1 with sendfile's result, or 0. */
static int continue_pipe(struct call *call, struct entry *entry, ssize_t *result)
{
	if (!entry->pipe || fstat(call->out_fd, &call->out) < 0)
		return 0;
	/* Another socket has the number: the first was closed without a call that the shim sees. */
	if (entry->pipe->ends.out_ino != call->out.st_ino)
		shim_forget(call->out_fd, call->out_fd);
	if (entry->pipe && entry->pipe->file_fd >= 0) {
		*result = gather_part(call, entry);
		if (*result > 0)
			return 1;
		shim_send_gathered(call->out_fd, entry);
	}
	if (shim_is_pipe_running(call->out_fd, entry)) {
		entry->pipe->retries++;
		*result = fail_with_eagain();
		return 1;
	}
	if (!entry->pipe || fstat(call->in_fd, &call->in) < 0)
		return 0;
	*result = take_result(call, entry);
	return 1;
}

/* Takes the mark for a call of the original. Returns true once after a pipe that moved nothing. */
static int take_original_turn(struct entry *entry)
{
	int use_original_once = entry->use_original_once;

	entry->use_original_once = 0;
	return use_original_once;
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

static void restore_cork(int fd, int cork)
{
	if (cork >= 0)
		(void)syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_CORK, &cork, sizeof(cork));
}

/* Waits for the end of a pipe that the epoll set cannot report, as the set is full. */
static void wait_for_pipe_end(int fd, struct entry *entry)
{
	while (shim_is_pipe_running(fd, entry))
		(void)poll(&(struct pollfd){.fd = entry->pipe->fd, .events = POLLIN}, 1, -1);
}

/* Begins a pipe that runs beside the program. Needs the lock. Returns 1 while it runs; 0 when the
 * original is to be called; -1 when it is over already. */
static int begin_pipe(const struct call *call, struct entry *entry)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	struct shim_ends ends = shim_get_ends(&call->in, &call->out);
	int64_t start = shim_get_position(call->in_fd, call->offset);
	struct shim_pipe *pipe = shim_make_pipe(&ends, start);

	if (!pipe)
		return 0;
	/* The set no longer has the socket: that was closed without a call that the shim sees. */
	if (pipe->start < 0 || shim_mask_output(call->out_fd, entry) < 0) {
		shim_recycle_pipe(pipe);
		return 0;
	}
	options.in_offset = pipe->start;
	options.timeout_ms = PIPE_TIMEOUT_MS;
	pipe->cork = shim_uncork(call->out_fd);
	entry->pipe = pipe;
	entry->pipe_generation++;
	pipe->fd = millrace_pipe_start(call->out_fd, call->in_fd, call->count, &options);
	if (pipe->fd < 0) {
		shim_note_refusal(entry, &pipe->ends, millrace_reason());
		restore_cork(call->out_fd, pipe->cork);
		shim_unmask_output(call->out_fd, entry);
		shim_drop_pipe(entry);
		return 0;
	}
	atomic_fetch_or(&entry->bits, HAS_PIPE);
	shim_mark_own(pipe->fd, call->out_fd);
	if (shim_watch_pipe(call->out_fd, entry) == 0)
		return 1;
	wait_for_pipe_end(call->out_fd, entry);
	return -1;
}

/* Begins a pipe to a non-blocking socket. Needs the lock. Returns 1 with sendfile's result, or
 * 0. */
static int begin_async_pipe(struct call *call, struct entry *entry, ssize_t *result)
{
	if ((atomic_load(&entry->bits) & (IN_SET | IN_MANY_SETS)) != IN_SET)
		return 0;
	switch (begin_pipe(call, entry)) {
	case 0:
		return 0;
	case 1:
		*result = fail_with_eagain();
		return 1;
	default:
		return continue_pipe(call, entry, result);
	}
}

/* Runs a pipe to a blocking socket. Returns 1 with sendfile's result, or 0: nothing was moved. */
static int run_pipe_and_wait(const struct call *call, ssize_t *result)
{
	struct shim_ends ends = shim_get_ends(&call->in, &call->out);
	int64_t position = shim_get_position(call->in_fd, call->offset);
	int64_t moved;
	int reason;

	moved = millrace_pipe(call->out_fd, call->in_fd, call->offset ? &position : NULL,
			      call->count);
	reason = millrace_reason();
	if (moved > 0) {
		if (call->offset)
			*call->offset = position;
		*result = (ssize_t)moved;
		return 1;
	}
	if (shim_lock()) {
		shim_note_refusal(shim_find_or_make(call->out_fd), &ends, reason);
		shim_unlock();
	}
	*result = -1;
	return !millrace_may_fall_back(reason);
}

static int try_socket_pipe(struct call *call, ssize_t *result)
{
	struct shim_ends ends = shim_get_ends(&call->in, &call->out);
	enum socket_kind kind = get_socket_kind(call->out_fd);
	struct entry *entry;
	int is_done = 0;
	int may_request;

	if (kind == SOCKET_UNSUITABLE || !shim_lock())
		return 0;
	entry = shim_find(call->out_fd);
	may_request = shim_may_request(entry, &ends);
	if (may_request && entry && kind == SOCKET_NONBLOCKING)
		is_done = begin_async_pipe(call, entry, result);
	shim_unlock();
	if (may_request && kind == SOCKET_BLOCKING)
		is_done = run_pipe_and_wait(call, result);
	return is_done;
}

/* Gathers a part that is too small for a pipe, of a file that is not. Returns 1 with sendfile's
 * result, or 0. */
static int try_gathering(struct call *call, ssize_t *result)
{
	struct entry *entry = shim_find(call->out_fd);
	struct shim_part part = make_part(call);
	int is_possible;

	if (!S_ISSOCK(call->out.st_mode) || !entry ||
	    get_socket_kind(call->out_fd) != SOCKET_NONBLOCKING || !shim_lock())
		return 0;
	is_possible = !entry->pipe &&
		      (atomic_load(&entry->bits) & (IN_SET | IN_MANY_SETS)) == IN_SET &&
		      shim_may_request(entry, &part.ends);
	*result = is_possible ? gather_part(call, entry) : 0;
	shim_unlock();
	if (!is_possible || *result > 0)
		return is_possible;
	/* The original may wait for a disk. The next part begins where it ends. */
	*result = ORIGINAL(sendfile64)(call->out_fd, call->in_fd, call->offset, call->count);
	if (shim_lock()) {
		shim_note_sent(&part, entry, *result);
		shim_unlock();
	}
	return 1;
}

/* Tries a pipe for a call. Returns 1 with sendfile's result, or 0. */
static int try_pipe(struct call *call, ssize_t *result)
{
	int64_t position, remaining;

	if (fstat(call->in_fd, &call->in) < 0 || !S_ISREG(call->in.st_mode))
		return 0;
	position = shim_get_position(call->in_fd, call->offset);
	remaining = call->in.st_size - position;
	call->is_rest_small = remaining <= 0 || !shim_pays((uint64_t)remaining);
	if (position < 0 || call->is_rest_small || fstat(call->out_fd, &call->out) < 0)
		return 0;
	/* Programs may ask for more bytes than the file has. */
	if (!shim_pays((uint64_t)remaining < call->count ? (uint64_t)remaining : call->count))
		return try_gathering(call, result);
	if (S_ISREG(call->out.st_mode)) {
		struct shim_copy copy = {call->in_fd, call->out_fd, call->offset, NULL,
					 call->count, call->in,	    call->out};

		return shim_copy(&copy, result);
	}
	return S_ISSOCK(call->out.st_mode) && try_socket_pipe(call, result);
}

/* Pauses a program that repeats its call without waiting for the set: perhaps it waits in poll(2),
 * which reports room in the socket at once. */
static void pause_if_retried_often(int retries, int own_fd)
{
	int error = errno;

	if (retries >= MAX_RETRIES)
		(void)poll(&(struct pollfd){.fd = own_fd, .events = POLLIN}, 1, RETRY_PAUSE_MS);
	errno = error;
}

/* Continues an earlier pipe or part. Returns 1 with sendfile's result; 0; or -1 when the original
 * is to be called. */
static int try_continuing(struct call *call, ssize_t *result)
{
	struct entry *entry = shim_find(call->out_fd);
	int retries, own_fd, is_done;

	if (!shim_has_bits(call->out_fd, HAS_PIPE | REFUSED) || !shim_lock())
		return 0;
	is_done = continue_pipe(call, entry, result);
	if (!is_done && take_original_turn(entry))
		is_done = -1;
	retries = entry->pipe ? entry->pipe->retries : 0;
	own_fd = entry->pipe ? entry->pipe->fd : -1;
	shim_unlock();
	if (own_fd >= 0)
		pause_if_retried_often(retries, own_fd);
	return is_done;
}

/* Notes where a part of `sent` bytes has ended. A file with too few bytes left is marked, for
 * this part and those behind it: one check is enough. */
INLINE void note_end(struct entry *entry, int in_fd, off64_t end, ssize_t sent, int is_rest_small)
{
	int small_mark = ~in_fd;

	/* Without a branch. */
	is_rest_small |=
	    (atomic_load_explicit(&entry->last_in_fd, memory_order_relaxed) == small_mark) &
	    (atomic_load_explicit(&entry->last_end, memory_order_relaxed) == end - sent);
	atomic_store_explicit(&entry->last_in_fd, is_rest_small ? small_mark : in_fd,
			      memory_order_relaxed);
	atomic_store_explicit(&entry->last_end, end, memory_order_relaxed);
}

/* Whether a call may continue a file although it is too small for a pipe itself. Nothing is checked
 * for a first part. */
INLINE int is_worth_checking(const struct entry *entry, int in_fd, const off64_t *offset,
			     size_t count)
{
	static const off64_t nowhere = -1;
	const off64_t *position = offset ? offset : &nowhere;

	/* Without a branch. */
	return (offset == NULL) | shim_pays(count) |
	       ((atomic_load_explicit(&entry->last_in_fd, memory_order_relaxed) == in_fd) &
		(atomic_load_explicit(&entry->last_end, memory_order_relaxed) == *position));
}

/* Handles calls that are perhaps not for the original: an earlier pipe or part exists, or the call
 * is worth a check (is_worth). */
COLD static ssize_t handle_call(int out_fd, int in_fd, off64_t *offset, size_t count, int is_worth)
{
	int error = errno;
	ssize_t result = 0;
	struct call call;
	int is_done;

	call.out_fd = out_fd;
	call.in_fd = in_fd;
	call.offset = offset;
	call.count = count < SHIM_MAX_COUNT ? count : SHIM_MAX_COUNT;
	call.is_rest_small = 0;
	is_done = try_continuing(&call, &result);
	if (is_done == 0 && is_worth)
		is_done = try_pipe(&call, &result);
	if (is_done <= 0) {
		errno = error;
		result = ORIGINAL(sendfile64)(out_fd, in_fd, offset, count);
	} else if (result >= 0) {
		errno = error;
	}
	if (offset && result > 0 && count >= atomic_load(&shim_gate_bytes) &&
	    shim_has_bits(out_fd, IN_SET))
		note_end(shim_look_up(out_fd), in_fd, *offset, result, call.is_rest_small);
	return result;
}

/* Whether a file has too few bytes left for a pipe of gathered parts: then no other check is
 * needed. Inlined, and by the kernel's own call: most files that are sent in parts are small. */
INLINE int has_small_rest(int in_fd, off64_t position, size_t count)
{
	uint64_t bytes = atomic_load_explicit(&shim_break_even_bytes, memory_order_relaxed);
	int64_t break_even = (int64_t)bytes;
	struct stat in;

	return (int64_t)count < break_even && syscall(SYS_fstat, in_fd, &in) == 0 &&
	       in.st_size - position < break_even;
}

EXPORT HOT_FIRST ssize_t sendfile64(int out_fd, int in_fd, off64_t *offset, size_t count)
{
	struct entry *entry = shim_look_up(out_fd);
	int is_large = count >= atomic_load_explicit(&shim_gate_bytes, memory_order_relaxed);
	int is_worth = is_large && is_worth_checking(entry, in_fd, offset, count);
	int is_rest_small = 0;
	ssize_t result;

	if (is_worth | (shim_get_bits(entry, HAS_PIPE | REFUSED) != 0)) {
		is_rest_small = offset && !shim_get_bits(entry, HAS_PIPE | REFUSED) &&
			    has_small_rest(in_fd, *offset, count);
		if (!is_rest_small)
			return handle_call(out_fd, in_fd, offset, count, is_worth);
	}
	result = ORIGINAL(sendfile64)(out_fd, in_fd, offset, count);
	if (is_large & (result > 0) & (shim_get_bits(entry, IN_SET) != 0))
		note_end(entry, in_fd, *offset, result, is_rest_small);
	return result;
}

EXPORT HOT ssize_t sendfile(int out_fd, int in_fd, off_t *offset, size_t count)
{
	off64_t position;
	ssize_t result;

	if (sizeof(off_t) == sizeof(off64_t))
		return sendfile64(out_fd, in_fd, (off64_t *)offset, count);
	/* Where off_t has 32 bits, the files that it can address are no longer. */
	position = offset ? *offset : 0;
	result = sendfile64(out_fd, in_fd, offset ? &position : NULL, count);
	if (offset)
		*offset = (off_t)position;
	return result;
}
