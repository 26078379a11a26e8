/* Connections to the guest's agent.
 *
 * They are kept for the next call: a small table for the whole process, from which a call takes
 * one for itself. It needs no lock and no work at the end of a thread, and a child of fork(2)
 * finds all of them to close. A program may have closed their descriptors (daemons close all)
 * and reused the numbers: each is identified by its inode too and checked before use. */
#define _GNU_SOURCE
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum slot_state { SLOT_FREE, SLOT_IDLE, SLOT_BUSY };

struct slot {
	_Atomic int state;
	int fd;
	dev_t dev;
	ino_t ino;
	_Atomic time_t idle_since_s;
};

/* The agent closes connections that were idle for half a minute. */
#define OLD_S 20

static time_t now_s(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec;
}

static struct slot slots[MAX_KEPT];
static _Atomic pid_t owner;

static int is_ours(const struct slot *slot)
{
	struct stat stat;

	return fstat(slot->fd, &stat) == 0 && S_ISSOCK(stat.st_mode) && stat.st_dev == slot->dev &&
	       stat.st_ino == slot->ino;
}

/* Drops the connections in a child: they are the parent's. Calls only async-signal-safe
 * functions. */
static void after_fork(void)
{
	for (int i = 0; i < MAX_KEPT; i++) {
		if (atomic_load(&slots[i].state) != SLOT_FREE && is_ours(&slots[i]))
			close(slots[i].fd);
		atomic_store(&slots[i].state, SLOT_FREE);
	}
	atomic_store(&owner, getpid());
}

__attribute__((constructor)) static void at_start(void)
{
	atomic_store(&owner, getpid());
	/* Without it a child notices at its first call. */
	(void)pthread_atfork(NULL, NULL, after_fork);
}

static int connect_agent(int flags)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = AGENT_SOCKET};
	const char *other = secure_getenv("MILLRACE_AGENT_SOCKET");
	int fd;

	if (other && strlen(other) < sizeof(address.sun_path))
		strcpy(address.sun_path, other);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0);
	if (fd < 0)
		return -1;
	while (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		int error = errno;

		if (error == EINTR)
			continue;
		close(fd);
		errno = error;
		return -1;
	}
	/* O_NONBLOCK was needed for the connect only. */
	if (flags & SOCK_NONBLOCK)
		(void)fcntl(fd, F_SETFL, 0);
	return fd;
}

/* Keeps a new connection if there is room. */
static void keep(struct connection *connection)
{
	struct stat stat;

	if (fstat(connection->fd, &stat) < 0)
		return;
	for (int i = 0; i < MAX_KEPT; i++) {
		int expected = SLOT_FREE;
		struct slot *slot = &slots[i];

		if (!atomic_compare_exchange_strong(&slot->state, &expected, SLOT_BUSY))
			continue;
		slot->fd = connection->fd;
		slot->dev = stat.st_dev;
		slot->ino = stat.st_ino;
		connection->slot = slot;
		return;
	}
}

static int take_kept(struct connection *connection)
{
	for (int i = 0; i < MAX_KEPT; i++) {
		int expected = SLOT_IDLE;
		struct slot *slot = &slots[i];

		if (!atomic_compare_exchange_strong(&slot->state, &expected, SLOT_BUSY))
			continue;
		if (is_ours(slot)) {
			*connection = (struct connection){.fd = slot->fd, .slot = slot};
			return 0;
		}
		atomic_store(&slot->state, SLOT_FREE);
	}
	return -1;
}

int millrace_take(struct connection *connection, int only_fresh, int flags)
{
	if (atomic_load(&owner) != getpid())
		after_fork();
	if (!only_fresh && take_kept(connection) == 0)
		return 0;
	*connection = (struct connection){.fd = connect_agent(flags), .is_fresh = 1};
	if (connection->fd < 0)
		return -1;
	keep(connection);
	return 0;
}

void millrace_give_back(struct connection *connection, int broken)
{
	if (broken || !connection->slot) {
		close(connection->fd);
		if (connection->slot)
			atomic_store(&connection->slot->state, SLOT_FREE);
	} else {
		atomic_store(&connection->slot->idle_since_s, now_s());
		atomic_store(&connection->slot->state, SLOT_IDLE);
	}
}

int millrace_is_old(const struct connection *connection)
{
	return now_s() - atomic_load(&connection->slot->idle_since_s) >= OLD_S;
}

int millrace_is_kept(const struct connection *connection)
{
	return connection->slot && is_ours(connection->slot);
}

void millrace_let_go(struct connection *connection)
{
	if (connection->slot)
		atomic_store(&connection->slot->state, SLOT_FREE);
}

void millrace_keep_connection(int fd)
{
	struct connection connection = {.fd = fd};

	if (atomic_load(&owner) == getpid())
		keep(&connection);
	millrace_give_back(&connection, 0);
}
