/* libmillrace: lets the host move bytes between files and TCP connections. See millrace_pipe(3). */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Offset that means the descriptor's own position, which moves with the bytes. */
#define MILLRACE_OWN_POSITION INT64_C(-1)

/* Reasons why a pipe ended or never began: MILLRACE_COMPLETE, MILLRACE_NO_AGENT, ... */
enum millrace_reason {
#define REASON(name, number, error, text) MILLRACE_##name = number,
#include "millrace-reasons.h"
#undef REASON
};

/* Options of a pipe. Set it to MILLRACE_OPTIONS first, then the fields that differ. */
struct millrace_options {
	uint32_t size;       /* size of this structure */
	uint32_t timeout_ms; /* time limit, after which the moved bytes are the result; 0: none */
	int64_t in_offset;   /* start in a file, or MILLRACE_OWN_POSITION; none in a socket */
	int64_t out_offset;  /* start in a file that is written, likewise */
};

#define MILLRACE_OPTIONS                                                              \
	{                                                                             \
		sizeof(struct millrace_options), 0, MILLRACE_OWN_POSITION,            \
		    MILLRACE_OWN_POSITION                                             \
	}

/* Result of a pipe. */
struct millrace_result {
	int64_t moved; /* bytes that arrived: acknowledged by a socket's peer, or in a file */
	int32_t error; /* errno; 0 when bytes were moved or nothing was left */
	int32_t reason; /* enum millrace_reason */
};

/* Moves bytes from in_fd to out_fd, each a file or a TCP socket, and returns when they have
 * arrived. As in sendfile(2), offset is the source's, NULL for its own position and for a
 * socket; a file that is written is written at its own position. Returns the number of bytes,
 * which may be fewer than count, or -1 with errno. */
int64_t millrace_pipe(int out_fd, int in_fd, int64_t *offset, size_t count);

/* Moves bytes like millrace_pipe, with options, which may be NULL. */
int64_t millrace_pipe_options(int out_fd, int in_fd, size_t count,
			      const struct millrace_options *options);

/* Begins a pipe and returns a descriptor that is readable when it is over, or -1 with errno.
 * Closing it before cancels the pipe. */
int millrace_pipe_start(int out_fd, int in_fd, size_t count,
			const struct millrace_options *options);

/* Returns 1 and the result when the pipe is over (then close fd), 0 while it is under way, and -1
 * with errno when fd is not such a descriptor. */
int millrace_pipe_status(int fd, struct millrace_result *result);

/* Returns 1 when the host offers pipes now; else 0, with the reason. */
int millrace_available(void);

/* Returns the break-even size of pipes in this guest in bytes, as the agent has measured it; 0:
 * not known. */
int64_t millrace_min_bytes(void);

/* Returns the reason of the calling thread's last call. */
int millrace_reason(void);

/* Returns a text for a reason, for people. */
const char *millrace_reason_text(int reason);

/* True when, after a call that moved nothing, the ordinary system call may be tried instead.
 * Between two files at given offsets it always may: the same bytes are written again. */
int millrace_may_fall_back(int reason);

#ifdef __cplusplus
}
#endif

#endif
