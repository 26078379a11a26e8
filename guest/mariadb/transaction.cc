// SPDX-License-Identifier: GPL-2.0-only
/* The ends of statements and transactions. */
#include "session.h"
#include "settings.h"

#include <mutex>

namespace millrace {

void pack_xid(const XID *xid, Bytes *name)
{
    U64 numbers[3];
    numbers[0] = static_cast<uint64_t>(xid->formatID);
    numbers[1] = static_cast<uint64_t>(xid->gtrid_length);
    numbers[2] = static_cast<uint64_t>(xid->bqual_length);
    name->clear();
    name->append(numbers, sizeof(numbers));
    name->append(xid->data, static_cast<size_t>(xid->gtrid_length + xid->bqual_length));
}

bool unpack_xid(Slice name, XID *xid)
{
    U64 numbers[3];
    if (name.size < sizeof(numbers))
        return false;
    memcpy(numbers, name.data, sizeof(numbers));
    uint64_t global = numbers[1], branch = numbers[2];
    if (global > MAXGTRIDSIZE || branch > MAXBQUALSIZE || name.size - sizeof(numbers) != global + branch)
        return false;
    xid->set(static_cast<long>(static_cast<uint64_t>(numbers[0])),
             reinterpret_cast<const char *>(name.data) + sizeof(numbers), static_cast<long>(global),
             reinterpret_cast<const char *>(name.data) + sizeof(numbers) + global, static_cast<long>(branch));
    return true;
}

/* Nothing was written: the host is told, and nobody waits, unless somebody may wait for the locks. */
void Session::end_read_only()
{
    bool is_open = is_begun_ && !has_ended_ && !is_unknown_, had_locks = has_locks_ || has_written_;
    bool was_unknown = is_unknown_;
    uint64_t tx = tx_;
    reset_transaction();
    if (was_unknown)
        client_->restart();
    if (!is_open)
        return;
    Op op;
    op.kind = op::ROLLBACK;
    Batch batch;
    batch.add(op);
    counters.batches++;
    Killed killed;
    Bytes body = batch.take(tx, 0, 0);
    if (had_locks)
        client_->call(std::move(body), 0, killed, &reply_);
    else
        client_->post(std::move(body), 0, killed);
}

/* What was decided for a prepared transaction is in the binary log, and must reach the host even if it cannot
 * be reached now: the sessions that come try again. After a crash of this server its recovery does. */
struct Unfinished {
    Bytes name;
    bool is_commit;
};
static std::mutex unfinished_lock;
static std::vector<Unfinished> unfinished;
static std::atomic<size_t> unfinished_count{0};

int Session::finish_prepared(bool is_commit)
{
    int error = end_prepared(is_commit, xid_, false);
    if (error && last_status_ != status::NOT_FOUND) {
        std::lock_guard<std::mutex> guard(unfinished_lock);
        unfinished.emplace_back();
        unfinished.back().name.assign(xid_);
        unfinished.back().is_commit = is_commit;
        unfinished_count = unfinished.size();
        sql_print_warning(
            "MILLRACE: the host has not confirmed the %s of a prepared transaction; it is tried again: %s",
            is_commit ? "commit" : "rollback", last_text_.c_str());
    }
    reset_transaction();
    return error;
}

void Session::finish_others()
{
    if (unfinished_count == 0)
        return;
    std::lock_guard<std::mutex> guard(unfinished_lock);
    while (!unfinished.empty()) {
        const Unfinished &one = unfinished.back();
        if (end_prepared(one.is_commit, one.name, true) && last_status_ != status::NOT_FOUND)
            break;
        unfinished.pop_back();
    }
    unfinished_count = unfinished.size();
}

int Session::commit_transaction()
{
    if (is_prepared_) {
        counters.commits++;
        return finish_prepared(true);
    }
    if (is_lost_) {
        end_read_only();
        return fail(HA_ERR_ROLLBACK, "", "the transaction was rolled back", false);
    }
    if (!has_written_) {
        end_read_only();
        return 0;
    }
    Op op;
    op.kind = op::COMMIT;
    op.flags = is_durable(thd_) ? 0 : op_flag::RELAXED;
    batch_.add(op);
    Sending sending;
    sending.all_or_nothing = true;
    Reply reply;
    counters.commits++;
    int error = send(sending, &reply_, &reply);
    if (error)
        end_read_only();
    else
        reset_transaction();
    return error;
}

/* The statement has ended well, the transaction goes on. What the server has already written to its log
 * cannot fail alone any more. */
int Session::end_statement()
{
    int error = flush();
    if (error && !is_lost_)
        lose(error);
    bool was_reported = is_reported_;
    reset_statement();
    is_reported_ = was_reported;
    return error;
}

int Session::commit(bool all) { return all || !is_long() ? commit_transaction() : end_statement(); }

int Session::rollback(bool all)
{
    counters.rollbacks++;
    if (!all && is_long()) {
        if (is_lost_)
            return 0;
        batch_.cut(statement_ops_, statement_bytes_);
        marks_.clear();
        has_pending_writes_ = false;
        if (statement_savepoint_ && is_savepoint_sent_)
            roll_back_to(statement_savepoint_);
        reset_statement();
        return 0;
    }
    if (is_prepared_)
        return finish_prepared(false);
    end_read_only();
    return 0;
}

int Session::prepare(bool all)
{
    if (!all && is_long())
        return end_statement();
    bool is_explicit = thd_->transaction->xid_state.is_explicit_XA();
    if (!has_written_ && !is_explicit)
        return 0;
    XID xid;
    thd_get_xid(thd_, reinterpret_cast<MYSQL_XID *>(&xid));
    pack_xid(&xid, &xid_);
    Op op;
    op.kind = op::PREPARE;
    op.key = Slice(xid_);
    batch_.add(op);
    Sending sending;
    sending.all_or_nothing = true;
    Reply reply;
    counters.prepares++;
    int error = send(sending, &reply_, &reply);
    if (error) {
        if (has_ended_)
            reset_transaction();
        return error;
    }
    reset_transaction();
    is_prepared_ = true;
    return 0;
}

int Session::end_prepared(bool is_commit, const Bytes &name, bool is_quiet)
{
    last_status_ = status::OK;
    Op op;
    op.kind = is_commit ? op::COMMIT_PREPARED : op::ROLLBACK_PREPARED;
    op.key = Slice(name);
    return send_alone(op, false, is_quiet, &reply_, nullptr);
}

void Session::leave()
{
    if (is_prepared_)
        reset_transaction(); /* it belongs to nobody, and waits for XA COMMIT */
    end_read_only();
}

int Session::start_snapshot()
{
    if (thd_tx_isolation(thd_) < ISO_REPEATABLE_READ || is_begun_)
        return 0;
    tx_ = client_->next_tx();
    Batch batch;
    uint16_t flags = static_cast<uint16_t>(batch_flags() | batch_flag::NEW_SNAPSHOT);
    counters.batches++;
    Killed killed = {nullptr, nullptr};
    Call call = client_->call(batch.take(tx_, flags, 0), 0, killed, &reply_);
    if (call != Call::DONE)
        return sent_badly(call, false);
    Reply reply;
    if (!reply.parse(reply_) || reply.status != status::OK)
        return fail(HA_ERR_INTERNAL_ERROR, "", "the host takes no snapshot", false);
    is_begun_ = true;
    return 0;
}

} // namespace millrace
