/* Helpers of shim-check.c: connections, events, and the daemon, which reads on standard output
 * what to answer. "done LEN MOVED REASON" ends the last pipe of LEN bytes; "asked" and
 * "cancelled LEN" are answered with a line when the daemon has got the message. */
#ifndef SHIM_CHECK_H
#define SHIM_CHECK_H

#include "check.h"
#include "millrace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#define LONG_MS 30000
/* Time without an event, long enough to notice most wrong ones. */
#define SHORT_MS 20
#define LEN 100000
#define SMALL 1000

/* A connection, the epoll set with its server's end, and the position in the file. */
struct world {
	int set;
	int server;
	int client;
	off_t at;
};

static int file;
/* Length of each pipe, by which the daemon tells them apart. */
static __attribute__((unused)) size_t next_len = LEN;

static struct world new_world(uint32_t events, uint64_t data)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct epoll_event event = {.events = events, .data.u64 = data};
	socklen_t len = sizeof(address);
	struct world world = {.at = 10};
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	world.client = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &len) == 0);
	CHECK(connect(world.client, (void *)&address, len) == 0);
	world.server = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
	world.set = epoll_create1(0);
	CHECK(world.server >= 0 && world.set >= 0);
	if (events)
		CHECK(epoll_ctl(world.set, EPOLL_CTL_ADD, world.server, &event) == 0);
	close(listener);
	return world;
}

static void end(struct world *world)
{
	close(world->server);
	close(world->client);
	close(world->set);
}

static void modify(const struct world *world, uint32_t events, uint64_t data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};

	CHECK(epoll_ctl(world->set, EPOLL_CTL_MOD, world->server, &event) == 0);
}

/* Expects exactly one event, and which. */
#define EXPECT(world, want, want_data)                                                \
	do {                                                                          \
		struct epoll_event got[8];                                            \
		CHECK(epoll_wait((world)->set, got, 8, LONG_MS) == 1);                \
		CHECK(got[0].events == (want));                                       \
		CHECK(got[0].data.u64 == (want_data));                                \
	} while (0)

#define EXPECT_NOTHING(world)                                                         \
	do {                                                                          \
		struct epoll_event got[8];                                            \
		CHECK(epoll_wait((world)->set, got, 8, SHORT_MS) == 0);               \
	} while (0)

#define TELL(...)                                                                     \
	do {                                                                          \
		printf(__VA_ARGS__);                                                  \
		fflush(stdout);                                                       \
	} while (0)

static void tell_done(size_t len, size_t moved, int reason)
{
	TELL("done %zu %zu %d\n", len, moved, reason);
}

/* Waits until the daemon has been asked: the agent refuses a connection that is closed before. */
static __attribute__((unused)) void wait_asked(void)
{
	TELL("asked\n");
	CHECK(getchar() == '\n');
}

static __attribute__((unused)) void wait_cancelled(size_t len)
{
	TELL("cancelled %zu\n", len);
	CHECK(getchar() == '\n');
}

/* Begins a pipe of a number of bytes. */
#define BEGIN(world)                                                                  \
	__extension__({                                                               \
		size_t wanted = next_len++;                                           \
		CHECK(sendfile((world)->server, file, &(world)->at, wanted) == -1);   \
		CHECK(errno == EAGAIN);                                               \
		wanted;                                                               \
	})

/* Expects the result of a pipe that has moved these bytes. */
#define TAKE(world, len)                                                              \
	do {                                                                          \
		off_t before = (world)->at;                                           \
		errno = 77;                                                           \
		CHECK(sendfile((world)->server, file, &(world)->at, len) == (ssize_t)(len));  \
		CHECK((world)->at == before + (off_t)(len) && errno == 77);           \
	} while (0)

/* Expects the original to move bytes, which arrive, without a pipe. */
#define SENDS(world, len)                                                             \
	do {                                                                          \
		static char bytes[2 * LEN];                                           \
		ssize_t sent = sendfile((world)->server, file, &(world)->at, len);    \
		CHECK(sent > 0 && sent <= (ssize_t)(len));                            \
		CHECK(recv((world)->client, bytes, (size_t)sent, MSG_WAITALL) == sent);       \
	} while (0)

#endif
