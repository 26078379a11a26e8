// SPDX-License-Identifier: GPL-2.0-only
#include "encode.h"

namespace millrace {

void encode_no_pad(Slice weights, Bytes *out)
{
    size_t at = 0;
    for (;;) {
        size_t rest = weights.size - at, take = rest < SEGMENT_BYTES ? rest : SEGMENT_BYTES;
        uint8_t *to = out->grow(SEGMENT_BYTES + 1);
        if (take)
            memcpy(to, weights.data + at, take);
        memset(to + take, 0, SEGMENT_BYTES - take);
        to[SEGMENT_BYTES] = static_cast<uint8_t>(rest > SEGMENT_BYTES ? SEGMENT_BYTES + 1 : take);
        if (rest <= SEGMENT_BYTES)
            return;
        at += take;
    }
}

/* Compares weights that do not end with spaces with spaces. */
static uint8_t compare_with_spaces(const uint8_t *at, const uint8_t *end, const Space &space)
{
    for (size_t i = 0; at + i < end; i++) {
        uint8_t blank = space.bytes[i % space.size];
        if (at[i] != blank)
            return at[i] < blank ? REST_LESS : REST_MORE;
    }
    return REST_EQUAL;
}

void encode_pad_space(Slice weights, const Space &space, Bytes *out)
{
    const size_t segment = space.segment();
    size_t size = weights.size;
    while (size >= space.size && size % space.size == 0 &&
           memcmp(weights.data + size - space.size, space.bytes, space.size) == 0)
        size -= space.size;
    const uint8_t *at = weights.data, *end = at + size;
    for (;;) {
        size_t rest = static_cast<size_t>(end - at), take = rest < segment ? rest : segment;
        uint8_t *to = out->grow(segment + 1);
        if (take)
            memcpy(to, at, take);
        for (size_t i = take; i < segment; i++)
            to[i] = space.bytes[i % space.size];
        at += take;
        to[segment] = compare_with_spaces(at, end, space);
        if (at == end)
            return;
    }
}

const uint8_t *decode_no_pad(const uint8_t *at, const uint8_t *end, Bytes *out)
{
    for (;;) {
        if (static_cast<size_t>(end - at) < SEGMENT_BYTES + 1)
            return nullptr;
        uint8_t count = at[SEGMENT_BYTES];
        if (count > SEGMENT_BYTES + 1)
            return nullptr;
        out->append(at, count > SEGMENT_BYTES ? SEGMENT_BYTES : count);
        at += SEGMENT_BYTES + 1;
        if (count <= SEGMENT_BYTES)
            return at;
    }
}

void invert(uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = static_cast<uint8_t>(~bytes[i]);
}

bool step_over_prefix(Bytes *key)
{
    for (size_t size = key->size(); size > 0; size--) {
        if (++key->data()[size - 1] != 0) {
            key->shrink_to(size);
            return true;
        }
    }
    return false;
}

} // namespace millrace
