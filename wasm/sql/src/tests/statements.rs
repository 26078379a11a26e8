//! The module as clients see it.

use crate::packet::command;
use crate::testing::{SqlReply, TestModule, framed, world};

#[test]
fn a_table_is_made_filled_read_and_changed() {
    let mut w = world();
    w.ok(1, "CREATE TABLE `t` (`id` int(11) NOT NULL AUTO_INCREMENT, `v` varchar(20) DEFAULT NULL, \
             `d` decimal(10,2), `b` longblob, PRIMARY KEY (`id`), KEY `v` (`v`)) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4");
    assert_eq!(
        w.ok(1, "INSERT INTO `t` (`id`, `v`, `d`)  VALUES  (0, 'one', 1.1) , (0, NULL, 2)"),
        (2, 1)
    );
    assert_eq!(w.ok(1, "INSERT INTO `t` (`v`) VALUES ('Drei ')"), (1, 3));
    let text = w.sql(1, "SELECT `id`, `v`, `d` FROM `t`").text();
    assert_eq!(text, "1\tone\t1.10\n2\tNULL\t2.00\n3\tDrei \tNULL");
    assert_eq!(w.sql(1, "SELECT id FROM t WHERE v = 'drei'").text(), "3");
    assert_eq!(w.ok(1, "UPDATE `t` SET `v` = 'two' WHERE `id` = 2 AND `v` IS NULL LIMIT 1").0, 1);
    assert_eq!(w.ok(1, "DELETE FROM `t` WHERE `id` = 1 AND `v` = 'one' LIMIT 1").0, 1);
    assert_eq!(w.sql(1, "SELECT v FROM d.t ORDER BY id").text(), "two\nDrei ");
    let error = w.sql(1, "INSERT INTO t (id) VALUES (3)");
    assert_eq!(error, SqlReply::Error(1062, "Duplicate entry for key 't.id'".into()));
    assert_eq!(w.sql(1, "SELECT * FROM missing").code(), 1146);
    assert_eq!(w.sql(1, "SELECT missing FROM t").code(), 1054);
    assert_eq!(w.sql(1, "SELEC").code(), 1064);
    let status = w.sql(1, "SHOW TABLE STATUS LIKE 't'").text();
    assert!(status.starts_with("t\tSQLite\t10\tNULL\t2\t128\t256"), "{status}");
}

#[test]
fn any_bytes_come_back() {
    let mut w = world();
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY, b BLOB, s TEXT COLLATE utf8mb4_bin)");
    let all: Vec<u8> = (0..=255u8)
        .flat_map(|b| if b == b'\'' || b == b'\\' { vec![b'\\', b] } else { vec![b] })
        .collect();
    let sql = [b"INSERT INTO t VALUES (1, '", &all[..], b"', '\xf0\x9f\x98\x80')"].concat();
    assert_eq!(w.sql(1, sql), SqlReply::Ok(1, 0, 2));
    let SqlReply::Rows(rows) = w.sql(1, "SELECT b, s FROM t") else { panic!() };
    assert_eq!(rows[0][0].as_deref(), Some(&(0..=255).collect::<Vec<u8>>()[..]));
    assert_eq!(rows[0][1].as_deref(), Some("😀".as_bytes()));
    for len in [1 << 10, 16 << 10, 128 << 10, 3 << 20] {
        let sql = [b"UPDATE t SET b = '", &vec![b'x'; len][..], b"' WHERE id = 1"].concat();
        assert_eq!(w.sql(1, sql).code(), 0);
        let sql = [b"REPLACE INTO t VALUES (1, '", &vec![b'x'; len][..], b"', NULL)"].concat();
        assert_eq!(w.sql(1, sql).code(), 0);
        let SqlReply::Rows(rows) = w.sql(1, "SELECT b FROM t") else { panic!() };
        assert_eq!(rows[0][0].as_ref().map(Vec::len), Some(len));
    }
}

