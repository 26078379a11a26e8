// SPDX-License-Identifier: GPL-2.0-only
#include "transport.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#include "counters.h"

namespace millrace {

namespace {

union Address {
    sockaddr any;
    sockaddr_un unix_;
    sockaddr_vm vm;
};

/* Parses an address. Returns its length in bytes, or 0. */
socklen_t parse(const char *text, Address *address)
{
    memset(address, 0, sizeof(*address));
    if (strncmp(text, "unix:", 5) == 0) {
        size_t length = strlen(text + 5);
        if (length == 0 || length >= sizeof(address->unix_.sun_path))
            return 0;
        address->unix_.sun_family = AF_UNIX;
        memcpy(address->unix_.sun_path, text + 5, length + 1);
        return sizeof(address->unix_);
    }
    unsigned cid, port;
    int read = 0;
    if (sscanf(text, "vsock:%u:%u%n", &cid, &port, &read) != 2 || text[read] != '\0')
        return 0;
    address->vm.svm_family = AF_VSOCK;
    address->vm.svm_cid = cid;
    address->vm.svm_port = port;
    return sizeof(address->vm);
}

bool wait_writable(int fd, int timeout_ms)
{
    pollfd p = {fd, POLLOUT, 0};
    int n;
    do
        n = poll(&p, 1, timeout_ms);
    while (n < 0 && errno == EINTR);
    if (n == 0)
        errno = ETIMEDOUT;
    return n > 0;
}

int64_t now_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Tells the CPU that this is a wait loop. */
void relax()
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int socket_error(int fd)
{
    int error = 0;
    socklen_t length = sizeof(error);
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) < 0 ? errno : error;
}

} // namespace

bool is_address(const char *address)
{
    Address parsed;
    return parse(address, &parsed) != 0;
}

bool Stream::connect(const char *text, int timeout_ms)
{
    close();
    Address address;
    socklen_t length = parse(text, &address);
    if (!length) {
        errno = EINVAL;
        return false;
    }
    int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    int error = ::connect(fd, &address.any, length) == 0 ? 0 : errno;
    if (error == EINPROGRESS)
        error = wait_writable(fd, timeout_ms) ? socket_error(fd) : errno;
    if (error != 0) {
        ::close(fd);
        errno = error;
        return false;
    }
    fd_ = fd;
    return true;
}

void Stream::close()
{
    if (fd_ >= 0)
        ::close(fd_);
    fd_ = -1;
    ring_.reset();
    has_ended_ = false;
}

void Stream::switch_to_ring(std::unique_ptr<Ring> ring)
{
    counters.rings++;
    ring_ = std::move(ring);
}

bool Stream::write(const void *head, size_t head_bytes, const void *body, size_t body_bytes,
                   int timeout_ms)
{
    if (!ring_)
        return write_to_socket(head, head_bytes, body, body_bytes, timeout_ms);
    if (!write_to_ring(head, head_bytes, timeout_ms) ||
        !write_to_ring(body, body_bytes, timeout_ms))
        return false;
    wake_host();
    return true;
}

ssize_t Stream::read(void *to, size_t max_bytes)
{
    if (!ring_)
        return ::read(fd_, to, max_bytes);
    if (!ring_->is_own())
        return 0;
    ssize_t n = ring_->read(to, max_bytes);
    if (n > 0 && ring_->must_ring_writer())
        ring_bell();
    if (n == 0 && has_ended_)
        return 0;
    errno = n < 0 ? EPROTO : EAGAIN;
    return n > 0 ? n : -1;
}

bool Stream::wait(int timeout_ms)
{
    if (ring_)
        return wait_for_ring(timeout_ms);
    pollfd p = {fd_, POLLIN, 0};
    return poll(&p, 1, timeout_ms) > 0;
}

/* --- by ring --- */

void Stream::ring_bell()
{
    char bell = 0;
    counters.bells++;
    /* A full socket has bells that the host has not heard yet. */
    (void)!send(fd_, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Rings the host if it sleeps: bytes are there for it. */
void Stream::wake_host()
{
    if (ring_->must_ring_reader())
        ring_bell();
}

bool Stream::write_to_ring(const void *from, size_t bytes, int timeout_ms)
{
    const char *next = static_cast<const char *>(from);
    while (bytes > 0) {
        bool is_own = ring_->is_own();
        ssize_t n = is_own ? ring_->write(next, bytes) : -1;
        if (n < 0) {
            errno = is_own ? EPROTO : ECONNRESET;
            return false;
        }
        next += n;
        bytes -= static_cast<size_t>(n);
        if (bytes == 0 || n > 0)
            continue;
        wake_host();
        if (ring_->wait_for_room() && !wait_for_bells(timeout_ms)) {
            errno = has_ended_ ? ECONNRESET : ETIMEDOUT;
            return false;
        }
    }
    return true;
}

/* Sleeps until the host rings; false: it does not, or the socket has ended. */
bool Stream::wait_for_bells(int timeout_ms)
{
    char bells[64];
    pollfd p = {fd_, POLLIN, 0};
    counters.sleeps++;
    int events;
    do
        events = poll(&p, 1, timeout_ms);
    while (events < 0 && errno == EINTR);
    if (events <= 0)
        return false;
    ssize_t n = recv(fd_, bells, sizeof(bells), MSG_DONTWAIT);
    has_ended_ = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    return !has_ended_;
}

/* Polls the ring for as long as that pays, while no other thread wants the CPU. */
bool Stream::poll_ring(int64_t since_ns)
{
    constexpr int POLLS_PER_YIELD = 32;
    int64_t now = since_ns;
    spin_.begin();
    do {
        for (int i = 0; i < POLLS_PER_YIELD; i++) {
            if (ring_->has_bytes())
                return true;
            relax();
        }
        int64_t yield_start_ns = now_ns();
        sched_yield();
        now = now_ns();
        spin_.note_yield(now - yield_start_ns, now - since_ns);
    } while (now - since_ns < spin_.time_ns());
    return ring_->has_bytes();
}

bool Stream::wait_for_ring(int timeout_ms)
{
    int64_t since_ns = now_ns();
    if (poll_ring(since_ns) || has_ended_ || !ring_->sleep())
        return true;
    bool is_rung = wait_for_bells(timeout_ms);
    ring_->wake();
    if (is_rung)
        spin_.note_sleep(now_ns() - since_ns);
    return is_rung || has_ended_;
}

/* --- by socket --- */

bool Stream::write_to_socket(const void *head, size_t head_bytes, const void *body,
                             size_t body_bytes, int timeout_ms)
{
    int fd = fd_;
    iovec parts[2] = {{const_cast<void *>(head), head_bytes},
                      {const_cast<void *>(body), body_bytes}};
    msghdr message;
    memset(&message, 0, sizeof(message));
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    while (parts[0].iov_len + parts[1].iov_len > 0) {
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno != EAGAIN || !wait_writable(fd, timeout_ms)))
            return false;
        for (iovec &part : parts) {
            size_t sent = n <= 0                                  ? 0
                          : static_cast<size_t>(n) < part.iov_len ? static_cast<size_t>(n)
                                                                  : part.iov_len;
            part.iov_base = static_cast<char *>(part.iov_base) + sent;
            part.iov_len -= sent;
            n -= static_cast<ssize_t>(sent);
        }
    }
    return true;
}

} // namespace millrace
