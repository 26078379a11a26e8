//! A real daemon with modules: reached over a Unix socket, listed, replaced, killed.
#![allow(clippy::unwrap_used)]

#[path = "modules/client.rs"]
#[allow(dead_code)]
mod client;
mod common;
#[path = "modules/daemon_copies.rs"]
mod copies;
#[path = "modules/world.rs"]
#[allow(dead_code)]
mod world;

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Client, hello};
use common::{Daemon, Place, run, text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::{Value, json};

const MODULE: &str = include_str!("modules/module.wat");

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);

/// The module `a` of a file in the place, and a VM that has it.
fn config(sha256: &str, more: &str) -> String {
    format!(
        "state_dir='@/state'\n[[module]]\nname='a'\npath='@/a.wasm'\nsha256='{sha256}'\n\
         memory='16MiB'\n[[vm]]\nname='db'\n[vm.modules]\nuse=['a']\ndisk='1MiB'\n\
         socket='@/run/db.sock'\n{more}"
    )
}

/// Writes a module, and says what its hash is.
fn write(dir: &Path, name: &str, text: &str) -> String {
    modules::engine::hex(&world::write(dir, name, text).hash)
}

/// A place with that config.
fn place(more: &str) -> Place {
    let dir = tempfile::tempdir().unwrap();
    let hash = write(dir.path(), "a", MODULE);
    let place = Place::new(&config(&hash, more));
    write(&place.path(""), "a", MODULE);
    place
}

/// Writes the config anew, as a person would who wants other modules.
fn rewrite(place: &Place, change: impl Fn(String) -> String) {
    let path = place.path("m.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(path, change(text)).unwrap();
}

/// A client; as every one must, it connects again if the process ends before it is welcomed.
fn client(place: &Place, id: u8) -> Client {
    let begin = Instant::now();
    loop {
        if let Ok(stream) = UnixStream::connect(place.socket("db.sock")) {
            let mut client = Client::new(OwnedFd::from(stream));
            client.send(&hello([id; 16], "a"));
            if client.welcomed().is_some() {
                return client;
            }
        }
        assert!(begin.elapsed() < LIMIT, "nobody serves: {}", place.log());
    }
}

/// Waits for the end of a process.
fn wait_end(pidfd: &OwnedFd) {
    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&limit)).unwrap(), 1);
}

fn watch(pid: i32) -> OwnedFd {
    pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap()
}

fn len(client: &mut Client, seq: u64) -> u64 {
    u64::from_le_bytes(client.ask(seq, b"l").try_into().unwrap())
}

/// The command's exit code, and what it printed.
fn module(place: &Place, args: &[&str]) -> (Option<i32>, String) {
    let socket = place.socket("control.sock");
    let all = [&["module"][..], args, &["--socket", socket.to_str().unwrap()]].concat();
    let output = run(&all);
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

/// Checks `value` against a schema of the API's description.
fn conforms(name: &str, value: &Value) {
    let api: Value = serde_json::from_str(control::api::SCHEMA).unwrap();
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": format!("#/components/schemas/{name}"),
        "components": api["components"],
    });
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(value).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:#?}\n{value:#}");
}

/// Waits until the VM's first module is shown as wanted.
fn wait_module(daemon: &Daemon, vm: &str, wanted: &dyn Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let list = daemon.get(&format!("/v1/vms/{vm}/modules"));
        if wanted(&list[0]) {
            return list[0].clone();
        }
        assert!(begin.elapsed() < LIMIT, "{list:#}");
        std::thread::yield_now();
    }
}

