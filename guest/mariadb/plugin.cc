// SPDX-License-Identifier: GPL-2.0-only
/* Interface to the server: the engine's handlerton, system variables and status. */
#include "ha_millrace.h"

#include <mysql/plugin.h>

#include "settings.h"
#include "status.h"
#include "transport.h"

namespace millrace {

handlerton *hton;

/* --- system variables --- */

static char *address;
static char *ring;
static ulong spin_us;
static ulong reconnect_timeout;
static ulong max_pool;

static int check_address(THD *, st_mysql_sys_var *, void *save, st_mysql_value *value)
{
    char buffer[256];
    int length = sizeof(buffer);
    const char *text = value->val_str(value, buffer, &length);
    if (!text || !is_address(text))
        return 1;
    *static_cast<const char **>(save) = thd_strmake(current_thd, text, static_cast<size_t>(length));
    return 0;
}

static MYSQL_SYSVAR_STR(
    address, address, PLUGIN_VAR_RQCMDARG | PLUGIN_VAR_MEMALLOC,
    "Where the host listens: vsock:CID:PORT or unix:/path. Sessions that begin afterwards "
    "use a new one",
    check_address, nullptr, "vsock:2:28019");
static MYSQL_SYSVAR_STR(
    ring, ring, PLUGIN_VAR_RQCMDARG | PLUGIN_VAR_MEMALLOC,
    "Memory that is shared with the host, used in place of sockets: AUTO looks for the "
    "device, OFF does without, any other text is a file. Sessions that begin afterwards "
    "use a new one",
    nullptr, nullptr, "auto");
static MYSQL_SYSVAR_ULONG(
    spin_us, spin_us, PLUGIN_VAR_RQCMDARG,
    "How many microseconds a session looks at that memory, at most, before it sleeps", nullptr,
    nullptr, 50, 0, 10000, 0);
static MYSQL_SYSVAR_ULONG(
    reconnect_timeout, reconnect_timeout, PLUGIN_VAR_RQCMDARG,
    "How many seconds a broken connection to the host is tried again before statements fail",
    nullptr, nullptr, 30, 1, 3600, 0);
static MYSQL_SYSVAR_ULONG(pool_size, max_pool, PLUGIN_VAR_RQCMDARG,
                          "How many idle connections to the host are kept for sessions that come",
                          nullptr, nullptr, 32, 0, 1024, 0);
static MYSQL_THDVAR_BOOL(
    durable, PLUGIN_VAR_RQCMDARG,
    "Commits wait until they are durable. OFF: they may be lost when the host fails, never "
    "in part or out of order",
    nullptr, nullptr, 1);
static MYSQL_THDVAR_BOOL(
    snapshot_isolation, PLUGIN_VAR_RQCMDARG,
    "A lock of a row that somebody changed after the transaction's snapshot fails", nullptr,
    nullptr, 0);
static MYSQL_THDVAR_BOOL(
    buffer_writes, PLUGIN_VAR_RQCMDARG,
    "Rows are sent at the end of the statement, together. OFF: each one at once", nullptr, nullptr,
    1);
static MYSQL_THDVAR_BOOL(
    buffer_transactions, PLUGIN_VAR_RQCMDARG,
    "Rows of INSERTs in a transaction are sent together at its end, or before the next "
    "read. Duplicates are found then, and roll the transaction back",
    nullptr, nullptr, 0);
static MYSQL_THDVAR_BOOL(
    condition_pushdown, PLUGIN_VAR_RQCMDARG,
    "The host checks conditions that it can check, so that only rows which may match are "
    "sent",
    nullptr, nullptr, 1);
static MYSQL_THDVAR_ULONG(lock_wait_timeout, PLUGIN_VAR_RQCMDARG,
                          "How many seconds a lock is waited for", nullptr, nullptr, 50, 0, 1000000,
                          0);
static MYSQL_THDVAR_ULONG(batch_bytes, PLUGIN_VAR_RQCMDARG,
                          "Rows wait until there are so many bytes of them", nullptr, nullptr,
                          1 << 20, 1024, 8 << 20, 0);
static MYSQL_THDVAR_ULONG(autoinc_batch, PLUGIN_VAR_RQCMDARG,
                          "How many AUTO_INCREMENT values are reserved at a time", nullptr, nullptr,
                          256, 1, 1000000, 0);

static st_mysql_sys_var *variables[] = {
    MYSQL_SYSVAR(address),
    MYSQL_SYSVAR(ring),
    MYSQL_SYSVAR(spin_us),
    MYSQL_SYSVAR(reconnect_timeout),
    MYSQL_SYSVAR(pool_size),
    MYSQL_SYSVAR(durable),
    MYSQL_SYSVAR(snapshot_isolation),
    MYSQL_SYSVAR(buffer_writes),
    MYSQL_SYSVAR(buffer_transactions),
    MYSQL_SYSVAR(condition_pushdown),
    MYSQL_SYSVAR(lock_wait_timeout),
    MYSQL_SYSVAR(batch_bytes),
    MYSQL_SYSVAR(autoinc_batch),
    nullptr,
};

static std::string normalize_word(const char *text)
{
    for (const char *word : {"auto", "off"})
        if (!text || strcasecmp(text, word) == 0)
            return word;
    return text;
}

/* Copies the settings under the lock: SET GLOBAL frees the old texts. */
Endpoint get_host_endpoint()
{
    Endpoint endpoint;
    mysql_mutex_lock(&LOCK_global_system_variables);
    endpoint.address = address ? address : "";
    endpoint.ring = normalize_word(ring);
    endpoint.spin_us = static_cast<unsigned>(spin_us);
    mysql_mutex_unlock(&LOCK_global_system_variables);
    return endpoint;
}
uint32_t reconnect_ms() { return static_cast<uint32_t>(reconnect_timeout * 1000); }
size_t pool_size() { return max_pool; }
bool is_durable(THD *thd) { return THDVAR(thd, durable); }
bool is_strict(THD *thd) { return THDVAR(thd, snapshot_isolation); }
bool buffers_writes(THD *thd) { return THDVAR(thd, buffer_writes); }
bool buffers_transaction(THD *thd) { return THDVAR(thd, buffer_transactions); }
bool pushes_conditions(THD *thd) { return THDVAR(thd, condition_pushdown); }
size_t batch_bytes(THD *thd) { return THDVAR(thd, batch_bytes); }
uint64_t autoinc_batch(THD *thd) { return THDVAR(thd, autoinc_batch); }
uint32_t lock_wait_ms(THD *thd)
{
    /* NOWAIT sets the server's own timeout to nothing. */
    return thd->variables.lock_wait_timeout == 0
               ? 0
               : static_cast<uint32_t>(THDVAR(thd, lock_wait_timeout) * 1000);
}

/* --- the handlerton --- */

static handler *create_handler(handlerton *engine, TABLE_SHARE *share, MEM_ROOT *root)
{
    return new (root) ha_millrace(engine, share);
}

static int close_connection(handlerton *, THD *thd)
{
    Session *session = Session::find(thd);
    if (!session)
        return 0;
    session->set_thd(thd);
    session->end();
    delete session;
    thd_set_ha_data(thd, hton, nullptr);
    return 0;
}

static int commit(handlerton *, THD *thd, bool all) { return Session::get(thd)->commit(all); }
static int rollback(handlerton *, THD *thd, bool all) { return Session::get(thd)->rollback(all); }
static int prepare(handlerton *, THD *thd, bool all) { return Session::get(thd)->prepare(all); }

static int set_savepoint(handlerton *, THD *thd, void *place)
{
    *static_cast<uint64_t *>(place) = Session::get(thd)->set_savepoint();
    return 0;
}

static int rollback_to_savepoint(handlerton *, THD *thd, void *place)
{
    Session::get(thd)->roll_back_to(*static_cast<uint64_t *>(place));
    return 0;
}

static int release_savepoint(handlerton *, THD *, void *) { return 0; }
/* Row locks stay in the host; a savepoint brings nothing back that metadata locks protect. */
static bool can_release_mdl(handlerton *, THD *) { return true; }

static int start_snapshot(handlerton *, THD *thd)
{
    Session *session = Session::get(thd);
    trans_register_ha(thd, true, hton, 0);
    return session->start_snapshot();
}

static int recover(handlerton *, XID *list, uint max_len)
{
    static size_t list_offset; /* start of the rest of a list that did not fit in the last call */
    Session session(current_thd);
    Op op;
    op.kind = op::LIST_PREPARED;
    Bytes body;
    Answer answer;
    if (session.send_alone(op, true, true, &body, &answer)) {
        sql_print_warning("MILLRACE: the host was not asked for prepared transactions: %s",
                          session.last_text().c_str());
        return 0;
    }
    Rows rows(answer.bytes, answer.rows);
    Row row;
    uint found = 0;
    for (size_t i = 0; found < max_len && rows.next(&row); i++)
        if (i >= list_offset && unpack_xid(row.key, &list[found]))
            found++;
    list_offset = found < max_len ? 0 : list_offset + found;
    return static_cast<int>(found);
}

static int end_by_xid(XID *xid, bool is_commit)
{
    Session session(current_thd);
    Bytes name;
    pack_xid(xid, &name);
    int error = session.end_prepared(is_commit, name, true);
    if (!error)
        return 0;
    if (session.last_status() == status::NOT_FOUND)
        return -4; /* XAER_NOTA: the server asks all engines */
    /* The server goes by the error, not by the return value, and keeps the transaction for
     * another try. */
    session.fail(error, "the host has not confirmed the end of a prepared transaction: ",
                 session.last_text(), false);
    return -7; /* XAER_RMFAIL */
}
static int commit_by_xid(handlerton *, XID *xid) { return end_by_xid(xid, true); }
static int rollback_by_xid(handlerton *, XID *xid) { return end_by_xid(xid, false); }

/* Reports ends that the host has not confirmed, for the last time. */
static void pre_shutdown()
{
    Session session(nullptr);
    session.finish_pending_ends();
}

/* SHOW ENGINE MILLRACE STATUS: for people; programs have SHOW STATUS. */
static bool show_status(handlerton *, THD *thd, stat_print_fn *print, ha_stat_type kind)
{
    if (kind != HA_ENGINE_STATUS)
        return false;
    const std::string text = status_text(Session::get(thd));
    return print(thd, STRING_WITH_LEN("MILLRACE"), STRING_WITH_LEN(""), text.data(), text.size());
}

static int init(void *argument)
{
    hton = static_cast<handlerton *>(argument);
    hton->create = create_handler;
    hton->flags = HTON_NO_FLAGS;
    hton->savepoint_offset = sizeof(uint64_t);
    hton->close_connection = close_connection;
    hton->commit = commit;
    hton->rollback = rollback;
    hton->prepare = prepare;
    hton->recover = recover;
    hton->pre_shutdown = pre_shutdown;
    hton->commit_by_xid = commit_by_xid;
    hton->rollback_by_xid = rollback_by_xid;
    hton->savepoint_set = set_savepoint;
    hton->savepoint_rollback = rollback_to_savepoint;
    hton->savepoint_release = release_savepoint;
    hton->savepoint_rollback_can_release_mdl = can_release_mdl;
    hton->start_consistent_snapshot = start_snapshot;
    hton->show_status = show_status;
    static const char *no_files[] = {nullptr};
    hton->tablefile_extensions = no_files;
    return 0;
}

static int deinit(void *)
{
    drop_pool();
    return 0;
}

static st_mysql_storage_engine interface = {MYSQL_HANDLERTON_INTERFACE_VERSION};

} // namespace millrace

/* All other symbols are hidden: the server, and other plugins, have names of their own. */
#pragma GCC visibility push(default)
maria_declare_plugin(millrace){
    MYSQL_STORAGE_ENGINE_PLUGIN,
    &millrace::interface,
    "MILLRACE",
    "Millrace",
    "Tables in the host's table store: transactions and durable commits in one round trip",
    PLUGIN_LICENSE_GPL,
    millrace::init,
    millrace::deinit,
    0x0100,
    millrace::status_variables,
    millrace::variables,
    "1.0",
    MariaDB_PLUGIN_MATURITY_BETA,
} maria_declare_plugin_end;
#pragma GCC visibility pop
