//! Ends of the process or the power at any moment: a statement that the client was told to be done
//! is there, any other is there in whole or not at all, and the database is sound.

use proptest::prelude::*;
use sdk::testing::{Call, Rng};
use sdk::{Errno, Host};

use crate::testing::{SqlReply, TestModule, world};

const ACCOUNTS: u64 = 8;

fn make(seed: u64) -> TestModule {
    let mut w = TestModule::new(seed);
    w.connect(1, "");
    w.ok(1, "CREATE DATABASE d");
    w.ok(1, "USE d");
    w.ok(1, "CREATE TABLE accounts (id INT PRIMARY KEY, balance INT)");
    w.ok(
        1,
        "CREATE TABLE log (id INT PRIMARY KEY, f INT, t INT, amount INT, pad LONGBLOB, KEY f (f))",
    );
    let rows: Vec<String> = (0..ACCOUNTS).map(|id| format!("({id}, 100)")).collect();
    w.ok(1, &format!("INSERT INTO accounts VALUES {}", rows.join(",")));
    w
}

/// A transfer's statements. Its row in the log is long, so that the log of SQLite is soon copied.
fn transfer(id: u64, rng: &mut Rng) -> [String; 5] {
    let (from, to, amount) = (rng.below(ACCOUNTS), rng.below(ACCOUNTS), rng.below(10));
    let pad = "x".repeat(rng.below(200_000) as usize);
    [
        "BEGIN".into(),
        format!("INSERT INTO log VALUES ({id}, {from}, {to}, {amount}, '{pad}')"),
        format!("UPDATE accounts SET balance = balance - {amount} WHERE id = {from}"),
        format!("UPDATE accounts SET balance = balance + {amount} WHERE id = {to}"),
        "COMMIT".into(),
    ]
}

/// Transfers until the host is dead, or so many; the number of the last one that was told to be
/// done.
fn run(w: &mut TestModule, first: u64, rng: &mut Rng) -> u64 {
    for id in first..first + 12 {
        for statement in transfer(id, rng) {
            w.ask(1, &statement);
            let told = w.take_reply(1);
            if w.host.is_dead() {
                return id - 1;
            }
            assert!(matches!(told, Some(SqlReply::Ok(..))), "{told:?}");
        }
    }
    first + 11
}

/// The number of the last transfer that is there.
#[track_caller]
fn check(w: &mut TestModule, told: u64) -> u64 {
    assert_eq!(w.connect(1, "d").code(), 0);
    assert_eq!(w.sql(1, "SELECT * FROM pragma_integrity_check").text(), "ok");
    let sums = w.sql(1, "SELECT sum(balance), count(*) FROM accounts").text();
    assert_eq!(sums, format!("{}\t{ACCOUNTS}", ACCOUNTS * 100));
    let wrong = "SELECT count(*) FROM accounts a WHERE balance <> 100 \
                 - (SELECT ifnull(sum(amount), 0) FROM log WHERE f = a.id) \
                 + (SELECT ifnull(sum(amount), 0) FROM log WHERE t = a.id)";
    assert_eq!(w.sql(1, wrong).text(), "0");
    let log = w.sql(1, "SELECT count(*), ifnull(max(id), 0) FROM log").text();
    let (count, last) = log.split_once('\t').unwrap();
    let last: u64 = last.parse().unwrap();
    assert_eq!(count.parse(), Ok(last), "{log}");
    assert!(last == told || last == told + 1, "{told} were told to be done: {log}");
    last
}

/// Lives that end after so many calls, by a power cut or a kill. What was seen after one stays.
fn live(seed: u64, lives: &[(u64, bool)]) {
    let (mut w, mut rng) = (make(seed), Rng::new(seed));
    let mut done = 0;
    for (calls, is_power) in lives {
        w.host.die_after(*calls);
        let told = run(&mut w, done + 1, &mut rng);
        if *is_power {
            w.host.crash();
        } else {
            w.host.kill();
        }
        w.restart();
        done = check(&mut w, told);
    }
}

