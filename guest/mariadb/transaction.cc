// SPDX-License-Identifier: GPL-2.0-only
/* Ends of statements and transactions. */
#include "session.h"
#include "settings.h"

namespace millrace {

/* Ends a transaction without writes: the host is told without a wait, unless others may wait for
 * its locks. */
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
    KillCheck kill_check;
    Bytes body = batch.take(tx, 0, 0);
    if (had_locks)
        client_->call(std::move(body), 0, kill_check, &reply_);
    else
        client_->post(std::move(body), 0, kill_check);
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
    SendOptions options;
    options.all_or_nothing = true;
    Reply reply;
    counters.commits++;
    int error = send(options, &reply_, &reply);
    if (error)
        end_read_only();
    else
        reset_transaction();
    return error;
}

/* Ends a statement without an error; the transaction goes on. Writes that the server has logged can
 * no longer fail alone. */
int Session::end_statement()
{
    int error = 0;
    if (has_pending_writes_ && has_only_inserts_ && buffers_transaction()) {
        has_buffered_ = true;
        marks_.clear(); /* the writers may be destroyed before the rows are sent */
    } else {
        error = flush();
    }
    if (error && !is_lost_)
        lose_transaction(error);
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
        has_pending_writes_ = has_buffered_;
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

void Session::end()
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
    KillCheck kill_check = {nullptr, nullptr};
    CallResult call = client_->call(batch.take(tx_, flags, 0), 0, kill_check, &reply_);
    if (call != CallResult::DONE)
        return handle_call_failure(call, false);
    Reply reply;
    if (!reply.parse(reply_) || reply.status != status::OK)
        return fail(HA_ERR_INTERNAL_ERROR, "", "the host takes no snapshot", false);
    is_begun_ = true;
    return 0;
}

} // namespace millrace
