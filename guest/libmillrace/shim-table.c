/* Table of the shim's state of descriptors, by number. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Number from which on descriptors have no state. It is the kernel's own limit for a process
 * (fs.nr_open); shim-epoll.c keeps a number in 20 bits. */
#define MAX_FDS (1 << 20)
/* Size of the table without a limit. */
#define MIN_FDS 1024

/* States of the lock: free, held, or held with possible waiters. Not the C library's lock: a
 * call into another library and back costs an event loop more than all other work here for most
 * of its calls. */
enum { FREE, HELD, WAITED_FOR };
static _Atomic uint32_t lock_state;
static struct entry empty_entry;
_Atomic(struct entry *) shim_table = &empty_entry;
static _Atomic int table_len;
_Atomic uint32_t shim_known_len;
static _Atomic pid_t owner_pid;
static __thread int is_inside;
static __thread int cancel_state;
static void drop_parent_pipes(void);
/* Set when a signal handler inside the lock has called fork(2), and this is the child. */
static int has_forked_inside;
/* Pipes that are over. close(2) may be called in a signal handler, free(3) may not. */
static struct shim_pipe *spare_pipes;

COLD static void wait_for_lock(void)
{
	int error = errno;

	while (atomic_exchange(&lock_state, WAITED_FOR) != FREE)
		(void)syscall(SYS_futex, &lock_state, FUTEX_WAIT_PRIVATE, WAITED_FOR, NULL, NULL,
			      0);
	errno = error;
}

INLINE void lock_all(void)
{
	uint32_t free = FREE;

	if (__builtin_expect(!atomic_compare_exchange_strong(&lock_state, &free, HELD), 0))
		wait_for_lock();
}

COLD static void wake_waiter(void)
{
	int error = errno;

	(void)syscall(SYS_futex, &lock_state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	errno = error;
}

INLINE void unlock_all(void)
{
	if (__builtin_expect(atomic_exchange(&lock_state, FREE) == WAITED_FOR, 0))
		wake_waiter();
}

HOT int shim_lock_briefly(void)
{
	if (is_inside)
		return 0;
	is_inside = 1;
	lock_all();
	return 1;
}

int shim_lock(void)
{
	int old_state;

	if (is_inside)
		return 0;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old_state);
	(void)shim_lock_briefly();
	/* Not earlier: until then a signal handler may have had the lock. */
	cancel_state = old_state;
	return 1;
}

int shim_lock_if_owner(void)
{
	return atomic_load(&owner_pid) == getpid() && shim_lock();
}

HOT void shim_unlock_briefly(void)
{
	if (__builtin_expect(has_forked_inside, 0)) {
		int error = errno;

		drop_parent_pipes();
		errno = error;
	}
	unlock_all();
	is_inside = 0;
}

void shim_unlock(void)
{
	int old_state = cancel_state;

	shim_unlock_briefly();
	pthread_setcancelstate(old_state, NULL);
}

/* Reserves the table for as many descriptors as the program may ever have. The kernel gives memory
 * only to used pages. */
static int allocate_table(void)
{
	struct rlimit limit = {0};
	int len = MAX_FDS;
	void *memory;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max < MAX_FDS)
		len = limit.rlim_max > MIN_FDS ? (int)limit.rlim_max : MIN_FDS;
	memory = mmap(NULL, ((size_t)len + 1) * sizeof(struct entry), PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return -1;
	/* Few descriptors are used: a huge page of two MiB would be too much for the first. */
	(void)madvise(memory, ((size_t)len + 1) * sizeof(struct entry), MADV_NOHUGEPAGE);
	atomic_store(&table_len, len);
	atomic_store_explicit(&shim_table, memory, memory_order_release);
	return 0;
}

struct entry *shim_find_or_make(int fd)
{
	if (atomic_load(&table_len) == 0 && allocate_table() < 0)
		return NULL;
	if (fd < 0 || fd >= atomic_load(&table_len))
		return NULL;
	if ((uint32_t)fd >= atomic_load(&shim_known_len))
		atomic_store_explicit(&shim_known_len, (uint32_t)fd + 1, memory_order_release);
	return shim_find(fd);
}

/* Forgets the descriptors of a closed epoll set. Their pipes go on: sendfile checks for their
 * end too. */
