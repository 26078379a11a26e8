// SPDX-License-Identifier: GPL-2.0-only
/* Tests that need no server: the order of encoded strings, batches, and replies that are cut off
 * anywhere. The last line is `N passed, N failed`. */
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "../codec.h"
#include "../encode.h"
#include "../filter.h"
#include "../transport.h"
#include "check.h"

using namespace millrace;

static int sign(int n) { return n < 0 ? -1 : n > 0; }

static Slice slice(const std::string &text)
{
    return Slice(reinterpret_cast<const uint8_t *>(text.data()), text.size());
}

static int compare_bytes(const Bytes &a, const Bytes &b)
{
    size_t shared = std::min(a.size(), b.size());
    int order = shared ? memcmp(a.data(), b.data(), shared) : 0;
    return sign(order ? order : a.size() < b.size() ? -1 : a.size() > b.size());
}

/* Compares as if both were filled up with spaces. */
static int compare_padded(std::string a, std::string b, const std::string &space)
{
    while (a.size() < b.size() + space.size())
        a += space;
    while (b.size() < a.size())
        b += space;
    a.resize(std::min(a.size(), b.size()));
    return sign(memcmp(a.data(), b.data(), a.size()));
}

static Space space_of(const std::string &text)
{
    Space space;
    space.size = text.size();
    memcpy(space.bytes, text.data(), text.size());
    return space;
}

/* Random word over few letters, of whole weights, so that words often share beginnings. */
static std::string word(std::mt19937 &random, size_t weight)
{
    static const uint8_t letters[] = {0x00, 0x1f, 0x20, 0x20, 0x21, 0xff};
    std::string text;
    for (size_t n = random() % 24 * (random() % 2 ? 1 : weight); n > 0 && text.size() < 40; n--)
        for (size_t i = 0; i < weight; i++)
            text += static_cast<char>(letters[random() % sizeof(letters)]);
    return text;
}

static void test_no_pad()
{
    std::mt19937 random(1);
    bool is_ordered = true, is_prefix_free = true, comes_back = true;
    for (int i = 0; i < 200000; i++) {
        std::string a = word(random, 1),
                    b = random() % 8 ? word(random, 1) : a + std::string(random() % 3, '\0');
        Bytes x, y, back;
        encode_no_pad(slice(a), &x);
        encode_no_pad(slice(b), &y);
        is_ordered &= compare_bytes(x, y) == sign(a.compare(b));
        if (a != b && x.size() <= y.size())
            is_prefix_free &= memcmp(x.data(), y.data(), x.size()) != 0;
        comes_back &= decode_no_pad(x.data(), x.end(), &back) == x.end() &&
                      back.size() == a.size() &&
                      std::equal(a.begin(), a.end(), reinterpret_cast<const char *>(back.data()));
    }
    check(is_ordered, "NO PAD strings are in order");
    check(is_prefix_free, "no NO PAD string begins another");
    check(comes_back, "NO PAD strings come back");
}

static void test_pad_space(const std::string &blank)
{
    std::mt19937 random(2);
    Space space = space_of(blank);
    bool is_ordered = true, is_prefix_free = true, fits = true;
    for (int i = 0; i < 200000; i++) {
        std::string a = word(random, blank.size()), b = word(random, blank.size());
        if (random() % 8 == 0) {
            b = a;
            for (int n = random() % 4; n > 0; n--)
                b += blank;
        }
        Bytes x, y;
        encode_pad_space(slice(a), space, &x);
        encode_pad_space(slice(b), space, &y);
        int order = compare_padded(a, b, blank);
        is_ordered &= compare_bytes(x, y) == order;
        if (order != 0 && x.size() <= y.size())
            is_prefix_free &= memcmp(x.data(), y.data(), x.size()) != 0;
        fits &= x.size() <= encoded_bytes(a.size(), space.segment());
    }
    check(is_ordered, "PAD SPACE strings are in order");
    check(is_prefix_free, "no PAD SPACE string begins another");
    check(fits, "PAD SPACE strings take what is said");
}

/* A second part must not disturb the order of the first. */
static void test_parts()
{
    std::mt19937 random(3);
    Space space = space_of(" ");
    bool is_ordered = true;
    for (int i = 0; i < 100000; i++) {
        std::string a[2] = {word(random, 1), word(random, 1)},
                    b[2] = {word(random, 1), word(random, 1)};
        Bytes x, y;
        bool is_downward = random() % 2;
        for (int side = 0; side < 2; side++) {
            Bytes *out = side ? &y : &x;
            const std::string *text = side ? b : a;
            encode_pad_space(slice(text[0]), space, out);
            if (is_downward)
                invert(out->data(), out->size());
            encode_no_pad(slice(text[1]), out);
        }
        int order = compare_padded(a[0], b[0], " ");
        order = order ? (is_downward ? -order : order) : sign(a[1].compare(b[1]));
        is_ordered &= compare_bytes(x, y) == order;
    }
    check(is_ordered, "keys of two parts are in order");
}

