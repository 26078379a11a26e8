/* Sends files in parts with the shim, as some servers do. A test of guest/agent runs it, with a
 * daemon that is told its answers. The break-even size is that of five parts. The agent sends
 * what the daemon refuses, so the bytes arrive. */
#define _GNU_SOURCE
#include "shim-check.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#define PART 70000
#define PARTS 5
/* With four parts, just the break-even size. */
#define TAIL 30000

static const char *path;

/* Sends the next part. Returns sendfile's result. */
static ssize_t send_part(struct world *world)
{
	return sendfile(world->server, file, &world->at, PART);
}

/* Checks that the file's bytes arrive, from this offset on. */
static void check_arrives(const struct world *world, off_t at, size_t len)
{
	static char received[PARTS * PART], expected[PARTS * PART];

	CHECK(recv(world->client, received, len, MSG_WAITALL) == (ssize_t)len);
	CHECK(pread(file, expected, len, at) == (ssize_t)len);
	CHECK(memcmp(received, expected, len) == 0);
}

static void check_end(const struct world *world)
{
	char byte;

	CHECK(recv(world->client, &byte, 1, 0) == 0);
}

/* The end of the connection comes after the program has got its pipe's end. */
static void check_end_later(const struct world *world)
{
	struct epoll_event events[8];
	char byte;
	ssize_t count;

	while ((count = recv(world->client, &byte, 1, MSG_DONTWAIT)) < 0) {
		CHECK(errno == EAGAIN);
		CHECK(epoll_wait(world->set, events, 8, SHORT_MS) == 0);
	}
	CHECK(count == 0);
}

