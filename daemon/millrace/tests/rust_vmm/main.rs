//! The front end of Cloud Hypervisor and Firecracker (crate `vhost`) on the real daemon: every
//! device in every order of messages that VMMs use.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod order;
mod traffic;
mod vmm;

use common::{Daemon, EndHolder, Place};
use order::{ORDERS, Order};
use serde_json::json;
use traffic::{CONFIG, DISK_BYTES, Kind, Traffic};
use vhost::vhost_user::message::VhostUserConfigFlags as ConfigFlags;
use vhost::vhost_user::{VhostUserFrontend, VhostUserProtocolFeatures as Protocols};
use vmm::Vmm;

/// Offset of `writeback` in config space (virtio 1.2, 5.2.4).
const WRITEBACK_OFFSET: u32 = 32;
/// Offset of `status` in config space (virtio 1.2, 5.1.4).
const NET_STATUS_OFFSET: u32 = 6;

fn place(order: &Order, has_holder: bool) -> Place {
    let mode = if order.listens { "dial" } else { "listen" };
    let whole_device = order.whole_device.to_string();
    let config = CONFIG.replace("MODE", mode).replace("WHOLE", &whole_device);
    let place = Place::new(&format!("holder={has_holder}\n{config}"));
    let image = std::fs::File::create(place.path("disk.img")).unwrap();
    image.set_len(DISK_BYTES).unwrap();
    std::fs::create_dir(place.path("run")).unwrap();
    place
}

fn all(_: &Order, _: Kind) -> bool {
    true
}

/// Runs that `which` picks. The last one printed is where a test failed.
fn each(which: impl Fn(&Order, Kind) -> bool) -> impl Iterator<Item = (&'static Order, Kind)> {
    let pairs = ORDERS.iter().flat_map(|order| order.kinds.iter().map(move |kind| (order, *kind)));
    pairs
        .filter(move |(order, kind)| which(order, *kind))
        .inspect(|(order, kind)| println!("{kind:?} in the order of {}", order.name))
}

/// Prints the daemon's log if the test fails.
struct ShowLog<'a>(&'a Place);

impl Drop for ShowLog<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.0.log());
        }
    }
}

/// A daemon and what is connected to it.
fn connected(place: &Place, order: &'static Order, kind: Kind) -> (Daemon, Traffic) {
    // A VMM that listens is there first.
    let mut traffic = Traffic::new(kind, order, place);
    let daemon = place.start();
    traffic.each(Vmm::connect);
    (daemon, traffic)
}

/// Each device in each order that `which` names, connected.
fn with_connected(
    which: impl Fn(&Order, Kind) -> bool,
    mut test: impl FnMut(&Place, Daemon, Traffic),
) {
    for (order, kind) in each(which) {
        let place = place(order, false);
        let _log = ShowLog(&place);
        let (daemon, traffic) = connected(&place, order, kind);
        test(&place, daemon, traffic);
    }
}

/// Each device in each order that `which` names, connected and started.
fn with_each(which: impl Fn(&Order, Kind) -> bool, mut test: impl FnMut(&Place, Daemon, Traffic)) {
    with_connected(which, |place, daemon, mut traffic| {
        traffic.each(Vmm::start);
        test(place, daemon, traffic);
    });
}

#[test]
fn every_device_serves_in_every_order() {
    with_each(all, |_, _daemon, mut traffic| {
        traffic.run();
        traffic.run();
        traffic.each(Vmm::pause);
        traffic.offer();
        traffic.each(Vmm::resume);
        traffic.finish();
        traffic.run();
        if traffic.order().reset.is_none() {
            return;
        }
        for _ in 0..2 {
            traffic.each(Vmm::reset);
            traffic.reboot();
            traffic.each(Vmm::set_up_again);
            traffic.run();
        }
    });
}

#[test]
fn a_vm_that_ends_makes_room_for_the_next() {
    with_each(all, |_, _daemon, mut traffic| {
        traffic.run();
        for _ in 0..3 {
            traffic.each(Vmm::hang_up);
            traffic.reboot();
            traffic.each(Vmm::connect);
            traffic.each(Vmm::start);
            traffic.run();
        }
    });
}

