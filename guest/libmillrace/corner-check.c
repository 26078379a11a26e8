/* Corner cases of epoll(7), fork(2) and signals. A test of guest/agent runs it. */
#define _GNU_SOURCE
#include "shim-check.h"

#include <poll.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

#define FORKS 50
#define TICK_US 500

/* Waits until the set has an event, without taking it. */
static void wait_told(const struct world *world)
{
	CHECK(poll(&(struct pollfd){.fd = world->set, .events = POLLIN}, 1, LONG_MS) == 1);
}

/* A program with edge-triggered events takes a short count for a full buffer. */
static void check_short_edges(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT | EPOLLET, 5);
	size_t len;

	EXPECT(&world, EPOLLOUT, 5);
	len = BEGIN(&world);
	tell_done(len, SMALL, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	CHECK(sendfile(world.server, file, &world.at, len) == SMALL);
	EXPECT(&world, EPOLLOUT, 5);
	EXPECT_NOTHING(&world);
	end(&world);
}

/* The socket has an event, and its pipe ends, before the program waits: that is one event. */
static void check_once_together(void)
{
	uint32_t wish = EPOLLIN | EPOLLOUT | EPOLLONESHOT;
	struct world world = new_world(wish, 5);
	size_t len;

	EXPECT(&world, EPOLLOUT, 5);
	len = BEGIN(&world);
	modify(&world, wish, 6);
	tell_done(len, len, MILLRACE_COMPLETE);
	wait_told(&world);
	CHECK(write(world.client, "x", 1) == 1);
	CHECK(poll(&(struct pollfd){.fd = world.server, .events = POLLIN}, 1, LONG_MS) == 1);
	EXPECT(&world, EPOLLIN | EPOLLOUT, 6);
	EXPECT_NOTHING(&world);
	TAKE(&world, len);
	end(&world);
}

/* A child shares the set, and an event of its parent does not lengthen its wait. */
static void check_shared_set(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	size_t len = BEGIN(&world);
	int status;
	pid_t child;

	tell_done(len, len, MILLRACE_COMPLETE);
	wait_told(&world);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		EXPECT_NOTHING(&world);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	EXPECT(&world, EPOLLOUT, 5);
	TAKE(&world, len);
	end(&world);
}

static volatile sig_atomic_t forks, is_child;

static void fork_in_handler(int number)
{
	pid_t child = fork();

	(void)number;
	if (child == 0)
		is_child = 1;
	else if (child > 0)
		(void)waitpid(child, NULL, 0);
	forks++;
}

/* Most signals interrupt the shim. The child goes on from there. */
static void check_signals(void)
{
	struct sigaction action = {.sa_handler = fork_in_handler, .sa_flags = SA_RESTART};
	struct itimerval tick = {{0, TICK_US}, {0, TICK_US}};
	struct itimerval none = {{0, 0}, {0, 0}};
	struct world world = new_world(EPOLLIN, 5);

	CHECK(sigaction(SIGVTALRM, &action, NULL) == 0);
	CHECK(setitimer(ITIMER_VIRTUAL, &tick, NULL) == 0);
	while (forks < FORKS && !is_child)
		modify(&world, EPOLLIN, 5);
	if (is_child) {
		modify(&world, EPOLLIN, 5);
		CHECK(close(world.server) == 0);
		_exit(0);
	}
	CHECK(setitimer(ITIMER_VIRTUAL, &none, NULL) == 0);
	end(&world);
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	alarm(LONG_MS / 1000);
	file = open(argv[1], O_RDONLY);
	CHECK(file >= 0);
	check_short_edges();
	check_once_together();
	check_shared_set();
	check_signals();
	return 0;
}
