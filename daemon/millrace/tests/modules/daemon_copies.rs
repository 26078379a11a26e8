//! Copies by a real daemon and its command: taken while the module serves, checked, put in place;
//! modules that are drained and resumed.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::*;

fn copy_file(place: &Place, name: &str) -> (PathBuf, String) {
    let path = place.path(name);
    (path.clone(), path.to_str().unwrap().into())
}

fn state(daemon: &Daemon) -> Value {
    daemon.get("/v1/vms/db/modules")[0]["state"].clone()
}

fn refused(place: &Place, words: &str, args: &[&str]) {
    let (code, shown) = module(place, args);
    assert!(
        code.is_some_and(|code| code != 0) && shown.contains(words),
        "{args:?}: {code:?} {shown}"
    );
}

#[test]
fn a_copy_is_taken_checked_and_put_in_place() {
    let place = place("[[vm]]\nname='other'\n");
    let daemon = place.start();
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dxxx"), 0u64.to_le_bytes());
    let (path, file) = copy_file(&place, "one.copy");
    let (code, shown) = module(&place, &["backup", "db", "a", "-o", &file]);
    assert!(
        code == Some(0)
            && shown.starts_with("db/a of 20")
            && shown.contains("Z: 1 files of 4 bytes, in a copy of "),
        "{shown}"
    );
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    // It serves on, and what comes later is not in the copy.
    assert_eq!(first.ask(2, b"dyyy"), 4u64.to_le_bytes());
    let shown = run(&["module", "verify", &file, "--json"]);
    let summary: Value = serde_json::from_str(&text(&shown.stdout)).unwrap();
    let told = ["vm", "module", "files", "files_bytes"].map(|key| summary[key].clone());
    assert_eq!(told, [json!("db"), json!("a"), json!(1), json!(4)]);

    refused(
        &place,
        "module a of VM db has files: say that they may be",
        &["restore", "db", "a", &file],
    );
    refused(&place, "there is no module b of VM db", &["backup", "db", "b", "-o", &file]);
    refused(&place, "there is no VM nobody", &["backup", "nobody", "a", "-o", &file]);
    refused(&place, "VM other has no [vm.modules]", &["backup", "other", "a", "-o", &file]);
    let (code, shown) = module(&place, &["restore", "db", "a", &file, "--replace", "--json"]);
    let told: Value = serde_json::from_str(&shown).unwrap();
    conforms("Restored", &told);
    assert_eq!((code, &told["files_bytes"], &told["of_vm"]), (Some(0), &json!(4), &json!("db")));
    assert_eq!(len(&mut client(&place, 2), 1), 4);
    let left = std::fs::read_dir(place.path("state/db")).unwrap().count();
    assert_eq!(left, 1);
    wait_module(&daemon, "db", &|m| m["state"] == "running");
    let names: Vec<_> = std::fs::read_dir(place.path("")).unwrap().flatten().collect();
    assert!(
        !names.iter().any(|n| n.file_name().to_string_lossy().contains("partial")),
        "{names:?}"
    );
}

