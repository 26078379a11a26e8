/* Parts of mrpipe. */
#ifndef MRPIPE_H
#define MRPIPE_H

#include <stdint.h>
#include <sys/types.h>

enum mode { MODE_BOTH, MODE_PIPE, MODE_PLAIN, MODE_READ_WRITE };

/* Settings from the command line. */
struct job {
	enum mode mode;
	long rounds;
	int64_t offset;     /* in the file, or in the first of two files */
	int64_t out_offset; /* in the second of two files */
	int64_t bytes;      /* negative: all */
	uint32_t timeout_ms;
	int keep_content; /* the sink may exist and is not cut */
	int cork;
	int requests;
	char *listen_at;
	char *connect_to;
	char *forward_to;
};

/* Counts of the calls of all rounds. */
struct totals {
	int64_t piped;
	int64_t sent;
	int reason;
	int error;
};

/* Source and sink of the bytes. Positions are of files, and advance by themselves. */
struct ends {
	int in;
	int out;
	int in_is_file;
	int out_is_file;
	off_t in_offset;
	off_t out_offset;
};

/* mrpipe.c */
__attribute__((noreturn)) void die(const char *action);

/* mrpipe-net.c: `address_text` has the form [ADDRESS:]PORT. */
int open_listening(char *address_text);
int open_connected(char *address_text);
void send_all(int fd, const void *bytes, size_t len);
/* Reads a line with its end, byte for byte, so that what follows stays in the socket. */
void read_line(int fd, char *line, size_t size);
void set_cork(int fd, int on);
/* Closes the sending side, and waits for the peer to close its own. */
void finish(int fd);

/* mrpipe-move.c: moves a number of bytes. Returns the number moved. */
int64_t move_bytes(struct ends *ends, int64_t bytes, const struct job *job, struct totals *totals);

/* mrpipe-modes.c: run a mode, and report the bytes moved. */
void run_send(struct job *job, const char *path, struct totals *totals);
void run_get(struct job *job, const char *path, struct totals *totals);
void run_proxy(struct job *job, struct totals *totals);
void run_copy(struct job *job, const char *from, const char *to, struct totals *totals);
void report(const struct totals *totals, int is_whole);

#endif
