// SPDX-License-Identifier: GPL-2.0-only
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

ha_millrace::ha_millrace(handlerton *hton, TABLE_SHARE *share) : handler(hton, share) {}

ha_millrace::~ha_millrace() = default;

handler::Table_flags ha_millrace::table_flags() const
{
    Table_flags checksum = table_share && table_share->db_create_options & HA_OPTION_CHECKSUM
                               ? HA_HAS_NEW_CHECKSUM
                               : 0;
    /* Changing a primary key moves entries of all keys, in front of a scan, too: the server must
     * know. Other keys do not contain its columns, so this is not for readers. */
    Table_flags moving = is_write_locked_ ? HA_PRIMARY_KEY_IN_READ_INDEX : 0;
    return checksum | moving | HA_REC_NOT_IN_SEQ | HA_NULL_IN_KEY | HA_CAN_INDEX_BLOBS |
           HA_CAN_SQL_HANDLER | HA_CAN_GEOMETRY | HA_REQUIRES_KEY_COLUMNS_FOR_DELETE |
           HA_PRIMARY_KEY_REQUIRED_FOR_DELETE | HA_TABLE_SCAN_ON_INDEX | HA_CAN_VIRTUAL_COLUMNS |
           HA_BINLOG_ROW_CAPABLE | HA_CAN_SKIP_LOCKED | HA_CRASH_SAFE |
           HA_CAN_TABLE_CONDITION_PUSHDOWN;
}

ulong ha_millrace::index_flags(uint key, uint part, bool all_parts) const
{
    ulong flags = HA_READ_NEXT | HA_READ_PREV | HA_READ_ORDER | HA_READ_RANGE;
    if (!table_share || key >= table_share->keys)
        return flags;
    const KEY &info = table_share->key_info[key];
    if (is_primary(key))
        flags |= HA_CLUSTERED_INDEX;
    uint last = all_parts ? info.user_defined_key_parts : part + 1;
    for (uint i = all_parts ? 0 : part; i < last && i < info.user_defined_key_parts; i++)
        if (!info.key_part[i].field || !is_decodable(&info.key_part[i]))
            return flags;
    return flags | HA_KEYREAD_ONLY;
}

int ha_millrace::open(const char *name, int, uint)
{
    uint32_t indexes = table_share->keys + (has_primary() ? 0 : 1);
    key_used_on_scan = table_share->primary_key; /* a row whose key changes may come once more */
    lock_shared_ha_data();
    share_ = static_cast<Share *>(get_ha_share_ptr());
    if (!share_) {
        share_ = new Share(table_name(name));
        set_ha_share_ptr(share_);
    }
    unlock_shared_ha_data();
    int error = share_->open(session(), indexes);
    if (error)
        return error;
    session()->can_filter(); /* now, so that no statement has to ask */
    keys_.clear();
    keys_.resize(table_share->keys);
    for (uint i = 0; i < table_share->keys; i++)
        keys_[i].open(&table->key_info[i], (table->key_info[i].flags & HA_NOSAME) != 0);
    rows_.open(table);
    scratch_.clear();
    memcpy(scratch_.grow(table_share->rec_buff_length), table_share->default_values,
           table_share->reclength);
    size_t max_bytes = has_primary() ? keys_[table_share->primary_key].max_bytes() : ROW_ID_BYTES;
    ref_length = static_cast<uint>((max_bytes < MAX_KEY_BYTES ? max_bytes : MAX_KEY_BYTES) + 2);
    is_copy_ = strstr(name, "/#sql") != nullptr && table_share->tmp_table == NO_TMP_TABLE;
    return info(HA_STATUS_NO_LOCK | HA_STATUS_VARIABLE | HA_STATUS_CONST);
}

int ha_millrace::close()
{
    if (Session *session = ha_thd() ? Session::find(ha_thd()) : nullptr)
        session->forget(this);
    return 0;
}

int ha_millrace::reset()
{
    ignores_duplicates_ = is_bulk_ = is_key_only_ = is_mrr_ = false;
    forget_condition();
    estimates_.clear();
    pending_.clear();
    row_.clear_and_trim(1 << 20);
    return 0;
}

int ha_millrace::extra(ha_extra_function operation)
{
    switch (operation) {
    case HA_EXTRA_IGNORE_DUP_KEY:
    case HA_EXTRA_WRITE_CAN_REPLACE:
    case HA_EXTRA_INSERT_WITH_UPDATE:
        ignores_duplicates_ = true;
        break;
    case HA_EXTRA_NO_IGNORE_DUP_KEY:
    case HA_EXTRA_WRITE_CANNOT_REPLACE:
        ignores_duplicates_ = false;
        break;
    case HA_EXTRA_KEYREAD:
        is_key_only_ = true;
        break;
    case HA_EXTRA_NO_KEYREAD:
        is_key_only_ = false;
        break;
    default:
        break;
    }
    return 0;
}

/* --- locks --- */

int ha_millrace::begin_use(THD *thd, bool is_write)
{
    Session *session = Session::get(thd);
    int error = session->enter_statement(thd);
    if (error)
        return error;
    is_write_locked_ = is_write;
    lock_flags_ =
        is_write ? op_flag::EXCLUSIVE | (stored_lock_ & op_flag::SKIP_LOCKED) : stored_lock_;
    if (thd_tx_isolation(thd) == ISO_SERIALIZABLE && (is_write || session->is_long()))
        session->lock_table(share_->table(), is_write);
    cursor_.drop_read_ahead();
    forget_condition();
    return 0;
}

