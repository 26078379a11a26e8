/* mrpipe's parts. */
#ifndef MRPIPE_H
#define MRPIPE_H

#include <stdint.h>
#include <sys/types.h>

enum mode { MODE_BOTH, MODE_PIPE, MODE_PLAIN, MODE_READ_WRITE };

/* What the command line says. */
struct job {
	enum mode mode;
	long rounds;
	int64_t offset;     /* in the file; of two, in the first */
	int64_t out_offset; /* in the second of two files */
	int64_t bytes;      /* negative: all */
	uint32_t timeout_ms;
	int keep;
	int cork;
	int requests;
	char *listen_at;
	char *connect_to;
	char *onward;
};

/* What the calls of all rounds did. */
struct totals {
	int64_t piped;
	int64_t sent;
	int reason;
	int error;
};

/* Where bytes come from and go to. Positions are of files, and go on by themselves. */
struct ends {
	int in;
	int out;
	int in_is_file;
	int out_is_file;
	off_t in_at;
	off_t out_at;
};

/* mrpipe.c */
__attribute__((noreturn)) void die(const char *what);

/* mrpipe-net.c: where has the form [ADDRESS:]PORT. */
int open_listening(char *where);
int open_connected(char *where);
void send_all(int fd, const void *bytes, size_t len);
/* Up to and with the end of the line, byte for byte, so that what follows stays in the socket. */
void read_line(int fd, char *line, size_t size);
void set_cork(int fd, int on);
/* Tells the peer that this was all, and waits for its end. */
void finish(int fd);

/* mrpipe-move.c: moves so many bytes; how many. */
int64_t move(struct ends *ends, int64_t bytes, const struct job *job, struct totals *totals);

/* mrpipe-modes.c: and report what was moved. */
void run_send(struct job *job, const char *path, struct totals *totals);
void run_get(struct job *job, const char *path, struct totals *totals);
void run_proxy(struct job *job, struct totals *totals);
void run_copy(struct job *job, const char *from, const char *to, struct totals *totals);
void report(const struct totals *totals, int whole);

#endif
