// SPDX-License-Identifier: GPL-2.0-only
#include "transport.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

namespace millrace {

namespace {

union Address {
    sockaddr any;
    sockaddr_un unix_;
    sockaddr_vm vm;
};

/* Bytes of the address, or 0. */
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

int connect_to(const char *text, int timeout_ms, int *error)
{
    Address address;
    socklen_t length = parse(text, &address);
    if (!length) {
        *error = EINVAL;
        return -1;
    }
    int fd = socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        *error = errno;
        return -1;
    }
    if (connect(fd, &address.any, length) == 0)
        return fd;
    *error = errno;
    if (errno == EINPROGRESS)
        *error = wait_writable(fd, timeout_ms) ? socket_error(fd) : errno;
    if (*error == 0)
        return fd;
    close(fd);
    return -1;
}

bool write_all(int fd, const void *head, size_t head_bytes, const void *body, size_t body_bytes,
               int timeout_ms)
{
    iovec parts[2] = {{const_cast<void *>(head), head_bytes}, {const_cast<void *>(body), body_bytes}};
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
