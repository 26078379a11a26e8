// SPDX-License-Identifier: GPL-2.0-only
/* The client against a host that breaks connections. The last line is `N passed, N failed`. */
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "../client.h"
#include "check.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

using namespace millrace;

static constexpr uint64_t STAMP = 0x123456789abcdef1ULL;

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
        if (bind(listener_, reinterpret_cast<sockaddr *>(&address), sizeof(address)) ||
            listen(listener_, 8))
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
    Endpoint endpoint(const std::string &ring = "off") const
    {
        Endpoint endpoint;
        endpoint.address = "unix:" + folder_ + "/s";
        endpoint.ring = ring;
        return endpoint;
    }

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
    /* Reads the next request. Returns its number; 0: the connection ended. */
    uint64_t request()
    {
        while (read_frame())
            if (frame_.kind == kind::REQUEST)
                return frame_.seq;
        return 0;
    }
    /* Answers the request for a ring, which is the next frame. `slot` below 0: grants none. */
    void answer_ring(int slot)
    {
        if (!read_frame() || frame_.kind != kind::RING)
            return;
        RingGranted granted;
        granted.slot = static_cast<uint32_t>(slot);
        granted.reserved = 0;
        granted.stamp = STAMP;
        if (slot >= 0)
            return send(kind::RING, 0, &granted, sizeof(granted));
        fail(kind::RING, failure::RING);
    }
    void fail(uint16_t kind, uint32_t code)
    {
        Failure failure;
        failure.code = code;
        failure.reserved = 0;
        send(kind, 0, &failure, sizeof(failure), flag::FAILED);
    }
    /* Waits for a bell; false: the connection ended. */
    bool bell()
    {
        char byte;
        return read_all(&byte, 1);
    }
    void ring() { ::send(fd_, "", 1, MSG_NOSIGNAL); }
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
    void send(uint16_t kind, uint64_t seq, const void *body, uint32_t bytes, uint16_t flags = 0)
    {
        std::string frame = frame_of(kind, seq, body, bytes, flags);
        ::send(fd_, frame.data(), frame.size(), MSG_NOSIGNAL);
    }

public:
    static std::string frame_of(uint16_t kind, uint64_t seq, const void *body, uint32_t bytes,
                                uint16_t flags, uint64_t stamp = 0)
    {
        Frame frame;
        frame.len_bytes = bytes;
        frame.kind = kind;
        frame.flags = flags;
        frame.seq = seq;
        uint64_t seed = static_cast<uint64_t>(bytes) | static_cast<uint64_t>(kind) << 32 |
                        static_cast<uint64_t>(flags) << 48;
        seed ^= seq * 0x9E3779B97F4A7C15ULL;
        frame.check = static_cast<uint64_t>(XXH3_64bits_withSeed(body, bytes, seed)) ^ stamp;
        std::string text(reinterpret_cast<const char *>(&frame), sizeof(frame));
        return text.append(static_cast<const char *>(body), bytes);
    }

private:
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
    Client client(host.endpoint(), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE && was_again,
          "asked again, and marked");
    check(reply.size() == 4, "the reply's body");
}

/* The client's patience begins with the wait for a reply: an older connection, which brought no
 * reply, does not count. */
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
    Client client(host.endpoint(), "table", PATIENCE_MS);
    check(client.post(body("a"), 0, KillCheck()) == CallResult::DONE, "posted");
    poll(nullptr, 0, 2 * PATIENCE_MS);
    Bytes reply;
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::DONE,
          "the wait's own patience");
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
        Client client(host.endpoint(), "table", 1000);
        Bytes reply;
        check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::UNREACHABLE,
              "given up");
    }
    check(connections > 1, "tried again");
}

