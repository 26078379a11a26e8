//! Sessions that go well: handshakes, rings up and down, config, status.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::AsFd;

use base::event::Event;
use queue::Layout;
use queue::testing::ModelDriver;
use std::sync::Arc;
use vhost_user::testing::*;

use vhost_user::codec::{self, Request, feature, protocol};
use vhost_user::{ConfigNotifyError, DeviceKind, Endpoint, NullStore};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn a_session_from_first_message_to_io_to_stop() {
    for (layout, bits) in [(Layout::Split, 0), (Layout::Packed, feature::RING_PACKED)] {
        let (device, server, front) = simple(DeviceKind::Net);
        let mut driver = ModelDriver::new(layout, 16);
        front.start(BASIC | bits, &driver);
        assert_eq!(device.running(), [0]);
        io(&device, &mut driver, 0, 40);
        assert!(driver.interrupted());

        let status = server.status();
        assert!(status.connected && status.queues[0].running && !status.queues[1].running);
        assert_eq!(status.packed, layout == Layout::Packed);
        assert_eq!(status.memory_regions.len(), 1);

        // 40 on a ring of 16: two laps and 8, for a packed ring on the third lap (wrap again 1).
        let base = front.get_base(0);
        let packed_base = 0x8008_8008;
        assert_eq!(base, if layout == Layout::Packed { packed_base } else { 40 });
        assert_eq!(device.running(), [] as [u16; 0]);
        assert!(!server.status().queues[0].running);

        // And on from there, as after a pause of the VM.
        front.set_ring(0, &driver, base);
        front.set_doorbells(0, &driver);
        assert_eq!(device.running(), [0]);
        io(&device, &mut driver, 0, 3);
        server.stop();
        assert!(front.try_reply().is_none(), "a stopped port hangs up");
        assert_eq!(device.running(), [] as [u16; 0]);
    }
}

#[test]
fn qemus_network_device_enables_before_it_negotiates() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    let protocols = protocols(&front);
    front.send(Request::SetProtocolFeatures, &protocols.to_ne_bytes(), &[]);
    front.ok(Request::SetOwner, &[], &[]);
    front.state(Request::SetVringEnable, 0, 1);
    front.ok(Request::SetFeatures, &BASIC.to_ne_bytes(), &[]);
    front.set_memory(&driver);
    front.set_ring(0, &driver, 0);
    front.set_doorbells(0, &driver);
    assert_eq!(device.running(), [0]);
    // The next queue pair repeats the features while this one runs.
    front.ok(Request::SetFeatures, &BASIC.to_ne_bytes(), &[]);
    assert_eq!(device.calls().iter().filter(|c| matches!(c, Call::Activate(_))).count(), 1);
}

#[test]
fn the_device_sees_its_own_features_only() {
    let (device, _server, front) = simple(DeviceKind::Net);
    front.hello(BASIC | feature::LOG_ALL);
    device.wait_for(&Call::Activate(VERSION_1 | feature::INDIRECT_DESC));
}

/// QEMU asks for everything before `SET_OWNER`, takes all of it, and means queue pairs; Cloud
/// Hypervisor and crosvm own first, libkrun takes little, and they mean rings.
#[test]
fn a_network_port_counts_queues_in_the_unit_of_its_front_end() {
    let asks_for = |kind, queues, owns_first: bool, wanted: u64| {
        let device = FakeDevice::new(kind, queues);
        let (_server, front) = connected(&device);
        if owns_first {
            front.send(Request::SetOwner, &[], &[]);
        }
        let protocols = protocols(&front) & wanted;
        front.send(Request::SetProtocolFeatures, &protocols.to_ne_bytes(), &[]);
        front.get_u64(Request::GetQueueNum)
    };
    let asks = |kind, queues, owns_first| asks_for(kind, queues, owns_first, u64::MAX);
    for (queues, pairs) in [(2, 1), (8, 4), (32, 16)] {
        // libkrun.
        let few = protocol::MQ | protocol::CONFIG;
        assert_eq!(asks_for(DeviceKind::Net, queues, false, few), u64::from(queues));
        // QEMU 2.5, the first that counts queues.
        let all = protocol::MQ | protocol::LOG_SHMFD | protocol::RARP;
        assert_eq!(asks_for(DeviceKind::Net, queues, false, all), pairs);
        assert_eq!(asks(DeviceKind::Net, queues, false), pairs);
        assert_eq!(asks(DeviceKind::Net, queues, true), u64::from(queues));
        assert_eq!(asks(DeviceKind::Block, queues, false), u64::from(queues));
    }
}

