// SPDX-License-Identifier: GPL-2.0-only
/* Sockets: vsock:CID:PORT or unix:/path. */
#ifndef MILLRACE_TRANSPORT_H
#define MILLRACE_TRANSPORT_H

#include <cstddef>

namespace millrace {

/* Whether an address can be understood. */
bool is_address(const char *address);
/* A connected socket that does not block, or -1. */
int connect_to(const char *address, int timeout_ms, int *error);
/* Both parts, in one system call where the socket takes them; false with errno when it does not in time. */
bool write_all(int fd, const void *head, size_t head_bytes, const void *body, size_t body_bytes,
               int timeout_ms);

} // namespace millrace

#endif
