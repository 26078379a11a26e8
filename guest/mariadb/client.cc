// SPDX-License-Identifier: GPL-2.0-only
#include "client.h"

#include <cerrno>
#include <cstdio>
#include <ctime>

#include <poll.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace millrace {

namespace {

constexpr int SLICE_MS = 100;         /* time to notice a killed statement */
constexpr int HELLO_MS = 10000;       /* longest wait for a welcome, and to write a byte */
constexpr int64_t SILENCE_MS = 10000; /* then a ping; as long again, and the connection is broken */
constexpr int MOST_CONNECTIONS = 20;  /* with pongs and without a reply */
constexpr size_t READ_AHEAD = 64 << 10;

int64_t now_ms()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

uint64_t check_of(const Frame &frame, const uint8_t *body)
{
    uint64_t first = static_cast<uint64_t>(frame.len_bytes) |
                     static_cast<uint64_t>(frame.kind) << 32 |
                     static_cast<uint64_t>(frame.flags) << 48;
    return XXH3_64bits_withSeed(body, frame.len_bytes, first ^ frame.seq * 0x9E3779B97F4A7C15ULL);
}

} // namespace

Client::Client(const Way &way, const char *module, uint32_t patience_ms)
    : address_(way.address), ring_(way.ring), patience_ms_(patience_ms)
{
    stream_.set_spin_us(way.spin_us);
    strncpy(module_, module, sizeof(module_) - 1);
    if (getrandom(id_, sizeof(id_), 0) != static_cast<ssize_t>(sizeof(id_)))
        abort();
}

Client::~Client()
{
    if (stream_.is_open())
        write_frame(kind::GOODBYE, 0, 0, nullptr, 0);
    disconnect();
}

void Client::restart()
{
    if (stream_.is_open())
        write_frame(kind::GOODBYE, 0, 0, nullptr, 0);
    disconnect();
    under_way_.clear();
    last_seq_ = last_tx_ = 0;
    broken_ms_ = 0;
    was_connected_ = is_broken_ = does_without_ring_ = false;
    if (getrandom(id_, sizeof(id_), 0) != static_cast<ssize_t>(sizeof(id_)))
        abort();
}

void Client::disconnect()
{
    stream_.close();
    in_.clear();
    early_.clear();
    is_ping_sent_ = false;
}

void Client::note(const char *what, int error)
{
    error_ = std::string(what) + " '" + address_ + "'";
    if (error)
        error_ += std::string(": ") + strerror(error);
}

void Client::note_failure(const uint8_t *body, size_t bytes)
{
    Failure failure;
    failure_code_ = 0;
    error_ = "the host ended the connection";
    if (bytes < sizeof(failure))
        return;
    memcpy(&failure, body, sizeof(failure));
    failure_code_ = failure.code;
    size_t text = bytes - sizeof(failure);
    if (text > 0)
        error_.assign(reinterpret_cast<const char *>(body) + sizeof(failure),
                      text < MAX_TEXT_BYTES ? text : MAX_TEXT_BYTES);
}

/* --- the connection --- */

Client::Step Client::write_frame(uint16_t kind, uint16_t flags, uint64_t seq, const uint8_t *body,
                                 size_t bytes)
{
    Frame frame;
    frame.len_bytes = static_cast<uint32_t>(bytes);
    frame.kind = kind;
    frame.flags = flags;
    frame.seq = seq;
    frame.check = check_of(frame, body) ^ stream_.stamp();
    if (!stream_.write(&frame, sizeof(frame), body, bytes, HELLO_MS)) {
        note("lost the connection to", errno);
        return Step::BROKEN;
    }
    counters.bytes_sent += sizeof(frame) + bytes;
    return Step::GOT;
}

/* Handles damaged bytes. Of a ring, another program may be the cause: the next connection does
 * without. */
Client::Step Client::damaged(const char *what)
{
    note(what, 0);
    does_without_ring_ |= stream_.has_ring();
    return Step::BROKEN;
}

