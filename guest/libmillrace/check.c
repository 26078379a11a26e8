/* Calls the library as programs do. A test of guest/agent runs it with an agent whose daemon
 * answers that all bytes were moved, or, with the argument "hold", never answers. */
#define _GNU_SOURCE
#include "millrace.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 8
#define CALLS 25
#define LEN 4096

#define CHECK(what)                                                                   \
	do {                                                                          \
		if (!(what)) {                                                        \
			fprintf(stderr, "line %d: %s (errno %d, reason %d)\n", __LINE__,      \
				#what, errno, millrace_reason());                             \
			exit(1);                                                      \
		}                                                                     \
	} while (0)

static int file, server, client;

static void connect_pair(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	client = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0);
	CHECK(getsockname(listener, (void *)&address, &len) == 0);
	CHECK(connect(client, (void *)&address, len) == 0);
	server = accept(listener, NULL, NULL);
	CHECK(server >= 0);
	close(listener);
}

static void pipe_once(void)
{
	int64_t offset = 10;

	errno = 77;
	CHECK(millrace_pipe(server, file, &offset, LEN) == LEN);
	CHECK(offset == 10 + LEN && errno == 77 && millrace_reason() == MILLRACE_COMPLETE);
}

static void check_calls(void)
{
	struct millrace_options options = MILLRACE_OPTIONS;
	struct millrace_result result;
	int64_t negative = -5;
	int fd;

	CHECK(millrace_available() == 1);
	pipe_once();
	CHECK(millrace_pipe(server, file, NULL, LEN) == LEN);
	CHECK(lseek(file, 0, SEEK_CUR) == LEN);
	CHECK(millrace_pipe(server, file, NULL, 0) == 0);
	options.in_offset = lseek(file, 0, SEEK_END);
	CHECK(millrace_pipe_options(server, file, LEN, &options) == 0);
	CHECK(millrace_reason() == MILLRACE_END_OF_FILE);

	CHECK(millrace_pipe(server, 1000, NULL, LEN) == -1 && errno == EBADF);
	CHECK(millrace_reason() == MILLRACE_NOT_PERMITTED);
	CHECK(millrace_pipe(server, file, &negative, LEN) == -1 && errno == EINVAL);
	options.size = 1;
	CHECK(millrace_pipe_options(server, file, LEN, &options) == -1 && errno == EINVAL);
	fd = open("/dev/null", O_WRONLY);
	CHECK(millrace_pipe(fd, file, NULL, LEN) == -1 && errno == EOPNOTSUPP);
	CHECK(millrace_reason() == MILLRACE_NOT_A_FILE &&
	      millrace_may_fall_back(millrace_reason()));
	CHECK(strstr(millrace_reason_text(millrace_reason()), "regular file") != NULL);
	close(fd);
	CHECK(millrace_min_bytes() >= 0 && millrace_reason() == MILLRACE_COMPLETE);
	CHECK(strstr(millrace_reason_text(12345), "unknown") != NULL);
	CHECK(!millrace_may_fall_back(MILLRACE_LOST));

	options = (struct millrace_options)MILLRACE_OPTIONS;
	options.in_offset = 0;
	fd = millrace_pipe_start(server, file, LEN, &options);
	CHECK(fd >= 0);
	CHECK(poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 30000) == 1);
	CHECK(millrace_pipe_status(fd, &result) == 1);
	CHECK(result.moved == LEN && result.reason == MILLRACE_COMPLETE && result.error == 0);
	close(fd);
	CHECK(millrace_pipe_status(file, &result) == -1 && errno == ENOTSOCK);
}

static void check_fork(void)
{
	int status;
	pid_t child;

	pipe_once();
	child = fork();
	if (child == 0) {
		/* None of the parent's connections is left. */
		for (int fd = 3; fd < 100; fd++) {
			int domain = 0;
			socklen_t len = sizeof(domain);

			if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) == 0)
				CHECK(domain != AF_UNIX);
		}
		pipe_once();
		pipe_once();
		_exit(0);
	}
	pipe_once();
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	pipe_once();
}

/* As daemons do. */
static void check_closed(void)
{
	int others[100];

	pipe_once();
	for (int fd = 3; fd < 100; fd++)
		if (fd != file && fd != server && fd != client)
			close(fd);
	for (int i = 0; i < 50; i++)
		CHECK((others[i] = open("/dev/null", O_RDONLY)) >= 0);
	pipe_once();
	for (int i = 0; i < 50; i++)
		CHECK(close(others[i]) == 0);
	pipe_once();
}

static void *run_thread(void *argument)
{
	for (int i = 0; i < CALLS; i++)
		pipe_once();
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

static void on_alarm(int signal)
{
	(void)signal;
}

static void check_interrupted(void)
{
	struct sigaction action = {.sa_handler = on_alarm};
	struct millrace_options options = MILLRACE_OPTIONS;
	struct millrace_result result;
	int fd;

	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	/* Repeatedly: the first signal may come before the wait. */
	ualarm(100000, 1000000 - 1);
	CHECK(millrace_pipe(server, file, NULL, LEN) == -1 && errno == EINTR);
	ualarm(0, 0);
	CHECK(millrace_reason() == MILLRACE_CANCELLED &&
	      !millrace_may_fall_back(MILLRACE_CANCELLED));
	options.timeout_ms = 50;
	CHECK(millrace_pipe_options(server, file, LEN, &options) == -1 && errno == ETIMEDOUT);
	fd = millrace_pipe_start(server, file, LEN, NULL);
	CHECK(fd >= 0 && millrace_pipe_status(fd, &result) == 0);
	close(fd);
	/* The connection stays until the daemon has been asked. */
	getchar();
}

int main(int argc, char **argv)
{
	CHECK(argc > 1);
	file = open(argv[1], O_RDONLY);
	CHECK(file >= 0);
	connect_pair();
	if (argc > 2) {
		check_interrupted();
		return 0;
	}
	check_calls();
	check_fork();
	check_closed();
	check_threads();
	return 0;
}
