/* Gathers parts of a file, each too small for a pipe, that are sent one behind the other.
 *
 * Some servers send a file in parts of 256 KiB or less, as an event loop should. sendfile(2)
 * returns when a part is in the socket's buffer; here, when the shim has noted it. Parts are
 * gathered, and a pipe of all of them begins
 * - before the program sleeps in its epoll set: the set is polled without a wait first, and a
 *   socket with room in its buffer, into which no byte was put, is reported at once;
 * - before any other use of the socket: later writes get EAGAIN until the pipe is over;
 * - at the end of the file, or when as much is gathered as a pipe moves in a moment.
 *
 * From then on the agent answers for the bytes: it moves them by a pipe, sends itself those that
 * no pipe moves, and goes on when the program closes the socket or exits. A file that became
 * shorter meanwhile ends the connection, as a program does that gets a short count from
 * sendfile(2). Parts are lost that a program has gathered when it is killed before it sleeps, or
 * executes another: to its peers this looks as if it had been killed a moment earlier.
 *
 * Gathering begins with the third part, for a socket that has room at the moment, when the agent
 * serves a connection for it: then the agent does not refuse one later. Only the one thread that
 * waits in the socket's set gathers: of two, one may sleep in it for long while the other sends
 * and sleeps elsewhere. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Most sockets with gathered parts at a time: each keeps a connection to the agent. */
#define MAX_GATHERING POOL_LEN
/* Parts behind the first that are sent as they come, before gathering begins. */
#define UNGATHERED_PARTS 1
/* Most bytes that are gathered. A pipe that moves them faster than FAST_PIPE_MS raises the limit of
 * its socket, one slower than SLOW_PIPE_MS lowers it: meanwhile a program gets no event of its
 * socket, and servers give up clients that are silent for long. */
#define MAX_GATHERED_BYTES (INT64_C(16) << 20)
#define FAST_PIPE_MS 500
/* Time that the agent may take to answer on a new connection, of which a program has a few. */
#define AGENT_TIMEOUT_MS 50
#define SLOW_PIPE_MS 2000

__thread int shim_last_set = -1;
static pthread_key_t thread_end_key;
static int has_thread_end_key;
/* Stands for a thread when more than one has waited in a set. */
static const char many_threads;

static int gathering_fds[MAX_GATHERING];
_Atomic int shim_gathering_len;

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void remove_gathering(int fd)
{
	int len = atomic_load(&shim_gathering_len);

	for (int i = 0; i < len; i++) {
		if (gathering_fds[i] != fd)
			continue;
		gathering_fds[i] = gathering_fds[len - 1];
		atomic_store(&shim_gathering_len, len - 1);
		return;
	}
}

/* Whether a part starts where the last one ended. */
static int is_next_part(const struct shim_run *run, const struct shim_part *part)
{
	return run->parts > 0 && run->dev == part->ends.in_dev && run->ino == part->ends.in_ino &&
	       run->end == part->start;
}

void shim_note_sent(const struct shim_part *part, struct entry *entry, ssize_t sent)
{
	struct shim_run *run = &entry->run;

	if (sent <= 0)
		return;
	if (!is_next_part(run, part))
		*run = (struct shim_run){.dev = part->ends.in_dev,
					 .ino = part->ends.in_ino,
					 .limit = run->limit};
	run->end = part->start + sent;
	run->parts++;
}

/* Whether the file is on a file system from which the agent sends. */
static int is_on_known_fs(int file_fd)
{
	struct statfs statfs;

	return fstatfs(file_fd, &statfs) == 0 &&
	       (statfs.f_type == EXT4_SUPER_MAGIC || statfs.f_type == XFS_SUPER_MAGIC);
}

/* Whether the process has fcntl(2) locks on it: closing the shim's own descriptor would release
 * them. */
