// SPDX-License-Identifier: GPL-2.0-only
/* Kept parts of a condition, as terms about the bytes of keys and rows. */
#include "condition.h"

namespace millrace {

/* Bytes that a column takes in any row where it is not NULL; 0: they differ. */
static size_t packed_bytes(Field *field)
{
    switch (field->real_type()) {
    case MYSQL_TYPE_TINY:
    case MYSQL_TYPE_SHORT:
    case MYSQL_TYPE_INT24:
    case MYSQL_TYPE_LONG:
    case MYSQL_TYPE_LONGLONG:
    case MYSQL_TYPE_FLOAT:
    case MYSQL_TYPE_DOUBLE:
    case MYSQL_TYPE_NEWDECIMAL:
    case MYSQL_TYPE_YEAR:
    case MYSQL_TYPE_NEWDATE:
    case MYSQL_TYPE_TIME2:
    case MYSQL_TYPE_DATETIME2:
    case MYSQL_TYPE_TIMESTAMP2:
    case MYSQL_TYPE_ENUM:
    case MYSQL_TYPE_SET:
        break;
    default:
        return 0;
    }
    /* Its pack() has to be a copy. */
    uchar from[64], to[64 + 16];
    size_t size = field->pack_length();
    if (size == 0 || size > sizeof(from))
        return 0;
    for (size_t i = 0; i < size; i++)
        from[i] = static_cast<uchar>(i * 37 + 11);
    uchar *end = field->pack(to, from, UINT_MAX);
    return end == to + size && memcmp(from, to, size) == 0 ? size : 0;
}

/* Bytes of a row in front of a string's characters. */
static size_t length_bytes(const Field *field) { return field->field_length > 255 ? 2 : 1; }

static uint8_t mirror_test(uint8_t test)
{
    switch (test) {
    case test::BELOW:
        return test::ABOVE;
    case test::AT_MOST:
        return test::AT_LEAST;
    case test::AT_LEAST:
        return test::AT_MOST;
    case test::ABOVE:
        return test::BELOW;
    default:
        return test;
    }
}

void Condition::forget_marks()
{
    for (Part &part : parts_)
        part.is_marked = false;
}

/* Whether the column is NULL in rows that the statement wants: no comparison is true of NULL. */
Condition::Null Condition::get_nullness(const Field *field) const
{
    if (!field->null_ptr)
        return Null::NO;
    for (const Part &part : parts_)
        if (part.field->field_index == field->field_index)
            return part.kind == Kind::NULLNESS && part.test == test::EQUAL ? Null::YES : Null::NO;
    return Null::MAYBE;
}

void Condition::add_key_terms(const KeyCodec &key, uchar *scratch, size_t known_bytes,
                              uint first_part, Filter *filter)
{
    size_t part_off = 0;
    for (uint n = 0; n < key.parts(); n++) {
        Field *field = key.field(n);
        const uint8_t flip = key.is_downward(n) ? 0xff : 0;
        const size_t value_off = part_off + (key.is_nullable(n) ? 1 : 0);
        const size_t bytes = key.fixed_bytes(n);
        for (Part &part : parts_) {
            if (part.field->field_index != field->field_index)
                continue;
            bool is_null_test = part.kind == Kind::NULLNESS;
            if (is_null_test ? !key.is_nullable(n) : bytes == 0 || part.kind == Kind::TEXT)
                continue;
            part.is_marked = true;
            if (n < first_part || (is_null_test ? value_off : value_off + bytes) <= known_bytes)
                continue;
            if (is_null_test) {
                const uint8_t null = flip; /* 0, if it is not turned */
                filter->add(part::KEY, part.test, part_off, 1, Slice(&null, 1));
                continue;
            }
            my_ptrdiff_t offset = scratch - field->table->record[0];
            memcpy(field->ptr + offset, part.image.data(), part.image.size());
            field->set_notnull(offset);
            Bytes encoded;
            key.encode_one(n, scratch, &encoded);
            size_t skip = value_off - part_off;
            filter->add(part::KEY, flip ? mirror_test(part.test) : part.test, value_off, bytes,
                        Slice(encoded.data() + skip, encoded.size() - skip));
        }
        Null null = get_nullness(field);
        if (key.is_nullable(n) && null == Null::MAYBE)
            return;
        part_off = null == Null::YES ? value_off : value_off + bytes;
        if (null != Null::YES && bytes == 0)
            return;
    }
}

/* --- rows --- */

static uint64_t read_number(const Bytes &image)
{
    uint64_t number = 0;
    for (size_t i = image.size(); i > 0; i--)
        number = number << 8 | image.data()[i - 1];
    return number;
}

/* Adds all comparisons of a little-endian column, as one range: with a sign it has to be on one
 * side of zero, where its bytes are in order. */
void Condition::add_row_number(const Field *field, size_t offset, Filter *filter) const
{
    size_t width = field->pack_length();
    if (width == 0 || width > 8)
        return;
    enum_field_types type = field->real_type();
    bool has_sign =
        type != MYSQL_TYPE_NEWDATE && type != MYSQL_TYPE_ENUM && !(field->flags & UNSIGNED_FLAG);
    const uint64_t sign = uint64_t(1) << (8 * width - 1), max = sign | (sign - 1);
    /* With the sign turned, numbers are in order from 0 to `max`. */
    const uint64_t sign_flip = has_sign ? sign : 0;
    uint64_t low = 0, high = max;
    bool is_bounded = false;
    for (const Part &part : parts_) {
        if (part.field->field_index != field->field_index || part.kind != Kind::NUMBER ||
            part.is_marked)
            continue;
        uint64_t value = read_number(part.image) ^ sign_flip;
        if (part.test == test::NOT_EQUAL) {
            filter->add(part::VALUE, test::NOT_EQUAL, offset, width, Slice(part.image));
            continue;
        }
        is_bounded = true;
        if (part.test != test::BELOW && part.test != test::AT_MOST && value > low)
            low = value;
        if (part.test != test::ABOVE && part.test != test::AT_LEAST && value < high)
            high = value;
    }
    if (is_bounded && ((low ^ high) & sign_flip) == 0)
        filter->add_number(part::VALUE, offset, width, low ^ sign_flip, high ^ sign_flip);
}

void Condition::add_row_parts(const Field *field, size_t offset, Filter *filter) const
{
    bool has_numbers = false;
    for (const Part &part : parts_) {
        if (part.field->field_index != field->field_index || part.is_marked)
            continue;
        if (part.kind == Kind::NUMBER)
            has_numbers = true;
        if (part.kind == Kind::ORDERED)
            filter->add(part::VALUE, part.test, offset, part.image.size(), Slice(part.image));
        if (part.kind != Kind::TEXT)
            continue;
        size_t lengths = length_bytes(field), size = part.image.size();
        if (part.is_prefix) {
            filter->add(part::VALUE, part.test, offset + lengths, size, Slice(part.image));
            continue;
        }
        Bytes whole;
        for (size_t i = 0; i < lengths; i++)
            whole.push(static_cast<uint8_t>(size >> (8 * i)));
        whole.append(part.image);
        filter->add(part::VALUE, part.test, offset, whole.size(), Slice(whole));
    }
    if (has_numbers)
        add_row_number(field, offset, filter);
}

void Condition::add_row_terms(const TABLE *table, const RowCodec &rows, Filter *filter) const
{
    size_t column_off = table->s->null_bytes;
    for (Field *field : rows.stored_fields()) {
        Null null = get_nullness(field);
        if (null == Null::YES)
            continue;
        add_row_parts(field, column_off, filter);
        size_t bytes = packed_bytes(field);
        if (bytes == 0 || null == Null::MAYBE)
            return;
        column_off += bytes;
    }
}

} // namespace millrace
