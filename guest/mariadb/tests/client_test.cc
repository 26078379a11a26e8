// SPDX-License-Identifier: GPL-2.0-only
/* The client against a host that breaks connections. The last line is `N passed, N failed`. */
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "../client.h"
#include "check.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

using namespace millrace;

/* The host's side: one connection at a time. */
class Host {
public:
    explicit Host(std::function<void(Host &)> script)
    {
        char folder[] = "/tmp/millrace-client-XXXXXX";
        folder_ = mkdtemp(folder);
        sockaddr_un address;
        memset(&address, 0, sizeof(address));
        address.sun_family = AF_UNIX;
        snprintf(address.sun_path, sizeof(address.sun_path), "%s/s", folder_.c_str());
        listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
        if (bind(listener_, reinterpret_cast<sockaddr *>(&address), sizeof(address)) || listen(listener_, 8))
            perror("listen");
        thread_ = std::thread([this, script] { script(*this); });
    }
    ~Host()
    {
        shutdown(listener_, SHUT_RDWR); /* a script that waits for a connection ends */
        thread_.join();
        hang_up();
        close(listener_);
        unlink((folder_ + "/s").c_str());
        rmdir(folder_.c_str());
    }
    std::string address() const { return "unix:" + folder_ + "/s"; }

    /* Takes a connection and welcomes it; false: the test is over. */
    bool welcome()
    {
        hang_up();
        fd_ = accept(listener_, nullptr, nullptr);
        if (fd_ < 0 || !read_frame())
            return false;
        Welcome welcome;
        memset(&welcome, 0, sizeof(welcome));
        welcome.magic = MAGIC;
        welcome.version = THIS_VERSION;
        welcome.max_in_flight = 8;
        welcome.max_body_bytes = 1 << 20;
        send(kind::WELCOME, 0, &welcome, sizeof(welcome));
        return true;
    }
    /* The number of the next request; 0: the connection ended. */
    uint64_t request()
    {
        while (read_frame())
            if (frame_.kind == kind::REQUEST)
                return frame_.seq;
        return 0;
    }
    bool is_again() const { return (frame_.flags & flag::AGAIN) != 0; }
    void reply(uint64_t seq) { send(kind::REPLY, seq, "done", 4); }
    void hang_up()
    {
        if (fd_ >= 0)
            close(fd_);
        fd_ = -1;
    }

private:
    bool read_all(void *to, size_t bytes)
    {
        return bytes == 0 || recv(fd_, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
    }
    bool read_frame()
    {
        if (!read_all(&frame_, sizeof(frame_)))
            return false;
        std::string body(frame_.len_bytes, '\0');
        return read_all(&body[0], body.size());
    }
    void send(uint16_t kind, uint64_t seq, const void *body, uint32_t bytes)
    {
        Frame frame;
        frame.len_bytes = bytes;
        frame.kind = kind;
        frame.flags = static_cast<uint16_t>(0);
        frame.seq = seq;
        uint64_t seed = static_cast<uint64_t>(bytes) | static_cast<uint64_t>(kind) << 32;
        seed ^= seq * 0x9E3779B97F4A7C15ULL;
        frame.check = static_cast<uint64_t>(XXH3_64bits_withSeed(body, bytes, seed));
        ::send(fd_, &frame, sizeof(frame), MSG_NOSIGNAL);
        ::send(fd_, body, bytes, MSG_NOSIGNAL);
    }

    std::string folder_;
    std::thread thread_;
    Frame frame_;
    int listener_ = -1, fd_ = -1;
};

static Bytes body(const char *text)
{
    Bytes bytes;
    bytes.append(text, strlen(text));
    return bytes;
}

static void test_asked_again()
{
    bool was_again = false;
    Host host([&](Host &h) {
        h.welcome();
        h.request();
        h.welcome();
        uint64_t seq = h.request();
        was_again = h.is_again();
        h.reply(seq);
        h.request();
    });
    Client client(host.address(), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, Killed(), &reply) == Call::DONE && was_again, "asked again, and marked");
    check(reply.size() == 4, "the reply's body");
}

/* A connection that was had long ago and has given no reply says nothing of the one that breaks now. */
static void test_patience_begins_with_the_wait()
{
    constexpr int PATIENCE_MS = 200;
    Host host([&](Host &h) {
        h.welcome();
        h.request(); /* posted, not answered */
        h.request(); /* of the call */
        h.welcome();
        for (int i = 0; i < 2; i++)
            h.reply(h.request());
        h.request();
    });
    Client client(host.address(), "table", PATIENCE_MS);
    check(client.post(body("a"), 0, Killed()) == Call::DONE, "posted");
    poll(nullptr, 0, 2 * PATIENCE_MS);
    Bytes reply;
    check(client.call(body("b"), 0, Killed(), &reply) == Call::DONE, "the wait's own patience");
}

static void test_poison()
{
    int connections = 0;
    Host host([&](Host &h) {
        while (h.welcome()) {
            connections++;
            h.request();
        }
    });
    {
        Client client(host.address(), "table", 1000);
        Bytes reply;
        check(client.call(body("a"), 0, Killed(), &reply) == Call::UNREACHABLE, "given up");
    }
    check(connections > 1, "tried again");
}

int main()
{
    test_asked_again();
    test_patience_begins_with_the_wait();
    test_poison();
    return report();
}
