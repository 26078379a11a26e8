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
constexpr int MAX_CONNECTIONS = 20;  /* with pongs and without a reply */
constexpr size_t READ_AHEAD_BYTES = 64 << 10;

int64_t now_ms()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

uint64_t compute_check(const Frame &frame, const uint8_t *body)
{
    uint64_t first = static_cast<uint64_t>(frame.len_bytes) |
                     static_cast<uint64_t>(frame.kind) << 32 |
                     static_cast<uint64_t>(frame.flags) << 48;
    return XXH3_64bits_withSeed(body, frame.len_bytes, first ^ frame.seq * 0x9E3779B97F4A7C15ULL);
}

} // namespace

Client::Client(const Endpoint &endpoint, const char *module, uint32_t patience_ms)
    : address_(endpoint.address), ring_(endpoint.ring), patience_ms_(patience_ms)
{
    stream_.set_spin_us(endpoint.spin_us);
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
    in_flight_.clear();
    last_seq_ = last_tx_ = 0;
    broken_ms_ = 0;
    was_connected_ = is_broken_ = is_ring_off_ = false;
    if (getrandom(id_, sizeof(id_), 0) != static_cast<ssize_t>(sizeof(id_)))
        abort();
}

void Client::disconnect()
{
    stream_.close();
    in_.clear();
    early_frames_.clear();
    is_ping_sent_ = false;
}

void Client::note_error(const char *message, int error)
{
    error_ = std::string(message) + " '" + address_ + "'";
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
    frame.check = compute_check(frame, body) ^ stream_.stamp();
    if (!stream_.write(&frame, sizeof(frame), body, bytes, HELLO_MS)) {
        note_error("lost the connection to", errno);
        return Step::BROKEN;
    }
    counters.bytes_sent += sizeof(frame) + bytes;
    return Step::OK;
}

/* Handles damaged bytes. In a ring, another program may be the cause: the next connection has no
 * ring. */
Client::Step Client::report_damage(const char *message)
{
    note_error(message, 0);
    is_ring_off_ |= stream_.has_ring();
    return Step::BROKEN;
}

/* Reads until in_ has this many bytes. */
Client::Step Client::read_bytes(size_t wanted_bytes, int timeout_ms)
{
    while (in_.size() < wanted_bytes) {
        size_t missing_bytes = wanted_bytes - in_.size(),
               request_bytes =
                   missing_bytes < READ_AHEAD_BYTES ? READ_AHEAD_BYTES : missing_bytes;
        in_.reserve(request_bytes);
        ssize_t n = stream_.read(in_.data() + in_.size(), request_bytes);
        if (n > 0) {
            in_.grow(static_cast<size_t>(n));
            counters.bytes_received += static_cast<uint64_t>(n);
            last_bytes_ms_ = now_ms();
            is_ping_sent_ = false;
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            if (!stream_.wait(timeout_ms))
                return Step::WAIT;
        } else {
            if (n < 0 && errno == EPROTO)
                return report_damage("a ring that cannot be true is shared with");
            note_error(n == 0 ? "the host closed the connection to" : "lost the connection to",
                       n == 0 ? 0 : errno);
            return Step::BROKEN;
        }
    }
    return Step::OK;
}

Client::Step Client::read_frame(int timeout_ms)
{
    if (!early_frames_.empty()) {
        frame_ = early_frames_.front().frame;
        body_ = std::move(early_frames_.front().body);
        early_frames_.pop_front();
        return Step::OK;
    }
    Step step = read_bytes(sizeof(frame_), timeout_ms);
    if (step != Step::OK)
        return step;
    memcpy(&frame_, in_.data(), sizeof(frame_));
    if (frame_.len_bytes > MAX_BODY_BYTES)
        return report_damage("a frame that is too long came from");
    size_t frame_bytes = sizeof(frame_) + frame_.len_bytes;
    step = read_bytes(frame_bytes, timeout_ms);
    if (step != Step::OK)
        return step;
    if ((compute_check(frame_, in_.data() + sizeof(frame_)) ^ stream_.stamp()) != frame_.check)
        return report_damage("a damaged frame came from");
    body_.assign(in_.data() + sizeof(frame_), frame_.len_bytes);
    size_t rest = in_.size() - frame_bytes;
    memmove(in_.data(), in_.data() + frame_bytes, rest);
    in_.shrink_to(rest);
    if (rest == 0)
        in_.clear_and_trim(2 << 20);
    return Step::OK;
}