static void check_nothing_arrives(const struct world *world)
{
	char byte;

	CHECK(recv(world->client, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

/* Makes a connection on which several parts were sent, the last of them gathered. */
static struct world gathering(void)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);

	/* Only a thread that waits in the set gathers. */
	EXPECT(&world, EPOLLOUT, 5);
	for (int i = 0; i < 2; i++) {
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
	}
	CHECK(send_part(&world) == PART);
	check_nothing_arrives(&world);
	return world;
}

static void check_parts(void)
{
	struct world world = gathering();

	/* More parts may come: no pipe is begun. */
	EXPECT(&world, EPOLLOUT, 5);
	for (int i = 1; i < PARTS; i++) {
		errno = 77;
		CHECK(send_part(&world) == PART && errno == 77);
	}
	CHECK(send_part(&world) == -1 && errno == EAGAIN);
	EXPECT_NOTHING(&world);
	tell_done(PARTS * PART, PARTS * PART, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	check_nothing_arrives(&world);
	CHECK(world.at == 10 + (2 + PARTS) * PART);
	/* Goes on, with more bytes at a time, since that was quick. The pipe begins before the
	 * program sleeps. */
	for (int i = 0; i < PARTS + 1; i++)
		CHECK(send_part(&world) == PART);
	modify(&world, EPOLLIN, 6);
	EXPECT_NOTHING(&world);
	tell_done((PARTS + 1) * PART, (PARTS + 1) * PART, MILLRACE_COMPLETE);
	EXPECT_NOTHING(&world);
	/* So does a socket that got no part, while others keep the program busy. */
	CHECK(send_part(&world) == PART);
	modify(&world, EPOLLOUT, 7);
	EXPECT(&world, EPOLLOUT, 7);
	EXPECT_NOTHING(&world);
	tell_done(PART, PART, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 7);
	/* A part that is not the next one begins anew. */
	world.at += 5;
	CHECK(send_part(&world) == PART);
	check_arrives(&world, world.at - PART, PART);
	end(&world);
}

static void check_end_of_file(void)
{
	struct world world = gathering();
	off_t len = lseek(file, 0, SEEK_END);
	size_t gathered = 0;

	world.at = len - 3 * PART;
	for (int i = 0; i < 2; i++) {
		/* The first ends the gathering before. */
		if (i == 0) {
			CHECK(send_part(&world) == -1 && errno == EAGAIN);
			tell_done(PART, PART, MILLRACE_COMPLETE);
			EXPECT(&world, EPOLLOUT, 5);
		}
		/* A pipe of the rest does not pay. */
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
	}
	end(&world);
	world = new_world(EPOLLOUT, 5);
	EXPECT(&world, EPOLLOUT, 5);
	world.at = len - 6 * PART - TAIL;
	while (world.at < len) {
		ssize_t sent = send_part(&world);

		CHECK(sent == PART || sent == TAIL);
		if (world.at <= len - 4 * PART - TAIL)
			check_arrives(&world, world.at - sent, (size_t)sent);
		else
			gathered += (size_t)sent;
	}
	CHECK(gathered == 4 * PART + TAIL);
	tell_done(gathered, gathered, MILLRACE_COMPLETE);
	EXPECT(&world, EPOLLOUT, 5);
	CHECK(send_part(&world) == 0);
	end(&world);
}

/* A thread that waits elsewhere would never send its gathered parts. */
static void check_others(void)
{
	struct world world = gathering();
	struct world other = new_world(EPOLLIN | EPOLLOUT, 6);

	tell_done(PART, 0, MILLRACE_COMPLETE);
	EXPECT(&other, EPOLLOUT, 6);
	EXPECT(&other, EPOLLOUT, 6);
	check_arrives(&world, world.at - PART, PART);
	/* The bytes arrive before the agent reports them. */
	EXPECT(&world, EPOLLOUT, 5);
	for (int i = 0; i < 4; i++) {
		EXPECT(&other, EPOLLOUT, 6);
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
	}
	end(&other);
	end(&world);
}

/* Later writes come behind the pipe. */
static void check_order(void)
{
	struct world world = gathering();
	int kernel_pipe[2];
	char byte;

	CHECK(pipe(kernel_pipe) == 0 && write(kernel_pipe[1], "x", 1) == 1);
	CHECK(splice(kernel_pipe[0], NULL, world.server, NULL, 1, 0) == -1 && errno == EAGAIN);
	CHECK(write(world.server, "x", 1) == -1 && errno == EAGAIN);
	EXPECT_NOTHING(&world);
	tell_done(PART, 1000, MILLRACE_PEER_SILENT);
	EXPECT(&world, EPOLLOUT, 5);
	CHECK(splice(kernel_pipe[0], NULL, world.server, NULL, 1, 0) == 1);
	/* The daemon has moved a thousand bytes. */
	check_arrives(&world, world.at - PART + 1000, PART - 1000);
	CHECK(recv(world.client, &byte, 1, 0) == 1 && byte == 'x');
	close(kernel_pipe[0]);
	close(kernel_pipe[1]);
	end(&world);
}

/* So do writes by another process that gets the socket. */
static void check_passed(void)
{
	struct world world = gathering();
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(sizeof(int))];
	} rights = {.header = {.cmsg_level = SOL_SOCKET,
			       .cmsg_type = SCM_RIGHTS,
			       .cmsg_len = CMSG_LEN(sizeof(int))}};
	char byte = 0;
	struct iovec part = {.iov_base = &byte, .iov_len = 1};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = &rights,
				 .msg_controllen = sizeof(rights)};
	int pair[2], other;

	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	memcpy(CMSG_DATA(&rights.header), &world.server, sizeof(int));
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	CHECK(sendmsg(pair[0], &message, 0) == 1);
	CHECK(recvmsg(pair[1], &message, 0) == 1);
	memcpy(&other, CMSG_DATA(&rights.header), sizeof(int));
	CHECK(write(other, "x", 1) == 1);
	check_arrives(&world, world.at - PART, PART);
	CHECK(recv(world.client, &byte, 1, 0) == 1 && byte == 'x');
	close(other);
	close(pair[0]);
	close(pair[1]);
	end(&world);
}

static void *poll_set(void *argument)
{
	const struct world *world = argument;
	struct epoll_event event;

	CHECK(epoll_wait(world->set, &event, 1, 0) >= 0);
	return NULL;
}

static void *send_three(void *argument)
{
	struct world *world = argument;

	EXPECT(world, EPOLLOUT, 5);
	for (int i = 0; i < 3; i++)
		CHECK(send_part(world) == PART);
	return NULL;
}

static void run_in_thread(void *(*what)(void *), struct world *world)
{
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, what, world) == 0 && pthread_join(thread, NULL) == 0);
}

/* A thread that sleeps in the set does not send the parts of another, which may sleep elsewhere
 * or end. */
static void check_threads(void)
{
	struct world world = gathering();

	/* A thread that enters it does. */
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	run_in_thread(poll_set, &world);
	check_arrives(&world, world.at - PART, PART);
	EXPECT(&world, EPOLLOUT, 5);
	for (int i = 0; i < 4; i++) {
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
	}
	end(&world);
	world = new_world(EPOLLIN | EPOLLOUT, 5);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	run_in_thread(send_three, &world);
	check_arrives(&world, 10, 3 * PART);
	end(&world);
}

/* A lock of fcntl(2) ends when the process closes any descriptor of the file. */
static void check_locks(void)
{
	struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);

	CHECK(fcntl(file, F_SETLK, &lock) == 0);
	EXPECT(&world, EPOLLOUT, 5);
	for (int i = 0; i < 4; i++) {
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
		EXPECT(&world, EPOLLOUT, 5);
	}
	lock.l_type = F_WRLCK;
	CHECK(fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_RDLCK);
	lock = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
	CHECK(fcntl(file, F_SETLK, &lock) == 0);
	end(&world);
}

