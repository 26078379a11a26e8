# SPDX-License-Identifier: GPL-2.0-only
"""Random tables of all types and random conditions on them, for conditions.py. The table's name is T, another
reference to it U; the engine stands in for ENGINE."""

COLLATIONS = [
    "latin1_bin",
    "latin1_nopad_bin",
    "latin1_swedish_ci",
    "latin1_general_cs",
    "ascii_bin",
    "utf8mb3_bin",
    "utf8mb3_unicode_ci",
    "utf8mb4_bin",
    "utf8mb4_nopad_bin",
    "utf8mb4_general_ci",
    "ucs2_bin",
    "utf16_bin",
]
WORDS = ["", " ", "a", "A", "a ", "a  ", "ab", "abc", "abc ", "abd", "b", "z", "a\\t", "a\\0", "\\0", "5", "5abc", "-1"]
WORDS += ["1e0", "a%", "a_c", "2020-01-01", "abcd\\0\\0", "ab  c"]
DATES = ["0000-00-00", "1970-01-01", "2019-12-31", "2020-01-01", "2020-01-31", "2020-02-29", "2024-06-15", "9999-12-31"]
TIMES = ["00:00:00", "-00:00:01", "-00:00:00.5", "00:00:00.000001", "12:34:56", "12:34:56.789", "-838:59:59", "838:59:59"]
TIMES += ["-00:00:01.25", "-01:00:00.01", "00:00:00.01"]
MOMENTS = ["0000-00-00 00:00:00", "1971-02-03 04:05:06", "2020-01-01 00:00:00", "2020-01-01 00:00:00.5"]
MOMENTS += ["2020-01-01 00:00:00.123456", "2020-03-29 02:30:00", "2020-10-25 02:30:00", "2037-12-31 23:59:59.999"]
NUMBERS = ["0", "1", "-1", "2", "5", "9", "10", "99", "100", "127", "128", "-128", "-129", "255", "256", "257", "1000"]
NUMBERS += ["32767", "-32768", "65535", "65536", "8388607", "16777215", "2147483647", "-2147483648", "4294967295"]
NUMBERS += ["9007199254740992", "9007199254740993", "9223372036854775807", "-9223372036854775808", "18446744073709551615"]
DECIMALS = ["0", "-0.0", "0.01", "-0.01", "1.5", "1.50", "-1.5", "12.345", "99.99", "-999.99", "999.99", "123456.654321"]
FLOATS = ["0", "-0e0", "0.1", "1.5", "-1.5", "1e10", "3.4e38", "0.30000001192092896"]


def quoted(text):
    return "'" + text + "'"


class Column:
    def __init__(self, name, type_, pool, is_null, extra=""):
        self.name, self.type, self.pool, self.is_null, self.extra = name, type_, pool, is_null, extra

    def definition(self):
        null = "" if self.extra else " NULL" if self.is_null else " NOT NULL"
        return "%s %s%s%s" % (self.name, self.type, null, self.extra)


