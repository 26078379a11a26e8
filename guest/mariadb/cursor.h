// SPDX-License-Identifier: GPL-2.0-only
/* Scan of an index that reads ahead.
 *
 * Rows come in batches, small at first and four times as many bytes each time, up to
 * SCAN_MAX_BYTES. A returned row stays valid until the next batch is requested. With a filter a
 * batch may be empty: then the host returns how far it has examined. Rows that were read ahead
 * are dropped at the end of a statement; the position is not, for HANDLER. */
#ifndef MILLRACE_CURSOR_H
#define MILLRACE_CURSOR_H

#include "filter.h"
#include "session.h"

namespace millrace {

constexpr uint32_t SCAN_FIRST_BYTES = 16 << 10;
constexpr uint32_t SCAN_FIRST_ROWS = 32;
constexpr uint32_t SCAN_MAX_BYTES = 256 << 10;
/* Most entries that a scan with a filter examines in one request. */
constexpr uint32_t SCAN_MAX_EXAMINED = 1 << 20;

/* Range of entries of an index. */
struct Range {
    Bytes low;
    Bytes high;
    uint16_t flags = op_flag::NO_HIGH;
    bool is_point = false; /* `low` is a whole key of a unique index */
    bool is_empty = false; /* behind the largest possible key: no request */

    void set_all();
    void assign(const Range &other);
};

/* Settings for reading entries. */
struct ReadSettings {
    uint32_t table = 0;
    uint8_t index = 0;
    uint16_t flags = 0; /* FETCH, KEYS_ONLY, SHARED, EXCLUSIVE, SKIP_LOCKED */
};

/* Adds the op that reads a range, with a filter if there is one and the range is not a point. */
void add_read(Session *session, const Range &range, const ReadSettings &settings, uint32_t rows,
              uint32_t bytes, const Filter *filter, uint32_t examine);

class Cursor {
public:
    /* Sets the position; sends nothing. `may_be_alone`: one request may do without a
     * transaction. */
    void start(const ReadSettings &settings, Range &&range, bool is_large, uint32_t max_rows,
               bool may_be_alone);
    /* Sets the filter, before the first row is requested. */
    void set_filter(const Filter &filter) { filter_.assign(filter); }
    bool is_fresh() const { return is_fresh_; }
    const Range &range() const { return range_; }
    const ReadSettings &settings() const { return settings_; }
    void expect_more() { may_be_alone_ = false; }
    /* Reads the next row. Sets `*is_end` behind the last one. */
    int next(Session *session, Row *row, bool *is_end);
    /* Turns the direction, from the row that was returned last. */
    void turn(bool is_backward);
    bool is_backward() const { return (range_.flags & op_flag::BACKWARD) != 0; }
    bool has_row() const { return has_row_; }
    /* Whether the range ends before the index does. */
    bool is_bounded() const
    {
        return range_.is_point ||
               (is_backward() ? !range_.low.empty() : !(range_.flags & op_flag::NO_HIGH));
    }
    /* Drops the bound at the end: the caller goes on beyond it. */
    void drop_end();
    void drop_read_ahead();
    const Bytes &last_key() const { return last_key_; }

private:
    int fetch(Session *session);
    int send_read(Session *session, bool is_alone, uint32_t rows, uint32_t bytes);
    void narrow();

    ReadSettings settings_;
    Range range_;
    Filter filter_;
    Bytes reply_;
    Rows rows_;
    Bytes last_key_;
    bool has_row_ = false; /* last_key_ is the key of a row */
    bool is_fresh_ = true; /* no request was sent yet */
    bool has_more_ = true; /* there may be rows behind those of the last reply */
    bool is_examined_ = false; /* behind the rows is the last examined key */
    bool may_be_alone_ = false;
    uint32_t bytes_ = 0;
    uint32_t row_limit_ = 0;
};

} // namespace millrace

#endif
