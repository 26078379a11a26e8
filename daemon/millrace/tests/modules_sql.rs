//! Tables of a guest's MariaDB in the module `sql` of the host, through MariaDB's own engine
//! FederatedX: a real server, the relay of a guest, a real daemon with its confined process.
#![allow(clippy::unwrap_used)]

#[path = "sql/client.rs"]
mod client;
mod common;
#[path = "sql/world.rs"]
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, Signal, kill_process};

use crate::client::{Failed, MySql};
use crate::world::{Server, World};

/// Makes a table on both sides.
fn make(host: &mut MySql, guest: &mut MySql, world: &World, table: &str, columns: &str) {
    host.sql(format!("CREATE TABLE {table} ({columns}) CHARSET=utf8mb4"));
    guest.sql(format!(
        "CREATE TABLE {table} ({columns}) ENGINE=FEDERATED CHARSET=utf8mb4 \
         CONNECTION='mysql://root@{}/d/{table}'",
        world.address
    ));
}

fn sides(world: &World, server: &Server) -> (MySql, MySql) {
    let (mut host, mut guest) = (world.connect(""), server.connect(""));
    for side in [&mut host, &mut guest] {
        side.sql("SET NAMES utf8mb4");
        side.sql("CREATE DATABASE d");
        side.sql("USE d");
    }
    (host, guest)
}

#[test]
fn federatedx_keeps_its_tables_in_the_host() {
    let (world, server) = (World::new(), Server::start());
    let (mut host, mut guest) = sides(&world, &server);
    let columns = "id INT PRIMARY KEY AUTO_INCREMENT, v VARCHAR(100), n DECIMAL(10,2), f DOUBLE, \
                   t DATETIME, b LONGBLOB, KEY (v)";
    make(&mut host, &mut guest, &world, "t", columns);
    guest.sql(
        "INSERT INTO t (v, n, f, t, b) VALUES ('one', 1.1, 0.1, '2026-01-02 03:04:05', X'00FF275C0A'), \
         ('two', NULL, NULL, NULL, NULL), ('drei 😀', -3, 1e300, NULL, '')",
    );
    let all = "SELECT id, v, n, f, t, HEX(b) FROM t ORDER BY id";
    let wanted = "1\tone\t1.10\t0.1\t2026-01-02 03:04:05\t00FF275C0A\n2\ttwo\tNULL\tNULL\tNULL\t\
                  NULL\n\
                  3\tdrei 😀\t-3.00\t1e300\tNULL\t";
    assert_eq!(guest.sql(all), wanted);
    assert_eq!(guest.sql("SELECT id FROM t WHERE v = 'TWO'"), "2");
    assert_eq!(guest.sql("SELECT id FROM t WHERE id BETWEEN 2 AND 9 ORDER BY id DESC"), "3\n2");
    assert_eq!(guest.sql("SELECT id FROM t WHERE v LIKE 'dr%'"), "3");
    assert_eq!(guest.sql("SELECT id FROM t WHERE n IS NULL"), "2");
    guest.sql("UPDATE t SET v = 'zwei', n = n + 1 WHERE id < 3");
    guest.sql("DELETE FROM t WHERE v LIKE 'drei%'");
    assert_eq!(host.sql("SELECT id, v, n FROM t"), "1\tzwei\t2.10\n2\tzwei\tNULL");
    let (code, _) = guest.fails("INSERT INTO t (id, v) VALUES (2, 'again')");
    assert!(code == 1062 || code == 1022, "{code}");
    guest.sql("INSERT IGNORE INTO t (id, v) VALUES (2, 'ignored'), (7, 'seven')");
    guest.sql("REPLACE INTO t (id, v) VALUES (1, 'eins')");
    assert_eq!(guest.sql("SELECT id, v FROM t ORDER BY id"), "1\teins\n2\tzwei\n7\tseven");
    guest.sql("INSERT INTO t (v) VALUES ('eight')");
    assert_eq!(guest.sql("SELECT LAST_INSERT_ID()"), "8");
    assert_eq!(guest.sql("SELECT id FROM t WHERE v = 'eight'"), "8");
    guest.sql("START TRANSACTION");
    guest.sql("INSERT INTO t (v) VALUES ('nine')");
    guest.sql("UPDATE t SET v = 'x' WHERE id = 1");
    assert_eq!(host.sql("SELECT COUNT(*) FROM t WHERE v IN ('nine', 'x')"), "0");
    guest.sql("ROLLBACK");
    guest.sql("START TRANSACTION");
    guest.sql("INSERT INTO t (v) VALUES ('ten')");
    guest.sql("SAVEPOINT a");
    guest.sql("DELETE FROM t WHERE id < 8");
    guest.sql("ROLLBACK TO SAVEPOINT a");
    guest.sql("COMMIT");
    assert_eq!(host.sql("SELECT v FROM t ORDER BY id"), "eins\nzwei\nseven\neight\nten");
    guest.sql("TRUNCATE TABLE t");
    assert_eq!(guest.sql("SELECT COUNT(*) FROM t"), "0");
    assert_eq!(world.place.log().matches("stopped").count(), 0, "{}", world.place.log());
}

#[test]
fn rows_of_all_sizes_and_many_rows_come_back() {
    let (world, server) = (World::new(), Server::start());
    let (mut host, mut guest) = sides(&world, &server);
    make(&mut host, &mut guest, &world, "t", "id INT PRIMARY KEY, b LONGBLOB");
    for (id, len) in (1..).zip([1 << 10, 4 << 10, 16 << 10, 64 << 10, 128 << 10, 3 << 20]) {
        guest.sql(format!(
            "INSERT INTO t VALUES ({id}, REPEAT(CHAR({id}, 0, 39, 92, 255), {len} / 5))"
        ));
        let same = format!(
            "SELECT b = REPEAT(CHAR({id}, 0, 39, 92, 255), {len} / 5) FROM t WHERE id = {id}"
        );
        assert_eq!(guest.sql(same), "1");
    }
}

