use super::*;
use crate::lex::Lexer;
use crate::plan::{Plan, plan};

fn of(text: &str) -> Vec<String> {
    match plan(text.as_bytes()).unwrap() {
        Plan::Define(all) => all.into_iter().map(|one| one.sql).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn tables_as_mariadb_shows_them() {
    let text = "CREATE TABLE `t` (\n `id` int(11) NOT NULL AUTO_INCREMENT COMMENT 'a, b',\n \
                `v` varchar(20) NOT NULL DEFAULT 'it''s',\n `n` bigint(20) unsigned DEFAULT -1,\n \
                PRIMARY KEY (`id`),\n UNIQUE KEY `u` (`v`,`n`),\n KEY `k` (`n`) USING BTREE\n) \
                ENGINE=InnoDB AUTO_INCREMENT=7 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_general_ci";
    assert_eq!(
        of(text),
        [
            "CREATE TABLE \"t\" (\"id\" INTEGER PRIMARY KEY AUTOINCREMENT, \
             \"v\" varchar(20) NOT NULL DEFAULT 'it''s' COLLATE mysql_ci, "
                .replace("varchar", "VARCHAR")
                + "\"n\" BIGINT(20) UNSIGNED DEFAULT - 1 CHECK (typeof(\"n\") IN ('integer', 'null')), \
                   UNIQUE (\"v\",\"n\"))",
            "CREATE INDEX \"t.k\" ON \"t\" (\"n\")".into(),
        ]
    );
    let text =
        "CREATE TABLE IF NOT EXISTS d.t (a CHAR(3), b INT, PRIMARY KEY (a, b)) COLLATE utf8mb4_bin";
    assert_eq!(
        of(text),
        [
            "CREATE TABLE IF NOT EXISTS \"d\".\"t\" (\"a\" CHAR(3) NOT NULL COLLATE RTRIM, \"b\" INT NOT NULL \
          CHECK (typeof(\"b\") IN ('integer', 'null')), PRIMARY KEY (\"a\",\"b\"))"
        ]
    );
}

#[test]
fn indexes_and_changes_of_tables() {
    assert_eq!(
        of("CREATE UNIQUE INDEX i ON t (a, b DESC)"),
        ["CREATE UNIQUE INDEX \"t.i\" ON \"t\" (\"a\",\"b\" DESC)"]
    );
    assert_eq!(of("DROP INDEX i ON t"), ["DROP INDEX \"t.i\""]);
    assert_eq!(
        of("ALTER TABLE t ADD COLUMN c TEXT, DROP COLUMN d, ADD KEY k (c(10))"),
        [
            "ALTER TABLE \"t\" ADD COLUMN \"c\" TEXT COLLATE mysql_ci",
            "ALTER TABLE \"t\" DROP COLUMN \"d\"",
            "CREATE INDEX \"t.k\" ON \"t\" (\"c\")",
        ]
    );
    assert_eq!(of("ALTER TABLE t RENAME TO u"), ["ALTER TABLE \"t\" RENAME TO \"u\""]);
}

#[test]
fn what_cannot_be_kept_as_it_is_meant_is_refused() {
    for text in [
        "CREATE TABLE t (a INT, FOREIGN KEY (a) REFERENCES u (a))",
        "CREATE TABLE t (a INT REFERENCES u (a))",
        "CREATE TABLE t (a VARCHAR(5) AUTO_INCREMENT PRIMARY KEY)",
        "CREATE TABLE t (a INT AUTO_INCREMENT, b INT, PRIMARY KEY (a, b))",
        "CREATE TABLE t (a TEXT, UNIQUE KEY (a(10)))",
        "CREATE TABLE t (a TEXT, FULLTEXT KEY (a))",
        "CREATE TABLE t (a TIMESTAMP DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP)",
        "CREATE TABLE t (a INT GENERATED ALWAYS AS (1))",
        "CREATE TABLE t SELECT 1",
        "CREATE VIEW v AS SELECT 1",
        "ALTER TABLE t MODIFY a INT",
    ] {
        assert_eq!(plan(text.as_bytes()).unwrap_err().code, 1235, "{text}");
    }
}

#[test]
fn an_order_before_the_condition_is_refused() {
    for text in
        ["UPDATE t SET a = 1 ORDER BY a WHERE a = 1", "DELETE FROM t ORDER BY a WHERE a = 1"]
    {
        assert_eq!(plan(text.as_bytes()).unwrap_err().code, 1064, "{text}");
    }
}

#[test]
fn whatever_is_said_is_understood_or_refused() {
    for text in [
        "CREATE",
        "CREATE TABLE",
        "CREATE TABLE t (",
        "CREATE TABLE t ()",
        "ALTER TABLE t ADD",
        "CREATE INDEX i",
        "DROP INDEX i",
        "CREATE TABLE t (a",
        "CREATE TABLE t (a INT,)",
        "DROP TABLE",
        "CREATE TABLE t (a INT DEFAULT)",
        "ALTER TABLE",
        "ROLLBACK TO",
        "USE",
        "SHOW",
        "INSERT",
        "UPDATE",
        "DELETE",
        "SET AUTOCOMMIT",
        "TRUNCATE",
        "ON DUPLICATE KEY",
        "INSERT INTO t VALUES (1) ON DUPLICATE",
    ] {
        let _ = plan(text.as_bytes());
    }
    let words = "CREATE TABLE t ( a INT PRIMARY KEY , KEY k b ) DEFAULT 'x' INSERT INTO VALUES \
                 SELECT 1 LIMIT UPDATE SET = WHERE ON DUPLICATE KEY UPDATE SHOW LIKE ALTER ADD \
                 DROP INDEX `q` - . @@ FROM";
    let words: Vec<&str> = words.split(' ').filter(|word| !word.is_empty()).collect();
    let mut rng = sdk::testing::Rng::new(5);
    for _ in 0..20_000 {
        let count = rng.below(12);
        let text: Vec<&str> =
            (0..count).map(|_| words[rng.below(words.len() as u64) as usize]).collect();
        crate::fuzzing::statement(text.join(" ").as_bytes());
        if rng.below(100) == 0 {
            crate::fuzzing::client(text.join(" ").replace(", ", "\n").as_bytes());
        }
    }
    assert!(Lexer::new(b"", 0).all().unwrap().is_empty());
}
