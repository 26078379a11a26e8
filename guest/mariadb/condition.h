// SPDX-License-Identifier: GPL-2.0-only
/* Condition of a table, as far as the host can check it.
 *
 * Theory of operation. The parts of a condition are kept that are in its outermost AND and compare
 * a column with a constant: each of them is true for every row that the statement wants. The
 * constant is stored in a record as the column would hold it, and read back as the server's
 * comparison reads the column: the part is kept only where both give the same value, in the type
 * of the comparison.
 *
 * A filter is made of them for each way to read. In keys all values are in order. In rows a
 * column has a fixed place if all columns in front of it have one size; a NULL column takes no
 * room, so the condition's parts about NULLs count, too. Little-endian numbers are in order byte
 * by byte only.
 *
 * Only bytes are kept: neither the condition nor its constants are needed any more. */
#ifndef MILLRACE_CONDITION_H
#define MILLRACE_CONDITION_H

#include <vector>

#include "server.h"

#include "filter.h"
#include "pack.h"

class Item_func;

namespace millrace {

class Condition {
public:
    void clear() { parts_.clear(); }
    bool empty() const { return parts_.empty(); }
    /* Keeps all possible parts of a condition of the table. `scratch`: a record to store
     * constants in. */
    void take(THD *thd, TABLE *table, const Item *condition, uchar *scratch);

    /* Adds terms for an index's keys: for those that all begin with the same `known_bytes`, and
     * for the columns from `first_part` on. Marks parts that the terms cover completely. */
    void add_key_terms(const KeyCodec &key, uchar *scratch, size_t known_bytes, uint first_part,
                       Filter *filter);
    /* Adds terms for rows, of the parts that are not marked. */
    void add_row_terms(const TABLE *table, const RowCodec &rows, Filter *filter) const;
    void forget_marks();

private:
    enum class Kind : uint8_t {
        NUMBER, /* little-endian in rows */
        ORDERED,
        TEXT,    /* strings that are equal where their bytes are */
        NULLNESS /* test EQUAL: the column is NULL, else it is not */
    };
    struct Part {
        Field *field;
        Kind kind;
        uint8_t test;
        bool is_marked;
        bool is_prefix; /* TEXT: the value begins with the image */
        Bytes image;    /* constant as in a record; TEXT: its characters */
    };
    enum class Null : uint8_t {
        NO,
        YES,
        MAYBE
    };

    void take_all(THD *thd, TABLE *table, Item *item, uchar *scratch);
    void take_comparison(THD *thd, TABLE *table, Item_func *function, uchar *scratch);
    void take_between(THD *thd, TABLE *table, Item_func *function, uchar *scratch);
    void take_like(THD *thd, TABLE *table, Item_func *function);
    void take_null_test(TABLE *table, Item_func *function, uint8_t test);
    void keep(THD *thd, Field *field, uint8_t test, const Type_handler *comparison_type,
              CHARSET_INFO *cs, Item *constant, uchar *scratch);
    bool keep_text(Field *field, uint8_t test, CHARSET_INFO *cs, Item *constant);
    bool keep_enum(Field *field, uint8_t test, CHARSET_INFO *cs, Item *constant);
    Part *add(Field *field, Kind kind, uint8_t test);
    Null get_nullness(const Field *field) const;
    void add_row_parts(const Field *field, size_t offset, Filter *filter) const;
    void add_row_number(const Field *field, size_t offset, Filter *filter) const;

    std::vector<Part> parts_;
};

} // namespace millrace

#endif