/// QEMU's network device has a config space of its own, and warns of ours at each start.
#[test]
fn config_space_of_a_network_port_is_for_front_ends_that_have_none() {
    let (device, _server, front) = simple(DeviceKind::Net);
    assert_eq!(front.get_u64(Request::GetProtocolFeatures) & protocol::CONFIG, 0);
    front.send(Request::SetOwner, &[], &[]);
    // It asks again for each further queue pair.
    assert_eq!(front.get_u64(Request::GetProtocolFeatures) & protocol::CONFIG, 0);
    drop((device, front));

    let (device, _server, front) = simple(DeviceKind::Net);
    front.send(Request::SetOwner, &[], &[]);
    let protocols = protocols(&front);
    assert_ne!(protocols & protocol::CONFIG, 0);
    front.send(Request::SetProtocolFeatures, &protocols.to_ne_bytes(), &[]);
    let (ours, _theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[ours.as_fd()]);
    device.wait_for(&Call::Notifier(true));
}

/// A VMM that keeps the control queue to itself would not pass on what a driver asks of it.
#[test]
fn abuse_N2_what_needs_a_control_queue_of_ours_is_offered_to_front_ends_that_leave_it_to_us() {
    let offers = |front: &FrontEnd| front.get_u64(Request::GetFeatures) & WHOLE_DEVICE != 0;
    let (_device, _server, front) = simple(DeviceKind::Net);
    assert!(!offers(&front));
    front.hello(BASIC);
    assert!(!offers(&front), "QEMU looks at the second answer");
    let (device, _server, front) = simple(DeviceKind::Net);
    front.send(Request::SetOwner, &[], &[]);
    assert!(offers(&front));
    front.send(Request::SetFeatures, &(BASIC | WHOLE_DEVICE).to_ne_bytes(), &[]);
    let own = feature::PROTOCOL_FEATURES;
    device.wait_for(&Call::Activate((BASIC | WHOLE_DEVICE) & !own));
}

/// Reset of libkrun's driver: it disables the rings, and starts with `SET_OWNER` again.
#[test]
fn a_front_end_may_own_again_while_no_queue_runs() {
    let (device, _server, front) = simple(DeviceKind::Block);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    assert_eq!(device.running(), [0]);
    front.state(Request::SetVringEnable, 0, 0);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.ok(Request::SetOwner, &[], &[]);
    front.set_memory(&driver);
    front.ok(Request::SetFeatures, &BASIC.to_ne_bytes(), &[]);
    front.set_ring(0, &driver, 0);
    front.set_doorbells(0, &driver);
    front.state(Request::SetVringEnable, 0, 1);
    assert_eq!(device.running(), [0]);
}

#[test]
fn abuse_N1_more_queue_pairs_than_the_port_has_are_one_clear_error() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    front.send(Request::SetVringCall, &2u64.to_ne_bytes(), &[memfd(0).as_fd()]);
    let wanted = "the front end has 2 queue pairs or more, this port has 1 (queue_pairs)";
    assert_ends(server, &front, wanted);
}

/// QEMU with `queues=2` hears of one pair, leaves, and comes again.
#[test]
fn abuse_N1_a_front_end_that_leaves_again_and_again_is_told_of_with_the_likely_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port");
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    let leaves = || {
        let front = FrontEnd::dial(&path);
        let protocols = protocols(&front);
        front.send(Request::SetProtocolFeatures, &protocols.to_ne_bytes(), &[]);
        assert_eq!(front.get_u64(Request::GetQueueNum), 1);
        front
    };
    for _ in 0..5 {
        leaves();
    }
    // While the sixth is connected, the status is that of the fifth.
    let _sixth = leaves();
    let error = server.status().last_error.unwrap();
    assert!(error.contains("5 sessions in a row"), "{error}");
    assert!(error.contains("the port has queue_pairs = 1"), "{error}");
    assert!(error.contains("QEMU: queues="), "{error}");
}

