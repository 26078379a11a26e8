// SPDX-License-Identifier: GPL-2.0-only
/* Decoding values from keys, for reads that need the index only. Numbers, times, decimals, ENUM,
 * SET, BIT and binary strings can be decoded; characters cannot, since weights are not
 * characters. */
#include "pack.h"

namespace millrace {

static bool is_number(enum_field_types type)
{
    switch (type) {
    case MYSQL_TYPE_TINY:
    case MYSQL_TYPE_SHORT:
    case MYSQL_TYPE_INT24:
    case MYSQL_TYPE_LONG:
    case MYSQL_TYPE_LONGLONG:
        return true;
    default:
        return false;
    }
}

/* Reverses bytes: big-endian to little-endian. */
static void reverse_bytes(uchar *to, const uint8_t *from, uint bytes)
{
    for (uint i = 0; i < bytes; i++)
        to[i] = from[bytes - 1 - i];
}

bool is_decodable(const KEY_PART_INFO *part)
{
    const Field *field = part->field;
    enum_field_types type = field->real_type();
    if ((field->flags & BLOB_FLAG) || (part->key_part_flag & HA_PART_KEY_SEG))
        return false;
    if (is_number(type))
        return true;
    switch (type) {
    case MYSQL_TYPE_YEAR:
    case MYSQL_TYPE_NEWDATE:
    case MYSQL_TYPE_TIME2:
    case MYSQL_TYPE_DATETIME2:
    case MYSQL_TYPE_TIMESTAMP2:
    case MYSQL_TYPE_NEWDECIMAL:
    case MYSQL_TYPE_ENUM:
    case MYSQL_TYPE_SET:
        return true;
    case MYSQL_TYPE_VARCHAR:
        return field->charset() == &my_charset_bin && part->length == field->field_length;
    default:
        return false;
    }
}

bool decode_value(Field *field, const uint8_t *from, uint bytes, my_ptrdiff_t offset)
{
    uchar *to = field->ptr + offset;
    enum_field_types type = field->real_type();
    if (bytes != field->pack_length())
        return false;
    if (is_number(type)) {
        reverse_bytes(to, from, bytes);
        if (!static_cast<Field_num *>(field)->unsigned_flag)
            to[bytes - 1] ^= 0x80;
        return true;
    }
    switch (type) {
    case MYSQL_TYPE_NEWDATE:
    case MYSQL_TYPE_ENUM:
    case MYSQL_TYPE_SET:
        reverse_bytes(to, from, bytes);
        return true;
    case MYSQL_TYPE_YEAR:
    case MYSQL_TYPE_TIME2:
    case MYSQL_TYPE_DATETIME2:
    case MYSQL_TYPE_TIMESTAMP2:
    case MYSQL_TYPE_NEWDECIMAL:
        memcpy(to, from, bytes);
        return true;
    default:
        return false;
    }
}

} // namespace millrace
