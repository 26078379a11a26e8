// SPDX-License-Identifier: GPL-2.0-only
/* A session of MariaDB (THD) and its transaction.
 *
 * Theory of operation. Each session that uses the engine has a client of its own, from the pool,
 * and one batch that is being filled. Writes are added to the batch and nothing is sent. It is sent
 * when somebody needs an answer: a read (its ops go behind the writes, in the same request), a
 * write whose statement wants to know of duplicates at once, the end of a statement inside a longer
 * transaction, or when it is full. With autocommit the end of the statement adds COMMIT: BEGIN,
 * rows and COMMIT are one round trip.
 *
 * So an error may come later than the row that caused it. The batch has a mark for each row; a
 * duplicate is reported with its key and value by the table that wrote the row (Writer), and the
 * statement fails at its end.
 *
 * A transaction begins with the first batch that is sent. A statement inside a longer one is rolled
 * back to a savepoint, which is set in front of its first write. After an error that ended the
 * transaction in the host, or with an unknown outcome, everything but a rollback fails (is_lost_).
 *
 * With millrace_buffer_transactions the rows of INSERTs wait beyond the end of their statement, for
 * COMMIT at best. Their statements have been told to be done: should one of the rows fail, so does
 * the transaction.
 *
 * A transaction that has only read ends with a request that nobody waits for. */
#ifndef MILLRACE_SESSION_H
#define MILLRACE_SESSION_H

#include <map>
#include <string>
#include <vector>

#include "server.h"

#include "client.h"
#include "codec.h"

namespace millrace {

/* Writer of rows that are not confirmed yet. */
class Writer {
public:
    /* Reports that the op, of a row that begins with `first`, met an existing key. */
    virtual void report_duplicate(const Op &op, const Op &first) = 0;
    /* Notes the same for a row whose write waits for the answer. */
    virtual void note_duplicate(const Op &op) = 0;

protected:
    ~Writer() = default;
};

/* Prepared transaction whose end the host has not confirmed. */
struct PendingEnd;

/* Settings for sending a batch. */
struct SendOptions {
    bool is_alone = false; /* outside of the transaction: one read, or an op that needs none */
    bool all_or_nothing = false;
    bool is_quiet = false;     /* errors are returned and not reported */
    Writer *writer = nullptr; /* waits for the answer to its last row */
};

class Session {
public:
    static Session *get(THD *thd);
    static Session *find(THD *thd);
    explicit Session(THD *thd);
    ~Session();

    /* Enters a statement that uses a table. */
    int enter_statement(THD *thd);
    bool is_long() const; /* whether the transaction goes on after the statement */
    bool is_alone() const { return tx_ == 0 && batch_.empty() && tables_ == 1 && !is_long(); }
    void count_table(int change) { tables_ += change; }

    /* Adds to the batch, which the next send() sends. */
    uint32_t add(const Op &op) { return batch_.add(op); }
    int begin_write(bool is_insert);
    /* Sends rows of earlier statements in a batch of their own: their errors do not belong to later
     * statements. */
    int flush_buffered();
    /* Whether rows that are inserted may wait for the transaction's end. */
    bool buffers_transaction() const;
    void mark_row(Writer *writer) { marks_.push_back(Mark{batch_.ops(), writer}); }
    void mark_locks() { has_locks_ = true; }
    bool has_room(size_t bytes) const { return batch_.has_room(bytes); }
    size_t batch_bytes() const { return batch_.bytes(); }
    void lock_table(uint32_t table, bool is_exclusive);
    /* Sets a savepoint, so that later ops can be undone alone. Returns its number. */
    uint64_t set_savepoint();
    void roll_back_to(uint64_t savepoint);

    int send(const SendOptions &options, Bytes *body, Reply *reply);
    /* Sends one op outside of the transaction; returns its answer, if it has one. */
    int send_alone(const Op &op, bool is_repeatable, bool is_quiet, Bytes *body, Answer *answer);
    /* Sends a batch outside of the transaction, which waits for nothing. */
    int send_outside(Batch *batch, bool is_repeatable, bool is_quiet, Bytes *body, Reply *reply);
    /* Whether the host takes filters. */
    bool can_filter();
    /* Sends waiting writes, if there are any. */
    int flush();
    /* Drops all unsent ops of `writer`, which is being destroyed. */
    void forget(const Writer *writer);

    /* Calls of the handlerton. `all`: the transaction, else the statement. */
    int commit(bool all);
    int rollback(bool all);
    int prepare(bool all);
    int start_snapshot();
    int end_prepared(bool is_commit, const Bytes &name, bool is_quiet);
    /* Reports the ends of prepared transactions to the host that it did not confirm. */
    void finish_pending_ends();

    THD *thd() const { return thd_; }
    void set_thd(THD *thd) { thd_ = thd; }
    /* Whether the last error was reported to the user already. */
    bool take_reported()
    {
        bool was = is_reported_;
        is_reported_ = false;
        return was;
    }
    int fail(int error, const char *prefix, const std::string &text, bool is_quiet);
    uint16_t last_status() const { return last_status_; }
    const std::string &last_text() const { return last_text_; }
    /* Ends the session with its connection to the server. */
    void end();

private:
    struct Mark {
        uint32_t op;
        Writer *writer;
    };

    uint16_t batch_flags();
    int handle_call_failure(CallResult call, bool is_quiet);
    int handle_failure(const Reply &reply, const SendOptions &options);
    int handle_buffered_failure(const Reply &reply);
    int handle_duplicate(const Reply &reply, const SendOptions &options);
    int handle_status(uint16_t status, const std::string &text, bool is_quiet);
    int lose_transaction(int error);
    int commit_transaction();
    int finish_prepared(bool is_commit);
    bool finish_end(PendingEnd *end);
    int wait_for_name(const Bytes &name);
    int end_statement();
    void end_read_only();
    void reset_transaction();
    void reset_statement();

    THD *thd_;
    Client *client_ = nullptr;
    Batch batch_;
    std::vector<Mark> marks_;
    std::vector<Mark> sent_marks_;
    std::map<uint32_t, bool> table_locks_;
    int tables_ = 0;  /* tables in use by the statement */
    uint64_t tx_ = 0; /* 0: none */
    uint64_t last_savepoint_ = 0;
    uint64_t statement_savepoint_ = 0;
    bool is_begun_ = false; /* begun in the host */
    bool has_written_ = false;
    bool has_locks_ = false;
    bool is_lost_ = false;        /* only a rollback is left */
    bool has_ended_ = false;      /* the host has ended it */
    bool is_unknown_ = false;     /* outcome not known: the client begins anew */
    bool is_prepared_ = false;
    bool is_in_statement_ = false;
    bool has_statement_snapshot_ = false;
    bool is_savepoint_sent_ = false;
    uint32_t savepoint_op_ = 0; /* where statement_savepoint_ is in its batch */
    bool has_pending_writes_ = false;
    bool has_buffered_ = false; /* the batch has rows of earlier statements */
    bool has_only_inserts_ = true; /* the statement has no other writes */
    bool is_reported_ = false;
    uint16_t last_status_ = 0;
    uint32_t statement_ops_ = 0; /* where the statement's ops begin in the batch */
    size_t statement_bytes_ = 0;
    std::string last_text_;
    Bytes xid_;
    Bytes reply_;
};

/* Packs the name of a prepared transaction. */
void pack_xid(const XID *xid, Bytes *name);
bool unpack_xid(Slice name, XID *xid);
/* Number of ends that the host has not confirmed. */
size_t count_pending_ends();

} // namespace millrace

#endif
