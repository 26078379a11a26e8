// SPDX-License-Identifier: GPL-2.0-only
/* Writing rows: insert, update, delete.
 *
 * A row is an INSERT into each index, unique ones first. Old and new rows give ops for those
 * indexes only whose keys differ; a changed primary key concerns all of them. Deletes and
 * updates need no answer: their rows are locked since they were read. */
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

int ha_millrace::fail_too_big(const char *subject, size_t bytes, size_t max_bytes)
{
    char text[160];
    snprintf(text, sizeof(text), "%s of %zu bytes is too long, at most %zu can be stored", subject,
             bytes, max_bytes);
    return session()->fail(HA_ERR_TO_BIG_ROW, "", text, false);
}

/* Whether the statement has to know of duplicates at once. An update that changes no unique key has
 * none. */
bool ha_millrace::must_wait_for_answer(bool is_insert)
{
    THD *thd = ha_thd();
    if (!is_insert || !buffers_writes(thd))
        return !buffers_writes(thd);
    if (ignores_duplicates_ || thd->in_sub_stmt || thd->locked_tables_mode > LTM_LOCK_TABLES ||
        thd->lex->ignore)
        return true;
    return !is_bulk_ && !is_copy_ && session()->is_long() && !session()->buffers_transaction();
}

int ha_millrace::encode_primary(const uchar *record, Bytes *primary)
{
    primary->clear();
    if (has_primary()) {
        keys_[table_share->primary_key].encode(record, primary);
        return primary->size() <= MAX_KEY_BYTES ? 0
                                                : fail_too_big("a key", primary->size(),
                                                               MAX_KEY_BYTES);
    }
    primary->assign(primary_);
    return 0;
}

/* Encodes a key. `has_primary_suffix`: the primary key is behind it and makes it unique. */
int ha_millrace::encode_key(uint key, const uchar *record, const Bytes &primary, Bytes *out,
                            bool *has_primary_suffix)
{
    out->clear();
    bool has_null = keys_[key].encode(record, out);
    *has_primary_suffix = has_null || !keys_[key].is_unique();
    if (*has_primary_suffix)
        out->append(primary);
    return out->size() <= MAX_KEY_BYTES ? 0 : fail_too_big("a key", out->size(), MAX_KEY_BYTES);
}

void ha_millrace::add_write(uint8_t kind, uint8_t index, bool has_primary_suffix, Slice key,
                            Slice value)
{
    Op op;
    op.kind = kind;
    op.index = index;
    op.flags = has_primary_suffix ? op_flag::NO_LOCK : 0;
    op.table = share_->table();
    op.key = key;
    op.value = value;
    session()->add(op);
}

/* Makes room for this many bytes in the batch, and begins a write. */
int ha_millrace::prepare_write(size_t bytes, bool is_insert)
{
    Session *session = this->session();
    int error = must_wait_for_answer(is_insert) || !is_insert ? session->flush_buffered() : 0;
    if (error)
        return error;
    if (!session->has_room(bytes)) {
        error = is_copy_ ? session->commit(true) : session->flush();
        if (error)
            return error;
        if (is_copy_)
            session->enter_statement(ha_thd());
    }
    return session->begin_write(is_insert);
}

int ha_millrace::insert_keys(const uchar *record, const Bytes &primary, bool unique_ones)
{
    for (uint key = 0; key < table_share->keys; key++) {
        if (is_primary(key) || keys_[key].is_unique() != unique_ones)
            continue;
        bool has_primary_suffix;
        int error = encode_key(key, record, primary, &key_, &has_primary_suffix);
        if (error)
            return error;
        add_write(op::INSERT, host_index(key), has_primary_suffix, Slice(key_), Slice(primary));
    }
    return 0;
}

/* Sends the added ops, if the statement waits or the batch is large enough. */
int ha_millrace::finish_write(bool waits, uint64_t savepoint, Bytes *primary)
{
    Session *session = this->session();
    int error = 0;
    if (waits) {
        SendOptions options;
        options.writer = this;
        Reply reply;
        Bytes body;
        error = session->send(options, &body, &reply);
        if (error == HA_ERR_FOUND_DUPP_KEY && savepoint)
            session->roll_back_to(savepoint);
    } else if (session->batch_bytes() >= batch_bytes(ha_thd())) {
        error = is_copy_ ? session->commit(true) : session->flush();
        if (is_copy_ && !error)
            session->enter_statement(ha_thd());
    }
    if (!error) {
        primary_.assign(*primary);
        is_positioned_ = false;
    }
    return error;
}