#[test]
fn transactions_are_seen_by_others_when_they_commit() {
    let mut w = world();
    w.connect(2, "d");
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY, v INT)");
    w.ok(1, "SET AUTOCOMMIT=0");
    w.ok(1, "SAVEPOINT save1");
    w.ok(1, "INSERT INTO t VALUES (1, 1), (2, 2)");
    w.ok(1, "SAVEPOINT save2");
    w.ok(1, "INSERT INTO t VALUES (3, 3)");
    w.ok(1, "ROLLBACK TO SAVEPOINT save2");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "");
    // A second writer waits, and goes on.
    w.ask(2, "INSERT INTO t VALUES (4, 4)");
    assert_eq!(w.take_reply(2), None);
    assert_eq!(w.sql(1, "SELECT count(*) FROM t").text(), "2");
    w.ok(1, "COMMIT");
    assert_eq!(w.take_reply(2), Some(SqlReply::Ok(1, 0, 2)));
    assert_eq!(w.sql(2, "SELECT id FROM t").text(), "1\n2\n4");
    w.ok(1, "SET AUTOCOMMIT=1");
    w.ok(1, "BEGIN");
    w.ok(1, "DELETE FROM t");
    w.ok(1, "ROLLBACK");
    assert_eq!(w.sql(1, "SELECT id FROM t").text(), "1\n2\n4");
}

#[test]
fn who_waits_for_too_long_is_told_and_who_read_something_old_may_not_write() {
    let mut w = world();
    w.connect(2, "d");
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY, v INT)");
    w.ok(2, "START TRANSACTION");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "");
    w.ok(1, "INSERT INTO t VALUES (1, 1)");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "", "a snapshot");
    assert_eq!(w.sql(2, "INSERT INTO t VALUES (2, 2)").code(), 1213);
    assert_eq!(
        w.sql(2, "INSERT INTO t VALUES (3, 3)").code(),
        1213,
        "it is told until it rolls back"
    );
    assert_eq!(w.sql(2, "COMMIT").code(), 1213);
    w.ok(2, "INSERT INTO t VALUES (3, 3)");
    w.ok(1, "BEGIN");
    w.ok(1, "UPDATE t SET v = 2");
    w.ask(2, "DELETE FROM t");
    assert_eq!(w.take_reply(2), None);
    w.host.advance(30_000);
    assert_eq!(w.take_reply(2).unwrap().code(), 1205);
    // A client that goes gives its locks back.
    w.ask(2, "DELETE FROM t WHERE id = 3");
    assert_eq!(w.take_reply(2), None);
    w.close(1);
    assert_eq!(w.take_reply(2), Some(SqlReply::Ok(1, 0, 2)));
}

#[test]
fn a_failed_row_undoes_its_statement_and_not_the_transaction() {
    let mut w = world();
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY, v INT NOT NULL)");
    w.ok(1, "BEGIN");
    w.ok(1, "INSERT INTO t VALUES (1, 1)");
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (2, 2), (3, 3), (1, 1)").code(), 1062);
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (2, 2), (3)").code(), 1136);
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (2, NULL)").code(), 1048);
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (2, 'x')").code(), 4025);
    w.ok(1, "INSERT IGNORE INTO t VALUES (1, 5), (4, 4)");
    w.ok(1, "COMMIT");
    assert_eq!(w.sql(1, "SELECT * FROM t").text(), "1\t1\n4\t4");
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (5, 5), (1, 1)").code(), 1062);
    assert_eq!(w.sql(1, "SELECT count(*) FROM t").text(), "2");
}

#[test]
fn many_rows_are_told_in_pieces_and_inserted_in_one_statement() {
    let mut w = world();
    // Each call has done enough after a few looks at the clock.
    w.host.tick_ms = 2;
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(100))");
    let rows: Vec<String> = (0..20_000).map(|i| format!("({i}, '{i:0100}')")).collect();
    assert_eq!(w.ok(1, &format!("INSERT INTO t VALUES {}", rows.join(","))).0, 20_000);
    let SqlReply::Rows(rows) = w.sql(1, "SELECT * FROM t") else { panic!() };
    assert_eq!(rows.len(), 20_000);
    // Only what is asked for goes to the client.
    let before = w.received;
    assert_eq!(w.sql(1, "SELECT id FROM t WHERE (`id` = 777)").text(), "777");
    assert!(w.received - before < 300);
}

