/* The library's parts: connections to the agent, and what is said over them. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "millrace.h"
#include "protocol.h"

/* Connections kept. Further calls at the same time make their own and close it. */
#define MAX_KEPT 16

struct slot;

/* A connection that a call has: slot is NULL for one that is not kept. */
struct connection {
	int fd;
	int is_fresh;
	struct slot *slot;
};

/* What the agent has said, or what is known without it. */
struct outcome {
	struct millrace_result result;
	/* The answer to OP_QUERY. */
	uint32_t min_bytes_kib;
};

/* Takes a kept connection or makes one: 0, or -1 with errno. With SOCK_NONBLOCK it fails rather than wait
 * for an agent that is behind. */
int millrace_take(struct connection *connection, int only_fresh, int flags);
/* For the next call, or closed. */
void millrace_give_back(struct connection *connection, int broken);
/* Its descriptor is the caller's from now on, who closes it. */
void millrace_let_go(struct connection *connection);
/* Whether it is kept, and its number still its own: some time may have gone by. */
int millrace_is_kept(const struct connection *connection);

struct outcome millrace_failed(int reason, int error);
/* Sends a request on a kept connection, or on a new one: the agent closes those that are idle for
 * long. 0, or -1 with the outcome. */
int millrace_send(struct connection *connection, const struct request *request, const int *fds,
		  int flags, struct outcome *outcome);
/* Whether the agent may close it at any moment, since nothing was asked on it for long. */
int millrace_is_old(const struct connection *connection);
/* Takes a connection that the agent serves and does not refuse, or waits so long for it. 0, or -1 with the
 * reason. */
int millrace_take_served(struct connection *connection, int timeout_ms, int *reason);
/* Asks on such a connection for a part of a file to be sent that the program believes to be sent already.
 * 0: the connection is the caller's; -1: it is closed. */
int millrace_send_behind(struct connection *connection, int out_fd, int in_fd, int64_t at, int64_t len);
/* 1 with an answer, 0 when there is none yet, -1 when there will be none. */
int millrace_read_answer(int fd, int flags, struct outcome *outcome);
/* A request and its answer. */
struct outcome millrace_exchange(const struct request *request, const int *fds);
/* Whether pipes are to be had. */
struct request millrace_query(void);

#endif