/// FreeBSD and firmware fill their rings before the device runs.
#[test]
fn what_was_offered_before_the_start_is_served() {
    // It says that its rings begin at the available index, and has no inflight region: what is in
    // them is not meant. Guests that it boots wait.
    let is_served = |order: &Order, _| order.name != "Firecracker";
    with_connected(is_served, |_, _daemon, mut traffic| {
        traffic.offer();
        traffic.each(Vmm::start);
        traffic.finish();
        traffic.run();
        if traffic.order().reset.is_none() {
            return;
        }
        traffic.each(Vmm::reset);
        traffic.reboot();
        traffic.offer();
        traffic.each(Vmm::set_up_again);
        traffic.finish();
        traffic.run();
    });
}

/// To the same daemon, and to the one after it. The driver does not wait for either.
#[test]
fn a_driver_goes_on_when_its_vmm_reconnects() {
    for is_killed in [false, true] {
        with_each(
            |order, _| order.reconnect.is_some(),
            |place, daemon, mut traffic| {
                traffic.run();
                traffic.run();
                let _daemon = if is_killed {
                    daemon.kill();
                    traffic.each(Vmm::hang_up);
                    traffic.offer();
                    place.start()
                } else {
                    traffic.hang_up(&daemon);
                    traffic.offer();
                    daemon
                };
                traffic.each(Vmm::reconnect);
                traffic.finish();
                traffic.run();
            },
        );
    }
}

/// The holder keeps the sessions of a daemon that is killed.
#[test]
fn no_vmm_sees_a_restart_under_a_holder() {
    for (order, kind) in each(all) {
        let place = place(order, true);
        let _log = ShowLog(&place);
        let _end = EndHolder(&place);
        let (mut daemon, mut traffic) = connected(&place, order, kind);
        traffic.each(Vmm::start);
        traffic.run();
        traffic.wait(&daemon, "held", json!(true));
        traffic.each(Vmm::wait_taken);
        daemon.kill();
        // A frame is lost if its sender's port is there before its receiver's.
        if kind != Kind::Net {
            traffic.offer();
        }
        daemon = place.start();
        traffic.wait(&daemon, "queues_running", json!(traffic.vmms[0].rings.len()));
        traffic.finish();
        traffic.run();
        if order.reset.is_some() {
            traffic.each(Vmm::reset);
            traffic.reboot();
            traffic.each(Vmm::set_up_again);
            traffic.run();
        }
        drop(daemon);
    }
}

/// Requests that nobody took before the move are served after it.
#[test]
fn a_driver_goes_on_after_a_migration() {
    with_each(
        |order, _| order.migrates,
        |_, daemon, mut traffic| {
            traffic.run();
            traffic.each(Vmm::pause);
            traffic.offer();
            traffic.hang_up(&daemon);
            traffic.each(Vmm::arrive);
            traffic.finish();
            traffic.run();
        },
    );
}

#[test]
fn memory_is_plugged_in_and_taken_out_under_running_devices() {
    with_each(all, |_, _daemon, mut traffic| {
        traffic.run();
        let marks: Vec<_> = traffic.vmms.iter().map(|vmm| vmm.ram.mark()).collect();
        traffic.each(Vmm::plug_memory);
        traffic.run();
        if traffic.kind == Kind::Vsock {
            // Its receive buffers stay posted, in the memory that would go.
            return;
        }
        traffic.vmms.iter_mut().zip(marks).for_each(|(vmm, mark)| vmm.unplug_memory(mark));
        traffic.run();
    });
}

fn reads_config(order: &Order, _: Kind) -> bool {
    order.protocols.contains(Protocols::CONFIG)
}

