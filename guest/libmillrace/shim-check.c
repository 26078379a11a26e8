/* Uses the shim as event-driven servers do. A test of guest/agent runs it. */
#define _GNU_SOURCE
#include "shim-check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#define THREADS 4
#define ROUNDS 25

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
	/* All later bytes have to wait. */
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

/* abuse_G1: an HTTP client closes its sending side after its request. No agent takes such a
 * connection: its program would see the end before it has sent a byte. */
static void check_half_closed(void)
{
	uint32_t wish = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
	struct world world = new_world(wish, 5);

	EXPECT(&world, EPOLLOUT, 5);
	CHECK(shutdown(world.client, SHUT_WR) == 0);
	EXPECT(&world, EPOLLIN | EPOLLOUT | EPOLLRDHUP, 5);
	SENDS(&world, LEN);
	SENDS(&world, LEN);
	end(&world);
}

static void check_levels(void)
{
	struct world world = new_world(EPOLLIN, 5);
	size_t len = BEGIN(&world);
	off_t at;

	modify(&world, EPOLLIN | EPOLLOUT, UINT64_MAX);
	EXPECT_NOTHING(&world);
	/* A part is moved, and its result taken in parts. */
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
	/* Not now, but after the pause. */
	SENDS(&world, LEN);
	usleep(1200000);
	len = BEGIN(&world);
	tell_done(len, 0, MILLRACE_NO_FLOW);
	EXPECT(&world, EPOLLOUT, 5);
	SENDS(&world, LEN);
	usleep(1200000);
	SENDS(&world, LEN);
	end(&world);
	/* The refusal was that connection's. The end of the file is no refusal. */
	world = new_world(EPOLLOUT, 5);
	len = BEGIN(&world);
	tell_done(len, len, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	TAKE(&world, len);
	world.at = lseek(file, 0, SEEK_END);
	/* The agent may answer at once. */
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

/* The set has no further event of a socket whose pipe was cancelled, though the agent has it
 * open. */
static void expect_cancelled(struct world *world, size_t len)
{
	CHECK(write(world->client, "x", 1) == 1);
	EXPECT_NOTHING(world);
	wait_cancelled(len);
	EXPECT_NOTHING(world);
	end(world);
}

static void check_ends(void)
{
	int other = open("/dev/null", O_RDONLY);

	for (int method = 0; method < 4; method++) {
		struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
		size_t len = BEGIN(&world);

		wait_asked();
		if (method == 0)
			CHECK(close(world.server) == 0);
		else if (method == 1)
			CHECK(close_range((unsigned)world.server, (unsigned)world.server, 0) == 0);
		else
			CHECK((method == 2 ? dup2(other, world.server)
					: dup3(other, world.server, O_CLOEXEC)) == world.server);
		expect_cancelled(&world, len);
	}
	close(other);
}

static void check_shutdown(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	size_t len = BEGIN(&world);

	wait_asked();
	CHECK(shutdown(world.server, SHUT_RD) == 0);
	CHECK(sendfile(world.server, file, &world.at, len) == -1 && errno == EAGAIN);
	CHECK(shutdown(world.server, SHUT_WR) == 0);
	EXPECT(&world, EPOLLIN | EPOLLOUT | EPOLLHUP, 5);
	wait_cancelled(len);
	CHECK(sendfile(world.server, file, &world.at, len) == -1 && errno == EPIPE);
	end(&world);
}

/* The number goes to another connection by calls that the shim does not see, as in fclose(3). */
static void check_behind(void)
{
	for (int is_added = 0; is_added < 2; is_added++) {
		struct epoll_event event = {.events = EPOLLOUT, .data.u64 = 6};
		struct world old = new_world(EPOLLIN, 5);
		size_t len = BEGIN(&old);
		struct world world = new_world(0, 0);

		wait_asked();
		CHECK(syscall(SYS_dup2, world.server, old.server) == old.server);
		close(world.server);
		world.server = old.server;
		if (is_added)
			CHECK(epoll_ctl(world.set, EPOLL_CTL_ADD, world.server, &event) == 0);
		else
			SENDS(&world, LEN);
		wait_cancelled(len);
		if (is_added) {
			len = BEGIN(&world);
			tell_done(len, len, MILLRACE_COMPLETE);
			EXPECT(&world, EPOLLOUT, 6);
			TAKE(&world, len);
		}
		end(&world);
		close(old.client);
		close(old.set);
	}
}

static void check_sets(void)
{
	struct epoll_event event = {.events = EPOLLOUT, .data.u64 = 6};
	struct world world = new_world(EPOLLOUT, 5);
	size_t len = BEGIN(&world);

	/* Out of one set and into another, perhaps after the first was closed. */
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
	/* In no set: only sendfile notices its end. */
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

/* Pipes of a program that closes all descriptors, and of one that forks. */
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
	CHECK(argc > 1 && signal(SIGPIPE, SIG_IGN) != SIG_ERR);
	file = open(argv[1], O_RDONLY);
	CHECK(file >= 0);
	if (argc > 2) {
		check_threads();
		return 0;
	}
	check_edges();
	check_half_closed();
	check_levels();
	check_once();
	check_originals();
	check_errors();
	check_ends();
	check_shutdown();
	check_behind();
	check_sets();
	check_waits();
	check_options();
	check_others();
	check_refusals();
	return 0;
}
