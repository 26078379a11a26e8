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
#define MAX_WAITING MAX_KEPT
/* Parts that are sent as they come, behind the first. */
#define PARTS_BEFORE 1
/* Most bytes that are gathered, and the time that a pipe should take to move them: meanwhile a
 * program gets no event of its socket, and servers give up clients that are silent for long. */
#define MOST_BYTES (INT64_C(16) << 20)
#define SHORT_MS 500
/* Time that the agent may take to answer on a new connection, of which a program has a few. */
#define AGENT_MS 50
#define LONG_MS 2000

__thread int shim_waited_in = -1;
static pthread_key_t at_thread_end;
static int is_key;
/* Stands for a thread when more than one has waited in a set. */
static const char many;

static int waiting[MAX_WAITING];
_Atomic int shim_waiting_len;

static int64_t now_ms(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void remove_waiting(int fd)
{
	int len = atomic_load(&shim_waiting_len);

	for (int i = 0; i < len; i++) {
		if (waiting[i] != fd)
			continue;
		waiting[i] = waiting[len - 1];
		atomic_store(&shim_waiting_len, len - 1);
		return;
	}
}

/* Whether this part is the next one. */
static int goes_on(const struct shim_run *run, const struct shim_part *part)
{
	return run->parts > 0 && run->dev == part->ends.in_dev && run->ino == part->ends.in_ino &&
	       run->at == part->at;
}

void shim_sent(const struct shim_part *part, struct entry *entry, ssize_t sent)
{
	struct shim_run *run = &entry->run;

	if (sent <= 0)
		return;
	if (!goes_on(run, part))
		*run = (struct shim_run){.dev = part->ends.in_dev,
					 .ino = part->ends.in_ino,
					 .limit = run->limit};
	run->at = part->at + sent;
	run->parts++;
}

/* Whether the file is on a file system from which the agent sends. */
static int is_known(int file)
{
	struct statfs statfs;

	return fstatfs(file, &statfs) == 0 &&
	       (statfs.f_type == EXT4_SUPER_MAGIC || statfs.f_type == XFS_SUPER_MAGIC);
}

/* Whether the process has fcntl(2) locks on it: closing the shim's own descriptor would release
 * them. */
static int has_locks(int file)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	return fcntl(file, F_OFD_GETLK, &lock) < 0 || lock.l_type != F_UNLCK;
}

/* Whether it has O_DIRECT: the agent reads into unaligned memory, and must not fail. */
static int is_direct(int file)
{
	return fcntl(file, F_GETFL) & O_DIRECT;
}

/* Whether this thread alone waits in the set, and waited there last. */
static int waits_alone_in(int set)
{
	const struct entry *entry = shim_find(set);

	return shim_waited_in == set && entry && entry->waiter == &shim_waited_in;
}

static int takes_bytes(int fd)
{
	struct pollfd wish = {.fd = fd, .events = POLLOUT};

	return poll(&wish, 1, 0) == 1 && wish.revents == POLLOUT;
}

static struct shim_pipe *new_pipe(const struct shim_part *part, struct entry *entry)
{
	struct shim_pipe *pipe = shim_new_pipe(&part->ends, part->at);
	int reason = MILLRACE_COMPLETE;

	if (!pipe)
		return NULL;
	pipe->file = fcntl(part->in_fd, F_DUPFD_CLOEXEC, 0);
	if (pipe->file >= 0 && millrace_take_served(&pipe->agent, AGENT_MS, &reason) == 0)
		return pipe;
	shim_refused(entry, &pipe->ends, reason);
	if (pipe->file >= 0)
		syscall(SYS_close, pipe->file);
	shim_spare_pipe(pipe);
	return NULL;
}