int ha_millrace::external_lock(THD *thd, int lock_type)
{
    Session *session = Session::get(thd);
    if (lock_type == F_UNLCK) {
        session->count_table(-1);
        lock_flags_ = 0;
        is_write_locked_ = false;
        return 0;
    }
    int error = begin_use(thd, lock_type == F_WRLCK);
    if (!error)
        session->count_table(1);
    return error;
}

/* Starts a statement under LOCK TABLES, and for tables that a stored function uses. */
int ha_millrace::start_stmt(THD *thd, thr_lock_type lock_type)
{
    return begin_use(thd, lock_type >= TL_FIRST_WRITE);
}

THR_LOCK_DATA **ha_millrace::store_lock(THD *thd, THR_LOCK_DATA **to, thr_lock_type lock_type)
{
    if (lock_type == TL_IGNORE)
        return to;
    stored_lock_ = 0;
    switch (thd_sql_command(thd)) {
    case SQLCOM_UPDATE:
    case SQLCOM_UPDATE_MULTI:
    case SQLCOM_DELETE:
    case SQLCOM_DELETE_MULTI:
        /* The facts that decide a change must hold when it is made. */
        if (thd_tx_isolation(thd) >= ISO_REPEATABLE_READ)
            stored_lock_ = op_flag::SHARED;
        break;
    default:
        break;
    }
    if (lock_type == TL_READ_WITH_SHARED_LOCKS || lock_type == TL_READ_SKIP_LOCKED)
        stored_lock_ = op_flag::SHARED;
    if (lock_type == TL_READ_SKIP_LOCKED || lock_type == TL_WRITE_SKIP_LOCKED)
        stored_lock_ |= op_flag::SKIP_LOCKED;
    return to; /* metadata locks protect the table, the host its rows */
}

/* --- information --- */

int ha_millrace::info(uint flag)
{
    /* With CHECKSUM=1 the server takes this value, QUICK or not: it is made from the rows. */
    stats.checksum_null = (table_flags() & HA_HAS_NEW_CHECKSUM) != 0;
    if (stats.checksum_null && flag == HA_STATUS_VARIABLE &&
        thd_sql_command(ha_thd()) == SQLCOM_CHECKSUM)
        return calculate_checksum();
    if (flag & (HA_STATUS_VARIABLE | HA_STATUS_CONST)) {
        std::vector<IndexStat> all;
        enum_sql_command command = static_cast<enum_sql_command>(thd_sql_command(ha_thd()));
        bool is_forced = command == SQLCOM_ANALYZE || command == SQLCOM_SHOW_TABLE_STATUS;
        if (share_->stat(session(), is_forced, &all) && !all.empty()) {
            stats.records = all[0].entries;
            stats.data_file_length = all[0].key_bytes + all[0].value_bytes;
            stats.index_file_length = 0;
            for (size_t i = 1; i < all.size(); i++)
                stats.index_file_length += all[i].key_bytes + all[i].value_bytes;
        }
        stats.mean_rec_length = stats.records
                                    ? static_cast<ulong>(stats.data_file_length / stats.records)
                                    : table_share->reclength;
        stats.deleted = 0;
        stats.block_size = 16384;
        stats.mrr_length_per_rec = 0; /* many ranges need no buffer of the server's */
        /* The number is not exact: nothing may be concluded from a table that seems to be empty. */
        if (stats.records < 2 && !(flag & HA_STATUS_TIME))
            stats.records = 2;
    }
    if (flag & HA_STATUS_CONST) {
        for (uint i = 0; i < table_share->keys; i++) {
            KEY *key = &table->key_info[i];
            double rows = static_cast<double>(stats.records);
            for (uint j = 0; j < key->user_defined_key_parts; j++) {
                bool is_whole = j + 1 == key->user_defined_key_parts;
                /* Not counted (ANALYZE TABLE … PERSISTENT does): each part divides the rest. */
                rows = is_whole && (key->flags & HA_NOSAME) ? 1
                       : rows > 100                         ? sqrt(rows)
                                                            : MY_MIN(rows, 10);
                if (key->rec_per_key)
                    key->rec_per_key[j] = static_cast<ulong>(rows < 1 ? 1 : rows);
            }
        }
    }
    if (flag & HA_STATUS_AUTO)
        stats.auto_increment_value = share_->next_auto();
    if (flag & HA_STATUS_ERRKEY)
        errkey = duplicate_key_;
    return 0;
}

int ha_millrace::calculate_checksum()
{
    stats.checksum_null = false;
    return handler::calculate_checksum();
}

void ha_millrace::print_error(int error, myf flags)
{
    Session *session = Session::find(ha_thd());
    if (session && session->take_reported() && ha_thd()->is_error())
        return;
    handler::print_error(error, flags);
}

bool ha_millrace::get_error_message(int error, String *text)
{
    if (error == HA_ERR_ROLLBACK)
        text->append(STRING_WITH_LEN("the transaction was rolled back"));
    return false;
}

/* A round trip costs as much as a handful of rows. */
double ha_millrace::scan_time()
{
    return 1.0 + rows2double(stats.records) * 0.05 +
           ulonglong2double(stats.data_file_length) / 65536;
}

double ha_millrace::read_time(uint index, uint ranges, ha_rows rows)
{
    /* The rows are in the order of the primary key: all of them by it are a scan. */
    if (is_primary(index) && rows >= stats.records)
        return scan_time();
    return ranges + rows2double(rows) * (is_primary(index) ? 0.1 : 0.15);
}

double ha_millrace::keyread_time(uint, uint ranges, ha_rows rows)
{
    return ranges + rows2double(rows) * 0.04;
}

} // namespace millrace
