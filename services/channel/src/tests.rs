//! Members together: real mailboxes, doorbells and threads; monitors and modules are played.

#![allow(non_snake_case)]

use guest_abi::channel::{GUEST_OFF, guest_state, link_state, member_state};
use serde_json::json;

use crate::testing::fake_guest::FakeGuest;
use crate::testing::fake_qemu::FakeQemu;
use crate::testing::{World, config};
use crate::{Ceiling, ChannelError, Flow, MemberConfig};

const A: usize = 0;
const B: usize = 1;

/// Two members whose modules have made a link.
fn linked(world: &World) -> [(FakeQemu, FakeGuest); 2] {
    let (qemu_a, mut a) = world.vm("a", 4);
    let (qemu_b, mut b) = world.vm("b", 4);
    a.listen();
    a.announce(11, 4096);
    b.announce(22, 8192);
    for guest in [&a, &b] {
        guest.wait_for("both active", |guest| {
            [A, B].iter().all(|index| guest.state(*index) == member_state::ACTIVE)
        });
    }
    a.link(B, link_state::UP, 3);
    b.link(A, link_state::UP, 0);
    [(qemu_a, a), (qemu_b, b)]
}

#[test]
fn members_get_doorbells_memory_and_tables() {
    let world = World::new(|_| ());
    let [(qemu_a, a), (qemu_b, b)] = linked(&world);
    assert_eq!((a.id, b.id), (1, 2));
    assert!(a.bells.values().chain(b.bells.values()).all(|bells| bells.len() == 5));
    assert_eq!(a.bells.keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    for (qemu, peer) in [(&qemu_a, B), (&qemu_b, A)] {
        let peer = qemu.memory_of(peer).unwrap();
        let books = qemu.books();
        let devices: Vec<_> =
            books.devices.iter().map(|(id, (_, bus))| (id.as_str(), bus.as_str())).collect();
        assert_eq!(devices, [("millrace-bell", "millrace0"), (&peer, "millrace1")]);
        assert_eq!(books.objects[&peer].1, 2 << 20);
    }
    let host = a.mailbox.host();
    assert_eq!((host.member_id.get(), host.host_id.get(), host.vectors.get()), (1, 0, 5));
    assert_eq!((host.window_len.get(), host.regions[0].len.get()), (2 << 20, 3 << 20));
    assert_eq!((host.heartbeat_ms.get(), host.dead_after_ms.get()), (500, 2000));
    let peer = a.mailbox.member(B);
    assert_eq!((peer.id.get(), peer.slot.get()), (2, 11));
    assert_eq!((peer.generation.get(), peer.dir_off.get()), (22, 8192));
    assert_eq!((&peer.name[..2], peer.macs[0][0]), (&b"b\0"[..], 2));
    let own = a.mailbox.member(A);
    assert_eq!((own.state.get(), own.slot.get()), (member_state::ACTIVE, 0));

    // They ring each other directly.
    a.bells[&2][4].ring().unwrap();
    assert!(b.bells[&2][4].drain());

    let info = world.info("a");
    assert_eq!((info.state, info.generation, info.zombies), ("active", Some(11), 0));
    assert_eq!(info.links.len(), 1);
    let link = &info.links[0];
    assert_eq!((link.vm.as_str(), link.memory, link.slot), ("b", "plugged", Some(11)));
    assert_eq!((link.link.state.name(), link.link.borrowed), ("up", 3));
}

#[test]
fn a_new_generation_and_new_addresses_are_published() {
    let world = World::new(|_| ());
    let [(_qemu_a, a), (_qemu_b, mut b)] = linked(&world);
    b.announce(23, 12288);
    a.wait_for("generation", |a| a.mailbox.member(B).generation.get() == 23);
    assert_eq!(a.mailbox.member(B).dir_off.get(), 12288);
    world.channels.set_addresses("b", &[], &["fd00::2".parse().unwrap()]).unwrap();
    a.wait_for("addresses", |a| a.mailbox.member(B).addresses[0][15] == 2);
    assert_eq!(a.mailbox.member(B).macs_len.get(), 0);
    // The module goes, and its place is free for another one.
    b.says.state = guest_state::LEFT.into();
    b.call();
    a.wait_for("no module", |a| a.state(B) == member_state::JOINED);
    let many = vec!["10.0.0.1".parse().unwrap(); 17];
    let error = world.channels.set_addresses("b", &[], &many).unwrap_err().to_string();
    assert!(error.contains("IP addresses is 17; at most 16"), "{error}");
}

#[test]
fn a_leaver_goes_when_nothing_of_it_is_in_use() {
    let world = World::new(|_| ());
    let [(qemu_a, mut a), (qemu_b, mut b)] = linked(&world);
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| world.channels.leave("b"));
        for guest in [&a, &b] {
            guest.wait_for("leaving", |guest| guest.state(B) == member_state::LEAVING);
        }
        // The one that holds nothing lets go first.
        b.link(A, link_state::CLOSED, 0);
        qemu_b.wait_for("peer's memory", |books| books.objects.is_empty());
        // Closed with pages in use is not closed.
        a.link(B, link_state::CLOSED, 3);
        a.link(B, link_state::DRAINING, 3);
        assert_eq!(world.info("b").state, "leaving");
        assert_eq!(world.info("a").zombies, 1);
        assert!(qemu_a.memory_of(B).is_some());
        assert!(qemu_b.books().devices.contains_key("millrace-bell"));
        a.link(B, link_state::CLOSED, 0);
        leaving.join().unwrap().unwrap();
    });
    assert_eq!(qemu_a.books().devices.keys().collect::<Vec<_>>(), ["millrace-bell"]);
    assert!(qemu_a.books().objects.is_empty());
    assert!(qemu_b.books().devices.is_empty() && qemu_b.books().chardevs.is_empty());
    a.wait_for("no entry", |a| a.state(B) == member_state::NONE);
    // Its bells are kept for whoever comes next; nobody is told again.
    a.listen();
    assert!(a.bells[&2].len() == 5);
    // Nothing else may get the numbers of its descriptors.
    assert_eq!(qemu_b.books().named_fds.len(), 15);
    let error = world.channels.leave("b").unwrap_err();
    assert!(matches!(error, ChannelError::NotMember { .. }), "{error}");
}

