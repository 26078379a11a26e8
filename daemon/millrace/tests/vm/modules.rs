//! Databases in guests whose tables are in the host: Debian's MariaDB with the storage engine
//! MILLRACE, over vsock, the store confined on the host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::mariadb::{self, MariaDb};
use lab::{Daemon, Disk, Guest, Image, Lab, Vm, Vsock};
use modules::engine::{hex, read_wasm};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{LONG, USER, alone, beside_others, boot, daemon, until};
use crate::module_copies;

/// Path of a file that `make modules` or `scripts/mariadb-plugin` makes.
fn made(path: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let path = target.join(path);
    assert!(path.is_file(), "{} is not there: run `make vm`", path.display());
    path.canonicalize().unwrap()
}

/// A daemon with the table store for VMs of these names. The first one's is reached by memory
/// alone.
pub fn host(lab: &Lab, state: &Path, names: &[&str]) -> Daemon {
    let wasm = made("modules/table.wasm");
    let (_, hash) = read_wasm("table", &wasm).unwrap();
    let module =
        format!("[[module]]\nname = 'table'\npath = {wasm:?}\nsha256 = '{}'\n", hex(&hash));
    let start = daemon("modules").daemon(&format!("state_dir = {state:?}")).toml(&module).holder();
    let vms = (11..).zip(names).map(|(cid, name)| {
        let (path, is_first) = (ring(state, name), *name == names[0]);
        let ring = format!("[vm.modules.ring]\npath = {path:?}\nrequired = {is_first}\n");
        let more = format!("[vm.modules]\nuse = ['table']\nguest_users = true\n{ring}");
        Vm::new(name, "").vsock(cid).more(&more)
    });
    vms.fold(start, |start, vm| start.vm(vm)).start(lab).unwrap()
}

/// The memory that a VM shares with its modules.
fn ring(state: &Path, name: &str) -> PathBuf {
    state.join(format!("{name}.ring"))
}

/// Bytes of that: the default.
const RING_BYTES: u64 = 16 << 20;

/// How many connections of a server went by it.
fn by_ring(guest: &Guest) -> u64 {
    sql(guest, "SHOW GLOBAL STATUS LIKE 'Millrace_rings'")
        .split_once('\t')
        .unwrap()
        .1
        .parse()
        .unwrap()
}

/// Guests with a server that is not started yet; the first has the memory before it.
pub fn guests_only<const N: usize>(
    lab: &Lab,
    daemon: &Daemon,
    state: &Path,
    names: [&str; N],
) -> (MariaDb, [Guest; N]) {
    let server = MariaDb::with_plugin(&made("mariadb/ha_millrace.so")).unwrap();
    let image = server.add_to(Image::builder().program("setpriv"), lab.cache()).unwrap();
    let guest = |name: &str| {
        let vsock = Vsock::vhost_user(daemon.socket(name, "vsock"));
        let guest = Guest::builder(name).memory_mb(512).image(image.clone()).vsock(vsock);
        match name == names[0] {
            true => guest.shared_memory(&ring(state, name), RING_BYTES),
            false => guest,
        }
    };
    (server, boot(lab, names.map(guest)))
}

/// The same with a server that runs.
fn guests<const N: usize>(
    lab: &Lab,
    daemon: &Daemon,
    state: &Path,
    names: [&str; N],
) -> [Guest; N] {
    let (server, guests) = guests_only(lab, daemon, state, names);
    for guest in &guests {
        // The databases of InnoDB and the server's own files are in memory: what is durable is in
        // the host.
        server.start(guest, "/data", &[SMALL]).unwrap();
    }
    guests
}

/// A server's option: InnoDB takes little of a guest's memory.
pub const SMALL: &str = "--innodb-buffer-pool-size=16M";

pub fn sql(guest: &Guest, text: &str) -> String {
    mariadb::sql(guest, text).unwrap()
}