/* A program that closes all descriptors of a range. */
static void check_ranges(void)
{
	struct world world = gathering();
	int highest = world.server > world.client ? world.server : world.client;

	highest = highest > world.set ? highest : world.set;
	CHECK(close_range((unsigned)highest + 1, ~0u, 0) == 0);
	EXPECT(&world, EPOLLOUT, 5);
	EXPECT_NOTHING(&world);
	closefrom(highest + 1);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	EXPECT(&world, EPOLLOUT, 5);
	check_arrives(&world, world.at - PART, PART);
	end(&world);
}

static void check_refused(void)
{
	struct world world = gathering();

	EXPECT(&world, EPOLLOUT, 5);
	EXPECT_NOTHING(&world);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	EXPECT(&world, EPOLLOUT, 5);
	check_arrives(&world, world.at - PART, PART);
	/* No pipe is tried again. */
	for (int i = 0; i < 5; i++) {
		CHECK(send_part(&world) == PART);
		check_arrives(&world, world.at - PART, PART);
	}
	end(&world);
}

static void check_shutdown(void)
{
	struct world world = gathering();

	CHECK(shutdown(world.server, SHUT_WR) == 0);
	EXPECT_NOTHING(&world);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	check_arrives(&world, world.at - PART, PART);
	modify(&world, EPOLLIN, 5);
	check_end_later(&world);
	end(&world);
	/* Nor does the program have to get an event of the socket. */
	world = gathering();
	CHECK(epoll_ctl(world.set, EPOLL_CTL_DEL, world.server, NULL) == 0);
	CHECK(shutdown(world.server, SHUT_WR) == 0);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	check_arrives(&world, world.at - PART, PART);
	check_end_later(&world);
	end(&world);
}

static void check_close(void)
{
	struct world world = gathering();

	CHECK(close(world.server) == 0);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	check_arrives(&world, world.at - PART, PART);
	check_end(&world);
	close(world.client);
	close(world.set);
}

static void check_lost(void)
{
	struct world world = gathering();

	EXPECT(&world, EPOLLOUT, 5);
	EXPECT_NOTHING(&world);
	tell_done(PART, 0, MILLRACE_LOST);
	EXPECT(&world, EPOLLIN | EPOLLOUT | EPOLLHUP, 5);
	check_end(&world);
	end(&world);
}

/* A truncated file: its bytes arrive, and the connection ends. The file is open for writing
 * then, so no daemon is asked. */
static void check_cut(void)
{
	int whole = file;
	int out = open(path, O_RDWR);
	struct world world;

	file = open(path, O_RDONLY);
	CHECK(out >= 0 && file >= 0);
	world = gathering();
	CHECK(ftruncate(out, world.at - PART + 1000) == 0);
	EXPECT(&world, EPOLLOUT, 5);
	EXPECT(&world, EPOLLIN | EPOLLOUT | EPOLLHUP, 5);
	check_arrives(&world, world.at - PART, 1000);
	check_end(&world);
	end(&world);
	close(out);
	close(file);
	file = whole;
}

/* A program that exits, and one that is killed when the pipe has begun. */
static void check_ended(int is_killed)
{
	struct world world = new_world(EPOLLIN | EPOLLOUT, 5);
	pid_t child = fork();
	off_t at = world.at;
	int status;

	CHECK(child >= 0);
	if (child == 0) {
		CHECK(close(world.client) == 0);
		EXPECT(&world, EPOLLOUT, 5);
		for (int i = 0; i < 3; i++)
			CHECK(send_part(&world) == PART);
		if (!is_killed)
			exit(0);
		CHECK(write(world.server, "x", 1) == -1 && errno == EAGAIN);
		kill(getpid(), SIGKILL);
	}
	CHECK(close(world.server) == 0);
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(is_killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
	tell_done(PART, 0, MILLRACE_NO_FLOW);
	check_arrives(&world, at, 3 * PART);
	check_end(&world);
	close(world.client);
	close(world.set);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	alarm(LONG_MS / 1000);
	file = open(argv[1], O_RDONLY);
	path = argv[2];
	CHECK(file >= 0);
	check_parts();
	check_end_of_file();
	check_others();
	check_order();
	check_passed();
	check_threads();
	check_locks();
	check_ranges();
	check_refused();
	check_shutdown();
	check_close();
	check_lost();
	check_cut();
	check_ended(0);
	check_ended(1);
	return 0;
}