/* Reads until in_ has this many bytes. */
Client::Step Client::read_bytes(size_t want, int timeout_ms)
{
    while (in_.size() < want) {
        size_t missing = want - in_.size(), ask = missing < READ_AHEAD ? READ_AHEAD : missing;
        in_.reserve(ask);
        ssize_t n = stream_.read(in_.data() + in_.size(), ask);
        if (n > 0) {
            in_.grow(static_cast<size_t>(n));
            counters.bytes_received += static_cast<uint64_t>(n);
            heard_ms_ = now_ms();
            is_ping_sent_ = false;
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            if (!stream_.wait(timeout_ms))
                return Step::WAIT;
        } else {
            if (n < 0 && errno == EPROTO)
                return damaged("a ring that cannot be true is shared with");
            note(n == 0 ? "the host closed the connection to" : "lost the connection to",
                 n == 0 ? 0 : errno);
            return Step::BROKEN;
        }
    }
    return Step::GOT;
}

Client::Step Client::read_frame(int timeout_ms)
{
    if (!early_.empty()) {
        frame_ = early_.front().frame;
        body_ = std::move(early_.front().body);
        early_.pop_front();
        return Step::GOT;
    }
    Step step = read_bytes(sizeof(frame_), timeout_ms);
    if (step != Step::GOT)
        return step;
    memcpy(&frame_, in_.data(), sizeof(frame_));
    if (frame_.len_bytes > MAX_BODY_BYTES)
        return damaged("a frame that is too long came from");
    size_t whole = sizeof(frame_) + frame_.len_bytes;
    step = read_bytes(whole, timeout_ms);
    if (step != Step::GOT)
        return step;
    if ((check_of(frame_, in_.data() + sizeof(frame_)) ^ stream_.stamp()) != frame_.check)
        return damaged("a damaged frame came from");
    body_.assign(in_.data() + sizeof(frame_), frame_.len_bytes);
    size_t rest = in_.size() - whole;
    memmove(in_.data(), in_.data() + whole, rest);
    in_.shrink_to(rest);
    if (rest == 0)
        in_.clear_and_trim(2 << 20);
    return Step::GOT;
}

Client::Step Client::read_answer(const Killed &killed)
{
    int64_t give_up = now_ms() + HELLO_MS;
    Step step;
    do
        step = read_frame(SLICE_MS);
    while (step == Step::WAIT && now_ms() < give_up && !killed());
    if (step == Step::WAIT)
        note("no answer from", 0);
    return step == Step::GOT ? Step::GOT : Step::BROKEN;
}

Client::Step Client::say_hello(const Killed &killed)
{
    Hello hello;
    memset(&hello, 0, sizeof(hello));
    hello.magic = MAGIC;
    hello.lowest = hello.highest = THIS_VERSION;
    memcpy(hello.client, id_, sizeof(id_));
    memcpy(hello.module, module_, sizeof(module_));
    Step step = write_frame(kind::HELLO, 0, 0, reinterpret_cast<uint8_t *>(&hello), sizeof(hello));
    if (step == Step::GOT)
        step = read_answer(killed);
    if (step != Step::GOT)
        return Step::BROKEN;
    if (frame_.kind == kind::GOODBYE) {
        note_failure(body_.data(), body_.size());
        bool is_passing = failure_code_ == failure::ENDING || failure_code_ == failure::LIMIT;
        return is_passing ? Step::BROKEN : Step::REFUSED;
    }
    Welcome welcome;
    if (frame_.kind != kind::WELCOME || body_.size() < sizeof(welcome)) {
        note("no welcome from", 0);
        return Step::REFUSED;
    }
    memcpy(&welcome, body_.data(), sizeof(welcome));
    if (welcome.magic != MAGIC || welcome.version != THIS_VERSION || welcome.max_in_flight == 0) {
        note("another version is spoken by", 0);
        return Step::REFUSED;
    }
    max_in_flight_ = welcome.max_in_flight;
    max_body_bytes_ =
        welcome.max_body_bytes < MAX_BODY_BYTES ? welcome.max_body_bytes : MAX_BODY_BYTES;
    /* Another instance of the host: faults of the memory before do not count. */
    does_without_ring_ &= instance_ == welcome.instance;
    instance_ = welcome.instance;
    return Step::GOT;
}

