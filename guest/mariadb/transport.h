// SPDX-License-Identifier: GPL-2.0-only
/* Streams: sockets (vsock:CID:PORT or unix:/path), and rings that replace them. */
#ifndef MILLRACE_TRANSPORT_H
#define MILLRACE_TRANSPORT_H

#include <cstddef>
#include <memory>

#include "ring.h"

namespace millrace {

/* Whether an address is valid. */
bool is_address(const char *address);

/* Non-blocking stream of bytes: a socket, which a ring may replace. */
class Stream {
public:
    Stream() = default;
    ~Stream() { close(); }
    Stream(const Stream &) = delete;
    Stream &operator=(const Stream &) = delete;

    /* Connects. False, and errno: not in time; EINVAL: the address is invalid. */
    bool connect(const char *address, int timeout_ms);
    bool is_open() const { return fd_ >= 0; }
    bool has_ring() const { return ring_ != nullptr; }
    /* Value that the checks of frames are exclusive-or'ed with. */
    uint64_t stamp() const { return ring_ ? ring_->stamp() : 0; }
    void close();
    /* Moves the stream to a ring, both ways; the socket then only has bells. */
    void switch_to_ring(std::unique_ptr<Ring> ring);
    /* Sets the time for which a ring is polled before the thread sleeps. */
    void set_spin_us(unsigned us) { spin_.set_max_ns(us * 1000LL); }

    /* Writes both parts, in one system call where the socket takes them; false, and errno: not
     * in time. */
    bool write(const void *head, size_t head_bytes, const void *body, size_t body_bytes,
               int timeout_ms);
    /* Reads like read(2). */
    ssize_t read(void *to, size_t max_bytes);
    /* Waits for bytes to read; false: in vain. */
    bool wait(int timeout_ms);

private:
    bool write_to_socket(const void *head, size_t head_bytes, const void *body, size_t body_bytes,
                         int timeout_ms);
    void wake_host();
    bool write_to_ring(const void *from, size_t bytes, int timeout_ms);
    bool wait_for_ring(int timeout_ms);
    bool poll_ring(int64_t since_ns);
    bool wait_for_bells(int timeout_ms);
    void ring_bell();

    int fd_ = -1;
    std::unique_ptr<Ring> ring_;
    Spin spin_;
    bool has_ended_ = false; /* the socket has ended; there may be bytes in the ring */
};

} // namespace millrace

#endif
