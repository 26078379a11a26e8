// SPDX-License-Identifier: GPL-2.0-only
/* State that all handlers of a table share: its number in the host, statistics that are a second
 * old at most, and reserved ranges of counters.
 *
 * AUTO_INCREMENT. Values are taken from the host's counter a range at a time. Explicit values
 * that are larger raise the counter before the next range is requested, not when they are
 * written. The first time a table's counter is used it is compared with the largest value in the
 * table, so nothing is lost when the guest ends in between. The rest of a range is dropped when
 * the table is closed.
 *
 * Row ids of tables without a primary key come from one counter for all of them, that of the
 * table ROW_ID_TABLE, so that they do not disturb the table's own. */
#ifndef MILLRACE_SHARE_H
#define MILLRACE_SHARE_H

#include <mutex>
#include <string>
#include <vector>

#include "server.h"

#include "session.h"

namespace millrace {

constexpr const char *ROW_ID_TABLE = "#millrace/row-id";
constexpr uint64_t ROW_ID_RANGE = 16384;

class Share : public Handler_share {
public:
    explicit Share(std::string name) : name_(std::move(name)) {}

    /* Opens the table; asks the host once. */
    int open(Session *session, uint32_t indexes);
    /* Forgets counters after TRUNCATE. */
    void forget_counters();

    const std::string &name() const { return name_; }
    uint32_t table() const { return table_; }

    /* Statistics of each index, fresh enough. */
    bool stat(Session *session, bool is_forced, std::vector<IndexStat> *stats);

    /* Takes up to `count` values, each `increment` from the one before. Returns how many there
     * were. */
    int take_auto(Session *session, uint64_t offset, uint64_t increment, uint64_t count,
                  uint64_t *first, uint64_t *reserved);
    bool needs_largest();
    void set_largest(uint64_t largest);
    /* Notes that an explicit value was written. */
    void note_auto(uint64_t value);
    int set_auto(Session *session, uint64_t next);
    uint64_t next_auto();

private:
    int reserve_auto(Session *session, uint64_t count);

    const std::string name_;
    std::mutex lock_;
    uint32_t table_ = 0;
    bool is_open_ = false;
    std::vector<IndexStat> stats_;
    ulonglong stats_us_ = 0;
    uint64_t auto_next_ = 1; /* next value of the range */
    uint64_t auto_end_ = 1;  /* end of the range: the host's next value, as far as known */
    uint64_t raise_to_ = 0;
    bool knows_largest_ = false;
};

/* Takes a new row id. */
int take_row_id(Session *session, uint64_t *id);
/* Name of the table in the host, database/table, from the server's path. */
std::string table_name(const char *path);
int create_table(Session *session, const std::string &name, uint32_t indexes, Opened *opened);
int raise_auto(Session *session, uint32_t table, uint64_t next);

} // namespace millrace

#endif
