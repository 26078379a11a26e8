// SPDX-License-Identifier: GPL-2.0-only
/* Filter of a scan, which the host's store can check: pieces of an entry's key or of its row,
 * compared with bytes. table/filter.rs defines the terms.
 *
 * The server checks its whole condition again for each row that comes. So a filter may pass rows
 * that do not match, and must never stop one that does: a term that is not sure, or has no room,
 * is left out. */
#ifndef MILLRACE_FILTER_H
#define MILLRACE_FILTER_H

#include "codec.h"

namespace millrace {

class Filter {
public:
    bool empty() const { return count_ == 0; }
    uint32_t terms() const { return count_; }
    void clear();
    void assign(const Filter &other);

    /* Adds a term: the piece of `bytes` bytes from `offset` on passes the test with the operand,
     * as memcmp compares. */
    void add(uint8_t part, uint8_t test, size_t offset, size_t bytes, Slice operand);
    /* Adds a term: the little-endian number of `width` bytes from `offset` on is between the
     * two, as far as its bytes can tell: those at the top that both have in common, and the next
     * one. */
    void add_number(uint8_t part, size_t offset, size_t width, uint64_t low, uint64_t high);

    /* Writes the value of a scan: the high bound in front, and the most entries to examine (0:
     * all). */
    void put(Slice high, uint32_t examine, Bytes *out) const;

private:
    Bytes terms_;
    uint32_t count_ = 0;
};

} // namespace millrace

#endif
