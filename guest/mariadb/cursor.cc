// SPDX-License-Identifier: GPL-2.0-only
#include "cursor.h"

namespace millrace {

void Range::set_all()
{
    low.clear();
    high.clear();
    flags = op_flag::NO_HIGH;
    is_point = is_empty = false;
}

void Range::assign(const Range &other)
{
    low.assign(other.low);
    high.assign(other.high);
    flags = other.flags;
    is_point = other.is_point;
    is_empty = other.is_empty;
}

void add_read(Session *session, const Range &range, const ReadSettings &settings, uint32_t rows,
              uint32_t bytes, const Filter *filter, uint32_t examine)
{
    Op op;
    Bytes filtered;
    op.kind = range.is_point ? op::GET : op::SCAN;
    op.index = settings.index;
    op.table = settings.table;
    op.key = Slice(range.low);
    op.flags = settings.flags;
    if (!range.is_point) {
        op.flags |= range.flags;
        op.value = Slice(range.high);
        op.extra = limits(rows, bytes);
    }
    if (!range.is_point && filter && !filter->empty()) {
        filter->put(Slice(range.high), examine, &filtered);
        op.value = Slice(filtered);
        op.flags |= op_flag::FILTER;
        counters.filtered_reads++;
    }
    if (op.flags & (op_flag::SHARED | op_flag::EXCLUSIVE))
        session->mark_locks();
    session->add(op);
}

void Cursor::start(const ReadSettings &settings, Range &&range, bool is_large, uint32_t max_rows,
                   bool may_be_alone)
{
    settings_ = settings;
    range_.assign(range);
    rows_ = Rows();
    filter_.clear();
    has_row_ = is_examined_ = false;
    is_fresh_ = has_more_ = true;
    /* A reader of few rows gets them with the first request: whether there are more does not
     * matter. */
    may_be_alone_ = may_be_alone && (range_.is_point || max_rows == 0);
    bytes_ = is_large ? SCAN_FIRST_BYTES * 4 : SCAN_FIRST_BYTES;
    row_limit_ = max_rows ? max_rows : is_large ? 0 : SCAN_FIRST_ROWS;
}

int Cursor::send_read(Session *session, bool is_alone, uint32_t rows, uint32_t bytes)
{
    int error = session->flush_buffered();
    if (error)
        return error;
    add_read(session, range_, settings_, rows, bytes, &filter_, SCAN_MAX_EXAMINED);
    SendOptions options;
    options.is_alone = is_alone;
    Reply reply;
    error = session->send(options, &reply_, &reply);
    if (error)
        return error;
    Answer answer;
    if (!reply.next(&answer))
        return session->fail(HA_ERR_INTERNAL_ERROR, "",
                             "the host's reply to a read lacks an answer", false);
    rows_ = Rows(answer.bytes, answer.rows);
    has_more_ = answer.more != 0 && !range_.is_point;
    is_examined_ = has_more_ && answer.more == MORE_EXAMINED;
    counters.rows_fetched += answer.rows;
    return 0;
}

/* Narrows the range: neither returned rows are requested again, nor rows that the filter has
 * dropped. */
void Cursor::narrow()
{
    if (!has_row_ && !is_examined_)
        return;
    Slice last = is_examined_ ? rows_.rest() : Slice(last_key_);
    if (range_.flags & op_flag::BACKWARD) {
        range_.high.assign(last.data, last.size);
        range_.flags |= op_flag::HIGH_OPEN;
        range_.flags &= static_cast<uint16_t>(~(op_flag::NO_HIGH | op_flag::HIGH_PREFIX));
    } else {
        range_.low.assign(last.data, last.size);
        range_.flags |= op_flag::LOW_OPEN;
    }
}

int Cursor::fetch(Session *session)
{
    if (is_examined_ && rows_.rest().size == 0)
        return session->fail(HA_ERR_INTERNAL_ERROR, "", "the host does not say where to go on",
                             false);
    bool is_alone = is_fresh_ && may_be_alone_ && session->is_alone();
    narrow();
    int error = send_read(session, is_alone, row_limit_, bytes_);
    /* More than one request needs one snapshot: begin anew. */
    if (!error && is_alone && has_more_)
        error = send_read(session, false, row_limit_ * 4, bytes_ * 4);
    is_fresh_ = false;
    bytes_ = bytes_ < SCAN_MAX_BYTES / 4 ? bytes_ * 4 : SCAN_MAX_BYTES;
    /* Locks only needed rows: the number of rows grows slowly, too. */
    row_limit_ = settings_.flags & (op_flag::SHARED | op_flag::EXCLUSIVE) ? row_limit_ * 4 : 0;
    return error;
}

int Cursor::next(Session *session, Row *row, bool *is_end)
{
    *is_end = false;
    while (!rows_.next(row)) {
        if (rows_.is_bad())
            return session->fail(HA_ERR_INTERNAL_ERROR, "", "the host's rows make no sense", false);
        if (!has_more_) {
            *is_end = true;
            return 0;
        }
        int error = fetch(session);
        if (error)
            return error;
    }
    if (range_.is_point)
        row->key = Slice(range_.low);
    last_key_.assign(row->key.data, row->key.size);
    has_row_ = true;
    return 0;
}

void Cursor::turn(bool is_backward)
{
    rows_ = Rows();
    is_examined_ = false;
    has_more_ = true;
    range_.set_all();
    if (is_backward)
        range_.flags |= op_flag::BACKWARD;
    may_be_alone_ = false;
    bytes_ = SCAN_FIRST_BYTES;
    row_limit_ = SCAN_FIRST_ROWS;
}

void Cursor::drop_end()
{
    if (range_.flags & op_flag::BACKWARD) {
        range_.low.clear();
        range_.flags &= static_cast<uint16_t>(~op_flag::LOW_OPEN);
    } else {
        range_.high.clear();
        range_.flags &= static_cast<uint16_t>(~(op_flag::HIGH_OPEN | op_flag::HIGH_PREFIX));
        range_.flags |= op_flag::NO_HIGH;
    }
    range_.is_point = false;
    has_more_ = true;
    is_examined_ = false;
}

void Cursor::drop_read_ahead()
{
    has_more_ = has_more_ || rows_.remaining() > 0;
    is_examined_ = false; /* where there is no row yet, the scan begins anew */
    rows_ = Rows();
}

} // namespace millrace