Client::Step Client::read_answer(const KillCheck &kill_check)
{
    int64_t give_up = now_ms() + HELLO_MS;
    Step step;
    do
        step = read_frame(SLICE_MS);
    while (step == Step::WAIT && now_ms() < give_up && !kill_check());
    if (step == Step::WAIT)
        note_error("no answer from", 0);
    return step == Step::OK ? Step::OK : Step::BROKEN;
}

Client::Step Client::send_hello(const KillCheck &kill_check)
{
    Hello hello;
    memset(&hello, 0, sizeof(hello));
    hello.magic = MAGIC;
    hello.lowest = hello.highest = THIS_VERSION;
    memcpy(hello.client, id_, sizeof(id_));
    memcpy(hello.module, module_, sizeof(module_));
    Step step = write_frame(kind::HELLO, 0, 0, reinterpret_cast<uint8_t *>(&hello), sizeof(hello));
    if (step == Step::OK)
        step = read_answer(kill_check);
    if (step != Step::OK)
        return Step::BROKEN;
    if (frame_.kind == kind::GOODBYE) {
        note_failure(body_.data(), body_.size());
        bool is_passing = failure_code_ == failure::ENDING || failure_code_ == failure::LIMIT;
        return is_passing ? Step::BROKEN : Step::REFUSED;
    }
    Welcome welcome;
    if (frame_.kind != kind::WELCOME || body_.size() < sizeof(welcome)) {
        note_error("no welcome from", 0);
        return Step::REFUSED;
    }
    memcpy(&welcome, body_.data(), sizeof(welcome));
    if (welcome.magic != MAGIC || welcome.version != THIS_VERSION || welcome.max_in_flight == 0) {
        note_error("another version is spoken by", 0);
        return Step::REFUSED;
    }
    max_in_flight_ = welcome.max_in_flight;
    max_body_bytes_ =
        welcome.max_body_bytes < MAX_BODY_BYTES ? welcome.max_body_bytes : MAX_BODY_BYTES;
    /* Another instance of the host: faults of the memory before do not count. */
    is_ring_off_ &= instance_ == welcome.instance;
    instance_ = welcome.instance;
    return Step::OK;
}

/* Moves to shared memory where there is a region and the host agrees; else keeps the socket. */
Client::Step Client::request_ring(const KillCheck &kill_check)
{
    std::shared_ptr<Region> region;
    if (ring_ != "off" && !is_ring_off_)
        region = Region::find(ring_);
    if (!region)
        return Step::OK;
    RingWanted wanted;
    region->copy_id(wanted.id);
    Step step = write_frame(kind::RING, 0, 0, reinterpret_cast<uint8_t *>(&wanted), sizeof(wanted));
    /* Replies to requests in flight may come first: they are kept for their callers. */
    std::deque<EarlyFrame> early_frames;
    for (;;) {
        step = step == Step::OK ? read_answer(kill_check) : step;
        if (step != Step::OK)
            return step;
        if (frame_.kind == kind::RING || frame_.kind == kind::GOODBYE)
            break;
        if (frame_.kind == kind::REPLY)
            early_frames.push_back(EarlyFrame{frame_, std::move(body_)});
    }
    early_frames_ = std::move(early_frames);
    RingGranted granted;
    if (frame_.kind == kind::GOODBYE) {
        note_failure(body_.data(), body_.size());
        return Step::BROKEN;
    }
    if ((frame_.flags & flag::FAILED) || body_.size() != sizeof(granted)) {
        Region::forget(region);
        return Step::OK;
    }
    memcpy(&granted, body_.data(), sizeof(granted));
    uint8_t *slot = region->slot(granted.slot);
    if (!slot) {
        note_error("a ring that is not there was given by", 0);
        is_ring_off_ = true;
        return Step::BROKEN;
    }
    stream_.switch_to_ring(std::make_unique<Ring>(region, slot, granted.stamp));
    return Step::OK;
}

