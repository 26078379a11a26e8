// SPDX-License-Identifier: GPL-2.0-only
#include "pack.h"

namespace millrace {

static bool is_text(const Field *field)
{
    if (field->flags & BLOB_FLAG)
        return true;
    switch (field->key_type()) {
    case HA_KEYTYPE_TEXT:
    case HA_KEYTYPE_VARTEXT1:
    case HA_KEYTYPE_VARTEXT2:
    case HA_KEYTYPE_VARBINARY1:
    case HA_KEYTYPE_VARBINARY2:
        return true;
    default:
        return false;
    }
}

static bool is_varying(const Field *field)
{
    return field->real_type() == MYSQL_TYPE_VARCHAR && !(field->flags & BLOB_FLAG);
}

/* Buffer for weights: those of a key are too long for the stack. */
static Bytes *scratch_bytes()
{
    static thread_local Bytes bytes;
    bytes.clear();
    return &bytes;
}

void KeyCodec::open(KEY *key, bool is_unique)
{
    key_ = key;
    is_unique_ = is_unique;
    parts_.assign(key->user_defined_key_parts, Part());
    max_bytes_ = 0;
    for (uint i = 0; i < key->user_defined_key_parts; i++) {
        Part *part = &parts_[i];
        open_part(&key->key_part[i], part);
        size_t weights = part->out_bytes;
        if (part->kind == Kind::TEXT_PAD || part->kind == Kind::TEXT_NO_PAD)
            weights = encoded_bytes(weights, part->space.segment());
        max_bytes_ += weights + (part->is_nullable ? 1 : 0);
    }
}

void KeyCodec::open_part(KEY_PART_INFO *info, Part *part)
{
    part->info = info;
    part->field = info->field;
    part->bytes = info->length;
    part->is_nullable = info->null_bit != 0;
    part->is_downward = (info->key_part_flag & HA_REVERSE_SORT) != 0;
    part->can_decode = is_decodable(info);
    if (is_text(part->field)) {
        open_text(part);
        return;
    }
    bool is_prefix =
        info->length < part->field->pack_length() && part->field->key_type() == HA_KEYTYPE_BINARY &&
        part->field->charset() == &my_charset_bin && part->field->real_type() == MYSQL_TYPE_STRING;
    part->kind = is_prefix ? Kind::RAW : Kind::FIXED;
    part->out_bytes = is_prefix ? info->length : part->field->sort_length();
}

void KeyCodec::open_text(Part *part)
{
    CHARSET_INFO *cs = part->field->charset();
    part->chars = part->bytes / cs->mbmaxlen;
    /* Most bytes of the weights of the part's characters. */
    part->out_bytes = static_cast<uint>(cs->strnxfrmlen(part->bytes));
    if (cs == &my_charset_bin) {
        part->out_bytes = part->bytes;
        part->kind = Kind::TEXT_NO_PAD;
        return;
    }
    uchar blank[8];
    cs->fill(reinterpret_cast<char *>(blank), cs->mbminlen, ' ');
    uchar weight[64];
    size_t size = cs->strnxfrm(weight, sizeof(weight), 1, blank, cs->mbminlen, 0);
    bool is_plain = cs->levels_for_order <= 1 && !(cs->state & MY_CS_STRNXFRM_BAD_NWEIGHTS) &&
                    size > 0 && size <= MAX_SPACE_BYTES;
    if (!is_plain) {
        part->kind = Kind::TEXT_FIXED;
        return;
    }
    if (cs->state & MY_CS_NOPAD) {
        part->kind = Kind::TEXT_NO_PAD;
        return;
    }
    part->kind = Kind::TEXT_PAD;
    part->space.size = size;
    memcpy(part->space.bytes, weight, size);
}

/* Bytes of a string, cut to the part's length. */
Slice KeyCodec::text(const Part &part, my_ptrdiff_t offset)
{
    Field *field = part.field;
    CHARSET_INFO *cs = field->charset();
    const uchar *at = field->ptr + offset;
    size_t size;
    if (field->flags & BLOB_FLAG) {
        Field_blob *blob = static_cast<Field_blob *>(field);
        size = blob->get_length(at);
        at = blob->get_ptr(at);
    } else if (is_varying(field)) {
        uint length_bytes = static_cast<Field_varstring *>(field)->length_bytes;
        size = length_bytes == 1 ? *at : uint2korr(at);
        at += length_bytes;
    } else {
        size = field->pack_length();
    }
    if (cs->mbmaxlen > 1) {
        size_t max_len = cs->charpos(at, at + size, part.chars);
        size = max_len < size ? max_len : size;
    } else if (size > part.bytes) {
        size = part.bytes;
    }
    /* The spaces that fill a CHAR are not part of its value. Without padding they count, as they
     * do when the server compares: 'a' is longer than 'a' with a character that has no weight. */
    if (!(field->flags & BLOB_FLAG) && !is_varying(field) && !(cs->state & MY_CS_NOPAD))
        size = cs->lengthsp(reinterpret_cast<const char *>(at), size);
    return Slice(at, size);
}

void KeyCodec::encode_value(const Part &part, my_ptrdiff_t offset, Bytes *out)
{
    Field *field = part.field;
    if (part.kind == Kind::RAW) {
        out->append(field->ptr + offset, part.out_bytes);
        return;
    }
    if (part.kind == Kind::FIXED) {
        uint8_t *to = out->grow(part.out_bytes);
        field->move_field_offset(offset);
        field->sort_string(to, part.out_bytes);
        field->move_field_offset(-offset);
        return;
    }
    CHARSET_INFO *cs = field->charset();
    Slice from = text(part, offset);
    if (part.kind == Kind::TEXT_FIXED) {
        if (!(cs->state & MY_CS_NOPAD))
            from.size = cs->lengthsp(reinterpret_cast<const char *>(from.data), from.size);
        uint8_t *to = out->grow(part.out_bytes);
        memset(to, 0, part.out_bytes);
        cs->strnxfrm(to, part.out_bytes, part.chars * cs->strxfrm_multiply, from.data, from.size,
                     MY_STRXFRM_PAD_WITH_SPACE | MY_STRXFRM_PAD_TO_MAXLEN);
        return;
    }
    if (cs == &my_charset_bin) {
        encode_no_pad(from, out);
        return;
    }
    Bytes *weights = scratch_bytes();
    weights->reserve(part.out_bytes + 16);
    size_t size = from.size ? cs->strnxfrm(weights->grow(part.out_bytes), part.out_bytes,
                                           part.out_bytes, from.data, from.size, 0)
                            : 0;
    Slice slice(weights->data(), size);
    if (part.kind == Kind::TEXT_PAD)
        encode_pad_space(slice, part.space, out);
    else
        encode_no_pad(slice, out);
}

/* Encodes a part. Returns whether it was NULL. */
bool KeyCodec::encode_part(const Part &part, const uchar *record, Bytes *out) const
{
    size_t start = out->size();
    my_ptrdiff_t offset = record - part.field->table->record[0];
    bool is_null = part.is_nullable && (part.field->null_ptr[offset] & part.field->null_bit);
    if (part.is_nullable)
        out->push(is_null ? 0 : 1);
    if (!is_null)
        encode_value(part, offset, out);
    if (part.is_downward)
        invert(out->data() + start, out->size() - start);
    return is_null;
}

bool KeyCodec::encode(const uchar *record, Bytes *out) const
{
    bool has_null = false;
    out->reserve(max_bytes_ < 4096 ? max_bytes_ : 4096);
    for (const Part &part : parts_)
        has_null |= encode_part(part, record, out);
    return has_null;
}

bool KeyCodec::encode_image(const uchar *image, key_part_map map, uchar *scratch, Bytes *out) const
{
    uint bytes = 0, count = 0;
    for (; count < parts_.size() && (map & (key_part_map(1) << count)); count++)
        bytes += parts_[count].info->store_length;
    if (count == 0)
        return false;
    key_restore(scratch, image, key_, bytes);
    bool has_null = false;
    for (uint i = 0; i < count; i++)
        has_null |= encode_part(parts_[i], scratch, out);
    return has_null;
}

bool KeyCodec::can_decode() const
{
    for (const Part &part : parts_)
        if (!part.can_decode)
            return false;
    return true;
}

const uint8_t *KeyCodec::decode_part(const Part &part, const uint8_t *at, const uint8_t *end,
                                     uchar *record)
{
    my_ptrdiff_t offset = record - part.field->table->record[0];
    uint8_t flip = part.is_downward ? 0xff : 0;
    if (part.is_nullable) {
        if (at == end)
            return nullptr;
        bool is_null = (*at++ ^ flip) == 0;
        if (is_null) {
            part.field->set_null(offset);
            return at;
        }
        part.field->set_notnull(offset);
    }
    Bytes copy;
    if (part.kind == Kind::TEXT_NO_PAD) {
        Bytes flipped;
        flipped.append(at, static_cast<size_t>(end - at));
        if (flip)
            invert(flipped.data(), flipped.size());
        const uint8_t *next = decode_no_pad(flipped.data(), flipped.end(), &copy);
        if (!next || copy.size() > part.bytes)
            return nullptr;
        Field_varstring *field = static_cast<Field_varstring *>(part.field);
        uchar *to = field->ptr + offset;
        if (field->length_bytes == 1)
            *to = static_cast<uchar>(copy.size());
        else
            int2store(to, static_cast<uint16>(copy.size()));
        if (!copy.empty())
            memcpy(to + field->length_bytes, copy.data(), copy.size());
        return at + (next - flipped.data());
    }
    if (static_cast<size_t>(end - at) < part.out_bytes)
        return nullptr;
    copy.append(at, part.out_bytes);
    if (flip)
        invert(copy.data(), copy.size());
    return decode_value(part.field, copy.data(), part.out_bytes, offset) ? at + part.out_bytes
                                                                         : nullptr;
}

bool KeyCodec::decode(Slice key, uchar *record) const
{
    const uint8_t *at = key.data, *end = at + key.size;
    for (const Part &part : parts_) {
        at = decode_part(part, at, end, record);
        if (!at)
            return false;
    }
    return true;
}

/* --- rows --- */

void RowCodec::open(TABLE *table)
{
    table_ = table;
    fields_.clear();
    for (Field **field = table->field; *field; field++)
        if ((*field)->stored_in_db() || (*field)->flags & PART_KEY_FLAG)
            fields_.push_back(*field);
}

void RowCodec::encode(const uchar *record, Bytes *out) const
{
    my_ptrdiff_t offset = record - table_->record[0];
    out->append(record, table_->s->null_bytes);
    for (Field *field : fields_) {
        if (field->null_ptr && (field->null_ptr[offset] & field->null_bit))
            continue;
        size_t max_len = field->pack_length() + 16;
        if (field->flags & BLOB_FLAG)
            max_len += static_cast<Field_blob *>(field)->get_length(field->ptr + offset);
        size_t start = out->size();
        uint8_t *to = out->grow(max_len);
        uchar *end = field->pack(to, field->ptr + offset, UINT_MAX);
        out->shrink_to(start + static_cast<size_t>(end - to));
    }
}

bool RowCodec::decode(Slice row, uchar *record, size_t max_fields) const
{
    my_ptrdiff_t offset = record - table_->record[0];
    size_t null_bytes = table_->s->null_bytes;
    if (row.size < null_bytes)
        return false;
    memcpy(record, row.data, null_bytes);
    const uchar *at = row.data + null_bytes, *end = row.data + row.size;
    for (size_t i = 0; i < max_fields && at; i++) {
        Field *field = fields_[i];
        if (field->null_ptr && (field->null_ptr[offset] & field->null_bit)) {
            /* The content of a NULL column is never read, but a blob's pointer is copied. */
            if (field->flags & BLOB_FLAG)
                memset(field->ptr + offset, 0, field->pack_length());
            continue;
        }
        if (offset)
            field->move_field_offset(offset);
        at = field->unpack(field->ptr, at, end, 0);
        if (offset)
            field->move_field_offset(-offset);
    }
    return at != nullptr;
}

size_t RowCodec::count_needed(const MY_BITMAP *columns) const
{
    size_t count = fields_.size();
    while (count > 0 && !bitmap_is_set(columns, fields_[count - 1]->field_index))
        count--;
    return count;
}

} // namespace millrace