#[test]
fn config_space_can_be_read_in_any_piece() {
    with_each(reads_config, |_, _daemon, mut traffic| {
        let vmm = &mut traffic.vmms[0];
        let whole = vmm.config(0, 256);
        // Bus accesses of guests, as crosvm and Cloud Hypervisor's generic device pass them on.
        for len in [1, 2, 4, 8, 60] {
            for offset in [0, 1, 4, 6, 7, 8, 10, 12, 32, 60, 124, 196] {
                let wanted = &whole[offset as usize..(offset + len) as usize];
                assert_eq!(vmm.config(offset, len), wanted, "{len} at {offset}");
            }
        }
        let known: &[u8] = match traffic.kind {
            Kind::Net => &[2, 0, 0, 0, 0, 10, 1, 0],
            Kind::Disk => &(DISK_BYTES / 512).to_le_bytes(),
            Kind::Vsock => &3u64.to_le_bytes(),
        };
        assert_eq!(whole[..8], *known);
        traffic.run();
    });
}

/// A guest that switches the write cache of its disk off. Both flags that VMMs send.
#[test]
fn config_space_can_be_written() {
    let is_disk = |order: &Order, kind| kind == Kind::Disk && reads_config(order, kind);
    with_each(is_disk, |_, _daemon, mut traffic| {
        let vmm = &mut traffic.vmms[0];
        for (value, flags) in [(0, ConfigFlags::empty()), (1, ConfigFlags::WRITABLE)] {
            vmm.front().set_config(WRITEBACK_OFFSET, flags, &[value]).unwrap();
            assert_eq!(vmm.config(WRITEBACK_OFFSET, 1), [value]);
        }
        traffic.run();
    });
}

#[test]
fn a_resized_disk_is_told_and_read() {
    with_each(
        |_, kind| kind == Kind::Disk,
        |place, daemon, mut traffic| {
            let image = std::fs::File::options().write(true).open(place.path("disk.img")).unwrap();
            image.set_len(2 * DISK_BYTES).unwrap();
            let answer = daemon.ask("POST", "/v1/vms/c/disks/d/resize", Some(json!({})));
            let vmm = &mut traffic.vmms[0];
            if vmm.is_told() {
                assert!(answer.is_success(), "{}", answer.body);
                assert_eq!(vmm.wait_config_change(), 1);
            } else {
                assert!(answer.body.contains("its guest was not told"), "{}", answer.body);
            }
            // Firecracker's operator tells it to look.
            if vmm.has(Protocols::CONFIG) {
                assert_eq!(vmm.config(0, 8), (2 * DISK_BYTES / 512).to_le_bytes());
            }
            traffic.run();
        },
    );
}

#[test]
fn a_link_that_goes_down_is_told_and_read() {
    with_each(
        |_, kind| kind == Kind::Net,
        |_, daemon, mut traffic| {
            traffic.run();
            for (changes, up) in [(1, false), (2, true)] {
                let answer = daemon.ask("PUT", "/v1/vms/a/nets/n/link", Some(json!({ "up": up })));
                assert!(answer.is_success(), "{}", answer.body);
                let vmm = &mut traffic.vmms[0];
                if vmm.is_told() {
                    assert_eq!(vmm.wait_config_change(), changes);
                }
                if vmm.has(Protocols::CONFIG) {
                    assert_eq!(vmm.config(NET_STATUS_OFFSET, 2), [u8::from(up), 0]);
                }
            }
            traffic.run();
        },
    );
}

#[test]
fn pages_that_devices_wrote_are_in_the_dirty_log() {
    with_each(
        |order, _| order.migrates,
        |_, _daemon, mut traffic| {
            assert!(traffic.vmms[0].has(Protocols::LOG_SHMFD));
            traffic.run();
            traffic.each(Vmm::start_dirty_log);
            traffic.take_pages();
            for _ in 0..3 {
                traffic.run();
                let wanted = traffic.take_pages();
                for (vmm, mut wanted) in traffic.vmms.iter_mut().zip(wanted) {
                    wanted.extend(vmm.used_pages());
                    let dirty = vmm.dirty_pages();
                    let lost: Vec<_> = wanted.iter().filter(|page| !dirty.contains(page)).collect();
                    assert!(lost.is_empty(), "{lost:#x?} of {wanted:#x?} are not in {dirty:#x?}");
                }
            }
            traffic.each(Vmm::stop_dirty_log);
            traffic.run();
        },
    );
}
