// SPDX-License-Identifier: GPL-2.0-only
/* Reading rows: by key, in order, by position. */
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

static constexpr ulonglong ESTIMATE_US = 1000000;
static constexpr size_t MAX_ESTIMATES = 256;

/* --- settings of a read --- */

bool ha_millrace::reads_keys_only(uint key) const
{
    return key != MAX_KEY && is_key_only_ && keys_[key].can_decode();
}

/* Makes the settings of a read. `key` MAX_KEY: the rows in the order of the primary key. */
ReadSettings ha_millrace::read_settings(uint key, bool wants_rows) const
{
    ReadSettings settings;
    settings.table = share_->table();
    settings.index = key == MAX_KEY ? 0 : host_index(key);
    settings.flags = lock_flags_;
    if (settings.index != 0 && wants_rows)
        settings.flags |= op_flag::FETCH;
    else if (settings.index == 0 && !wants_rows)
        settings.flags |= op_flag::KEYS_ONLY;
    return settings;
}

/* Whether a read needs no transaction: a plain SELECT of one table that reads once. */
bool ha_millrace::may_be_alone()
{
    THD *thd = ha_thd();
    if (thd_sql_command(thd) != SQLCOM_SELECT || lock_flags_ || thd->in_sub_stmt)
        return false;
    SELECT_LEX *select = thd->lex->first_select_lex();
    return select->order_list.elements == 0 && select->group_list.elements == 0 &&
           !select->next_select();
}

/* Limit of the rows that the statement wants; 0: not known. Used only for the size
 * of the first batch: with conditions of the server's own, or joins, it takes more rows of a
 * table. The limit of a sorted or counted result does not limit a scan of all rows. */
uint32_t ha_millrace::row_limit(bool is_all)
{
    THD *thd = ha_thd();
    const SELECT_LEX *select = thd->lex->first_select_lex();
    if (is_all && (select->order_list.elements || select->group_list.elements ||
                   select->with_sum_func || (select->options & SELECT_DISTINCT)))
        return 0;
    switch (thd_sql_command(thd)) {
    case SQLCOM_SELECT:
    case SQLCOM_UPDATE:
    case SQLCOM_DELETE:
        break;
    default:
        return 0;
    }
    ha_rows limit = thd->lex->unit.lim.get_select_limit();
    return limit < 65536 ? static_cast<uint32_t>(limit ? limit : 1) : 0;
}

/* Number of stored columns that must be unpacked. A row that is changed is needed whole.
 * Computed for each row, since the server changes its mind in the middle of a scan (filesort). */
size_t ha_millrace::count_needed_fields() const
{
    return is_write_locked_ || table->vfield ? rows_.fields() : rows_.count_needed(table->read_set);
}

int ha_millrace::make_key_range(uint key, const uchar *image, key_part_map parts,
                                ha_rkey_function find, Range *range)
{
    range->set_all();
    Bytes prefix;
    bool has_null = keys_[key].encode_image(image, parts, scratch_.data(), &prefix);
    key_part_map all = make_prev_keypart_map(table->key_info[key].user_defined_key_parts);
    switch (find) {
    case HA_READ_KEY_EXACT:
    case HA_READ_PREFIX:
        range->is_point = keys_[key].is_unique() && !has_null && (parts & all) == all;
        range->low.assign(prefix);
        range->high.assign(prefix);
        range->flags = op_flag::HIGH_PREFIX;
        return 0;
    case HA_READ_KEY_OR_NEXT:
        range->low.assign(prefix);
        return 0;
    case HA_READ_AFTER_KEY:
        if (!step_over_prefix(&prefix))
            return HA_ERR_KEY_NOT_FOUND;
        range->low.assign(prefix);
        return 0;
    case HA_READ_BEFORE_KEY:
        range->high.assign(prefix);
        range->flags = op_flag::BACKWARD | op_flag::HIGH_OPEN;
        return 0;
    case HA_READ_PREFIX_LAST:
        range->low.assign(prefix);
        /* fall through */
    case HA_READ_KEY_OR_PREV:
    case HA_READ_PREFIX_LAST_OR_PREV:
        range->high.assign(prefix);
        range->flags = op_flag::BACKWARD | op_flag::HIGH_PREFIX;
        return 0;
    default:
        return HA_ERR_UNSUPPORTED;
    }
}

