//! Ports as sessions drive them, on a real sidecore.
#![allow(non_snake_case)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::clock::MonotonicClock;
use base::counter::DropReason;
use queue::Layout;
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use rustix::event::{PollFd, PollFlags, poll};
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::{ConfigNotifier, Device, DeviceKind};

use crate::features as f;
use crate::testing::{BROADCAST, MODERN, frame, mac, no_offload};
use crate::{BindMode, NetError, NetPort, NetPortConfig, Switch, SwitchConfig};

fn core() -> Sidecore {
    let config = SidecoreConfig { yield_when_idle: true, ..SidecoreConfig::default() };
    Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
}

fn switch(core: &Sidecore) -> Switch {
    let config = SwitchConfig { hold_us: 10_000_000, ..SwitchConfig::new("sw") };
    Switch::new(core, config, Arc::new(MonotonicClock)).unwrap()
}

/// A guest driven through its port, woken by real kicks and interrupts.
struct Vm {
    port: Arc<NetPort>,
    rx: ModelDriver,
    tx: ModelDriver,
    posted: std::collections::HashMap<u16, (u64, u32)>,
}

impl Vm {
    fn start(port: Arc<NetPort>, layout: Layout) -> Self {
        let ram = GuestRam::new(16 << 20);
        let driver = || ModelDriver::in_ram(ram.clone(), layout, 256, ModelOptions::default());
        let (rx, tx) = (driver(), driver());
        port.activate(MODERN | 1 << 30).unwrap();
        port.start_queue(rx.vring(0)).unwrap();
        port.start_queue(tx.vring(1)).unwrap();
        Self { port, rx, tx, posted: Default::default() }
    }

    fn post(&mut self, count: usize) {
        for _ in 0..count {
            let buf = (self.rx.alloc(1600), 1600);
            let id = self.rx.offer(&[], &[buf]);
            self.posted.insert(id, buf);
        }
        self.rx.kick();
    }

    fn send(&mut self, bytes: &[u8]) {
        let buf = self.tx.buffer(&[&no_offload()[..], bytes].concat());
        self.tx.offer(&[buf], &[]);
        self.tx.kick();
    }

    /// Waits for the interrupt of the next frame.
    fn recv(&mut self) -> Vec<u8> {
        loop {
            if let Some((id, len)) = self.rx.used() {
                let (addr, _) = self.posted.remove(&id).unwrap();
                return self.rx.read(addr, len as usize).split_off(12);
            }
            wait(&self.rx);
        }
    }

    fn wait_sent(&mut self) {
        while self.tx.used().is_none() {
            wait(&self.tx);
        }
    }
}

fn wait(driver: &ModelDriver) {
    poll(&mut [PollFd::new(driver.call_event(), PollFlags::IN)], None).unwrap();
    driver.interrupted();
}

#[test]
fn two_guests_talk_through_kicks_and_interrupts() {
    for layout in [Layout::Split, Layout::Packed] {
        let core = core();
        let switch = switch(&core);
        let port = |name: &str| switch.add_port(NetPortConfig::new(name)).unwrap();
        let mut a = Vm::start(port("vm/a"), layout);
        let mut b = Vm::start(port("vm/b"), layout);
        a.post(8);
        b.post(8);
        let arp = |n: usize| {
            let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
            let ip = [10, 0, 0, n as u8 + 1];
            [&BROADCAST[..], &mac(n), &[8, 6], &head, &mac(n), &ip, &[0; 10]].concat()
        };
        a.send(&arp(0));
        assert_eq!(b.recv(), arp(0));
        b.send(&arp(1));
        assert_eq!(a.recv(), arp(1));
        for n in 0..200 {
            let there = frame(mac(1), mac(0), 60 + n);
            a.send(&there);
            assert_eq!(b.recv(), there);
            a.wait_sent();
            b.post(1);
        }
        let (mac_a, ips) = a.port.addresses().unwrap();
        assert_eq!((mac_a, ips), (Some(mac(0)), vec![[10, 0, 0, 1].into()]));
        let mut macs = switch.macs().unwrap();
        macs.sort_by_key(|m| m.mac);
        assert_eq!(macs.len(), 2);
        assert_eq!((macs[1].mac, macs[1].port.as_deref()), (mac(1), Some("vm/b")));
        // On a busy host it may have been given work each time before it slept. Now there is none;
        // if it has not slept before, it does now, and only the kick wakes it.
        while core.stats().sleeps.get() == 0 {
            std::thread::yield_now();
        }
        a.send(&frame(mac(1), mac(0), 60));
        assert_eq!(b.recv(), frame(mac(1), mac(0), 60));
        core.shutdown();
    }
}

