// SPDX-License-Identifier: GPL-2.0-only
/* The handler: one table that a session has open.
 *
 * ha_millrace.cc: open, locks, information. ha_write.cc: inserts, updates and deletes of rows.
 * ha_read.cc: reads by key, in order, by position. ha_mrr.cc: many ranges in one request.
 * ha_condition.cc: conditions that the host checks. ha_table.cc: tables made and removed.
 *
 * A table's indexes in the host are its keys, with the hidden one of row ids in front if it has
 * no primary key. A position is the primary key, filled up, with its length behind it. */
#ifndef MILLRACE_HANDLER_H
#define MILLRACE_HANDLER_H

#include "server.h"

#include "condition.h"
#include "cursor.h"
#include "pack.h"
#include "session.h"
#include "share.h"

namespace millrace {

class ha_millrace final : public handler, public Writer {
public:
    ha_millrace(handlerton *hton, TABLE_SHARE *share);
    ~ha_millrace() override;

    Table_flags table_flags() const override;
    ulong index_flags(uint key, uint part, bool all_parts) const override;
    uint max_supported_keys() const override { return MAX_KEY; }
    uint max_supported_key_length() const override { return 3072; }
    uint max_supported_key_part_length() const override { return 3072; }
    const char *index_type(uint) override { return "BTREE"; }
    /* Rather than sort all rows. */
    const key_map *keys_to_use_for_scanning() override { return &key_map_full; }
    uint8 table_cache_type() override { return HA_CACHE_TBL_NOCACHE; }

    int open(const char *name, int mode, uint test_if_locked) override;
    int close() override;
    int reset() override;
    int extra(ha_extra_function operation) override;
    int external_lock(THD *thd, int lock_type) override;
    int start_stmt(THD *thd, thr_lock_type lock_type) override;
    uint lock_count() const override { return 0; }
    THR_LOCK_DATA **store_lock(THD *thd, THR_LOCK_DATA **to, thr_lock_type lock_type) override;
    int info(uint flag) override;
    int calculate_checksum() override;
    void print_error(int error, myf flags) override;
    bool get_error_message(int error, String *text) override;
    double scan_time() override;
    double read_time(uint index, uint ranges, ha_rows rows) override;
    double keyread_time(uint index, uint ranges, ha_rows rows) override;

    int create(const char *name, TABLE *form, HA_CREATE_INFO *info) override;
    int delete_table(const char *name) override;
    int rename_table(const char *from, const char *to) override;
    int truncate() override;
    int reset_auto_increment(ulonglong value) override;
    int analyze(THD *thd, HA_CHECK_OPT *options) override;
    int optimize(THD *thd, HA_CHECK_OPT *options) override;
    int check(THD *thd, HA_CHECK_OPT *options) override;
    bool check_if_incompatible_data(HA_CREATE_INFO *info, uint changes) override;
    void update_create_info(HA_CREATE_INFO *info) override;

    int write_row(const uchar *record) override;
    int update_row(const uchar *old_record, const uchar *new_record) override;
    int delete_row(const uchar *record) override;
    void start_bulk_insert(ha_rows rows, uint flags) override;
    int end_bulk_insert() override;
    void get_auto_increment(ulonglong offset, ulonglong increment, ulonglong wanted,
                            ulonglong *first, ulonglong *reserved) override;

    int index_init(uint key, bool sorted) override;
    int index_end() override;
    int index_read_map(uchar *buf, const uchar *key, key_part_map parts,
                       ha_rkey_function find) override;
    int index_read_last_map(uchar *buf, const uchar *key, key_part_map parts) override;
    int index_next(uchar *buf) override;
    int index_prev(uchar *buf) override;
    int index_first(uchar *buf) override;
    int index_last(uchar *buf) override;
    int index_next_same(uchar *buf, const uchar *key, uint length) override;
    int rnd_init(bool scan) override;
    int rnd_end() override;
    int rnd_next(uchar *buf) override;
    int rnd_pos(uchar *buf, uchar *position) override;
    void position(const uchar *record) override;
    int cmp_ref(const uchar *a, const uchar *b) override;
    ha_rows records_in_range(uint key, const key_range *low, const key_range *high,
                             page_range *pages) override;

    const COND *cond_push(const COND *condition) override;
    void cond_pop() override;

    ha_rows multi_range_read_info_const(uint key, RANGE_SEQ_IF *sequence, void *argument,
                                        uint ranges, uint *bytes, uint *mode,
                                        Cost_estimate *cost) override;
    ha_rows multi_range_read_info(uint key, uint ranges, uint rows, uint key_parts, uint *bytes,
                                  uint *mode, Cost_estimate *cost) override;
    int multi_range_read_init(RANGE_SEQ_IF *sequence, void *argument, uint ranges, uint mode,
                              HANDLER_BUFFER *buffer) override;
    int multi_range_read_next(range_id_t *range) override;
    int multi_range_read_explain_info(uint mode, char *text, size_t size) override;