def column(rng, name):
    kind = rng.randrange(16)
    sign = rng.choice(["", " UNSIGNED"])
    if kind < 4:
        type_ = rng.choice(["TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT"]) + sign
        pool = NUMBERS
    elif kind < 6:
        type_, pool = rng.choice(["DECIMAL(5,2)", "DECIMAL(20,6)", "DECIMAL(10,0)", "DECIMAL(30,2)"]) + sign, DECIMALS
    elif kind == 6:
        type_, pool = rng.choice(["FLOAT", "DOUBLE", "FLOAT(6,2)", "DOUBLE(8,3)"]), FLOATS
    elif kind == 7:
        type_, pool = "DATE", [quoted(d) for d in DATES]
    elif kind == 8:
        type_ = rng.choice(["DATETIME", "DATETIME(1)", "DATETIME(3)", "DATETIME(6)", "TIMESTAMP", "TIMESTAMP(3)"])
        pool = [quoted(m) for m in MOMENTS]
    elif kind == 9:
        type_, pool = rng.choice(["TIME", "TIME(1)", "TIME(2)", "TIME(4)", "TIME(6)"]), [quoted(t) for t in TIMES]
    elif kind == 10:
        collation = rng.choice(COLLATIONS)
        values = "'a','A ','abc','5','z'" if collation.endswith(("bin", "cs")) else "'a','abc','5','z'"
        type_ = rng.choice(["ENUM(%s) COLLATE %s", "SET(%s) COLLATE %s"]) % (values, collation)
        pool = [quoted(w) for w in ("a", "abc", "5", "z", "nothing", "")]
    elif kind == 11:
        return rng.choice(
            [
                Column(name, "YEAR", ["0", "1970", "70", "2020", "'2020'", "2155"], rng.random() < 0.5),
                Column(name, "BIT(5)", ["b'0'", "b'10101'", "1", "31"], rng.random() < 0.5),
                Column(name, "UUID", ["'00000000-0000-0000-0000-000000000001'"] * 2, rng.random() < 0.5),
                Column(name, "INET6", ["'::'", "'::1'", "'1.2.3.4'"], rng.random() < 0.5),
            ]
        )
    elif kind == 12:
        type_, pool = rng.choice(["BINARY(1)", "BINARY(4)", "VARBINARY(4)", "VARBINARY(300)"]), [quoted(w) for w in WORDS]
    elif kind == 13:
        type_, pool = rng.choice(["TEXT", "BLOB", "VARCHAR(10) COMPRESSED"]), [quoted(w) for w in WORDS]
    else:
        size = rng.choice(["CHAR(1)", "CHAR(5)", "CHAR(100)", "VARCHAR(3)", "VARCHAR(10)", "VARCHAR(300)"])
        type_, pool = "%s COLLATE %s" % (size, rng.choice(COLLATIONS)), [quoted(w) for w in WORDS]
    # Few values, so that conditions meet some.
    return Column(name, type_, rng.sample(pool, min(len(pool), 6)), rng.random() < 0.4)


class Table:
    def __init__(self, rng):
        self.columns = [column(rng, "c%d" % i) for i in range(rng.randint(2, 8))]
        id_type = rng.choice(["INT", "BIGINT UNSIGNED", "SMALLINT"])
        self.id = Column("id", id_type, [str(n) for n in range(0, 70, 7)], False)
        at = rng.choice([0, rng.randint(0, len(self.columns))])
        self.columns.insert(at, self.id)
        self.keys = self.make_keys(rng)
        self.partitions = " PARTITION BY KEY (id) PARTITIONS 3" if rng.random() < 0.15 else ""
        if rng.random() < 0.3:
            of = rng.choice([c for c in self.columns if "INT" in c.type or c.type.startswith("DECIMAL")])
            how = rng.choice(["VIRTUAL", "STORED"])
            self.columns.append(Column("g", "BIGINT", NUMBERS, True, " AS (LENGTH(%s)) %s" % (of.name, how)))

    def make_keys(self, rng):
        def part(column):
            # An index and a scan of InnoDB disagree on a CHAR with NO PAD; compressed columns are in no key.
            if "COMPRESSED" in column.type or ("nopad" in column.type and column.type.startswith("CHAR")):
                return None
            long = column.type.startswith(("TEXT", "BLOB")) or "00)" in column.type
            return column.name + ("(5)" if long else "") + rng.choice(["", "", " DESC"])

        keys = [rng.choice(["PRIMARY KEY (id)", "PRIMARY KEY (id)", "UNIQUE KEY (id)"])]
        if rng.random() < 0.2:
            keys = ["KEY k (id)"]
        for n in range(rng.randint(0, 3)):
            parts = [part(c) for c in rng.sample(self.columns, rng.randint(1, min(3, len(self.columns))))]
            parts = [p for p in parts if p]
            if parts:
                keys.append("KEY k%d (%s)" % (n, ", ".join(parts)))
        return keys

    def create(self):
        parts = [c.definition() for c in self.columns] + self.keys
        rest = "ENGINE=ENGINE DEFAULT CHARSET=utf8mb4" + self.partitions
        return "CREATE TABLE T (%s) %s" % (", ".join(parts), rest)

    def inserts(self, rng):
        plain = [c for c in self.columns if not c.extra]
        rows = []
        for n in range(rng.randint(20, 60)):
            values = []
            for c in plain:
                value = str(n) if c is self.id else rng.choice(c.pool)
                values.append("NULL" if c.is_null and rng.random() < 0.25 else value)
            rows.append("(%s)" % ", ".join(values))
        return "INSERT IGNORE INTO T (%s) VALUES %s" % (", ".join(c.name for c in plain), ", ".join(rows))