/* Begins to gather. Returns 0, or -1. */
static int begin(const struct shim_part *part, struct entry *entry)
{
	struct shim_pipe *pipe;

	/* Gathered bytes are sent before this thread sleeps in that set. */
	if (!waits_alone_in(entry->set) || entry->events & EPOLLONESHOT)
		return -1;
	if (entry->run.parts < PARTS_BEFORE || !goes_on(&entry->run, part) ||
	    atomic_load(&shim_waiting_len) == MAX_WAITING || !is_known(part->in_fd) ||
	    is_direct(part->in_fd) || has_locks(part->in_fd) || !takes_bytes(part->out_fd))
		return -1;
	pipe = new_pipe(part, entry);
	if (!pipe)
		return -1;
	shim_mark_own(pipe->file, part->out_fd);
	entry->pipe = pipe;
	atomic_fetch_or(&entry->bits, HAS_PIPE);
	waiting[atomic_load(&shim_waiting_len)] = part->out_fd;
	atomic_fetch_add(&shim_waiting_len, 1);
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
	int is_last = part->len == part->left;

	if (part->len <= 0 || (!entry->pipe && begin(part, entry) < 0)) {
		errno = error;
		return 0;
	}
	pipe = entry->pipe;
	if (pipe->file < 0 || !is_same_file(&pipe->ends, &part->ends) ||
	    pipe->at + pipe->gathered != part->at || pipe->gathered + part->len > MOST_BYTES)
		return 0;
	pipe->gathered += part->len;
	pipe->rounds = 0;
	entry->run.at = part->at + part->len;
	if (is_last || (pipe->gathered >= entry->run.limit && shim_pays((uint64_t)pipe->gathered)))
		shim_send_gathered(part->out_fd, entry);
	errno = error;
	return part->len;
}

/* Whether the descriptor is still this file: it may have been closed without a call that the
 * shim sees, and its number reused. */
static int is_still(int fd, dev_t dev, ino_t ino)
{
	struct stat stat;

	return fstat(fd, &stat) == 0 && stat.st_dev == dev && stat.st_ino == ino;
}

/* Repeats once if the agent has closed the connection just now. */
static int ask(int fd, struct shim_pipe *pipe)
{
	int reason;

	if (millrace_send_behind(&pipe->agent, fd, pipe->file, pipe->at, pipe->gathered) == 0)
		return 0;
	if (millrace_take_served(&pipe->agent, AGENT_MS, &reason) < 0)
		return -1;
	return millrace_send_behind(&pipe->agent, fd, pipe->file, pipe->at, pipe->gathered);
}

static void close_file(struct shim_pipe *pipe)
{
	struct entry *own = shim_find(pipe->file);

	/* Else it was closed already. */
	if (own && atomic_load(&own->bits) & IS_PIPE) {
		atomic_store(&own->bits, 0);
		syscall(SYS_close, pipe->file);
	}
	pipe->file = -1;
}

/* Sends without the agent, as much as the socket takes. If that is not all, the connection ends:
 * the program believes that it was sent. */
