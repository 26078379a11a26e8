//! Messages of a hostile front end: every message with wrong sizes, descriptors, order.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::DeviceKind;
use vhost_user::codec::{self, Request, Sizes, feature};
use vhost_user::testing::*;
use zerocopy::IntoBytes;

#[test]
fn abuse_P1_wrong_sizes_of_every_message() {
    for &request in Request::ALL {
        let legal = |n: u32| match request.shape().sizes {
            Sizes::Exact(a) => n == a,
            Sizes::Either(a, b) => n == a || n == b,
            Sizes::Range(min, max) => (min..=max).contains(&n),
        };
        for size in [0u32, 1, 7, 9, 19, 41, 4096, 4097, 0x7fff_ffff, u32::MAX] {
            if legal(size) {
                continue;
            }
            let (_device, server, front) = simple(kind_for(request));
            front.hello(BASIC);
            let header = codec::Header::request(request as u32, size, false);
            let body = vec![0u8; size.min(4096) as usize];
            let _ = front.send_raw(&[header.as_bytes(), &body].concat(), &[]);
            assert_ends(server, &front, request.name());
        }
    }
}

/// A byte out of band is a byte: left where it is it would wake the session without an end.
#[test]
fn abuse_V6_a_byte_out_of_band_is_a_part_of_a_message() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let flags = rustix::net::SendFlags::OOB;
    assert_eq!(rustix::net::send(&front.socket, b"x", flags), Ok(1));
    let header = codec::Header::request(Request::GetFeatures as u32, 0, false);
    let _ = front.send_raw(header.as_bytes(), &[]);
    assert_ends(server, &front, "header flags");
}