#[test]
fn clients_have_databases_of_their_own_and_ask_what_there_is() {
    let mut w = world();
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY)");
    w.ok(1, "CREATE DATABASE IF NOT EXISTS e");
    assert_eq!(w.sql(1, "CREATE DATABASE e").code(), 1007);
    assert_eq!(w.sql(1, "CREATE DATABASE `../e`").code(), 1235);
    assert_eq!(w.sql(1, "SHOW DATABASES").text(), "d\ne");
    assert_eq!(w.connect(2, "e"), SqlReply::Ok(0, 0, 2));
    assert_eq!(w.connect(3, "nothing").code(), 1049);
    assert!(w.is_closed(3));
    assert_eq!(w.sql(2, "SELECT * FROM t").code(), 1146);
    assert_eq!(w.sql(2, "SELECT * FROM d.t").code(), 1146, "another database's");
    assert_eq!(w.sql(2, "SELECT DATABASE(), @@autocommit").text(), "e\t1");
    assert_eq!(w.sql(1, "DROP DATABASE e").code(), 1105, "it is in use");
    assert_eq!(w.command(2, command::INIT_DB, b"d"), Some(SqlReply::Ok(0, 0, 2)));
    assert_eq!(w.sql(2, "SHOW TABLES").text(), "t");
    assert_eq!(w.sql(2, "DESCRIBE t").text(), "id\tbigint\tNO\tPRI\tNULL\t");
    w.ok(1, "DROP DATABASE e");
    assert_eq!(w.command(2, command::PING, b""), Some(SqlReply::Ok(0, 0, 2)));
    assert_eq!(w.command(2, command::PREPARE, b"SELECT 1").unwrap().code(), 1047);
    w.connect(4, "");
    assert_eq!(w.sql(4, "SELECT 1").text(), "1");
    assert_eq!(w.sql(4, "SELECT 1 FROM t").code(), 1046);
    assert_eq!(w.command(2, command::QUIT, b""), None);
    assert!(w.is_closed(2));
}

#[test]
fn what_clients_may_not_do_is_refused() {
    let mut w = world();
    w.ok(1, "CREATE TABLE kept (id INT PRIMARY KEY)");
    for (sql, code) in [
        ("ATTACH 'x' AS y", 1064),
        ("PRAGMA journal_mode", 1064),
        ("SELECT * FROM pragma_journal_mode", 1235),
        ("SELECT now()", 1235),
        ("SELECT 1; SELECT 2", 1235),
        ("CREATE TABLE x (b BIT(1))", 1235),
        ("CREATE TABLE x (d DECIMAL(20,2))", 1235),
        ("CREATE TABLE x (d DATETIME DEFAULT CURRENT_TIMESTAMP)", 1235),
        ("INSERT INTO x VALUES (18446744073709551615)", 1264),
        ("SELECT @x := 1", 1235),
        ("DROP TABLE sqlite_master", 1064),
        ("WITH x AS (SELECT 1) DELETE FROM kept", 1235),
        ("INSERT INTO kept SELECT sleep(1)", 1064),
        ("VACUUM", 1064),
    ] {
        assert_eq!(w.sql(1, sql).code(), code, "{sql}");
    }
}

#[test]
fn bad_packets_end_the_connection_and_long_ones_are_refused() {
    let mut w = world();
    w.connect(2, "d");
    w.raw(2, &[0xff, 0xff, 0xff, 0]);
    assert_eq!(w.take_reply(2).unwrap().code(), 1153);
    assert!(w.is_closed(2));
    let mut w = TestModule::new(2);
    for number in 1..=256 {
        w.connect(number, "");
    }
    assert_eq!(w.connect(257, "").code(), 1040);
    assert_eq!(w.sql(256, "SELECT 1").text(), "1");
}

#[test]
fn statements_come_in_any_pieces() {
    let mut w = world();
    let bytes = framed(0, b"\x03SELECT 'abc'");
    for piece in bytes.chunks(3) {
        w.raw(1, piece);
    }
    assert_eq!(w.take_reply(1).unwrap().text(), "abc");
    // Several at once are served one after the other.
    let two = [framed(0, b"\x03SELECT 1"), framed(0, b"\x03SELECT 2")].concat();
    w.raw(1, &two);
    assert_eq!(w.take_reply(1).unwrap().text(), "1");
    assert_eq!(w.take_reply(1).unwrap().text(), "2");
}

#[test]
fn a_client_that_connected_anew_in_a_transaction_does_nothing_by_halves() {
    let mut w = world();
    w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY)");
    // As FederatedX goes on after its connection broke: it believes that autocommit is off.
    w.ok(1, "SAVEPOINT save1");
    w.ok(1, "INSERT INTO t VALUES (1)");
    w.connect(2, "d");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "");
    w.ok(1, "COMMIT");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "1");
    // It broke within a transaction.
    assert_eq!(w.sql(1, "ROLLBACK TO SAVEPOINT save2").code(), 1305);
    assert_eq!(w.sql(1, "SAVEPOINT save3").code(), 1213);
    assert_eq!(w.sql(1, "INSERT INTO t VALUES (2)").code(), 1213);
    w.ok(1, "ROLLBACK");
    w.ok(1, "INSERT INTO t VALUES (3)");
    assert_eq!(w.sql(2, "SELECT * FROM t").text(), "1\n3");
}