#[test]
fn members_without_a_module_leave_at_once() {
    let world = World::new(|_| ());
    let (qemu_a, _a) = world.vm("a", 2);
    let (qemu_b, _b) = world.vm("b", 2);
    qemu_a.books().has_kvm = true;
    world.channels.leave("a").unwrap();
    assert!(qemu_a.books().named_fds.is_empty());
    world.channels.leave("b").unwrap();
    for qemu in [qemu_a, qemu_b] {
        let books = qemu.books();
        assert!(books.devices.is_empty() && books.objects.is_empty() && books.chardevs.is_empty());
    }
    assert!(world.channels.list().is_empty());
    let kept = std::fs::read_to_string(world.folder.path().join("channels.json")).unwrap();
    assert!(kept.contains("\"memberships\": []"), "{kept}");
}

#[test]
fn who_keeps_a_leaver_is_named_and_it_leaves_later() {
    let world = World::new(|config| config.drain_timeout_ms = 1);
    let [(qemu_a, mut a), (qemu_b, mut b)] = linked(&world);
    assert_eq!(world.info("a").links[0].link.borrowed, 3);
    let error = world.channels.leave("b").unwrap_err().to_string();
    assert!(error.contains("VM b: leaving took more than 1 ms"), "{error}");
    assert!(error.contains("a has 3 pages of b in use"), "{error}");
    assert!(error.contains("link up, memory plugged"), "{error}");
    // It is still leaving, and others are not kept.
    let error = world.channels.leave("b").unwrap_err();
    assert!(matches!(error, ChannelError::DrainTimeout { .. }), "{error}");
    let (_qemu_c, c) = world.vm("c", 3);
    assert_eq!(c.state(B), member_state::LEAVING);
    assert_eq!(c.mailbox.member(B).slot.get(), 0);
    a.link(B, link_state::CLOSED, 0);
    b.link(A, link_state::CLOSED, 0);
    qemu_b.wait_for("its doorbell to go", |books| books.chardevs.is_empty());
    qemu_a.wait_for("its memory to go", |books| !books.has_memory_of(B));
}

