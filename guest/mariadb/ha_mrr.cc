// SPDX-License-Identifier: GPL-2.0-only
/* Many ranges in one request.
 *
 * The ranges of a multi-range read are requested RANGES at a time, each with a part of REPLY_BYTES.
 * The cursor reads the rest of a range that has more rows. Rows come range by range, so they are in
 * the order of the ranges.
 */
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

static constexpr size_t RANGES = 256;
static constexpr uint32_t REPLY_BYTES = 1 << 20;

/* Requests all estimates that the server is about to need, in one request. */
void ha_millrace::estimate_all(uint key, RANGE_SEQ_IF *sequence, void *argument, uint ranges,
                               uint mode)
{
    std::vector<Range> wanted;
    KEY_MULTI_RANGE server_range;
    range_seq_t iterator = sequence->init(argument, ranges, mode);
    while (!sequence->next(iterator, &server_range) && wanted.size() < 100) {
        Range range;
        make_range(key, &server_range.start_key, &server_range.end_key, &range);
        bool is_known, is_unique = (server_range.range_flag & UNIQUE_RANGE) != 0;
        find_estimate(key, range, &is_known);
        if (!is_known && !is_unique)
            wanted.push_back(std::move(range));
    }
    if (wanted.size() < 2)
        return;
    Batch batch;
    for (const Range &range : wanted) {
        Op op;
        op.kind = op::ESTIMATE;
        op.index = host_index(key);
        op.table = share_->table();
        op.flags = range.flags;
        op.key = Slice(range.low);
        op.value = Slice(range.high);
        batch.add(op);
    }
    Bytes body;
    Reply reply;
    if (session()->send_outside(&batch, true, true, &body, &reply))
        return;
    Answer answer;
    for (size_t i = 0; i < wanted.size() && reply.next(&answer); i++) {
        Count count;
        if (answer.bytes.size < sizeof(count))
            return;
        memcpy(&count, answer.bytes.data, sizeof(count));
        keep_estimate(key, wanted[i], count.entries ? static_cast<ha_rows>(count.entries) : 1);
    }
}

/* Sets the cost: a few round trips, for any number of ranges. */
static void set_cost(Cost_estimate *cost, double ranges, double rows)
{
    cost->reset();
    cost->cpu_cost = 1 + ranges / RANGES + ranges * 0.02 + rows * 0.15 + rows / TIME_FOR_COMPARE;
}

/* Partitioned tables are read by the server's own method, a range at a time: ha_partition hands
 * ranges to its partitions in a way that ends the server when no key falls into one that is read
 * (10.11, mrr=on). */
bool ha_millrace::may_read_ranges_together() const { return !table->part_info; }

ha_rows ha_millrace::multi_range_read_info_const(uint key, RANGE_SEQ_IF *sequence, void *argument,
                                                 uint ranges, uint *bytes, uint *mode,
                                                 Cost_estimate *cost)
{
    estimate_all(key, sequence, argument, ranges, *mode);
    ha_rows rows =
        handler::multi_range_read_info_const(key, sequence, argument, ranges, bytes, mode, cost);
    if (rows == HA_POS_ERROR || !may_read_ranges_together())
        return rows;
    *mode &= ~HA_MRR_USE_DEFAULT_IMPL;
    *bytes = 0;
    set_cost(cost, ranges, rows2double(rows));
    return rows;
}

ha_rows ha_millrace::multi_range_read_info(uint key, uint ranges, uint rows, uint key_parts,
                                           uint *bytes, uint *mode, Cost_estimate *cost)
{
    ha_rows result =
        handler::multi_range_read_info(key, ranges, rows, key_parts, bytes, mode, cost);
    if (!may_read_ranges_together())
        return result;
    *mode &= ~HA_MRR_USE_DEFAULT_IMPL;
    *bytes = 0;
    set_cost(cost, ranges, rows);
    return result;
}

int ha_millrace::multi_range_read_explain_info(uint mode, char *text, size_t size)
{
    static const char name[] = "Millrace multi-range";
    if (mode & HA_MRR_USE_DEFAULT_IMPL)
        return 0;
    size_t bytes = MY_MIN(sizeof(name) - 1, size);
    memcpy(text, name, bytes);
    return static_cast<int>(bytes);
}

int ha_millrace::multi_range_read_init(RANGE_SEQ_IF *sequence, void *argument, uint ranges,
                                       uint mode, HANDLER_BUFFER *buffer)
{
    int error = handler::multi_range_read_init(sequence, argument, ranges, mode, buffer);
    is_mrr_ = !(mode & HA_MRR_USE_DEFAULT_IMPL);
    mrr_is_end_ = mrr_in_cursor_ = mrr_has_more_ = false;
    pending_.clear();
    pending_index_ = 0;
    mrr_rows_ = Rows();
    end_range = nullptr;
    return error;
}

