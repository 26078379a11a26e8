//! Two guests on one switch, and the uplink.

use lab::Vm;
use lab::{Daemon, Guest, KernelChoice, Lab, Net};

use crate::common::{
    GIB, MIB, alone, amount, boot, daemon, transfer, transfer_from_host, transfer_to_host,
};

const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\n";

struct Pair {
    a: Guest,
    b: Guest,
    daemon: Daemon,
    lab: Lab,
}

/// Options in which the pairs differ.
#[derive(Clone, Copy)]
struct Options {
    net: &'static str,
    queues: u16,
    packed: bool,
    mergeable: bool,
    kernel: KernelChoice,
    /// More properties of QEMU's device.
    device: &'static str,
}

const PLAIN: Options = Options {
    net: "",
    queues: 1,
    packed: false,
    mergeable: true,
    kernel: KernelChoice::V6_1,
    device: "",
};

fn pair(options: Options) -> Pair {
    let lab = Lab::new().unwrap();
    let port = format!("switch = \"lan\"\nqueue_pairs = {}\n{}", options.queues, options.net);
    let daemon = daemon("d")
        .switch("lan", UPLINK)
        .vm(Vm::new("a", "").net("n", &port))
        .vm(Vm::new("b", "").net("n", &port))
        .start(&lab)
        .unwrap();
    let guest = |name: &str, last: u8| {
        let mut net = Net::vhost_user(daemon.socket(name, "n"));
        (net.queues, net.packed, net.mergeable) =
            (options.queues, options.packed, options.mergeable);
        net.properties = options.device.split_whitespace().map(str::to_owned).collect();
        Guest::builder(name)
            .kernel(options.kernel)
            // The driver uses as many queue pairs as it has CPUs.
            .vcpus(u32::from(options.queues))
            .net(net)
            .address(format!("10.0.0.{last}/24"))
            .address(format!("fd00::{last}/64"))
    };
    let [a, b] = boot(&lab, [guest("a", 1), guest("b", 2)]);
    Pair { a, b, daemon, lab }
}

#[test]
fn two_guests_exchange_data_over_every_protocol() {
    let _alone = alone();
    let Pair { a, b, daemon, lab: _lab } = pair(PLAIN);
    transfer(&a, &b, "tcp", "10.0.0.2", amount(4 * GIB));
    transfer(&b, &a, "tcp", "10.0.0.1", amount(4 * GIB));
    transfer(&a, &b, "tcp", "fd00::2", amount(256 * MIB));
    transfer(&a, &b, "udp", "10.0.0.2", amount(256 * MIB));
    transfer(&b, &a, "udp", "fd00::1", amount(256 * MIB));
    // One copy from sender to receiver, and super-packets: far fewer frames than segments.
    let sum = |name| daemon.metric_sum(name, &[]).unwrap();
    let copied = sum("millrace_queue_copied_bytes_total");
    let bytes = sum("millrace_queue_bytes_total");
    let requests = sum("millrace_queue_requests_total");
    println!("bytes {bytes} copied {copied} requests {requests}");
    // Bytes are counted at the sender's and at the receiver's queue, copies once; header bytes go
    // through a copy of ours, which is what a small frame consists of.
    assert!(copied <= bytes / 2.0 * 1.05, "copied {copied} of {bytes}");
    let spoofed = daemon.metric_sum("millrace_queue_drops_total", &[("reason", "spoofed")]);
    assert_eq!(spoofed.unwrap(), 0.0);
}

#[test]
fn through_the_uplink_to_a_host_namespace() {
    let _alone = alone();
    let Pair { a, b, daemon: _daemon, lab } = pair(PLAIN);
    lab.net().address("up0", "10.0.0.254/24").unwrap();
    let len_bytes = amount(256 * MIB);
    let host = ("tcp", "10.0.0.254:7002");
    transfer_to_host(&a, host, host, len_bytes, |run| lab.net().inside(run).unwrap());
    transfer_from_host(&b, ("tcp", "10.0.0.2"), len_bytes, |content| {
        let send = || lab_agent::tools::xfer::run("send", "tcp", "connect", "10.0.0.2", content);
        lab.net().inside(send).unwrap().unwrap().json()
    });
}

/// N6: the whole way has the MTU, also for a packet that nobody may cut.
#[test]
fn jumbo_frames_through_the_uplink_to_a_host_namespace() {
    let _alone = alone();
    let options = Options { net: "mtu = 9000", device: "host_mtu=9000", ..PLAIN };
    let Pair { a, b, daemon: _daemon, lab } = pair(options);
    lab.net().address("up0", "10.0.0.254/24").unwrap();
    assert_eq!(a.sh("cat /sys/class/net/eth0/mtu").unwrap(), "9000");
    a.sh("ping -c 3 -s 8972 10.0.0.254").unwrap();
    // Packets that came and went in pieces.
    let pieces = a.sh("awk '/^Ip: [0-9]/ { print $15, $20 }' /proc/net/snmp").unwrap();
    assert_eq!(pieces, "0 0", "reassembled, cut");
    drop(b);
}

#[test]
fn four_queue_pairs() {
    let _alone = alone();
    let Pair { a, b, daemon: _daemon, lab: _lab } = pair(Options { queues: 4, ..PLAIN });
    let channels = a.sh("ls /sys/class/net/eth0/queues | grep -c tx").unwrap();
    assert_eq!(channels, "4");
    transfer(&a, &b, "tcp", "10.0.0.2", amount(256 * MIB));
    transfer(&b, &a, "tcp", "fd00::1", amount(256 * MIB));
}

#[test]
fn offloads_off_and_single_buffers() {
    let _alone = alone();
    let options = Options { net: "offloads = false", mergeable: false, ..PLAIN };
    let Pair { a, b, daemon: _daemon, lab: _lab } = pair(options);
    transfer(&a, &b, "tcp", "10.0.0.2", amount(256 * MIB));
    transfer(&b, &a, "udp", "10.0.0.1", amount(256 * MIB));
}

#[test]
fn packed_rings_on_a_6_12_kernel() {
    let _alone = alone();
    let options = Options { packed: true, kernel: KernelChoice::V6_12, ..PLAIN };
    let Pair { a, b, daemon: _daemon, lab: _lab } = pair(options);
    assert!(a.release().starts_with("6.12"), "{}", a.release());
    transfer(&a, &b, "tcp", "10.0.0.2", amount(256 * MIB));
    transfer(&b, &a, "tcp", "fd00::1", amount(256 * MIB));
}

#[test]
fn a_spoofed_source_is_dropped_and_counted() {
    let _alone = alone();
    let Pair { a, b: _b, daemon, lab: _lab } = pair(PLAIN);
    a.sh("ping -c 1 -W 5 10.0.0.2").unwrap();
    // The port has learned the card's address; another one is not its own.
    a.sh(
        "ip link set eth0 down; ip link set eth0 address 02:00:00:00:be:ef; ip link set eth0 up; \
          ip addr show eth0 | grep -q 10.0.0.1 || ip addr add 10.0.0.1/24 dev eth0",
    )
    .unwrap();
    let ping = a.run("ping -c 1 -W 1 10.0.0.2").unwrap();
    assert_ne!(ping.code, 0, "{}", ping.text());
    let spoofed = [("vm", "a"), ("reason", "spoofed")];
    assert!(daemon.metric_sum("millrace_queue_drops_total", &spoofed).unwrap() >= 1.0);
}
