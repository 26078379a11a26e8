//! Runs on files of the host: right ones end well, wrong bytes are found and named.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lab_fsx::model::Content;
use lab_fsx::pattern::Origin;
use lab_fsx::{Place, Plan};

/// A folder on a disk, for `O_DIRECT`.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if path.exists() {
        fs::remove_dir_all(&path).unwrap();
    }
    fs::create_dir_all(&path).unwrap();
    path
}

fn plan(path: &Path, workers: u8, operations: u32) -> Plan {
    Plan {
        place: Place::Folder { path: path.into(), trim: false },
        seed: 7,
        workers,
        files: 2,
        file_bytes: 1 << 20,
        time: None,
        operations: Some(operations),
        save: Some(path.join("model")),
    }
}

/// A folder after a run, and the model in it.
fn after_run(name: &str, workers: u8, operations: u32) -> PathBuf {
    let path = folder(name);
    let plan = plan(&path, workers, operations);
    let said = lab_fsx::run(&plan, Arc::default()).unwrap();
    assert_eq!(said["operations"], u64::from(operations + 1) * u64::from(workers), "{said}");
    path
}

#[test]
fn workers_side_by_side_find_all_as_they_left_it() {
    let path = after_run("side-by-side", 3, 1500);
    lab_fsx::verify(&path.join("model")).unwrap();
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn the_same_seed_does_the_same() {
    let [one, other] = ["seed-one", "seed-other"].map(|name| after_run(name, 2, 600));
    for file in ["worker0/file0", "worker0/file1", "worker1/file2", "worker1/file3"] {
        assert!(fs::read(one.join(file)).unwrap() == fs::read(other.join(file)).unwrap(), "{file}");
    }
    for path in [one, other] {
        fs::remove_dir_all(path).unwrap();
    }
}

/// Puts bytes over the first ones of a file that are not zero, and returns what the check says.
fn said_of(name: &str, wrong: impl Fn(u64) -> [u8; 16]) -> (u64, String) {
    let path = after_run(name, 1, 400);
    let file = path.join("worker0/file0");
    let bytes = fs::read(&file).unwrap();
    // In the middle of what is written there, and at a word's begin.
    let is_set = |chunk: &[u8]| chunk.iter().filter(|byte| **byte != 0).count() > 900;
    let at = bytes.chunks(1024).position(is_set).unwrap() as u64 * 1024 + 512;
    File::options().write(true).open(&file).unwrap().write_all_at(&wrong(at), at).unwrap();
    let error = lab_fsx::verify(&path.join("model")).unwrap_err().to_string();
    fs::remove_dir_all(path).unwrap();
    (at, error)
}

#[test]
fn zeroes_are_told_from_stale_and_foreign_bytes() {
    let (at, error) = said_of("zeroes", |_| [0; 16]);
    assert!(error.contains(&format!("{at:#x}..{:#x}: zeroes", at + 16)), "{error}");
    assert!(error.contains("worker0/file0"), "{error}");

    let words = |file, generation, at| {
        let mut bytes = [0; 16];
        Content::Written { file, generation, shift: 0 }.fill(&mut bytes, at);
        bytes
    };
    // The check knows no later operations than its own first one.
    let (at, error) = said_of("stale", |at| words(0, 1, at));
    assert!(error.contains(&format!("stale: operation 1 at {at:#x} of file 0")), "{error}");
    let (_, error) = said_of("foreign", |_| words(1, 1, 4096));
    assert!(error.contains("foreign: operation 1 at 0x1000 of file 1"), "{error}");
    let (_, error) = said_of("backing", |_| words(255, 1, 4096));
    assert!(error.contains("foreign: offset 0x1000 of the backing file"), "{error}");
    let (_, error) = said_of("garbage", |_| *b"0123456789abcdef");
    assert!(error.contains("no word of ours"), "{error}");
    assert!(error.contains("expected") && error.contains("operation"), "{error}");
}

#[test]
fn a_file_that_is_gone_or_short_is_found() {
    let path = after_run("short", 1, 400);
    let file = File::options().write(true).open(path.join("worker0/file1")).unwrap();
    file.set_len(5).unwrap();
    let error = lab_fsx::verify(&path.join("model")).unwrap_err().to_string();
    assert!(error.contains("the file has 5 bytes"), "{error}");
    fs::remove_dir_all(path).unwrap();
}

#[test]
fn an_origin_says_where_it_is_from() {
    let text = Origin { file: 2, generation: 9, at: 0x200 }.to_string();
    assert_eq!(text, "operation 9 at 0x200 of file 2");
}
