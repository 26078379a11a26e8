/* The preload shim's parts: what it knows of descriptors, and pipes to non-blocking sockets.
 *
 * sendfile(2) of a file to a TCP socket and, to another file, sendfile(2) and copy_file_range(2) become
 * pipes. splice(2) never does: one of its ends is always a kernel pipe, and what is in that is in the
 * guest, where any process that has the pipe may read it. There is nothing that the host could move.
 *
 * A program with an event loop must not wait in sendfile(2). Its pipe goes on beside it: sendfile gives
 * EAGAIN, as for a socket that takes no more, and EPOLLOUT comes when the pipe is over. For that
 * - the pipe's descriptor is added to the epoll set that the socket is in, and EPOLLOUT is taken out of
 *   the socket's events;
 * - when the pipe is over, its descriptor goes and the socket's events are put back: the kernel itself
 *   then tells EPOLLOUT, with EPOLLET or EPOLLONESHOT or without, as the program wanted it;
 * - the next sendfile of the same bytes of the same file returns what was moved.
 *
 * A program that sends a file in parts, each too small for a pipe, gets them sent together: shim-gather.c.
 *
 * One lock is around all of it. It is held over no call that waits, unless a set is full and cannot tell a
 * pipe's end. Few calls need it: a descriptor of which nothing is known has no bits set. */
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
/* Most of a program's calls are nobody's business but the kernel's. Those ways through the shim have few
 * branches, and lie on one page: the first of them, in the object that is linked first, begins it. (An emulated
 * CPU ends a piece of its own code at each branch, and looks up where each jump to another page leads; a real
 * one has few pages in its nearest table.) */
#define HOT __attribute__((hot))
#define HOT_FIRST HOT __attribute__((aligned(4096)))
#define INLINE static inline __attribute__((always_inline))
/* They save no registers for what they rarely do, which is elsewhere. */
#define APART __attribute__((noinline, cold))

/* The function that a wrapper stands before. */
#define NEXT(name)                                                                    \
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
#define IN_SET 1u   /* it is in an epoll set that is known */
#define IN_MORE 2u  /* in more than one, or as EPOLLEXCLUSIVE: no pipe can wait there */
#define HAS_PIPE 4u /* a pipe goes to it, or has and the program does not know yet */
#define IS_PIPE 8u  /* it is a pipe's own */
#define IS_SET 16u  /* it is an epoll set in which something is known */
#define REFUSED 32u /* pipes to it were refused, or the next call is to be the original */

/* What a pipe connects: a file, and a socket or another file. */
struct shim_ends {
	dev_t in_dev;
	ino_t in_ino;
	dev_t out_dev;
	ino_t out_ino;
	int out_is_file;
};

/* A pipe to a non-blocking socket. */
struct shim_pipe {
	int fd;   /* -1 when it is over */
	int set;  /* the epoll set that fd is in, or -1 */
	int lost; /* how much was moved is not known */
	int asked; /* so often for its result, in vain */
	/* For EPOLLONESHOT: the program has armed it during the pipe and got no event since. */
	int armed;
	/* What the program wants of these options of the socket, or -1. They are set at the end: the
	 * agent changes them too. */
	int cork;
	int nodelay;
	struct shim_ends ends;
	int64_t at;    /* where in the file that begins which was moved, */
	int64_t moved; /* and how much of it the program does not know of */
	/* Of parts that the program believes to be sent; else 0: */
	int64_t gathered;	 /* how many bytes from `at` on */
	int file;		 /* our own descriptor of the file until the pipe begins, or -1 */
	struct connection agent; /* which is asked then */
	int rounds;		 /* so often the program has waited since the last part */
	int is_shut;		 /* it has shut the connection down: that comes when all is sent */
	int64_t since_ms;	 /* when its pipe began */
	struct shim_pipe *next;	 /* of those that are over */
};