/// A peer that is stopped (SIGSTOP) says nothing more, and has three pages of the leaver.
#[test]
fn abuse_V10_a_frozen_peer_does_not_keep_a_member_from_leaving() {
    let world = World::new(|config| (config.heartbeat_ms, config.dead_after_ms) = (10, 20));
    let [(qemu_a, a), (qemu_b, mut b)] = linked(&world);
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| world.channels.leave("b"));
        b.link(A, link_state::CLOSED, 0);
        leaving.join().unwrap().unwrap();
    });
    // By the host's word: in the leaver's table it was not who it had been.
    assert_eq!(world.info("a").state, "broken");
    let why = world.info("a").why_broken.unwrap();
    assert!(why.contains("its module was silent for 300 ms while another left"), "{why}");
    assert_eq!(b.mailbox.member(A).generation.get(), 0);
    assert!(!qemu_a.books().has_memory_of(B) && qemu_b.books().devices.is_empty());
    // When it goes on, its own table tells it to leave.
    assert_eq!(a.state(A), member_state::LEAVING);
}

#[test]
fn a_member_that_nobody_waits_for_may_be_silent() {
    let world = World::new(|config| (config.heartbeat_ms, config.dead_after_ms) = (10, 20));
    let [(_qemu_a, a), (_qemu_b, _b)] = linked(&world);
    while !world.info("a").is_silent {
        std::thread::yield_now();
    }
    assert_eq!((world.info("a").state, a.state(A)), ("active", member_state::ACTIVE));
}

#[test]
fn abuse_X_a_dead_member_is_a_zombie_until_its_peer_lets_go() {
    let world = World::new(|_| ());
    let [(qemu_a, mut a), (qemu_b, b)] = linked(&world);
    drop(b);
    qemu_b.kill();
    a.wait_for("dead", |a| a.state(B) == member_state::DEAD);
    let entry = a.mailbox.member(B);
    assert_eq!((entry.generation.get(), entry.slot.get()), (22, 11));
    assert_eq!(world.info("b").state, "dead");
    assert_eq!(world.info("a").zombies, 1);

    // Started anew, it is another member beside its own zombie.
    let (_qemu_b, b) = world.vm("b", 4);
    assert_eq!(b.id, 3);
    assert_eq!(b.state(B), member_state::DEAD);
    assert_eq!(world.channels.list().iter().filter(|info| info.vm == "b").count(), 2);
    a.wait_for("the new one's memory", |a| a.mailbox.member(2).slot.get() == 12);

    a.link(B, link_state::CLOSED, 0);
    qemu_a.wait_for("the zombie to go", |books| !books.has_memory_of(B));
    a.wait_for("no entry", |a| a.state(B) == member_state::NONE);
    assert_eq!(world.info("a").zombies, 0);
}

#[test]
fn abuse_I_nonsense_costs_a_member_its_links_and_nobody_else() {
    let world = World::new(|_| ());
    let [(qemu_a, mut a), (qemu_b, mut b)] = linked(&world);
    b.announce(24, 1);
    a.wait_for("leaving", |a| a.state(B) == member_state::LEAVING);
    let info = world.info("b");
    assert_eq!(info.state, "broken");
    assert!(info.why_broken.unwrap().contains("directory is at 0x1"));
    qemu_b.wait_for("its peer's memory to go", |books| books.objects.is_empty());
    a.link(B, link_state::CLOSED, 0);
    a.wait_for("its memory to go", |a| a.mailbox.member(B).slot.get() == 0);
    assert!(qemu_a.books().objects.is_empty());
    let error = world.channels.exclude("b", &[]).unwrap_err();
    assert!(matches!(error, ChannelError::Broken { .. }), "{error}");

    // Its guest starts anew, and so does it.
    qemu_b.event(&json!({"event": "RESET", "data": {"guest": true}}));
    a.wait_for("back", |a| a.mailbox.member(B).slot.get() != 0);
    assert_eq!(b.mailbox.word(GUEST_OFF), 0);
    world.channels.leave("b").unwrap();
}

#[test]
fn a_reset_guest_has_said_nothing_and_uses_nothing() {
    let world = World::new(|_| ());
    let [(_qemu_a, a), (qemu_b, b)] = linked(&world);
    qemu_b.event(&json!({"event": "RESET", "data": {"guest": true}}));
    a.wait_for("no module", |a| a.state(B) == member_state::JOINED);
    assert_eq!(a.mailbox.member(B).generation.get(), 0);
    assert_eq!(b.mailbox.word(GUEST_OFF), 0);
    assert_eq!(world.info("b").generation, None);
}