/* A region in a file, and the host's side of its first slot. */
class Memory {
public:
    Memory()
    {
        char name[] = "/tmp/millrace-ring-XXXXXX";
        int fd = mkstemp(name);
        name_ = name;
        if (ftruncate(fd, SLOTS_OFF + SLOT_BYTES))
            perror("ftruncate");
        void *base =
            mmap(nullptr, SLOTS_OFF + SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        base_ = static_cast<uint8_t *>(base);
        RegionHead head;
        memset(&head, 0, sizeof(head));
        head.magic = REGION_MAGIC;
        head.version = REGION_VERSION;
        head.slots = 1;
        memcpy(base_, &head, sizeof(head));
    }
    ~Memory()
    {
        munmap(base_, SLOTS_OFF + SLOT_BYTES);
        unlink(name_.c_str());
    }
    const std::string &name() const { return name_; }
    std::atomic<uint64_t> &word(size_t off)
    {
        return *reinterpret_cast<std::atomic<uint64_t> *>(base_ + SLOTS_OFF + off);
    }
    std::atomic<uint32_t> &flag(size_t off)
    {
        return *reinterpret_cast<std::atomic<uint32_t> *>(base_ + SLOTS_OFF + off);
    }
    uint8_t *data(size_t off) { return base_ + SLOTS_OFF + 4096 + off; }
    void reset(uint64_t stamp = STAMP)
    {
        memset(base_ + SLOTS_OFF, 0, 4096);
        word(STAMP_OFF) = stamp;
    }
    /* Takes this many bytes of the client out of its ring. */
    std::string take(Host &host, size_t bytes)
    {
        std::string taken;
        while (taken.size() < bytes) {
            uint64_t tail = word(0), head = word(64);
            for (; head < tail && taken.size() < bytes; head++)
                taken += static_cast<char>(*data(head % DATA_BYTES));
            word(64) = head;
            if (flag(8).exchange(0))
                host.ring();
        }
        return taken;
    }
    /* Takes a connection and grants it this ring. Returns its first request, of a byte. */
    std::string first_request(Host &host)
    {
        host.welcome();
        reset();
        host.answer_ring(0);
        return take(host, sizeof(Frame) + 1);
    }
    /* Writes bytes to the client's ring. */
    void give(Host &host, const std::string &bytes)
    {
        for (char byte : bytes) {
            uint64_t tail = word(128);
            while (tail - word(192) >= DATA_BYTES)
                std::this_thread::yield();
            *data(DATA_BYTES + tail % DATA_BYTES) = static_cast<uint8_t>(byte);
            word(128) = tail + 1;
            if (flag(200).exchange(0))
                host.ring();
        }
    }

private:
    std::string name_;
    uint8_t *base_;
};

static void test_by_ring()
{
    Memory memory;
    std::string heard, long_reply(3 * DATA_BYTES + 5, 'y');
    Host host([&](Host &h) {
        heard = memory.first_request(h);
        memory.give(h, Host::frame_of(kind::REPLY, 1, "done", 4, 0, STAMP));
        /* More than there is room for, both ways: it waits for room, and is rung. */
        while (!memory.flag(8))
            std::this_thread::yield();
        memory.take(h, sizeof(Frame) + 2 * DATA_BYTES);
        memory.give(h, Host::frame_of(kind::REPLY, 2, long_reply.data(),
                                      static_cast<uint32_t>(long_reply.size()), 0, STAMP));
        /* Gone: what is in the ring still counts. */
        memory.take(h, sizeof(Frame) + 1);
        memory.give(h, Host::frame_of(kind::REPLY, 3, "last", 4, 0, STAMP));
        h.hang_up();
        h.welcome();
        h.answer_ring(-1);
        h.reply(h.request());
        h.request();
    });
    Endpoint endpoint = host.endpoint(memory.name());
    endpoint.spin_us = 20;
    Client client(endpoint, "table", 30000);
    Bytes reply, long_body;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE && reply.size() == 4,
          "by ring");
    check(heard.size() == sizeof(Frame) + 1 && heard.back() == 'a', "what the host read");
    memset(long_body.grow(2 * DATA_BYTES), 'x', 2 * DATA_BYTES);
    check(client.call(std::move(long_body), 0, KillCheck(), &reply) == CallResult::DONE,
          "a long one");
    check(reply.size() == long_reply.size() &&
              memcmp(reply.data(), long_reply.data(), reply.size()) == 0,
          "a long reply");
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::DONE && reply.size() == 4,
          "the last words");
    check(client.call(body("c"), 0, KillCheck(), &reply) == CallResult::DONE,
          "by socket, when there is no ring");
    check(counters.rings == 1, "one connection went by a ring");
}

/* After wrong data in the ring, the client connects again without a ring. */
static void test_damaged_ring()
{
    Memory memory;
    Host host([&](Host &h) {
        memory.first_request(h);
        memory.give(h, std::string(sizeof(Frame), '\1'));
        h.ring();
        h.welcome();
        h.reply(h.request());
        memory.first_request(h);
        memory.word(128) = DATA_BYTES + 1;
        h.ring();
        h.welcome();
        h.reply(h.request());
        h.request();
    });
    Client client(host.endpoint(memory.name()), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE, "a damaged frame");
    client.restart();
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::DONE,
          "a word that cannot be true");
}

