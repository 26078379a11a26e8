/* Parts of the library: connections to the agent, and the messages over them. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "millrace.h"
#include "protocol.h"

/* Most connections that are kept. Further calls at the same time make their own and close it. */
#define MAX_KEPT 16

struct slot;

/* Connection in use by a call; slot is NULL for one that is not kept. */
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

/* Takes a kept connection or makes one: 0, or -1 with errno. With SOCK_NONBLOCK it fails instead
 * of waiting for an agent with a full backlog. */
int millrace_take(struct connection *connection, int only_fresh, int flags);
/* Keeps the connection for the next call, or closes it. */
void millrace_give_back(struct connection *connection, int broken);
/* Hands the descriptor over to the caller, who closes it. */
void millrace_let_go(struct connection *connection);
/* Whether the connection is kept and its number still belongs to it: the program may have closed
 * it meanwhile. */
int millrace_is_kept(const struct connection *connection);

struct outcome millrace_failed(int reason, int error);
/* Sends a request on a kept connection, or on a new one: the agent closes those that are idle for
 * long. 0, or -1 with the outcome. */
int millrace_send(struct connection *connection, const struct request *request, const int *fds,
		  int flags, struct outcome *outcome);
/* Whether the agent may close it at any moment, as it was idle for long. */
int millrace_is_old(const struct connection *connection);
/* Takes a connection that the agent serves and does not refuse, or waits for one up to
 * timeout_ms. 0, or -1 with the reason. */
int millrace_take_served(struct connection *connection, int timeout_ms, int *reason);
/* Asks on such a connection for a part of a file to be sent that the program believes to be sent
 * already. 0: the connection is the caller's; -1: it is closed. */
int millrace_send_behind(struct connection *connection, int out_fd, int in_fd, int64_t at,
			 int64_t len);
/* Reads an answer: 1 with one, 0 when there is none yet, -1 when there will be none. */
int millrace_read_answer(int fd, int flags, struct outcome *outcome);
/* Sends a request and returns its outcome. */
struct outcome millrace_exchange(const struct request *request, const int *fds);
/* Makes a query: whether pipes are available. */
struct request millrace_query(void);

#endif