#[test]
fn a_damaged_copy_changes_nothing() {
    let place = place("");
    let daemon = place.start();
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dxxx"), 0u64.to_le_bytes());
    let (path, file) = copy_file(&place, "one.copy");
    assert_eq!(module(&place, &["backup", "db", "a", "-o", &file]).0, Some(0));
    let copy = std::fs::read(&path).unwrap();
    let at = copy.windows(4).position(|w| w == b"dxxx").unwrap();
    let mut changed = copy.clone();
    changed[at] ^= 1;
    for (bytes, words) in [
        (&changed[..], "its SHA-256 is another one: bytes were changed"),
        (&copy[..copy.len() - 1], "it ends"),
        (&copy[..at], "it ends"),
        (&b""[..], "at byte 0: it ends"),
        (&b"PGDMP is another program's format"[..], "it does not begin as one"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        refused(&place, words, &["restore", "db", "a", &file, "--replace"]);
        let shown = run(&["module", "verify", &file]);
        let text = text(&shown.stderr);
        assert!(shown.status.code() == Some(1) && text.contains(words), "{text}");
    }
    // The same process serves the same files, on the same connection.
    assert_eq!(len(&mut first, 2), 4);
    wait_module(&daemon, "db", &|m| m["state"] == "running");
}

#[test]
fn files_that_a_module_does_not_start_with_are_put_back() {
    // It starts unless its log has two bytes.
    let picky = MODULE.replace(
        "(else (i32.const 0))",
        "(else (select (i32.const -5) (i32.const 0) \
           (i64.eq (call $len (global.get $file)) (i64.const 2))))",
    );
    assert_ne!(picky, MODULE);
    let place = place("");
    let hash = write(&place.path(""), "a", &picky);
    rewrite(&place, |text| {
        let from = text.find("sha256='").unwrap() + 8;
        format!("{}{hash}{}", &text[..from], &text[from + 64..])
    });
    let daemon = place.start();
    let (path, file) = copy_file(&place, "one.copy");
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dyes"), 0u64.to_le_bytes());
    assert_eq!(module(&place, &["backup", "db", "a", "-o", &file]).0, Some(0));
    assert_eq!(first.ask(2, b"dyou"), 4u64.to_le_bytes());
    // One like it that is whole, with other bytes.
    bad_copy(&path);
    let words = "with these files the modules do not start: the process of modules: module a \
                 cannot be started";
    refused(&place, words, &["restore", "db", "a", &file, "--replace"]);
    assert_eq!(len(&mut client(&place, 2), 1), 8);
    wait_module(&daemon, "db", &|m| m["state"] == "running");
}

/// A whole copy of a module `a` whose log says `dx`.
fn bad_copy(path: &Path) {
    use modules::copy::{About, LockedFolder, take};
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("log"), "dx").unwrap();
    let about = About {
        vm: "v".into(),
        module: "a".into(),
        hash: String::new(),
        begun_s: 0,
        version: String::new(),
    };
    let folder = OwnedFd::from(std::fs::File::open(folder.path()).unwrap());
    let mut to = std::fs::File::create(path).unwrap();
    take(&folder, &mut LockedFolder::new(&folder).unwrap(), &about, &mut to).unwrap();
}

#[test]
fn drained_modules_stay_so_across_restarts_until_they_are_resumed_elsewhere() {
    let place = place("");
    let daemon = place.start();
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dxxx"), 0u64.to_le_bytes());
    assert_eq!(module(&place, &["drain", "db"]), (Some(0), String::new()));
    assert_eq!((state(&daemon), daemon.module_processes()), (json!("drained"), vec![]));
    conforms("Module", &daemon.get("/v1/vms/db/modules")[0]);
    refused(&place, "the modules are drained: resume them first", &["load", "db"]);
    // Copies are taken of what stands still, too, and put there.
    let (_, file) = copy_file(&place, "one.copy");
    assert_eq!(module(&place, &["backup", "db", "a", "-o", &file]).0, Some(0));
    assert_eq!(module(&place, &["restore", "db", "a", &file, "--replace"]).0, Some(0));
    assert_eq!(state(&daemon), "drained");
    daemon.kill();
    let daemon = place.start();
    wait_module(&daemon, "db", &|m| m["state"] == "drained");
    drop(daemon);

    // The folder goes to another host.
    let other = super::place("");
    copy_folder(&place.path("state/db"), &other.path("state/db"));
    let daemon = other.start();
    wait_module(&daemon, "db", &|m| m["state"] == "drained");
    let mut waits = UnixStream::connect(other.socket("db.sock")).unwrap();
    waits.write_all(&hello([1; 16], "a")).unwrap();
    assert_eq!(module(&other, &["resume", "db"]), (Some(0), String::new()));
    let mut waits = Client::new(OwnedFd::from(waits));
    assert!(waits.welcomed().is_some());
    assert_eq!(len(&mut waits, 2), 4);
    wait_module(&daemon, "db", &|m| m["state"] == "running");
    assert_eq!(daemon.module_processes().len(), 1);
    // Once more is no mistake.
    assert_eq!(module(&other, &["resume", "db"]).0, Some(0));
    // Files that came while its modules run are not what they serve.
    std::fs::write(other.path("state/db/.drained"), "").unwrap();
    refused(&other, "was filled with another host's files meanwhile", &["resume", "db"]);
    assert_eq!(len(&mut waits, 3), 4);
}