#[test]
fn the_host_finds_the_rows_and_only_they_go_to_the_guest() {
    let (world, server) = (World::new(), Server::start());
    let (mut host, mut guest) = sides(&world, &server);
    make(&mut host, &mut guest, &world, "t", "id INT PRIMARY KEY, k INT, pad CHAR(200), KEY (k)");
    let rows: Vec<String> = (0..20_000).map(|i| format!("({i},{},'{i:0200}')", i % 100)).collect();
    guest.sql(format!("INSERT INTO t VALUES {}", rows.join(",")));
    assert_eq!(host.sql("SELECT COUNT(*) FROM t"), "20000");
    // What the host sent for a query: all rows are 4 MB.
    let mut sent = |sql: &str, wanted: &str| {
        let before = world.sent_bytes();
        assert_eq!(guest.sql(sql), wanted, "{sql}");
        world.sent_bytes() - before
    };
    let one = sent("SELECT k FROM t WHERE id = 777", "77");
    assert!(one < 4_000, "{one} bytes for a row by its key");
    let few = sent("SELECT COUNT(*), MAX(id) FROM t WHERE k = 5", "200\t19905");
    assert!((40_000..100_000).contains(&few), "{few} bytes for 200 of 20,000 rows");
    let range = sent("SELECT COUNT(*) FROM t WHERE id BETWEEN 100 AND 149", "50");
    assert!((10_000..30_000).contains(&range), "{range} bytes for 50 rows");
    sent("SET GLOBAL federated_pushdown = 1", "");
    let sum = "SELECT SUM(k), COUNT(*) FROM t WHERE pad < '00000000000000010000'";
    let pushed = sent(sum, "990000\t20000");
    assert!(pushed < 4_000, "{pushed} bytes for a sum of all rows");
    assert_eq!(guest.sql("SELECT SUM(k), COUNT(*) FROM t WHERE id >= 10000"), "495000\t10000");
    let explained = guest.sql("EXPLAIN SELECT k, COUNT(*) FROM t WHERE id > 100 GROUP BY k");
    assert!(explained.contains("PUSHED SELECT"), "{explained}");
}

/// One transfer, tried until it is certain.
fn transfer(guest: &mut MySql, id: u64) {
    let (from, to, amount) = (id * 7 % 20, id * 13 % 20, id % 10);
    let statements = [
        "START TRANSACTION".to_owned(),
        format!("INSERT INTO log VALUES ({id}, {from}, {to}, {amount})"),
        format!("UPDATE accounts SET balance = balance - {amount} WHERE id = {from}"),
        format!("UPDATE accounts SET balance = balance + {amount} WHERE id = {to}"),
        "COMMIT".to_owned(),
    ];
    loop {
        let mut done = Ok(Vec::new());
        for statement in &statements {
            done = guest.ask(statement);
            if done.is_err() {
                break;
            }
        }
        match done {
            Ok(_) => return,
            Err(Failed::Lost(error)) => panic!("MariaDB itself has gone: {error}"),
            Err(Failed::Told(..)) => {
                let _ = guest.ask("ROLLBACK");
            }
        }
        // It may have been done, and the answer lost.
        let count = format!("SELECT COUNT(*) FROM log WHERE id = {id}");
        loop {
            match guest.ask(&count) {
                Ok(rows) if rows[0][0].as_deref() == Some(b"1") => return,
                Ok(_) => break,
                Err(Failed::Told(..)) => {}
                Err(Failed::Lost(error)) => panic!("MariaDB itself has gone: {error}"),
            }
        }
    }
}

#[test]
fn the_process_is_killed_under_transfers_and_none_is_lost_doubled_or_done_by_halves() {
    let (world, server) = (World::new(), Server::start());
    let (mut host, mut guest) = sides(&world, &server);
    make(&mut host, &mut guest, &world, "accounts", "id INT PRIMARY KEY, balance INT");
    make(&mut host, &mut guest, &world, "log", "id INT PRIMARY KEY, f INT, t INT, amount INT");
    let accounts: Vec<String> = (0..20).map(|id| format!("({id}, 100)")).collect();
    guest.sql(format!("INSERT INTO accounts VALUES {}", accounts.join(",")));
    let (kills, each) =
        if std::env::var_os("MILLRACE_SOAK").is_some() { (200, 20) } else { (12, 10) };
    let done = AtomicU64::new(0);
    let last = kills * each;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for id in 1..=last {
                transfer(&mut guest, id);
                done.store(id, Ordering::Release);
            }
        });
        for kill in 0..kills {
            // In the middle of another transfer each time.
            while done.load(Ordering::Acquire) < kill * each {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_micros(kill * 7919 % 10_000));
            if let Some(pid) = world.process() {
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
        }
    });
    let mut host = world.connect("d");
    assert_eq!(host.sql("SELECT SUM(balance), COUNT(*) FROM accounts"), "2000\t20");
    let log = host.sql("SELECT COUNT(*), MIN(id), MAX(id) FROM log");
    assert_eq!(log, format!("{last}\t1\t{last}"));
    let wrong = "SELECT COUNT(*) FROM accounts a WHERE balance <> 100 \
                 - (SELECT IFNULL(SUM(amount), 0) FROM log WHERE f = a.id) \
                 + (SELECT IFNULL(SUM(amount), 0) FROM log WHERE t = a.id)";
    assert_eq!(host.sql(wrong), "0");
}