#[test]
fn two_vms_have_databases_of_their_own_and_copies_go_from_one_to_the_other() {
    let _alone = alone();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a", "b"]);
    let [a, b] = guests(&lab, &daemon, state.path(), ["a", "b"]);
    let make = "CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY AUTO_INCREMENT, \
                v VARCHAR(100), b LONGBLOB, KEY (v)) ENGINE=MILLRACE;";
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
    // All of one by memory, all of the other by vsock.
    assert!(by_ring(&a) > 0 && by_ring(&b) == 0);
    nobody_else_is_heard(&a);
    sql(&a, "DROP DATABASE d");
    sql(&b, "DROP DATABASE d");
    module_copies::go_from_one_to_the_other(&daemon, &a, &b, state.path());
}

/// One transfer, tried until it is certain: what was done already has its number in the log.
const TRANSFER: &str = "CREATE PROCEDURE d.transfer(i INT, f INT, t INT, amount INT)
BEGIN
  DECLARE done INT DEFAULT 0;
  WHILE NOT done DO
    BEGIN
      DECLARE EXIT HANDLER FOR 1062 BEGIN ROLLBACK; SET done = 1; END;
      DECLARE EXIT HANDLER FOR SQLEXCEPTION ROLLBACK;
      START TRANSACTION;
      INSERT INTO d.log VALUES (i, f, t, amount);
      UPDATE d.accounts SET balance = balance - amount WHERE id = f;
      UPDATE d.accounts SET balance = balance + amount WHERE id = t;
      COMMIT;
      SET done = 1;
    END;
  END WHILE;
  SELECT CONCAT('|', i, '|');
END";

/// Calls it for numbers from here on, with accounts and amounts by chance.
pub fn transfers(from: u64) -> String {
    let call = "CALL d.transfer(%d, %d, %d, %d);\\n";
    let chance = "int(rand() * 20), int(rand() * 20), int(rand() * 10)";
    let program = format!(
        "BEGIN {{ srand({from}); for (i = {from}; i < {from} + 100000; i++) printf \"{call}\", i, {chance} }}"
    );
    format!("awk '{program}' | {}", mariadb::CLIENT)
}

pub fn make_accounts(guest: &Guest) {
    sql(
        guest,
        "CREATE DATABASE d; CREATE TABLE d.accounts (id INT PRIMARY KEY, balance INT) ENGINE=MILLRACE; \
         CREATE TABLE d.log (id INT PRIMARY KEY, f INT, t INT, amount INT) ENGINE=MILLRACE",
    );
    let accounts: Vec<String> = (0..20).map(|id| format!("({id}, 100)")).collect();
    sql(guest, &format!("INSERT INTO d.accounts VALUES {}", accounts.join(", ")));
    sql(guest, &format!("DELIMITER //\n{TRANSFER}//\nDELIMITER ;"));
}

