//! A copy of a database's tables in which transactions are prepared: who ends them, and how, once
//! it is put back.

#![allow(non_snake_case)]

use lab::mariadb::{CLIENT, LOG, MariaDb};
use lab::{Guest, Lab};

use crate::common::{beside_others, until};
use crate::module_copies::{back_up, restore};
use crate::modules::{SMALL, guests_only, host, sql};

/// Folder of the server's own files.
const DATA: &str = "/data";
/// With its binary log.
const LOGGED: [&str; 3] = [SMALL, "--log-bin=log", "--binlog-format=row"];
/// A commit waits for a replica, which never comes, when it is in the binary log and in no engine
/// yet.
const HELD: &str = "SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC; \
                    SET GLOBAL rpl_semi_sync_master_timeout = 3600000; \
                    SET GLOBAL rpl_semi_sync_master_enabled = ON";

/// Kills the server, and waits until its memory and files are nobody's.
fn kill(guest: &Guest) {
    let gone = "p=$(cat /run/mysqld/mysqld.pid); kill -9 $p; \
                while grep -q . /proc/$p/cmdline 2> /dev/null; do sleep 0.05; done";
    guest.sh(gone).unwrap();
}

/// Ends the server in good order.
fn stop(guest: &Guest) {
    sql(guest, "SHUTDOWN");
    guest.sh(&format!("until grep -q 'Shutdown complete' {LOG}; do sleep 0.05; done")).unwrap();
}

/// Error of a server that does not start.
#[track_caller]
fn refused(server: &MariaDb, guest: &Guest, options: &[&str]) -> String {
    server.start(guest, DATA, options).unwrap_err().to_string()
}

fn ids(guest: &Guest) -> String {
    sql(guest, "SELECT id FROM d.t").replace('\n', " ")
}

#[test]
fn abuse_S8_prepared_transactions_of_a_copy_end_as_the_log_says_or_as_is_decided() {
    let _beside = beside_others();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a"]);
    let (server, [guest]) = guests_only(&lab, &daemon, state.path(), ["a"]);
    server.start(&guest, DATA, &LOGGED).unwrap();
    sql(&guest, "CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY) ENGINE=MILLRACE");
    sql(&guest, "INSERT INTO d.t VALUES (1)");
    sql(&guest, "XA START 'x'; INSERT INTO d.t VALUES (3); XA END 'x'; XA PREPARE 'x'");
    sql(&guest, HELD);
    let held = guest.spawn(&format!("{CLIENT} -e 'INSERT INTO d.t VALUES (2)'")).unwrap();
    let waiting =
        "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE state LIKE '%semi-sync%'";
    until("a commit waits", || sql(&guest, waiting) == "1");
    let status = sql(&guest, "SHOW ENGINE MILLRACE STATUS");
    assert!(status.contains("2 transactions are prepared"), "{status}");
    let (client, copy) = (daemon.control(), state.path().join("copy"));
    back_up(&client, "a", &copy);
    kill(&guest);
    drop(held);

    // The log of that time says how the transaction ended.
    restore(&client, "a", &copy);
    server.start(&guest, DATA, &LOGGED).unwrap();
    assert_eq!(ids(&guest), "1 2");
    stop(&guest);

    // Without it somebody has to decide, as docs/operate/modules.md says.
    restore(&client, "a", &copy);
    let said = refused(&server, &guest, &[SMALL]);
    assert!(said.contains("Found 1 prepared transactions!"), "{said}");
    let said = refused(&server, &guest, &[SMALL, "--tc-heuristic-recover=ROLLBACK"]);
    assert!(said.contains("Please restart without --tc-heuristic-recover"), "{said}");
    server.start(&guest, DATA, &[SMALL]).unwrap();
    assert_eq!(ids(&guest), "1");
    stop(&guest);

    restore(&client, "a", &copy);
    let said = refused(&server, &guest, &[SMALL, "--tc-heuristic-recover=COMMIT"]);
    assert!(said.contains("Please restart without --tc-heuristic-recover"), "{said}");
    server.start(&guest, DATA, &[SMALL]).unwrap();
    assert_eq!(ids(&guest), "1 2");

    // What was prepared by XA is left to its program.
    assert_eq!(sql(&guest, "XA RECOVER"), "1\t1\t0\tx");
    sql(&guest, "XA COMMIT 'x'");
    assert_eq!(ids(&guest), "1 2 3");
}