/* A client without a ring, since one was damaged, requests one again where the host demands it. */
static void test_ring_only()
{
    Memory memory;
    Host host([&](Host &h) {
        memory.first_request(h);
        memory.give(h, std::string(sizeof(Frame), '\1'));
        h.ring();
        h.welcome();
        h.request();
        h.fail(kind::GOODBYE, failure::RING_ONLY);
        memory.first_request(h);
        memory.give(h, Host::frame_of(kind::REPLY, 1, "done", 4, 0, STAMP));
        h.ring();
        /* There is none: it is told, and soon. */
        h.hang_up();
        while (h.welcome()) {
            h.answer_ring(-1);
            if (h.request())
                h.fail(kind::GOODBYE, failure::RING_ONLY);
        }
    });
    Client client(host.endpoint(memory.name()), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE && reply.size() == 4,
          "a ring, after all");
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::UNREACHABLE,
          "no ring, and no other way");
    check(client.failure_code() == failure::RING_ONLY, "and it is told why");
}

/* A slot that has become another client's, with replies that look right, ends the connection and
 * does no more harm. */
static void test_slot_of_another()
{
    Memory memory;
    Host host([&](Host &h) {
        memory.first_request(h);
        memory.give(h, Host::frame_of(kind::REPLY, 1, "done", 4, 0, STAMP));
        while (memory.word(192) != sizeof(Frame) + 4) /* until it is read */
            std::this_thread::yield();
        memory.reset(STAMP + 2);
        for (uint64_t seq = 1; seq < 4; seq++)
            memory.give(h, Host::frame_of(kind::REPLY, seq, "evil", 4, 0, STAMP));
        memory.first_request(h);
        memory.give(h, Host::frame_of(kind::REPLY, 2, "good!", 5, 0, STAMP));
        h.request();
    });
    Client client(host.endpoint(memory.name()), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE, "its own slot");
    while (memory.word(STAMP_OFF) == STAMP || memory.word(128) < 3 * (sizeof(Frame) + 4))
        std::this_thread::yield();
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::DONE && reply.size() == 5,
          "another's slot");
}

/* A connection breaks, and the reply comes again before the host grants a ring to the next
 * connection. */
static void test_reply_before_ring()
{
    Memory memory;
    bool is_again = false;
    Host host([&](Host &h) {
        h.welcome();
        h.answer_ring(-1);
        uint64_t seq = h.request();
        h.welcome();
        memory.reset();
        h.reply(seq);
        h.answer_ring(0);
        /* It is asked for all the same: what a host says then counts no more. */
        memory.take(h, sizeof(Frame) + 1);
        memory.give(h, Host::frame_of(kind::REPLY, seq, "again", 5, 0, STAMP));
        memory.take(h, sizeof(Frame) + 1);
        is_again = true;
        memory.give(h, Host::frame_of(kind::REPLY, seq + 1, "next", 4, 0, STAMP));
        h.request();
    });
    Client client(host.endpoint(memory.name()), "table", 30000);
    Bytes reply;
    check(client.call(body("a"), 0, KillCheck(), &reply) == CallResult::DONE && reply.size() == 4,
          "an early reply");
    check(client.call(body("b"), 0, KillCheck(), &reply) == CallResult::DONE &&
              memcmp(reply.data(), "next", 4) == 0 && is_again,
          "the next one");
}

static void test_regions()
{
    check(!Region::find("/nonexistent"), "no file");
    char name[] = "/tmp/millrace-ring-XXXXXX";
    int fd = mkstemp(name);
    check(!Region::find(name), "an empty file");
    check(ftruncate(fd, SLOTS_OFF + SLOT_BYTES) == 0 && !Region::find(name), "one of zeroes");
    close(fd);
    unlink(name);
    Memory memory;
    std::shared_ptr<Region> region = Region::find(memory.name());
    check(region && region == Region::find(memory.name()), "found once");
    check(region && region->slot(0) && !region->slot(1), "its slots");
}

static void test_spin()
{
    Spin spin;
    spin.set_max_ns(8000);
    spin.note_sleep(9000);
    check(spin.time_ns() == 0, "in vain");
    spin.note_sleep(8000);
    check(spin.time_ns() == 8000, "worth while");
    spin.note_sleep(9000);
    check(spin.time_ns() == 4000, "less");
    spin.set_max_ns(1000);
    check(spin.time_ns() == 1000, "no more than is allowed");
    spin.begin();
    for (int64_t n = 1; n <= 20; n++)
        spin.note_yield(30000, n * 100000);
    check(spin.time_ns() == 1000, "interrupts are no reason");
    spin.begin();
    spin.note_yield(101000, 110000);
    check(spin.time_ns() == 0, "nothing where others want the CPU");
}

int main()
{
    test_asked_again();
    test_patience_begins_with_the_wait();
    test_poison();
    test_regions();
    test_spin();
    test_by_ring();
    test_damaged_ring();
    test_ring_only();
    test_reply_before_ring();
    test_slot_of_another();
    return report();
}
