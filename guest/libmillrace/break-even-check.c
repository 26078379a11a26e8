/* Sends with the shim until it knows the break-even size of pipes. A test of guest/agent runs
 * it, with an agent that moves one byte of each pipe. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/sendfile.h>
#include <unistd.h>

#define KIB 1024

/* Time limit of a wait. */
#define LONG_S 30

static int in, out;

static ssize_t send_kib(ssize_t kib)
{
	off_t at = 0;

	CHECK(lseek(out, 0, SEEK_SET) == 0);
	return sendfile(out, in, &at, (size_t)kib * KIB);
}

int main(int argc, char **argv)
{
	alarm(LONG_S);
	CHECK(argc == 3);
	in = open(argv[1], O_RDONLY);
	out = open(argv[2], O_RDWR | O_CREAT, 0644);
	CHECK(in >= 0 && out >= 0);
	/* Too small for a question to the agent. */
	for (int i = 0; i < 100; i++)
		CHECK(send_kib(63) == 63 * KIB);
	printf("small\n");
	fflush(stdout);
	CHECK(getchar() == '\n');
	/* The size is not known: no pipe, but a question. */
	CHECK(send_kib(1023) == 1023 * KIB);
	CHECK(send_kib(1024) == 1);
	/* One of the calls finds the answer. */
	while (send_kib(200) != 1)
		;
	CHECK(send_kib(32) == 1);
	CHECK(send_kib(31) == 31 * KIB);
	return 0;
}