#[test]
fn abuse_N3_bits_that_a_vmm_adds_by_itself_are_ignored() {
    let (device, _server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let more = BASIC | feature::HARMLESS | feature::NET_MAC;
    front.ok(Request::SetFeatures, &more.to_ne_bytes(), &[]);
    assert_eq!(device.calls().iter().filter(|c| matches!(c, Call::Activate(_))).count(), 1);
}

#[test]
fn without_protocol_features_rings_start_enabled() {
    let (device, server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    let features = VERSION_1.to_ne_bytes();
    front.send(Request::SetOwner, &[], &[]);
    front.send(Request::SetFeatures, &features, &[]);
    front.send(Request::SetMemTable, &table(&[region(&driver)]), &[driver.fd().as_fd()]);
    let num = codec::VringState { index: 0, num: 16 };
    front.send(Request::SetVringNum, num.as_bytes(), &[]);
    front.send(Request::SetVringAddr, addr(0, &driver).as_bytes(), &[]);
    let word = 0u64.to_ne_bytes();
    front.send(Request::SetVringCall, &word, &[driver.call_event().as_fd()]);
    front.send(Request::SetVringKick, &word, &[driver.kick_event().as_fd()]);
    device.wait_for(&Call::Start(0));
    assert!(server.status().queues[0].enabled);
}

#[test]
fn a_ring_is_polled_when_its_kick_has_no_descriptor() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.hello(BASIC);
    front.set_memory(&driver);
    front.set_ring(1, &driver, 0);
    front.state(Request::SetVringEnable, 1, 1);
    let word = (1 | codec::VRING_NO_FD).to_ne_bytes();
    front.ok(Request::SetVringKick, &word, &[]);
    assert_eq!(device.running(), [1]);
    device.with_vring(1, |v| assert!(v.kick_fd().is_none() && v.parts.call.is_none()));
}

#[test]
fn disabling_stops_and_enabling_goes_on() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Packed, 8);
    front.start(BASIC | feature::RING_PACKED, &driver);
    io(&device, &mut driver, 0, 11);
    front.state(Request::SetVringEnable, 0, 0);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.state(Request::SetVringEnable, 0, 1);
    io(&device, &mut driver, 0, 11);
}

/// QEMU masks and unmasks interrupts by changing the call descriptor of a running ring.
#[test]
fn a_new_call_descriptor_on_a_running_ring_is_used_and_rung() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    io(&device, &mut driver, 0, 2);
    let call = Event::new().unwrap();
    front.ok(Request::SetVringCall, &0u64.to_ne_bytes(), &[call.as_fd()]);
    assert_eq!(device.running(), [0]);
    // A completion may have gone to the old descriptor while the VMM looked away.
    assert!(call.drain());
    io(&device, &mut driver, 0, 1);
    assert!(call.drain());
}

#[test]
fn config_space_is_read_and_written() {
    let (device, _server, front) = simple(DeviceKind::Vsock);
    front.hello(BASIC);
    let ask = |offset: u32, size: u32| {
        let header = codec::ConfigHeader { offset, size, flags: 0 };
        [header.as_bytes(), &vec![0u8; size as usize]].concat()
    };
    let reply = front.ask(Request::GetConfig, &ask(8, 4));
    assert_eq!(reply.body[12..], [8, 9, 10, 11]);
    // What the device refuses has no payload, and the session lives.
    assert!(front.ask(Request::GetConfig, &ask(58, 8)).body.is_empty());

    let write = |offset: u32| {
        let header = codec::ConfigHeader { offset, size: 1, flags: 0 };
        [header.as_bytes(), &[7]].concat()
    };
    front.ok(Request::SetConfig, &write(32), &[]);
    device.wait_for(&Call::WriteConfig(32, vec![7]));
    assert_eq!(front.ack(Request::SetConfig, &write(0), &[]), Some(1));
    assert_eq!(front.get_u64(Request::GetStatus), 0);
}

