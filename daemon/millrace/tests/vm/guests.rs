//! Pipes into connections between two VMs of one daemon: client and server have clocks of their
//! own.

use crate::common::{GIB, LONG, MIB, alone};
use crate::pipe_world::{Machine, World, agent, boot, listening, recipe, report, sh};

const SERVER: &str = "10.0.0.1:7000";

/// The server has a disk of files; the client asks.
fn two_guests(disk_mib: u64) -> World {
    let client = Machine { name: "cli", last: 2, disks_mib: &[], pipes: "", secret: None };
    let disks: &'static [u64] = vec![disk_mib].leak();
    let world = boot(&[Machine::srv(disks), client], recipe(), &[]);
    sh(&world.guest, "mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount -t ext4 /dev/vda /mnt");
    world
}

/// Lets `fetch` compare all rounds over one connection; every byte went by pipes.
fn serve(world: &World, file: &str, rounds: u64, len_bytes: u64, fetch: impl FnOnce()) {
    let before = world.count("srv", "moved_bytes");
    let server = format!("mrpipe -l 7000 -p -r -n {rounds} /mnt/{file}");
    let server = listening(&world.guest, &server);
    fetch();
    let whole = rounds * len_bytes;
    assert_eq!(report(server, whole).0, whole);
    assert_eq!(world.count("srv", "moved_bytes") - before, whole as f64);
}

fn serve_guest(world: &World, file: &str, rounds: u64, len_bytes: u64) {
    serve(world, file, rounds, len_bytes, || {
        let fetch = format!("agent fetch {SERVER} {rounds} {len_bytes}");
        let fetched = world.others[0].run_for(&fetch, LONG).unwrap().json().unwrap();
        println!("{fetched}");
        assert_eq!(fetched["bytes"], rounds * len_bytes);
    });
}

#[test]
fn one_guest_pipes_its_files_to_another() {
    let _alone = alone();
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let world = two_guests(if soak { 1536 } else { 64 });
    let _agent = agent(&world.guest);
    world.file("f", 8 * MIB);
    serve_guest(&world, "f", if soak { 50 } else { 4 }, 8 * MIB);
    if soak {
        world.file("big", GIB);
        serve_guest(&world, "big", 1, GIB);
        // And to a client with the host's clock.
        serve(&world, "big", 1, GIB, || world.fetch(SERVER, 1, GIB));
    }
}
