/* Parts of the preload shim: state of descriptors, and pipes to non-blocking sockets.
 *
 * sendfile(2) of a file to a TCP socket and, to another file, sendfile(2) and copy_file_range(2)
 * become pipes. splice(2) never does: one of its ends is always a kernel pipe, whose bytes are in
 * the guest, where any process that has it open may read them. The host has nothing to move.
 *
 * A program with an event loop must not wait in sendfile(2). Its pipe runs beside it: sendfile
 * gives EAGAIN, as for a socket with a full buffer, and EPOLLOUT comes when the pipe is over:
 * - the pipe's descriptor is added to the socket's epoll set, and EPOLLOUT is removed from the
 *   socket's events;
 * - when the pipe is over, its descriptor is removed and the socket's events are put back: the
 *   kernel itself then reports EPOLLOUT, with EPOLLET or EPOLLONESHOT or without, as the program
 *   wanted it;
 * - the next sendfile of the same bytes of the same file returns the number of bytes moved.
 *
 * Parts of a file that are each too small for a pipe are sent together: shim-gather.c.
 *
 * One lock guards all state. No call that waits is made under it, unless a set is full and cannot
 * report a pipe's end. Few calls need it: a descriptor without state has no bits set. */
#ifndef SHIM_H
#define SHIM_H

#include "exchange.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
/* Hot paths. Most calls of a program are for the kernel alone. Their paths through the shim have
 * few branches, and lie on one page: the first function, in the object that is linked first, begins
 * the page. (An emulated CPU ends a block of translated code at each branch, and looks up the
 * target of each jump to another page; a real CPU has few pages in its first TLB.) */
#define HOT __attribute__((hot))
#define HOT_FIRST HOT __attribute__((aligned(4096)))
#define INLINE static inline __attribute__((always_inline))
/* Cold paths, out of line: the hot ones need not save registers for them. */
#define COLD __attribute__((noinline, cold))

