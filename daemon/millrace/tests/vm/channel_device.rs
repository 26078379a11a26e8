//! The channel as a network device: a segment of its own, routed and bridged by an appliance.

use lab::{Guest, KernelChoice};

use crate::channel_world::{
    Machine, address, is_sound, nothing_is_held, recipe, unload, world_with,
};
use crate::common::{GIB, alone, amount, transfer, until};

const OLD: KernelChoice = KernelChoice::V6_1;
const NEW: KernelChoice = KernelChoice::V6_12;

/// Loads the modules with the device, which gets addresses of this number.
fn load_device(guest: &Guest, number: u32) {
    guest
        .sh(&format!(
            "mount -t debugfs none /sys/kernel/debug; modprobe millrace_channel; \
             insmod /kmod/millrace_net.ko device=Y; \
             ip link set mr0 up; ip addr add 10.1.0.{number}/24 dev mr0; \
             ip addr add fd01::{number}/64 dev mr0"
        ))
        .unwrap();
}

/// Value of one of the device's statistics.
fn statistic(guest: &Guest, name: &str) -> u64 {
    guest.sh(&format!("cat /sys/class/net/mr0/statistics/{name}")).unwrap().parse().unwrap()
}

/// Bytes of a transfer. There are 17.
fn len() -> u64 {
    amount(GIB / 4)
}

/// Each way.
fn exchange(a: &Guest, b: &Guest, of: (&str, &str), kinds: &[&str]) {
    for kind in kinds {
        transfer(a, b, kind, of.1, len());
        transfer(b, a, kind, of.0, len());
    }
}

#[test]
fn a_device_on_the_channel_is_a_segment_and_can_be_routed_and_bridged() {
    let _alone = alone();
    let machines =
        [Machine::new("a", OLD, 1), Machine::new("r", NEW, 2), Machine::new("b", OLD, 1)];
    // A bridge and a router send from addresses of others.
    let open = "switch = \"lan\"\nbind = \"off\"";
    let image = recipe().net_tools().module("bridge");
    let world = world_with(open, machines, |guest| guest.image(image.clone()));
    let [a, r, b] = [&world.guests[0], &world.guests[1], &world.guests[2]];
    load_device(a, 1);
    load_device(r, 2);
    for guest in [a, r] {
        until("a carrier", || guest.sh("cat /sys/class/net/mr0/carrier").unwrap() == "1");
    }

    // The segment. Nothing is cut to pieces that fits its long packets.
    exchange(a, r, ("10.1.0.1", "10.1.0.2"), &["tcp"]);
    let average = statistic(r, "rx_bytes") / statistic(r, "rx_packets");
    assert!(average > 3000, "{average} bytes a packet");
    exchange(a, r, ("10.1.0.1", "10.1.0.2"), &["udp"]);
    exchange(a, r, ("fd01::1", "fd01::2"), &["tcp", "udp"]);
    a.sh("ping -c 3 -s 60000 -W 10 10.1.0.2").unwrap();
    assert_eq!(a.sh("awk '/^Ip: [0-9]/ {print $19}' /proc/net/snmp").unwrap(), "0");
    let names = a.sh("ethtool -S mr0").unwrap();
    assert!(names.contains("rx_borrowed"), "{names}");
    assert_eq!([statistic(r, "rx_dropped"), statistic(a, "tx_dropped")], [0, 0]);

    // Routed: long packets without a checksum become those of an ordinary card.
    a.sh("ip route add 10.2.0.0/24 via 10.1.0.2").unwrap();
    r.sh("echo 1 >/proc/sys/net/ipv4/ip_forward; ip addr add 10.2.0.2/24 dev eth0").unwrap();
    b.sh("ip addr add 10.2.0.3/24 dev eth0; ip route add 10.1.0.0/24 via 10.2.0.2").unwrap();
    exchange(a, b, ("10.1.0.1", "10.2.0.3"), &["tcp", "udp"]);

    // Bridged with the ordinary card.
    a.sh("ip link set mr0 mtu 1500; ip addr add 10.3.0.1/24 dev mr0").unwrap();
    r.sh("ip link set mr0 mtu 1500; ip link add br0 type bridge; ip link set br0 up; \
          ip link set mr0 master br0; ip link set eth0 master br0")
        .unwrap();
    b.sh("ip addr add 10.3.0.3/24 dev eth0").unwrap();
    exchange(a, b, ("10.3.0.1", "10.3.0.3"), &["tcp", "udp"]);

    r.sh("ip link del br0").unwrap();
    unload(a);
    for guest in [a, r, b] {
        is_sound(guest);
    }
    nothing_is_held(r);
    // What was a carrier is gone with the peer.
    until("no carrier", || r.sh("cat /sys/class/net/mr0/carrier").unwrap() == "0");
    unload(r);
    transfer(a, r, "tcp", &address(1), len());
}