/* A file that is sent in parts, one behind the other. */
struct shim_run {
	dev_t dev;
	ino_t ino;
	int64_t at;    /* where the next part begins */
	int parts;     /* how many there were */
	int64_t limit; /* so many bytes are gathered at most; 0: as few as pay */
};

/* A descriptor. */
struct entry {
	_Atomic uint32_t bits;
	/* Which socket and which pipe with this number it is: others are gone. */
	uint32_t generation;
	uint32_t pipes;
	/* The epoll set, and what the program wants to hear from it; of a pipe's own: set is the socket. */
	int set;
	uint32_t events;
	uint64_t data;
	struct shim_pipe *pipe;
	/* The socket that was refused, since the number may be another's now. */
	ino_t refused_ino;
	int64_t refused_until_ms;
	/* Nothing could be piped: the next sendfile is the original. */
	int once;
	struct shim_run run;
	/* Of a set: the one thread that has waited in it (the address of its shim_waited_in), or another address when there were more. */
	const void *waiter;
	/* Where the last part ended, and of which descriptor it was: the next one is worth a look. */
	_Atomic int last_in;
	_Atomic int64_t last_end;
};

/* The lock; 0 when it is not to be had, in a signal handler within it. Cancellation of the thread waits
 * meanwhile. */
int shim_lock(void);
/* For what a child of vfork(2) calls before its exec: 0 in such a child too. Its memory is its parent's, its
 * descriptors are not. */
int shim_lock_own(void);
void shim_unlock(void);
/* The same where nothing is called meanwhile at which a thread can be cancelled. */
int shim_lock_briefly(void);
void shim_unlock_briefly(void);

/* Nobody's entry, of which nothing is ever known; behind it those of descriptors. */
extern _Atomic(struct entry *) shim_table;
/* Of so many descriptors something may be known. Grows after the table is there. */
extern _Atomic uint32_t shim_known;

/* What is known of a descriptor: perhaps nobody's entry. Needs no lock, but what is in it does. Here, as many
 * calls of a program begin with it. */
INLINE struct entry *shim_look_up(int fd)
{
	uint32_t known = atomic_load_explicit(&shim_known, memory_order_acquire);
	struct entry *entries = atomic_load_explicit(&shim_table, memory_order_relaxed);
	/* No branch: a number that is negative is a large one. */
	uint32_t at = (uint32_t)fd < known ? (uint32_t)fd + 1 : 0;

	return &entries[at];
}

/* The same, or NULL. */
static inline struct entry *shim_find(int fd)
{
	uint32_t known = atomic_load_explicit(&shim_known, memory_order_acquire);
	struct entry *entries = atomic_load_explicit(&shim_table, memory_order_relaxed);

	return (uint32_t)fd < known ? &entries[(uint32_t)fd + 1] : NULL;
}

/* Those of these bits that are set. Needs no lock. */
INLINE uint32_t shim_bits(const struct entry *entry, uint32_t bits)
{
	return atomic_load_explicit(&entry->bits, memory_order_acquire) & bits;
}

/* True when one of them is set. */
INLINE int shim_has(int fd, uint32_t bits)
{
	return shim_bits(shim_look_up(fd), bits) != 0;
}

/* The following with the lock. */

/* As shim_find, and begins to know. */
struct entry *shim_make(int fd);
/* These are about to be closed, or were, but for our own. Cancels their pipes. */
void shim_forget(int first, int last);

/* True while a pipe goes to it. Clears up after one that is over. */
int shim_pipe_runs(int fd, struct entry *entry);
/* Lets go of a pipe; cancels it if it is under way. */
void shim_drop_pipe(struct entry *entry);
/* Adds a pipe's descriptor to the socket's epoll set; -1 when it is full. */
int shim_watch(int fd, struct entry *entry);
/* Takes EPOLLOUT out of what the epoll set tells of a socket; -1 when the socket is not in it. */
int shim_mask(int fd, const struct entry *entry);
/* Lets it tell all that the program wants. */
void shim_unmask(int fd, const struct entry *entry);