#[test]
fn a_held_sender_is_woken_by_the_receivers_kick() {
    let core = core();
    let switch = switch(&core);
    let port = |name: &str| {
        switch.add_port(NetPortConfig { bind: BindMode::Mac, ..NetPortConfig::new(name) }).unwrap()
    };
    let mut a = Vm::start(port("a"), Layout::Split);
    let mut b = Vm::start(port("b"), Layout::Packed);
    a.post(4);
    b.send(&frame(BROADCAST, mac(1), 60));
    a.recv();
    a.send(&frame(mac(1), mac(0), 99));
    // Nothing but b's kick can let it go on within the hold time of ten seconds.
    while switch.stats().holds.get() == 0 {
        std::thread::yield_now();
    }
    b.post(1);
    assert_eq!(b.recv().len(), 99);
    assert!(b.rx.stats().kicks.get() > 0, "the kick woke it, not the end of the hold");
    core.shutdown();
}

#[test]
fn queues_stop_and_start_again_where_they_were() {
    for layout in [Layout::Split, Layout::Packed] {
        let core = core();
        let switch = switch(&core);
        let port = |name: &str| {
            let config = NetPortConfig { bind: BindMode::Mac, ..NetPortConfig::new(name) };
            switch.add_port(config).unwrap()
        };
        let mut a = Vm::start(port("a"), layout);
        let mut b = Vm::start(port("b"), layout);
        a.post(8);
        b.post(8);
        b.send(&frame(BROADCAST, mac(1), 60));
        a.recv();
        for n in 0..6 {
            let there = frame(mac(1), mac(0), 100 + n);
            a.send(&there);
            assert_eq!(b.recv(), there);
            a.wait_sent();
            let vring = b.port.stop_queue(0).unwrap().unwrap();
            assert!(b.port.stop_queue(0).unwrap().is_none());
            // Unused buffers were given back: avail and used agree.
            let at = vring.queue.position();
            assert_eq!((at.avail, at.avail_wrap), (at.used, at.used_wrap));
            b.port.start_queue(vring).unwrap();
            a.port.update_memory(a.rx.memory()).unwrap();
            b.port.update_memory(b.rx.memory()).unwrap();
        }
        // A driver reload does not forget the first address; the session's end does.
        a.send(&frame(mac(1), mac(7), 60));
        a.wait_sent();
        assert_eq!(a.tx.stats().drops[0].get(), 1);
        a.port.reset();
        assert_eq!(a.port.addresses().unwrap().0, Some(mac(0)));
        a.port.connected(false);
        assert_eq!(a.port.addresses().unwrap(), (None, vec![]));
        assert!(a.port.stop_queue(1).unwrap().is_none());
        core.shutdown();
    }
}

/// A driver that negotiates other features makes its session reset the device: its binding stays.
#[test]
#[allow(non_snake_case)]
fn abuse_C3_a_binding_is_not_shed_by_other_features() {
    let core = core();
    let switch = switch(&core);
    let mut vm = Vm::start(switch.add_port(NetPortConfig::new("vm/a")).unwrap(), Layout::Split);
    let ip = [10, 0, 0, 1];
    let arp = |n: usize| {
        let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
        [&BROADCAST[..], &mac(n), &[8, 6], &head, &mac(n), &ip, &[0; 10]].concat()
    };
    vm.send(&arp(0));
    vm.wait_sent();
    let before = vm.port.addresses().unwrap();
    assert_eq!(before, (Some(mac(0)), vec![ip.into()]));
    vm.port.reset();
    let mut again = Vm::start(Arc::clone(&vm.port), Layout::Packed);
    again.send(&arp(7));
    again.wait_sent();
    assert_eq!(again.tx.stats().drops[DropReason::Spoofed as usize].get(), 1);
    assert_eq!(again.port.addresses().unwrap(), before);
    core.shutdown();
}

#[test]
fn a_removed_port_frees_its_place_and_addresses() {
    let core = core();
    let switch = switch(&core);
    let config = |name: &str| NetPortConfig {
        mac: Some(mac(3)),
        addresses: vec![[10, 0, 0, 3].into()],
        ..NetPortConfig::new(name)
    };
    let first = switch.add_port(config("first")).unwrap();
    let taken = switch.add_port(config("second")).unwrap_err();
    assert!(matches!(taken, NetError::BadMac { .. }), "{taken}");
    let other = NetPortConfig { mac: Some(mac(4)), ..config("second") };
    let taken = switch.add_port(other).unwrap_err();
    assert!(taken.to_string().contains("10.0.0.3 is bound to another port"), "{taken}");
    first.reset();
    first.connected(false);
    assert_eq!(first.addresses().unwrap(), (Some(mac(3)), vec![[10, 0, 0, 3].into()]));
    switch.remove_port(&first).unwrap();
    switch.remove_port(&first).unwrap();
    let second = switch.add_port(config("second")).unwrap();
    // The old handle does not reach the new port.
    assert!(first.set_link(false).unwrap_err().to_string().contains("removed"));
    assert!(first.activate(0).is_err());
    first.reset();
    assert_eq!(second.addresses().unwrap().0, Some(mac(3)));
    core.shutdown();
    assert!(second.set_link(false).is_err());
}

