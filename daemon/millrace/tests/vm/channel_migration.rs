//! A VM moves to another host and back, and its connections with it: off the channel before, onto
//! it again where its peer is.

use lab::{Daemon, Guest, KernelChoice};
use serde_json::json;

use crate::channel_world::{
    Machine, World, address, channel, count, goes, guest, is_sound, load, nothing_is_held, plan,
    recipe,
};
use crate::common::{BOOT, GIB, LONG, alone, amount, transfer, until, until_ok};

/// Port whose address is known at both hosts before it comes.
const PORT: &str = "switch = \"lan\"\nmac = \"@MAC@\"";

/// The VM goes on as a guest of this name, at this daemon.
fn migrate(world: &World, from: &Guest, name: &str, daemon: &Daemon, machine: Machine) -> Guest {
    let socket = world.lab.path(&format!("{name}.migration"));
    let uri = format!("unix:{}", socket.display());
    let to = guest(name, daemon, machine).image(recipe());
    let to = to.qemu_args(["-incoming", &uri]).start(&world.lab).unwrap();
    // Its monitor answers when it listens there.
    assert_eq!(to.qmp("query-status", json!({})).unwrap()["status"], "inmigrate");
    from.qmp("migrate", json!({"uri": uri})).unwrap();
    until_ok("the VM has moved", || {
        let state = from.qmp("query-migrate", json!({})).unwrap();
        assert_ne!(state["status"], "failed", "{state}");
        if state["status"] == "completed" { Ok(()) } else { Err(state) }
    });
    from.kill();
    to.wait_ready(BOOT).unwrap();
    to
}

/// Sends over one connection, hashing, until `/stop` is there.
const SEND: &str = "rm -f /stop /through /sent; mkfifo /through; \
    head -c 4194304 /dev/urandom >/chunk; \
    (md5sum </through >/sent.new; mv /sent.new /sent) & \
    while ! [ -e /stop ]; do cat /chunk; done | tee /through | busybox nc";

/// Leaves, and moves while it sends; the connection does not end before it has moved.
fn moves_while_it_sends(
    world: &World,
    (from, at): (&Guest, &Daemon),
    (name, to): (&str, &Daemon),
    machine: Machine,
) -> Guest {
    let a = &world.guests[0];
    let receiver = a.spawn("mkfifo /in; busybox nc -l -p 9000 <>/in | md5sum; rm /in").unwrap();
    until("somebody listens", || a.sh("netstat -tln").unwrap().contains(":9000 "));
    // What it prints would come by the agent of the guest that is no more.
    from.sh(&format!("({SEND} {} 9000) </dev/null >/dev/null 2>&1 &", address(0))).unwrap();
    let leave = format!("/v1/vms/{}/channel/leave", machine.name);
    at.request("POST", &leave, None).unwrap();
    let there = migrate(world, from, name, to, machine);
    let sent_so_far = segments(&there);
    until("it sends from there", || segments(&there) > sent_so_far + 100);
    there.sh("touch /stop").unwrap();
    until("the sender has ended", || there.sh("test -e /sent").is_ok());
    let received = receiver.wait(LONG).unwrap();
    assert_eq!(there.sh("cat /sent").unwrap(), received.text().trim());
    there
}

/// How many segments of TCP the guest has sent.
fn segments(guest: &Guest) -> u64 {
    let counters = guest.sh("grep ^Tcp: /proc/net/snmp | tail -n 1").unwrap();
    counters.split_whitespace().nth(11).unwrap().parse().unwrap()
}

#[test]
fn a_vm_moves_to_another_host_and_back_with_its_connections() {
    let _alone = alone();
    let machines =
        [Machine::new("a", KernelChoice::V6_1, 1), Machine::new("b", KernelChoice::V6_12, 1)];
    let [_, machine] = machines;
    let lab = lab::Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    let [here, there] = ["d", "e"].map(|name| {
        let uplink = format!("[switch.uplink]\ntap = \"up-{name}\"\nbridge = \"br0\"\n");
        plan(name, &uplink, PORT, &machines).start(&lab).unwrap()
    });
    let mut world = World::boot(lab, here, machines, |guest| guest.image(recipe()));
    world.guests.iter().for_each(load);
    world.linked(&[&world.guests[0], &world.guests[1]]);
    let b = world.guests.remove(1);
    let moved = moves_while_it_sends(&world, (&b, &world.daemon), ("b2", &there), machine);
    assert_eq!(moved.sh("hostname").unwrap(), "b");
    until("a member there", || channel(&moved, "member", "member") > 0);
    assert_eq!(world.links(&world.guests[0]), 0);
    assert!(!goes(&world.guests[0], &address(1), "channel"));

    let back = moves_while_it_sends(&world, (&moved, &there), ("b3", &world.daemon), machine);
    world.guests.push(back);
    let [a, b] = [&world.guests[0], &world.guests[1]];
    world.linked(&[a, b]);
    let before = count(b, "taken");
    transfer(b, a, "tcp", &address(0), amount(GIB));
    assert!(count(b, "taken") > before);
    for guest in [a, b] {
        nothing_is_held(guest);
        is_sound(guest);
    }
}
