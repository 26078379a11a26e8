// SPDX-License-Identifier: GPL-2.0-only
/* Conditions that the host checks, so that fewer rows come.
 *
 * The server offers the condition of a table when it has planned the statement, and again when a
 * scan begins. It is told that the engine checks no part, and checks all of it itself: for it the
 * table has fewer rows, among them all that the statement can want. Reads of single rows, by key
 * or position, are not filtered.
 *
 * Scans that lock are filtered where the statement sees what was committed last: with READ
 * COMMITTED. Above that a row that did not match stays as it is by its lock until the
 * transaction ends, and the filter would leave it out. Conditions on tables inside an outer join
 * are the server's: it gives them with guards, which are not looked into. */
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

const COND *ha_millrace::cond_push(const COND *condition)
{
    forget_condition();
    THD *thd = ha_thd();
    if (!pushes_conditions(thd))
        return condition;
    if (constants_.empty())
        memcpy(constants_.grow(table_share->rec_buff_length), table_share->default_values,
               table_share->reclength);
    condition_.take(thd, table, condition, constants_.data());
    return condition;
}

void ha_millrace::cond_pop() { forget_condition(); }

void ha_millrace::forget_condition()
{
    condition_.clear();
    is_filter_made_ = false;
}

/* Filter for the entries of an index; nullptr: none. All keys share `known_bytes`, and the parts
 * in front of `first_part` are covered by the range. */
const Filter *ha_millrace::get_filter(uint key, const ReadSettings &settings, size_t known_bytes,
                                      uint first_part)
{
    THD *thd = ha_thd();
    if (condition_.empty() ||
        (lock_flags_ && (thd_tx_isolation(thd) > ISO_READ_COMMITTED || is_strict(thd))))
        return nullptr;
    const bool has_rows = settings.index == 0 ? !(settings.flags & op_flag::KEYS_ONLY)
                                             : (settings.flags & op_flag::FETCH) != 0;
    const FilterUse &use = filter_use_;
    if (!is_filter_made_ || use.key != key || use.has_rows != has_rows ||
        use.known_bytes != known_bytes || use.first_part != first_part) {
        filter_.clear();
        condition_.forget_marks();
        const uint index_key = key != MAX_KEY ? key : table_share->primary_key;
        if (index_key != MAX_KEY)
            condition_.add_key_terms(keys_[index_key], constants_.data(), known_bytes, first_part,
                                     &filter_);
        if (has_rows)
            condition_.add_row_terms(table, rows_, &filter_);
        filter_use_ = {key, has_rows, known_bytes, first_part};
        is_filter_made_ = true;
    }
    return !filter_.empty() && session()->can_filter() ? &filter_ : nullptr;
}

/* Gives the cursor its filter, before its first row. */
void ha_millrace::begin_cursor(uint key)
{
    const Range &range = cursor_.range();
    if (!cursor_.is_fresh() || range.is_point || condition_.empty())
        return;
    const bool is_bounded = !range.low.empty() || !(range.flags & op_flag::NO_HIGH);
    const bool is_prefix = (range.flags & op_flag::HIGH_PREFIX) &&
                           !(range.flags & op_flag::LOW_OPEN) && range.low.equals(range.high);
    const Filter *filter =
        get_filter(key, cursor_.settings(), is_prefix ? range.low.size() : 0, is_bounded ? 1 : 0);
    if (!filter)
        return;
    cursor_.set_filter(*filter);
    if (stats.records > SCAN_MAX_EXAMINED)
        cursor_.expect_more();
}

} // namespace millrace
