/* Messages between a program and the agent: core/guest-abi/src/program.rs in C. */
#ifndef MILLRACE_PROTOCOL_H
#define MILLRACE_PROTOCOL_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define AGENT_SOCKET "/run/millrace/agent.sock"
#define AGENT_MAGIC UINT32_C(0x50524c4d) /* MLRP */
#define AGENT_VERSION 1
#define OP_PIPE 1
#define OP_QUERY 2
#define FLAG_BEHIND 1u

/* All numbers are little-endian. */
struct request {
	uint32_t magic;
	uint16_t version;
	uint16_t op;
	uint32_t flags;
	uint32_t timeout_ms;
	uint64_t source_offset;
	uint64_t sink_offset;
	uint64_t len_bytes;
};

struct answer {
	uint32_t magic;
	uint16_t version;
	uint16_t reason;
	uint32_t error;
	uint32_t min_bytes_kib; /* break-even size, for OP_QUERY; 0: not known */
	uint64_t moved_bytes;
};

static_assert(sizeof(struct request) == 40, "as in program.rs");
static_assert(offsetof(struct request, timeout_ms) == 12, "as in program.rs");
static_assert(offsetof(struct request, source_offset) == 16, "as in program.rs");
static_assert(sizeof(struct answer) == 24, "as in program.rs");
static_assert(offsetof(struct answer, moved_bytes) == 16, "as in program.rs");

/* Returns the connection of a pipe whose result is known to the pool. Used by the shim. */
__attribute__((visibility("hidden"))) void millrace_pool_connection(int fd);

#endif
