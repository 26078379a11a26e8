/* libmillrace: lets the host move bytes between files and TCP connections. See millrace_pipe(3). */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In place of an offset: the descriptor's own position, which moves with the bytes. */
#define MILLRACE_OWN_POSITION INT64_C(-1)

/* Why a pipe ended, or never began: MILLRACE_COMPLETE, MILLRACE_NO_AGENT, ... */
enum millrace_reason {
#define REASON(name, number, error, text) MILLRACE_##name = number,
#include "millrace-reasons.h"
#undef REASON
};

/* Set it to MILLRACE_OPTIONS first, then what differs. */
struct millrace_options {
	uint32_t size;       /* of this structure */
	uint32_t timeout_ms; /* after which it ends with what it has moved; 0: never */
	int64_t in_offset;   /* where to read in a file, or MILLRACE_OWN_POSITION; a socket has none */
	int64_t out_offset;  /* where to write in a file, likewise */
};

#define MILLRACE_OPTIONS                                                              \
	{                                                                             \
		sizeof(struct millrace_options), 0, MILLRACE_OWN_POSITION,            \
		    MILLRACE_OWN_POSITION                                             \
	}

/* What came of a pipe. */
struct millrace_result {
	int64_t moved; /* bytes that arrived: a socket's peer has acknowledged them, a file has them */
	int32_t error; /* errno; 0 when bytes were moved or nothing was left */
	int32_t reason; /* enum millrace_reason */
};

/* Moves bytes from in_fd to out_fd, each a file or a TCP socket, and returns when they have arrived. As
 * sendfile(2) has it, offset is the source's, NULL for its own position and for a socket; a file that is
 * written is written at its own position. Returns how many bytes, which may be fewer than count, or -1
 * with errno. */
int64_t millrace_pipe(int out_fd, int in_fd, int64_t *offset, size_t count);

/* The same with options, which may be NULL. */
int64_t millrace_pipe_options(int out_fd, int in_fd, size_t count,
			      const struct millrace_options *options);

/* Begins a pipe and returns a descriptor that is readable when it is over, or -1 with errno. Closing
 * it before cancels the pipe. */
int millrace_pipe_start(int out_fd, int in_fd, size_t count, const struct millrace_options *options);

/* Returns 1 and the result when the pipe is over (then close fd), 0 while it is under way, and -1
 * with errno when fd is not such a descriptor. */
int millrace_pipe_status(int fd, struct millrace_result *result);

/* Returns 1 when the host offers pipes now; else 0, with the reason. */
int millrace_available(void);

/* From how many bytes on a pipe pays in this guest, as the agent has measured; 0: not known. */
int64_t millrace_min_bytes(void);

/* The reason of the calling thread's last call. */
int millrace_reason(void);

/* For people. */
const char *millrace_reason_text(int reason);

/* True when, after a call that moved nothing, the ordinary system call may be tried instead. Between two
 * files at given offsets it always may: the same bytes are written again. */
int millrace_may_fall_back(int reason);

#ifdef __cplusplus
}
#endif

#endif
