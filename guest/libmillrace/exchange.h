/* Parts of the library: connections to the agent, and the messages over them. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "millrace.h"
#include "protocol.h"

/* Connections in the pool. Further calls at the same time make their own and close it. */
#define POOL_LEN 16

struct slot;

/* Connection in use by a call; slot is NULL for one that is not of the pool. */
struct connection {
	int fd;
	int is_fresh;
	struct slot *slot;
};

/* Outcome of a request: the agent's answer, or an error of the library. */
struct outcome {
	struct millrace_result result;
	/* Break-even size, in the answer to OP_QUERY. */
	uint32_t min_bytes_kib;
};

/* Takes a connection from the pool or makes one: 0, or -1 with errno. With SOCK_NONBLOCK it fails
 * instead of waiting for an agent with a full backlog. */
int millrace_take_connection(struct connection *connection, int is_fresh_only, int flags);
/* Returns the connection to the pool for the next call, or closes it. */
void millrace_return_connection(struct connection *connection, int broken);
/* Takes the connection out of the pool: the caller closes it. */
void millrace_detach_connection(struct connection *connection);
/* Whether the connection is of the pool and its number belongs to it: the program may have closed
 * it meanwhile. */
int millrace_is_pooled(const struct connection *connection);

/* Makes the outcome of a request that the library itself failed. */
struct outcome millrace_make_failure(int reason, int error);
/* Sends a request on a connection of the pool, or on a new one: the agent closes those that are
 * idle for long. 0, or -1 with the outcome. */
int millrace_send_request(struct connection *connection, const struct request *request,
			  const int *fds, int flags, struct outcome *outcome);
/* Whether the agent may close a connection at any moment, as it was idle for long. */
int millrace_is_expired(const struct connection *connection);
/* Takes a connection that the agent serves and does not refuse, or waits for one up to
 * timeout_ms. 0, or -1 with the reason. */
int millrace_take_served_connection(struct connection *connection, int timeout_ms, int *reason);
/* Requests on a served connection that the agent sends a part of a file, which the program believes
 * to be sent already. 0: the connection is the caller's; -1: it is closed. */
int millrace_send_behind(struct connection *connection, int out_fd, int in_fd, int64_t start,
			 int64_t len);
/* Reads an answer: 1 with one, 0 when there is none yet, -1 when there will be none. */
int millrace_read_answer(int fd, int flags, struct outcome *outcome);
/* Sends a request and returns its outcome. */
struct outcome millrace_exchange(const struct request *request, const int *fds);
/* Makes a query: whether pipes are available. */
struct request millrace_make_query(void);

#endif
