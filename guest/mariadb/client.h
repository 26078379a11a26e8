// SPDX-License-Identifier: GPL-2.0-only
/* Client of a module: its connection, the requests in flight, and the repair of a broken
 * connection.
 *
 * Theory of operation. A client belongs to one thread at a time and has none of its own: it
 * sends, then polls until the reply is there. Each request stays here until its reply has come.
 * When the connection breaks, the client connects again with the same id and sends all of them
 * again; the host executes none twice. After `patience_ms` without a sign of life it gives up:
 * the caller learns that the host cannot be reached, and that the request may have been executed
 * or not. A host that is silent for long is pinged, and a missing pong is a broken connection,
 * too.
 *
 * Signs of life are replies and pongs, and not a connection alone: a request that ends each
 * connection is not sent for ever. One that lets pongs through first is sent on MOST_CONNECTIONS
 * of them.
 *
 * Limits: Welcome::max_in_flight requests in flight (post() waits then), and MAX_BODY_BYTES
 * each. */
#ifndef MILLRACE_CLIENT_H
#define MILLRACE_CLIENT_H

#include <deque>
#include <string>

#include "bytes.h"
#include "counters.h"
#include "protocol.h"
#include "transport.h"

namespace millrace {

enum class Call {
    DONE,        /* the reply has come */
    KILLED,      /* the statement was killed, and the host could not be reached to cancel it */
    UNREACHABLE, /* no connection; it may have been executed or not */
    FAILED,      /* the host, not the module, refused it */
};

/* Predicate: the caller's statement was killed. */
struct Killed {
    bool (*is_killed)(void *) = nullptr;
    void *argument = nullptr;
    bool operator()() const { return is_killed && is_killed(argument); }
};

/* Settings to reach the host. */
struct Way {
    std::string address;
    std::string ring = "off"; /* memory shared with it: "auto", "off" or a file */
    unsigned spin_us = 0;     /* time that it is polled before the thread sleeps */
};

class Client {
public:
    Client(const Way &way, const char *module, uint32_t patience_ms);
    ~Client();
    Client(const Client &) = delete;
    Client &operator=(const Client &) = delete;

    /* Sends and waits for the reply. */
    Call call(Bytes &&body, uint16_t flags, const Killed &killed, Bytes *reply);
    /* Sends a request whose reply is dropped. */
    Call post(Bytes &&body, uint16_t flags, const Killed &killed);
    /* Text of the error, of the last call that was not DONE. */
    const std::string &error() const { return error_; }
    uint32_t failure_code() const { return failure_code_; }
    /* Takes a sent body that is not needed any more, for its memory. */
    Bytes take_spare() { return std::move(spare_); }
    /* Body of the last call, kept until the next one for error messages. */
    const Bytes &last_body() const { return last_body_; }

    /* Ends the client for good: the host forgets it at once. It begins anew with another id. */
    void restart();
    /* Whether it may wait in the pool: connected, and all replies have come or are sure to come. */
    bool is_idle() const { return stream_.is_open() && !is_broken_; }
    const std::string &address() const { return address_; }
    const std::string &ring() const { return ring_; }
    void set_spin_us(unsigned us) { stream_.set_spin_us(us); }
    void set_patience(uint32_t ms) { patience_ms_ = ms; }
    uint32_t max_in_flight() const { return max_in_flight_; }
    uint32_t max_body_bytes() const { return max_body_bytes_; }
    uint64_t next_tx() { return ++last_tx_; }
    /* Instance of the store that it is connected to; 0: none yet. Another one may speak another
     * version. */
    uint64_t instance() const { return instance_; }

private:
    struct Request {
        uint64_t seq;
        uint16_t flags;
        bool is_wanted;
        Bytes body;
    };
    /* Frame that came before it was wanted. */
    struct Early {
        Frame frame;
        Bytes body;
    };
    enum class Step {
        GOT,
        WAIT,
        BROKEN,
        REFUSED
    };

    Call send(Bytes &&body, uint16_t flags, bool is_wanted, const Killed &killed);
    Call await(uint64_t seq, const Killed &killed, Bytes *reply);
    Call await_room(const Killed &killed);
    Call ensure_connected(const Killed &killed);
    Call give_up(Call why);
    Step connect_once(const Killed &killed);
    Step say_hello(const Killed &killed);
    Step ask_for_ring(const Killed &killed);
    Step read_answer(const Killed &killed);
    Step resend();
    Step write_frame(uint16_t kind, uint16_t flags, uint64_t seq, const uint8_t *body,
                     size_t bytes);
    /* Reads one frame, if it is complete or comes in time; its body into body_. */
    Step read_frame(int timeout_ms);
    Step read_bytes(size_t want, int timeout_ms);
    Step got_frame(uint64_t wanted, Bytes *reply, bool *is_there);
    Step got_reply(uint64_t wanted, Bytes *reply, bool *is_there);
    Step check_silence(int64_t now);
    Step damaged(const char *what);
    void disconnect();
    void note(const char *what, int error);
    void note_failure(const uint8_t *body, size_t bytes);

    std::string address_;
    std::string ring_;
    char module_[MAX_NAME_BYTES] = {};
    uint8_t id_[16];
    uint32_t patience_ms_;
    uint32_t max_in_flight_ = 1;
    uint32_t max_body_bytes_ = MAX_BODY_BYTES;
    uint64_t instance_ = 0;
    uint64_t last_seq_ = 0;
    uint64_t last_tx_ = 0;
    Stream stream_;
    bool is_broken_ = false; /* the state is unknown: to be restarted */
    bool does_without_ring_ = false; /* bytes of one were damaged */
    bool was_connected_ = false;
    bool is_ping_sent_ = false;
    int64_t heard_ms_ = 0;
    int64_t broken_ms_ = 0; /* when a connection broke, without a sign of life since; 0: none */
    int connections_ = 0;   /* since the last reply, or the start of the wait */
    std::deque<Request> under_way_;
    std::deque<Early> early_;
    Frame frame_;
    Bytes in_; /* bytes of the next frame */
    Bytes body_;
    Bytes spare_;
    Bytes last_body_;
    std::string error_;
    uint32_t failure_code_ = 0;
};

/* Pool of clients with a connection and no transaction, for new sessions. */
Client *take_client(const Way &way, uint32_t patience_ms);
void give_client(Client *client, size_t keep_most);
void drop_pool();
size_t pool_count();

} // namespace millrace

#endif
