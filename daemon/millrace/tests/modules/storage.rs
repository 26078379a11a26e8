//! Disks that fail: system calls of a real process are made to fail by `strace`.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use guest_abi::module::failure;

use crate::client::Client;
use crate::world::{World, command};

/// The command of a process in which these calls fail, of each thread on its own.
fn failing(faults: &[&str]) -> Vec<String> {
    let mut traced: Vec<String> =
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync,fdatasync"]
            .map(String::from)
            .to_vec();
    for fault in faults {
        // What is called instead is one of the calls that the process may use.
        traced.extend(["-e".into(), format!("inject={fault}:error=EIO:syscall=getpid")]);
    }
    traced.extend(command());
    traced
}

fn inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

fn mark(world: &World) -> std::path::PathBuf {
    world.file("a").with_file_name(".suspect")
}

fn durable(client: &mut Client, seq: u64) -> u64 {
    u64::from_le_bytes(client.ask(seq, b"d234").try_into().unwrap())
}

#[test]
fn after_a_failed_sync_files_are_written_anew_before_they_are_served() {
    let world = World::with_command(failing(&["fdatasync:when=2"]));
    let mut client = world.client(1, "a");
    assert_eq!(durable(&mut client, 1), 0);
    let before = inode(&world.file("a"));
    // The kernel would have the pages, and call them durable the next time.
    client.request(2, 0, b"d234");
    let (code, text) = client.reply(2).failure();
    assert_eq!(code, failure::STORAGE, "{text}");
    assert_eq!(durable(&mut client, 3), 8);
    assert_ne!(inode(&world.file("a")), before, "it was written anew");
    assert!(!mark(&world).exists());
    let stats = &world.modules.stats()[0];
    assert_eq!((stats.stopped, stats.failed, stats.files.syncs), (1, 1, 3));
}

#[test]
fn a_disk_that_fails_for_good_serves_nothing_until_it_is_mended() {
    let faults = ["fdatasync:when=2+", "fsync:when=2+"];
    let world = World::with_command(failing(&faults));
    let mut client = world.client(1, "a");
    assert_eq!(durable(&mut client, 1), 0);
    let before = inode(&world.file("a"));
    client.request(2, 0, b"d234");
    assert_eq!(client.reply(2).failure().0, failure::STORAGE);
    client.request(3, 0, b"l");
    let (code, text) = client.reply(3).failure();
    assert_eq!(code, failure::BROKEN);
    assert!(
        text.starts_with("module a cannot be started: its files cannot be written anew: "),
        "{text}"
    );
    let stats = &world.modules.stats()[0];
    assert!(stats.state.starts_with(&text) && stats.failed_starts >= 3, "{stats:?}");
    world.modules.stop();
    assert!(mark(&world).exists());
    // Another process, with a disk that works, begins with what the mark says.
    let mended = world.again();
    let mut client = mended.client(1, "a");
    assert_eq!(durable(&mut client, 10), 8);
    assert_ne!(inode(&mended.file("a")), before);
    assert!(!mark(&mended).exists());
}
