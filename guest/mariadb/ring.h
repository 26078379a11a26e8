// SPDX-License-Identifier: GPL-2.0-only
/* Memory that a client and its module in the host share, in place of the socket between them:
 * crates/guest-abi/src/module_ring.rs, whose page is the specification.
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
    static std::shared_ptr<Region> find(const std::string &where);
    /* Forgets a region that the host does not know: the next call of find() looks again. */
    static void forget(const std::shared_ptr<Region> &region);
    Region(void *base, size_t bytes) : base_(static_cast<uint8_t *>(base)), bytes_(bytes) {}
    ~Region();
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    /* Whether it is a region of a known version. */
    bool is_ours() const;
    /* Copies the host's present id of it. */
    void copy_id(uint8_t id[16]) const;
    /* Null: there is no such slot. */
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

    /* False: the connection has ended, and the slot is another client's. Checked first. */
    bool is_mine() const;
    uint64_t stamp() const { return stamp_; }
    /* Writes. Returns how many bytes had room; below 0: the host's indices are wrong. */
    ssize_t write(const void *from, size_t bytes);
    /* Reads. Returns how many bytes there were; below 0: the host's indices are wrong. */
    ssize_t read(void *to, size_t most);
    bool has_some() const;
    /* After a write or a read: whether the host needs a bell. */
    bool must_ring_reader();
    bool must_ring_writer();
    /* Requests a bell for new bytes; false: there are some, or the slot is another client's. */
    bool sleep();
    void wake();
    /* Requests a bell for room; false: there is some, or the slot is another client's. */
    bool wait_for_room();

private:
    /* Sets a flag. Leaves another connection's alone, since its bell would be lost: false then. */
    bool set_flag(size_t off, uint32_t value);
    bool take_flag(size_t off);

    std::shared_ptr<Region> region_;
    uint8_t *slot_;
    uint64_t stamp_;
    uint64_t tail_ = 0; /* of what is written */
    uint64_t head_ = 0; /* of what is read */
};

/* Time to poll a ring before sleeping, as KVM halts: longer where that would have caught the
 * reply, shorter where it was in vain. The host does the same (crates/modules/src/spin.rs). */
class Spin {
public:
    int64_t time_ns() const { return now_ns_; }
    void set_most(int64_t most_ns)
    {
        most_ns_ = most_ns;
        now_ns_ = now_ns_ < most_ns ? now_ns_ : most_ns;
    }
    /* Notes a sleep, with a bell this long after the thread became idle. */
    void slept(int64_t waited_ns)
    {
        if (waited_ns <= most_ns_)
            now_ns_ = most_ns_;
        else
            now_ns_ = now_ns_ > most_ns_ / 8 ? now_ns_ / 2 : 0;
    }

    /* Notes that the thread becomes idle. */
    void begin() { given_ns_ = 0; }
    /* Notes that the thread gave the CPU away for `took`, this long after it became idle. Where
     * other threads want the CPU, it stops polling until a bell comes soon again. */
    void gave_way(int64_t took_ns, int64_t waited_ns)
    {
        constexpr int64_t HICCUP_NS = 20000, CROWDED_NS = 100000;
        if (took_ns > HICCUP_NS)
            given_ns_ += took_ns;
        if (given_ns_ > CROWDED_NS && given_ns_ > waited_ns / 2)
            now_ns_ = 0;
    }

private:
    int64_t most_ns_ = 0;
    int64_t now_ns_ = 0;
    int64_t given_ns_ = 0; /* what others had of the CPU meanwhile */
};

} // namespace millrace

#endif
