// SPDX-License-Identifier: GPL-2.0-only
#include "codec.h"

namespace millrace {

void Batch::clear()
{
    body_.clear();
    memset(body_.grow(sizeof(BatchHeader)), 0, sizeof(BatchHeader));
    ops_ = 0;
}

uint32_t Batch::add(const Op &op)
{
    OpHeader header;
    header.kind = op.kind;
    header.index = op.index;
    header.flags = op.flags;
    header.table = op.table;
    header.key_bytes = static_cast<uint32_t>(op.key.size);
    header.value_bytes = static_cast<uint32_t>(op.value.size);
    header.extra = op.extra;
    body_.reserve(sizeof(header) + op.key.size + op.value.size);
    body_.append(&header, sizeof(header));
    body_.append(op.key.data, op.key.size);
    body_.append(op.value.data, op.value.size);
    return ops_++;
}

Bytes Batch::take(uint64_t tx, uint16_t flags, uint32_t wait_ms)
{
    BatchHeader header;
    memset(&header, 0, sizeof(header));
    header.tx = tx;
    header.ops = ops_;
    header.flags = flags;
    header.wait_ms = wait_ms;
    memcpy(body_.data(), &header, sizeof(header));
    Bytes body = std::move(body_);
    clear();
    return body;
}

void Batch::recycle(Bytes &&body)
{
    if (!empty())
        return;
    body_ = std::move(body);
    body_.clear_and_trim(4 << 20);
    clear();
}

bool Batch::find(const Bytes &body, uint32_t number, Op *op)
{
    const uint8_t *at = body.data() + sizeof(BatchHeader);
    for (uint32_t i = 0;; i++) {
        OpHeader header;
        if (body.size() < sizeof(BatchHeader) ||
            static_cast<size_t>(body.end() - at) < sizeof(header))
            return false;
        memcpy(&header, at, sizeof(header));
        at += sizeof(header);
        size_t bytes = static_cast<size_t>(header.key_bytes) + header.value_bytes;
        if (static_cast<size_t>(body.end() - at) < bytes)
            return false;
        if (i == number) {
            op->kind = header.kind;
            op->index = header.index;
            op->flags = header.flags;
            op->table = header.table;
            op->key = Slice(at, header.key_bytes);
            op->value = Slice(at + header.key_bytes, header.value_bytes);
            op->extra = header.extra;
            return true;
        }
        at += bytes;
    }
}

bool Rows::next(Row *row)
{
    if (remaining_ == 0)
        return false;
    RowHeader header;
    size_t available = static_cast<size_t>(end_ - next_);
    if (available < sizeof(header)) {
        is_bad_ = true;
        return false;
    }
    memcpy(&header, next_, sizeof(header));
    uint64_t needed =
        static_cast<uint64_t>(header.key_bytes) + header.primary_bytes + header.value_bytes;
    if (available - sizeof(header) < needed) {
        is_bad_ = true;
        return false;
    }
    next_ += sizeof(header);
    row->key = Slice(next_, header.key_bytes);
    row->primary = Slice(row->key.data + row->key.size, header.primary_bytes);
    row->value = Slice(row->primary.data + row->primary.size, header.value_bytes);
    next_ += needed;
    remaining_--;
    return true;
}

bool Reply::parse(const Bytes &body)
{
    ReplyHeader header;
    if (body.size() < sizeof(header))
        return false;
    memcpy(&header, body.data(), sizeof(header));
    if (body.size() - sizeof(header) < header.text_bytes)
        return false;
    status = header.status;
    flags = header.flags;
    done = header.done;
    text = Slice(body.data() + sizeof(header), header.text_bytes);
    next_ = text.data + text.size;
    end_ = body.end();
    remaining_ = header.answers;
    return true;
}

bool Reply::next(Answer *answer)
{
    AnswerHeader header;
    if (remaining_ == 0 || static_cast<size_t>(end_ - next_) < sizeof(header))
        return false;
    memcpy(&header, next_, sizeof(header));
    if (static_cast<size_t>(end_ - next_) - sizeof(header) < header.len_bytes)
        return false;
    next_ += sizeof(header);
    answer->op = header.op;
    answer->rows = header.rows;
    answer->more = header.more;
    answer->bytes = Slice(next_, header.len_bytes);
    next_ += header.len_bytes;
    remaining_--;
    return true;
}

const char *status_name(uint16_t status)
{
    static const char *const names[] = {
        "done",
        "duplicate key",
        "no such key",
        "deadlock",
        "lock wait timeout",
        "write conflict",
        "cancelled",
        "transaction lost",
        "no such table",
        "table exists",
        "table in use",
        "limit exceeded",
        "no space left on the host's storage",
        "storage failed",
        "bad request",
    };
    return status < sizeof(names) / sizeof(names[0]) ? names[status] : "unknown status";
}

} // namespace millrace