/// A commit that nobody was told of, seen after a kill: a power cut right after took it away.
#[test]
fn what_was_seen_after_a_kill_survives_the_power_cut_after_it() {
    live(12_817_235_638_193_297_345, &[(0, false), (226, false), (0, true)]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn transfers_survive_the_end_at_any_call(
        seed: u64,
        lives in proptest::collection::vec((0u64..400, any::<bool>()), 1..5),
    ) {
        live(seed, &lives);
    }

    #[test]
    fn a_database_is_there_or_not_whatever_the_end_of_its_making(
        calls in 0u64..60,
        seed: u64,
        is_power: bool,
    ) {
        let mut w = TestModule::new(seed);
        w.connect(1, "");
        w.host.die_after(calls);
        w.ask(1, "CREATE DATABASE d");
        let told = w.take_reply(1);
        if is_power { w.host.crash() } else { w.host.kill() }
        w.restart();
        w.connect(1, "");
        if matches!(told, Some(SqlReply::Ok(..))) {
            assert_eq!(w.sql(1, "SHOW DATABASES").text(), "d");
        }
        w.ok(1, "CREATE DATABASE IF NOT EXISTS d");
        w.ok(1, "USE d");
        w.ok(1, "CREATE TABLE t (id INT PRIMARY KEY)");
        w.ok(1, "INSERT INTO t VALUES (1)");
        assert_eq!(w.sql(1, "SELECT * FROM t").text(), "1");
    }
}

#[test]
fn a_database_that_went_halfway_is_there_or_can_be_made_anew() {
    let mut gone = 0;
    for calls in 0..12 {
        let mut w = make(calls);
        w.close(1);
        w.connect(2, "");
        w.host.die_after(calls);
        w.ask(2, "DROP DATABASE d");
        let told = w.take_reply(2);
        w.host.crash();
        w.restart();
        w.connect(1, "");
        let is_there = w.sql(1, "SHOW DATABASES").text() == "d";
        assert!(!is_there || !matches!(told, Some(SqlReply::Ok(..))));
        w.ok(1, "CREATE DATABASE IF NOT EXISTS d");
        w.ok(1, "USE d");
        if is_there {
            assert_eq!(w.sql(1, "SELECT sum(balance) FROM accounts").text(), "800");
        } else {
            gone += 1;
            let left: Vec<String> = w.host.names().into_iter().filter(|n| n != "d.db").collect();
            assert!(left.iter().all(|name| name == "d.db-wal"), "{left:?}");
            assert_eq!(w.sql(1, "SHOW TABLES").text(), "");
            w.ok(1, "CREATE TABLE accounts (id INT PRIMARY KEY)");
        }
    }
    assert!((1..12).contains(&gone), "{gone}");
}

/// Four clients at once, whose statements come in any order: who waits for who writes goes on after
/// it.
#[test]
fn transfers_of_several_clients_are_done_one_after_the_other() {
    for seed in 0..20 {
        let (mut w, mut rng) = (make(seed), Rng::new(seed));
        let clients = 2..6u32;
        let mut left: Vec<(u32, Vec<String>, bool)> = clients
            .map(|client| {
                w.connect(client, "d");
                let first = u64::from(client) * 10;
                let all = (first..first + 5).flat_map(|id| transfer(id, &mut rng)).rev().collect();
                (client, all, false)
            })
            .collect();
        let mut rounds = 0;
        while !left.is_empty() {
            rounds += 1;
            assert!(rounds < 10_000, "nobody goes on: {left:?}");
            let at = rng.below(left.len() as u64) as usize;
            let (client, statements, waits) = &mut left[at];
            if !*waits {
                w.ask(*client, statements.pop().unwrap());
            }
            let told = w.take_reply(*client);
            *waits = told.is_none();
            assert!(matches!(told, None | Some(SqlReply::Ok(..))), "{told:?}");
            if !*waits && statements.is_empty() {
                left.swap_remove(at);
            }
        }
        let sums = w.sql(1, "SELECT sum(balance), count(*) FROM accounts").text();
        assert_eq!(sums, format!("{}\t{ACCOUNTS}", ACCOUNTS * 100));
        assert_eq!(w.sql(1, "SELECT count(*) FROM log").text(), "20");
        w.host.crash();
        w.restart();
        w.connect(1, "d");
        assert_eq!(w.sql(1, "SELECT count(*) FROM log").text(), "20");
    }
}

/// Each of the first calls of a commit and of the copying of the log, one after the other.
#[test]
fn transfers_survive_the_end_at_each_call() {
    for calls in 0..90 {
        let (mut w, mut rng) = (make(calls), Rng::new(7));
        w.host.die_after(calls * 3);
        let told = run(&mut w, 1, &mut rng);
        w.host.crash();
        w.restart();
        check(&mut w, told);
    }
}

#[test]
fn commits_of_several_clients_share_a_sync_and_nobody_is_told_before_it() {
    let mut w = make(3);
    for client in 2..6 {
        w.connect(client, "d");
    }
    w.releases = false;
    let before = w.host.calls.get("sync").copied();
    for client in 2..6 {
        w.ask(client, format!("INSERT INTO log VALUES ({client}, 0, 0, 0, '')"));
        assert_eq!(w.take_reply(client), None, "it is not durable");
    }
    assert_eq!(w.host.calls.get("sync").copied(), before, "a commit itself syncs nothing");
    assert_eq!(w.host.held().len(), 4);
    w.host.release();
    w.collect();
    for client in 2..6 {
        assert_eq!(w.take_reply(client), Some(SqlReply::Ok(1, 0, 2)));
    }
    // A reader in a call without a commit waits for nothing.
    w.ask(2, "SELECT count(*) FROM log");
    assert_eq!(w.take_reply(2).unwrap().text(), "4");
}

#[test]
fn a_full_disk_and_a_storage_that_fails_are_told_and_undone() {
    let mut w = make(4);
    w.host.capacity_bytes = w.host.used_bytes() + 100_000;
    let pad = "x".repeat(60_000);
    assert_eq!(w.sql(1, format!("INSERT INTO log VALUES (1, 0, 0, 0, '{pad}')")).code(), 0);
    let told = w.sql(1, format!("INSERT INTO log VALUES (2, 0, 0, 0, '{pad}')"));
    assert_eq!(told.code(), 1114, "{told:?}");
    w.ok(1, "BEGIN");
    w.ask(1, format!("INSERT INTO log VALUES (2, 0, 0, 0, '{pad}')"));
    let told = w.take_reply(1).unwrap();
    let ends = if told.code() == 0 { w.sql(1, "COMMIT") } else { told };
    assert_ne!(ends.code(), 0, "{ends:?}");
    w.sql(1, "ROLLBACK");
    w.host.capacity_bytes = u64::MAX;
    w.ok(1, "INSERT INTO log VALUES (2, 0, 0, 0, '')");
    w.host.fail(Some(Call::Write), 0, 1, Errno::IO);
    assert_eq!(w.sql(1, "INSERT INTO log VALUES (3, 0, 0, 0, '')").code(), 1026);
    w.ok(1, "INSERT INTO log VALUES (3, 0, 0, 0, '')");
    w.host.crash();
    w.restart();
    assert_eq!(check(&mut w, 3), 3);
}

#[test]
fn a_statement_that_computes_for_too_long_ends_with_its_limit() {
    let mut w = world();
    let file = w.host.open("statement-ms", sdk::open::CREATE).unwrap();
    w.host.write(file, 0, b"1\n").unwrap();
    w.host.close(file);
    w.restart();
    w.connect(1, "d");
    w.host.tick_ms = 1;
    let told = w.sql(
        1,
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    );
    assert_eq!(told.code(), 1969, "{told:?}");
    let SqlReply::Error(_, text) = told else { panic!() };
    assert!(text.contains("more than 1 ms"), "{text}");
}
