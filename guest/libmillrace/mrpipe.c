/* mrpipe: sends a file over TCP, by a pipe, by sendfile(2) or through memory, and tells what came of
 * it: for tests and benchmarks.
 *
 * Each round is a header line "MRPIPE <round> <bytes>", the bytes, and a trailer "END <round>". */
#define _GNU_SOURCE
#include "millrace.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "usage: mrpipe (-l [ADDRESS:]PORT | -c ADDRESS:PORT) [options] FILE\n"
    "  -l  listen and take one connection    -c  connect\n"
    "  -p  pipe, never anything else         -s  plain sendfile\n"
    "  -w  read and write\n"
    "  -b  pipe, then sendfile for what was not piped (the default)\n"
    "  -n ROUNDS  -o OFFSET  -z BYTES (of the file; all)  -t TIMEOUT_MS of a pipe\n"
    "  -k  cork the socket from header to trailer\n"
    "  -r  wait for a line from the peer before each round\n";

/* What read(2) and write(2) move at a time. */
#define BUFFER_BYTES (64 * 1024)

enum mode { MODE_BOTH, MODE_PIPE, MODE_SENDFILE, MODE_READ_WRITE };

struct job {
	enum mode mode;
	long rounds;
	int64_t offset;
	int64_t bytes;
	uint32_t timeout_ms;
	int cork;
	int requests;
};

/* What the calls of all rounds did. */
struct totals {
	int64_t piped;
	int64_t sent;
	int reason;
	int error;
};

static void die(const char *what)
{
	fprintf(stderr, "mrpipe: %s: %s\n", what, strerror(errno));
	exit(1);
}

static int open_socket(char *where, int do_listen)
{
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
	char *port = strrchr(where, ':');
	char *host = port ? where : NULL;
	struct addrinfo *found;
	int one = 1;
	int fd;

	if (port) {
		*port++ = '\0';
		if (*host == '[') {
			host++;
			host[strcspn(host, "]")] = '\0';
		}
	} else {
		port = where;
		hints.ai_flags |= AI_PASSIVE;
	}
	if (getaddrinfo(host, port, &hints, &found) != 0) {
		fprintf(stderr, "mrpipe: no such address\n");
		exit(2);
	}
	fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP);
	if (fd < 0)
		die("socket");
	if (do_listen) {
		int connection;

		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		if (bind(fd, found->ai_addr, found->ai_addrlen) < 0 || listen(fd, 1) < 0)
			die("listen");
		printf("listening\n");
		fflush(stdout);
		connection = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
		if (connection < 0)
			die("accept");
		close(fd);
		fd = connection;
	} else if (connect(fd, found->ai_addr, found->ai_addrlen) < 0) {
		die("connect");
	}
	freeaddrinfo(found);
	return fd;
}

static void send_all(int fd, const char *bytes, size_t len)
{
	while (len > 0) {
		ssize_t sent = send(fd, bytes, len, MSG_NOSIGNAL);

		if (sent < 0)
			die("send");
		bytes += sent;
		len -= (size_t)sent;
	}
}

static void read_line(int fd)
{
	char byte = 0;

	while (byte != '\n')
		if (recv(fd, &byte, 1, 0) <= 0)
			die("wait for a request");
}

static void set_cork(int fd, int on)
{
	setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof(on));
}

/* As programs did before sendfile(2); how many bytes. */
static int64_t read_write(int fd, int file, off_t at, size_t count)
{
	static char buffer[BUFFER_BYTES];
	ssize_t got = pread(file, buffer, count < BUFFER_BYTES ? count : BUFFER_BYTES, at);

	if (got < 0)
		die("read");
	send_all(fd, buffer, (size_t)got);
	return got;
}