int ha_millrace::write_row(const uchar *record)
{
    int error;
    bool is_auto = table->next_number_field && record == table->record[0];
    if (is_auto && (error = update_auto_increment()))
        return error;
    Session *session = this->session();
    if (has_primary()) {
        if ((error = encode_primary(record, &new_primary_)))
            return error;
    } else {
        uint64_t id;
        if ((error = take_row_id(session, &id)))
            return error;
        uchar number[ROW_ID_BYTES];
        mi_int8store(number, id);
        new_primary_.assign(number, sizeof(number));
    }
    row_.clear();
    rows_.encode(record, &row_);
    if (row_.size() > MAX_VALUE_BYTES)
        return fail_too_big("a row", row_.size(), MAX_VALUE_BYTES);
    if ((error = prepare_write(row_.size() + 2 * table_share->keys * (256 + new_primary_.size()),
                               true)))
        return error;
    bool waits = must_wait_for_answer(true);
    uint64_t savepoint = waits && ignores_duplicates_ && table_share->keys + !has_primary() > 1
                             ? session->set_savepoint()
                             : 0;
    session->mark_row(this);
    add_write(op::INSERT, 0, false, Slice(new_primary_), Slice(row_));
    counters.rows_sent++;
    if ((error = insert_keys(record, new_primary_, true)) ||
        (error = insert_keys(record, new_primary_, false)))
        return error;
    if (is_auto)
        note_auto(table->next_number_field);
    return finish_write(waits, savepoint, &new_primary_);
}

int ha_millrace::replace_key(uint key, const uchar *old_record, const uchar *new_record,
                             const Bytes &old_primary, const Bytes &new_primary)
{
    bool had_primary_suffix, has_primary_suffix;
    int error = encode_key(key, old_record, old_primary, &old_key_, &had_primary_suffix);
    if (!error)
        error = encode_key(key, new_record, new_primary, &key_, &has_primary_suffix);
    if (error)
        return error;
    uint8_t index = host_index(key);
    if (old_key_.equals(key_)) {
        if (!old_primary.equals(new_primary))
            add_write(op::UPDATE, index, has_primary_suffix, Slice(key_), Slice(new_primary));
        return 0;
    }
    add_write(op::DELETE, index, had_primary_suffix, Slice(old_key_), Slice());
    add_write(op::INSERT, index, has_primary_suffix, Slice(key_), Slice(new_primary));
    return 0;
}

/* Whether a unique key changes. */
bool ha_millrace::may_meet_duplicates(const uchar *old_record, const uchar *new_record)
{
    for (uint key = 0; key < table_share->keys; key++) {
        if (!keys_[key].is_unique())
            continue;
        old_key_.clear();
        key_.clear();
        keys_[key].encode(old_record, &old_key_);
        bool has_null = keys_[key].encode(new_record, &key_);
        if (!has_null && !old_key_.equals(key_))
            return true;
    }
    return false;
}

int ha_millrace::update_row(const uchar *old_record, const uchar *new_record)
{
    Bytes old_primary;
    int error = encode_primary(old_record, &old_primary);
    if (!error)
        error = encode_primary(new_record, &new_primary_);
    if (error)
        return error;
    row_.clear();
    rows_.encode(new_record, &row_);
    if (row_.size() > MAX_VALUE_BYTES)
        return fail_too_big("a row", row_.size(), MAX_VALUE_BYTES);
    Session *session = this->session();
    if ((error = prepare_write(row_.size() + 4 * table_share->keys * (256 + new_primary_.size()),
                               false)))
        return error;
    bool may_meet = may_meet_duplicates(old_record, new_record);
    uint64_t savepoint = may_meet ? session->set_savepoint() : 0;
    session->mark_row(this);
    if (old_primary.equals(new_primary_)) {
        add_write(op::UPDATE, 0, false, Slice(new_primary_), Slice(row_));
    } else {
        add_write(op::DELETE, 0, false, Slice(old_primary), Slice());
        add_write(op::INSERT, 0, false, Slice(new_primary_), Slice(row_));
    }
    counters.rows_sent++;
    for (uint key = 0; key < table_share->keys; key++)
        if (!is_primary(key) &&
            (error = replace_key(key, old_record, new_record, old_primary, new_primary_)))
            return error;
    if (table->found_next_number_field && new_record == table->record[0] &&
        bitmap_is_set(table->write_set, table->found_next_number_field->field_index))
        note_auto(table->found_next_number_field);
    return finish_write(may_meet || must_wait_for_answer(false), savepoint, &new_primary_);
}

