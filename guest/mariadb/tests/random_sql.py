# SPDX-License-Identifier: GPL-2.0-only
"""Random tables and statements for `differential`.

Their results must not depend on the plan: rows are ordered by a unique column, and changes that may
meet duplicates go row by row in that order.
"""
import re

COLLATIONS = [
    "utf8mb4_general_ci", "utf8mb4_unicode_ci", "utf8mb4_bin", "utf8mb4_nopad_bin", "latin1_swedish_ci",
    "latin1_bin", "latin1_german2_ci", "utf8mb4_unicode_nopad_ci", "utf8mb4_unicode_520_ci", "ascii_bin",
    "cp1250_czech_cs", "utf8mb3_general_ci", "sjis_japanese_ci", "ucs2_general_ci",
    "utf8mb4_general_nopad_ci",
]
# With tails that sort below and above spaces, accents, ligatures, trailing spaces, long ones.
WORDS = [
    "", " ", "a", "A", "a ", "a  ", "ab", "aB", "a\\t", "a\\tb", "a b", "a!", "b", "Z", "zz", "aaaaaaaa",
    "aaaaaaaaa", "aaaaaaaa ", "aaaaaaaa\\t", "aaaaaaaab", "aaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaab",
    "aaaaaaaaaaaaaaaa\\t", "0", "10", "9", "-1", "_", "~",
]
WIDE = ["ä", "Ä", "ß", "ss", "é", "e", "ö", "oe", "ü", "ÿ"]
RAW = ["", "\\0", "\\0\\0", "a", "a\\0", "aaaaaaaa", "aaaaaaaa\\0", "aaaaaaaaa", "a ", "A", "\\x"]