#[test]
fn config_changes_reach_the_vmm() {
    let (device, _server, front) = simple(DeviceKind::Vsock);
    front.hello(BASIC);
    let (ours, theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    let notifier = device.notifier().expect("no channel");
    assert_eq!(notifier.config_changed(), Ok(()));
    let channel = FrontEnd::on(ours);
    let message = channel.reply();
    assert_eq!((message.header.request, message.header.flags, message.header.size), (2, 1, 0));
    drop(front);
    device.wait_for(&Call::Connected(false));
    assert!(device.notifier().is_none());
}

/// A device that wants the VMM told hears that it was not: of a channel that nobody reads, and of
/// one that is gone.
#[test]
#[allow(non_snake_case)]
fn abuse_V15_B5_a_config_change_that_is_not_sent_is_an_error() {
    let (device, _server, front) = simple(DeviceKind::Block);
    front.hello(BASIC);
    let (ours, theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    drop(theirs);
    let notifier = device.notifier().expect("no channel");
    let full = (0..1 << 20).find_map(|_| notifier.config_changed().err());
    assert_eq!(full, Some(ConfigNotifyError::Full));
    drop(ours);
    let gone = notifier.config_changed().unwrap_err();
    assert_eq!(gone, ConfigNotifyError::Dead { errno: rustix::io::Errno::PIPE.raw_os_error() });
    assert!(gone.to_string().contains("Broken pipe"), "{gone}");
}

#[test]
fn a_network_port_takes_an_mtu_and_an_announcement() {
    let (device, _server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    front.ok(Request::NetSetMtu, &1500u64.to_ne_bytes(), &[]);
    device.wait_for(&Call::Mtu(1500));
    for bad in [9001u64, 1 << 20] {
        assert_eq!(front.ack(Request::NetSetMtu, &bad.to_ne_bytes(), &[]), Some(1), "{bad}");
    }
    front.ok(Request::SendRarp, &[1, 2, 3, 4, 5, 6, 0, 0], &[]);
    device.wait_for(&Call::Announce([1, 2, 3, 4, 5, 6]));
}

#[test]
fn what_is_offered_depends_on_the_device() {
    let offered = |kind| simple(kind).2.get_u64(Request::GetProtocolFeatures);
    let (net, block, vsock) =
        (offered(DeviceKind::Net), offered(DeviceKind::Block), offered(DeviceKind::Vsock));
    let has = |all: u64, bit: u64| all & bit != 0;
    assert!(has(net, protocol::MTU) && has(net, protocol::RARP) && !has(net, protocol::CONFIG));
    assert!(has(block, protocol::INFLIGHT_SHMFD) && !has(net, protocol::INFLIGHT_SHMFD));
    assert!(has(vsock, protocol::CONFIG) && !has(vsock, protocol::MTU));
    // Postcopy, in-band notifications, host notifiers, shared memory: never.
    for bit in [6, 7, 8, 11, 14, 17, 18, 19, 20] {
        assert!(!has(net | block | vsock, 1 << bit), "bit {bit}");
    }
}

#[test]
fn counts_and_status() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    assert_eq!(front.get_u64(Request::GetMaxMemSlots), 64);
    front.ok(Request::SetStatus, &15u64.to_ne_bytes(), &[]);
    assert_eq!(front.get_u64(Request::GetStatus), 15);
    assert_eq!(device.running(), [0]);
    // The driver's reset: everything stops, and starts only with new kicks.
    front.ok(Request::SetStatus, &0u64.to_ne_bytes(), &[]);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.set_doorbells(0, &driver);
    assert_eq!(device.running(), [0]);
}

#[test]
fn reset_device_forgets_everything_but_the_session() {
    let (device, server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    front.ok(Request::ResetDevice, &[], &[]);
    assert!(device.calls().contains(&Call::Reset));
    assert_eq!(server.status().features, None);
    front.ok(Request::SetFeatures, &BASIC.to_ne_bytes(), &[]);
    front.start_ring(0, &driver, 0);
    assert_eq!(device.running(), [0]);
}

#[test]
fn reset_owner_disables_all_rings() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    front.ok(Request::ResetOwner, &[], &[]);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.ok(Request::SetOwner, &[], &[]);
}

#[test]
fn an_inflight_region_goes_to_the_front_end_and_comes_back() {
    let device = FakeDevice::new(DeviceKind::Block, 2);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    let (server, front) = connected(&device);
    front.hello(BASIC);
    let ask =
        codec::Inflight { mmap_size: 0, mmap_offset: 0, num_queues: 2, queue_size: 16, padding: 0 };
    // QEMU and DPDK send the C structure with its padding, others without.
    let short = front.ask(Request::GetInflightFd, &ask.as_bytes()[..20]);
    assert_eq!((short.body.len(), short.fds.len()), (20, 1));
    let reply = front.ask(Request::GetInflightFd, ask.as_bytes());
    let region = codec::Inflight::read_from_bytes(&reply.body).unwrap();
    assert!(region.mmap_size > 0 && reply.fds.len() == 1);
    front.ok(Request::SetInflightFd, region.as_bytes(), &[reply.fds[0].as_fd()]);
    front.set_memory(&driver);
    front.start_ring(0, &driver, 0);

    // Two requests are taken, one is completed (the second), then the back end dies.
    let ids: Vec<u16> = (0..2).map(|_| driver.offer(&[(driver.alloc(8), 8)], &[])).collect();
    assert_eq!(device.take(0, 2), ids);
    let done = queue::Completion { id: ids[1], ndesc: 1, written: 0 };
    device.with_vring(0, |v| v.push(&[done]));
    assert_eq!(driver.used(), Some((ids[1], 0)));
    device.vanish();
    drop(server);

    let (_server, front) = connected(&device);
    front.hello(BASIC);
    front.ok(Request::SetInflightFd, region.as_bytes(), &[reply.fds[0].as_fd()]);
    front.set_memory(&driver);
    // QEMU gives the used index after a disconnect.
    front.start_ring(0, &driver, 1);
    assert_eq!(device.take(0, 8), [ids[0]], "exactly the unfinished one comes again");
}

/// Size of each queue by crosvm's default, for every device.
#[test]
fn abuse_N4_a_ring_of_32768_descriptors_is_served() {
    for (layout, bits) in [(Layout::Split, 0), (Layout::Packed, feature::RING_PACKED)] {
        let (device, server, front) = simple(DeviceKind::Net);
        let ram = queue::testing::GuestRam::new(4 << 20);
        let mut driver = ModelDriver::in_ram(ram, layout, 32_768, Default::default());
        front.start(BASIC | bits, &driver);
        assert_eq!((device.running(), server.status().queues[0].size), (vec![0], 32_768));
        io(&device, &mut driver, 0, 40);
    }
}

/// Cloud Hypervisor names the available index in `SET_VRING_BASE`, also of a ring whose requests
/// nobody took: before the first start, and after a move from another host.
#[test]
fn a_disk_with_an_inflight_region_is_offered_what_nobody_took() {
    for layout in [Layout::Split, Layout::Packed] {
        let (device, _server, front) = simple(DeviceKind::Block);
        let mut driver = ModelDriver::new(layout, 16);
        let ids: Vec<_> = (0..3).map(|_| driver.offer(&[(driver.alloc(8), 8)], &[])).collect();
        front.hello(if layout == Layout::Packed { BASIC | feature::RING_PACKED } else { BASIC });
        front.set_memory(&driver);
        let ask = codec::Inflight {
            mmap_size: 0,
            mmap_offset: 0,
            num_queues: 1,
            queue_size: 16,
            padding: 0,
        };
        let reply = front.ask(Request::GetInflightFd, ask.as_bytes());
        front.ok(Request::SetInflightFd, &reply.body, &[reply.fds[0].as_fd()]);
        // A packed ring's base has both sides; used stands at the beginning.
        let base = if layout == Layout::Packed { 0x8000_8003 } else { 3 };
        front.start_ring(0, &driver, base);
        assert_eq!(device.take(0, 8), ids, "{layout:?}");
    }
}

/// Dragonball sends no `SET_VRING_BASE` when it comes back.
#[test]
fn a_ring_without_a_base_goes_on_at_its_used_index() {
    for kind in [DeviceKind::Net, DeviceKind::Block] {
        let mut driver = ModelDriver::new(Layout::Split, 16);
        let (device, _server, front) = simple(kind);
        front.start(BASIC, &driver);
        io(&device, &mut driver, 0, 20);
        drop(front);
        device.wait_for(&Call::Connected(false));

        let (device, _server, front) = simple(kind);
        front.hello(BASIC);
        front.set_memory(&driver);
        let id = driver.offer(&[(driver.alloc(8), 8)], &[]);
        front.state(Request::SetVringNum, 0, 16);
        front.ok(Request::SetVringAddr, addr(0, &driver).as_bytes(), &[]);
        front.set_doorbells(0, &driver);
        front.state(Request::SetVringEnable, 0, 1);
        assert_eq!(device.take(0, 8), [id], "{kind:?}");
    }
}