#[test]
fn flows_are_off_the_channel_when_the_member_says_so() {
    let world = World::new(|config| config.exclude_timeout_ms = 60_000);
    let (_qemu, mut a) = world.vm("a", 1);
    let flow =
        Flow { local: "10.0.0.1:80".parse().unwrap(), remote: "10.0.0.2:4000".parse().unwrap() };
    // Without a module nothing is on the channel.
    world.channels.exclude("a", &[flow]).unwrap();
    a.announce(1, 0);
    a.wait_for("active", |a| a.state(A) == member_state::ACTIVE);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| world.channels.exclude("a", &[flow, flow]));
        a.wait_for("flows", |a| a.mailbox.host().excludes_seq.get() == 2);
        assert_eq!(a.mailbox.host().excludes_len.get(), 2);
        a.says.excludes_seq = 2.into();
        a.call();
        asked.join().unwrap().unwrap();
    });
    let error = world.channels.exclude("a", &[flow; 129]).unwrap_err().to_string();
    assert!(error.contains("flows to exclude is 129; at most 128"), "{error}");
}

#[test]
fn a_member_may_have_flows_off_the_channel_from_the_beginning() {
    let world = World::new(|_| ());
    let qemu = FakeQemu::new(4);
    let flow =
        Flow { local: "10.0.0.1:80".parse().unwrap(), remote: "10.0.0.2:4000".parse().unwrap() };
    world.channels.join(MemberConfig { excludes: vec![flow], ..config("a", &qemu) }).unwrap();
    let a = FakeGuest::of(&qemu);
    let numbers = |a: &FakeGuest| {
        let host = a.mailbox.host();
        (host.excludes_len.get(), host.excludes_seq.get())
    };
    // Another number than that of no list.
    assert_eq!(numbers(&a), (1, 1));
    world.channels.exclude("a", &[]).unwrap();
    assert_eq!(numbers(&a), (0, 2));
    let many = MemberConfig { excludes: vec![flow; 129], ..config("b", &qemu) };
    let error = world.channels.join(many).unwrap_err().to_string();
    assert!(error.contains("flows to exclude is 129; at most 128"), "{error}");
}

#[test]
fn a_member_that_does_not_answer_is_named() {
    let world = World::new(|config| config.exclude_timeout_ms = 1);
    let (_qemu, mut a) = world.vm("a", 1);
    a.announce(1, 0);
    a.wait_for("active", |a| a.state(A) == member_state::ACTIVE);
    let error = world.channels.exclude("a", &[]).unwrap_err().to_string();
    assert_eq!(error, "channels of VM a: it did not answer to exclude 1 within 1 ms");
}

#[test]
fn abuse_X_the_next_daemon_unplugs_what_is_left() {
    let world = World::new(|_| ());
    let [(qemu_a, a), (qemu_b, _b)] = linked(&world);
    let world = world.restart();
    a.wait_for("farewell", |a| a.state(A) == member_state::LEAVING);
    assert!(world.channels.list().is_empty());
    assert_eq!(qemu_a.books().devices.len(), 2);
    qemu_a.books().log.clear();
    world.channels.join(config("a", &qemu_a)).unwrap();
    let books = qemu_a.books();
    assert_eq!(books.devices.keys().collect::<Vec<_>>(), ["millrace-bell"]);
    assert!(books.objects.is_empty() && books.log.contains(&"device_del".to_owned()));
    drop(books);
    world.channels.join(config("b", &qemu_b)).unwrap();
    assert_eq!(qemu_b.books().devices.len(), 2);
}

#[test]
fn what_an_earlier_daemon_left_and_does_not_go_is_named() {
    let world = World::new(|_| ());
    let [(qemu_a, _a), _others] = linked(&world);
    let World { channels, folder } = world;
    channels.stop();
    let memory = qemu_a.memory_of(B).unwrap();
    qemu_a.books().stubborn.insert(memory);
    let mut short = crate::ChannelsConfig::new(folder.path());
    short.drain_timeout_ms = 1;
    let world = World { channels: crate::Channels::start(short).unwrap(), folder };
    let error = world.channels.join(config("a", &qemu_a)).unwrap_err().to_string();
    assert!(
        error.contains("not unplugged after 1 ms: ") && error.contains("millrace-peer1"),
        "{error}"
    );
    assert!(world.channels.list().is_empty());
    let kept = std::fs::read_to_string(world.folder.path().join("channels.json")).unwrap();
    assert!(kept.contains("millrace-peer1"), "{kept}");
}