class Column:
    """Type of a column, with its values and its use in keys."""

    def __init__(self, name, rng):
        self.name = name
        self.is_null = rng.random() < 0.5
        self.prefix = ""
        kind = rng.choice(
            [
                "int",
                "int",
                "int",
                "small",
                "big",
                "unsigned",
                "decimal",
                "float",
                "double",
                "date",
                "time",
                "datetime",
                "timestamp",
                "year",
                "char",
                "varchar",
                "varchar",
                "varchar",
                "text",
                "blob",
                "binary",
                "varbinary",
                "enum",
                "set",
                "bit",
                "bool",
                "json",
            ]
        )
        getattr(self, "make_" + kind)(rng)

    def numbers(self, kind, low, high):
        self.type = kind
        self.value = lambda r: str(
            r.choice([r.randint(low, high), r.randint(-3, 12), r.randint(-3, 12)])
            if low < 0
            else r.choice([r.randint(0, high), r.randint(0, 12)])
        )

    def make_int(self, rng):
        self.numbers("int", -(2**31), 2**31 - 1)

    def make_small(self, rng):
        self.numbers("smallint", -(2**15), 2**15 - 1)

    def make_big(self, rng):
        self.numbers("bigint", -(2**63), 2**63 - 1)

    def make_unsigned(self, rng):
        self.numbers(rng.choice(["tinyint unsigned", "mediumint unsigned"]), 0, 255)

    def make_bool(self, rng):
        self.numbers("bool", 0, 1)

    def make_year(self, rng):
        self.type = "year"
        self.value = lambda r: str(r.choice([0, 1901, 1970, 2000, 2026, 2155]))

    def make_decimal(self, rng):
        self.type = "decimal(10,3)"
        self.value = lambda r: "%.3f" % r.choice([0, -0.5, 1.125, r.randint(-(10**6), 10**6) / 8])

    def make_float(self, rng):
        self.type = "float"
        self.value = lambda r: r.choice(["0", "-0.0", "1.5", "-1.5", "1e10", "-1e-10", str(r.randint(-5, 5))])

    def make_double(self, rng):
        self.make_float(rng)
        self.type = "double"

    def make_date(self, rng):
        self.type = "date"
        self.value = lambda r: "'%04d-%02d-%02d'" % (
            r.choice([1, 1999, 2000, 2026]),
            r.randint(1, 12),
            r.randint(1, 28),
        )

    def make_time(self, rng):
        self.type = rng.choice(["time", "time(3)", "time(6)"])
        self.value = lambda r: "'%s%02d:%02d:%02d.%06d'" % (
            r.choice(["", "-"]),
            r.randint(0, 30),
            r.randint(0, 59),
            r.randint(0, 59),
            r.choice([0, 1, 500000, 999999]),
        )

    def make_datetime(self, rng):
        self.type = rng.choice(["datetime", "datetime(2)", "datetime(6)"])
        self.value = lambda r: "'%04d-%02d-%02d %02d:00:00.%06d'" % (
            r.choice([1000, 2000, 2026]),
            r.randint(1, 12),
            r.randint(1, 28),
            r.randint(0, 23),
            r.choice([0, 120000, 999999]),
        )

    def make_timestamp(self, rng):
        self.type = rng.choice(["timestamp", "timestamp(4)"])
        self.type += " null" if self.is_null else " default '2000-01-01 00:00:00'"
        self.value = lambda r: "'%04d-%02d-%02d %02d:00:00'" % (
            r.choice([1971, 2000, 2026]),
            r.randint(1, 12),
            r.randint(1, 28),
            r.randint(3, 23),
        )

    def words(self, rng):
        self.collation = rng.choice(COLLATIONS)
        charset = self.collation.split("_")[0]
        more = [] if charset in ("ascii", "sjis") else WIDE
        self.value = lambda r: "'%s'" % (
            r.choice(WORDS + more) + (r.choice(WORDS + more) if r.random() < 0.3 else "")
        )
        return " character set %s collate %s" % (charset, self.collation)

    def make_char(self, rng):
        self.type = "char(%d)" % rng.choice([8, 20, 40]) + self.words(rng)

    def make_varchar(self, rng):
        self.type = "varchar(%d)" % rng.choice([40, 60, 300]) + self.words(rng)
        if rng.random() < 0.3:
            self.prefix = "(%d)" % rng.choice([1, 3, 9])

    def make_text(self, rng):
        self.type = rng.choice(["text", "mediumtext"]) + self.words(rng)
        self.prefix = "(%d)" % rng.choice([2, 8, 20])

    def raw(self, r):
        return "'%s'" % (r.choice(RAW) + (r.choice(RAW) if r.random() < 0.3 else ""))

    def make_blob(self, rng):
        self.type, self.value, self.prefix = (
            rng.choice(["blob", "longblob"]),
            self.raw,
            "(%d)" % rng.choice([2, 8, 9]),
        )

    def make_binary(self, rng):
        self.type, self.value = "binary(24)", self.raw

    def make_varbinary(self, rng):
        self.type, self.value = "varbinary(40)", self.raw

    def make_enum(self, rng):
        self.type = "enum('c','b','a','')"
        self.value = lambda r: r.choice(["'a'", "'b'", "'c'", "''"])

    def make_set(self, rng):
        self.type = "set('x','y','z')"
        self.value = lambda r: r.choice(["''", "'x'", "'y,z'", "'x,y,z'"])

    def make_bit(self, rng):
        width = rng.choice([1, 5, 13, 64])
        self.type = "bit(%d)" % width
        self.value = lambda r: "b'%s'" % bin(r.getrandbits(width))[2:]

    def make_json(self, rng):
        self.type, self.prefix = "json", "(5)"
        self.value = lambda r: r.choice(["'{}'", "'[1,2]'", "'{\"a\": 1}'", "'null'"])

    def shown(self):
        return "hex(%s) %s" % (self.name, self.name)

    def random(self, r):
        return "NULL" if self.is_null and r.random() < 0.15 else self.value(r)