/* Moves to shared memory, where there is some and the host agrees; else stays with the socket. */
Client::Step Client::ask_for_ring(const Killed &killed)
{
    std::shared_ptr<Region> region;
    if (ring_ != "off" && !does_without_ring_)
        region = Region::find(ring_);
    if (!region)
        return Step::GOT;
    RingWanted wanted;
    region->copy_id(wanted.id);
    Step step = write_frame(kind::RING, 0, 0, reinterpret_cast<uint8_t *>(&wanted), sizeof(wanted));
    /* Replies to requests in flight may come first: they are kept for their callers. */
    std::deque<Early> early;
    for (;;) {
        step = step == Step::GOT ? read_answer(killed) : step;
        if (step != Step::GOT)
            return step;
        if (frame_.kind == kind::RING || frame_.kind == kind::GOODBYE)
            break;
        if (frame_.kind == kind::REPLY)
            early.push_back(Early{frame_, std::move(body_)});
    }
    early_ = std::move(early);
    RingGranted granted;
    if (frame_.kind == kind::GOODBYE) {
        note_failure(body_.data(), body_.size());
        return Step::BROKEN;
    }
    if ((frame_.flags & flag::FAILED) || body_.size() != sizeof(granted)) {
        Region::forget(region);
        return Step::GOT;
    }
    memcpy(&granted, body_.data(), sizeof(granted));
    uint8_t *slot = region->slot(granted.slot);
    if (!slot) {
        note("a ring that is not there was given by", 0);
        does_without_ring_ = true;
        return Step::BROKEN;
    }
    stream_.change_over(std::make_unique<Ring>(region, slot, granted.stamp));
    return Step::GOT;
}

Client::Step Client::resend()
{
    for (Request &request : under_way_) {
        uint16_t flags = static_cast<uint16_t>(request.flags | flag::AGAIN);
        Step step = write_frame(kind::REQUEST, flags, request.seq, request.body.data(),
                                request.body.size());
        if (step != Step::GOT)
            return step;
    }
    return Step::GOT;
}

Client::Step Client::connect_once(const Killed &killed)
{
    if (!stream_.connect(address_.c_str(), HELLO_MS)) {
        int error = errno;
        note("cannot connect to", error);
        return error == EINVAL ? Step::REFUSED : Step::BROKEN;
    }
    (was_connected_ ? counters.reconnects : counters.connects)++;
    heard_ms_ = now_ms();
    Step step = say_hello(killed);
    if (step == Step::GOT)
        step = ask_for_ring(killed);
    if (step == Step::GOT)
        step = resend();
    if (step != Step::GOT)
        disconnect();
    else
        was_connected_ = true;
    return step;
}

Call Client::give_up(Call why)
{
    is_broken_ = true;
    broken_ms_ = 0;
    return why;
}

Call Client::ensure_connected(const Killed &killed)
{
    int pause_ms = 5;
    if (broken_ms_ == 0)
        broken_ms_ = now_ms();
    else if (!stream_.is_open())
        poll(nullptr, 0, SLICE_MS);
    while (!stream_.is_open()) {
        Step step = connect_once(killed);
        if (step == Step::GOT)
            break;
        /* A session that is new, or has no request in flight, learns of the failure soon. */
        int64_t most = was_connected_ && !under_way_.empty() ? patience_ms_ : 2000;
        if (killed())
            return give_up(Call::KILLED);
        if (step == Step::REFUSED || now_ms() - broken_ms_ >= most)
            return give_up(Call::UNREACHABLE);
        poll(nullptr, 0, pause_ms);
        pause_ms = pause_ms < 200 ? pause_ms * 2 : 200;
    }
    if (now_ms() - broken_ms_ >= patience_ms_ || ++connections_ > MOST_CONNECTIONS)
        return give_up(Call::UNREACHABLE);
    return Call::DONE;
}

/* --- requests --- */

Call Client::await_room(const Killed &killed)
{
    while (under_way_.size() >= max_in_flight_) {
        Call done = await(under_way_.front().seq, killed, nullptr);
        if (done != Call::DONE && done != Call::FAILED)
            return done;
    }
    return Call::DONE;
}