static void forget_set(int set)
{
	for (int fd = 0; fd < (int)atomic_load(&shim_known_len); fd++) {
		struct entry *entry = shim_find(fd);

		if (!(atomic_load(&entry->bits) & IN_SET) || entry->set != set)
			continue;
		atomic_fetch_and(&entry->bits, ~(IN_SET | IN_MANY_SETS));
		if (entry->pipe && entry->pipe->set == set)
			entry->pipe->set = -1;
	}
}

static void forget_fd(int fd)
{
	struct entry *entry = shim_find(fd);
	uint32_t bits = entry ? atomic_load(&entry->bits) : 0;

	if (!bits)
		return;
	if (bits & IS_SET)
		forget_set(fd);
	if (bits & IS_PIPE) {
		/* The socket was closed without a call that the shim sees: its end goes
		 * unnoticed. */
		struct entry *socket = shim_find(entry->set);

		if (socket->pipe && socket->pipe->fd == fd) {
			socket->pipe->fd = -1;
			socket->pipe->is_lost = 1;
			shim_unmask_output(entry->set, socket);
			/* The agent goes on sending: no other bytes may come in between. */
			if (socket->pipe->gathered_bytes)
				syscall(SYS_shutdown, entry->set, SHUT_RDWR);
		}
	}
	if (entry->pipe) {
		/* Bytes that the program believes to be sent go on without it. */
		shim_send_gathered(fd, entry);
	}
	if (entry->pipe) {
		/* The agent has the socket open too, so the set would still report it. */
		shim_leave_set(fd, entry);
		shim_drop_pipe(entry);
	}
	entry->generation++;
	entry->refused_until_ms = 0;
	entry->use_original_once = 0;
	entry->run = (struct shim_run){0};
	entry->waiter = NULL;
	atomic_store(&entry->bits, 0);
}

void shim_forget(int first, int last)
{
	int end = (int)atomic_load(&shim_known_len);

	if (last >= end)
		last = end - 1;
	for (int fd = first; fd <= last; fd++)
		if (!shim_has_bits(fd, IS_PIPE))
			forget_fd(fd);
}

void shim_mark_own(int own_fd, int socket)
{
	struct entry *own = shim_find_or_make(own_fd);

	if (!own)
		return;
	forget_fd(own_fd);
	own->set = socket;
	atomic_store(&own->bits, IS_PIPE);
}

struct shim_pipe *shim_make_pipe(const struct shim_ends *ends, int64_t start)
{
	struct shim_pipe *pipe = spare_pipes;

	if (pipe)
		spare_pipes = pipe->next;
	else
		pipe = malloc(sizeof(*pipe));
	if (pipe)
		*pipe = (struct shim_pipe){.fd = -1,
					   .set = -1,
					   .cork = -1,
					   .nodelay = -1,
					   .file_fd = -1,
					   .ends = *ends,
					   .start = start};
	return pipe;
}

void shim_recycle_pipe(struct shim_pipe *pipe)
{
	pipe->next = spare_pipes;
	spare_pipes = pipe;
}

/* In a signal handler inside the lock, this thread holds it or waits for it: then the protected
 * state is the interrupted call's, and the child cleans up after that. */
static void before_fork(void)
{
	/* Before bytes that the child may write to the same socket. */
	(void)shim_send_due_parts(1);
	if (!is_inside)
		lock_all();
}

static void after_fork_in_parent(void)
{
	if (!is_inside)
		unlock_all();
}

static void after_fork_in_child(void)
{
	if (is_inside) {
		/* The holder is not in this process. */
		atomic_store(&lock_state, FREE);
		has_forked_inside = 1;
		return;
	}
	drop_parent_pipes();
	unlock_all();
}

/* Leaves pipes to the parent; closing the child's copies of their descriptors does not end them.
 * Epoll sets are shared, so nothing is changed in them. Calls only async-signal-safe functions. */
static void drop_parent_pipes(void)
{
	has_forked_inside = 0;
	shim_forget_gathered();
	for (int fd = 0; fd < (int)atomic_load(&shim_known_len); fd++) {
		struct entry *entry = shim_find(fd);

		if (atomic_load(&entry->bits) & IS_PIPE) {
			syscall(SYS_close, fd);
			atomic_store(&entry->bits, 0);
		}
		entry->pipe = NULL;
		atomic_fetch_and(&entry->bits, ~HAS_PIPE);
	}
	atomic_store(&owner_pid, getpid());
}

__attribute__((constructor)) static void initialize(void)
{
	if (pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0)
		atomic_store(&owner_pid, getpid());
}