class Table:
    def __init__(self, name, rng):
        self.name, self.rng = name, rng
        self.columns = [Column("c%d" % i, rng) for i in range(rng.randint(2, 6))]
        self.keys = []
        pk = rng.choice(["int", "int", "columns", "none"])
        self.id = Column("id", rng)
        self.id.make_int(rng)
        self.id.is_null, self.id.prefix = False, ""
        self.id.value = lambda r: str(r.randint(1, 60))
        self.columns.insert(0, self.id)
        # Without a unique column rows could not be told apart.
        self.keys.append(("primary key", ["id"]) if pk == "int" else ("unique key u0", ["id"]))
        if pk == "none":
            self.id.type = "int null"
        if pk == "columns":
            some = [c for c in self.columns[1:] if not c.prefix]
            chosen = rng.sample(some, min(len(some), rng.randint(1, 2)))
            for c in chosen:
                c.is_null = False
            if chosen:
                self.keys.append(("primary key", [c.name for c in chosen] + ["id"]))
        for i in range(rng.randint(0, 4)):
            self.keys.append(self.some_key("k%d" % i))
        self.extra = rng.choice(
            ["", "", ", v int as (id + 1) virtual, key kv (v)", ", s int as (id * 2) stored, key ks (s)"]
        )

    def some_key(self, name):
        chosen = self.rng.sample(self.columns, min(len(self.columns), self.rng.randint(1, 3)))
        parts = [c.name + c.prefix + self.rng.choice(["", "", " desc"]) for c in chosen]
        return ("unique key " if self.rng.random() < 0.15 else "key ") + name, parts

    def create(self, engine):
        lines = [
            "%s %s%s"
            % (
                c.name,
                c.type,
                "" if "null" in c.type or "default" in c.type else " null" if c.is_null else " not null",
            )
            for c in self.columns
        ]
        lines += ["%s (%s)" % (k, ", ".join(p)) for k, p in self.keys]
        return "create table %s (%s%s) engine=%s" % (self.name, ", ".join(lines), self.extra, engine)

    def row(self):
        return "(%s)" % ", ".join(c.random(self.rng) for c in self.columns)

    def names(self):
        return ", ".join(c.name for c in self.columns)

    def shown(self):
        return ", ".join(c.shown() for c in self.columns)

    def insert(self):
        r = self.rng
        rows = ", ".join(self.row() for _ in range(r.choice([1, 1, 2, 5, 20])))
        verb = r.choice(["insert", "insert", "insert ignore", "replace"])
        tail = ""
        if verb == "insert" and r.random() < 0.3:
            c = r.choice(self.columns)
            tail = " on duplicate key update %s = %s" % (c.name, c.random(r))
        return "%s into %s (%s) values %s%s" % (verb, self.name, self.names(), rows, tail)

    def condition(self):
        r = self.rng
        c = r.choice(self.columns)
        v = [c.value(r) for _ in range(5)]
        return r.choice(
            [
                "%s = %s" % (c.name, v[0]),
                "%s > %s" % (c.name, v[0]),
                "%s <= %s" % (c.name, v[0]),
                "%s between %s and %s" % (c.name, v[0], v[1]),
                "%s in (%s)" % (c.name, ", ".join(v)),
                "%s is null" % c.name,
                "%s is not null" % c.name,
                "%s >= %s and id < %d" % (c.name, v[0], r.randint(1, 60)),
                "id = %d" % r.randint(1, 60),
                "id between %d and %d" % (r.randint(1, 30), r.randint(20, 60)),
            ]
        )

    def order(self):
        r = self.rng
        key = r.choice(self.keys)[1]
        down = r.choice(["", "", " desc"])
        parts = [re.sub(r"\(\d+\)| desc", "", p) for p in key]
        return (
            ", ".join(p + down for p in parts if p != "id") + (", " if parts != ["id"] else "") + "id" + down
        )

    def force(self):
        r = self.rng
        names = [k.split()[-1] if not k.startswith("primary") else "primary" for k, _ in self.keys]
        return r.choice(
            ["", "", " force index (%s)" % r.choice(names), " ignore index (%s)" % ", ".join(names)]
        )

    def select(self):
        r = self.rng
        limit = r.choice(["", "", " limit %d" % r.randint(1, 10)])
        return r.choice(
            [
                "select %s from %s%s where %s order by %s%s"
                % (self.shown(), self.name, self.force(), self.condition(), self.order(), limit),
                "select count(*), min(id), max(id) from %s%s where %s"
                % (self.name, self.force(), self.condition()),
                "select id from %s%s where %s order by %s%s"
                % (self.name, self.force(), self.condition(), self.order(), limit),
                "select count(*), count(distinct %s) from %s" % (r.choice(self.columns).name, self.name),
                "select min({0}), max({0}) from {1} where {0} is not null".format(
                    r.choice(
                        [c for c in self.columns if "collat" not in c.type and "json" not in c.type]
                    ).name,
                    self.name,
                ),
                "select %s from %s where %s order by id for update"
                % (self.shown(), self.name, self.condition()),
            ]
        )

    def update(self):
        r = self.rng
        c = r.choice(self.columns)
        value = r.choice([c.random(r), "id + 1"]) if c is self.id else c.random(r)
        return "update %s%s set %s = %s where %s order by id%s%s" % (
            r.choice(["", "", "ignore "]),
            self.name,
            c.name,
            value,
            self.condition(),
            r.choice(["", " desc"]),
            r.choice(["", " limit 3"]),
        )

    def delete(self):
        return "delete from %s where %s order by id limit %d" % (
            self.name,
            self.condition(),
            self.rng.randint(1, 5),
        )

    def alter(self):
        r = self.rng
        return r.choice(
            [
                "truncate table %s" % self.name,
                "alter table %s force" % self.name,
                "analyze table %s" % self.name,
                "check table %s" % self.name,
                "alter table %s comment 'x%d'" % (self.name, r.randint(0, 9)),
                "alter table %s add column z%d int default 5" % (self.name, r.randint(0, 2)),
                "alter table %s drop column if exists z%d" % (self.name, r.randint(0, 2)),
                "alter table %s add index if not exists zi (%s)" % (self.name, "id"),
                "alter table %s drop index if exists zi" % self.name,
                "rename table %s to tmp, tmp to %s" % (self.name, self.name),
            ]
        )


