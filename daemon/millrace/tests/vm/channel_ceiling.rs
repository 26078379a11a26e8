//! A VM's ceilings bind what it sends by channels: its module keeps to them, and one that does not
//! loses the channel. Rates are those of the guests' own counters over their own clocks.

use std::fs::{self, File};
use std::mem::{offset_of, size_of};
use std::os::unix::fs::FileExt;

use guest_abi::channel::Host;
use lab::{Guest, KernelChoice};
use serde_json::{Value, json};

use crate::channel_world::{
    Machine, World, address, channel, count, goes, is_sound, load, nothing_is_held, number, recipe,
    world,
};
use crate::common::{MIB, READY, alone, transfer, until};

/// Time of the ceilings that may be used at once.
const BURST: f64 = 0.1;
/// Largest message, of which one may be owed.
const MESSAGE: f64 = 65_920.0;
/// Clocks and timers of emulated guests are not exact.
const MARGIN: f64 = 1.05;

/// Grants a VM these ceilings, and waits for its module to have them.
fn grant(world: &World, guest: &Guest, bytes_per_s: u64, ops_per_s: u64) {
    let body = json!({
        "ceiling_bytes_per_s": bytes_per_s,
        "ceiling_ops_per_s": ops_per_s,
        "ceiling_burst_ms": 100,
    });
    let path = format!("/v1/vms/{}", guest.name());
    world.daemon.request("PATCH", &path, Some(&body)).unwrap();
    until("the module has the ceilings", || {
        let has = |word| channel(guest, "ceiling", word);
        (has("bytes_per_s"), has("ops_per_s")) == (bytes_per_s, ops_per_s)
    });
}

fn member(world: &World, vm: &str) -> Value {
    let all = world.daemon.request("GET", "/v1/channels", None).unwrap();
    all.as_array().unwrap().iter().find(|member| member["vm"] == vm).unwrap().clone()
}

/// Counters of a guest, with its clock before and after they were read.
struct Reading {
    times: [f64; 2],
    counts: [u64; 4],
}

/// Words of the counters of [`Reading`].
const WORDS: [&str; 4] = ["sent", "sent_bytes", "received", "received_bytes"];

impl Reading {
    fn of(guest: &Guest) -> Self {
        let (clock, counters) = ("/proc/uptime", "/sys/kernel/debug/millrace/channel");
        let listing = guest.sh(&format!("cat {clock} {counters} {clock}")).unwrap();
        let time = |line: Option<&str>| {
            line.unwrap().split_whitespace().next().unwrap().parse::<f64>().unwrap()
        };
        let times = [time(listing.lines().next()), time(listing.lines().last())];
        Self { times, counts: WORDS.map(|word| number(&listing, "queue", word)) }
    }

    /// Amount that a counter has grown by, and the seconds within which it has.
    fn since(&self, earlier: &Self, word: &str) -> (f64, f64) {
        let at = WORDS.iter().position(|known| *known == word).unwrap();
        let amount = self.counts[at] - earlier.counts[at];
        (amount as f64, self.times[1] - earlier.times[0])
    }
}

/// Two guests do their work; by both sides' counters no more went over than the ceiling.
fn within(guests: [&Guest; 2], words: [&str; 2], ceiling: u64, spare: f64, work: impl FnOnce()) {
    let before = guests.map(Reading::of);
    work();
    let after = guests.map(Reading::of);
    for (at, word) in words.into_iter().enumerate() {
        let (amount, seconds) = after[at].since(&before[at], word);
        println!("{}: {word} {amount} in {seconds} s, ceiling {ceiling}", guests[at].name());
        let most = ceiling as f64 * (seconds + BURST) * MARGIN + spare;
        assert!(amount <= most, "{}: {word} {amount} in {seconds} s", guests[at].name());
        assert!(amount > ceiling as f64, "{}: {word} {amount}: not by it", guests[at].name());
    }
}

