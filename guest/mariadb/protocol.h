// SPDX-License-Identifier: GPL-2.0-only
/* Messages between a program of the guest, the host and the module `table`:
 * core/guest-abi/src/module.rs and table.rs in C++. Those files are the specification, and give
 * the names. */
#ifndef MILLRACE_PROTOCOL_H
#define MILLRACE_PROTOCOL_H

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace millrace {

/* Little-endian number, without alignment. */
template <typename T> struct Little {
    uint8_t bytes[sizeof(T)];

    operator T() const
    {
        T value = 0;
        for (size_t i = 0; i < sizeof(T); i++)
            value |= static_cast<T>(static_cast<T>(bytes[i]) << (8 * i));
        return value;
    }
    Little &operator=(T value)
    {
        for (size_t i = 0; i < sizeof(T); i++)
            bytes[i] = static_cast<uint8_t>(value >> (8 * i));
        return *this;
    }
};
using U16 = Little<uint16_t>;
using U32 = Little<uint32_t>;
using U64 = Little<uint64_t>;

/* module.rs */

constexpr uint32_t PORT = 28019;
constexpr uint64_t MAGIC = 0x55444f4d43524c4dULL; /* MLRCMODU */
constexpr uint16_t THIS_VERSION = 1;
constexpr uint32_t MAX_BODY_BYTES = 16 << 20;
constexpr size_t MAX_NAME_BYTES = 32;
constexpr size_t MAX_TEXT_BYTES = 512;
constexpr size_t MAX_MODULES = 16;

namespace kind {
enum : uint16_t {
    HELLO = 1,
    WELCOME,
    REQUEST,
    REPLY,
    CANCEL,
    GOODBYE,
    PING,
    PONG,
    RING
};
} // namespace kind
namespace flag {
enum : uint16_t {
    REPEATABLE = 1,
    AGAIN = 2,
    FAILED = 4
};
} // namespace flag
namespace failure {
enum : uint32_t {
    BAD_FRAME = 1,
    NO_VERSION,
    NO_MODULE,
    LIMIT,
    STOPPED,
    BROKEN,
    REPLACED,
    STORAGE,
    ENDING,
    OUT_OF_ORDER,
    RING,
    RING_ONLY
};
} // namespace failure

struct Frame {
    U32 len_bytes;
    U16 kind;
    U16 flags;
    U64 seq;
    U64 check;
};
struct Hello {
    U64 magic;
    U16 lowest;
    U16 highest;
    U32 reserved;
    uint8_t client[16];
    uint8_t module[MAX_NAME_BYTES];
};
struct Welcome {
    U64 magic;
    U16 version;
    U16 modules;
    U32 max_in_flight;
    U32 max_body_bytes;
    U32 linger_ms;
    U64 instance;
    U64 known_seq;
};
struct ModuleInfo {
    uint8_t name[MAX_NAME_BYTES];
    uint8_t hash[32];
};
struct Failure {
    U32 code;
    U32 reserved;
};
static_assert(sizeof(Frame) == 24 && sizeof(Hello) == 64 && sizeof(Welcome) == 40, "as module.rs");

/* module_ring.rs */

constexpr uint64_t REGION_MAGIC = 0x474e495243524c4dULL; /* MLRCRING */
constexpr uint32_t REGION_VERSION = 1;
constexpr size_t SLOTS_OFF = 4096;
constexpr size_t SLOT_BYTES = 256 << 10;
constexpr size_t DATA_BYTES = (SLOT_BYTES - 4096) / 2;
constexpr size_t STAMP_OFF = 256;

struct RegionHead {
    U64 magic;
    U32 version;
    U32 slots;
    uint8_t id[16];
};
struct RingWanted {
    uint8_t id[16];
};
struct RingGranted {
    U32 slot;
    U32 reserved;
    U64 stamp;
};
static_assert(sizeof(RegionHead) == 32 && sizeof(RingGranted) == 16, "as module_ring.rs");

/* table.rs */

constexpr size_t MAX_KEY_BYTES = 16 << 10;
constexpr size_t MAX_VALUE_BYTES = (16 << 20) - (64 << 10);
constexpr size_t MAX_XID_BYTES = 152;
constexpr uint32_t MAX_TABLE_INDEXES = 65;
constexpr uint32_t MAX_OPS = 65536;
constexpr uint32_t MAX_TERMS = 16;
/* The first version with filters. */
constexpr uint32_t FILTER_VERSION = 2;

namespace op {
enum : uint8_t {
    INSERT = 1,
    PUT,
    UPDATE,
    DELETE,
    GET,
    SCAN,
    ESTIMATE,
    LOCK,
    SAVEPOINT,
    ROLLBACK_TO,
    COMMIT,
    ROLLBACK,
    PREPARE,
    COMMIT_PREPARED,
    ROLLBACK_PREPARED,
    LIST_PREPARED,
    CREATE,
    OPEN,
    DROP,
    RENAME,
    TRUNCATE,
    REDEFINE,
    LIST,
    STAT,
    NEXT_AUTO,
    RAISE_AUTO,
    SYNC,
    RELEASE,
    SPEAKS, /* VERSION; MariaDB has a macro of that name */
};
} // namespace op
namespace batch_flag {
enum : uint16_t {
    BEGIN = 1,
    NEW_SNAPSHOT = 2,
    STRICT = 4,
    ALL_OR_NOTHING = 8
};
} // namespace batch_flag
namespace op_flag {
enum : uint16_t {
    LOW_OPEN = 1,
    HIGH_OPEN = 2,
    NO_HIGH = 4,
    BACKWARD = 8,
    FETCH = 16,
    KEYS_ONLY = 32,
    SHARED = 64,
    EXCLUSIVE = 128,
    HIGH_PREFIX = 256,
    RELAXED = 512,
    NO_WAIT = 1024,
    SKIP_LOCKED = 2048,
    NO_LOCK = 4096,
    FILTER = 8192,
};
} // namespace op_flag
namespace reply_flag {
enum : uint16_t {
    ENDED = 1,
    REPLAYED = 2
};
} // namespace reply_flag
namespace status {
enum : uint16_t {
    OK,
    EXISTS,
    NOT_FOUND,
    DEADLOCK,
    TIMEOUT,
    CONFLICT,
    CANCELLED,
    LOST,
    NO_TABLE,
    TABLE_EXISTS,
    BUSY,
    LIMIT,
    NO_SPACE,
    STORAGE,
    BAD_REQUEST,
};
} // namespace status

struct BatchHeader {
    U64 tx;
    U32 ops;
    U16 flags;
    U16 reserved;
    U32 wait_ms;
    U32 reserved2;
};
struct OpHeader {
    uint8_t kind;
    uint8_t index;
    U16 flags;
    U32 table;
    U32 key_bytes;
    U32 value_bytes;
    U64 extra;
};
struct ReplyHeader {
    U16 status;
    U16 flags;
    U32 done;
    U32 text_bytes;
    U32 answers;
};
struct AnswerHeader {
    U32 len_bytes;
    U32 op;
    U32 rows;
    U32 more;
};
struct RowHeader {
    U32 key_bytes;
    U32 primary_bytes;
    U32 value_bytes;
};
/* table/filter.rs */
namespace part {
enum : uint8_t {
    KEY = 0,
    VALUE = 1
};
} // namespace part
namespace test {
enum : uint8_t {
    BELOW = 1,
    AT_MOST,
    EQUAL,
    AT_LEAST,
    ABOVE,
    NOT_EQUAL
};
} // namespace test
/* AnswerHeader::more: the scan has examined as many entries as its filter allows. */
constexpr uint32_t MORE_EXAMINED = 2;

struct FilterHeader {
    U32 high_bytes;
    U32 terms;
    U32 examine;
    U32 reserved;
};
struct TermHeader {
    uint8_t part;
    uint8_t test;
    U16 reserved;
    U32 offset;
    U32 len_bytes;
    U32 operand_bytes;
};
struct Opened {
    U32 table;
    U32 indexes;
    U64 next_auto;
};
struct IndexStat {
    U64 entries;
    U64 key_bytes;
    U64 value_bytes;
};
struct Count {
    U64 entries;
    U64 exact;
};
struct Speaks {
    U32 version;
    U32 reserved;
};
static_assert(sizeof(BatchHeader) == 24 && sizeof(OpHeader) == 24 && sizeof(ReplyHeader) == 16 &&
                  sizeof(AnswerHeader) == 16 && sizeof(RowHeader) == 12 &&
                  sizeof(FilterHeader) == 16 && sizeof(TermHeader) == 16,
              "as table.rs");

/* `extra` of a scan. */
inline uint64_t limits(uint32_t rows, uint32_t bytes)
{
    return static_cast<uint64_t>(rows) | static_cast<uint64_t>(bytes) << 32;
}

} // namespace millrace

#endif
