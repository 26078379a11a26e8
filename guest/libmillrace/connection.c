/* Pool of connections to the guest's agent.
 *
 * Connections stay open for the next call: a small table for the whole process, from which a call
 * takes one for itself. It needs no lock and no work at the end of a thread, and a child of fork(2)
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

/* Longest time for which a connection is idle and surely open: the agent closes those that were
 * idle for half a minute. */
#define MAX_IDLE_S 20

static time_t now_s(void)
{
	struct timespec now = {0};

	(void)clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return now.tv_sec;
}

static struct slot slots[POOL_LEN];
static _Atomic pid_t owner_pid;

static int is_same_socket(const struct slot *slot)
{
	struct stat stat;

	return fstat(slot->fd, &stat) == 0 && S_ISSOCK(stat.st_mode) && stat.st_dev == slot->dev &&
	       stat.st_ino == slot->ino;
}

/* Closes the parent's connections in a child of fork(2). Calls only async-signal-safe functions. */
static void drop_parent_connections(void)
{
	for (int i = 0; i < POOL_LEN; i++) {
		if (atomic_load(&slots[i].state) != SLOT_FREE && is_same_socket(&slots[i]))
			close(slots[i].fd);
		atomic_store(&slots[i].state, SLOT_FREE);
	}
	atomic_store(&owner_pid, getpid());
}

__attribute__((constructor)) static void initialize(void)
{
	atomic_store(&owner_pid, getpid());
	/* Where this fails, a child drops them at its first call. */
	(void)pthread_atfork(NULL, NULL, drop_parent_connections);
}

static int connect_agent(int flags)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = AGENT_SOCKET};
	const char *override = secure_getenv("MILLRACE_AGENT_SOCKET");
	int fd;

	if (override && strlen(override) < sizeof(address.sun_path))
		strcpy(address.sun_path, override);
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

/* Gives a new connection a slot of the pool, if one is free. */
static void add_to_pool(struct connection *connection)
{
	struct stat stat;

	if (fstat(connection->fd, &stat) < 0)
		return;
	for (int i = 0; i < POOL_LEN; i++) {
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

static int take_from_pool(struct connection *connection)
{
	for (int i = 0; i < POOL_LEN; i++) {
		int expected = SLOT_IDLE;
		struct slot *slot = &slots[i];

		if (!atomic_compare_exchange_strong(&slot->state, &expected, SLOT_BUSY))
			continue;
		if (is_same_socket(slot)) {
			*connection = (struct connection){.fd = slot->fd, .slot = slot};
			return 0;
		}
		atomic_store(&slot->state, SLOT_FREE);
	}
	return -1;
}

int millrace_take_connection(struct connection *connection, int is_fresh_only, int flags)
{
	if (atomic_load(&owner_pid) != getpid())
		drop_parent_connections();
	if (!is_fresh_only && take_from_pool(connection) == 0)
		return 0;
	*connection = (struct connection){.fd = connect_agent(flags), .is_fresh = 1};
	if (connection->fd < 0)
		return -1;
	add_to_pool(connection);
	return 0;
}

void millrace_return_connection(struct connection *connection, int broken)
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

int millrace_is_expired(const struct connection *connection)
{
	return now_s() - atomic_load(&connection->slot->idle_since_s) >= MAX_IDLE_S;
}

int millrace_is_pooled(const struct connection *connection)
{
	return connection->slot && is_same_socket(connection->slot);
}

void millrace_detach_connection(struct connection *connection)
{
	if (connection->slot)
		atomic_store(&connection->slot->state, SLOT_FREE);
}

void millrace_pool_connection(int fd)
{
	struct connection connection = {.fd = fd};

	if (atomic_load(&owner_pid) == getpid())
		add_to_pool(&connection);
	millrace_return_connection(&connection, 0);
}
