//! Databases in guests whose tables are in the host: Debian's MariaDB with the storage engine MILLRACE, over
//! vsock, the store confined on the host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::mariadb::{self, MariaDb};
use lab::{Daemon, Guest, Image, Lab, Vm, Vsock};
use modules::engine::{hex, read_wasm};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{alone, boot, daemon, until};

/// What `make modules` and `scripts/mariadb-plugin` make.
fn made(path: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let path = target.join(path);
    assert!(path.is_file(), "{} is not there: run `make vm`", path.display());
    path.canonicalize().unwrap()
}

/// A daemon with the table store for VMs of these names.
fn host(lab: &Lab, state: &Path, names: &[&str]) -> Daemon {
    let wasm = made("modules/table.wasm");
    let (_, hash) = read_wasm("table", &wasm).unwrap();
    let module =
        format!("[[module]]\nname = 'table'\npath = {wasm:?}\nsha256 = '{}'\n", hex(&hash));
    let start = daemon("modules").daemon(&format!("state_dir = {state:?}")).toml(&module);
    let vms = (11..)
        .zip(names)
        .map(|(cid, name)| Vm::new(name, "").vsock(cid).more("[vm.modules]\nuse = ['table']\n"));
    vms.fold(start, |start, vm| start.vm(vm)).start(lab).unwrap()
}

/// A guest with a server that runs.
fn guests<const N: usize>(lab: &Lab, daemon: &Daemon, names: [&str; N]) -> [Guest; N] {
    let server = MariaDb::with_plugin(&made("mariadb/ha_millrace.so")).unwrap();
    let image = server.add_to(Image::builder(), lab.cache()).unwrap();
    let guest = |name: &str| {
        let vsock = Vsock::vhost_user(daemon.socket(name, "vsock"));
        Guest::builder(name).memory_mb(512).image(image.clone()).vsock(vsock)
    };
    let guests = boot(lab, names.map(guest));
    for guest in &guests {
        // The databases of InnoDB and the server's own files are in memory: what is durable is in the host.
        server.start(guest, "/data", &["--innodb-buffer-pool-size=16M"]).unwrap();
    }
    guests
}

fn sql(guest: &Guest, text: &str) -> String {
    mariadb::sql(guest, text).unwrap()
}

#[test]
fn two_vms_have_databases_of_their_own() {
    let _alone = alone();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a", "b"]);
    let [a, b] = guests(&lab, &daemon, ["a", "b"]);
    let make = "CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY AUTO_INCREMENT, v VARCHAR(100), \
                b LONGBLOB, KEY (v)) ENGINE=MILLRACE;";
    sql(&a, make);
    sql(
        &a,
        "INSERT INTO d.t (v, b) VALUES ('one', REPEAT('x', 100000)), ('two', NULL), ('three', '')",
    );
    // The same name, and nothing in it.
    sql(&b, make);
    assert_eq!(sql(&b, "SELECT COUNT(*) FROM d.t"), "0");
    let rows = sql(&a, "SELECT id, v, LENGTH(b), CRC32(b) FROM d.t ORDER BY v");
    assert_eq!(rows, "1\tone\t100000\t4261876081\n3\tthree\t0\t0\n2\ttwo\tNULL\tNULL");
    sql(&a, "START TRANSACTION; UPDATE d.t SET v = 'four' WHERE id = 2; ROLLBACK");
    assert_eq!(sql(&a, "SELECT v FROM d.t WHERE id = 2"), "two");
    let error = mariadb::sql(&a, "INSERT INTO d.t (id, v) VALUES (3, 'again')").unwrap_err();
    assert!(error.to_string().contains("Duplicate entry '3' for key 'PRIMARY'"), "{error}");
    // One round trip for each of these; statistics and catalogue are known by now.
    let trips = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS \
                 WHERE VARIABLE_NAME = 'MILLRACE_ROUND_TRIPS'";
    let before: u64 = sql(&a, trips).parse().unwrap();
    sql(&a, &"INSERT INTO d.t (v) VALUES (UUID());".repeat(10));
    let after: u64 = sql(&a, trips).parse().unwrap();
    assert!((10..20).contains(&(after - before)), "{before} to {after}");
}

