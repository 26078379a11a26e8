// SPDX-License-Identifier: GPL-2.0-only
#include "status.h"

#include <cstdarg>

#include "settings.h"

namespace millrace {

template <std::atomic<uint64_t> Counters::*which>
static int show(THD *, SHOW_VAR *var, char *buffer)
{
    var->type = SHOW_ULONGLONG;
    var->value = buffer;
    ulonglong value = (counters.*which).load(std::memory_order_relaxed);
    memcpy(buffer, &value, sizeof(value));
    return 0;
}
#define MILLRACE_COUNTER(name)                                                                     \
    {"Millrace_" #name, reinterpret_cast<char *>(&show<&Counters::name>), SHOW_SIMPLE_FUNC}

SHOW_VAR status_variables[] = {
    MILLRACE_COUNTER(requests),       MILLRACE_COUNTER(round_trips),
    MILLRACE_COUNTER(bytes_sent),     MILLRACE_COUNTER(bytes_received),
    MILLRACE_COUNTER(connects),       MILLRACE_COUNTER(reconnects),
    MILLRACE_COUNTER(batches),        MILLRACE_COUNTER(ops),
    MILLRACE_COUNTER(commits),        MILLRACE_COUNTER(prepares),
    MILLRACE_COUNTER(rollbacks),      MILLRACE_COUNTER(rows_sent),
    MILLRACE_COUNTER(rows_fetched),   MILLRACE_COUNTER(cancels),
    MILLRACE_COUNTER(filtered_reads), MILLRACE_COUNTER(rings),
    MILLRACE_COUNTER(bells),          MILLRACE_COUNTER(sleeps),
    {nullptr, nullptr, SHOW_UNDEF},
};

static void add_line(std::string *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void add_line(std::string *text, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    *text += line;
    *text += '\n';
}

static unsigned long long count(const std::atomic<uint64_t> &counter)
{
    return counter.load(std::memory_order_relaxed);
}

/* Number of transactions that wait for their second phase in the host, of all its clients; below
 * 0: not known. */
static long long count_prepared(Session *session)
{
    Op op;
    op.kind = op::LIST_PREPARED;
    Bytes body;
    Answer answer;
    return session->send_alone(op, true, true, &body, &answer)
               ? -1
               : static_cast<long long>(answer.rows);
}

std::string status_text(Session *session)
{
    std::string text;
    add_line(&text, "host          %s", get_host_endpoint().address.c_str());
    long long prepared = count_prepared(session);
    if (prepared < 0)
        add_line(&text, "state         unreachable: %s", session->last_text().c_str());
    else
        add_line(&text, "state         connected; %lld transactions are prepared", prepared);
    add_line(&text, "connections   %llu made, %llu made again, %zu idle", count(counters.connects),
             count(counters.reconnects), count_pool());
    add_line(&text, "rings         %llu of them went on by one; %llu bells, %llu sleeps",
             count(counters.rings), count(counters.bells), count(counters.sleeps));
    add_line(&text, "requests      %llu, %llu waited for, %llu cancelled", count(counters.requests),
             count(counters.round_trips), count(counters.cancels));
    add_line(&text, "bytes         %llu sent, %llu received", count(counters.bytes_sent),
             count(counters.bytes_received));
    add_line(&text, "batches       %llu of %llu ops", count(counters.batches), count(counters.ops));
    add_line(&text, "rows          %llu sent, %llu fetched; %llu reads had a filter",
             count(counters.rows_sent), count(counters.rows_fetched),
             count(counters.filtered_reads));
    add_line(&text,
             "transactions  %llu commits, %llu prepares, %llu rollbacks, %zu ends not confirmed",
             count(counters.commits), count(counters.prepares), count(counters.rollbacks),
             count_pending_ends());
    return text;
}

} // namespace millrace
