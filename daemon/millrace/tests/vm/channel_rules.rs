//! Channels under packet filters, spoofed neighbours and QUIC: what holds on the ordinary way holds
//! on them.

use std::time::Duration;

use lab::{Guest, KernelChoice};

use crate::channel_world::{
    Machine, World, address, channel, count, goes, is_sound, load, nothing_is_held, recipe, unload,
    world, world_with,
};
use crate::common::{alone, packets, until, until_ok};
use crate::pipe_world::listening;

const OLD: KernelChoice = KernelChoice::V6_1;
const NEW: KernelChoice = KernelChoice::V6_12;
/// Bytes that a QUIC connection sends there and back: seconds for an emulated Python.
const QUIC_BYTES: u64 = 1_000_000;
/// An emulated guest starts Python with its libraries, and works.
const PYTHON: Duration = Duration::from_secs(300);

/// Sets these rules and no others. In `text` each chain is `HOOK PRIORITY: RULE; RULE`, one on a
/// line.
fn set_rules(guest: &Guest, kind: &str, text: &str) {
    let mut rules = "flush ruleset\ntable inet t {\n".to_owned();
    for (i, chain) in text.lines().enumerate() {
        let (hook, rule) = chain.split_once(": ").unwrap();
        let (hook, priority) = hook.split_once(' ').unwrap();
        rules += &format!(
            "chain c{i} {{ type {kind} hook {hook} priority {priority}\n{}\n}}\n",
            rule.replace("; ", "\n")
        );
    }
    guest.put_bytes("/tmp/rules", 0o644, (rules + "}\n").as_bytes()).unwrap();
    guest.sh("nft -f /tmp/rules").unwrap();
}

/// Packets that the guest's rules counted.
fn counted(guest: &Guest) -> u64 {
    let listing = guest.sh("nft list ruleset").unwrap();
    listing.lines().filter(|line| line.contains("counter packets ")).map(packets).sum()
}

/// Round trips that came back, and how many packets went by the channel for them.
fn round_trips(from: &Guest, kind: &str, to: &str) -> (u64, u64) {
    let before = count(from, "taken");
    let done = from.run(&format!("timeout 3 agent rr {kind} {to} 0.3")).unwrap();
    let trips = done.json().ok().and_then(|told| told["count"].as_u64()).unwrap_or_default();
    (trips, count(from, "taken") - before)
}

/// More than 20 round trips come back, all in all, and as many packets go by the channel for them:
/// an answer that is late, or lost, may be what ends one run of them.
#[track_caller]
fn goes_by_channel(from: &Guest, kind: &str, to: &str) {
    let (mut trips, mut taken) = (0, 0);
    until_ok("packets go by the channel, and come back", || {
        let more = round_trips(from, kind, to);
        (trips, taken) = (trips + more.0, taken + more.1);
        match trips > 20 && taken > 20 {
            true => Ok(()),
            false => Err(format!("{trips} round trips, {taken} packets by the channel")),
        }
    });
}

fn linked<const N: usize>(world: &World) -> [&Guest; N] {
    let all: Vec<&Guest> = world.guests.iter().collect();
    all.iter().for_each(|guest| load(guest));
    world.linked(&all);
    <[&Guest; N]>::try_from(all).ok().unwrap()
}

#[test]
fn rules_of_either_guest_act_on_a_channel() {
    let _alone = alone();
    let machines = [Machine::new("a", OLD, 1), Machine::new("b", NEW, 1)];
    let world = world(machines, &recipe());
    let [a, b] = linked(&world);
    let server = listening(b, "agent rr-server");
    let to = address(1);
    // Drops: of one port and protocol, at each place that a packet passes.
    for (at, hook) in [(a, "output"), (a, "postrouting"), (b, "prerouting"), (b, "input")] {
        goes_by_channel(a, "udp", &to);
        set_rules(at, "filter", &format!("{hook} 0: udp dport 7000 counter drop"));
        assert_eq!(round_trips(a, "udp", &to).0, 0, "{hook} drops");
        assert!(counted(at) > 0, "{hook} counts");
        goes_by_channel(a, "tcp", &to);
        at.sh("nft flush ruleset").unwrap();
    }
    // Connections are tracked, and what belongs to none is not let in.
    set_rules(
        b,
        "filter",
        "input 0: ct state established,related counter accept; tcp dport 7000 ct state new counter \
         accept; udp dport 7000 drop",
    );
    goes_by_channel(a, "tcp", &to);
    assert!(counted(b) > 20);
    assert_eq!(round_trips(a, "udp", &to).0, 0);
    // NAT: another port at the receiver, another address at the sender.
    set_rules(b, "nat", "prerouting -100: tcp dport 7777 redirect to :7000");
    goes_by_channel(a, "tcp", &format!("{to}:7777"));
    set_rules(a, "nat", "output -100: ip daddr 10.0.0.99 dnat ip to 10.0.0.2");
    goes_by_channel(a, "tcp", "10.0.0.99");
    // An address that the host does not know to be ours goes the ordinary way until it has learned
    // it.
    a.sh("ip addr add 10.0.0.77/32 dev eth0").unwrap();
    set_rules(a, "nat", "postrouting 100: snat ip to 10.0.0.77");
    until("packets with another address come back", || round_trips(a, "tcp", &to).0 > 20);
    assert!(count(a, "source") + count(a, "rerouted") > 0);
    a.sh("nft flush ruleset").unwrap();
    // Logs.
    [a, b].into_iter().for_each(|guest| drop(guest.sh("modprobe nf_log_syslog").unwrap()));
    set_rules(
        a,
        "filter",
        "postrouting 0: tcp dport 7000 limit rate 5/second log prefix \"SENT \"",
    );
    set_rules(b, "filter", "input 0: tcp dport 7000 limit rate 5/second log prefix \"SEEN \"");
    goes_by_channel(a, "tcp", &to);
    a.sh("dmesg | grep -q SENT").unwrap();
    b.sh("dmesg | grep -q SEEN").unwrap();
    server.kill().unwrap();
    [a, b].into_iter().for_each(is_sound);
}