#[test]
fn wrong_settings_are_refused_with_their_limits() {
    let core = core();
    let switch = switch(&core);
    let base = || NetPortConfig::new("p");
    let refused = |config| switch.add_port(config).unwrap_err().to_string();
    assert!(refused(NetPortConfig::new("")).contains("1..=64"));
    assert!(refused(NetPortConfig { queue_pairs: 17, ..base() }).contains("1..=16"));
    assert!(refused(NetPortConfig { mtu: 67, ..base() }).contains("68..="));
    assert!(refused(NetPortConfig { mac: Some([1; 6]), ..base() }).contains("group"));
    let port = switch.add_port(base()).unwrap();
    assert!(port.set_mtu(67).is_err());
    port.set_mtu(9000).unwrap();
    let driver = ModelDriver::new(Layout::Split, 16);
    assert!(port.start_queue(driver.vring(3)).unwrap_err().to_string().contains("limit 2"));
    assert!(port.start_queue(driver.vring(2)).unwrap_err().to_string().contains("CTRL_VQ"));
    port.start_queue(driver.vring(0)).unwrap();
    assert!(port.start_queue(driver.vring(0)).unwrap_err().to_string().contains("already"));
    assert!(port.activate(1 << 10).unwrap_err().to_string().contains("0x400"));
    assert!(port.write_config(0, &[0]).unwrap_err().to_string().contains("config space"));
    let bad = SwitchConfig { max_macs: 0, ..SwitchConfig::new("x") };
    assert!(Switch::new(&core, bad, Arc::new(MonotonicClock)).is_err());
    core.shutdown();
}

#[test]
fn shared_addresses_are_bound_to_nobody() {
    let core = core();
    let switch = switch(&core);
    let shares = |name: &str| NetPortConfig {
        shared_macs: vec![mac(9)],
        shared_addresses: vec![[10, 0, 0, 100].into()],
        ..NetPortConfig::new(name)
    };
    let first = switch.add_port(shares("first")).unwrap();
    let _second = switch.add_port(shares("second")).unwrap();
    let bound = NetPortConfig { mac: Some(mac(9)), ..NetPortConfig::new("third") };
    let error = switch.add_port(bound).unwrap_err().to_string();
    assert!(error.contains("shared by others"), "{error}");
    let bound =
        NetPortConfig { addresses: vec![[10, 0, 0, 100].into()], ..NetPortConfig::new("third") };
    let error = switch.add_port(bound).unwrap_err().to_string();
    assert!(error.contains("10.0.0.100 is bound to another port, or shared"), "{error}");
    let group = NetPortConfig { shared_macs: vec![[1; 6]], ..NetPortConfig::new("third") };
    assert!(switch.add_port(group).unwrap_err().to_string().contains("group"));
    let owner = NetPortConfig { mac: Some(mac(3)), ..NetPortConfig::new("owner") };
    let _owner = switch.add_port(owner).unwrap();
    let late = NetPortConfig { shared_macs: vec![mac(3)], ..NetPortConfig::new("late") };
    assert!(switch.add_port(late).is_err());
    switch.remove_port(&first).unwrap();
    core.shutdown();
}

#[derive(Default)]
struct Notifier(AtomicUsize);

