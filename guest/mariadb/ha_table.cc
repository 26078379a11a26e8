// SPDX-License-Identifier: GPL-2.0-only
/* Making, renaming, emptying and removing tables. Each takes effect at once and is no part of a
 * transaction. The .frm stays in the guest: the host knows a name and the number of indexes. */
#include "ha_millrace.h"

#include "settings.h"

namespace millrace {

int ha_millrace::create(const char *name, TABLE *form, HA_CREATE_INFO *info)
{
    Session *session = Session::get(ha_thd());
    for (uint i = 0; i < form->s->keys; i++) {
        const KEY &key = form->key_info[i];
        if (key.flags & (HA_FULLTEXT | HA_SPATIAL) || key.algorithm == HA_KEY_ALG_FULLTEXT ||
            key.algorithm == HA_KEY_ALG_RTREE)
            return session->fail(HA_ERR_UNSUPPORTED, "",
                                 "FULLTEXT and SPATIAL keys are not supported", false);
    }
    uint32_t indexes = form->s->keys + (form->s->primary_key == MAX_KEY ? 1 : 0);
    Opened opened;
    int error = create_table(session, table_name(name), indexes, &opened);
    if (!error && info->auto_increment_value > 1)
        error = raise_auto(session, opened.table, info->auto_increment_value);
    return error;
}

/* Drops a table. If it does not exist, only the server's own error is reported. */
static int drop_by_name(Session *session, const std::string &name)
{
    Op op;
    op.kind = op::DROP;
    op.key = Slice(reinterpret_cast<const uint8_t *>(name.data()), name.size());
    Bytes body;
    int error = session->send_alone(op, false, true, &body, nullptr);
    if (error == HA_ERR_LOCK_WAIT_TIMEOUT)
        return session->fail(error, "", "a transaction uses the table '" + name + "' in the host",
                             false);
    if (error && error != HA_ERR_NO_SUCH_TABLE)
        return session->fail(error, "cannot drop the table in the host: ", session->last_text(),
                             false);
    return error;
}

int ha_millrace::delete_table(const char *name)
{
    return drop_by_name(Session::get(ha_thd()), table_name(name));
}

int ha_millrace::rename_table(const char *from, const char *to)
{
    std::string old_name = table_name(from), new_name = table_name(to);
    Op op;
    op.kind = op::RENAME;
    op.key = Slice(reinterpret_cast<const uint8_t *>(old_name.data()), old_name.size());
    op.value = Slice(reinterpret_cast<const uint8_t *>(new_name.data()), new_name.size());
    Bytes body;
    return Session::get(ha_thd())->send_alone(op, false, false, &body, nullptr);
}

int ha_millrace::truncate()
{
    Op op;
    op.kind = op::TRUNCATE;
    op.table = share_->table();
    Bytes body;
    int error = session()->send_alone(op, false, false, &body, nullptr);
    if (!error)
        share_->forget_counters();
    return error;
}

int ha_millrace::reset_auto_increment(ulonglong value)
{
    return value > 1 ? share_->set_auto(session(), value) : 0;
}

int ha_millrace::analyze(THD *, HA_CHECK_OPT *)
{
    return info(HA_STATUS_VARIABLE | HA_STATUS_CONST) ? HA_ADMIN_FAILED : HA_ADMIN_OK;
}

int ha_millrace::optimize(THD *, HA_CHECK_OPT *)
{
    return HA_ADMIN_OK; /* the host compacts its log itself */
}

/* Checks a table: reads all of it through each index and counts. */
int ha_millrace::check(THD *thd, HA_CHECK_OPT *)
{
    ha_rows counted[MAX_KEY + 1];
    uint passes = table_share->keys + 1;
    for (uint pass = 0; pass < passes; pass++) {
        bool is_scan = pass == 0;
        int error = is_scan ? ha_rnd_init(true) : ha_index_init(pass - 1, true);
        if (error)
            return HA_ADMIN_FAILED;
        counted[pass] = 0;
        error = is_scan ? rnd_next(table->record[0]) : index_first(table->record[0]);
        while (!error && !thd->killed) {
            counted[pass]++;
            error = is_scan ? rnd_next(table->record[0]) : index_next(table->record[0]);
        }
        is_scan ? ha_rnd_end() : ha_index_end();
        if (error != HA_ERR_END_OF_FILE)
            return HA_ADMIN_CORRUPT;
        if (counted[pass] != counted[0]) {
            session()->fail(HA_ERR_CRASHED, "",
                            std::string("key '") + table->key_info[pass - 1].name.str + "' has " +
                                std::to_string(counted[pass]) + " entries for " +
                                std::to_string(counted[0]) + " rows",
                            false);
            return HA_ADMIN_CORRUPT;
        }
    }
    return HA_ADMIN_OK;
}

bool ha_millrace::check_if_incompatible_data(HA_CREATE_INFO *info, uint changes)
{
    bool is_same = changes == IS_EQUAL_YES && !(info->used_fields & HA_CREATE_USED_AUTO);
    return is_same ? COMPATIBLE_DATA_YES : COMPATIBLE_DATA_NO;
}

void ha_millrace::update_create_info(HA_CREATE_INFO *info)
{
    if (!(info->used_fields & HA_CREATE_USED_AUTO) && table->found_next_number_field) {
        if (share_->needs_largest())
            find_largest_auto();
        info->auto_increment_value = share_->next_auto();
    }
}

} // namespace millrace
