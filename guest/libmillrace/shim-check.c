/* Uses the shim as event-driven servers do; a test of guest/agent runs it. What the daemon is to say is
 * told on standard output: "done LEN MOVED REASON" ends the pipe of so many bytes that was asked for
 * last; "asked" and "cancelled LEN" are answered with a line when the daemon has heard of it. */
#define _GNU_SOURCE
#include "millrace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LONG_MS 30000
/* Nothing is expected: long enough for most of what would be wrong. */
#define SHORT_MS 20
#define LEN 100000
#define SMALL 1000
#define THREADS 4
#define ROUNDS 25

#define CHECK(what)                                                                   \
	do {                                                                          \
		if (!(what)) {                                                        \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno);  \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

/* A connection, the epoll set with its server's end, and where it is in the file. */
struct world {
	int set;
	int server;
	int client;
	off_t at;
};

static int file;
/* Of each pipe, so that the daemon knows it from others. */
static size_t next_len = LEN;

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

/* Exactly one event, and which. */
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

/* Until the daemon has been asked: the agent refuses a connection that is closed before. */
static void wait_asked(void)
{
	TELL("asked\n");
	CHECK(getchar() == '\n');
}

static void wait_cancelled(size_t len)
{
	TELL("cancelled %zu\n", len);
	CHECK(getchar() == '\n');
}

/* A pipe under way, of so many bytes. */
#define BEGIN(world)                                                                  \
	__extension__({                                                               \
		size_t wanted = next_len++;                                           \
		CHECK(sendfile((world)->server, file, &(world)->at, wanted) == -1);   \
		CHECK(errno == EAGAIN);                                               \
		wanted;                                                               \
	})

/* These bytes were moved, as the program hears. */
#define TAKE(world, len)                                                              \
	do {                                                                          \
		off_t before = (world)->at;                                           \
		errno = 77;                                                           \
		CHECK(sendfile((world)->server, file, &(world)->at, len) == (ssize_t)(len));  \
		CHECK((world)->at == before + (off_t)(len) && errno == 77);           \
	} while (0)

/* The original moves bytes, which arrive; no pipe does. */
#define SENDS(world, len)                                                             \
	do {                                                                          \
		static char bytes[2 * LEN];                                           \
		ssize_t sent = sendfile((world)->server, file, &(world)->at, len);    \
		CHECK(sent > 0 && sent <= (ssize_t)(len));                            \
		CHECK(recv((world)->client, bytes, (size_t)sent, MSG_WAITALL) == sent);       \
	} while (0)

static void check_edges(void)
{
	uint32_t wish = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
	struct world world = new_world(wish, 5);
	struct iovec part = {.iov_base = "x", .iov_len = 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	size_t len;

	EXPECT(&world, EPOLLOUT, 5);
	len = BEGIN(&world);
	EXPECT_NOTHING(&world);
	/* Whatever is written now has to wait. */
	CHECK(sendfile(world.server, file, &world.at, len) == -1 && errno == EAGAIN);
	CHECK(write(world.server, "x", 1) == -1 && errno == EAGAIN);
	CHECK(writev(world.server, &part, 1) == -1 && errno == EAGAIN);
	CHECK(send(world.server, "x", 1, 0) == -1 && errno == EAGAIN);
	CHECK(sendto(world.server, "x", 1, 0, NULL, 0) == -1 && errno == EAGAIN);
	CHECK(sendmsg(world.server, &message, 0) == -1 && errno == EAGAIN);
	/* Other events come. */
	CHECK(write(world.client, "x", 1) == 1);
	EXPECT(&world, EPOLLIN, 5);
	EXPECT_NOTHING(&world);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLIN | EPOLLOUT, 5);
	EXPECT_NOTHING(&world);
	TAKE(&world, len);
	SENDS(&world, SMALL);
	/* And again. */
	len = BEGIN(&world);
	wait_asked();
	CHECK(shutdown(world.client, SHUT_WR) == 0);
	EXPECT(&world, EPOLLIN | EPOLLRDHUP, 5);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLIN | EPOLLOUT | EPOLLRDHUP, 5);
	TAKE(&world, len);
	end(&world);
}

static void check_levels(void)
{
	struct world world = new_world(EPOLLIN, 5);
	size_t len = BEGIN(&world);
	off_t at;

	modify(&world, EPOLLIN | EPOLLOUT, UINT64_MAX);
	EXPECT_NOTHING(&world);
	/* A part is moved, and taken in parts. */
	tell_done(len, 5000, MILLRACE_TIMED_OUT);
	EXPECT(&world, EPOLLOUT, UINT64_MAX);
	EXPECT(&world, EPOLLOUT, UINT64_MAX);
	TAKE(&world, 2000);
	at = world.at;
	CHECK(sendfile(world.server, file, &world.at, len) == 3000 && world.at == at + 3000);
	len = BEGIN(&world);
	modify(&world, EPOLLIN, 6);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT_NOTHING(&world);
	TAKE(&world, len);
	/* The file's own position. */
	CHECK(lseek(file, 50, SEEK_SET) == 50);
	len = next_len++;
	CHECK(sendfile(world.server, file, NULL, len) == -1 && errno == EAGAIN);
	modify(&world, EPOLLOUT, 6);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 6);
	CHECK(sendfile(world.server, file, NULL, len) == (ssize_t)len);
	CHECK(lseek(file, 0, SEEK_CUR) == 50 + (off_t)len);
	end(&world);
}