#[test]
fn a_guest_that_does_not_let_go_keeps_only_itself() {
    let world = World::new(|config| {
        (config.drain_timeout_ms, config.heartbeat_ms) = (1, 10);
    });
    let (qemu_a, a) = world.vm("a", 4);
    let (_qemu_b, _b) = world.vm("b", 4);
    let memory = qemu_a.memory_of(B).unwrap();
    qemu_a.books().stubborn.insert(memory.clone());
    let error = world.channels.leave("b").unwrap_err().to_string();
    assert!(error.contains("a has 0 pages of b in use"), "{error}");
    assert!(error.contains("memory unplugging"), "{error}");
    // Its worker has other things to do meanwhile, and hearts beat.
    let (_qemu_c, c) = world.vm("c", 4);
    assert_ne!(c.mailbox.member(A).slot.get(), 0);
    a.wait_for("new peer", |a| a.mailbox.member(2).slot.get() == 12);
    let beat = a.mailbox.host().heartbeat.get();
    while a.mailbox.host().heartbeat.get() < beat + 2 {
        std::thread::yield_now();
    }
    qemu_a.let_go(&memory);
    a.wait_for("no entry", |a| a.state(B) == member_state::NONE);
}

#[test]
fn without_root_ports_there_is_no_doorbell_and_no_memory() {
    let world = World::new(|_| ());
    let none = FakeQemu::new(0);
    let error = world.channels.join(config("x", &none)).unwrap_err().to_string();
    let text = "VM x: none of 0 root ports whose id begins with \"millrace\" is free";
    assert!(error.contains(text), "{error}");
    assert!(world.channels.list().is_empty());

    let (qemu_a, mut a) = world.vm("a", 2);
    let (_qemu_b, _b) = world.vm("b", 4);
    let (_qemu_c, c) = world.vm("c", 4);
    let link = world.info("a").links.into_iter().find(|link| link.vm == "c").unwrap();
    assert_eq!(link.memory, "failed");
    assert!(link.why_failed.unwrap().contains("none of 2 root ports"));
    assert_ne!(c.mailbox.member(usize::from(a.id) - 1).slot.get(), 0);
    // A port becomes free.
    world.channels.leave("b").unwrap();
    let slot = |a: &FakeGuest| a.mailbox.member(usize::from(c.id) - 1).slot.get();
    a.wait_for("the other's memory", |a| slot(a) == 11);
    a.listen();
    assert_eq!(qemu_a.books().devices.len(), 2);
}

#[test]
fn refusals_and_strange_requests_are_named_and_leave_nothing() {
    let world = World::new(|_| ());
    let qemu = FakeQemu::new(2);
    qemu.books().refused.insert("device_add".into(), "no such driver".into());
    let error = world.channels.join(config("a", &qemu)).unwrap_err().to_string();
    assert_eq!(error, "channels of VM a: monitor: device_add: GenericError: no such driver");
    assert!(qemu.books().chardevs.is_empty());
    qemu.books().refused.clear();
    world.channels.join(config("a", &qemu)).unwrap();
    let error = world.channels.join(config("a", &qemu)).unwrap_err().to_string();
    assert!(error.contains("member already, of trust domain t"), "{error}");
    let mut long = config("b", &qemu);
    long.domain = "x".repeat(64);
    let error = world.channels.join(long).unwrap_err().to_string();
    assert!(error.contains("VM b: the length of its domain's name is 64; 1 to 63"), "{error}");
    let mut far = config("b", &qemu);
    far.qmp = "/nonexistent/qmp".into();
    let error = world.channels.join(far).unwrap_err().to_string();
    assert!(error.contains("monitor /nonexistent/qmp: connecting"), "{error}");
    for error in [world.channels.leave("b"), world.channels.exclude("b", &[])] {
        assert!(matches!(error, Err(ChannelError::NotMember { .. })));
    }
}