impl ConfigNotifier for Notifier {
    fn config_changed(&self) -> Result<(), vhost_user::ConfigNotifyError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn abuse_N5_a_guest_sees_its_carrier_go_and_come_where_its_vmm_lets_it() {
    let core = core();
    let switch = switch(&core);
    let config = NetPortConfig { mac: Some(mac(7)), queue_pairs: 2, ..NetPortConfig::new("p") };
    let port = switch.add_port(config).unwrap();
    assert_ne!(port.features() & f::MAC, 0);
    let space = || {
        let mut bytes = [0; 12];
        port.read_config(0, &mut bytes).unwrap();
        bytes
    };
    assert_eq!((&space()[..6], &space()[6..]), (&mac(7)[..], &[1, 0, 2, 0, 0xdc, 5][..]));
    port.set_mtu(9000).unwrap();
    assert_eq!(space()[10..], 9000u16.to_le_bytes());

    // Nobody is there, or the VMM has a config space of its own: the old ways.
    assert!(!port.set_link(false).unwrap());
    assert_eq!(space()[6..8], [0, 0]);
    assert!(!port.set_link(true).unwrap());

    let notifier = Arc::new(Notifier::default());
    port.set_notifier(Some(notifier.clone()));
    assert!(!port.set_link(true).unwrap(), "the driver does not read the link's state");
    port.activate(MODERN | f::STATUS).unwrap();
    assert!(port.set_link(false).unwrap());
    assert_eq!((space()[6], notifier.0.load(Ordering::SeqCst)), (0, 1));
    assert!(port.set_link(false).unwrap());
    assert_eq!(notifier.0.load(Ordering::SeqCst), 1, "told once");
    assert!(port.set_link(true).unwrap());
    assert_eq!((space()[6], notifier.0.load(Ordering::SeqCst)), (1, 2));
    core.shutdown();
}

#[test]
fn abuse_N2_a_control_queue_runs_where_a_front_end_gives_it() {
    let core = core();
    let switch = switch(&core);
    let port = switch.add_port(NetPortConfig::new("p")).unwrap();
    let rx_mode_off = |driver: &mut ModelDriver| {
        let request = driver.buffer(&[0, 0, 0]);
        let ack = driver.buffer(&[0xee]);
        driver.offer(&[request], &[ack]);
        driver.kick();
        while driver.used().is_none() {
            wait(driver);
        }
        driver.read(ack.0, 1)[0]
    };
    let notifier = Arc::new(Notifier::default());
    port.set_notifier(Some(notifier.clone()));
    let status = || {
        let mut status = [0];
        port.read_config(6, &mut status).unwrap();
        (status[0], notifier.0.load(Ordering::SeqCst))
    };
    port.activate(MODERN | f::CTRL_VQ | f::CTRL_RX | port.whole_device_features()).unwrap();
    let mut driver = ModelDriver::new(Layout::Split, 64);
    port.start_queue(driver.vring(2)).unwrap();
    let again = port.start_queue(driver.vring(2)).unwrap_err().to_string();
    assert!(again.contains("running already"), "{again}");
    assert_eq!(rx_mode_off(&mut driver), 0);
    port.update_memory(driver.memory()).unwrap();
    assert_eq!(rx_mode_off(&mut driver), 0);
    let stopped = port.stop_queue(2).unwrap().unwrap();
    assert_eq!((stopped.parts.index, stopped.queue.position().avail), (2, 2));
    assert!(port.stop_queue(2).unwrap().is_none());
    port.start_queue(stopped).unwrap();
    assert_eq!(rx_mode_off(&mut driver), 0);
    assert_eq!(status(), (1, 0), "the network knows where it is");
    let moved = port.stop_queue(2).unwrap().unwrap();
    port.reset();
    assert!(port.stop_queue(2).unwrap().is_none(), "a reset stops it too");
    // As a daemon that takes the session over sees it.
    port.activate(MODERN | f::CTRL_VQ | f::CTRL_RX | port.whole_device_features()).unwrap();
    port.start_queue(moved).unwrap();
    assert_eq!(status(), (3, 1), "the driver is to announce itself");
    port.reset();
    assert_eq!(status(), (1, 1));

    // Behind as many pairs as there can be, too.
    let most = NetPortConfig { queue_pairs: 16, ..NetPortConfig::new("most") };
    let most = switch.add_port(most).unwrap();
    assert_eq!((most.queue_count(), most.whole_device_features()), (33, f::WHOLE_DEVICE));
    most.activate(MODERN | f::CTRL_VQ | f::CTRL_RX | f::MQ).unwrap();
    most.start_queue(driver.vring(32)).unwrap();
    core.shutdown();
}

#[test]
fn features_follow_the_configuration() {
    let core = core();
    let switch = switch(&core);
    let features = |config| {
        let port = switch.add_port(config).unwrap();
        assert_eq!((port.kind(), port.has_config()), (DeviceKind::Net, true));
        assert!(!port.wants_inflight());
        (port.features(), port.queue_count(), port.stats().len())
    };
    let all = features(NetPortConfig { queue_pairs: 4, ..NetPortConfig::new("all") });
    assert_eq!(all.0, f::ALWAYS | f::OFFLOADS | f::RING_PACKED | f::IN_ORDER | f::MQ);
    assert_eq!((all.1, all.2), (9, 9));
    let bare = NetPortConfig {
        offloads: false,
        packed: false,
        in_order: false,
        ..NetPortConfig::new("bare")
    };
    assert_eq!(features(bare), (f::ALWAYS, 3, 3));
    core.shutdown();
}
