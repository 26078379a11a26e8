// SPDX-License-Identifier: GPL-2.0-only
/* Transactions that are prepared, and their ends.
 *
 * The decision for a prepared transaction is in the binary log, and must reach the host even if the
 * host cannot be reached now: later sessions try again. After a crash of this server its recovery
 * does. Until then no other transaction of that name is prepared, or the late end would be applied
 * to the wrong one. */
#include "session.h"
#include "settings.h"

#include <algorithm>
#include <condition_variable>
#include <list>
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
    if (global > MAXGTRIDSIZE || branch > MAXBQUALSIZE ||
        name.size - sizeof(numbers) != global + branch)
        return false;
    xid->set(static_cast<long>(static_cast<uint64_t>(numbers[0])),
             reinterpret_cast<const char *>(name.data) + sizeof(numbers), static_cast<long>(global),
             reinterpret_cast<const char *>(name.data) + sizeof(numbers) + global,
             static_cast<long>(branch));
    return true;
}

/* End of a prepared transaction that the host has not confirmed. The session that has taken it
 * calls the host without the lock. */
struct PendingEnd {
    Bytes name;
    std::string address; /* of the store that has it */
    bool is_commit = false;
    bool is_taken = false;
};
static std::mutex pending_ends_lock;
static std::condition_variable pending_ends_changed;
static std::list<PendingEnd> pending_ends;
static std::atomic<size_t> pending_end_count{0};

size_t count_pending_ends() { return pending_end_count; }

static void add_pending_end(const Bytes &name, const std::string &address, bool is_commit)
{
    std::lock_guard<std::mutex> guard(pending_ends_lock);
    pending_ends.emplace_back();
    PendingEnd &end = pending_ends.back();
    end.name.assign(name);
    end.address = address;
    end.is_commit = is_commit;
    pending_end_count = pending_ends.size();
}

/* Takes an end of this store that no other session has taken; null: none. */
static PendingEnd *take_pending_end(const std::string &address)
{
    std::lock_guard<std::mutex> guard(pending_ends_lock);
    for (PendingEnd &end : pending_ends)
        if (!end.is_taken && end.address == address) {
            end.is_taken = true;
            return &end;
        }
    return nullptr;
}

static void return_pending_end(PendingEnd *end, bool is_done)
{
    std::lock_guard<std::mutex> guard(pending_ends_lock);
    end->is_taken = false;
    if (is_done)
        pending_ends.remove_if([end](const PendingEnd &other) { return &other == end; });
    pending_end_count = pending_ends.size();
    pending_ends_changed.notify_all();
}

/* Sends an end to the host. Returns whether the host has confirmed it. */
bool Session::finish_end(PendingEnd *end)
{
    bool is_done =
        !end_prepared(end->is_commit, end->name, true) || last_status_ == status::NOT_FOUND;
    return_pending_end(end, is_done);
    return is_done;
}

void Session::finish_pending_ends()
{
    if (pending_end_count == 0)
        return;
    for (;;) {
        PendingEnd *end = take_pending_end(client_->address());
        if (!end || !finish_end(end))
            return;
    }
}

/* Waits for the end of an earlier transaction of that name. */
int Session::wait_for_name(const Bytes &name)
{
    while (pending_end_count != 0) {
        PendingEnd *end = nullptr;
        {
            std::unique_lock<std::mutex> guard(pending_ends_lock);
            auto is_match = [&](const PendingEnd &other) {
                return other.address == client_->address() && other.name.equals(name);
            };
            auto found = std::find_if(pending_ends.begin(), pending_ends.end(), is_match);
            if (found == pending_ends.end())
                return 0;
            if (found->is_taken) {
                pending_ends_changed.wait_for(guard, std::chrono::milliseconds(100));
            } else {
                end = &*found;
                end->is_taken = true;
            }
        }
        if (end && !finish_end(end))
            return fail(HA_ERR_NO_CONNECTION, "",
                        "the host has not confirmed the end of an earlier transaction of this name",
                        false);
        if (thd_ && thd_kill_level(thd_) != THD_IS_NOT_KILLED)
            return HA_ERR_ABORTED_BY_USER;
    }
    return 0;
}

int Session::finish_prepared(bool is_commit)
{
    int error = end_prepared(is_commit, xid_, false);
    if (error && last_status_ != status::NOT_FOUND) {
        add_pending_end(xid_, client_->address(), is_commit);
        sql_print_warning(
            "MILLRACE: the host has not confirmed the %s of a prepared transaction; "
            "it is tried again: %s",
            is_commit ? "commit" : "rollback", last_text_.c_str());
    }
    reset_transaction();
    return error;
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
    int error = wait_for_name(xid_);
    if (error)
        return error;
    Op op;
    op.kind = op::PREPARE;
    op.key = Slice(xid_);
    batch_.add(op);
    SendOptions options;
    options.all_or_nothing = true;
    Reply reply;
    counters.prepares++;
    error = send(options, &reply_, &reply);
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

} // namespace millrace