Client::Step Client::resend()
{
    for (Request &request : in_flight_) {
        uint16_t flags = static_cast<uint16_t>(request.flags | flag::AGAIN);
        Step step = write_frame(kind::REQUEST, flags, request.seq, request.body.data(),
                                request.body.size());
        if (step != Step::OK)
            return step;
    }
    return Step::OK;
}

Client::Step Client::connect_once(const KillCheck &kill_check)
{
    if (!stream_.connect(address_.c_str(), HELLO_MS)) {
        int error = errno;
        note_error("cannot connect to", error);
        return error == EINVAL ? Step::REFUSED : Step::BROKEN;
    }
    (was_connected_ ? counters.reconnects : counters.connects)++;
    last_bytes_ms_ = now_ms();
    Step step = send_hello(kill_check);
    if (step == Step::OK)
        step = request_ring(kill_check);
    if (step == Step::OK)
        step = resend();
    if (step != Step::OK)
        disconnect();
    else
        was_connected_ = true;
    return step;
}

CallResult Client::give_up(CallResult result)
{
    is_broken_ = true;
    broken_ms_ = 0;
    return result;
}

CallResult Client::ensure_connected(const KillCheck &kill_check)
{
    int pause_ms = 5;
    if (broken_ms_ == 0)
        broken_ms_ = now_ms();
    else if (!stream_.is_open())
        poll(nullptr, 0, SLICE_MS);
    while (!stream_.is_open()) {
        Step step = connect_once(kill_check);
        if (step == Step::OK)
            break;
        /* A session that is new, or has no request in flight, learns of the failure soon. */
        int64_t limit_ms = was_connected_ && !in_flight_.empty() ? patience_ms_ : 2000;
        if (kill_check())
            return give_up(CallResult::KILLED);
        if (step == Step::REFUSED || now_ms() - broken_ms_ >= limit_ms)
            return give_up(CallResult::UNREACHABLE);
        poll(nullptr, 0, pause_ms);
        pause_ms = pause_ms < 200 ? pause_ms * 2 : 200;
    }
    if (now_ms() - broken_ms_ >= patience_ms_ || ++connections_ > MAX_CONNECTIONS)
        return give_up(CallResult::UNREACHABLE);
    return CallResult::DONE;
}

/* --- requests --- */

CallResult Client::await_room(const KillCheck &kill_check)
{
    while (in_flight_.size() >= max_in_flight_) {
        CallResult result = await(in_flight_.front().seq, kill_check, nullptr);
        if (result != CallResult::DONE && result != CallResult::FAILED)
            return result;
    }
    return CallResult::DONE;
}

CallResult Client::send(Bytes &&body, uint16_t flags, bool is_wanted, const KillCheck &kill_check)
{
    failure_code_ = 0;
    broken_ms_ = 0; /* breaks without a waiting caller do not count */
    connections_ = 0;
    if (is_broken_)
        restart();
    CallResult result = stream_.is_open() ? CallResult::DONE : ensure_connected(kill_check);
    if (result == CallResult::DONE)
        result = await_room(kill_check);
    if (result != CallResult::DONE)
        return result;
    in_flight_.push_back(Request{++last_seq_, flags, is_wanted, std::move(body)});
    Request &request = in_flight_.back();
    counters.requests++;
    /* If the connection breaks now, the next caller that waits for a reply makes it again. */
    if (write_frame(kind::REQUEST, flags, request.seq, request.body.data(), request.body.size()) !=
        Step::OK)
        disconnect();
    return CallResult::DONE;
}