def constant(rng, column):
    if rng.random() < 0.75:
        return rng.choice(column.pool)
    pools = [[quoted(w) for w in WORDS], NUMBERS, DECIMALS, FLOATS, ["NULL"], ["X'61'", "0x61", "TRUE", "_latin1'a'"]]
    pools.append([quoted(d) for d in DATES] + [quoted(m) for m in MOMENTS] + [quoted(t) for t in TIMES])
    pools.append(["DATE'2020-01-01'", "TIMESTAMP'2020-01-01 00:00:00'", "TIME'12:34:56'", "CAST('2020-01-01' AS DATE)"])
    pools.append(["CAST(5 AS DECIMAL(10,3))", "2+3", "CONCAT('a','bc')", "DATE'2020-01-02' - INTERVAL 1 DAY", "NOW()"])
    pools.append(["(SELECT 5)", "(SELECT MIN(id) FROM T)", "@v", "'abc' COLLATE utf8mb4_bin", "BINARY 'abc'"])
    return rng.choice(rng.choice(pools))


def pattern(rng):
    word = rng.choice(WORDS)
    return quoted(rng.choice([word + "%", word, "%" + word, word[:2] + "_%", word + "\\\\%", "a|%%"]))


def term(rng, table, alias):
    column = rng.choice(table.columns)
    name = alias + "." + column.name
    kind = rng.randrange(20)
    if kind < 11:
        a, b = name, constant(rng, column)
        if rng.random() < 0.2:
            a, b = b, a
        return "%s %s %s" % (a, rng.choice(["=", "=", "=", "<>", "<", "<=", ">", ">=", "<=>"]), b)
    if kind < 14:
        word = rng.choice(["BETWEEN", "BETWEEN", "BETWEEN", "NOT BETWEEN"])
        return "%s %s %s AND %s" % (name, word, constant(rng, column), constant(rng, column))
    if kind == 14:
        values = ", ".join(constant(rng, column) for _ in range(rng.randint(1, 4)))
        return "%s %s (%s)" % (name, rng.choice(["IN", "NOT IN"]), values)
    if kind < 17:
        escape = rng.choice(["", "", " ESCAPE '|'"])
        return "%s %s %s%s" % (name, rng.choice(["LIKE", "LIKE", "LIKE", "NOT LIKE"]), pattern(rng), escape)
    if kind < 19:
        return "%s %s" % (name, rng.choice(["IS NULL", "IS NOT NULL"]))
    other = rng.choice(table.columns)
    return "%s %s %s.%s" % (name, rng.choice(["=", "<", "<>"]), alias, other.name)


def condition(rng, table, alias="T", depth=0):
    parts = [term(rng, table, alias) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4]))]
    if depth < 2 and rng.random() < 0.15:
        inner = condition(rng, table, alias, depth + 1)
        parts.append(rng.choice(["(%s)", "NOT (%s)"]) % inner)
    joiner = " AND " if rng.random() < 0.85 else rng.choice([" OR ", " XOR "])
    return "(%s)" % joiner.join(parts)


def hint(rng, table):
    names = [k.split("(")[0].split()[-1] for k in table.keys if k.startswith("KEY")]
    if any(k.startswith("PRIMARY") for k in table.keys):
        names.append("PRIMARY")
    if not names or rng.random() < 0.5:
        return rng.choice(["", "", " IGNORE INDEX (%s)" % ", ".join(names)]) if names else ""
    return " FORCE INDEX (%s)" % rng.choice(names)


def columns(rng, table, alias="T"):
    some = rng.sample(table.columns, rng.randint(1, len(table.columns)))
    return ", ".join("HEX(%s.%s)" % (alias, c.name) for c in some + [table.id])


def joined(rng, table):
    a, b = rng.choice(table.columns).name, rng.choice(table.columns).name
    on = "T.%s = U.%s" % (a, rng.choice([a, b, "id"]))
    for alias in rng.sample(["T", "U"], rng.randint(0, 2)):
        on += " AND " + condition(rng, table, alias)
    where = condition(rng, table, rng.choice("TU"))
    if rng.random() < 0.3:
        where += " AND U.%s IS NULL" % rng.choice(table.columns).name
    kind = rng.choice(["JOIN", "LEFT JOIN", "RIGHT JOIN", "STRAIGHT_JOIN"])
    return "SELECT HEX(T.id), HEX(U.id) FROM T %s T U ON %s WHERE %s" % (kind, on, where)


