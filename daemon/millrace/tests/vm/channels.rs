//! Channels: connections move onto shared memory and off it, and nobody notices.

use std::time::Duration;

use lab::{Guest, KernelChoice};

use crate::channel_world::{
    Machine, World, address, channel, count, is_sound, load, nothing_is_held, recipe, unload, world,
};
use crate::common::{GIB, LONG, MIB, READY, alone, amount, transfer, transfer_during, until};

const OLD: KernelChoice = KernelChoice::V6_1;
const NEW: KernelChoice = KernelChoice::V6_12;

fn pair(kernel: KernelChoice, vcpus: u32) -> World {
    world([Machine::new("a", kernel, vcpus), Machine::new("b", kernel, vcpus)], &recipe())
}

/// Whether `guest` took packets onto the channel while `work` ran.
#[track_caller]
fn by_channel(guest: &Guest, work: impl FnOnce()) {
    let before = count(guest, "taken");
    work();
    let taken = count(guest, "taken") - before;
    assert!(taken > 100, "{}: {taken} packets by the channel", guest.name());
}

/// TCP over IPv4 and IPv6 and UDP, one way.
fn exchange(a: &Guest, b: &Guest, of: (&str, &str)) {
    let len = amount(GIB).max(32 * MIB);
    by_channel(a, || transfer(a, b, "tcp", of.0, len));
    by_channel(a, || transfer(a, b, "tcp", of.1, len));
    by_channel(a, || transfer(a, b, "udp", of.0, len / 4));
}

/// Bytes of a transfer that outlasts the event in its middle.
fn long() -> u64 {
    amount(2 * GIB).max(160 * MIB)
}

fn moves(kernel: KernelChoice, vcpus: u32) {
    let _alone = alone();
    let world = pair(kernel, vcpus);
    let [a, b] = [&world.guests[0], &world.guests[1]];
    let len = long();
    // Onto the channel while connections run.
    transfer_during(a, b, "tcp", &address(1), len, || {
        load(a);
        load(b);
        world.linked(&[a, b]);
        until("taken", || count(a, "taken") > 0);
    });
    exchange(a, b, (&address(1), "fd00::2"));
    exchange(b, a, (&address(0), "fd00::1"));
    nothing_is_held(a);
    nothing_is_held(b);
    // Off it while they run: the receiver's module goes, then the sender's.
    transfer_during(a, b, "tcp", &address(1), len, || unload(b));
    load(b);
    world.linked(&[a, b]);
    transfer_during(a, b, "tcp", &address(1), len, || unload(a));
    load(a);
    world.linked(&[a, b]);
    transfer_during(b, a, "udp", &address(0), len / 4, || unload(b));
    is_sound(a);
    is_sound(b);
}

#[test]
#[ignore = "a minute, and the harder of the two is below: make soak"]
fn connections_move_onto_a_channel_and_off_it() {
    moves(OLD, 1);
}

#[test]
fn connections_move_on_guests_with_two_cpus_and_the_newer_kernel() {
    moves(NEW, 2);
}

/// Bursts of datagrams, while their way changes all the time.
fn in_order(kernel: KernelChoice, vcpus: u32) {
    let _alone = alone();
    let world = pair(kernel, vcpus);
    let [a, b] = [&world.guests[0], &world.guests[1]];
    // What was held comes at once, and a receiver may have to wait for its CPU.
    b.sh("echo 16777216 > /proc/sys/net/core/rmem_default").unwrap();
    let mut receiver = b.spawn(&format!("agent order recv {}", address(1))).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    // What waits for the neighbour's address may be overtaken on the ordinary way, too.
    a.sh(&format!("ping -c 1 {}", address(1))).unwrap();
    let sender = a.spawn(&format!("agent order send {} /tmp/enough", address(1))).unwrap();
    load(a);
    load(b);
    world.linked(&[a, b]);
    until("taken", || count(a, "taken") > 100);
    let enabled = "/sys/module/millrace_net/parameters/enabled";
    for _ in 0..5 {
        let before = count(a, "not_confirmed");
        a.sh(&format!("echo N > {enabled}")).unwrap();
        until("ordinary", || count(a, "not_confirmed") > before);
        let before = count(a, "taken");
        a.sh(&format!("echo Y > {enabled}")).unwrap();
        until("taken", || count(a, "taken") > before);
    }
    unload(a);
    a.sh("touch /tmp/enough").unwrap();
    let sent = sender.wait(LONG).unwrap().json().unwrap();
    let received = receiver.wait(LONG).unwrap().json().unwrap();
    println!("{sent} {received}");
    assert_eq!(received["overtaken"], 0);
    assert_eq!(sent["sent"], received["received"]);
}

