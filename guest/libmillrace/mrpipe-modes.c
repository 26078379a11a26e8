/* Modes of mrpipe, from the first byte to the last. */
#define _GNU_SOURCE
#include "mrpipe.h"

#include "millrace.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Longest header or trailer. */
#define LINE_BYTES 64

static int open_source(const char *path, struct job *job)
{
	struct stat stat;
	int file = open(path, O_RDONLY | O_CLOEXEC);

	if (file < 0 || fstat(file, &stat) < 0)
		die(path);
	if (job->bytes < 0)
		job->bytes = stat.st_size > job->offset ? stat.st_size - job->offset : 0;
	return file;
}

static int open_sink(const char *path, const struct job *job)
{
	int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | (job->keep_content ? 0 : O_TRUNC),
			0644);

	if (file < 0)
		die(path);
	return file;
}

static int open_peer(const struct job *job)
{
	return job->listen_at ? open_listening(job->listen_at) : open_connected(job->connect_to);
}

static void send_header(int fd, long round, int64_t bytes)
{
	char line[LINE_BYTES];

	send_all(fd, line,
		 (size_t)snprintf(line, sizeof(line), "MRPIPE %ld %lld\n", round,
				  (long long)bytes));
}

static void send_trailer(int fd, long round)
{
	char line[LINE_BYTES];

	send_all(fd, line, (size_t)snprintf(line, sizeof(line), "END %ld\n", round));
}

void run_send(struct job *job, const char *path, struct totals *totals)
{
	int file = open_source(path, job);
	int fd = open_peer(job);
	char line[LINE_BYTES];
	int is_whole = 1;

	for (long round = 0; round < job->rounds && is_whole; round++) {
		struct ends ends = {
		    .in = file, .out = fd, .in_is_file = 1, .in_offset = job->offset};

		if (job->requests)
			read_line(fd, line, sizeof(line));
		if (job->cork)
			set_cork(fd, 1);
		send_header(fd, round, job->bytes);
		is_whole = move_bytes(&ends, job->bytes, job, totals) == job->bytes;
		if (is_whole)
			send_trailer(fd, round);
		if (job->cork)
			set_cork(fd, 0);
	}
	report(totals, is_whole);
	finish(fd);
}

/* Receives one round of run_send. Returns 1 when all of it came. */
static int receive_round(int fd, int file, long round, const struct job *job, struct totals *totals)
{
	struct ends ends = {.in = fd, .out = file, .out_is_file = 1, .out_offset = job->offset};
	char line[LINE_BYTES], expected[LINE_BYTES];
	long long bytes;
	long received_round;

	if (job->requests)
		send_all(fd, "GET\n", 4);
	read_line(fd, line, sizeof(line));
	if (sscanf(line, "MRPIPE %ld %lld\n", &received_round, &bytes) != 2 ||
	    received_round != round || bytes < 0) {
		fprintf(stderr, "mrpipe: not a header: %s", line);
		return 0;
	}
	if (move_bytes(&ends, bytes, job, totals) != bytes)
		return 0;
	if (fsync(file) < 0)
		die("fsync");
	read_line(fd, line, sizeof(line));
	snprintf(expected, sizeof(expected), "END %ld\n", round);
	return strcmp(line, expected) == 0;
}

void run_get(struct job *job, const char *path, struct totals *totals)
{
	int file = open_sink(path, job);
	int fd = open_peer(job);
	int is_whole = 1;

	for (long round = 0; round < job->rounds && is_whole; round++)
		is_whole = receive_round(fd, file, round, job, totals);
	report(totals, is_whole);
	finish(fd);
}

void run_proxy(struct job *job, struct totals *totals)
{
	int in = open_listening(job->listen_at);
	struct ends ends = {.in = in, .out = open_connected(job->forward_to)};
	/* Without a number, reads to the end of the stream. */
	int64_t bytes = job->bytes >= 0 ? job->bytes : INT64_MAX;
	int64_t moved = move_bytes(&ends, bytes, job, totals);
	int is_whole = moved == bytes || (job->bytes < 0 && job->mode != MODE_PIPE);

	report(totals, is_whole);
	finish(ends.out);
}

void run_copy(struct job *job, const char *from, const char *to, struct totals *totals)
{
	int in = open_source(from, job);
	int out = open_sink(to, job);
	int is_whole = 1;

	for (long round = 0; round < job->rounds && is_whole; round++) {
		struct ends ends = {in, out, 1, 1, job->offset, job->out_offset};

		is_whole = move_bytes(&ends, job->bytes, job, totals) == job->bytes;
	}
	if (fsync(out) < 0)
		die("fsync");
	report(totals, is_whole);
}

void report(const struct totals *totals, int is_whole)
{
	printf("{\"piped\": %lld, \"sent\": %lld, \"whole\": %s, \"reason\": %d, "
	       "\"reason_text\": \"%s\", \"errno\": %d}\n",
	       (long long)totals->piped, (long long)totals->sent, is_whole ? "true" : "false",
	       totals->reason, millrace_reason_text(totals->reason), totals->error);
	fflush(stdout);
}