Call Client::send(Bytes &&body, uint16_t flags, bool is_wanted, const Killed &killed)
{
    failure_code_ = 0;
    broken_ms_ = 0; /* breaks without a waiting caller do not count */
    connections_ = 0;
    if (is_broken_)
        restart();
    Call done = stream_.is_open() ? Call::DONE : ensure_connected(killed);
    if (done == Call::DONE)
        done = await_room(killed);
    if (done != Call::DONE)
        return done;
    under_way_.push_back(Request{++last_seq_, flags, is_wanted, std::move(body)});
    Request &request = under_way_.back();
    counters.requests++;
    /* If the connection breaks now, the next caller that waits for a reply makes it again. */
    if (write_frame(kind::REQUEST, flags, request.seq, request.body.data(), request.body.size()) !=
        Step::GOT)
        disconnect();
    return Call::DONE;
}

Call Client::post(Bytes &&body, uint16_t flags, const Killed &killed)
{
    return send(std::move(body), flags, false, killed);
}

Call Client::call(Bytes &&body, uint16_t flags, const Killed &killed, Bytes *reply)
{
    Call done = send(std::move(body), flags, true, killed);
    if (done != Call::DONE)
        return done;
    counters.round_trips++;
    return await(last_seq_, killed, reply);
}

Client::Step Client::check_silence(int64_t now)
{
    if (now - heard_ms_ < SILENCE_MS)
        return Step::GOT;
    if (!is_ping_sent_) {
        is_ping_sent_ = true;
        return write_frame(kind::PING, 0, 0, nullptr, 0);
    }
    if (now - heard_ms_ < 2 * SILENCE_MS)
        return Step::GOT;
    note("no answer from", 0);
    return Step::BROKEN;
}

Client::Step Client::got_reply(uint64_t wanted, Bytes *reply, bool *is_there)
{
    for (auto request = under_way_.begin(); request != under_way_.end(); ++request) {
        if (request->seq != frame_.seq)
            continue;
        bool is_it = request->seq == wanted;
        broken_ms_ = 0;
        connections_ = 0;
        if (is_it || !request->is_wanted) {
            spare_ = std::move(request->is_wanted ? last_body_ : request->body);
            if (request->is_wanted)
                last_body_ = std::move(request->body);
        }
        under_way_.erase(request);
        if (!is_it)
            return Step::GOT;
        *is_there = true;
        failure_code_ = 0;
        if (frame_.flags & flag::FAILED)
            note_failure(body_.data(), body_.size());
        else if (reply)
            reply->swap(body_);
        return frame_.flags & flag::FAILED ? Step::REFUSED : Step::GOT;
    }
    return Step::GOT; /* of a request that was answered before it was sent again */
}

Client::Step Client::got_frame(uint64_t wanted, Bytes *reply, bool *is_there)
{
    switch (frame_.kind) {
    case kind::REPLY:
        return got_reply(wanted, reply, is_there);
    case kind::PONG:
        broken_ms_ = 0;
        return Step::GOT;
    case kind::PING:
        return write_frame(kind::PONG, 0, frame_.seq, body_.data(), body_.size());
    case kind::GOODBYE:
        note_failure(body_.data(), body_.size());
        if (failure_code_ == failure::RING || failure_code_ == failure::RING_ONLY)
            does_without_ring_ = failure_code_ == failure::RING;
        return Step::BROKEN;
    default:
        return Step::GOT;
    }
}

/* Waits for the reply of `seq`. A killed statement asks the host to cancel, once, and then waits
 * for the reply like any other: only the reply says what was executed. */
Call Client::await(uint64_t seq, const Killed &killed, Bytes *reply)
{
    bool is_there = false, is_cancelled = false;
    while (!is_there) {
        if (!stream_.is_open()) {
            Call done = ensure_connected(killed);
            if (done != Call::DONE)
                return done;
            is_cancelled = false;
        }
        Step step = read_frame(SLICE_MS);
        if (step == Step::GOT)
            step = got_frame(seq, reply, &is_there);
        if (is_there)
            return step == Step::REFUSED ? Call::FAILED : Call::DONE;
        if (step == Step::WAIT)
            step = check_silence(now_ms());
        if (step != Step::BROKEN && !is_cancelled && killed()) {
            is_cancelled = true;
            counters.cancels++;
            step = write_frame(kind::CANCEL, 0, seq, nullptr, 0);
        }
        if (step == Step::BROKEN)
            disconnect();
    }
    return Call::DONE;
}

} // namespace millrace
