// SPDX-License-Identifier: GPL-2.0-only
/* Batches of ops for the module `table`, and its replies.
 *
 * A batch is written straight into the body of its frame. A reply is read in place: views point
 * into it, and each length in it is checked against the bytes that are there before it is used,
 * so a bad reply is an error and never a wild read. */
#ifndef MILLRACE_CODEC_H
#define MILLRACE_CODEC_H

#include "bytes.h"
#include "protocol.h"

namespace millrace {

struct Slice {
    const uint8_t *data = nullptr;
    size_t size = 0;

    Slice() = default;
    Slice(const uint8_t *data_, size_t size_) : data(data_), size(size_) {}
    Slice(const Bytes &bytes) : data(bytes.data()), size(bytes.size()) {}
};

struct Op {
    uint8_t kind = 0;
    uint8_t index = 0;
    uint16_t flags = 0;
    uint32_t table = 0;
    Slice key;
    Slice value;
    uint64_t extra = 0;
};

class Batch {
public:
    Batch() { clear(); }

    void clear();
    /* Returns the op's number in the batch. */
    uint32_t add(const Op &op);
    uint32_t ops() const { return ops_; }
    size_t bytes() const { return body_.size(); }
    bool empty() const { return ops_ == 0; }
    /* Whether another op of this many bytes fits in a frame. */
    bool has_room(size_t key_and_value_bytes) const
    {
        return ops_ < MAX_OPS - 16 && body_.size() + key_and_value_bytes + 4096 <= MAX_BODY_BYTES;
    }
    /* Cuts the batch to this many ops and bytes. */
    void cut(uint32_t ops, size_t bytes)
    {
        ops_ = ops;
        body_.shrink_to(bytes);
    }
    /* Takes the complete body and empties the batch. */
    Bytes take(uint64_t tx, uint16_t flags, uint32_t wait_ms);
    /* Reuses a body's memory for the next one. */
    void recycle(Bytes &&body);

    /* Finds op number `number` of a body; false: there is none. */
    static bool find(const Bytes &body, uint32_t number, Op *op);

private:
    Bytes body_;
    uint32_t ops_ = 0;
};

struct Row {
    Slice key;
    Slice primary;
    Slice value;
};

/* Rows of an answer, one after the other. */
class Rows {
public:
    Rows() = default;
    Rows(Slice bytes, uint32_t count)
        : next_(bytes.data), end_(bytes.data + bytes.size), remaining_(count) {}

    /* False at the end, or where the bytes are not rows: then is_bad(). */
    bool next(Row *row);
    bool is_bad() const { return is_bad_; }
    uint32_t remaining() const { return remaining_; }
    /* Bytes behind the last row, once that was read. */
    Slice rest() const { return Slice(next_, static_cast<size_t>(end_ - next_)); }

private:
    const uint8_t *next_ = nullptr;
    const uint8_t *end_ = nullptr;
    uint32_t remaining_ = 0;
    bool is_bad_ = false;
};

struct Answer {
    uint32_t op = 0;
    uint32_t rows = 0;
    uint32_t more = 0;
    Slice bytes;
};

class Reply {
public:
    /* Parses a body. False: it is not a reply. The body must outlive this. */
    bool parse(const Bytes &body);
    /* Reads the next answer. False: there is none, or it is not valid. */
    bool next(Answer *answer);

    uint16_t status = 0;
    uint16_t flags = 0;
    uint32_t done = 0;
    Slice text;

private:
    const uint8_t *next_ = nullptr;
    const uint8_t *end_ = nullptr;
    uint32_t remaining_ = 0;
};

/* The name of a status. */
const char *status_name(uint16_t status);

} // namespace millrace

#endif
