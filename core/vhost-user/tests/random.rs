//! Random conversations: the session never panics, never hangs, and always ends.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, BorrowedFd};

use proptest::prelude::*;
use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::codec::{self, Request, feature, protocol};
use vhost_user::testing::*;
use vhost_user::{DeviceKind, NullStore};
use zerocopy::IntoBytes;

/// One message: near to right, so that many get through.
#[derive(Debug, Clone)]
struct Message {
    id: u32,
    body: Body,
    fds: usize,
    need_reply: bool,
}

#[derive(Debug, Clone)]
enum Body {
    Word(u64),
    State(u32, u32),
    Addr(u32, bool),
    Region(bool),
    Table,
    Inflight(u16, u16),
    Config(u32, u32),
    Log(u64),
    Bytes(Vec<u8>),
}

fn body() -> impl Strategy<Value = Body> {
    let bits = prop_oneof![
        Just(BASIC),
        Just(BASIC | feature::RING_PACKED),
        Just(BASIC | feature::LOG_ALL),
        Just(protocol::REPLY_ACK),
        Just(0x1_b42f),
        0u64..4,
        any::<u64>(),
    ];
    let index = prop_oneof![4 => 0u32..3, 1 => any::<u32>()];
    let num = prop_oneof![3 => 0u32..2, 3 => Just(16u32), 1 => any::<u32>()];
    prop_oneof![
        3 => bits.prop_map(Body::Word),
        4 => (index.clone(), num).prop_map(|(i, n)| Body::State(i, n)),
        2 => (index, any::<bool>()).prop_map(|(i, log)| Body::Addr(i, log)),
        1 => any::<bool>().prop_map(Body::Region),
        2 => Just(Body::Table),
        1 => (0u16..3, 0u16..20).prop_map(|(q, n)| Body::Inflight(q, n)),
        1 => (0u32..300, 0u32..80).prop_map(|(o, n)| Body::Config(o, n)),
        1 => prop_oneof![Just(4096u64), any::<u64>()].prop_map(Body::Log),
        1 => proptest::collection::vec(any::<u8>(), 0..64).prop_map(Body::Bytes),
    ]
}

/// A message whose body mostly has its message's shape.
fn message() -> impl Strategy<Value = Message> {
    let id = prop_oneof![8 => Just(None), 1 => (0u32..50).prop_map(Some)];
    let fds = prop_oneof![8 => Just(None), 1 => (0usize..4).prop_map(Some)];
    (id, body(), any::<prop::sample::Index>(), fds, any::<bool>()).prop_map(
        |(id, body, pick, fds, need_reply)| {
            let fitting: &[Request] = match &body {
                Body::Word(_) => &[
                    Request::SetFeatures,
                    Request::SetProtocolFeatures,
                    Request::SetVringKick,
                    Request::SetVringCall,
                    Request::SetVringErr,
                    Request::SetStatus,
                ],
                Body::State(..) => &[
                    Request::SetVringNum,
                    Request::SetVringBase,
                    Request::GetVringBase,
                    Request::SetVringEnable,
                ],
                Body::Addr(..) => &[Request::SetVringAddr],
                Body::Region(_) => &[Request::AddMemReg, Request::RemMemReg],
                Body::Table => &[Request::SetMemTable],
                Body::Inflight(..) => &[Request::GetInflightFd, Request::SetInflightFd],
                Body::Config(..) => &[Request::GetConfig, Request::SetConfig],
                Body::Log(_) => &[Request::SetLogBase],
                Body::Bytes(_) => &[
                    Request::SetOwner,
                    Request::ResetOwner,
                    Request::ResetDevice,
                    Request::GetFeatures,
                    Request::SetLogFd,
                    Request::SetBackendReqFd,
                ],
            };
            let request = fitting[pick.index(fitting.len())];
            let fds = fds.unwrap_or(match codec::Request::shape(request).fds {
                codec::Fds::Exact(n) => n,
                codec::Fds::UnlessNoFd | codec::Fds::PerRegion => 1,
                codec::Fds::Optional => 0,
            });
            let body = match body {
                Body::Bytes(_) if id.is_none() => Body::Bytes(Vec::new()),
                other => other,
            };
            Message { id: id.unwrap_or(request as u32), body, fds, need_reply }
        },
    )
}

fn bytes(body: &Body, driver: &ModelDriver) -> Vec<u8> {
    match body {
        Body::Word(word) => word.to_ne_bytes().to_vec(),
        Body::State(index, num) => {
            codec::VringState { index: *index, num: *num }.as_bytes().to_vec()
        }
        Body::Addr(index, log) => {
            let flags = u32::from(*log);
            codec::VringAddr { flags, ..addr(*index, driver) }.as_bytes().to_vec()
        }
        Body::Region(low) if *low => {
            let low =
                codec::Region { guest_addr: 0, user_addr: 4096, len_bytes: 4096, mmap_offset: 0 };
            single(low)
        }
        Body::Region(_) => single(region(driver)),
        Body::Table => table(&[region(driver)]),
        Body::Inflight(num_queues, queue_size) => codec::Inflight {
            mmap_size: 4096,
            mmap_offset: 0,
            num_queues: *num_queues,
            queue_size: *queue_size,
            padding: 0,
        }
        .as_bytes()
        .to_vec(),
        Body::Config(offset, size) => {
            let header = codec::ConfigHeader { offset: *offset, size: *size, flags: 0 };
            [header.as_bytes(), &vec![0u8; *size as usize]].concat()
        }
        Body::Log(size) => codec::Log { size: *size, offset: 0 }.as_bytes().to_vec(),
        Body::Bytes(bytes) => bytes.clone(),
    }
}

/// Sends everything without waiting, reads whatever comes, and sees the session end.
fn converse(kind: DeviceKind, hello: bool, messages: &[Message], tail: &[u8]) {
    let device = FakeDevice::new(kind, 2);
    let (server, front) = connected_with(&device, std::sync::Arc::new(NullStore));
    let driver = ModelDriver::new(Layout::Split, 16);
    if hello {
        front.start(BASIC, &driver);
    }
    let fd = driver.fd();
    for message in messages {
        let bell = matches!(
            Request::from_id(message.id),
            Some(Request::SetVringKick | Request::SetVringCall | Request::SetVringErr)
        );
        let fd = if bell { driver.kick_event().as_fd() } else { fd.as_fd() };
        let fds: Vec<BorrowedFd<'_>> = (0..message.fds).map(|_| fd).collect();
        front.send_id(message.id, &bytes(&message.body, &driver), &fds, message.need_reply);
    }
    let _ = front.send_raw(tail, &[]);
    rustix::net::shutdown(&front.socket, rustix::net::Shutdown::Write).unwrap();
    while front.try_reply().is_some() {}
    server.wait();
    // A panic in the session's thread would have left this out.
    device.wait_for(&Call::Connected(false));
    assert!(device.running().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn abuse_P7_random_messages(
        block in any::<bool>(),
        hello in any::<bool>(),
        messages in proptest::collection::vec(message(), 0..40),
        tail in proptest::collection::vec(any::<u8>(), 0..30),
    ) {
        converse(if block { DeviceKind::Block } else { DeviceKind::Net }, hello, &messages, &tail);
    }

    #[test]
    fn abuse_P7_random_bytes(tail in proptest::collection::vec(any::<u8>(), 0..200)) {
        converse(DeviceKind::Net, false, &[], &tail);
    }
}
