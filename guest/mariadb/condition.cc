// SPDX-License-Identifier: GPL-2.0-only
/* Conditions as filters: which parts are kept. condition_terms.cc: terms from these parts. */
#include "condition.h"

#include "item_cmpfunc.h"
#include "sql_time.h"

namespace millrace {

/* Drops warnings while a constant is read: the server's own comparison gives them again. */
class WarningTrap : public Internal_error_handler {
public:
    explicit WarningTrap(THD *thd) : thd_(thd) { thd->push_internal_handler(this); }
    ~WarningTrap() override { thd_->pop_internal_handler(); }
    bool handle_condition(THD *, uint, const char *, Sql_condition::enum_warning_level *,
                          const char *, Sql_condition **) override
    {
        has_warning = true;
        return true;
    }
    bool has_warning = false;

private:
    THD *thd_;
};

/* Access to the comparison type of BETWEEN, which is protected: a derived class may read it. */
struct BetweenAccess : public Item_func_between {
    static const Type_handler *comparison_type(Item_func_between *item)
    {
        return (item->*(&BetweenAccess::m_comparator)).type_handler();
    }
};

/* Finds the column that an item is, of this table and stored in its rows; nullptr: none. */
static Field *find_column(const TABLE *table, Item *item)
{
    if (item->type() != Item::FIELD_ITEM)
        return nullptr;
    Field *field = static_cast<Item_field *>(item)->field;
    return field && field->table == table && !field->vcol_info ? field : nullptr;
}

/* Whether an item has one value from now to the end of the statement, cheap to compute. */
static bool is_constant(Item *item)
{
    if (!item->const_item() || item->with_field() || item->with_subquery() || item->is_expensive())
        return false;
    if (item->this_item()->basic_const_item())
        return true;
    if (item->type() != Item::FUNC_ITEM && item->type() != Item::CACHE_ITEM)
        return false;
    Item::vcol_func_processor_result found;
    item->walk(&Item::check_vcol_func_processor, false, &found);
    return (found.errors & ~static_cast<uint>(VCOL_TIME_FUNC)) == 0;
}

static uint8_t get_test(Item_func::Functype type)
{
    switch (type) {
    case Item_func::EQ_FUNC:
    case Item_func::EQUAL_FUNC:
        return test::EQUAL;
    case Item_func::NE_FUNC:
        return test::NOT_EQUAL;
    case Item_func::LT_FUNC:
        return test::BELOW;
    case Item_func::LE_FUNC:
        return test::AT_MOST;
    case Item_func::GE_FUNC:
        return test::AT_LEAST;
    case Item_func::GT_FUNC:
        return test::ABOVE;
    default:
        return 0;
    }
}

/* --- constants as the column holds them --- */

static bool store_int(THD *thd, Field *field, Item *constant)
{
    longlong value = constant->val_int();
    if (constant->null_value || (value < 0 && constant->unsigned_flag != field->is_unsigned()))
        return false;
    Use_relaxed_field_copy relaxed(thd);
    field->store(value, constant->unsigned_flag);
    return field->val_int() == value;
}

/* Stores a whole number of 32 bits: these are exact as doubles, and further apart than the server's
 * tolerance. */
static bool store_real(THD *thd, Field *field, Item *constant)
{
    double value = constant->val_real();
    if (constant->null_value || !(value >= INT_MIN32 && value <= UINT_MAX32) ||
        value != floor(value))
        return false;
    Use_relaxed_field_copy relaxed(thd);
    field->store(static_cast<longlong>(value), false);
    return field->val_real() == value;
}

static bool store_decimal(THD *thd, Field *field, Item *constant)
{
    my_decimal buffer, stored_buffer;
    my_decimal *value = constant->val_decimal(&buffer);
    if (!value || constant->null_value)
        return false;
    Use_relaxed_field_copy relaxed(thd);
    field->store_decimal(value);
    my_decimal *stored = field->val_decimal(&stored_buffer);
    return stored && my_decimal_cmp(value, stored) == 0;
}

static bool store_datetime(THD *thd, Field *field, Item *constant)
{
    longlong value = constant->val_datetime_packed(thd);
    if (constant->null_value)
        return false;
    MYSQL_TIME time;
    unpack_time(value, &time, MYSQL_TIMESTAMP_DATETIME);
    Use_relaxed_field_copy relaxed(thd);
    field->store_time_dec(&time, TIME_SECOND_PART_DIGITS);
    return field->val_datetime_packed(thd) == value;
}

static bool store_time(THD *thd, Field *field, Item *constant)
{
    longlong value = constant->val_time_packed(thd);
    if (constant->null_value)
        return false;
    MYSQL_TIME time;
    unpack_time(value, &time, MYSQL_TIMESTAMP_TIME);
    Use_relaxed_field_copy relaxed(thd);
    field->store_time_dec(&time, TIME_SECOND_PART_DIGITS);
    return field->val_time_packed(thd) == value;
}

/* Stores the constant in the column. Returns whether the column, compared as this type, can be
 * compared by its bytes. */
static bool store_exactly(THD *thd, Field *field, const Type_handler *comparison_type,
                          Item *constant)
{
    bool is_time = comparison_type->cmp_type() == TIME_RESULT &&
                   comparison_type->field_type() != MYSQL_TYPE_TIMESTAMP;
    bool has_date = comparison_type->mysql_timestamp_type() == MYSQL_TIMESTAMP_DATE ||
                    comparison_type->mysql_timestamp_type() == MYSQL_TIMESTAMP_DATETIME;
    switch (field->real_type()) {
    case MYSQL_TYPE_TINY:
    case MYSQL_TYPE_SHORT:
    case MYSQL_TYPE_INT24:
    case MYSQL_TYPE_LONG:
        if (comparison_type->cmp_type() == REAL_RESULT)
            return store_real(thd, field, constant);
        /* fall through */
    case MYSQL_TYPE_LONGLONG:
        return comparison_type->cmp_type() == INT_RESULT && constant->cmp_type() == INT_RESULT &&
               store_int(thd, field, constant);
    case MYSQL_TYPE_NEWDECIMAL:
        return comparison_type->cmp_type() == DECIMAL_RESULT && store_decimal(thd, field, constant);
    case MYSQL_TYPE_NEWDATE:
    case MYSQL_TYPE_DATETIME2:
        return is_time && has_date && store_datetime(thd, field, constant);
    case MYSQL_TYPE_TIME2:
        return is_time && comparison_type->mysql_timestamp_type() == MYSQL_TIMESTAMP_TIME &&
               store_time(thd, field, constant);
    default:
        return false;
    }
}

Condition::Part *Condition::add(Field *field, Kind kind, uint8_t test)
{
    parts_.emplace_back();
    Part *part = &parts_.back();
    part->field = field;
    part->kind = kind;
    part->test = test;
    part->is_marked = part->is_prefix = false;
    return part;
}

void Condition::keep(THD *thd, Field *field, uint8_t test, const Type_handler *comparison_type,
                     CHARSET_INFO *cs, Item *constant, uchar *scratch)
{
    if (!test || !is_constant(constant))
        return;
    if (comparison_type->cmp_type() == STRING_RESULT) {
        WarningTrap trap(thd);
        if (!keep_text(field, test, cs, constant))
            keep_enum(field, test, cs, constant);
        if (trap.has_warning)
            parts_.clear();
        return;
    }
    my_ptrdiff_t offset = scratch - field->table->record[0];
    bool is_good;
    {
        WarningTrap trap(thd);
        field->move_field_offset(offset);
        field->set_notnull();
        is_good = store_exactly(thd, field, comparison_type, constant) && !trap.has_warning;
        field->move_field_offset(-offset);
    }
    if (!is_good)
        return;
    enum_field_types type = field->real_type();
    bool is_ordered =
        type == MYSQL_TYPE_NEWDECIMAL || type == MYSQL_TYPE_DATETIME2 || type == MYSQL_TYPE_TIME2;
    /* A decimal zero may have a sign: -0 lies below 0. */
    if (type == MYSQL_TYPE_NEWDECIMAL && (test == test::EQUAL || test == test::AT_LEAST)) {
        my_decimal buffer;
        field->move_field_offset(offset);
        bool is_zero = my_decimal_is_zero(field->val_decimal(&buffer));
        field->move_field_offset(-offset);
        if (is_zero && test == test::AT_LEAST)
            return;
        if (is_zero)
            test = test::AT_MOST;
    }
    add(field, is_ordered ? Kind::ORDERED : Kind::NUMBER, test)
        ->image.assign(field->ptr + offset, field->pack_length());
}

/* --- strings --- */

/* Whether a collation finds equal only equal bytes, but for spaces at the end. */
static bool is_bytewise(CHARSET_INFO *cs)
{
    if (cs == &my_charset_bin)
        return true;
    if (!(cs->state & MY_CS_BINSORT) || cs->mbminlen != 1)
        return false;
    for (const char *name : {"latin1", "ascii", "utf8mb3", "utf8mb4"})
        if (strcmp(cs->cs_name.str, name) == 0)
            return true;
    return false;
}

/* Returns the characters of a constant, if their bytes are the same in the column's character set;
 * else nullptr. */
static String *get_text(Item *constant, CHARSET_INFO *cs, String *buffer)
{
    if (!constant->this_item()->basic_const_item() || constant->result_type() != STRING_RESULT)
        return nullptr;
    String *text = constant->val_str(buffer);
    if (!text || constant->null_value)
        return nullptr;
    if (cs == &my_charset_bin || my_charset_same(text->charset(), cs))
        return text;
    bool is_ascii = cs->mbminlen == 1 && text->charset()->mbminlen == 1 &&
                    text->charset() != &my_charset_bin && !(cs->state & MY_CS_NONASCII) &&
                    !(text->charset()->state & MY_CS_NONASCII);
    for (uint32 i = 0; i < text->length() && is_ascii; i++)
        is_ascii = static_cast<uchar>(text->ptr()[i]) < 0x80;
    return is_ascii ? text : nullptr;
}

static bool is_varchar(const Field *field)
{
    return field->real_type() == MYSQL_TYPE_VARCHAR &&
           field->type_handler() == &type_handler_varchar && !(field->flags & BLOB_FLAG);
}

static bool is_char(const Field *field)
{
    return field->real_type() == MYSQL_TYPE_STRING && field->type_handler() == &type_handler_string;
}

/* Keeps a comparison of text where that is possible. Returns whether the column is one of text. */
bool Condition::keep_text(Field *field, uint8_t test, CHARSET_INFO *cs, Item *constant)
{
    if (!is_varchar(field) && !is_char(field))
        return false;
    if (cs != field->charset() || !is_bytewise(cs) ||
        (test != test::EQUAL && test != test::NOT_EQUAL))
        return true;
    StringBuffer<MAX_FIELD_WIDTH> buffer(cs);
    String *text = get_text(constant, cs, &buffer);
    if (!text || text->length() > field->field_length)
        return true;
    bool is_padded = is_char(field) || (cs != &my_charset_bin && !(cs->state & MY_CS_NOPAD));
    const char *chars = text->ptr();
    size_t size = text->length();
    if (test == test::EQUAL && is_padded)
        while (size > 0 && (chars[size - 1] == ' ' || chars[size - 1] == 0))
            size--;
    if (test == test::NOT_EQUAL && is_char(field))
        return true; /* how it is packed is not known */
    if (test == test::EQUAL && is_padded && size == 0)
        return true;
    Part *part = add(field, Kind::TEXT, test);
    part->is_prefix = test == test::EQUAL && is_padded;
    part->image.assign(chars, size);
    return true;
}

/* Keeps equality with the one value of an ENUM that equals the constant. */
bool Condition::keep_enum(Field *field, uint8_t test, CHARSET_INFO *cs, Item *constant)
{
    if (field->real_type() != MYSQL_TYPE_ENUM || cs != field->charset() ||
        (test != test::EQUAL && test != test::NOT_EQUAL))
        return false;
    StringBuffer<MAX_FIELD_WIDTH> buffer(cs);
    String *text = get_text(constant, cs, &buffer);
    const TYPELIB *values = field->get_typelib();
    if (!text || !values)
        return false;
    uint found = 0, number = 0;
    for (uint i = 0; i <= values->count; i++) { /* 0 is the empty string, for an invalid value */
        const char *name = i ? values->type_names[i - 1] : "";
        size_t size = i ? values->type_lengths[i - 1] : 0;
        if (cs->strnncollsp(text->ptr(), text->length(), name, size) == 0) {
            found++;
            number = i;
        }
    }
    if (found != 1)
        return false;
    Part *part = add(field, Kind::NUMBER, test);
    for (uint i = 0; i < field->pack_length(); i++)
        part->image.push(static_cast<uint8_t>(number >> (8 * i)));
    return true;
}

/* Keeps LIKE 'beginning%': compared byte by byte, without padding. */
void Condition::take_like(THD *thd, TABLE *table, Item_func *function)
{
    Item_func_like *like = static_cast<Item_func_like *>(function);
    Field *field = find_column(table, like->arguments()[0]);
    CHARSET_INFO *cs = like->compare_collation();
    if (!field || like->negated || (!is_varchar(field) && !is_char(field)) ||
        cs != field->charset() || !is_bytewise(cs) || like->escape < 0 || like->escape >= 0x80 ||
        !is_constant(like->arguments()[1]))
        return;
    WarningTrap trap(thd);
    StringBuffer<MAX_FIELD_WIDTH> buffer(cs);
    String *text = get_text(like->arguments()[1], cs, &buffer);
    if (!text || trap.has_warning)
        return;
    const char *chars = text->ptr();
    size_t size = 0;
    while (size < text->length() && chars[size] != wild_many && chars[size] != wild_one &&
           chars[size] != static_cast<char>(like->escape))
        size++;
    if (is_char(field)) /* the end of a CHAR is cut off when it is packed */
        while (size > 0 && (chars[size - 1] == ' ' || chars[size - 1] == 0))
            size--;
    if (size == 0 || size > field->field_length)
        return;
    Part *part = add(field, Kind::TEXT, test::EQUAL);
    part->is_prefix = true;
    part->image.assign(chars, size);
}

/* --- the condition --- */

void Condition::take_comparison(THD *thd, TABLE *table, Item_func *function, uchar *scratch)
{
    Item_bool_func2_with_rev *comparison = static_cast<Item_bool_func2_with_rev *>(function);
    Item **arguments = comparison->arguments();
    bool is_reversed = !find_column(table, arguments[0]);
    Field *field = find_column(table, arguments[is_reversed]);
    if (!field)
        return;
    uint8_t test = get_test(is_reversed ? comparison->rev_functype() : comparison->functype());
    keep(thd, field, test, comparison->compare_type_handler(), comparison->compare_collation(),
         arguments[!is_reversed], scratch);
}

void Condition::take_between(THD *thd, TABLE *table, Item_func *function, uchar *scratch)
{
    Item_func_between *between = static_cast<Item_func_between *>(function);
    Item **arguments = between->arguments();
    Field *field = find_column(table, arguments[0]);
    if (!field || between->negated)
        return;
    const Type_handler *comparison_type = BetweenAccess::comparison_type(between);
    if (comparison_type->cmp_type() == STRING_RESULT)
        return;
    keep(thd, field, test::AT_LEAST, comparison_type, nullptr, arguments[1], scratch);
    keep(thd, field, test::AT_MOST, comparison_type, nullptr, arguments[2], scratch);
}

/* Keeps IS NULL and IS NOT NULL. For a column that cannot be NULL they have another meaning in some
 * types. */
void Condition::take_null_test(TABLE *table, Item_func *function, uint8_t test)
{
    Field *field = find_column(table, function->arguments()[0]);
    if (field && field->null_ptr)
        add(field, Kind::NULLNESS, test);
}

void Condition::take_all(THD *thd, TABLE *table, Item *item, uchar *scratch)
{
    if (item->type() == Item::COND_ITEM) {
        Item_cond *list = static_cast<Item_cond *>(item);
        if (list->functype() != Item_func::COND_AND_FUNC)
            return;
        List_iterator<Item> iterator(*list->argument_list());
        while (Item *part = iterator++)
            take_all(thd, table, part, scratch);
        return;
    }
    if (item->type() != Item::FUNC_ITEM)
        return;
    Item_func *function = static_cast<Item_func *>(item);
    switch (function->functype()) {
    case Item_func::EQ_FUNC:
    case Item_func::EQUAL_FUNC:
    case Item_func::NE_FUNC:
    case Item_func::LT_FUNC:
    case Item_func::LE_FUNC:
    case Item_func::GE_FUNC:
    case Item_func::GT_FUNC:
        take_comparison(thd, table, function, scratch);
        break;
    case Item_func::BETWEEN:
        take_between(thd, table, function, scratch);
        break;
    case Item_func::LIKE_FUNC:
        take_like(thd, table, function);
        break;
    case Item_func::ISNULL_FUNC:
        take_null_test(table, function, test::EQUAL);
        break;
    case Item_func::ISNOTNULL_FUNC:
        take_null_test(table, function, test::NOT_EQUAL);
        break;
    default:
        break;
    }
}

/* Whether it matters for how many rows a condition is evaluated: RAND(), functions that are not
 * deterministic, user variables. An item that is not fixed was left out of the statement, and its
 * tables are not known. */
static bool has_effects(THD *thd, const Item *condition)
{
    for (SELECT_LEX *select = thd->lex->all_selects_list; select;
         select = select->next_select_in_list())
        if ((select->uncacheable & (UNCACHEABLE_RAND | UNCACHEABLE_SIDEEFFECT)) ||
            (select->where && select->where->fixed() &&
             (select->where->used_tables() & RAND_TABLE_BIT)))
            return true;
    return (condition->used_tables() & RAND_TABLE_BIT) != 0;
}

void Condition::take(THD *thd, TABLE *table, const Item *condition, uchar *scratch)
{
    clear();
    if (!has_effects(thd, condition))
        take_all(thd, table, const_cast<Item *>(condition), scratch);
}

} // namespace millrace
