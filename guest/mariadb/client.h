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
 * connection is not sent for ever. One that lets pongs through first is sent on MAX_CONNECTIONS
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

enum class CallResult {
    DONE,        /* the reply has come */
    KILLED,      /* the statement was killed, and the host could not be reached to cancel it */
    UNREACHABLE, /* no connection; it may have been executed or not */
    FAILED,      /* the host, not the module, refused it */
};

/* Predicate: the caller's statement was killed. */
struct KillCheck {
    bool (*is_killed)(void *) = nullptr;
    void *argument = nullptr;
    bool operator()() const { return is_killed && is_killed(argument); }
};

/* Address of the host, and settings of the connection. */
struct Endpoint {
    std::string address;
    std::string ring = "off"; /* memory shared with it: "auto", "off" or a file */
    unsigned spin_us = 0;     /* time for which the ring is polled before the thread sleeps */
};

class Client {
public:
    Client(const Endpoint &endpoint, const char *module, uint32_t patience_ms);
    ~Client();
    Client(const Client &) = delete;
    Client &operator=(const Client &) = delete;

    /* Sends and waits for the reply. */
    CallResult call(Bytes &&body, uint16_t flags, const KillCheck &kill_check, Bytes *reply);
    /* Sends a request whose reply is dropped. */
    CallResult post(Bytes &&body, uint16_t flags, const KillCheck &kill_check);
    /* Error text of the last call that was not DONE. */
    const std::string &error() const { return error_; }
    uint32_t failure_code() const { return failure_code_; }
    /* Takes a sent body that is no longer needed, to reuse its memory. */
    Bytes take_spare_body() { return std::move(spare_); }
    /* Body of the last call, kept until the next one for error messages. */
    const Bytes &last_body() const { return last_body_; }

    /* Ends the client for good: the host forgets it at once. It begins anew with another id. */
    void restart();
    /* Whether the client may wait in the pool: connected, and its state is known. */
    bool is_idle() const { return stream_.is_open() && !is_broken_; }
    const std::string &address() const { return address_; }
    const std::string &ring() const { return ring_; }
    void set_spin_us(unsigned us) { stream_.set_spin_us(us); }
    void set_patience_ms(uint32_t ms) { patience_ms_ = ms; }
    uint32_t max_in_flight() const { return max_in_flight_; }
    uint32_t max_body_bytes() const { return max_body_bytes_; }
    uint64_t next_tx() { return ++last_tx_; }
    /* Instance of the store that the client is connected to; 0: none yet. Another instance may have
     * another version. */
    uint64_t instance() const { return instance_; }

private:
    struct Request {
        uint64_t seq;
        uint16_t flags;
        bool is_wanted;
        Bytes body;
    };
    /* Reply that came while another frame was awaited. */
    struct EarlyFrame {
        Frame frame;
        Bytes body;
    };
    enum class Step {
        OK,
        WAIT,
        BROKEN,
        REFUSED
    };

    CallResult send(Bytes &&body, uint16_t flags, bool is_wanted, const KillCheck &kill_check);
    CallResult await(uint64_t seq, const KillCheck &kill_check, Bytes *reply);
    CallResult await_room(const KillCheck &kill_check);
    CallResult ensure_connected(const KillCheck &kill_check);
    CallResult give_up(CallResult result);
    Step connect_once(const KillCheck &kill_check);
    Step send_hello(const KillCheck &kill_check);
    Step request_ring(const KillCheck &kill_check);
    Step read_answer(const KillCheck &kill_check);
    Step resend();
    Step write_frame(uint16_t kind, uint16_t flags, uint64_t seq, const uint8_t *body,
                     size_t bytes);
    /* Reads one frame, if it is complete or comes in time; its body into body_. */
    Step read_frame(int timeout_ms);
    Step read_bytes(size_t wanted_bytes, int timeout_ms);
    Step handle_frame(uint64_t wanted, Bytes *reply, bool *has_reply);
    Step handle_reply(uint64_t wanted, Bytes *reply, bool *has_reply);
    Step check_silence(int64_t now);
    Step report_damage(const char *message);
    void disconnect();
    void note_error(const char *message, int error);
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
    bool is_broken_ = false; /* the state is unknown: the next request restarts the client */
    bool is_ring_off_ = false; /* bytes of a ring were damaged */
    bool was_connected_ = false;
    bool is_ping_sent_ = false;
    int64_t last_bytes_ms_ = 0;
    int64_t broken_ms_ = 0; /* when a connection broke, without a sign of life since; 0: none */
    int connections_ = 0;   /* since the last reply, or the start of the wait */
    std::deque<Request> in_flight_;
    std::deque<EarlyFrame> early_frames_;
    Frame frame_;
    Bytes in_; /* bytes of the next frame */
    Bytes body_;
    Bytes spare_;
    Bytes last_body_;
    std::string error_;
    uint32_t failure_code_ = 0;
};

/* Takes a client from the pool, or makes one. */
Client *take_client(const Endpoint &endpoint, uint32_t patience_ms);
/* Returns a client to the pool, which keeps `max_clients` at most. */
void return_client(Client *client, size_t max_clients);
void drop_pool();
size_t count_pool();

} // namespace millrace

#endif