CallResult Client::post(Bytes &&body, uint16_t flags, const KillCheck &kill_check)
{
    return send(std::move(body), flags, false, kill_check);
}

CallResult Client::call(Bytes &&body, uint16_t flags, const KillCheck &kill_check, Bytes *reply)
{
    CallResult result = send(std::move(body), flags, true, kill_check);
    if (result != CallResult::DONE)
        return result;
    counters.round_trips++;
    return await(last_seq_, kill_check, reply);
}

Client::Step Client::check_silence(int64_t now)
{
    if (now - last_bytes_ms_ < SILENCE_MS)
        return Step::OK;
    if (!is_ping_sent_) {
        is_ping_sent_ = true;
        return write_frame(kind::PING, 0, 0, nullptr, 0);
    }
    if (now - last_bytes_ms_ < 2 * SILENCE_MS)
        return Step::OK;
    note_error("no answer from", 0);
    return Step::BROKEN;
}

Client::Step Client::handle_reply(uint64_t wanted, Bytes *reply, bool *has_reply)
{
    for (auto request = in_flight_.begin(); request != in_flight_.end(); ++request) {
        if (request->seq != frame_.seq)
            continue;
        bool is_match = request->seq == wanted;
        broken_ms_ = 0;
        connections_ = 0;
        if (is_match || !request->is_wanted) {
            spare_ = std::move(request->is_wanted ? last_body_ : request->body);
            if (request->is_wanted)
                last_body_ = std::move(request->body);
        }
        in_flight_.erase(request);
        if (!is_match)
            return Step::OK;
        *has_reply = true;
        failure_code_ = 0;
        if (frame_.flags & flag::FAILED)
            note_failure(body_.data(), body_.size());
        else if (reply)
            reply->swap(body_);
        return frame_.flags & flag::FAILED ? Step::REFUSED : Step::OK;
    }
    return Step::OK; /* second reply to a request that was sent twice */
}

Client::Step Client::handle_frame(uint64_t wanted, Bytes *reply, bool *has_reply)
{
    switch (frame_.kind) {
    case kind::REPLY:
        return handle_reply(wanted, reply, has_reply);
    case kind::PONG:
        broken_ms_ = 0;
        return Step::OK;
    case kind::PING:
        return write_frame(kind::PONG, 0, frame_.seq, body_.data(), body_.size());
    case kind::GOODBYE:
        note_failure(body_.data(), body_.size());
        if (failure_code_ == failure::RING || failure_code_ == failure::RING_ONLY)
            is_ring_off_ = failure_code_ == failure::RING;
        return Step::BROKEN;
    default:
        return Step::OK;
    }
}

/* Waits for the reply of `seq`. A killed statement makes the host cancel the request, once, and
 * then waits for the reply like any other: only the reply says what was executed. */
CallResult Client::await(uint64_t seq, const KillCheck &kill_check, Bytes *reply)
{
    bool has_reply = false, is_cancelled = false;
    while (!has_reply) {
        if (!stream_.is_open()) {
            CallResult result = ensure_connected(kill_check);
            if (result != CallResult::DONE)
                return result;
            is_cancelled = false;
        }
        Step step = read_frame(SLICE_MS);
        if (step == Step::OK)
            step = handle_frame(seq, reply, &has_reply);
        if (has_reply)
            return step == Step::REFUSED ? CallResult::FAILED : CallResult::DONE;
        if (step == Step::WAIT)
            step = check_silence(now_ms());
        if (step != Step::BROKEN && !is_cancelled && kill_check()) {
            is_cancelled = true;
            counters.cancels++;
            step = write_frame(kind::CANCEL, 0, seq, nullptr, 0);
        }
        if (step == Step::BROKEN)
            disconnect();
    }
    return CallResult::DONE;
}

} // namespace millrace