/* The original function behind a wrapper. */
#define ORIGINAL(name)                                                                \
	__extension__({                                                               \
		static _Atomic(__typeof__(&name)) found;                              \
		__typeof__(&name) function = atomic_load(&found);                     \
		if (__builtin_expect(!function, 0)) {                                 \
			function = (__typeof__(&name))dlsym(RTLD_NEXT, #name);        \
			atomic_store(&found, function);                               \
		}                                                                     \
		function;                                                             \
	})

/* Bits of a descriptor. */
#define IN_SET 1u       /* in a known epoll set */
#define IN_MANY_SETS 2u /* in more than one, or with EPOLLEXCLUSIVE: no pipe can wait there */
#define HAS_PIPE 4u     /* has a pipe that runs, or whose result the program has not got yet */
#define IS_PIPE 8u      /* descriptor of a pipe itself */
#define IS_SET 16u      /* epoll set with known descriptors */
#define REFUSED 32u     /* pipes to it were refused, or the next call is the original's */

/* Ends of a pipe: a file, and a socket or another file. */
struct shim_ends {
	dev_t in_dev;
	ino_t in_ino;
	dev_t out_dev;
	ino_t out_ino;
	int out_is_file;
};

/* Pipe to a non-blocking socket. */
struct shim_pipe {
	int fd;	     /* -1 when it is over */
	int set;     /* the epoll set that fd is in, or -1 */
	int is_lost; /* the number of moved bytes is not known */
	int retries; /* calls in vain for its result */
	/* For EPOLLONESHOT: whether the program has armed it during the pipe and got no event
	 * since. */
	int is_armed;
	/* The program's values of these options of the socket, or -1. They are set at the end:
	 * the agent changes them too. */
	int cork;
	int nodelay;
	struct shim_ends ends;
	int64_t start;	     /* position in the file where the moved bytes begin */
	int64_t moved_bytes; /* moved bytes that the program has not got as a result */
	/* For gathered parts, which the program believes to be sent; else 0: */
	int64_t gathered_bytes;	 /* number of bytes from `start` on */
	int file_fd;		 /* own descriptor of the file until the pipe begins, or -1 */
	struct connection agent; /* connection for the pipe */
	int waits;		 /* number of the program's waits since the last part */
	int is_shut;		 /* the program has shut it down: done when all is sent */
	int64_t start_ms;	 /* start of its pipe */
	struct shim_pipe *next;	 /* in the list of pipes that are over */
};

/* File that is sent in parts, one behind the other. */
struct shim_run {
	dev_t dev;
	ino_t ino;
	int64_t end;   /* end of the last part, where the next one starts */
	int parts;     /* number of parts so far */
	int64_t limit; /* most bytes to gather; 0: as few as pay */
};

/* State of a descriptor. */
struct entry {
	_Atomic uint32_t bits;
	/* Generations of the socket and the pipe of this number: events of older ones are stale. */
	uint32_t generation;
	uint32_t pipe_generation;
	/* Epoll set of the descriptor, and the events that the program wants; for a pipe's own
	 * descriptor, set is the socket. */
	int set;
	uint32_t events;
	uint64_t data;
	struct shim_pipe *pipe;
	/* Inode of the socket that was refused: the number may belong to another by now. */
	ino_t refused_ino;
	int64_t refused_until_ms;
	/* Set when nothing could be piped: the next sendfile is the original's. */
	int use_original_once;
	struct shim_run run;
	/* For a set: the one thread that has waited in it, by the address of its shim_last_set;
	 * another address when there were more threads. */
	const void *waiter;
	/* Descriptor and end of the last part: a part that goes on there is worth a check. */
	_Atomic int last_in_fd;
	_Atomic int64_t last_end;
};

/* Takes the lock; 0 when it cannot be had, in a signal handler that has interrupted its holder.
 * Cancellation of the thread is deferred meanwhile. */
int shim_lock(void);
/* Takes the lock for calls that a child of vfork(2) makes before its exec: 0 in such a child
 * too. Its memory is its parent's, its descriptors are not. */
int shim_lock_if_owner(void);
void shim_unlock(void);
/* Takes the lock where no cancellation point is called meanwhile. */
int shim_lock_briefly(void);
void shim_unlock_briefly(void);

/* Entries of descriptors, behind one that belongs to none and stays empty. */
extern _Atomic(struct entry *) shim_table;
/* Number of descriptors that may have state. Grows after the table is there. */
extern _Atomic uint32_t shim_known_len;

/* Returns the entry of a descriptor, or the empty one. Needs no lock, but the entry's fields do.
 * Inlined, as many calls of a program begin with it. */
INLINE struct entry *shim_look_up(int fd)
{
	uint32_t known_len = atomic_load_explicit(&shim_known_len, memory_order_acquire);
	struct entry *entries = atomic_load_explicit(&shim_table, memory_order_relaxed);
	/* Without a branch: a negative number becomes a large one. */
	uint32_t index = (uint32_t)fd < known_len ? (uint32_t)fd + 1 : 0;

	return &entries[index];
}

/* Returns the entry of a descriptor, or NULL. */
static inline struct entry *shim_find(int fd)
{
	uint32_t known_len = atomic_load_explicit(&shim_known_len, memory_order_acquire);
	struct entry *entries = atomic_load_explicit(&shim_table, memory_order_relaxed);

	return (uint32_t)fd < known_len ? &entries[(uint32_t)fd + 1] : NULL;
}

/* Returns the bits of this mask that are set. Needs no lock. */
INLINE uint32_t shim_get_bits(const struct entry *entry, uint32_t bits)
{
	return atomic_load_explicit(&entry->bits, memory_order_acquire) & bits;
}

/* True when one of the bits is set. */
INLINE int shim_has_bits(int fd, uint32_t bits)
{
	return shim_get_bits(shim_look_up(fd), bits) != 0;
}

/* The following need the lock. */

/* Returns the entry of a descriptor, and makes it if there is none. */
struct entry *shim_find_or_make(int fd);
/* Forgets descriptors that are about to be closed, or were, but not the shim's own. Cancels
 * their pipes. */
void shim_forget(int first, int last);

/* Whether a pipe to the descriptor runs. Cleans up after one that is over. */
int shim_is_pipe_running(int fd, struct entry *entry);
/* Releases a pipe; cancels it if it runs. */
void shim_drop_pipe(struct entry *entry);
/* Adds a pipe's descriptor to the socket's epoll set; -1 when it is full. */
int shim_watch_pipe(int fd, struct entry *entry);
/* Removes EPOLLOUT from the socket's events in its epoll set; -1 when the socket is not in it. */
int shim_mask_output(int fd, const struct entry *entry);
/* Restores the socket's events as the program wants them. */
void shim_unmask_output(int fd, const struct entry *entry);

/* Removes a socket from its set. */
void shim_leave_set(int fd, const struct entry *entry);

/* Whether a pipe may be requested: not shortly after a refusal. entry is the socket's and may be
 * NULL, as for a file. */
int shim_may_request(struct entry *entry, const struct shim_ends *ends);
/* Notes a refusal: its reason says for which ends no pipe is requested soon. */
void shim_note_refusal(struct entry *entry, const struct shim_ends *ends, int reason);

/* Part of a file for a socket. */
struct shim_part {
	int out_fd;
	int in_fd;
	int64_t start;
	int64_t len;
	int64_t remaining; /* bytes from `start` to the end of the file */
	struct shim_ends ends;
};

/* Returns how many bytes are gathered and will be sent; 0: the part is the original's. */
int64_t shim_gather(const struct shim_part *part, struct entry *entry);
/* Notes the original's result for a part. */
void shim_note_sent(const struct shim_part *part, struct entry *entry, ssize_t sent);
/* Sends the gathered bytes, unless that has begun: then a pipe runs, or all bytes are sent. */
void shim_send_gathered(int fd, struct entry *entry);
/* Notes the end of a pipe with gathered bytes. */
void shim_end_gathered(int fd, struct entry *entry, const struct millrace_result *result);
/* Drops gathered bytes in a child of fork(2): they are the parent's. */
void shim_forget_gathered(void);
/* Removes the cork, so that bytes leave which wait for the pipe's. Returns its value for
 * shim_pipe.cork: the program gets it back at the end. */
int shim_uncork(int fd);
/* Marks a pipe's own descriptor, which the program must not close. */
void shim_mark_own(int own_fd, int socket);
/* Makes a pipe between two ends, or NULL; and frees one that is over. */
struct shim_pipe *shim_make_pipe(const struct shim_ends *ends, int64_t start);
void shim_recycle_pipe(struct shim_pipe *pipe);

/* The following are called without the lock. */

/* Epoll set in which this thread has waited last. */
extern __thread int shim_last_set;
/* Notes that this thread is about to wait in another set. */
void shim_note_wait(int set);
extern _Atomic int shim_gathering_len;
static inline int shim_is_gathering(void)
{
	return atomic_load(&shim_gathering_len) > 0;
}
/* Sends gathered bytes before a program waits: those of sockets that got no part since its last
 * wait, or all. Returns how many sockets still have gathered parts. */
int shim_send_due_parts(int all);

/* Least bytes of a call that is worth a check: shim-break-even.c. */
extern _Atomic uint64_t shim_gate_bytes;
extern _Atomic uint64_t shim_break_even_bytes;
/* Calls of shim_pays() until the break-even size is checked again. */
extern _Atomic int shim_refresh_countdown;
void shim_refresh_break_even(void);

/* Whether a pipe of so many bytes pays. Never waits for the agent. */
INLINE int shim_pays(uint64_t bytes)
{
	if (__builtin_expect(
		    atomic_fetch_sub_explicit(&shim_refresh_countdown, 1, memory_order_relaxed) <=
			0,
		    0))
		shim_refresh_break_even();
	return bytes >= atomic_load_explicit(&shim_break_even_bytes, memory_order_relaxed);
}

/* Returns the ends of a pipe. */
struct shim_ends shim_get_ends(const struct stat *in, const struct stat *out);
/* Returns where a call reads or writes: *offset, or the descriptor's own position without one;
 * negative when it has none. */
int64_t shim_get_position(int fd, const off64_t *offset);
void shim_move_position(int fd, off64_t *offset, int64_t to);
/* Most bytes that sendfile(2) and copy_file_range(2) move in one call. */
#define SHIM_MAX_COUNT ((size_t)0x7ffff000)

/* Call that copies a part of a file into a file. */
struct shim_copy {
	int in_fd;
	int out_fd;
	off64_t *in_offset;
	off64_t *out_offset;
	size_t count;
	struct stat in;
	struct stat out;
};

/* Copies by a pipe. Returns 1 with the result when it moved bytes, else 0: call the original. */
int shim_copy(const struct shim_copy *copy, ssize_t *result);

#endif