static void check_once(void)
{
	struct world world = new_world(EPOLLOUT | EPOLLONESHOT, 5);
	size_t len;

	EXPECT(&world, EPOLLOUT, 5);
	len = BEGIN(&world);
	tell_done(len, len, MILLRACE_COMPLETE);
	/* Not armed. */
	EXPECT_NOTHING(&world);
	TAKE(&world, len);
	len = BEGIN(&world);
	modify(&world, EPOLLIN | EPOLLOUT | EPOLLONESHOT, 7);
	CHECK(write(world.client, "x", 1) == 1);
	EXPECT(&world, EPOLLIN, 7);
	tell_done(len, len, MILLRACE_COMPLETE);
	/* Armed, and disarmed. */
	EXPECT_NOTHING(&world);
	modify(&world, EPOLLOUT | EPOLLONESHOT, 8);
	EXPECT(&world, EPOLLOUT, 8);
	TAKE(&world, len);
	len = BEGIN(&world);
	modify(&world, EPOLLOUT | EPOLLONESHOT, 9);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 9);
	EXPECT_NOTHING(&world);
	TAKE(&world, len);
	end(&world);
}

static void check_refusals(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	size_t len = BEGIN(&world);

	tell_done(len, 0, MILLRACE_FLOW_BUSY);
	EXPECT(&world, EPOLLOUT, 5);
	SENDS(&world, LEN);
	/* Not now, but after a while. */
	SENDS(&world, LEN);
	usleep(1200000);
	len = BEGIN(&world);
	tell_done(len, 0, MILLRACE_NO_FLOW);
	EXPECT(&world, EPOLLOUT, 5);
	SENDS(&world, LEN);
	usleep(1200000);
	SENDS(&world, LEN);
	end(&world);
	/* It was that connection. The end of the file is no refusal. */
	world = new_world(EPOLLOUT, 5);
	len = BEGIN(&world);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	TAKE(&world, len);
	world.at = lseek(file, 0, SEEK_END);
	/* The agent may say so at once. */
	if (sendfile(world.server, file, &world.at, LEN) != 0) {
		CHECK(errno == EAGAIN);
		EXPECT(&world, EPOLLOUT, 5);
		CHECK(sendfile(world.server, file, &world.at, LEN) == 0);
	}
	end(&world);
}

static void check_originals(void)
{
	struct epoll_event event = {.events = EPOLLIN};
	struct world world = new_world(0, 0);
	struct world other = new_world(EPOLLIN, 1);

	SENDS(&world, LEN);
	CHECK(epoll_ctl(other.set, EPOLL_CTL_ADD, world.server, &event) == 0);
	CHECK(epoll_ctl(world.set, EPOLL_CTL_ADD, world.server, &event) == 0);
	SENDS(&world, LEN);
	end(&world);
	world = new_world(EPOLLIN | EPOLLEXCLUSIVE, 0);
	SENDS(&world, LEN);
	CHECK(epoll_ctl(world.set, EPOLL_CTL_DEL, world.server, NULL) == 0);
	SENDS(&world, LEN);
	SENDS(&other, SMALL);
	end(&world);
	end(&other);
}

static void check_errors(void)
{
	struct world world = new_world(EPOLLOUT, 5);
	off_t elsewhere = 12345;
	size_t len = BEGIN(&world);

	/* Not the same bytes. */
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	CHECK(sendfile(world.server, file, &elsewhere, len) == -1 && errno == EIO);
	end(&world);
	world = new_world(EPOLLOUT, 5);
	len = BEGIN(&world);
	tell_done(len, 0, MILLRACE_LOST);
	EXPECT(&world, EPOLLOUT, 5);
	CHECK(sendfile(world.server, file, &world.at, len) == -1 && errno == EIO);
	CHECK(sendfile(world.server, file, &world.at, len) == -1 && errno == EIO);
	end(&world);
}

static void check_ends(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	int other = open("/dev/null", O_RDONLY);
	size_t len = BEGIN(&world);

	wait_asked();
	CHECK(close(world.server) == 0);
	wait_cancelled(len);
	EXPECT_NOTHING(&world);
	close(world.client);
	close(world.set);
	/* Another connection with the same number. */
	world = new_world(EPOLLIN | EPOLLOUT, 5);
	len = BEGIN(&world);
	wait_asked();
	CHECK(shutdown(world.server, SHUT_WR) == 0);
	wait_cancelled(len);
	end(&world);
	world = new_world(EPOLLIN | EPOLLOUT, 5);
	len = BEGIN(&world);
	wait_asked();
	CHECK(dup2(other, world.server) == world.server);
	wait_cancelled(len);
	end(&world);
	world = new_world(EPOLLIN | EPOLLOUT, 5);
	len = BEGIN(&world);
	wait_asked();
	CHECK(close_range((unsigned)world.server, (unsigned)world.server, 0) == 0);
	wait_cancelled(len);
	end(&world);
	close(other);
}