/* Takes a socket out of its set. */
void shim_leave_set(int fd, const struct entry *entry);

/* Whether a pipe may be asked for: not when it was refused a short time ago. entry is the socket's and may
 * be NULL, as for a file. */
int shim_may_ask(struct entry *entry, const struct shim_ends *ends);
/* Who is not to be asked again soon, after this reason. */
void shim_refused(struct entry *entry, const struct shim_ends *ends, int reason);

/* A part of a file for a socket. */
struct shim_part {
	int out_fd;
	int in_fd;
	int64_t at;
	int64_t len;
	int64_t left; /* from `at` to the end of the file */
	struct shim_ends ends;
};

/* How many bytes are taken and will be sent; 0: the part is the original's. */
int64_t shim_gather(const struct shim_part *part, struct entry *entry);
/* What the original did with a part. */
void shim_sent(const struct shim_part *part, struct entry *entry, ssize_t sent);
/* Has what was gathered sent, if that has not begun: a pipe runs then, or all is done. */
void shim_send_gathered(int fd, struct entry *entry);
/* A pipe with what was gathered is over. */
void shim_gathered_over(int fd, struct entry *entry, const struct millrace_result *result);
/* In a child of fork(2): it is the parent's. */
void shim_forget_gathered(void);
/* Takes the cork off, so that what waits for these bytes goes; the program gets it back at the end. */
int shim_uncork(int fd);
/* The pipe's own descriptor is not the program's to close. */
void shim_mark_own(int own_fd, int socket);
/* A pipe of which nothing is known but its ends, or NULL; and one that is over. */
struct shim_pipe *shim_new_pipe(const struct shim_ends *ends, int64_t at);
void shim_spare_pipe(struct shim_pipe *pipe);

/* The following without the lock. */

/* The epoll set in which this thread has waited last. */
extern __thread int shim_waited_in;
/* It is about to wait in another. */
void shim_waits_in(int set);
extern _Atomic int shim_waiting_len;
static inline int shim_is_gathering(void)
{
	return atomic_load(&shim_waiting_len) > 0;
}
/* Before a program waits. Has sent what no part was added to since it has waited last, or all of it; how
 * many sockets have gathered parts still. */
int shim_send_due(int all);

/* Fewer bytes than this are not worth a look: shim-least.c. */
extern _Atomic uint64_t shim_gate_bytes;
extern _Atomic uint64_t shim_least_bytes;
/* So many answers until it is looked whether they are right still. */
extern _Atomic int shim_answers_left;
void shim_look_again(void);

/* Whether a pipe of so many bytes pays. Never waits for the agent's opinion. */
INLINE int shim_pays(uint64_t bytes)
{
	if (__builtin_expect(atomic_fetch_sub_explicit(&shim_answers_left, 1, memory_order_relaxed) <= 0, 0))
		shim_look_again();
	return bytes >= atomic_load_explicit(&shim_least_bytes, memory_order_relaxed);
}

/* The ends of a pipe. */
struct shim_ends shim_ends_of(const struct stat *in, const struct stat *out);
/* Where a call reads or writes: *offset, or the descriptor's own position without one; negative when it
 * has none. */
int64_t shim_position(int fd, const off64_t *offset);
void shim_move_position(int fd, off64_t *offset, int64_t to);
/* What sendfile(2) and copy_file_range(2) move at most in one call. */
#define SHIM_MAX_COUNT ((size_t)0x7ffff000)

/* A call that copies a part of a file into a file. */
struct shim_copy {
	int in_fd;
	int out_fd;
	off64_t *in_offset;
	off64_t *out_offset;
	size_t count;
	struct stat in;
	struct stat out;
};

/* 1 with the result when a pipe moved something; 0: it is the original's turn. */
int shim_copy(const struct shim_copy *copy, ssize_t *result);

#endif