/* Adds a bound of the server to a range. */
void ha_millrace::add_bound(uint key, const key_range *bound, bool is_low, Range *range)
{
    Bytes prefix;
    keys_[key].encode_image(bound->key, bound->keypart_map, scratch_.data(), &prefix);
    if (is_low) {
        range->is_empty = bound->flag == HA_READ_AFTER_KEY && !step_over_prefix(&prefix);
        range->low.assign(prefix);
        return;
    }
    range->high.assign(prefix);
    range->flags &=
        static_cast<uint16_t>(~(op_flag::NO_HIGH | op_flag::HIGH_OPEN | op_flag::HIGH_PREFIX));
    range->flags |= bound->flag == HA_READ_BEFORE_KEY ? op_flag::HIGH_OPEN : op_flag::HIGH_PREFIX;
}

void ha_millrace::make_range(uint key, const key_range *low, const key_range *high, Range *range)
{
    range->set_all();
    if (low && low->keypart_map)
        add_bound(key, low, true, range);
    if (high && high->keypart_map)
        add_bound(key, high, false, range);
}

void ha_millrace::bound_by_end_range(uint key, Range *range)
{
    is_end_bounded_ = false;
    if (!end_range || range->is_point || range->flags != op_flag::NO_HIGH)
        return;
    add_bound(key, end_range, false, range);
    is_end_bounded_ = true;
}

/* --- rows --- */

int ha_millrace::decode_row(const Row &row, uint key, uchar *buf)
{
    bool is_key_only = reads_keys_only(key);
    uint8_t index = key == MAX_KEY ? 0 : host_index(key);
    const Slice &primary = index == 0 ? row.key : is_key_only ? row.value : row.primary;
    primary_.assign(primary.data, primary.size);
    is_positioned_ = false;
    bool is_good = is_key_only ? keys_[key].decode(row.key, buf)
                               : rows_.decode(row.value, buf, count_needed_fields());
    return is_good ? 0
                   : session()->fail(HA_ERR_CRASHED, "", "a stored row cannot be unpacked", false);
}

int ha_millrace::start_scan(uint key, Range &&range, bool is_large)
{
    cursor_.start(read_settings(key, !reads_keys_only(key)), std::move(range), is_large,
                  row_limit(key == MAX_KEY), may_be_alone());
    return 0;
}

int ha_millrace::next_row(uchar *buf)
{
    Row row;
    bool is_end;
    const uint key = inited == INDEX ? active_index : MAX_KEY;
    begin_cursor(key);
    int error = cursor_.next(session(), &row, &is_end);
    if (error || is_end)
        return error ? error : HA_ERR_END_OF_FILE;
    return decode_row(row, key, buf);
}

int ha_millrace::index_init(uint, bool)
{
    is_mrr_ = false;
    return 0;
}

int ha_millrace::index_end()
{
    cursor_.drop_read_ahead();
    return 0;
}

int ha_millrace::index_read_map(uchar *buf, const uchar *key, key_part_map parts,
                                ha_rkey_function find)
{
    Range range;
    if (!key)
        return index_first(buf);
    int error = make_key_range(active_index, key, parts, find, &range);
    if (error)
        return error;
    bound_by_end_range(active_index, &range);
    start_scan(active_index, std::move(range), false);
    error = next_row(buf);
    return error == HA_ERR_END_OF_FILE ? HA_ERR_KEY_NOT_FOUND : error;
}

int ha_millrace::index_read_last_map(uchar *buf, const uchar *key, key_part_map parts)
{
    return index_read_map(buf, key, parts, HA_READ_PREFIX_LAST);
}

/* Reads the next row. The range of a lookup ends before the index does: a caller that goes on gets
 * the entries behind it. */
int ha_millrace::index_next(uchar *buf)
{
    if (cursor_.is_backward())
        cursor_.turn(false);
    int error = next_row(buf);
    if (error != HA_ERR_END_OF_FILE || (is_end_bounded_ && end_range) || !cursor_.has_row() ||
        !cursor_.is_bounded())
        return error;
    cursor_.drop_end();
    return next_row(buf);
}

int ha_millrace::index_prev(uchar *buf)
{
    if (!cursor_.is_backward())
        cursor_.turn(true);
    int error = next_row(buf);
    if (error != HA_ERR_END_OF_FILE || !cursor_.has_row() || !cursor_.is_bounded())
        return error;
    cursor_.drop_end();
    return next_row(buf);
}