/* Moves a round's bytes; how many. */
static int64_t move(int fd, int file, const struct job *job, struct totals *totals)
{
	enum mode mode = job->mode;
	int64_t done = 0;

	while (done < job->bytes) {
		struct millrace_options options = MILLRACE_OPTIONS;
		off_t at = job->offset + done;
		size_t count = (size_t)(job->bytes - done);
		int64_t moved;

		if (mode == MODE_SENDFILE || mode == MODE_READ_WRITE) {
			moved = mode == MODE_SENDFILE ? sendfile(fd, file, &at, count)
						      : read_write(fd, file, at, count);
			if (moved < 0)
				die("sendfile");
			if (moved == 0)
				return done;
			totals->sent += moved;
		} else {
			options.in_offset = at;
			options.timeout_ms = job->timeout_ms;
			moved = millrace_pipe_options(fd, file, count, &options);
			totals->reason = millrace_reason();
			totals->error = moved < 0 ? errno : 0;
			if (moved > 0)
				totals->piped += moved;
			else if (mode == MODE_BOTH && millrace_may_fall_back(totals->reason))
				mode = MODE_SENDFILE;
			else
				return done;
			if (moved < 0)
				continue;
		}
		done += moved;
	}
	return done;
}

static int run(int fd, int file, const struct job *job, struct totals *totals)
{
	char line[64];
	int whole = 1;

	for (long round = 0; round < job->rounds && whole; round++) {
		if (job->requests)
			read_line(fd);
		if (job->cork)
			set_cork(fd, 1);
		send_all(fd, line,
			 (size_t)snprintf(line, sizeof(line), "MRPIPE %ld %lld\n", round,
					  (long long)job->bytes));
		whole = move(fd, file, job, totals) == job->bytes;
		if (whole)
			send_all(fd, line,
				 (size_t)snprintf(line, sizeof(line), "END %ld\n", round));
		if (job->cork)
			set_cork(fd, 0);
	}
	return whole;
}

int main(int argc, char **argv)
{
	struct job job = {.rounds = 1, .bytes = -1};
	struct totals totals = {0};
	char *listen_at = NULL, *connect_to = NULL;
	struct stat stat;
	int option, file, fd, whole;

	while ((option = getopt(argc, argv, "l:c:pswbn:o:z:t:kr")) != -1) {
		switch (option) {
		case 'l': listen_at = optarg; break;
		case 'c': connect_to = optarg; break;
		case 'p': job.mode = MODE_PIPE; break;
		case 's': job.mode = MODE_SENDFILE; break;
		case 'w': job.mode = MODE_READ_WRITE; break;
		case 'b': job.mode = MODE_BOTH; break;
		case 'n': job.rounds = atol(optarg); break;
		case 'o': job.offset = atoll(optarg); break;
		case 'z': job.bytes = atoll(optarg); break;
		case 't': job.timeout_ms = (uint32_t)atol(optarg); break;
		case 'k': job.cork = 1; break;
		case 'r': job.requests = 1; break;
		default: fputs(usage, stderr); return 2;
		}
	}
	if (!listen_at == !connect_to || optind + 1 != argc) {
		fputs(usage, stderr);
		return 2;
	}
	file = open(argv[optind], O_RDONLY | O_CLOEXEC);
	if (file < 0 || fstat(file, &stat) < 0)
		die(argv[optind]);
	if (job.bytes < 0)
		job.bytes = stat.st_size > job.offset ? stat.st_size - job.offset : 0;
	fd = open_socket(listen_at ? listen_at : connect_to, listen_at != NULL);
	whole = run(fd, file, &job, &totals);
	printf("{\"piped\": %lld, \"sent\": %lld, \"whole\": %s, \"reason\": %d, "
	       "\"reason_text\": \"%s\", \"errno\": %d}\n",
	       (long long)totals.piped, (long long)totals.sent, whole ? "true" : "false",
	       totals.reason, millrace_reason_text(totals.reason), totals.error);
	fflush(stdout);
	shutdown(fd, SHUT_WR);
	/* Until the peer has all. */
	while (recv(fd, &option, sizeof(option), 0) > 0)
		;
	return 0;
}
