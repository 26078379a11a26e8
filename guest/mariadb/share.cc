// SPDX-License-Identifier: GPL-2.0-only
#include "share.h"

#include "pack.h"
#include "settings.h"

namespace millrace {

static constexpr ulonglong STAT_US = 1000000;

std::string table_name(const char *path)
{
    std::string name(path);
    size_t last = name.rfind('/');
    if (last == std::string::npos || last == 0)
        return name;
    /* Temporary tables lie anywhere; their names are unique in the server. */
    if (name.compare(last + 1, 14, "#sql-temptable") == 0)
        return "#tmp/" + name.substr(last + 1);
    size_t parent = name.rfind('/', last - 1);
    return parent == std::string::npos ? name : name.substr(parent + 1);
}

static Slice slice(const std::string &text)
{
    return Slice(reinterpret_cast<const uint8_t *>(text.data()), text.size());
}

static bool read_opened(const Answer &answer, Opened *opened)
{
    if (answer.bytes.size < sizeof(*opened))
        return false;
    memcpy(opened, answer.bytes.data, sizeof(*opened));
    return true;
}

/* Finds a table, without an error message, since the server may only ask whether it exists. */
static int open_table(Session *session, const std::string &name, Opened *opened)
{
    Op op;
    op.kind = op::OPEN;
    op.key = slice(name);
    Bytes body;
    Answer answer;
    int error = session->send_alone(op, true, false, &body, &answer);
    if (error)
        return error;
    return read_opened(answer, opened) ? 0 : HA_ERR_INTERNAL_ERROR;
}

int create_table(Session *session, const std::string &name, uint32_t indexes, Opened *opened)
{
    U32 definition[2];
    definition[0] = FORMAT;
    definition[1] = indexes;
    Op op;
    op.kind = op::CREATE;
    op.key = slice(name);
    op.value = Slice(definition[0].bytes, sizeof(definition));
    op.extra = indexes;
    Bytes body;
    Answer answer;
    int error = session->send_alone(op, false, false, &body, &answer);
    if (error)
        return error;
    return read_opened(answer, opened) ? 0 : open_table(session, name, opened);
}

int raise_auto(Session *session, uint32_t table, uint64_t next)
{
    Op op;
    op.kind = op::RAISE_AUTO;
    op.table = table;
    op.extra = next;
    Bytes body;
    return session->send_alone(op, false, false, &body, nullptr);
}

static int next_auto(Session *session, uint32_t table, uint64_t count, uint64_t *first)
{
    Op op;
    op.kind = op::NEXT_AUTO;
    op.table = table;
    op.extra = count;
    Bytes body;
    Answer answer;
    int error = session->send_alone(op, false, true, &body, &answer);
    if (error == HA_ERR_TO_BIG_ROW)
        return HA_ERR_AUTOINC_ERANGE; /* the counter has no such values */
    if (error)
        return session->fail(error, "", session->last_text(), false);
    U64 value;
    if (answer.bytes.size < sizeof(value))
        return session->fail(HA_ERR_INTERNAL_ERROR, "", "the host's counter gave no value", false);
    memcpy(&value, answer.bytes.data, sizeof(value));
    *first = value;
    return 0;
}

int Share::open(Session *session, uint32_t indexes)
{
    std::lock_guard<std::mutex> guard(lock_);
    if (is_open_)
        return 0;
    Opened opened;
    int error = open_table(session, name_, &opened);
    if (error)
        return error;
    if (opened.indexes != indexes)
        return session->fail(HA_ERR_TABLE_DEF_CHANGED, "",
                             "the host's table '" + name_ + "' has other indexes", false);
    table_ = opened.table;
    auto_next_ = auto_end_ = opened.next_auto ? static_cast<uint64_t>(opened.next_auto) : 1;
    is_open_ = true;
    return 0;
}

void Share::forget_counters()
{
    std::lock_guard<std::mutex> guard(lock_);
    auto_next_ = auto_end_ = 1;
    raise_to_ = 0;
    stats_us_ = 0;
    knows_largest_ = true;
}

bool Share::stat(Session *session, bool is_forced, std::vector<IndexStat> *stats)
{
    std::lock_guard<std::mutex> guard(lock_);
    ulonglong now = my_hrtime().val;
    if (stats_us_ == 0 || is_forced || now - stats_us_ > STAT_US || now < stats_us_) {
        Op op;
        op.kind = op::STAT;
        op.table = table_;
        Bytes body;
        Answer answer;
        if (session->send_alone(op, true, true, &body, &answer))
            return false;
        stats_.resize(answer.bytes.size / sizeof(IndexStat));
        if (!stats_.empty())
            memcpy(stats_.data(), answer.bytes.data, stats_.size() * sizeof(IndexStat));
        stats_us_ = now ? now : 1;
    }
    *stats = stats_;
    return true;
}

/* --- counters --- */

bool Share::needs_largest()
{
    std::lock_guard<std::mutex> guard(lock_);
    return !knows_largest_;
}

void Share::set_largest(uint64_t largest)
{
    std::lock_guard<std::mutex> guard(lock_);
    knows_largest_ = true;
    if (largest >= auto_end_ && largest < UINT64_MAX && raise_to_ <= largest)
        raise_to_ = largest + 1;
}

void Share::note_auto(uint64_t value)
{
    std::lock_guard<std::mutex> guard(lock_);
    if (value < auto_next_)
        return;
    if (value < auto_end_)
        auto_next_ = value + 1;
    else if (value >= raise_to_)
        raise_to_ = value < UINT64_MAX ? value + 1 : value;
}

uint64_t Share::next_auto()
{
    std::lock_guard<std::mutex> guard(lock_);
    return raise_to_ > auto_next_ ? raise_to_ : auto_next_;
}

int Share::set_auto(Session *session, uint64_t next)
{
    int error = raise_auto(session, table_, next);
    std::lock_guard<std::mutex> guard(lock_);
    if (!error && next > auto_next_)
        auto_next_ = auto_end_ = next;
    return error;
}

int Share::reserve_auto(Session *session, uint64_t count)
{
    if (raise_to_ > auto_end_) {
        int error = raise_auto(session, table_, raise_to_);
        if (error)
            return error;
        auto_next_ = auto_end_ = raise_to_;
    }
    raise_to_ = 0;
    uint64_t first;
    int error = millrace::next_auto(session, table_, count, &first);
    if (error)
        return error;
    if (first != auto_end_)
        auto_next_ = first;
    auto_end_ = first + count < first ? UINT64_MAX : first + count;
    return 0;
}

/* First value from `value` on that is `offset` plus a multiple of `increment`. */
static uint64_t round_up(uint64_t value, uint64_t offset, uint64_t increment)
{
    if (increment <= 1)
        return value;
    if (value <= offset)
        return offset;
    uint64_t steps = (value - offset + increment - 1) / increment;
    return offset + steps * increment;
}

int Share::take_auto(Session *session, uint64_t offset, uint64_t increment, uint64_t count,
                     uint64_t *first, uint64_t *reserved)
{
    std::lock_guard<std::mutex> guard(lock_);
    if (increment > 1 && offset > increment)
        offset = 0; /* as the server's own rule has it */
    count = count ? count : 1;
    for (int attempt = 0;; attempt++) {
        *first = round_up(auto_next_, offset, increment);
        if (raise_to_ <= auto_end_ && *first < auto_end_ && *first >= auto_next_) {
            uint64_t available = (auto_end_ - *first + increment - 1) / increment;
            *reserved = available < count ? available : count;
            auto_next_ = *first + *reserved * increment;
            if (auto_next_ > auto_end_ || auto_next_ < *first)
                auto_next_ = auto_end_;
            return 0;
        }
        if (attempt == 3)
            return HA_ERR_AUTOINC_ERANGE;
        uint64_t needed = count * increment + increment, batch = autoinc_batch(session->thd());
        int error = reserve_auto(session, needed > batch && count > 1 ? needed
                                          : batch > increment       ? batch
                                                                    : needed);
        if (error == HA_ERR_AUTOINC_ERANGE)
            error = reserve_auto(session, 1); /* the last ones */
        if (error)
            return error;
    }
}

/* --- row ids --- */

static std::mutex row_id_lock;
static uint32_t row_id_table;
static uint64_t row_id_next, row_id_end;

static int open_row_ids(Session *session)
{
    Op op;
    op.kind = op::OPEN;
    const std::string name = ROW_ID_TABLE;
    op.key = slice(name);
    Bytes body;
    Answer answer;
    Opened opened;
    int error = session->send_alone(op, true, true, &body, &answer);
    if (!error && !read_opened(answer, &opened))
        error = HA_ERR_INTERNAL_ERROR;
    else if (error)
        error = create_table(session, name, 1, &opened);
    if (!error)
        row_id_table = opened.table;
    return error;
}

int take_row_id(Session *session, uint64_t *id)
{
    std::lock_guard<std::mutex> guard(row_id_lock);
    if (row_id_next == row_id_end) {
        int error = row_id_table ? 0 : open_row_ids(session);
        uint64_t first;
        if (!error)
            error = next_auto(session, row_id_table, ROW_ID_RANGE, &first);
        if (error) {
            row_id_table = 0; /* perhaps another store: look for it again */
            return error;
        }
        row_id_next = first;
        row_id_end = first + ROW_ID_RANGE;
    }
    *id = row_id_next++;
    return 0;
}

} // namespace millrace