#[test]
fn requests_are_answered_listed_and_counted() {
    let place = place("");
    let daemon = place.start();
    assert_eq!(place.socket("db.sock").metadata().unwrap().mode() & 0o777, 0o600);
    let mut client = client(&place, 1);
    assert_eq!(client.ask(1, b"hello"), b"hello");
    assert_eq!(client.ask(2, b"dxxx"), 0u64.to_le_bytes());
    // The counters of a reply may be told after it.
    wait_module(&daemon, "db", &|m| m["state"] == "running" && m["syncs"].as_u64() >= Some(1));

    let (code, shown) = module(&place, &["ls", "--json"]);
    let list: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((code, list.as_array().unwrap().len()), (Some(0), 1));
    conforms("Module", &list[0]);
    let numbers = ["clients", "requests", "stored_bytes", "written_bytes", "failed"];
    assert_eq!(numbers.map(|key| list[0][key].as_u64().unwrap()), [1, 2, 4, 4, 0], "{list:#}");
    assert!(list[0]["latency_p99_ns"].as_u64() > Some(0), "{list:#}");
    assert_eq!(list[0]["latency"]["count"], 2, "{list:#}");
    assert!(
        module(&place, &["ls"]).1.contains("db  a       running"),
        "{}",
        module(&place, &["ls"]).1
    );
    let (code, shown) = module(&place, &["stats", "db", "a"]);
    assert!(code == Some(0) && shown.contains("requests          2\n"), "{shown}");
    assert!(module(&place, &["stats", "db", "--json"]).1.contains("\"again\": 0"));
    for (args, words) in [
        (["stats", "db", "b"], "VM db has no module b"),
        (["stats", "nobody", "a"], "there is no VM nobody"),
    ] {
        let (code, shown) = module(&place, &args);
        assert!(code == Some(4) && shown.contains(words), "{args:?}: {code:?} {shown}");
    }
    let status = daemon.get("/v1/status");
    conforms("Status", &status);
    assert_eq!(status["vms"][0]["modules"][0]["module"], "a");
    let metrics = daemon.ask("GET", "/v1/metrics", None).body;
    for line in [
        "millrace_module_requests_total{vm=\"db\",module=\"a\"} 2",
        "millrace_module_running{vm=\"db\",module=\"a\"} 1",
        "millrace_module_latency_nanoseconds_count{vm=\"db\",module=\"a\"} 2",
        "millrace_module_latency_nanoseconds_bucket{vm=\"db\",module=\"a\",le=\"+Inf\"} 2",
    ] {
        assert!(metrics.contains(line), "no {line}");
    }
}

#[test]
fn modules_are_loaded_again_from_the_config() {
    let place = place("[[vm]]\nname='other'\n");
    let daemon = place.start();
    let mut old = client(&place, 1);
    assert_eq!(old.ask(1, b"dxxx"), 0u64.to_le_bytes());
    let before = daemon.module_processes();
    let refused = |words: &str, args: &[&str]| {
        let (code, shown) = module(&place, args);
        assert!(code == Some(4) && shown.contains(words), "{code:?} {shown}");
    };
    // The file is not the one of the config: the old one serves on.
    let newer = write(
        &place.path(""),
        "a",
        &MODULE.replace("(data (i32.const 16) \"log\")", "(data (i32.const 16) \"gol\")"),
    );
    refused(&format!("a.wasm has SHA-256 {newer}, the config says"), &["load", "db"]);
    rewrite(&place, |text| text.replace("disk='1MiB'", "disk='1KiB'"));
    refused("m.toml:13:6: vm[0].modules.disk: is 1024 bytes", &["load", "db"]);
    rewrite(&place, |text| text.replace("disk='1KiB'", "dir='/elsewhere'"));
    refused(
        "has another `dir`, `socket`, `guest_users` or `ring` in the config now",
        &["load", "db"],
    );
    rewrite(&place, |text| text.replace("dir='/elsewhere'\n", ""));
    refused("VM other had no [vm.modules] when the daemon started", &["load", "other"]);
    refused("there is no VM nobody", &["load", "nobody"]);
    assert_eq!(old.ask(2, b"alive"), b"alive");
    assert_eq!(daemon.module_processes(), before);

    // The new one has a file of another name, which is empty.
    rewrite(&place, |text| {
        let line = text.lines().find(|line| line.starts_with("sha256=")).unwrap().to_owned();
        text.replace(&line, &format!("sha256='{newer}'"))
    });
    assert_eq!(module(&place, &["load", "db"]), (Some(0), String::new()));
    let goodbye = old.next().unwrap();
    assert_eq!(goodbye.failure().0, guest_abi::module::failure::ENDING);
    assert_eq!(len(&mut client(&place, 1), 3), 0);
    assert!(place.path("state/db/a/log").exists());
    assert_ne!(daemon.module_processes(), before);
    assert_eq!(daemon.module_processes().len(), 1);
}

