// SPDX-License-Identifier: GPL-2.0-only
#include "filter.h"

namespace millrace {

/* Limit of a filter's terms, far below the host's: long operands cost more than they save. */
static constexpr size_t MAX_BYTES = 8 << 10;

void Filter::clear()
{
    terms_.clear();
    count_ = 0;
}

void Filter::assign(const Filter &other)
{
    terms_.assign(other.terms_);
    count_ = other.count_;
}

void Filter::add(uint8_t part, uint8_t test, size_t offset, size_t bytes, Slice operand)
{
    if (count_ == MAX_TERMS || terms_.size() + sizeof(TermHeader) + operand.size > MAX_BYTES)
        return;
    TermHeader header;
    header.part = part;
    header.test = test;
    header.reserved = 0;
    header.offset = static_cast<uint32_t>(offset);
    header.len_bytes = static_cast<uint32_t>(bytes);
    header.operand_bytes = static_cast<uint32_t>(operand.size);
    terms_.append(&header, sizeof(header));
    terms_.append(operand.data, operand.size);
    count_++;
}

void Filter::add_number(uint8_t part, size_t offset, size_t width, uint64_t low, uint64_t high)
{
    if (low > high || width == 0 || width > 8)
        return;
    uint8_t lows[8], highs[8];
    for (size_t i = 0; i < 8; i++) {
        lows[i] = static_cast<uint8_t>(low >> (8 * i));
        highs[i] = static_cast<uint8_t>(high >> (8 * i));
    }
    size_t differing = width;
    while (differing > 0 && lows[differing - 1] == highs[differing - 1])
        differing--;
    if (differing < width)
        add(part, test::EQUAL, offset + differing, width - differing,
            Slice(lows + differing, width - differing));
    if (differing == 0)
        return;
    size_t next = differing - 1;
    if (lows[next] > 0)
        add(part, test::AT_LEAST, offset + next, 1, Slice(lows + next, 1));
    if (highs[next] < 0xff)
        add(part, test::AT_MOST, offset + next, 1, Slice(highs + next, 1));
}

void Filter::put(Slice high, uint32_t examine, Bytes *out) const
{
    FilterHeader header;
    header.high_bytes = static_cast<uint32_t>(high.size);
    header.terms = count_;
    header.examine = examine;
    header.reserved = 0;
    out->append(&header, sizeof(header));
    out->append(high.data, high.size);
    out->append(terms_);
}

} // namespace millrace
