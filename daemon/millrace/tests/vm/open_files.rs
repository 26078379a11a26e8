//! Pipes from files that somebody has open for writing: no lease is to be had, so the guest reads
//! them over placeholders, and the bytes are taken where its disk is read.

use guest_abi::Reason;
use lab::Running;
use lab_agent::stream::Stream;

use crate::common::{MIB, beside_others};
use crate::pipe::killed_in_mid_pipe;
use crate::pipe_world::{READY, World, listening, report, sh, world};

const LEN_BYTES: u64 = 24 * MIB + 12_345;

/// Holds a file open for writing.
fn writer<'a>(world: &'a World, file: &str) -> Running<'a> {
    let mut writer =
        world.guest.spawn(&format!("exec 3>>{file}; echo open; exec sleep 3600")).unwrap();
    writer.wait_line("open", READY).unwrap();
    writer
}

fn placed(world: &World) -> f64 {
    world.daemon.metric_sum("millrace_disk_placed_total", &[("vm", "srv")]).unwrap()
}

/// From an offset on, compared byte by byte.
fn fetch_from(world: &World, offset: u64) {
    let server = listening(&world.guest, &format!("mrpipe -l 7000 -p -r -o {offset} /mnt/f"));
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, LEN_BYTES - offset);
    let mut content = Stream::new(1);
    content.fill(&mut vec![0; offset as usize]);
    client.read_bytes(&mut content, LEN_BYTES - offset);
    client.read_trailer(0);
    drop(client);
    assert_eq!(report(server, LEN_BYTES - offset).0, LEN_BYTES - offset);
}

fn is_piped(file_system: &str) {
    let _beside = beside_others();
    let world = world(320, file_system);
    let _agent = world.agent();
    world.file("f", LEN_BYTES);
    let appends = writer(&world, "/mnt/f");
    let before = placed(&world);
    let server = listening(&world.guest, "mrpipe -l 7000 -p -r -n 3 /mnt/f");
    world.fetch("10.0.0.1:7000", 3, LEN_BYTES);
    assert_eq!(report(server, 3 * LEN_BYTES), (3 * LEN_BYTES, Reason::Complete));
    // Not as bytes through the guest: reads of half a megabyte, and what is left of a block.
    let reads = placed(&world) - before;
    println!("{reads} reads over placeholders");
    assert!(reads >= (3 * LEN_BYTES / MIB) as f64, "{reads}");
    for offset in [1, 511, 4096, 10_000_001, LEN_BYTES - 1] {
        fetch_from(&world, offset);
    }
    holes_are_zeroes(&world);
    rewritten_meanwhile(&world);
    appends.kill().unwrap();
    world.guest.check().unwrap();
}

/// Holes are on no disk: the guest sends them.
fn holes_are_zeroes(world: &World) {
    let len_bytes = 3_000_001;
    sh(&world.guest, &format!("truncate -s {len_bytes} /mnt/hole"));
    let appends = writer(world, "/mnt/hole");
    let server = listening(&world.guest, "mrpipe -l 7000 -p -r /mnt/hole");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, len_bytes);
    let mut got = vec![1; len_bytes as usize];
    std::io::Read::read_exact(&mut client.0, &mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == 0));
    client.read_trailer(0);
    drop(client);
    assert_eq!(report(server, len_bytes), (len_bytes, Reason::Complete));
    appends.kill().unwrap();
}

/// With the same bytes, so that it can be seen that no other came.
fn rewritten_meanwhile(world: &World) {
    let rewrite = "cp /mnt/f /mnt/same; echo ready; \
                   while :; do dd if=/mnt/same of=/mnt/f bs=77777 conv=notrunc 2>/dev/null; done";
    let mut rewrites = world.guest.spawn(rewrite).unwrap();
    rewrites.wait_line("ready", READY).unwrap();
    let server = listening(&world.guest, "mrpipe -l 7000 -p -r -n 4 /mnt/f");
    world.fetch("10.0.0.1:7000", 4, LEN_BYTES);
    assert_eq!(report(server, 4 * LEN_BYTES), (4 * LEN_BYTES, Reason::Complete));
    rewrites.kill().unwrap();
}

#[test]
fn a_file_that_is_open_for_writing_is_piped_on_ext4() {
    is_piped("ext4");
}

#[test]
fn a_file_that_is_open_for_writing_is_piped_on_xfs() {
    is_piped("xfs");
}

/// The file system's locks are not held while a peer does not read, nor by a daemon that was
/// killed.
#[test]
fn writers_wait_for_nobody() {
    let _beside = beside_others();
    let mut world = world(256, "ext4");
    let _agent = world.agent();
    let len_bytes = 48 * MIB;
    world.file("f", len_bytes);
    let appends = writer(&world, "/mnt/f");
    let server = listening(&world.guest, "mrpipe -l 7000 -p -r /mnt/f");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, len_bytes);
    let mut content = Stream::new(1);
    client.read_bytes(&mut content, 100_000);
    // Twice: behind the pipe's end, and what is there once more.
    let same = "dd if=/mnt/f of=/mnt/f bs=1M count=20 skip=20 seek=20 conv=notrunc 2>/dev/null";
    sh(
        &world.guest,
        &format!("echo more >> /mnt/f && {same} && sync /mnt/f && echo more >> /mnt/f"),
    );
    client.read_bytes(&mut content, len_bytes - 100_000);
    client.read_trailer(0);
    drop(client);
    assert_eq!(report(server, len_bytes), (len_bytes, Reason::Complete));
    sh(&world.guest, "[ $(tail -n 1 /mnt/f) = more ]");
    appends.kill().unwrap();

    sh(&world.guest, &format!("truncate -s {len_bytes} /mnt/f"));
    let _appends = writer(&world, "/mnt/f");
    for kill in 0..4 {
        killed_in_mid_pipe(&mut world, 7001 + kill, len_bytes);
    }
    world.wait_for_agent();
    sh(&world.guest, "agent fill /tmp/same 50331648 && agent compare /tmp/same /mnt/f");
    sh(&world.guest, "kill $(pidof sleep); umount /mnt && e2fsck -fn /dev/vda");
}