def join(a, b, rng):
    kind = rng.choice(["join", "left join"])
    return "select a.id, b.id from %s a %s %s b on %s where a.%s order by a.id, b.id limit 50" % (
        a.name,
        kind,
        b.name,
        rng.choice(["a.id = b.id", "b.id = a.id + 1", "b.id between a.id and a.id + 2"]),
        a.condition(),
    )


def join_update(a, b, rng):
    """Leaves columns of unique keys alone: which row is the first duplicate depends on the plan."""
    taken = " ".join(" ".join(p) for k, p in a.keys if "key k" not in k or "unique" in k)
    free = [c for c in a.columns if not re.search(r"\b%s\b" % c.name, taken)]
    if not free:
        return "select 1"
    c = rng.choice(free)
    return "update %s x join %s y on x.id = y.id set x.%s = %s" % (a.name, b.name, c.name, c.random(rng))


def changes(statement):
    return re.match(r"(insert|replace|update|delete|rollback)", statement)


def checksum(tables, statement):
    """Shows where a difference begins."""
    t = next((t for t in tables if re.search(r"\b%s\b" % t.name, statement)), tables[0])
    return "select count(*), sum(crc32(concat_ws(',', %s))) from %s" % (
        ", ".join("hex(%s)" % c.name for c in t.columns),
        t.name,
    )


def statements(rng, count):
    tables = [Table("t%d" % i, rng) for i in range(2)]
    yield [t.create("ENGINE") for t in tables]
    out = []
    for t in tables:
        out += [t.insert() for _ in range(5)]
    for _ in range(count):
        t = rng.choice(tables)
        p = rng.random()
        if p < 0.25:
            out.append(t.insert())
        elif p < 0.40:
            out.append(t.update())
        elif p < 0.48:
            out.append(t.delete())
        elif p < 0.80:
            out.append(t.select())
        elif p < 0.86:
            out.append(join(tables[0], tables[1], rng))
        elif p < 0.88:
            out.append(t.alter())
        elif p < 0.92:
            out.append(
                rng.choice(
                    [
                        "begin",
                        "begin",
                        "start transaction with consistent snapshot",
                        "set autocommit=0",
                        "set autocommit=1",
                    ]
                )
            )
        elif p < 0.95:
            out.append(rng.choice(["commit", "commit", "rollback"]))
        elif p < 0.97:
            out.append(
                rng.choice(
                    [
                        "savepoint s1",
                        "savepoint s2",
                        "rollback to s1",
                        "rollback to s2",
                        "release savepoint s1",
                    ]
                )
            )
        elif p < 0.98:
            out.append(
                "set transaction isolation level "
                + rng.choice(["read committed", "repeatable read", "serializable"])
            )
        elif p < 0.985:
            out.append(
                "set join_cache_level=%d, optimizer_switch='mrr=%s'"
                % (rng.choice([2, 6, 8]), rng.choice(["on", "off"]))
            )
        elif p < 0.99:
            out.append(
                "insert ignore into %s (id, %s) select id + 7, %s from %s order by id"
                % (t.name, t.columns[1].name, t.columns[1].name, t.name)
            )
        else:
            out.append(join_update(tables[0], tables[1], rng))
    out.append("commit")
    out = [both for s in out for both in ([s, checksum(tables, s)] if changes(s) else [s])]
    for t in tables:
        out.append("select %s from %s order by id" % (t.shown(), t.name))
        out.append("check table %s" % t.name)
    yield out