/// Whether `guest` has learned that the address is `other`'s.
fn believes(guest: &Guest, address: &str, other: &Guest) -> bool {
    let mac = other.sh("cat /sys/class/net/eth0/address").unwrap();
    guest.sh(&format!("ip neigh show {address} dev eth0")).unwrap().contains(mac.trim())
}

#[test]
fn spoofed_neighbours_move_nobodys_packets() {
    let _alone = alone();
    let machines =
        [Machine::new("a", OLD, 1), Machine::new("b", OLD, 1), Machine::new("c", NEW, 1)];
    // The switch does not check who claims an address: only the module is to be seen.
    let open = "switch = \"lan\"\nbind = \"mac\"";
    let world = world_with(open, machines, |guest| guest.image(recipe()));
    let [a, b, c] = linked(&world);
    let _servers = [b, c].map(|guest| listening(guest, "agent rr-server"));
    // ARP and NDP: the third guest says that it has the second one's addresses.
    let eth0 = "/proc/sys/net/ipv6/conf/eth0";
    let claims = [
        (
            "10.0.0.2",
            "ip addr replace 10.0.0.2/32 dev eth0; arping -U -c 2 -I eth0 10.0.0.2".to_owned(),
        ),
        (
            "fd00::2",
            format!(
                "echo 0 > {eth0}/accept_dad; echo 1 > {eth0}/ndisc_notify; \
                 ip addr del fd00::2/128 dev eth0; ip addr add fd00::2/128 dev eth0"
            ),
        ),
    ];
    for (stolen, claim) in claims {
        let at = if stolen.contains(':') { format!("[{stolen}]:7000") } else { stolen.to_owned() };
        goes_by_channel(a, "tcp", &at);
        let received = count(c, "rx");
        let (mut trips, mut taken) = (0, 0);
        // The owner may speak up at any time, and be believed again: then it is claimed once more.
        until(&format!("{stolen} goes the ordinary way"), || {
            if !believes(a, stolen, c) {
                c.sh(&claim).unwrap();
            }
            if believes(a, stolen, c) && goes(a, stolen, "ordinary") {
                (trips, taken) = round_trips(a, "tcp", &at);
                return trips > 20 && believes(a, stolen, c);
            }
            false
        });
        // Whoever answers: by the ordinary way, as without channels.
        assert!(taken == 0, "{stolen}: {trips} round trips, {taken} by the channel");
        assert_eq!(count(c, "rx"), received, "{stolen}");
        // The owner speaks up, and has its packets back.
        c.sh(&format!("ip addr del {stolen}/{} dev eth0", if at == stolen { 32 } else { 128 }))
            .unwrap();
        a.sh("ip neigh flush dev eth0").unwrap();
        until(&format!("{stolen} goes by the channel"), || {
            round_trips(a, "tcp", &at);
            goes(a, stolen, "channel")
        });
    }
    assert_eq!(channel(a, "peer", "refused"), 0);
    [a, b, c].into_iter().for_each(is_sound);
}

/// Packets that left by the card.
fn sent(guest: &Guest) -> u64 {
    guest.sh("cat /sys/class/net/eth0/statistics/tx_packets").unwrap().trim().parse().unwrap()
}

#[test]
fn quic_moves_onto_a_channel_and_off_it() {
    let _alone = alone();
    let machines = [Machine::new("a", OLD, 1), Machine::new("b", NEW, 2)];
    let world = world(machines, &recipe().python_quic());
    let [a, b] = [&world.guests[0], &world.guests[1]];
    let mut server = b.spawn("python3 /lab/quic.py server :: 7443").unwrap();
    server.wait_line("listening", PYTHON).unwrap();
    let client = format!("python3 /lab/quic.py client {} 7443 {QUIC_BYTES}", address(1));
    let before = sent(a);
    let client = a.spawn(&client).unwrap();
    until("QUIC runs", || sent(a) > before + 100);
    load(a);
    load(b);
    world.linked(&[a, b]);
    let taken = count(a, "taken");
    until("QUIC by the channel", || count(a, "taken") > taken + 100);
    unload(b);
    let before = sent(a);
    until("QUIC by the card", || sent(a) > before + 100);
    let whole = serde_json::json!({"bytes": QUIC_BYTES, "same": true});
    assert_eq!(client.wait(PYTHON).unwrap().json().unwrap(), whole);
    nothing_is_held(a);
    server.kill().unwrap();
    [a, b].into_iter().for_each(is_sound);
}
