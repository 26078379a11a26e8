// SPDX-License-Identifier: GPL-2.0-only
/* Memory that a client and its module in the host share, in place of the socket between them.
 * core/guest-abi/src/module_ring.rs is the specification.
 *
 * Theory of operation. A region is a memory device of the guest, found by its first bytes, and
 * mapped once for all clients of this server. A ring is one slot of it, of one connection. The
 * functions here make no system call and never wait; Stream does (transport.h).
 *
 * Limits: a device that is unplugged while it is mapped ends the server: switch millrace_ring
 * off before. */
#ifndef MILLRACE_RING_H
#define MILLRACE_RING_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <sys/types.h>

namespace millrace {

class Region {
public:
    /* Finds the region of this guest: "auto" looks for the device, any other text is a file.
     * Null: there is none. The result is cached. */
    static std::shared_ptr<Region> find(const std::string &path);
    /* Forgets a region that the host does not know: the next call of find() looks again. */
    static void forget(const std::shared_ptr<Region> &region);
    Region(void *base, size_t bytes) : base_(static_cast<uint8_t *>(base)), bytes_(bytes) {}
    ~Region();
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    /* Whether it is a region of a known version. */
    bool is_valid() const;
    /* Copies the host's current id of the region. */
    void copy_id(uint8_t id[16]) const;
    /* Address of a slot. Null: there is no such slot. */
    uint8_t *slot(uint32_t number) const;

private:
    uint8_t *base_;
    size_t bytes_;
};

/* Client's side of a slot, for its connection. */
class Ring {
public:
    Ring(std::shared_ptr<Region> region, uint8_t *slot, uint64_t stamp)
        : region_(std::move(region)), slot_(slot), stamp_(stamp)
    {
    }

    /* Whether the slot belongs to this connection. False: the connection has ended, and the slot is
     * another client's. Checked first. */
    bool is_own() const;
    uint64_t stamp() const { return stamp_; }
    /* Writes. Returns how many bytes had room; below 0: the host's indices are wrong. */
    ssize_t write(const void *from, size_t bytes);
    /* Reads. Returns how many bytes there were; below 0: the host's indices are wrong. */
    ssize_t read(void *to, size_t max_bytes);
    bool has_bytes() const;
    /* Whether the host needs a bell after a write, or after a read. */
    bool must_ring_reader();
    bool must_ring_writer();
    /* Requests a bell for new bytes; false: there are some, or the slot is another client's. */
    bool sleep();
    void wake();
    /* Requests a bell for room; false: there is some, or the slot is another client's. */
    bool wait_for_room();

private:
    /* Sets a flag. False: the slot is another connection's, whose bell would be lost. */
    bool set_flag(size_t off, uint32_t value);
    bool take_flag(size_t off);

    std::shared_ptr<Region> region_;
    uint8_t *slot_;
    uint64_t stamp_;
    uint64_t tail_ = 0; /* position up to which bytes are written */
    uint64_t head_ = 0; /* position up to which bytes are read */
};

/* Time to poll a ring before sleeping, as KVM halts: longer where that would have caught the
 * reply, shorter where it was in vain. The host does the same (services/modules/src/spin.rs). */
class Spin {
public:
    int64_t time_ns() const { return time_ns_; }
    void set_max_ns(int64_t max_ns)
    {
        max_ns_ = max_ns;
        time_ns_ = time_ns_ < max_ns ? time_ns_ : max_ns;
    }
    /* Notes a sleep, with a bell this long after the thread became idle. */
    void note_sleep(int64_t waited_ns)
    {
        if (waited_ns <= max_ns_)
            time_ns_ = max_ns_;
        else
            time_ns_ = time_ns_ > max_ns_ / 8 ? time_ns_ / 2 : 0;
    }

    /* Notes that the thread becomes idle. */
    void begin() { yielded_ns_ = 0; }
    /* Notes that the thread gave the CPU away for `took`, this long after it became idle. Where
     * other threads want the CPU, it stops polling until a bell comes soon again. */
    void note_yield(int64_t yield_ns, int64_t waited_ns)
    {
        constexpr int64_t HICCUP_NS = 20000, CROWDED_NS = 100000;
        if (yield_ns > HICCUP_NS)
            yielded_ns_ += yield_ns;
        if (yielded_ns_ > CROWDED_NS && yielded_ns_ > waited_ns / 2)
            time_ns_ = 0;
    }

private:
    int64_t max_ns_ = 0;
    int64_t time_ns_ = 0;
    int64_t yielded_ns_ = 0; /* time for which other threads had the CPU meanwhile */
};

} // namespace millrace

#endif
