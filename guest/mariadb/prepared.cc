// SPDX-License-Identifier: GPL-2.0-only
/* Transactions that are prepared, and their ends.
 *
 * What was decided for one of them is in the binary log, and must reach the host even if it
 * cannot be reached now: the sessions that come try again. After a crash of this server its
 * recovery does. Until then no other transaction of that name is prepared, or the late word
 * would be about the wrong one. */
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

/* End that the host has not confirmed. The session that has taken one asks the host without the
 * lock. */
struct Unfinished {
    Bytes name;
    std::string address; /* of the store that has it */
    bool is_commit = false;
    bool is_taken = false;
};
static std::mutex unfinished_lock;
static std::condition_variable unfinished_changed;
static std::list<Unfinished> unfinished;
static std::atomic<size_t> unfinished_count{0};

size_t count_unfinished() { return unfinished_count; }

static void add_unfinished(const Bytes &name, const std::string &address, bool is_commit)
{
    std::lock_guard<std::mutex> guard(unfinished_lock);
    unfinished.emplace_back();
    Unfinished &one = unfinished.back();
    one.name.assign(name);
    one.address = address;
    one.is_commit = is_commit;
    unfinished_count = unfinished.size();
}

/* Takes an end of this store that no other session has taken; null: none. */
static Unfinished *take_unfinished(const std::string &address)
{
    std::lock_guard<std::mutex> guard(unfinished_lock);
    for (Unfinished &one : unfinished)
        if (!one.is_taken && one.address == address) {
            one.is_taken = true;
            return &one;
        }
    return nullptr;
}

static void give_back(Unfinished *taken, bool is_done)
{
    std::lock_guard<std::mutex> guard(unfinished_lock);
    taken->is_taken = false;
    if (is_done)
        unfinished.remove_if([taken](const Unfinished &one) { return &one == taken; });
    unfinished_count = unfinished.size();
    unfinished_changed.notify_all();
}

/* Whether the host has confirmed it. */
bool Session::finish(Unfinished *taken)
{
    bool is_done =
        !end_prepared(taken->is_commit, taken->name, true) || last_status_ == status::NOT_FOUND;
    give_back(taken, is_done);
    return is_done;
}

void Session::finish_others()
{
    if (unfinished_count == 0)
        return;
    for (;;) {
        Unfinished *taken = take_unfinished(client_->address());
        if (!taken || !finish(taken))
            return;
    }
}

/* Waits for the end of an earlier transaction of that name. */
int Session::free_name(const Bytes &name)
{
    while (unfinished_count != 0) {
        Unfinished *taken = nullptr;
        {
            std::unique_lock<std::mutex> guard(unfinished_lock);
            auto is_it = [&](const Unfinished &one) {
                return one.address == client_->address() && one.name.equals(name);
            };
            auto found = std::find_if(unfinished.begin(), unfinished.end(), is_it);
            if (found == unfinished.end())
                return 0;
            if (found->is_taken) {
                unfinished_changed.wait_for(guard, std::chrono::milliseconds(100));
            } else {
                taken = &*found;
                taken->is_taken = true;
            }
        }
        if (taken && !finish(taken))
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
        add_unfinished(xid_, client_->address(), is_commit);
        sql_print_warning(
            "MILLRACE: the host has not confirmed the %s of a prepared transaction; it is tried again: %s",
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
    int error = free_name(xid_);
    if (error)
        return error;
    Op op;
    op.kind = op::PREPARE;
    op.key = Slice(xid_);
    batch_.add(op);
    Sending sending;
    sending.all_or_nothing = true;
    Reply reply;
    counters.prepares++;
    error = send(sending, &reply_, &reply);
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