/// Moves random amounts between accounts until it is told to stop; a transfer may fail as a whole.
const TRANSFERS: &str = "CREATE PROCEDURE d.transfers(n INT)
BEGIN
  DECLARE i INT DEFAULT 0;
  DECLARE f, t, amount INT;
  DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; SET @failed = @failed + 1; END;
  SET @failed = 0;
  WHILE i < n DO
    SET f = FLOOR(RAND() * 20), t = FLOOR(RAND() * 20), amount = FLOOR(RAND() * 10);
    SET @ok = 0;
    START TRANSACTION;
    UPDATE d.accounts SET balance = balance - amount WHERE id = f;
    UPDATE d.accounts SET balance = balance + amount WHERE id = t;
    INSERT INTO d.log (f, t, amount) VALUES (f, t, amount);
    COMMIT;
    SET i = i + 1;
  END WHILE;
  SELECT @failed;
END";

#[test]
fn what_is_killed_loses_nothing_committed() {
    let _alone = alone();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a"]);
    let [guest] = guests(&lab, &daemon, ["a"]);
    sql(
        &guest,
        "CREATE DATABASE d; CREATE TABLE d.accounts (id INT PRIMARY KEY, balance INT) ENGINE=MILLRACE; \
                 CREATE TABLE d.log (id INT PRIMARY KEY AUTO_INCREMENT, f INT, t INT, amount INT) ENGINE=MILLRACE",
    );
    let accounts: Vec<String> = (0..20).map(|id| format!("({id}, 100)")).collect();
    sql(&guest, &format!("INSERT INTO d.accounts VALUES {}", accounts.join(", ")));
    sql(&guest, &format!("DELIMITER //\n{TRANSFERS}//\nDELIMITER ;"));
    let kills = if std::env::var_os("MILLRACE_SOAK").is_some() { 200 } else { 6 };
    let many = mariadb::sql_script("CALL d.transfers(1000000);");
    let load = guest.spawn(&many).unwrap();
    let logged = || sql(&guest, "SELECT COUNT(*) FROM d.log").parse::<u64>().unwrap();
    for kill in 0..kills {
        let before = logged();
        until("transfers go on", || logged() > before + 5);
        // At any moment of a transfer.
        std::thread::sleep(Duration::from_micros(137 * (kill * 7 % 40)));
        kill_process(Pid::from_raw(process(&daemon)).unwrap(), Signal::KILL).unwrap();
        let sums = "SELECT SUM(balance), (SELECT COUNT(*) FROM d.accounts) FROM d.accounts";
        assert_eq!(sql(&guest, sums), "2000\t20", "after kill {kill}");
    }
    let caller = "SELECT id FROM information_schema.PROCESSLIST WHERE info LIKE 'CALL%'";
    sql(&guest, &format!("KILL {}", sql(&guest, caller)));
    until("the transfers end", || sql(&guest, caller).is_empty());
    drop(load);
    // Each transfer is in the log and in the balances, or in neither.
    let balances = "SELECT COUNT(*) FROM d.accounts a WHERE balance <> 100 \
                    - (SELECT IFNULL(SUM(amount), 0) FROM d.log WHERE f = a.id) \
                    + (SELECT IFNULL(SUM(amount), 0) FROM d.log WHERE t = a.id)";
    assert_eq!(sql(&guest, balances), "0");
    assert_eq!(sql(&guest, "CHECK TABLE d.accounts, d.log").matches("OK").count(), 2);
}

/// The module's process of the daemon's only VM.
fn process(daemon: &Daemon) -> i32 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let children = |task: std::io::Result<std::fs::DirEntry>| {
        let path = task.unwrap().path().join("children");
        std::fs::read_to_string(path).unwrap_or_default()
    };
    let all: String = tasks.map(children).collect();
    let is_one = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|c| c.starts_with("millrace-module"))
    };
    all.split_whitespace().find(is_one).unwrap().parse().unwrap()
}