    void report_duplicate(const Op &op, const Op &first) override;
    void note_duplicate(const Op &op) override;

private:
    /* Range of a multi-range read for which rows are pending. */
    struct PendingRange {
        range_id_t id;
        Range range;
    };
    struct Estimate {
        Bytes low, high;
        uint16_t flags;
        uint key;
        ulonglong at_us;
        ha_rows rows;
    };

    Session *session() const { return Session::get(ha_thd()); }
    bool has_primary() const { return table_share->primary_key != MAX_KEY; }
    uint8_t host_index(uint key) const
    {
        return static_cast<uint8_t>(key + (has_primary() ? 0 : 1));
    }
    uint server_key(uint8_t index) const
    {
        return has_primary() ? index : index ? index - 1 : MAX_KEY;
    }
    bool is_primary(uint key) const { return has_primary() && key == table_share->primary_key; }
    int begin_use(THD *thd, bool is_write);

    /* writing */
    bool must_wait_for_answer(bool is_insert);
    int encode_primary(const uchar *record, Bytes *primary);
    int encode_key(uint key, const uchar *record, const Bytes &primary, Bytes *out,
                   bool *has_primary_suffix);
    int prepare_write(size_t bytes, bool is_insert);
    int insert_keys(const uchar *record, const Bytes &primary, bool unique_ones);
    int replace_key(uint key, const uchar *old_record, const uchar *new_record,
                    const Bytes &old_primary, const Bytes &new_primary);
    int finish_write(bool waits, uint64_t savepoint, Bytes *primary);
    void add_write(uint8_t kind, uint8_t index, bool has_primary_suffix, Slice key, Slice value);
    bool may_meet_duplicates(const uchar *old_record, const uchar *new_record);
    int find_largest_auto();
    void note_auto(Field *field);
    int fail_too_big(const char *subject, size_t bytes, size_t max_bytes);

    /* reading */
    ReadSettings read_settings(uint key, bool wants_rows) const;
    int make_key_range(uint key, const uchar *image, key_part_map parts, ha_rkey_function find,
                       Range *range);
    void bound_by_end_range(uint key, Range *range);
    void add_bound(uint key, const key_range *bound, bool is_low, Range *range);
    void make_range(uint key, const key_range *low, const key_range *high, Range *range);
    int start_scan(uint key, Range &&range, bool is_large);
    int next_row(uchar *buf);
    int decode_row(const Row &row, uint key, uchar *buf);
    bool reads_keys_only(uint key) const;
    bool may_be_alone();
    uint32_t row_limit(bool is_all);
    size_t count_needed_fields() const;
    ha_rows find_estimate(uint key, const Range &range, bool *is_known);
    void keep_estimate(uint key, const Range &range, ha_rows rows);
    bool may_read_ranges_together() const;
    void estimate_all(uint key, RANGE_SEQ_IF *sequence, void *argument, uint ranges, uint mode);

    /* conditions */
    const Filter *get_filter(uint key, const ReadSettings &settings, size_t known_bytes,
                             uint first_part);
    void begin_cursor(uint key);
    void forget_condition();

    /* many ranges */
    void collect_ranges();
    int request_ranges();
    int request_collected(bool is_alone, bool *has_more);
    int next_pending_row(range_id_t *range, Row *row, bool *is_end);

    Share *share_ = nullptr;
    std::vector<KeyCodec> keys_;
    RowCodec rows_;
    Bytes scratch_; /* a record, to unpack the server's keys */
    Bytes primary_; /* primary key of the row that was read or written last */
    Bytes row_, key_, old_key_, new_primary_;
    uint16_t lock_flags_ = 0; /* SHARED, EXCLUSIVE, SKIP_LOCKED */
    uint16_t stored_lock_ = 0;
    bool is_write_locked_ = false;
    bool ignores_duplicates_ = false;
    bool is_bulk_ = false;
    bool is_copy_ = false; /* ALTER TABLE fills it; no other session sees it */
    bool is_key_only_ = false;
    bool is_positioned_ = false; /* position() was called for the row of primary_ */
    bool is_end_bounded_ = false; /* the scan ends where the server's range does */
    Cursor cursor_;
    uint duplicate_key_ = MAX_KEY;

    Condition condition_;
    Bytes constants_; /* a record */
    /* Facts from which filter_ was made of condition_. */
    struct FilterUse {
        uint key;
        bool has_rows;
        size_t known_bytes;
        uint first_part;
    };
    FilterUse filter_use_ = {};
    bool is_filter_made_ = false;
    Filter filter_;

    std::vector<PendingRange> pending_;
    size_t pending_index_ = 0;
    bool is_mrr_ = false, mrr_is_end_ = false;
    Bytes mrr_reply_;
    Reply mrr_answers_;
    Rows mrr_rows_;
    bool mrr_has_more_ = false, mrr_in_cursor_ = false;
    std::vector<Estimate> estimates_;
};

} // namespace millrace

#endif
