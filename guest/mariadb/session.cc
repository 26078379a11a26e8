// SPDX-License-Identifier: GPL-2.0-only
#include "session.h"

#include <mutex>

#include "settings.h"

namespace millrace {

Session *Session::find(THD *thd) { return static_cast<Session *>(thd_get_ha_data(thd, hton)); }

Session *Session::get(THD *thd)
{
    Session *session = find(thd);
    if (!session) {
        session = new Session(thd);
        thd_set_ha_data(thd, hton, session);
    }
    session->set_thd(thd);
    return session;
}

Session::Session(THD *thd) : thd_(thd), client_(take_client(get_host_endpoint(), reconnect_ms())) {}

Session::~Session()
{
    if (is_unknown_)
        client_->restart();
    return_client(client_, pool_size());
}

static bool is_killed(void *thd)
{
    return thd && thd_kill_level(static_cast<THD *>(thd)) != THD_IS_NOT_KILLED;
}

bool Session::is_long() const
{
    return thd_ && thd_test_options(thd_, OPTION_NOT_AUTOCOMMIT | OPTION_BEGIN) != 0;
}

int Session::enter_statement(THD *thd)
{
    thd_ = thd;
    if (!is_in_statement_) {
        reset_statement();
        is_in_statement_ = true;
        finish_pending_ends();
    }
    trans_register_ha(thd, false, hton, 0);
    if (is_long())
        trans_register_ha(thd, true, hton, 0);
    return 0;
}

void Session::reset_statement()
{
    is_in_statement_ = false;
    has_statement_snapshot_ = false;
    is_savepoint_sent_ = false;
    is_reported_ = false;
    has_only_inserts_ = true;
    statement_savepoint_ = 0;
    statement_ops_ = batch_.ops();
    statement_bytes_ = batch_.bytes();
}

void Session::reset_transaction()
{
    batch_.clear();
    marks_.clear();
    table_locks_.clear();
    tx_ = last_savepoint_ = 0;
    is_begun_ = has_written_ = has_locks_ = is_prepared_ = has_pending_writes_ = has_buffered_ =
        false;
    is_lost_ = has_ended_ = is_unknown_ = false;
    bool was_reported = is_reported_;
    reset_statement();
    is_reported_ = was_reported;
}

/* --- what is added to the batch --- */

int Session::begin_write(bool is_insert)
{
    if (is_lost_)
        return fail(HA_ERR_ROLLBACK, "", "the transaction was rolled back", false);
    if (is_long() && statement_savepoint_ == 0) {
        savepoint_op_ = batch_.ops();
        statement_savepoint_ = set_savepoint();
    }
    has_written_ = has_pending_writes_ = true;
    has_only_inserts_ &= is_insert;
    return 0;
}

uint64_t Session::set_savepoint()
{
    Op op;
    op.kind = op::SAVEPOINT;
    op.extra = ++last_savepoint_;
    batch_.add(op);
    return op.extra;
}

void Session::roll_back_to(uint64_t savepoint)
{
    Op op;
    op.kind = op::ROLLBACK_TO;
    op.extra = savepoint;
    batch_.add(op);
}

void Session::lock_table(uint32_t table, bool is_exclusive)
{
    auto known = table_locks_.find(table);
    if (known != table_locks_.end() && (known->second || !is_exclusive))
        return;
    table_locks_[table] = is_exclusive;
    Op op;
    op.kind = op::LOCK;
    op.table = table;
    op.flags = is_exclusive ? op_flag::EXCLUSIVE : op_flag::SHARED;
    batch_.add(op);
    has_locks_ = true;
}

void Session::forget(const Writer *writer)
{
    for (const Mark &mark : marks_)
        if (mark.writer == writer) {
            flush();
            break;
        }
    for (Mark &mark : marks_)
        if (mark.writer == writer)
            mark.writer = nullptr;
}

/* --- sending --- */

uint16_t Session::batch_flags()
{
    uint16_t flags = 0;
    if (!is_begun_)
        flags |= batch_flag::BEGIN;
    else if (!has_statement_snapshot_ && thd_ && thd_tx_isolation(thd_) <= ISO_READ_COMMITTED)
        flags |= batch_flag::NEW_SNAPSHOT;
    if (thd_ && is_strict(thd_))
        flags |= batch_flag::STRICT;
    has_statement_snapshot_ = true;
    return flags;
}

int Session::send(const SendOptions &options, Bytes *body, Reply *reply)
{
    if (is_lost_)
        return fail(HA_ERR_ROLLBACK, "", "the transaction was rolled back", options.is_quiet);
    if (tx_ == 0 && !options.is_alone)
        tx_ = client_->next_tx();
    uint16_t flags = options.is_alone ? 0 : batch_flags();
    if (options.all_or_nothing)
        flags |= batch_flag::ALL_OR_NOTHING;
    counters.batches++;
    counters.ops += batch_.ops();
    Bytes request =
        batch_.take(options.is_alone ? 0 : tx_, flags, thd_ ? lock_wait_ms(thd_) : 50000);
    sent_marks_.swap(marks_);
    marks_.clear();
    bool is_savepoint_new = statement_savepoint_ != 0 && !is_savepoint_sent_;
    is_savepoint_sent_ = statement_savepoint_ != 0;
    has_pending_writes_ = false;
    bool had_buffered = has_buffered_;
    has_buffered_ = false;
    statement_ops_ = 0;
    statement_bytes_ = batch_.bytes();
    KillCheck kill_check = {is_killed, thd_};
    bool is_read = options.is_alone;
    CallResult call =
        client_->call(std::move(request), is_read ? flag::REPEATABLE : 0, kill_check, body);
    batch_.recycle(client_->take_spare_body());
    if (call != CallResult::DONE)
        return handle_call_failure(call, options.is_quiet);
    if (!reply->parse(*body)) {
        is_unknown_ = true;
        lose_transaction(0);
        return fail(HA_ERR_INTERNAL_ERROR, "", "the host's reply makes no sense", options.is_quiet);
    }
    if (!options.is_alone)
        is_begun_ = true;
    last_status_ = reply->status;
    if (reply->status == status::OK)
        return 0;
    /* No op behind the one that failed was executed: no savepoint, no lock. */
    if (is_savepoint_new && savepoint_op_ >= reply->done)
        is_savepoint_sent_ = false;
    table_locks_.clear();
    return had_buffered ? handle_buffered_failure(*reply) : handle_failure(*reply, options);
}

int Session::send_outside(Batch *batch, bool is_repeatable, bool is_quiet, Bytes *body,
                          Reply *reply)
{
    counters.batches++;
    counters.ops += batch->ops();
    KillCheck kill_check = {is_killed, thd_};
    Bytes request = batch->take(0, 0, thd_ ? lock_wait_ms(thd_) : 50000);
    CallResult call =
        client_->call(std::move(request), is_repeatable ? flag::REPEATABLE : 0, kill_check, body);
    if (call != CallResult::DONE)
        return handle_call_failure(call, is_quiet);
    if (!reply->parse(*body))
        return fail(HA_ERR_INTERNAL_ERROR, "", "the host's reply makes no sense", is_quiet);
    last_status_ = reply->status;
    if (reply->status == status::OK)
        return 0;
    std::string text(reinterpret_cast<const char *>(reply->text.data), reply->text.size);
    return handle_status(reply->status, text, is_quiet);
}

int Session::send_alone(const Op &op, bool is_repeatable, bool is_quiet, Bytes *body,
                        Answer *answer)
{
    Batch batch;
    batch.add(op);
    Reply reply;
    int error = send_outside(&batch, is_repeatable, is_quiet, body, &reply);
    if (!error && answer && !reply.next(answer) && !(reply.flags & reply_flag::REPLAYED))
        return fail(HA_ERR_INTERNAL_ERROR, "", "the host's reply lacks an answer", is_quiet);
    return error;
}

/* Whether the host takes filters. A store has one version for all its life, which is requested once
 * for all sessions. */
bool Session::can_filter()
{
    static std::mutex lock;
    static uint64_t known_instance;
    static uint32_t known_version;
    {
        std::lock_guard<std::mutex> guard(lock);
        if (client_->instance() && client_->instance() == known_instance)
            return known_version >= FILTER_VERSION;
    }
    Op op;
    op.kind = op::SPEAKS;
    Bytes body;
    Answer answer;
    Speaks speaks;
    uint32_t version = 0;
    if (!send_alone(op, true, true, &body, &answer) && answer.bytes.size >= sizeof(speaks)) {
        memcpy(&speaks, answer.bytes.data, sizeof(speaks));
        version = speaks.version;
    } else if (last_status_ != status::BAD_REQUEST) {
        return false; /* no answer */
    }
    std::lock_guard<std::mutex> guard(lock);
    known_instance = client_->instance();
    known_version = version;
    return version >= FILTER_VERSION;
}

int Session::flush()
{
    if (!has_pending_writes_)
        return 0;
    SendOptions options;
    options.all_or_nothing = has_buffered_;
    Reply reply;
    return send(options, &reply_, &reply);
}

bool Session::buffers_transaction() const
{
    return thd_ && is_long() && millrace::buffers_transaction(thd_);
}

int Session::flush_buffered() { return has_buffered_ ? flush() : 0; }

/* --- errors --- */

int Session::fail(int error, const char *prefix, const std::string &text, bool is_quiet)
{
    last_text_ = prefix + text;
    if (is_quiet)
        return error;
    is_reported_ = true;
    my_printf_error(ER_GET_ERRMSG, "MILLRACE: %s%s", MYF(0), prefix, text.c_str());
    return error;
}

/* Handles a transaction that the host has lost, or whose state is not known. */
int Session::lose_transaction(int error)
{
    is_lost_ = true;
    batch_.clear();
    marks_.clear();
    has_pending_writes_ = false;
    if (thd_)
        thd_->mark_transaction_to_rollback(true);
    return error;
}

int Session::handle_call_failure(CallResult call, bool is_quiet)
{
    bool was_open = tx_ != 0;
    is_unknown_ = true;
    if (was_open)
        lose_transaction(0);
    if (call == CallResult::KILLED) {
        is_reported_ = false;
        return HA_ERR_ABORTED_BY_USER;
    }
    const char *end =
        was_open
            ? "; the transaction is rolled back, unless it was just committed: then its outcome "
              "is not known"
            : "";
    return fail(call == CallResult::FAILED ? HA_ERR_INTERNAL_ERROR : HA_ERR_NO_CONNECTION, "",
                client_->error() + end, is_quiet);
}

int Session::handle_duplicate(const Reply &reply, const SendOptions &options)
{
    Op op, first;
    const Mark *mark = nullptr;
    for (const Mark &m : sent_marks_)
        if (m.op <= reply.done)
            mark = &m;
    if (!mark || !mark->writer || !Batch::find(client_->last_body(), reply.done, &op) ||
        !Batch::find(client_->last_body(), mark->op, &first))
        return fail(HA_ERR_FOUND_DUPP_KEY, "", "duplicate key", options.is_quiet);
    if (options.writer == mark->writer && mark == &sent_marks_.back()) {
        mark->writer->note_duplicate(op);
        return HA_ERR_FOUND_DUPP_KEY;
    }
    mark->writer->report_duplicate(op, first);
    is_reported_ = true;
    return HA_ERR_FOUND_DUPP_KEY;
}

/* Handles the failure of a row of an earlier statement, which has ended without an error: the
 * transaction fails, and no handler takes it for an error of its own row. */
int Session::handle_buffered_failure(const Reply &reply)
{
    if (reply.status != status::EXISTS) {
        SendOptions options;
        options.all_or_nothing = true;
        return handle_failure(reply, options);
    }
    has_ended_ = reply.flags & reply_flag::ENDED;
    is_reported_ = true;
    my_printf_error(
        ER_DUP_ENTRY,
        "MILLRACE: duplicate entry in a row that an earlier statement of this transaction "
        "inserted (millrace_buffer_transactions); the transaction was rolled back",
        MYF(0));
    return lose_transaction(HA_ERR_ROLLBACK);
}

int Session::handle_failure(const Reply &reply, const SendOptions &options)
{
    bool has_ended = reply.flags & reply_flag::ENDED;
    if (!options.is_alone)
        has_ended_ = has_ended;
    if (reply.status == status::EXISTS) {
        int error = handle_duplicate(reply, options);
        return has_ended && !options.all_or_nothing ? lose_transaction(error) : error;
    }
    std::string text(reinterpret_cast<const char *>(reply.text.data), reply.text.size);
    int error = handle_status(reply.status, text, options.is_quiet);
    bool is_fatal = reply.status == status::DEADLOCK || reply.status == status::CONFLICT ||
                    reply.status == status::LOST;
    return (has_ended || is_fatal) && !options.is_alone ? lose_transaction(error) : error;
}

int Session::handle_status(uint16_t status, const std::string &text, bool is_quiet)
{
    struct Meaning {
        uint16_t status;
        int error;
        uint sql;
    };
    static const Meaning meanings[] = {
        {status::DEADLOCK, HA_ERR_LOCK_DEADLOCK, ER_LOCK_DEADLOCK},
        {status::TIMEOUT, HA_ERR_LOCK_WAIT_TIMEOUT, ER_LOCK_WAIT_TIMEOUT},
        {status::CONFLICT, HA_ERR_RECORD_CHANGED, ER_CHECKREAD},
        {status::CANCELLED, HA_ERR_ABORTED_BY_USER, 0},
        {status::LOST, HA_ERR_ROLLBACK, 0},
        {status::NO_TABLE, HA_ERR_NO_SUCH_TABLE, 0},
        {status::TABLE_EXISTS, HA_ERR_TABLE_EXIST, 0},
        {status::BUSY, HA_ERR_LOCK_WAIT_TIMEOUT, 0},
        {status::LIMIT, HA_ERR_TO_BIG_ROW, 0},
        {status::NO_SPACE, HA_ERR_RECORD_FILE_FULL, 0},
    };
    for (const Meaning &meaning : meanings) {
        if (meaning.status != status)
            continue;
        if (status == status::CANCELLED)
            return meaning.error;
        if (meaning.sql && !is_quiet) {
            is_reported_ = true;
            if (meaning.sql == ER_CHECKREAD)
                my_error(ER_CHECKREAD, MYF(0), "a MILLRACE table");
            else
                my_error(meaning.sql, MYF(0));
            return meaning.error;
        }
        const char *note = status == status::LOST
                               ? " (the transaction was rolled back: the host's store was "
                                 "replaced, or ended it)"
                               : "";
        return fail(meaning.error, "",
                    std::string(status_name(status)) + (text.empty() ? "" : ": ") + text + note,
                    is_quiet);
    }
    return fail(HA_ERR_INTERNAL_ERROR, "",
                std::string(status_name(status)) + (text.empty() ? "" : ": ") + text, is_quiet);
}

} // namespace millrace