static void test_prefixes()
{
    std::mt19937 random(4);
    bool is_behind = true;
    for (int i = 0; i < 100000; i++) {
        std::string text = word(random, 1);
        Bytes key, next, longer;
        key.append(text.data(), text.size());
        next.assign(key);
        longer.assign(key);
        longer.append("\xff\xff\xff", random() % 4);
        if (step_over_prefix(&next))
            is_behind &= compare_bytes(longer, next) < 0 && compare_bytes(key, next) < 0;
        else
            is_behind &= text.find_first_not_of('\xff') == std::string::npos;
    }
    check(is_behind, "a step over a prefix is behind all that begins with it");
}

static void test_batch()
{
    Batch batch;
    std::vector<std::string> keys;
    for (uint32_t i = 0; i < 100; i++) {
        keys.push_back("key " + std::to_string(i));
        Op op;
        op.kind = op::PUT;
        op.index = static_cast<uint8_t>(i);
        op.table = 7;
        op.key = slice(keys.back());
        op.value = slice(keys[i / 2]);
        op.extra = i * 1000000007ULL;
        check(batch.add(op) == i, "ops are numbered");
    }
    size_t bytes = batch.bytes();
    Op more;
    more.kind = op::COMMIT;
    batch.add(more);
    batch.cut(100, bytes);
    Bytes body = batch.take(5, batch_flag::BEGIN, 1000);
    BatchHeader header;
    memcpy(&header, body.data(), sizeof(header));
    check(header.tx == 5 && header.ops == 100 && header.flags == batch_flag::BEGIN &&
              header.wait_ms == 1000,
          "a batch's header");
    Op op;
    check(Batch::find(body, 60, &op) && op.index == 60 && op.extra == 60 * 1000000007ULL &&
              op.key.size == 6 && memcmp(op.key.data, "key 60", 6) == 0 && op.value.size == 6,
          "an op is found");
    check(!Batch::find(body, 100, &op), "there is no op behind the last");
    for (size_t i = 0; i < body.size(); i++) {
        Bytes part;
        part.append(body.data(), i);
        if (Batch::find(part, 99, &op)) {
            check(false, "an op of a batch that is cut off");
            break;
        }
    }
    check(batch.empty(), "a batch that was taken is empty");
}

static void add_answer(Bytes *body, uint32_t op, const std::vector<std::string> &rows)
{
    Bytes bytes;
    for (const std::string &row : rows) {
        RowHeader header;
        header.key_bytes = 1;
        header.primary_bytes = 0;
        header.value_bytes = static_cast<uint32_t>(row.size() - 1);
        bytes.append(&header, sizeof(header));
        bytes.append(row.data(), row.size());
    }
    AnswerHeader header;
    header.len_bytes = static_cast<uint32_t>(bytes.size());
    header.op = op;
    header.rows = static_cast<uint32_t>(rows.size());
    header.more = op % 2;
    body->append(&header, sizeof(header));
    body->append(bytes);
}

static Bytes sample_reply()
{
    ReplyHeader header;
    header.status = status::EXISTS;
    header.flags = reply_flag::ENDED;
    header.done = 3;
    header.text_bytes = 5;
    header.answers = 2;
    Bytes body;
    body.append(&header, sizeof(header));
    body.append("hello", 5);
    add_answer(&body, 0, {"a1", "b22", "c"});
    add_answer(&body, 1, {"d4444"});
    return body;
}

/* Reads all rows, and all of their bytes. Returns the number of rows. */
static int read_all(const Bytes &body)
{
    Reply reply;
    Answer answer;
    int rows = 0;
    uint8_t sum = 0;
    if (!reply.parse(body))
        return -1;
    while (reply.next(&answer)) {
        Rows all(answer.bytes, answer.rows);
        Row row;
        for (; all.next(&row); rows++)
            for (const Slice *part : {&row.key, &row.primary, &row.value})
                for (size_t i = 0; i < part->size; i++)
                    sum ^= part->data[i];
    }
    return rows + (sum == 0xff && rows < 0);
}

static void test_replies()
{
    Bytes body = sample_reply();
    Reply reply;
    check(reply.parse(body) && reply.status == status::EXISTS && reply.done == 3 &&
              reply.text.size == 5 && reply.flags == reply_flag::ENDED,
          "a reply's header");
    check(read_all(body) == 4, "a reply's rows");
    bool is_less = true;
    for (size_t i = 0; i < body.size(); i++) {
        Bytes part;
        part.append(body.data(), i);
        is_less &= read_all(part) < 4;
    }
    check(is_less, "a reply that is cut off has fewer rows");
    /* Random damage: the only check is the sanitizer's. */
    std::mt19937 random(5);
    for (int i = 0; i < 200000; i++) {
        Bytes part;
        part.append(body.data(), random() % (body.size() + 1));
        for (int n = random() % 6; n > 0 && part.size(); n--)
            part.data()[random() % part.size()] =
                static_cast<uint8_t>(random() % 3 ? 0xff : random());
        read_all(part);
        Bytes out;
        decode_no_pad(part.data(), part.end(), &out);
        Op op;
        Batch::find(part, random() % 4, &op);
    }
    check(true, "damaged replies");
}

