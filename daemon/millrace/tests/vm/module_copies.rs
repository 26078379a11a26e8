//! Copies of a database's tables, taken while it works and put in another VM's place; and a store
//! that is drained under load.

use std::path::Path;

use control::client::Client;
use lab::{Daemon, Guest};
use modules::copy::{Summary, pass};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::LONG;
use crate::modules::{check, last_transfer_ends, make_accounts, sql, transfers};

pub fn back_up(client: &Client, vm: &str, to: &Path) -> Summary {
    let from = client.download(&format!("/v1/vms/{vm}/modules/table/backup")).unwrap();
    let mut from = from.unwrap_or_else(|answer| panic!("{answer:?}"));
    pass(&mut from, &mut std::fs::File::create(to).unwrap()).unwrap()
}

pub fn restore(client: &Client, vm: &str, from: &Path) {
    let path = format!("/v1/vms/{vm}/modules/table/restore?replace=true");
    let answer = client.upload(&path, &mut std::fs::File::open(from).unwrap()).unwrap();
    assert!(answer.is_success(), "{answer:?}");
}

fn tell(daemon: &Daemon, vm: &str, what: &str) -> Value {
    daemon.request("POST", &format!("/v1/vms/{vm}/modules/{what}"), None).unwrap()[0]["state"]
        .take()
}

/// Copies of one VM's tables are whole in the other one, whenever they are taken; and the first one
/// goes on after its store was away.
pub fn go_from_one_to_the_other(daemon: &Daemon, from: &Guest, to: &Guest, dir: &Path) {
    make_accounts(from);
    make_accounts(to);
    let client = daemon.control();
    let mut load = from.spawn(&transfers(1)).unwrap();
    let mut told = 0;
    let mut counts = Vec::new();
    for round in 0..4 {
        told += 5;
        load.wait_line(&format!("|{told}|"), LONG).unwrap();
        let copy = dir.join(format!("{round}.copy"));
        let summary = back_up(&client, "a", &copy);
        assert_eq!((summary.about.vm.as_str(), summary.files > 0), ("a", true));
        restore(&client, "b", &copy);
        // What the server remembers of its tables is of another store.
        sql(to, "FLUSH TABLES");
        counts.push(check(to, told));
        assert_eq!(sql(to, "CHECK TABLE d.accounts, d.log").matches("OK").count(), 2);
        if round == 1 {
            assert_eq!(tell(daemon, "a", "drain"), "drained");
            assert_ne!(tell(daemon, "a", "resume"), "drained");
        }
    }
    told += 5;
    load.wait_line(&format!("|{told}|"), LONG).unwrap();
    load.signal(Signal::KILL.as_raw()).unwrap();
    last_transfer_ends(from);
    counts.push(check(from, told));
    assert!(counts.is_sorted() && counts[0] < counts[4], "{counts:?}");
    // And on it goes, in the store that was the other one's.
    sql(to, "CALL d.transfer(1000000, 1, 2, 3)");
    assert_eq!(sql(to, "SELECT COUNT(*) FROM d.log WHERE id = 1000000"), "1");
}