/// A module's durable files outlive its daemon, and its process does not.
#[test]
fn a_killed_daemon_leaves_files_and_no_process() {
    let place = place("");
    let mut wanted = 0;
    for round in 1..=3 {
        let daemon = place.start();
        let mut client = client(&place, 1);
        assert_eq!(len(&mut client, 10 * round), wanted);
        client.ask(10 * round + 1, b"d234");
        wanted += 4;
        let old = watch(daemon.module_processes()[0]);
        daemon.kill();
        wait_end(&old);
    }
    assert!(place.socket("db.sock").exists(), "nobody removed it");
    let daemon = place.start();
    assert_eq!(len(&mut client(&place, 1), 100), wanted);
    // Also when the process alone is killed.
    let pid = daemon.module_processes()[0];
    let old = watch(pid);
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait_end(&old);
    assert_eq!(len(&mut client(&place, 1), 101), wanted);
}

#[test]
fn a_stopped_daemon_leaves_no_process_and_no_socket() {
    let place = place("");
    let daemon = place.start();
    let mut client = client(&place, 1);
    client.ask(1, b"dxxx");
    let pid = daemon.module_processes()[0];
    let process = watch(pid);
    // Sent to all of a group by terminals: the daemon has the say.
    for signal in [Signal::HUP, Signal::INT] {
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }
    assert_eq!(client.ask(2, b"alive"), b"alive");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    wait_end(&process);
    assert_eq!(client.next().unwrap().failure().0, guest_abi::module::failure::ENDING);
    assert!(!place.socket("db.sock").exists());
}

/// One VM's modules that cannot begin harm no other, and are mended without a restart.
#[test]
fn modules_that_cannot_begin_say_why() {
    let more = "[[module]]\nname='b'\npath='@/b.wasm'\nsha256='".to_owned()
        + &"0".repeat(64)
        + "'\n[[vm]]\nname='web'\n[vm.modules]\nuse=['b']\nsocket='@/taken'\n";
    let place = place(&more);
    std::fs::write(place.path("taken"), "a file").unwrap();
    let daemon = place.start();
    assert_eq!(client(&place, 1).ask(1, b"alive"), b"alive");
    let failed = wait_module(&daemon, "web", &|m| m["state"] == "failed");
    assert!(failed["reason"].as_str().unwrap().contains("b.wasm: No such file"), "{failed}");
    assert!(place.log().contains("its modules are not started: module b:"), "{}", place.log());
    let hash = write(&place.path(""), "b", MODULE);
    rewrite(&place, |text| text.replace(&"0".repeat(64), &hash));
    assert_eq!(module(&place, &["load", "web"]), (Some(0), String::new()));
    let shown = wait_module(&daemon, "web", &|m| m["state"] == "running");
    assert!(
        shown["reason"].as_str().unwrap().contains("there is a file that is not a socket"),
        "{shown}"
    );
    assert_eq!(std::fs::read(place.path("taken")).unwrap(), b"a file");
    assert_eq!(daemon.terminate().code(), Some(0));
}

/// The process is the daemon's own program, also when an upgrade has replaced its file.
#[test]
fn a_replaced_program_goes_on_as_it_was() {
    let place = place("");
    let daemon = place.start();
    client(&place, 1);
    let program = |pid: i32| std::fs::metadata(format!("/proc/{pid}/exe")).unwrap().ino();
    let own = program(daemon.pid() as i32);
    assert_eq!(program(daemon.module_processes()[0]), own);
    let command = std::fs::read(format!("/proc/{}/cmdline", daemon.module_processes()[0])).unwrap();
    assert!(command.starts_with(b"/proc/self/exe\0module-process\0db\0"), "{command:?}");
}