static void check_sets(void)
{
	struct epoll_event event = {.events = EPOLLOUT, .data.u64 = 6};
	struct world world = new_world(EPOLLOUT, 5);
	size_t len = BEGIN(&world);

	/* Out of one and into another, which may be after the first has gone. */
	CHECK(epoll_ctl(world.set, EPOLL_CTL_DEL, world.server, NULL) == 0);
	for (int is_closed = 0; is_closed < 2; is_closed++) {
		int old = world.set;

		world.set = epoll_create1(0);
		if (is_closed)
			CHECK(close(old) == 0);
		CHECK(epoll_ctl(world.set, EPOLL_CTL_ADD, world.server, &event) == 0);
		EXPECT_NOTHING(&world);
		tell_done(len, len, MILLRACE_COMPLETE);
		EXPECT(&world, EPOLLOUT, 6);
		TAKE(&world, len);
		len = BEGIN(&world);
	}
	/* In none, its end is seen by sendfile alone. */
	CHECK(epoll_ctl(world.set, EPOLL_CTL_DEL, world.server, NULL) == 0);
	tell_done(len, len, MILLRACE_COMPLETE);
	while (sendfile(world.server, file, &world.at, len) == -1)
		CHECK(errno == EAGAIN);
	end(&world);
}

static void check_waits(void)
{
	struct timespec time = {.tv_sec = LONG_MS / 1000};
	struct world world = new_world(EPOLLOUT, 5);
	struct epoll_event got;
	size_t len;

	for (int i = 0; i < 3; i++) {
		len = BEGIN(&world);
		tell_done(len, len, MILLRACE_COMPLETE);
		CHECK((i == 0 ? epoll_pwait(world.set, &got, 1, -1, NULL)
		       : i == 1 ? epoll_pwait2(world.set, &got, 1, &time, NULL)
				: epoll_pwait2(world.set, &got, 1, NULL, NULL)) == 1);
		CHECK(got.events == EPOLLOUT && got.data.u64 == 5);
		TAKE(&world, len);
	}
	time.tv_nsec = -1;
	CHECK(epoll_pwait2(world.set, &got, 1, &time, NULL) == -1 && errno == EINVAL);
	end(&world);
}

static int get_option(int fd, int name)
{
	int value = -1;
	socklen_t len = sizeof(value);

	CHECK(getsockopt(fd, IPPROTO_TCP, name, &value, &len) == 0);
	return value != 0;
}

static void set_option(int fd, int name, int value)
{
	CHECK(setsockopt(fd, IPPROTO_TCP, name, &value, sizeof(value)) == 0);
}

static void check_options(void)
{
	struct world world = new_world(EPOLLOUT, 5);

	for (int corked_after = 0; corked_after < 2; corked_after++) {
		size_t len;

		set_option(world.server, TCP_CORK, 1);
		len = BEGIN(&world);
		CHECK(get_option(world.server, TCP_CORK) == 0);
		if (!corked_after)
			set_option(world.server, TCP_CORK, 0);
		set_option(world.server, TCP_NODELAY, 1);
		tell_done(len, len, MILLRACE_COMPLETE);
		EXPECT(&world, EPOLLOUT, 5);
		TAKE(&world, len);
		CHECK(get_option(world.server, TCP_CORK) == corked_after);
		CHECK(get_option(world.server, TCP_NODELAY) == 1);
	}
	end(&world);
}

/* Of a program that closes all descriptors, and of one that forks. */
static void check_others(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	size_t len = BEGIN(&world);
	int status;
	pid_t child;

	for (int fd = 3; fd < 100; fd++)
		if (fd != file && fd != world.server && fd != world.client && fd != world.set)
			close(fd);
	child = fork();
	if (child == 0) {
		for (int fd = 3; fd < 100; fd++)
			close(fd);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	child = vfork();
	if (child == 0) {
		close(world.server);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	EXPECT_NOTHING(&world);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	TAKE(&world, len);
	end(&world);
}

static void *run_thread(void *argument)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT | EPOLLET, 5);
	struct epoll_event got;

	for (int i = 0; i < ROUNDS; i++) {
		off_t at = 10;

		while (sendfile(world.server, file, &at, LEN) == -1) {
			CHECK(errno == EAGAIN);
			CHECK(epoll_wait(world.set, &got, 1, LONG_MS) == 1);
			CHECK(got.data.u64 == 5);
		}
		CHECK(at == 10 + LEN);
	}
	end(&world);
	return argument;
}

static void check_threads(void)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, run_thread, NULL) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	file = open(argv[1], O_RDONLY);
	CHECK(file >= 0);
	if (argc > 2) {
		check_threads();
		return 0;
	}
	check_edges();
	check_levels();
	check_once();
	check_originals();
	check_errors();
	check_ends();
	check_sets();
	check_waits();
	check_options();
	check_others();
	check_refusals();
	return 0;
}