def nested(rng, table):
    outer, inner = condition(rng, table), condition(rng, table, "U")
    a, b = rng.choice(table.columns).name, rng.choice(table.columns).name
    word = rng.choice(["", "NOT "])
    return rng.choice(
        [
            "SELECT HEX(T.id) FROM T WHERE %s AND %sEXISTS (SELECT 1 FROM T U WHERE U.%s = T.%s AND %s)"
            % (outer, word, a, b, inner),
            "SELECT HEX(T.id) FROM T WHERE %s AND T.%s %sIN (SELECT U.%s FROM T U WHERE %s)"
            % (outer, a, word, a, inner),
            "SELECT HEX(T.id), (SELECT COUNT(*) FROM T U WHERE U.%s < T.%s AND %s) FROM T WHERE %s"
            % (a, b, inner, outer),
            "SELECT * FROM (SELECT HEX(U.id) AS x, U.* FROM T U WHERE %s) T WHERE %s" % (inner, outer),
            "SELECT HEX(T.id) FROM T WHERE %s UNION ALL SELECT HEX(U.id) FROM T U WHERE %s" % (outer, inner),
        ]
    )


def changing(rng, table):
    """Statements of one transaction, which is rolled back: what is read in it are its own changes, too."""
    level = rng.choice(["READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    column = rng.choice([c for c in table.columns if not c.extra and c is not table.id])
    change = rng.choice(
        [
            "UPDATE IGNORE T SET %s = %s WHERE %s" % (column.name, rng.choice(column.pool), condition(rng, table)),
            "DELETE FROM T WHERE %s" % condition(rng, table),
            "UPDATE IGNORE T SET id = id + 100 WHERE %s" % condition(rng, table),
            "INSERT IGNORE INTO T (id, %s) VALUES (200, %s)" % (column.name, rng.choice(column.pool)),
        ]
    )
    read = "SELECT %s FROM T WHERE %s" % (columns(rng, table), condition(rng, table))
    return [
        "SET TRANSACTION ISOLATION LEVEL " + level,
        "BEGIN",
        change,
        read + rng.choice(["", " FOR UPDATE", " LOCK IN SHARE MODE"]),
        "SELECT HEX(id), T.* FROM T",
        "ROLLBACK",
    ]


def prepared(rng, table):
    where = condition(rng, table)
    column = rng.choice(table.columns)
    first, second = constant(rng, column), constant(rng, column)
    text = "SELECT HEX(id) FROM T WHERE T.%s %s ? AND %s" % (column.name, rng.choice(["=", "<", ">=", "<>"]), where)
    return [
        'PREPARE s FROM "%s"' % text.replace("\\", "\\\\"),
        "SET @p = %s, @q = %s" % (first, second),
        "EXECUTE s USING @p",
        "EXECUTE s USING @q",
    ]


def query(rng, table):
    """A list of statements."""
    kind = rng.randrange(20)
    where = condition(rng, table)
    if kind < 9:
        return ["SELECT %s FROM T%s WHERE %s" % (columns(rng, table), hint(rng, table), where)]
    if kind == 9:
        order = rng.choice(table.columns).name
        return [
            "SELECT HEX(T.id) FROM T%s WHERE %s ORDER BY T.%s, T.id LIMIT %d"
            % (hint(rng, table), where, order, rng.randint(1, 9))
        ]
    if kind == 10:
        name = rng.choice(table.columns).name
        return [
            "SELECT HEX(%s), COUNT(*), HEX(MIN(id)), HEX(MAX(id)) FROM T%s WHERE %s GROUP BY 1"
            % (name, hint(rng, table), where)
        ]
    if kind == 11:
        name = rng.choice(table.columns).name
        return ["SELECT DISTINCT HEX(MIN(%s)), HEX(MAX(%s)), COUNT(%s) FROM T WHERE %s" % (name, name, name, where)]
    if kind < 14:
        return [joined(rng, table)]
    if kind < 16:
        return [nested(rng, table)]
    if kind == 16:
        return prepared(rng, table)
    if kind == 17:
        return ["SELECT COUNT(*) FROM T%s WHERE %s" % (hint(rng, table), where)]
    return changing(rng, table)