#[test]
fn a_folder_that_another_process_serves_is_not_drained() {
    let place = place("");
    let daemon = place.start();
    client(&place, 1);
    assert_eq!(module(&place, &["drain", "db"]).0, Some(0));
    let folder = OwnedFd::from(std::fs::File::open(place.path("state/db/a")).unwrap());
    assert_eq!(module(&place, &["resume", "db"]).0, Some(0));
    client(&place, 2);
    // Another daemon's: this one's has gone for a moment.
    let taken = std::thread::scope(|scope| {
        let take = scope.spawn(|| {
            loop {
                if let Ok(still) = modules::copy::LockedFolder::lock(&folder) {
                    return still;
                }
                std::thread::yield_now();
            }
        });
        // The next one may be quicker, and then it is its turn.
        while !take.is_finished() {
            for pid in daemon.module_processes() {
                // It may have ended meanwhile.
                let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
            }
            std::thread::yield_now();
        }
        take.join().unwrap()
    });
    refused(&place, "the module's folder is locked by process", &["drain", "db"]);
    assert!(!place.path("state/db/.drained").exists());
    drop(taken);
    assert_eq!(len(&mut client(&place, 3), 1), 0);
    assert_eq!(module(&place, &["drain", "db"]).0, Some(0));
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    let copied = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(copied.success());
}

#[test]
fn a_copy_whose_daemon_dies_is_not_taken_for_a_whole_one() {
    let place = place("");
    rewrite(&place, |text| text.replace("disk='1MiB'", "disk='64MiB'"));
    let daemon = place.start();
    let mut first = client(&place, 1);
    // Too much for the buffers on the way.
    for seq in 1..=150 {
        let body = [b"d", &vec![seq as u8; 100_000][..]].concat();
        first.ask(seq, &body);
    }
    let (path, file) = copy_file(&place, "one.copy");
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["module", "backup", "db", "a", "-o", "-", "--socket"])
        .arg(place.socket("control.sock"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut taken = command.stdout.take().unwrap();
    taken.read_exact(&mut [0]).unwrap();
    // Nobody takes the rest, and the daemon waits with it. Meanwhile there is one copy and no
    // other.
    refused(&place, "a copy of VM db is being taken", &["backup", "db", "a", "-o", &file]);
    refused(&place, "a copy of VM db is being taken", &["restore", "db", "a", "/dev/null"]);
    assert_eq!(len(&mut first, 151), 15_000_150);
    daemon.kill();
    std::io::copy(&mut taken, &mut std::io::sink()).unwrap();
    let shown = common::all_of(command.stderr.take().unwrap());
    assert_eq!(command.wait().unwrap().code(), Some(1), "{shown}");
    let told = ["this is no whole copy of a module", "reading the copy"];
    assert!(told.iter().any(|words| shown.contains(words)), "{shown}");
    assert!(!path.exists());
}

#[test]
fn a_copy_that_is_not_whole_leaves_no_file() {
    let place = place("");
    let daemon = place.start();
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dxxx"), 0u64.to_le_bytes());
    // A sync failed of a folder that stands still: what is in it is not to be believed.
    assert_eq!(module(&place, &["drain", "db"]).0, Some(0));
    std::fs::write(place.path("state/db/a/.suspect"), "").unwrap();
    let (path, file) = copy_file(&place, "one.copy");
    refused(&place, "a sync of its files failed", &["backup", "db", "a", "-o", &file]);
    std::fs::remove_file(place.path("state/db/a/.suspect")).unwrap();
    refused(&place, "making ", &["backup", "db", "a", "-o", "/nowhere/one.copy"]);
    assert!(!path.exists());
    drop(daemon);
}

#[test]
fn what_a_restore_that_was_cut_short_has_left_is_not_lost() {
    let place = place("");
    let daemon = place.start();
    let mut first = client(&place, 1);
    assert_eq!(first.ask(1, b"dxxx"), 0u64.to_le_bytes());
    let (_, file) = copy_file(&place, "one.copy");
    assert_eq!(module(&place, &["backup", "db", "a", "-o", &file]).0, Some(0));
    let left = place.path("state/db/.restore-a");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("log"), "all that there was").unwrap();
    refused(&place, "of a restore that was cut short", &["restore", "db", "a", &file, "--replace"]);
    assert_eq!(std::fs::read(left.join("log")).unwrap(), b"all that there was");
    std::fs::remove_dir_all(&left).unwrap();
    assert_eq!(module(&place, &["restore", "db", "a", &file, "--replace"]).0, Some(0));
    assert!(!left.exists());
    assert_eq!(len(&mut client(&place, 2), 1), 4);
    drop(daemon);
}
