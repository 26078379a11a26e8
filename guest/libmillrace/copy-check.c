/* Copies files with the shim. A test of guest/agent runs it with an agent that gets an answer
 * for each call, and compares the calls: each has a length of its own. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#define LEN 300000
#define LARGE 100000
#define SMALL 65535

/* Time limit of a wait. */
#define LONG_S 30

static int a;

static int open_new(const char *name, int flags)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | flags, 0644);

	CHECK(fd >= 0);
	return fd;
}

static off_t position(int fd)
{
	return lseek(fd, 0, SEEK_CUR);
}

/* Checks that a range of one file equals a range of the other. */
static void compare(int in, off_t in_at, int out, off_t out_at, size_t len)
{
	static char expected[LEN], received[LEN];

	CHECK(pread(in, expected, len, in_at) == (ssize_t)len);
	CHECK(pread(out, received, len, out_at) == (ssize_t)len);
	CHECK(memcmp(expected, received, len) == 0);
}

static ssize_t copy(int in, off_t *in_at, int out, off_t *out_at, size_t len)
{
	ssize_t copied;

	errno = 77;
	copied = copy_file_range(in, in_at, out, out_at, len, 0);
	CHECK(copied < 0 || errno == 77);
	return copied;
}

static void check_positions(void)
{
	int b = open_new("b", 0);
	off_t in_at = 5, out_at = 7;

	CHECK(copy(a, NULL, b, NULL, LARGE + 1) == LARGE + 1);
	CHECK(position(a) == LARGE + 1 && position(b) == LARGE + 1);
	compare(a, 0, b, 0, LARGE + 1);
	CHECK(copy(a, &in_at, b, &out_at, LARGE + 2) == LARGE + 2);
	CHECK(in_at == LARGE + 7 && out_at == LARGE + 9);
	CHECK(position(a) == LARGE + 1 && position(b) == LARGE + 1);
	compare(a, 5, b, 7, LARGE + 2);
	out_at = 9;
	CHECK(copy(a, NULL, b, &out_at, LARGE + 3) == LARGE + 3);
	CHECK(position(a) == 2 * LARGE + 4 && position(b) == LARGE + 1 && out_at == LARGE + 12);
	compare(a, LARGE + 1, b, 9, LARGE + 3);
	/* As cp does: as much as there is, until there is no more. */
	CHECK(copy(a, NULL, b, NULL, SSIZE_MAX) == LARGE - 4);
	CHECK(copy(a, NULL, b, NULL, SSIZE_MAX) == 0);
	compare(a, 2 * LARGE + 4, b, LARGE + 1, LARGE - 4);
	/* A part. */
	CHECK(lseek(a, 0, SEEK_SET) == 0);
	CHECK(copy(a, NULL, b, NULL, LARGE + 4) == 1000 && position(a) == 1000);
	close(b);
}

/* Calls that are no pipe's: they give the kernel's results. */
static void check_originals(void)
{
	int b = open_new("b", 0), c = open_new("c", O_APPEND), d = open_new("d", O_SYNC);
	off_t in_at = 0, out_at = 10, past = LEN + 1;

	CHECK(copy(a, &in_at, b, &out_at, SMALL) == SMALL);
	compare(a, 0, b, 10, SMALL);
	/* Few bytes are left, whatever the count. */
	in_at = LEN - SMALL;
	CHECK(copy(a, &in_at, b, NULL, SSIZE_MAX) == SMALL);
	CHECK(copy(a, &past, b, NULL, LARGE) == 0);
	CHECK(copy_file_range(a, NULL, b, NULL, LARGE, 1) == -1 && errno == EINVAL);
	in_at = 0;
	CHECK(copy(a, &in_at, a, &out_at, LARGE) == -1 && errno == EINVAL);
	CHECK(copy(a, &in_at, c, NULL, LARGE) == -1 && errno == EBADF);
	CHECK(copy(a, &in_at, d, NULL, LARGE) == LARGE);
	compare(a, 0, d, 0, LARGE);
	CHECK(copy(a, &in_at, 1000, NULL, LARGE) == -1 && errno == EBADF);
	CHECK(copy(1000, NULL, b, NULL, LARGE) == -1 && errno == EBADF);
	close(d);
	d = open("d", O_RDONLY);
	in_at = 0;
	CHECK(copy(a, &in_at, d, NULL, LARGE + 5) == -1 && errno == EBADF && in_at == 0);
	close(b);
	close(c);
	close(d);
}