#[test]
fn abuse_I_domains_do_not_know_each_other() {
    let world = World::new(|_| ());
    let (_qemu_a, a) = world.vm("a", 2);
    let qemu = FakeQemu::new(2);
    let mut other = config("b", &qemu);
    other.domain = "u".into();
    world.channels.join(other).unwrap();
    let b = FakeGuest::of(&qemu);
    assert_eq!((a.id, b.id), (1, 1));
    assert_eq!(b.bells.keys().copied().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(qemu.books().devices.len(), 1);
    assert_eq!(b.mailbox.host().domain[..2], *b"u\0");
}

#[test]
fn ejected_by_the_guest_is_not_plugged_again_and_again() {
    let world = World::new(|_| ());
    let [(qemu_a, a), _others] = linked(&world);
    qemu_a.let_go(&qemu_a.memory_of(B).unwrap());
    a.wait_for("no slot", |a| a.mailbox.member(B).slot.get() == 0);
    let link = &world.info("a").links[0];
    assert!(link.why_failed.as_ref().unwrap().contains("ejected"));
    assert!(qemu_a.books().objects.is_empty());
    qemu_a.let_go("millrace-bell");
    qemu_a.wait_for("its connection to go", |books| books.chardevs.is_empty());
}

const CEILING: Ceiling = Ceiling { bytes_per_s: 1 << 20, ops_per_s: 1000, burst_ms: 100 };

#[test]
fn a_member_reads_its_own_ceiling_in_its_mailbox() {
    let world = World::new(|_| ());
    let qemu = FakeQemu::new(4);
    world.channels.join(MemberConfig { ceiling: CEILING, ..config("a", &qemu) }).unwrap();
    let a = FakeGuest::of(&qemu);
    let (_qemu_b, b) = world.vm("b", 4);
    let of = |guest: &FakeGuest| {
        let host = guest.mailbox.host();
        let (bytes_per_s, ops_per_s) = (host.ceiling_bytes_per_s.get(), host.ceiling_ops_per_s);
        let burst_ms = host.ceiling_burst_ms.get();
        Ceiling { bytes_per_s, ops_per_s: ops_per_s.get(), burst_ms }
    };
    assert_eq!((of(&a), of(&b)), (CEILING, Ceiling::default()));
    let other = Ceiling { bytes_per_s: 0, ops_per_s: 7, burst_ms: 1 };
    world.channels.set_ceiling("a", other).unwrap();
    a.wait_for("the other ceiling", |a| of(a) == other);
    assert_eq!(of(&b), Ceiling::default());
    let error = world.channels.set_ceiling("c", other).unwrap_err();
    assert!(matches!(error, ChannelError::NotMember { .. }), "{error}");
}

#[test]
fn abuse_V20_a_member_over_its_ceiling_loses_its_channel_and_nobody_else() {
    let world = World::new(|_| ());
    let qemu_a = FakeQemu::new(4);
    world.channels.join(MemberConfig { ceiling: CEILING, ..config("a", &qemu_a) }).unwrap();
    let mut a = FakeGuest::of(&qemu_a);
    let [(_qemu_b, mut b), (_qemu_c, mut c)] = ["b", "c"].map(|vm| world.vm(vm, 4));
    let guests = [&mut a, &mut b, &mut c];
    for (index, guest) in guests.into_iter().enumerate() {
        guest.announce(11 + index as u64, 4096);
        (0..3).filter(|peer| *peer != index).for_each(|peer| guest.link(peer, link_state::UP, 0));
    }
    b.wait_for("all active", |b| (0..3).all(|peer| b.state(peer) == member_state::ACTIVE));
    // Its own counters are not asked, neither for it nor against it, and c has no ceiling.
    a.says.links[B].sent_bytes = (1 << 40).into();
    a.says.links[2].received_bytes = (1 << 40).into();
    a.call();
    b.says.links[A].received_bytes = (8 << 20).into();
    b.call();
    assert_eq!(world.info("a").state, "active");
    b.says.links[A].received = 5000.into();
    b.says.links[A].received_bytes = (1 << 30).into();
    b.call();
    for peer in [&b, &c] {
        peer.wait_for("leaving", |peer| peer.state(A) == member_state::LEAVING);
        assert_eq!(peer.state(2), member_state::ACTIVE);
    }
    a.wait_for("told to leave", |a| a.state(A) == member_state::LEAVING);
    let info = world.info("a");
    assert_eq!((info.state, info.is_over_ceiling), ("broken", true));
    let why = info.why_broken.unwrap();
    let begins = format!("its peers received {} bytes of it in ", 1 << 30);
    assert!(why.starts_with(&begins) && why.ends_with("; its ceiling is 1048576"), "{why}");

    // Its next guest may be honest.
    qemu_a.event(&json!({"event": "RESET", "data": {"guest": true}}));
    b.wait_for("back", |b| b.state(A) == member_state::JOINED);
    assert!(!world.info("a").is_over_ceiling);
}