int ha_millrace::delete_row(const uchar *record)
{
    Bytes primary;
    int error = encode_primary(record, &primary);
    if (!error)
        error = prepare_write(2 * table_share->keys * (256 + primary.size()), false);
    if (error)
        return error;
    session()->mark_row(this);
    add_write(op::DELETE, 0, false, Slice(primary), Slice());
    counters.rows_sent++;
    for (uint key = 0; key < table_share->keys; key++) {
        bool has_primary_suffix;
        if (is_primary(key))
            continue;
        if ((error = encode_key(key, record, primary, &key_, &has_primary_suffix)))
            return error;
        add_write(op::DELETE, host_index(key), has_primary_suffix, Slice(key_), Slice());
    }
    return finish_write(false, 0, &primary);
}

void ha_millrace::start_bulk_insert(ha_rows, uint) { is_bulk_ = true; }

/* Sends the rows of a bulk insert inside a longer transaction: the statement learns of duplicates
 * here. */
int ha_millrace::end_bulk_insert()
{
    is_bulk_ = false;
    if ((!session()->is_long() && !is_copy_) || session()->buffers_transaction())
        return 0;
    int error = session()->flush();
    my_errno = error;
    return error;
}

/* --- duplicates --- */

void ha_millrace::note_duplicate(const Op &op) { duplicate_key_ = server_key(op.index); }

/* The row is unpacked from the batch, so that the server can print its key. */
void ha_millrace::report_duplicate(const Op &op, const Op &first)
{
    uint key = server_key(op.index);
    Bytes saved;
    saved.append(table->record[0], table_share->reclength);
    Op row = op;
    if (first.index == 0 && first.value.size)
        row = first;
    bool is_known = key < table_share->keys && row.index == 0 &&
                    rows_.decode(row.value, table->record[0], rows_.fields());
    MY_BITMAP *old_map = tmp_use_all_columns(table, &table->read_set);
    print_keydup_error(table, is_known ? &table->key_info[key] : nullptr, MYF(0));
    tmp_restore_column_map(&table->read_set, old_map);
    memcpy(table->record[0], saved.data(), saved.size());
}

/* --- AUTO_INCREMENT --- */

/* Value of a column; 0 if it is negative: the counter goes up from 1. */
static uint64_t get_positive(Field *field)
{
    longlong value = field->val_int();
    return value > 0 || static_cast<Field_num *>(field)->unsigned_flag
               ? static_cast<uint64_t>(value)
               : 0;
}

void ha_millrace::note_auto(Field *field) { share_->note_auto(get_positive(field)); }

/* Finds the largest value in the table, by the key that begins with the column. */
int ha_millrace::find_largest_auto()
{
    uint key = table_share->next_number_index;
    Range range;
    range.set_all();
    if (!(table->key_info[key].key_part[0].key_part_flag & HA_REVERSE_SORT))
        range.flags |= op_flag::BACKWARD;
    ReadSettings settings = this->read_settings(key, true);
    settings.flags &=
        static_cast<uint16_t>(~(op_flag::SHARED | op_flag::EXCLUSIVE | op_flag::SKIP_LOCKED));
    Op op;
    op.kind = op::SCAN;
    op.index = settings.index;
    op.table = settings.table;
    op.flags = settings.flags | range.flags;
    op.extra = limits(1, 0);
    Bytes body;
    Answer answer;
    int error = session()->send_alone(op, true, false, &body, &answer);
    if (error)
        return error;
    Row row;
    uint64_t largest = 0;
    Rows rows(answer.bytes, answer.rows);
    uchar *record = scratch_.data();
    if (rows.next(&row) && rows_.decode(row.value, record, rows_.fields())) {
        Field *field = table->found_next_number_field;
        my_ptrdiff_t offset = record - table->record[0];
        field->move_field_offset(offset);
        largest = get_positive(field);
        field->move_field_offset(-offset);
    }
    share_->set_largest(largest);
    return 0;
}

void ha_millrace::get_auto_increment(ulonglong offset, ulonglong increment, ulonglong wanted,
                                     ulonglong *first, ulonglong *reserved)
{
    uint64_t start = 0, count = 0;
    int error = share_->needs_largest() ? find_largest_auto() : 0;
    if (!error)
        error = share_->take_auto(session(), offset, increment, wanted, &start, &count);
    *first = error ? ULONGLONG_MAX : start;
    *reserved = error ? 0 : count;
}

} // namespace millrace