#[test]
fn datagrams_keep_their_order_on_the_way_in_and_out() {
    in_order(OLD, 1);
}

#[test]
fn datagrams_keep_their_order_on_guests_with_two_cpus() {
    in_order(NEW, 2);
}

/// A datagram of more fragments than a message can say, behind others that wait for room.
#[test]
fn what_cannot_be_described_holds_up_nobody_that_waits() {
    let _alone = alone();
    let world = pair(NEW, 1);
    let [a, b] = [&world.guests[0], &world.guests[1]];
    [a, b].into_iter().for_each(load);
    world.linked(&[a, b]);
    let mut sink = b.spawn("agent sink").unwrap();
    sink.wait_line("listening", READY).unwrap();
    // 110 fragments of one datagram; the small ones of four sockets fill the ring.
    a.sh("ip link set eth0 mtu 576").unwrap();
    let flood = |len: u32| format!("timeout 20 agent udp-small {} 4 {len} & ", address(1));
    a.run(&format!("{}{} wait", flood(60_000), flood(64).repeat(4))).unwrap();
    assert!(count(a, "waited") > 0, "the ring was never full");
    by_channel(a, || transfer(a, b, "udp", &address(1), MIB));
    is_sound(a);
    is_sound(b);
}

#[test]
fn four_guests_of_all_kinds_talk_and_one_is_killed() {
    let _alone = alone();
    let machines = [
        Machine::new("a", OLD, 1),
        Machine::new("b", OLD, 2),
        Machine::new("c", NEW, 1),
        Machine::new("d", NEW, 2),
    ];
    let world = world(machines, &recipe());
    let all: Vec<&Guest> = world.guests.iter().collect();
    all.iter().for_each(|guest| load(guest));
    world.linked(&all);
    let len = amount(GIB);
    for (from, to) in [(0, 1), (1, 2), (2, 3), (3, 0)] {
        by_channel(all[from], || transfer(all[from], all[to], "tcp", &address(to), len));
    }
    // Killed while it receives: its peers give its memory back, and go on with one another.
    let mut receiver =
        all[3].spawn(&format!("agent xfer recv tcp listen {} {GIB}", address(3))).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let sender = all[0]
        .spawn(&format!("timeout 20 agent xfer send tcp connect {} {GIB}", address(3)))
        .unwrap();
    until("taken", || count(all[0], "taken") > 0);
    all[3].kill();
    sender.wait(Duration::from_secs(60)).unwrap();
    until("the dead one's memory is unplugged", || {
        all[..3].iter().all(|guest| channel(guest, "memory", "mapped") == 2)
    });
    world.linked(&all[..3]);
    by_channel(all[0], || transfer(all[0], all[1], "tcp", &address(1), len));
    all[..3].iter().for_each(|guest| {
        nothing_is_held(guest);
        is_sound(guest);
    });
}

#[test]
fn a_member_leaves_and_joins_under_load() {
    let _alone = alone();
    let world = pair(NEW, 1);
    let [a, b] = [&world.guests[0], &world.guests[1]];
    load(a);
    load(b);
    world.linked(&[a, b]);
    transfer_during(a, b, "tcp", &address(1), long(), || {
        world.command("b", "leave");
        assert_eq!(world.links(a), 0);
        world.command("b", "join");
        world.linked(&[a, b]);
        world.command("a", "leave");
        world.command("a", "join");
        world.linked(&[a, b]);
    });
    by_channel(a, || transfer(a, b, "tcp", &address(1), 64 * MIB));
    nothing_is_held(a);
    nothing_is_held(b);
    is_sound(a);
    is_sound(b);
}