/// Descriptors that lie in a socket are closed with it, and their close may hang then.
#[test]
fn abuse_V4_nothing_can_be_put_into_a_back_end_channel() {
    let (device, _server, front) = simple(DeviceKind::Block);
    front.hello(BASIC);
    let (ours, theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    let put = |to: &OwnedFd| rustix::net::send(to, b"x", rustix::net::SendFlags::NOSIGNAL);
    assert_eq!(put(&ours), Err(rustix::io::Errno::PIPE));
    device.notifier().unwrap().config_changed().unwrap();
    // Before, it could be.
    let (ours, theirs) = pair();
    assert_eq!(put(&ours), Ok(1));
    let answer = front.ack(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    assert!(answer.is_some_and(|answer| answer != 0), "{answer:?}");
    assert!(device.notifier().is_none());
}

/// A table that announces more (or fewer) regions than it has, or brings another number of
/// descriptors.
#[test]
fn abuse_P1_memory_tables_that_disagree_with_themselves() {
    let driver = ModelDriver::new(Layout::Split, 16);
    let one = table(&[region(&driver)]);
    let fd = driver.fd();
    let with_count = |count: u32| {
        let mut body = one.clone();
        body[..4].copy_from_slice(&count.to_ne_bytes());
        body
    };
    let cases = [
        (one.clone(), 0),
        (one.clone(), 2),
        (with_count(0), 0),
        (with_count(2), 2),
        (with_count(64), 64),
        (with_count(u32::MAX), 1),
        (one[..20].to_vec(), 1),
    ];
    for (body, fds) in cases {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        let fds: Vec<_> = (0..fds).map(|_| fd.as_fd()).collect();
        front.send(Request::SetMemTable, &body, &fds);
        assert_ends(server, &front, "SET_MEM_TABLE");
    }
}

/// Descriptors of the message behind must not be taken for this one's, and those of this one must
/// be seen although another message is behind it.
#[test]
fn abuse_P1_descriptors_belong_to_their_own_message() {
    let driver = ModelDriver::new(Layout::Split, 16);
    let (device, _server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let features = BASIC.to_ne_bytes();
    for _ in 0..50 {
        front.send(Request::SetFeatures, &features, &[]);
        front.send(Request::SetMemTable, &table(&[region(&driver)]), &[driver.fd().as_fd()]);
    }
    front.start_ring(0, &driver, 0);
    assert_eq!(device.running(), [0]);

    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let header = |id: Request, size| codec::Header::request(id as u32, size, false);
    // Both lie in the socket before the session looks: in one write per message, back to back.
    front.send(Request::SetFeatures, &features, &[driver.fd().as_fd()]);
    let _ = front.send_raw(header(Request::GetFeatures, 0).as_bytes(), &[]);
    assert_ends(server, &front, "SET_FEATURES");
}

#[test]
fn abuse_P2_indexes_and_numbers_are_checked_before_they_are_narrowed() {
    let big = [2u32, 0xff, 0x100, 0x1_0000, 0x1_0001, u32::MAX];
    for index in big {
        let state = codec::VringState { index, num: 1 };
        let states = [
            Request::SetVringNum,
            Request::SetVringBase,
            Request::GetVringBase,
            Request::SetVringEnable,
        ];
        for request in states {
            let (_device, server, front) = simple(DeviceKind::Net);
            front.hello(BASIC);
            front.send(request, state.as_bytes(), &[]);
            assert_ends(server, &front, request.name());
        }
        let driver = ModelDriver::new(Layout::Split, 16);
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.set_memory(&driver);
        front.send(Request::SetVringAddr, addr(index, &driver).as_bytes(), &[]);
        assert_ends(server, &front, "SET_VRING_ADDR");
    }
    for word in [2u64, 0xff, 1 << 9, 1 << 32, 1 << 63] {
        for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
            let driver = ModelDriver::new(Layout::Split, 16);
            let (_device, server, front) = simple(DeviceKind::Net);
            front.hello(BASIC);
            front.set_memory(&driver);
            front.send(request, &word.to_ne_bytes(), &[memfd(0).as_fd()]);
            assert_ends(server, &front, request.name());
        }
    }
}

#[test]
fn abuse_R8_ring_sizes_over_the_socket() {
    // 15: no power of two, and no size for a split ring (B11).
    for num in [0u32, 15, 0x8001, 0x1_0000, 0x1_0010, u32::MAX] {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        let state = codec::VringState { index: 0, num };
        front.send(Request::SetVringNum, state.as_bytes(), &[]);
        assert_ends(server, &front, "SET_VRING_NUM");
    }
    // A size for a packed ring, which turns out to be a split one: the port breaks, the session
    // does not, and the VMM hears of it. A reset heals.
    let (device, server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.hello(BASIC | feature::RING_PACKED);
    front.set_memory(&driver);
    front.set_ring(0, &driver, 0);
    front.state(Request::SetVringNum, 0, 15);
    let features = BASIC | feature::PROTOCOL_FEATURES;
    front.ok(Request::SetFeatures, &features.to_ne_bytes(), &[]);
    front.set_doorbells(0, &driver);
    front.state(Request::SetVringEnable, 0, 1);
    assert!(server.status().broken.unwrap().contains("15"));
    assert!(driver.err_event().drain());
    assert_eq!(front.get_base(0), 0);
    assert_eq!(server.status().broken, None);
    front.start_ring(0, &driver, 0);
    assert_eq!(device.running(), [0]);
}

#[test]
fn abuse_P3_dirty_log_size_and_offset() {
    let cases = [
        (u64::MAX, 1),
        (1, u64::MAX),
        (1 << 63, 1 << 63),
        (0, 0),
        (1 << 60, 0),
        (4096, 1 << 62),
        (8192, 0),
    ];
    for (size, offset) in cases {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        let log = codec::Log { size, offset };
        front.send(Request::SetLogBase, log.as_bytes(), &[memfd(4096).as_fd()]);
        assert_ends(server, &front, "SET_LOG_BASE");
    }
}

#[test]
fn abuse_P5_inflight_regions() {
    let good = codec::Inflight {
        mmap_size: 1 << 20,
        mmap_offset: 0,
        num_queues: 2,
        queue_size: 16,
        padding: 0,
    };
    let cases = [
        codec::Inflight { num_queues: 0, ..good },
        codec::Inflight { num_queues: 3, ..good },
        codec::Inflight { num_queues: u16::MAX, ..good },
        codec::Inflight { queue_size: 0, ..good },
        codec::Inflight { queue_size: 0x8001, ..good },
        codec::Inflight { mmap_size: 8, ..good },
        codec::Inflight { mmap_size: u64::MAX, ..good },
        codec::Inflight { mmap_offset: u64::MAX - 4095, ..good },
        codec::Inflight { mmap_offset: 1 << 20, ..good },
        codec::Inflight { mmap_offset: 5, ..good },
    ];
    for (i, case) in cases.iter().enumerate() {
        let (_device, server, front) = simple(DeviceKind::Block);
        front.hello(BASIC);
        let file = memfd(64 << 10);
        if case.mmap_size == u64::MAX {
            // Announced far too large: only what the queues need is ever mapped.
            front.ok(Request::SetInflightFd, case.as_bytes(), &[file.as_fd()]);
            continue;
        }
        front.send(Request::SetInflightFd, case.as_bytes(), &[file.as_fd()]);
        assert_ends(server, &front, "SET_INFLIGHT_FD");
        if i < 5 {
            let (_device, server, front) = simple(DeviceKind::Block);
            front.hello(BASIC);
            front.send(Request::GetInflightFd, case.as_bytes(), &[]);
            assert_ends(server, &front, "GET_INFLIGHT_FD");
        }
    }
}

/// One running queue, then the message: it must end the session (and name itself).
fn assert_misplaced_while_running(request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) {
    let (device, server, front) = simple(DeviceKind::Block);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    assert_eq!(device.running(), [0]);
    front.send(request, body, fds);
    assert_ends(server, &front, request.name());
    assert_eq!(device.running(), [] as [u16; 0]);
}

#[test]
fn abuse_P6_changes_under_a_running_ring() {
    let state = |num| codec::VringState { index: 0, num };
    let driver = ModelDriver::new(Layout::Split, 16);
    let other = codec::VringAddr { desc: addr(0, &driver).desc + 4096, ..addr(0, &driver) };
    assert_misplaced_while_running(Request::SetVringNum, state(8).as_bytes(), &[]);
    assert_misplaced_while_running(Request::SetVringBase, state(0).as_bytes(), &[]);
    assert_misplaced_while_running(Request::SetVringAddr, other.as_bytes(), &[]);
    assert_misplaced_while_running(Request::SetFeatures, &VERSION_1.to_ne_bytes(), &[]);
    assert_misplaced_while_running(Request::SetProtocolFeatures, &0u64.to_ne_bytes(), &[]);
    assert_misplaced_while_running(Request::SetOwner, &[], &[]);
    let inflight =
        codec::Inflight { mmap_size: 0, mmap_offset: 0, num_queues: 2, queue_size: 8, padding: 0 };
    assert_misplaced_while_running(Request::GetInflightFd, inflight.as_bytes(), &[]);
    let file = memfd(1 << 20);
    let kept = codec::Inflight { mmap_size: 1 << 20, ..inflight };
    assert_misplaced_while_running(Request::SetInflightFd, kept.as_bytes(), &[file.as_fd()]);
}

#[test]
fn abuse_P6_messages_before_their_time() {
    let driver = ModelDriver::new(Layout::Split, 16);
    type Case<'a> = (Request, Vec<u8>, Vec<BorrowedFd<'a>>);
    let kick = driver.kick_event().as_fd();
    let cases: [Case<'_>; 2] = [
        (Request::SetVringKick, 0u64.to_ne_bytes().to_vec(), vec![kick]),
        (Request::SetVringAddr, addr(0, &driver).as_bytes().to_vec(), vec![]),
    ];
    for (request, body, fds) in cases {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.send(request, &body, &fds);
        assert_ends(server, &front, request.name());
    }
    // What needs a protocol feature is refused before it was negotiated.
    let front_of = |request| simple(kind_for(request));
    for &request in Request::ALL {
        let Some(needs) = request.shape().needs else { continue };
        if !needs.negotiated {
            continue;
        }
        let (_device, server, front) = front_of(request);
        let fds: Vec<OwnedFd> = (0..legal_fds(request)).map(|_| memfd(4096)).collect();
        front.send(request, &legal_body(request), &borrow(&fds));
        assert_ends(server, &front, needs.name);
    }
}

#[test]
fn abuse_P6_rings_that_point_outside_memory() {
    let driver = ModelDriver::new(Layout::Split, 16);
    let good = addr(0, &driver);
    let end = driver.region().user_addr + driver.region().len_bytes;
    for bad in [0, 1, end - 1, end, u64::MAX - 3, driver.setup().addrs.desc] {
        for addr in [
            codec::VringAddr { desc: bad, ..good },
            codec::VringAddr { avail: bad, ..good },
            codec::VringAddr { used: bad, ..good },
        ] {
            let (_device, server, front) = simple(DeviceKind::Net);
            front.hello(BASIC);
            front.set_memory(&driver);
            front.state(Request::SetVringNum, 0, 16);
            front.send(Request::SetVringAddr, addr.as_bytes(), &[]);
            let error = last_words(&server, &front);
            assert!(error.contains("SET_VRING_ADDR"), "{error}");
            // Addresses of the VMM's process are nobody's business.
            assert!(!error.contains(&format!("{bad:x}")) || bad < 16, "{error}");
        }
    }
}

#[test]
fn abuse_P7_unknown_messages_end_the_session() {
    let served: Vec<u32> = Request::ALL.iter().map(|&r| r as u32).collect();
    for id in (0..64).chain([100, 0x1_0001, u32::MAX]).filter(|id| !served.contains(id)) {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.send_id(id, &[0; 8], &[], true);
        assert_ends(server, &front, &format!("message {id} is not supported"));
    }
}

#[test]
fn abuse_P7_header_flags() {
    for flags in [0u32, 2, 3, 5, 0xf, 0xffff_fff0] {
        let (_device, server, front) = simple(DeviceKind::Net);
        let header = codec::Header { request: 1, flags, size: 0 };
        front.send_raw(header.as_bytes(), &[]).unwrap();
        assert_ends(server, &front, "GET_FEATURES");
    }
}

#[test]
fn abuse_P7_features_and_values_that_nobody_offered() {
    let u64s = [
        (Request::SetFeatures, BASIC | 1 << 33),
        (Request::SetFeatures, 1),
        (Request::SetProtocolFeatures, 1 << 8),
        (Request::SetProtocolFeatures, 1 << 63),
        (Request::SetStatus, 256),
    ];
    for (request, value) in u64s {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.send(request, &value.to_ne_bytes(), &[]);
        assert_ends(server, &front, request.name());
    }
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let state = codec::VringState { index: 0, num: 2 };
    front.send(Request::SetVringEnable, state.as_bytes(), &[]);
    assert_ends(server, &front, "SET_VRING_ENABLE");
    // Config parts that run out of the 256 bytes, or lie about their size.
    for (offset, size, len) in [(250, 8, 8), (u32::MAX, 4, 4), (0, 4, 8), (0, u32::MAX, 4)] {
        let (_device, server, front) = simple(DeviceKind::Vsock);
        front.hello(BASIC);
        let header = codec::ConfigHeader { offset, size, flags: 0 };
        let body = [header.as_bytes(), &vec![0u8; len]].concat();
        front.send(Request::GetConfig, &body, &[]);
        assert_ends(server, &front, "GET_CONFIG");
    }
}

/// No side maps anything for the other (P8): we never ask the VMM to, and take no such message. The
/// back-end channel carries config changes only, and the messages of shared memory, GPU sockets,
/// device state are unknown.
#[test]
fn abuse_P8_no_mappings_either_way() {
    let (device, _server, front) = simple(DeviceKind::Vsock);
    front.start(BASIC, &ModelDriver::new(Layout::Split, 16));
    let (ours, theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    // A VMM that "answers" or asks on that channel is not read at all.
    let channel = FrontEnd::on(ours);
    channel.send_id(9, &[0; 64], &[memfd(4096).as_fd()], true);
    device.notifier().unwrap().config_changed().unwrap();
    let sent = channel.reply();
    assert_eq!((sent.header.request, sent.fds.len()), (2, 0));
    for id in [33, 41, 42, 43, 44] {
        let (_device, server, front) = simple(DeviceKind::Vsock);
        front.hello(BASIC);
        front.send_id(id, &[0; 8], &[memfd(4096).as_fd()], false);
        assert_ends(server, &front, "not supported");
    }
}

#[test]
fn abuse_P7_a_refusal_is_told_when_asked_for() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC | feature::RING_PACKED);
    let state = codec::VringState { index: 9, num: 1 };
    assert_eq!(front.ack(Request::SetVringEnable, state.as_bytes(), &[]), Some(1));
    assert_ends(server, &front, "SET_VRING_ENABLE");
}