static int has_locks(int file_fd)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	return fcntl(file_fd, F_OFD_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

/* Whether a file has O_DIRECT: the agent reads into unaligned memory, and must not fail. */
static int is_direct(int file_fd)
{
	return fcntl(file_fd, F_GETFL) & O_DIRECT;
}

/* Whether this thread alone waits in the set, and waited there last. */
static int is_only_waiter(int set)
{
	const struct entry *entry = shim_find(set);

	return shim_last_set == set && entry && entry->waiter == &shim_last_set;
}

static int is_writable(int fd)
{
	struct pollfd request = {.fd = fd, .events = POLLOUT};

	return poll(&request, 1, 0) == 1 && request.revents == POLLOUT;
}

static struct shim_pipe *make_pipe(const struct shim_part *part, struct entry *entry)
{
	struct shim_pipe *pipe = shim_make_pipe(&part->ends, part->start);
	int reason = MILLRACE_COMPLETE;

	if (!pipe)
		return NULL;
	pipe->file_fd = fcntl(part->in_fd, F_DUPFD_CLOEXEC, 0);
	if (pipe->file_fd >= 0 &&
	    millrace_take_served_connection(&pipe->agent, AGENT_TIMEOUT_MS, &reason) == 0)
		return pipe;
	shim_note_refusal(entry, &pipe->ends, reason);
	if (pipe->file_fd >= 0)
		syscall(SYS_close, pipe->file_fd);
	shim_recycle_pipe(pipe);
	return NULL;
}

/* Begins to gather. Returns 0, or -1. */
static int begin_gathering(const struct shim_part *part, struct entry *entry)
{
	struct shim_pipe *pipe;

	/* Gathered bytes are sent before this thread sleeps in that set. */
	if (!is_only_waiter(entry->set) || entry->events & EPOLLONESHOT)
		return -1;
	if (entry->run.parts < UNGATHERED_PARTS || !is_next_part(&entry->run, part) ||
	    atomic_load(&shim_gathering_len) == MAX_GATHERING || !is_on_known_fs(part->in_fd) ||
	    is_direct(part->in_fd) || has_locks(part->in_fd) || !is_writable(part->out_fd))
		return -1;
	pipe = make_pipe(part, entry);
	if (!pipe)
		return -1;
	shim_mark_own(pipe->file_fd, part->out_fd);
	entry->pipe = pipe;
	atomic_fetch_or(&entry->bits, HAS_PIPE);
	gathering_fds[atomic_load(&shim_gathering_len)] = part->out_fd;
	atomic_fetch_add(&shim_gathering_len, 1);
	return 0;
}

static int is_same_file(const struct shim_ends *a, const struct shim_ends *b)
{
	return a->in_dev == b->in_dev && a->in_ino == b->in_ino;
}

int64_t shim_gather(const struct shim_part *part, struct entry *entry)
{
	struct shim_pipe *pipe;
	int error = errno;
	int is_last = part->len == part->remaining;

	if (part->len <= 0 || (!entry->pipe && begin_gathering(part, entry) < 0)) {
		errno = error;
		return 0;
	}
	pipe = entry->pipe;
	if (pipe->file_fd < 0 || !is_same_file(&pipe->ends, &part->ends) ||
	    pipe->start + pipe->gathered_bytes != part->start ||
	    pipe->gathered_bytes + part->len > MAX_GATHERED_BYTES)
		return 0;
	pipe->gathered_bytes += part->len;
	pipe->waits = 0;
	entry->run.end = part->start + part->len;
	if (is_last || (pipe->gathered_bytes >= entry->run.limit &&
			shim_pays((uint64_t)pipe->gathered_bytes)))
		shim_send_gathered(part->out_fd, entry);
	errno = error;
	return part->len;
}

/* Whether the descriptor has this inode: it may have been closed without a call that the shim sees,
 * and its number reused. */
static int is_same_inode(int fd, dev_t dev, ino_t ino)
{
	struct stat stat;

	return fstat(fd, &stat) == 0 && stat.st_dev == dev && stat.st_ino == ino;
}

/* Requests the pipe, once more if the agent has closed the connection just now. */
static int request_pipe(int fd, struct shim_pipe *pipe)
{
	int reason;

	if (millrace_send_behind(&pipe->agent, fd, pipe->file_fd, pipe->start,
				 pipe->gathered_bytes) == 0)
		return 0;
	if (millrace_take_served_connection(&pipe->agent, AGENT_TIMEOUT_MS, &reason) < 0)
		return -1;
	return millrace_send_behind(&pipe->agent, fd, pipe->file_fd, pipe->start,
				    pipe->gathered_bytes);
}

static void close_file(struct shim_pipe *pipe)
{
	struct entry *own = shim_find(pipe->file_fd);

	/* Else it was closed already. */
	if (own && atomic_load(&own->bits) & IS_PIPE) {
		atomic_store(&own->bits, 0);
		syscall(SYS_close, pipe->file_fd);
	}
	pipe->file_fd = -1;
}

/* Sends as much as the socket takes. If that is not all, the connection ends: the program believes
 * that it was sent. */
static void send_without_agent(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	off64_t position = pipe->start;
	off64_t end = position + pipe->gathered_bytes;
	ssize_t sent = 1;

	while (position < end && sent > 0)
		sent = ORIGINAL(sendfile64)(fd, pipe->file_fd, &position, (size_t)(end - position));
	if (position < end)
		(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
	shim_note_refusal(entry, &pipe->ends, MILLRACE_NO_AGENT);
}

/* Begins the pipe, which runs beside the program. */
static void begin_pipe(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	int is_in_set = atomic_load(&entry->bits) & IN_SET;

	pipe->start_ms = now_ms();
	pipe->fd = pipe->agent.fd;
	pipe->cork = shim_uncork(fd);
	entry->pipe_generation++;
	close_file(pipe);
	shim_mark_own(pipe->fd, fd);
	/* Fails for a socket that is not in the set any more: then no thread waits for it. */
	if (!is_in_set || shim_mask_output(fd, entry) < 0)
		return;
	/* A full set does not report its end. */
	if (shim_watch_pipe(fd, entry) < 0)
		while (shim_is_pipe_running(fd, entry))
			(void)poll(&(struct pollfd){.fd = pipe->fd, .events = POLLIN}, 1, -1);
}

void shim_send_gathered(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	int error = errno;

	if (!pipe || pipe->file_fd < 0)
		return;
	remove_gathering(fd);
	if (!is_same_inode(fd, pipe->ends.out_dev, pipe->ends.out_ino) ||
	    !is_same_inode(pipe->file_fd, pipe->ends.in_dev, pipe->ends.in_ino)) {
		/* No more bytes of the file can be sent. */
		if (is_same_inode(fd, pipe->ends.out_dev, pipe->ends.out_ino))
			(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
		if (millrace_is_pooled(&pipe->agent))
			millrace_return_connection(&pipe->agent, 0);
		else
			millrace_detach_connection(&pipe->agent);
		close_file(pipe);
		shim_drop_pipe(entry);
	} else if (request_pipe(fd, pipe) == 0) {
		begin_pipe(fd, entry);
	} else {
		send_without_agent(fd, entry);
		close_file(pipe);
		shim_drop_pipe(entry);
	}
	errno = error;
}

/* Adapts the limit: more bytes at once if they were moved quickly, fewer if slowly. */
static void adapt_limit(struct shim_run *run, int64_t gathered_bytes, int64_t duration_ms)
{
	if (duration_ms > SLOW_PIPE_MS)
		run->limit = 0;
	else if (duration_ms < FAST_PIPE_MS && gathered_bytes >= run->limit)
		run->limit = 2 * gathered_bytes < MAX_GATHERED_BYTES ? 2 * gathered_bytes
								     : MAX_GATHERED_BYTES;
}

void shim_end_gathered(int fd, struct entry *entry, const struct millrace_result *result)
{
	struct shim_pipe *pipe = entry->pipe;

	if (result->moved < pipe->gathered_bytes)
		(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
	else if (pipe->is_shut)
		(void)syscall(SYS_shutdown, fd, SHUT_WR);
	shim_note_refusal(entry, &pipe->ends, result->reason);
	adapt_limit(&entry->run, pipe->gathered_bytes, now_ms() - pipe->start_ms);
	shim_drop_pipe(entry);
}

void shim_forget_gathered(void)
{
	int len = atomic_exchange(&shim_gathering_len, 0);

	for (int i = 0; i < len; i++)
		close_file(shim_find(gathering_fds[i])->pipe);
}

int shim_send_due_parts(int all)
{
	int i = 0;

	if (atomic_load(&shim_gathering_len) == 0 || !shim_lock())
		return 0;
	while (i < atomic_load(&shim_gathering_len)) {
		struct entry *entry = shim_find(gathering_fds[i]);

		/* A socket whose bytes are sent leaves its slot to another. */
		if (all || entry->pipe->waits++ > 0)
			shim_send_gathered(gathering_fds[i], entry);
		else
			i++;
	}
	shim_unlock();
	return atomic_load(&shim_gathering_len);
}

void shim_note_wait(int set)
{
	int error = errno;
	int are_many = 0;
	struct entry *entry;

	shim_last_set = set;
	if (!shim_lock())
		return;
	entry = shim_find_or_make(set);
	if (entry) {
		are_many = entry->waiter && entry->waiter != &shim_last_set;
		entry->waiter = are_many ? (const void *)&many_threads : &shim_last_set;
		/* Marked so that it is forgotten when closed. */
		atomic_fetch_or(&entry->bits, IS_SET);
	}
	shim_unlock();
	if (has_thread_end_key)
		(void)pthread_setspecific(thread_end_key, &many_threads);
	if (are_many)
		(void)shim_send_due_parts(1);
	errno = error;
}

static void send_all_parts(void *unused)
{
	(void)unused;
	(void)shim_send_due_parts(1);
}

/* Makes a thread that ends send its parts: it does not come back to wait. */
__attribute__((constructor)) static void create_thread_end_key(void)
{
	has_thread_end_key = pthread_key_create(&thread_end_key, send_all_parts) == 0;
}

/* Sends the parts of a program that exits in order. */
__attribute__((destructor)) static void send_at_exit(void)
{
	(void)shim_send_due_parts(1);
}