#[test]
fn a_vm_keeps_within_its_ceilings_by_the_channel_and_nothing_is_lost() {
    let _alone = alone();
    let machines =
        [Machine::with_cpus("a", KernelChoice::V6_12, 2), Machine::new("b", KernelChoice::V6_1, 1)];
    let world = world(machines, &recipe());
    let [a, b] = [&world.guests[0], &world.guests[1]];
    [a, b].into_iter().for_each(load);
    world.linked(&[a, b]);
    assert_eq!(channel(a, "queue", "held"), 0);

    // Bytes: two flows, of which none is left behind; and datagrams, which nobody slows down.
    grant(&world, a, 4 * MIB, 0);
    within([a, b], ["sent_bytes", "received_bytes"], 4 * MIB, MESSAGE, || {
        std::thread::scope(|scope| {
            scope.spawn(|| transfer(a, b, "tcp", "fd00::2", 12 * MIB));
            transfer(a, b, "tcp", &address(1), 12 * MIB);
        });
        transfer(a, b, "udp", &address(1), 8 * MIB);
    });
    let held = channel(a, "queue", "held");
    assert!(held > 0);
    // What it receives is its peers' business; it answers within its own.
    transfer(b, a, "tcp", &address(0), 16 * MIB);

    // Messages.
    grant(&world, a, 0, 200);
    within([a, b], ["sent", "received"], 200, 1.0, || {
        transfer(a, b, "tcp", &address(1), 16 * MIB);
    });
    assert!(channel(a, "queue", "held") > held);

    // Without ceilings nothing is held.
    grant(&world, a, 0, 0);
    let held = channel(a, "queue", "held");
    transfer(a, b, "tcp", &address(1), 16 * MIB);
    assert_eq!(channel(a, "queue", "held"), held);
    assert_eq!((&member(&world, "a")["state"], count(a, "overflow")), (&json!("active"), 0));
    for guest in [a, b] {
        nothing_is_held(guest);
        is_sound(guest);
    }
}

/// Writes zeroes over the ceilings in a guest's mailbox, as its kernel could.
fn forget_ceilings(guest: &Guest) {
    let files = fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
    let paths = files.filter_map(|file| Some(file.ok()?.path()));
    let mailbox = paths.filter(|path| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:millrace-mailbox")
    });
    let first = offset_of!(Host, ceiling_bytes_per_s);
    for path in mailbox {
        let memory = File::options().read(true).write(true).open(path).unwrap();
        memory.write_all_at(&vec![0; size_of::<Host>() - first], first as u64).unwrap();
    }
}

#[test]
#[allow(non_snake_case)]
fn abuse_V20_a_member_that_ignores_its_ceiling_loses_its_channel() {
    let _alone = alone();
    let machines = [
        Machine::new("a", KernelChoice::V6_12, 1),
        Machine::new("b", KernelChoice::V6_1, 1),
        Machine::new("c", KernelChoice::V6_12, 1),
    ];
    let world = world(machines, &recipe());
    let [a, b, c] = [&world.guests[0], &world.guests[1], &world.guests[2]];
    [a, b, c].into_iter().for_each(load);
    world.linked(&[a, b, c]);
    grant(&world, a, MIB / 4, 0);
    until("the module has forgotten them", || {
        forget_ceilings(a);
        // Its peer's client goes and comes: it looks at its mailbox again.
        b.sh("rmmod millrace_net && modprobe millrace_net").unwrap();
        channel(a, "ceiling", "bytes_per_s") == 0
    });
    world.linked(&[a, b, c]);

    let mut sink = b.spawn("agent sink").unwrap();
    sink.wait_line("listening", READY).unwrap();
    let to = address(1);
    let flood = format!("while true; do timeout 20 agent tcp-stream {to} 20; done >/dev/null 2>&1");
    let flood = a.spawn(&flood).unwrap();
    while member(&world, "a")["state"] == "active" {
        transfer(b, c, "tcp", &address(2), 4 * MIB);
        transfer(c, b, "tcp", &address(1), 4 * MIB);
    }
    let told = member(&world, "a");
    assert_eq!(told["state"], "broken");
    let reason = told["reason"].as_str().unwrap();
    println!("{reason}");
    assert!(
        reason.starts_with("its peers received ") && reason.ends_with(" is 262144"),
        "{reason}"
    );
    assert!(world.daemon.log_tail(1000).contains(reason), "the log does not say so");
    let over =
        |vm: &str| world.daemon.metric_sum("millrace_channel_over_ceiling", &[("vm", vm)]).unwrap();
    assert_eq!(["a", "b", "c"].map(over), [1.0, 0.0, 0.0]);
    flood.kill().unwrap();

    // It goes on by its port, whose ceiling it cannot pass, and the others by their channel.
    until("the switch has it", || {
        a.sh(&format!("timeout 1 busybox nc {to} 9 </dev/null; true")).unwrap();
        goes(a, &to, "ordinary")
    });
    transfer(a, b, "tcp", &address(1), MIB);
    let taken = count(b, "taken");
    transfer(b, c, "tcp", &address(2), 16 * MIB);
    assert!(count(b, "taken") > taken);
    // By command it is a member again, and has its ceiling.
    ["leave", "join"].into_iter().for_each(|what| world.command("a", what));
    world.linked(&[a, b, c]);
    assert_eq!(channel(a, "ceiling", "bytes_per_s"), MIB / 4);
    [a, b, c].into_iter().for_each(is_sound);
}