static void check_sendfile(void)
{
	int b = open_new("b", 0);
	off_t at = 11;

	CHECK(lseek(a, 3, SEEK_SET) == 3);
	errno = 77;
	CHECK(sendfile(b, a, &at, LARGE + 6) == LARGE + 6 && errno == 77);
	CHECK(at == LARGE + 17 && position(a) == 3 && position(b) == LARGE + 6);
	CHECK(sendfile(b, a, NULL, LARGE + 7) == LARGE + 7);
	CHECK(position(a) == LARGE + 10 && position(b) == 2 * LARGE + 13);
	compare(a, 11, b, 0, LARGE + 6);
	compare(a, 3, b, LARGE + 6, LARGE + 7);
	CHECK(sendfile(b, a, &at, SMALL) == SMALL);
	/* Few bytes are left, whatever the count. */
	at = LEN - SMALL;
	CHECK(sendfile(b, a, &at, LARGE) == SMALL);
	close(b);
}

/* The agent dies in the middle: all bytes are copied, though the number moved is not known. */
static void check_lost(void)
{
	int b = open_new("b", 0);
	off_t at = 1;

	CHECK(copy(a, &at, b, NULL, LARGE + 8) == LARGE + 8);
	compare(a, 1, b, 0, LARGE + 8);
	CHECK(position(b) == LARGE + 8);
	close(b);
}

/* Returns one end of a connection; the other stays open and unread. */
static int new_connection(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	int client = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &len) == 0);
	CHECK(connect(client, (void *)&address, len) == 0);
	return accept(listener, NULL, NULL);
}

/* Refusals by each kind of end: the first call is refused, the same again is not asked for,
 * others are. */
static void check_refusals(void)
{
	int b = open_new("b", 0), c = open_new("c", 0), server = new_connection();
	off_t at = 0, to = 0;

	/* These two files. */
	CHECK(copy(a, &at, b, &to, LARGE + 20) == LARGE + 20);
	CHECK(copy(a, &at, b, &to, LARGE + 21) == LARGE + 21);
	at = to = 0;
	CHECK(copy(b, &at, a, &to, LARGE + 22) == LARGE + 22);
	at = 0;
	CHECK(copy(b, &at, c, NULL, LARGE + 40) == LARGE + 40);
	/* These file systems. */
	at = to = 0;
	CHECK(copy(c, &at, b, &to, LARGE + 24) == LARGE + 24);
	at = to = 0;
	CHECK(copy(c, &at, b, &to, LARGE + 25) == LARGE + 25);
	CHECK(copy(a, &at, c, NULL, LARGE + 26) == LARGE + 26);
	/* Nothing is known about a pipe to a socket. */
	at = 0;
	CHECK(sendfile(server, a, &at, LARGE + 27) == 10);
	CHECK(sendfile(server, b, &at, LARGE + 28) == 10);
	close(b);
	close(c);
	close(server);
}

int main(int argc, char **argv)
{
	alarm(LONG_S);
	CHECK(argc == 3 && chdir(argv[1]) == 0);
	a = open("a", O_RDWR);
	CHECK(a >= 0);
	if (strcmp(argv[2], "refusals") == 0) {
		check_refusals();
		return 0;
	}
	check_positions();
	check_originals();
	check_sendfile();
	check_lost();
	return 0;
}