/* Collects the next ranges of the sequence. */
void ha_millrace::collect_ranges()
{
    pending_.clear();
    pending_index_ = 0;
    size_t bytes = 0;
    while (pending_.size() < RANGES && bytes < REPLY_BYTES) {
        if (mrr_funcs.next(mrr_iter, &mrr_cur_range)) {
            mrr_is_end_ = true;
            return;
        }
        pending_.emplace_back();
        PendingRange &pending = pending_.back();
        pending.id = mrr_cur_range.ptr;
        const key_range *low = &mrr_cur_range.start_key, *high = &mrr_cur_range.end_key;
        if (mrr_cur_range.range_flag & EQ_RANGE)
            make_key_range(active_index, low->key, low->keypart_map, HA_READ_KEY_EXACT,
                           &pending.range);
        else
            make_range(active_index, low, high, &pending.range);
        if (pending.range.is_empty) {
            pending_.pop_back();
            continue;
        }
        bytes += pending.range.low.size() + pending.range.high.size() + sizeof(OpHeader);
    }
}

int ha_millrace::request_collected(bool is_alone, bool *has_more)
{
    Session *session = this->session();
    int error = session->flush_buffered();
    if (error)
        return error;
    ReadSettings settings = this->read_settings(active_index, !reads_keys_only(active_index));
    uint32_t share = REPLY_BYTES / static_cast<uint32_t>(pending_.size());
    /* The ranges are about the first column. */
    const Filter *filter = get_filter(active_index, settings, 0, 1);
    for (const PendingRange &pending : pending_)
        add_read(session, pending.range, settings, 0, share < 4096 ? 4096 : share, filter, 0);
    SendOptions options;
    options.is_alone = is_alone;
    error = session->send(options, &mrr_reply_, &mrr_answers_);
    if (error)
        return error;
    Reply rest = mrr_answers_;
    Answer answer;
    *has_more = false;
    size_t answers = 0;
    for (; rest.next(&answer); answers++) {
        *has_more |= answer.more != 0;
        counters.rows_fetched += answer.rows;
    }
    return answers == pending_.size()
               ? 0
               : session->fail(HA_ERR_INTERNAL_ERROR, "",
                               "the host's reply to a read lacks answers", false);
}

/* Sends the next request, for all collected ranges. */
int ha_millrace::request_ranges()
{
    bool is_first = pending_.empty();
    collect_ranges();
    if (pending_.empty())
        return 0;
    /* One range is a scan like any other. */
    if (pending_.size() == 1 && !pending_[0].range.is_point) {
        is_end_bounded_ = false;
        start_scan(active_index, std::move(pending_[0].range), false);
        mrr_in_cursor_ = true;
        pending_index_ = 1;
        return 0;
    }
    bool has_more, is_alone = is_first && mrr_is_end_ && may_be_alone() && session()->is_alone();
    int error = request_collected(is_alone, &has_more);
    if (!error && is_alone && has_more)
        error = request_collected(false, &has_more);
    return error;
}

int ha_millrace::next_pending_row(range_id_t *range, Row *row, bool *is_end)
{
    *is_end = false;
    for (;;) {
        if (mrr_in_cursor_) {
            bool is_range_end;
            begin_cursor(active_index);
            int error = cursor_.next(session(), row, &is_range_end);
            *range = pending_[pending_index_ - 1].id;
            if (error || !is_range_end)
                return error;
            mrr_in_cursor_ = false;
        }
        if (mrr_rows_.next(row)) {
            PendingRange &pending = pending_[pending_index_ - 1];
            *range = pending.id;
            if (pending.range.is_point)
                row->key = Slice(pending.range.low);
            if (mrr_rows_.remaining() == 0 && mrr_has_more_) {
                pending.range.low.assign(row->key.data, row->key.size);
                pending.range.flags |= op_flag::LOW_OPEN;
                cursor_.start(read_settings(active_index, !reads_keys_only(active_index)),
                              std::move(pending.range), true, 0, false);
                mrr_in_cursor_ = true;
                mrr_has_more_ = false;
            }
            return 0;
        }
        if (mrr_rows_.is_bad())
            return session()->fail(HA_ERR_INTERNAL_ERROR, "", "the host's rows make no sense",
                                   false);
        Answer answer;
        if (pending_index_ < pending_.size() && mrr_answers_.next(&answer)) {
            pending_index_++;
            mrr_rows_ = Rows(answer.bytes, answer.rows);
            mrr_has_more_ = answer.more != 0;
            if (mrr_has_more_ && answer.rows == 0) {
                cursor_.start(read_settings(active_index, !reads_keys_only(active_index)),
                              std::move(pending_[pending_index_ - 1].range), true, 0, false);
                mrr_in_cursor_ = true;
                mrr_has_more_ = false;
            }
            continue;
        }
        if (mrr_is_end_) {
            *is_end = true;
            return 0;
        }
        int error = request_ranges();
        if (error)
            return error;
    }
}

int ha_millrace::multi_range_read_next(range_id_t *range)
{
    if (!is_mrr_)
        return handler::multi_range_read_next(range);
    for (;;) {
        Row row;
        bool is_end;
        int error = next_pending_row(range, &row, &is_end);
        /* As the server's own calls do: else the status of a row that was deleted before would make
         * the server skip this one. */
        table->status = error || is_end ? STATUS_NOT_FOUND : 0;
        if (error || is_end)
            return error ? error : HA_ERR_END_OF_FILE;
        if (mrr_funcs.skip_record && mrr_funcs.skip_record(mrr_iter, *range, nullptr))
            continue;
        update_index_statistics();
        error = decode_row(row, active_index, table->record[0]);
        if (!error && table->vfield)
            error = table->update_virtual_fields(this, VCOL_UPDATE_FOR_READ);
        return error;
    }
}

} // namespace millrace
