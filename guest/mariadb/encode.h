// SPDX-License-Identifier: GPL-2.0-only
/* Encoding of strings in keys: memcmp orders whole keys as the collations order their parts.
 *
 * A string's weights (strnxfrm) are encoded. Keys have several parts, so the end of a
 * string must not be decided by what follows it. Both encodings cut the weights into segments of
 * the same size with a byte behind each; none is ever a prefix of another.
 *
 * - NO PAD: the byte is the number of bytes of the segment that count, or size + 1 when more
 *   segments follow. The rest is 0.
 * - PAD SPACE, where strings compare as if filled up with spaces for ever: the byte tells how the
 *   rest compares with spaces (LESS, EQUAL: the end, MORE). The last segment is filled up with the
 *   weight of a space. So 'a' = 'a ' give the same bytes, and 'a\t' < 'a' < 'ab'. */
#ifndef MILLRACE_ENCODE_H
#define MILLRACE_ENCODE_H

#include "codec.h"

namespace millrace {

constexpr size_t SEGMENT_BYTES = 8;
constexpr size_t MAX_SPACE_BYTES = 8;

enum : uint8_t {
    REST_LESS = 1,
    REST_EQUAL = 2,
    REST_MORE = 3
};

/* Weight of a space. */
struct Space {
    uint8_t bytes[MAX_SPACE_BYTES] = {};
    size_t size = 0;
    /* A segment holds whole weights, so that padding continues in step. */
    size_t segment() const
    {
        return size ? (SEGMENT_BYTES + size - 1) / size * size : SEGMENT_BYTES;
    }
};

void encode_no_pad(Slice weights, Bytes *out);
void encode_pad_space(Slice weights, const Space &space, Bytes *out);

/* Most bytes of an encoding of this many weights. */
inline size_t encoded_bytes(size_t weights, size_t segment)
{
    return (weights / segment + 1) * (segment + 1);
}

/* Reads one NO PAD string; returns the bytes behind it, or nullptr when it is none. */
const uint8_t *decode_no_pad(const uint8_t *at, const uint8_t *end, Bytes *out);

/* Flips all bits: for parts that are sorted downwards. */
void invert(uint8_t *bytes, size_t size);

/* Makes `key` the first key behind all that begin with it; false: there is none. */
bool step_over_prefix(Bytes *key);

} // namespace millrace

#endif