/* Evaluates the filter in the value of a scan as the host does, by table/filter.rs. */
static bool passes(const Bytes &value, const Bytes &row)
{
    FilterHeader header;
    memcpy(&header, value.data(), sizeof(header));
    const uint8_t *at = value.data() + sizeof(header) + header.high_bytes;
    bool is_true = true;
    for (uint32_t i = 0; i < header.terms; i++) {
        TermHeader term;
        memcpy(&term, at, sizeof(term));
        at += sizeof(term);
        size_t from = std::min<size_t>(term.offset, row.size());
        Bytes piece, operand;
        piece.append(row.data() + from, std::min<size_t>(term.len_bytes, row.size() - from));
        operand.append(at, term.operand_bytes);
        at += term.operand_bytes;
        int order = compare_bytes(piece, operand);
        static const bool wanted[][3] = {
            {false, false, false}, {true, false, false}, {true, true, false}, {false, true, false},
            {false, true, true},   {false, false, true}, {true, false, true},
        };
        is_true &= wanted[term.test][order + 1];
    }
    return is_true && at == value.end();
}

static Bytes row_of(uint64_t number, size_t width)
{
    Bytes row;
    row.append("ab", 2);
    for (size_t i = 0; i < width; i++)
        row.push(static_cast<uint8_t>(number >> (8 * i)));
    row.append("yz", 2);
    return row;
}

/* Random number, often near the limits of the width. */
static uint64_t number(std::mt19937_64 &random, size_t width)
{
    uint64_t max = UINT64_MAX >> (64 - 8 * width), number = random() >> (random() % 64);
    return (random() % 4 ? number : max - number % 1000) & max;
}

static void test_number_filters()
{
    std::mt19937_64 random(3);
    bool is_safe = true, is_exact = true, is_useful = true;
    for (int i = 0; i < 20000; i++) {
        size_t width = 1 + random() % 8;
        uint64_t low = number(random, width), high = random() % 3 ? number(random, width) : low;
        if (low > high)
            std::swap(low, high);
        Filter filter;
        filter.add_number(part::VALUE, 2, width, low, high);
        Bytes value;
        filter.put(Slice(), 0, &value);
        for (int n = 0; n < 8; n++) {
            uint64_t x = n < 2   ? (n ? low : high)
                         : n < 4 ? (n == 2 ? low - 1 : high + 1) & (UINT64_MAX >> (64 - 8 * width))
                                 : number(random, width);
            bool is_in = x >= low && x <= high, is_through = passes(value, row_of(x, width));
            is_safe &= !is_in || is_through;
            is_exact &= (low != high && width > 1) || is_in == is_through;
        }
        if (low >> 8 == high >> 8)
            is_useful &= !passes(value, row_of(high + 256, width)) ||
                         high + 256 > UINT64_MAX >> (64 - 8 * width);
    }
    check(is_safe, "a filter of numbers stops none that is in the range");
    check(is_exact, "it is exact for one number, and for one byte");
    check(is_useful, "it stops numbers whose upper bytes differ");
}

static void test_filters()
{
    Filter filter;
    for (int i = 0; i < 40; i++)
        filter.add(part::KEY, test::EQUAL, 7, 3, slice("abc"));
    check(filter.terms() == MAX_TERMS, "a filter has no more terms than the host takes");
    Bytes value;
    filter.put(slice("high"), 9, &value);
    FilterHeader header;
    TermHeader term;
    memcpy(&header, value.data(), sizeof(header));
    memcpy(&term, value.data() + sizeof(header) + 4, sizeof(term));
    check(header.high_bytes == 4 && header.terms == MAX_TERMS && header.examine == 9 &&
              memcmp(value.data() + sizeof(header), "high", 4) == 0,
          "a filter's header and bound");
    check(term.part == part::KEY && term.test == test::EQUAL && term.offset == 7 &&
              term.len_bytes == 3 && term.operand_bytes == 3,
          "a filter's term");
    check(value.size() == sizeof(header) + 4 + MAX_TERMS * (sizeof(term) + 3), "a filter's size");
    Filter long_one;
    long_one.add(part::KEY, test::EQUAL, 0, 1 << 20, slice(std::string(1 << 20, 'x')));
    check(long_one.empty(), "an operand that is too long is left out");
}

static void test_addresses()
{
    for (const char *good : {"vsock:2:28019", "unix:/run/x"})
        check(is_address(good), good);
    for (const char *bad : {"", "unix:", "vsock:2", "vsock:2:3x", "tcp:1:2", "vsock:a:1"})
        check(!is_address(bad), bad);
    check(!is_address(("unix:/" + std::string(200, 'x')).c_str()), "a path that is too long");
}

int main()
{
    test_no_pad();
    test_pad_space(" ");
    test_pad_space(std::string("\0 ", 2));
    test_pad_space(std::string("\0\0 ", 3));
    test_parts();
    test_prefixes();
    test_batch();
    test_replies();
    test_filters();
    test_number_filters();
    test_addresses();
    return report();
}