static void send_alone(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	off64_t at = pipe->at;
	off64_t end = at + pipe->gathered;
	ssize_t sent = 1;

	while (at < end && sent > 0)
		sent = NEXT(sendfile64)(fd, pipe->file, &at, (size_t)(end - at));
	if (at < end)
		(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
	shim_refused(entry, &pipe->ends, MILLRACE_NO_AGENT);
}

/* Begins the pipe, which runs beside the program. */
static void begin_pipe(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	int is_in_set = atomic_load(&entry->bits) & IN_SET;

	pipe->since_ms = now_ms();
	pipe->fd = pipe->agent.fd;
	pipe->cork = shim_uncork(fd);
	entry->pipes++;
	close_file(pipe);
	shim_mark_own(pipe->fd, fd);
	/* Fails for a socket that is not in the set any more: then no thread waits for it. */
	if (!is_in_set || shim_mask(fd, entry) < 0)
		return;
	/* A full set does not report its end. */
	if (shim_watch(fd, entry) < 0)
		while (shim_pipe_runs(fd, entry))
			(void)poll(&(struct pollfd){.fd = pipe->fd, .events = POLLIN}, 1, -1);
}

void shim_send_gathered(int fd, struct entry *entry)
{
	struct shim_pipe *pipe = entry->pipe;
	int error = errno;

	if (!pipe || pipe->file < 0)
		return;
	remove_waiting(fd);
	if (!is_still(fd, pipe->ends.out_dev, pipe->ends.out_ino) ||
	    !is_still(pipe->file, pipe->ends.in_dev, pipe->ends.in_ino)) {
		/* No more bytes of the file can be sent. */
		if (is_still(fd, pipe->ends.out_dev, pipe->ends.out_ino))
			(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
		if (millrace_is_kept(&pipe->agent))
			millrace_give_back(&pipe->agent, 0);
		else
			millrace_let_go(&pipe->agent);
		close_file(pipe);
		shim_drop_pipe(entry);
	} else if (ask(fd, pipe) == 0) {
		begin_pipe(fd, entry);
	} else {
		send_alone(fd, entry);
		close_file(pipe);
		shim_drop_pipe(entry);
	}
	errno = error;
}

/* Adapts the limit: more bytes at once if they were moved quickly, fewer if slowly. */
static void adapt(struct shim_run *run, int64_t gathered, int64_t took_ms)
{
	if (took_ms > LONG_MS)
		run->limit = 0;
	else if (took_ms < SHORT_MS && gathered >= run->limit)
		run->limit = 2 * gathered < MOST_BYTES ? 2 * gathered : MOST_BYTES;
}

void shim_gathered_over(int fd, struct entry *entry, const struct millrace_result *result)
{
	struct shim_pipe *pipe = entry->pipe;

	if (result->moved < pipe->gathered)
		(void)syscall(SYS_shutdown, fd, SHUT_RDWR);
	else if (pipe->is_shut)
		(void)syscall(SYS_shutdown, fd, SHUT_WR);
	shim_refused(entry, &pipe->ends, result->reason);
	adapt(&entry->run, pipe->gathered, now_ms() - pipe->since_ms);
	shim_drop_pipe(entry);
}

void shim_forget_gathered(void)
{
	int len = atomic_exchange(&shim_waiting_len, 0);

	for (int i = 0; i < len; i++)
		close_file(shim_find(waiting[i])->pipe);
}

int shim_send_due(int all)
{
	int i = 0;

	if (atomic_load(&shim_waiting_len) == 0 || !shim_lock())
		return 0;
	while (i < atomic_load(&shim_waiting_len)) {
		struct entry *entry = shim_find(waiting[i]);

		/* A socket whose bytes are sent leaves its slot to another. */
		if (all || entry->pipe->rounds++ > 0)
			shim_send_gathered(waiting[i], entry);
		else
			i++;
	}
	shim_unlock();
	return atomic_load(&shim_waiting_len);
}

void shim_waits_in(int set)
{
	int error = errno;
	int are_many = 0;
	struct entry *entry;

	shim_waited_in = set;
	if (!shim_lock())
		return;
	entry = shim_make(set);
	if (entry) {
		are_many = entry->waiter && entry->waiter != &shim_waited_in;
		entry->waiter = are_many ? (const void *)&many : &shim_waited_in;
		/* Marked so that it is forgotten when closed. */
		atomic_fetch_or(&entry->bits, IS_SET);
	}
	shim_unlock();
	if (is_key)
		(void)pthread_setspecific(at_thread_end, &many);
	if (are_many)
		(void)shim_send_due(1);
	errno = error;
}

static void send_all(void *of_thread)
{
	(void)of_thread;
	(void)shim_send_due(1);
}

/* A thread that ends does not come back to wait either. */
__attribute__((constructor)) static void at_start(void)
{
	is_key = pthread_key_create(&at_thread_end, send_all) == 0;
}

/* A program that exits in order has sent the bytes that it believes to be sent. */
__attribute__((destructor)) static void at_end(void)
{
	(void)shim_send_due(1);
}