/// Everything that was told is there, once, and in whole; how many transfers there are.
#[track_caller]
pub fn check(guest: &Guest, told: u64) -> u64 {
    let sums = "SELECT SUM(balance), COUNT(*) FROM d.accounts";
    assert_eq!(sql(guest, sums), "2000\t20");
    let log = sql(guest, "SELECT COUNT(*), MIN(id), MAX(id) FROM d.log");
    let [count, first, last]: [u64; 3] =
        log.split('\t').map(|n| n.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap();
    assert_eq!((first, last), (1, count), "{log}");
    assert!(last >= told, "{told} transfers were told to be done: {log}");
    let balances = "SELECT COUNT(*) FROM d.accounts a WHERE balance <> 100 \
                    - (SELECT IFNULL(SUM(amount), 0) FROM d.log WHERE f = a.id) \
                    + (SELECT IFNULL(SUM(amount), 0) FROM d.log WHERE t = a.id)";
    assert_eq!(sql(guest, balances), "0");
    count
}

/// Number of kills, in a soak run and in others.
fn kills(soak: u64, else_: u64) -> u64 {
    if std::env::var_os("MILLRACE_SOAK").is_some() { soak } else { else_ }
}

/// A moment of a transfer: up to the 10 ms that one takes.
fn moment(kill: u64) {
    std::thread::sleep(Duration::from_micros(kill * 7919 % 10_000));
}

/// After its client has gone, a transfer may be under way in the server still.
pub fn last_transfer_ends(guest: &Guest) {
    let busy = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE info LIKE 'CALL%'";
    until("the last transfer ends", || sql(guest, busy) == "0");
}

/// Kills something again and again while transfers go on.
fn killed(daemon: &mut Daemon, guest: &Guest, count: u64, kill: impl Fn(&mut Daemon)) {
    make_accounts(guest);
    let mut load = guest.spawn(&transfers(1)).unwrap();
    let mut told = 0;
    for round in 0..count {
        told += 5;
        load.wait_line(&format!("|{told}|"), LONG).unwrap();
        moment(round);
        kill(daemon);
    }
    told += 5;
    load.wait_line(&format!("|{told}|"), LONG).unwrap();
    load.signal(Signal::KILL.as_raw()).unwrap();
    last_transfer_ends(guest);
    check(guest, told);
    assert_eq!(sql(guest, "CHECK TABLE d.accounts, d.log").matches("OK").count(), 2);
    // Each time it connected again it got a ring again.
    assert!(by_ring(guest) > count, "{} of {count}", by_ring(guest));
}

/// The memory is the server's alone; without it nothing is taken.
fn nobody_else_is_heard(guest: &Guest) {
    let other = guest.run(&format!("{USER} cat /sys/bus/pci/devices/*/resource2"));
    let said = String::from_utf8(other.unwrap().stderr).unwrap();
    assert!(said.contains("resource2': Permission denied"), "{said}");
    sql(guest, "SET GLOBAL millrace_pool_size = 0; SET GLOBAL millrace_ring = 'off'");
    let refused = || match mariadb::sql(guest, "SELECT v FROM d.t WHERE id = 1") {
        Err(e) => e.to_string().contains("take requests by shared memory alone"),
        Ok(_) => false,
    };
    until("its requests are refused", refused);
    sql(guest, "SET GLOBAL millrace_pool_size = 32; SET GLOBAL millrace_ring = 'auto'");
    assert_eq!(sql(guest, "SELECT v FROM d.t WHERE id = 1"), "one");
}

#[test]
fn a_killed_process_loses_nothing_committed() {
    let _beside = beside_others();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let mut daemon = host(&lab, state.path(), &["a"]);
    let [guest] = guests(&lab, &daemon, state.path(), ["a"]);
    killed(&mut daemon, &guest, kills(200, 6), |daemon| {
        kill_process(Pid::from_raw(process(daemon)).unwrap(), Signal::KILL).unwrap();
    });
}

#[test]
fn a_killed_daemon_loses_nothing_committed() {
    let _beside = beside_others();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let mut daemon = host(&lab, state.path(), &["a"]);
    let [guest] = guests(&lab, &daemon, state.path(), ["a"]);
    killed(&mut daemon, &guest, kills(200, 4), |daemon| daemon.restart().unwrap());
}

#[test]
fn a_killed_vm_loses_nothing_committed() {
    let _beside = beside_others();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a"]);
    // The server's own files outlive the guest, too.
    let disk = state.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(1 << 30).unwrap();
    let server = MariaDb::with_plugin(&made("mariadb/ha_millrace.so")).unwrap();
    let image = Image::builder().program("mke2fs").module("ext4");
    let image = server.add_to(image, lab.cache()).unwrap();
    let start = || {
        let vsock = Vsock::vhost_user(daemon.socket("a", "vsock"));
        let guest = Guest::builder("a")
            .memory_mb(512)
            .image(image.clone())
            .disk(Disk::file(&disk))
            .vsock(vsock)
            .shared_memory(&ring(state.path(), "a"), RING_BYTES);
        let [guest] = boot(&lab, [guest]);
        guest.sh("mkdir -p /data; mount /dev/vda /data 2> /dev/null || { mke2fs -q -t ext4 /dev/vda && mount /dev/vda /data; }").unwrap();
        server.start(&guest, "/data/db", &[SMALL]).unwrap();
        guest
    };
    let mut guest = start();
    make_accounts(&guest);
    // The server's own files, as they were unpacked: nobody has made them durable.
    guest.sh("sync").unwrap();
    let mut done = 0;
    for round in 0..kills(40, 2) {
        let mut load = guest.spawn(&transfers(done + 1)).unwrap();
        let told = done + 5;
        load.wait_line(&format!("|{told}|"), LONG).unwrap();
        moment(round);
        guest.kill();
        drop(load);
        drop(guest);
        guest = start();
        done = check(&guest, told);
    }
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

/// The folder of the tests as guest-core wants it.
const CORE: &str = "mkdir -p /tmp/core/suite && cd /tmp/core && all=/usr/share/mysql/mysql-test \
    && ln -s $all/include . && ln -s $all/suite/storage_engine suite/ && ln -s /usr/bin/mariadb-test . \
    && cp /lab/core.list . && sh /lab/guest-core . /run/mysqld/mysqld.sock";

/// Options that mysql-test-run gives a server for these tests.
const CORE_OPTIONS: [&str; 9] = [
    SMALL,
    "--character-set-server=latin1",
    "--collation-server=latin1_swedish_ci",
    "--sql-mode=NO_ENGINE_SUBSTITUTION",
    "--log-bin=master-bin",
    "--binlog-format=row",
    "--default-time-zone=+00:00",
    "--innodb-lock-wait-timeout=2",
    "--millrace-lock-wait-timeout=2",
];

/// The names of the tests: all in a soak run, otherwise each eighth.
fn core_list(own: &Path, to: &Path) -> PathBuf {
    let text = std::fs::read_to_string(own.join("core.list")).unwrap();
    let step = if std::env::var_os("MILLRACE_SOAK").is_some() { 1 } else { 8 };
    let names: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let path = to.join("core.list");
    std::fs::write(
        &path,
        names.iter().step_by(step).copied().collect::<Vec<_>>().join("\n") + "\n",
    )
    .unwrap();
    path
}

#[test]
fn mariadbs_own_tests_say_what_they_say_on_innodb() {
    let _beside = beside_others();
    let (lab, state) = (Lab::new().unwrap(), tempfile::tempdir().unwrap());
    let daemon = host(&lab, state.path(), &["a"]);
    let plugin = made("mariadb/ha_millrace.so");
    let version = std::fs::read_to_string(plugin.with_file_name("version")).unwrap();
    let package = |name: &str| format!("{name}={}", version.trim());
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/mariadb/tests/suites");
    let server = MariaDb::with_plugin(&plugin).unwrap();
    let data = package("mariadb-test-data");
    let image = server
        .add_to(Image::builder(), lab.cache())
        .unwrap()
        .packaged(&package("mariadb-test"), "/usr/bin/mariadb-test")
        .packaged_folder(&data, "/usr/share/mysql/mysql-test/include")
        .packaged_folder(&data, "/usr/share/mysql/mysql-test/suite/storage_engine")
        .file("/lab/guest-core", own.join("guest-core"))
        .file("/lab/core.list", core_list(&own, state.path()));
    let vsock = Vsock::vhost_user(daemon.socket("a", "vsock"));
    let guest = Guest::builder("a").memory_mb(768).image(image).vsock(vsock);
    let guest = guest.shared_memory(&ring(state.path(), "a"), RING_BYTES);
    let [guest] = boot(&lab, [guest]);
    server.start(&guest, "/data", &CORE_OPTIONS).unwrap();
    sql(&guest, "CREATE DATABASE test");
    let said = guest.run_for(CORE, LONG).unwrap().ok().unwrap();
    assert!(said.ends_with(" passed, 0 failed"), "{said}");
}