int ha_millrace::index_first(uchar *buf)
{
    Range range;
    range.set_all();
    bound_by_end_range(active_index, &range);
    start_scan(active_index, std::move(range), !end_range);
    return next_row(buf);
}

int ha_millrace::index_last(uchar *buf)
{
    Range range;
    range.set_all();
    range.flags |= op_flag::BACKWARD;
    is_end_bounded_ = false;
    start_scan(active_index, std::move(range), false);
    return next_row(buf);
}

int ha_millrace::index_next_same(uchar *buf, const uchar *key, uint length)
{
    int error = next_row(buf);
    if (!error && key_cmp_if_same(table, key, active_index, length))
        return HA_ERR_END_OF_FILE;
    return error;
}

int ha_millrace::rnd_init(bool scan)
{
    is_mrr_ = false;
    if (!scan)
        return 0;
    Range range;
    range.set_all();
    return start_scan(MAX_KEY, std::move(range), true);
}

int ha_millrace::rnd_end()
{
    cursor_.drop_read_ahead();
    return 0;
}

int ha_millrace::rnd_next(uchar *buf) { return next_row(buf); }

/* --- positions --- */

/* Writes the position of the row that was read or written last; the record may lack columns of the
 * primary key. When the position is requested again and no row was read meanwhile, the row may have
 * come out of a join buffer together with its position, which the server has restored. */
void ha_millrace::position(const uchar *)
{
    if (is_positioned_)
        return;
    is_positioned_ = true;
    size_t max_bytes = ref_length - 2,
           size = primary_.size() < max_bytes ? primary_.size() : max_bytes;
    memset(ref, 0, ref_length);
    if (size)
        memcpy(ref, primary_.data(), size);
    int2store(ref + max_bytes, static_cast<uint16>(size));
}

int ha_millrace::cmp_ref(const uchar *a, const uchar *b) { return memcmp(a, b, ref_length); }

int ha_millrace::rnd_pos(uchar *buf, uchar *position)
{
    size_t size = uint2korr(position + ref_length - 2);
    if (size > ref_length - 2)
        return HA_ERR_KEY_NOT_FOUND;
    Range range;
    range.set_all();
    range.is_point = true;
    range.low.assign(position, size);
    cursor_.start(read_settings(MAX_KEY, true), std::move(range), false, 1, false);
    Row row;
    bool is_end;
    int error = cursor_.next(session(), &row, &is_end);
    if (error || is_end)
        return error ? error : HA_ERR_KEY_NOT_FOUND;
    return decode_row(row, MAX_KEY, buf);
}

/* --- estimates --- */

ha_rows ha_millrace::find_estimate(uint key, const Range &range, bool *is_known)
{
    ulonglong now = my_hrtime().val;
    *is_known = true;
    if (range.is_point || range.is_empty)
        return 1;
    for (const Estimate &known : estimates_)
        if (known.key == key && known.flags == range.flags && known.low.equals(range.low) &&
            known.high.equals(range.high) && now - known.at_us < ESTIMATE_US)
            return known.rows;
    *is_known = false;
    return 0;
}

void ha_millrace::keep_estimate(uint key, const Range &range, ha_rows rows)
{
    if (estimates_.size() >= MAX_ESTIMATES)
        estimates_.clear();
    estimates_.emplace_back();
    Estimate &known = estimates_.back();
    known.low.assign(range.low);
    known.high.assign(range.high);
    known.flags = range.flags;
    known.key = key;
    known.at_us = my_hrtime().val;
    known.rows = rows;
}

ha_rows ha_millrace::records_in_range(uint key, const key_range *low, const key_range *high,
                                      page_range *)
{
    Range range;
    make_range(key, low, high, &range);
    bool is_known;
    ha_rows rows = find_estimate(key, range, &is_known);
    if (is_known)
        return rows;
    Op op;
    op.kind = op::ESTIMATE;
    op.index = host_index(key);
    op.table = share_->table();
    op.flags = range.flags;
    op.key = Slice(range.low);
    op.value = Slice(range.high);
    Bytes body;
    Answer answer;
    Count count;
    if (session()->send_alone(op, true, true, &body, &answer) || answer.bytes.size < sizeof(count))
        return HA_POS_ERROR;
    memcpy(&count, answer.bytes.data, sizeof(count));
    rows = count.entries ? static_cast<ha_rows>(count.entries) : 1;
    keep_estimate(key, range, rows);
    return rows;
}

} // namespace millrace
