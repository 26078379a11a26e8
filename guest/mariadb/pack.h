// SPDX-License-Identifier: GPL-2.0-only
/* Rows and keys of a table as bytes.
 *
 * Theory of operation. A row is the record's NULL bits and then each stored column by
 * Field::pack(), so that blobs are inside and CHARs take what they need. Indexed virtual columns
 * are stored, too: the old row of an update must give the old keys.
 *
 * A key is its parts, one behind the other: for a column that may be NULL a byte (0: NULL, which
 * comes first), then what memcmp orders as the column's type does. Numbers and times give
 * Field::sort_string(); strings their weights, as encode.h says. A part that is sorted downwards
 * has all bits flipped. Behind the parts of a key that does not have to be unique, or has NULLs in
 * it, comes the primary key. The format is FORMAT; a table remembers which one it was made with.
 *
 * Collations with several levels of weights, or that cannot limit their weights, give strings of
 * fixed length: correct, but long. */
#ifndef MILLRACE_PACK_H
#define MILLRACE_PACK_H

#include <vector>

#include "server.h"

#include "encode.h"

namespace millrace {

constexpr uint32_t FORMAT = 1;
constexpr size_t ROW_ID_BYTES = 8;

class KeyCodec {
public:
    void open(KEY *key, bool is_unique);

    /* Encodes the parts of the key of a record. Returns whether a part was NULL. */
    bool encode(const uchar *record, Bytes *out) const;
    /* Encodes the first parts of a key in the server's format. `scratch` is a record to unpack it
     * in. Returns whether a part was NULL. */
    bool encode_image(const uchar *image, key_part_map parts, uchar *scratch, Bytes *out) const;
    /* Most bytes of an encoded key. */
    size_t max_bytes() const { return max_bytes_; }
    /* Whether equal keys are an error. */
    bool is_unique() const { return is_unique_; }

    /* Whether part `n` can be read back. */
    bool can_decode(uint n) const { return parts_[n].can_decode; }
    bool can_decode() const;

    /* Number of parts. */
    uint parts() const { return static_cast<uint>(parts_.size()); }
    Field *field(uint n) const { return parts_[n].field; }
    bool is_nullable(uint n) const { return parts_[n].is_nullable; }
    bool is_downward(uint n) const { return parts_[n].is_downward; }
    /* Length of any value in bytes, without the byte for NULL; 0: values differ in length. */
    uint fixed_bytes(uint n) const
    {
        return parts_[n].kind == Kind::FIXED ? parts_[n].out_bytes : 0;
    }
    void encode_one(uint n, const uchar *record, Bytes *out) const
    {
        encode_part(parts_[n], record, out);
    }
    /* Decodes a key into the columns of a record; false: these bytes are no key. */
    bool decode(Slice key, uchar *record) const;

private:
    enum class Kind {
        FIXED,
        RAW,
        TEXT_FIXED,
        TEXT_PAD,
        TEXT_NO_PAD
    };
    struct Part {
        KEY_PART_INFO *info;
        Field *field;
        Kind kind;
        uint bytes;     /* length in a record, or of a prefix */
        uint chars;     /* most characters */
        uint out_bytes; /* FIXED, RAW, TEXT_FIXED: encoded length */
        Space space;
        bool is_nullable;
        bool is_downward;
        bool can_decode;
    };

    void open_part(KEY_PART_INFO *info, Part *part);
    void open_text(Part *part);
    bool encode_part(const Part &part, const uchar *record, Bytes *out) const;
    static void encode_value(const Part &part, my_ptrdiff_t offset, Bytes *out);
    static Slice text(const Part &part, my_ptrdiff_t offset);
    static const uint8_t *decode_part(const Part &part, const uint8_t *at, const uint8_t *end,
                                      uchar *record);

    KEY *key_ = nullptr;
    bool is_unique_ = false;
    std::vector<Part> parts_;
    size_t max_bytes_ = 0;
};

/* Whether the value of a part can be decoded from a key. */
bool is_decodable(const KEY_PART_INFO *part);
/* Reads one value that Field::sort_string() wrote. */
bool decode_value(Field *field, const uint8_t *from, uint bytes, my_ptrdiff_t offset);

class RowCodec {
public:
    void open(TABLE *table);
    void encode(const uchar *record, Bytes *out) const;
    /* Unpacks a row. Columns behind `max_fields` of the stored ones are left alone. Blobs then
     * point into `row`. */
    bool decode(Slice row, uchar *record, size_t max_fields) const;
    size_t fields() const { return fields_.size(); }
    const std::vector<Field *> &stored_fields() const { return fields_; }
    /* Number of stored columns that must be read for these columns. */
    size_t count_needed(const MY_BITMAP *columns) const;

private:
    TABLE *table_ = nullptr;
    std::vector<Field *> fields_;
};

} // namespace millrace

#endif
