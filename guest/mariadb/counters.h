// SPDX-License-Identifier: GPL-2.0-only
/* Counters, for SHOW STATUS. */
#ifndef MILLRACE_COUNTERS_H
#define MILLRACE_COUNTERS_H

#include <atomic>
#include <cstdint>

namespace millrace {

struct Counters {
    std::atomic<uint64_t> requests{0};
    std::atomic<uint64_t> round_trips{0};
    std::atomic<uint64_t> bytes_sent{0};
    std::atomic<uint64_t> bytes_received{0};
    std::atomic<uint64_t> connects{0};
    std::atomic<uint64_t> reconnects{0};
    std::atomic<uint64_t> batches{0};
    std::atomic<uint64_t> ops{0};
    std::atomic<uint64_t> commits{0};
    std::atomic<uint64_t> prepares{0};
    std::atomic<uint64_t> rollbacks{0};
    std::atomic<uint64_t> rows_sent{0};
    std::atomic<uint64_t> rows_fetched{0};
    std::atomic<uint64_t> filtered_reads{0};
    std::atomic<uint64_t> cancels{0};
    std::atomic<uint64_t> rings{0};  /* connections that went on by a ring */
    std::atomic<uint64_t> bells{0};  /* sent to a host that slept */
    std::atomic<uint64_t> sleeps{0}; /* until the host rings */
};
inline Counters counters;

} // namespace millrace

#endif
