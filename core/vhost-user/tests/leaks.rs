//! Descriptors that come in must go. Alone in their process, and one after the other: they count
//! the open descriptors.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::DeviceKind;
use vhost_user::codec::{self, Fds, Request};
use vhost_user::testing::*;
use zerocopy::IntoBytes;

static ALONE: Mutex<()> = Mutex::new(());

fn open_fds() -> usize {
    base::peer_fd::settle();
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn abuse_P1_descriptors_on_every_message_are_counted_and_closed() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let extra: Vec<OwnedFd> = (0..100).map(|_| memfd(4096)).collect();
    let mut before = None;
    for &request in Request::ALL {
        for count in [0, 1, 2, 9, 65, 66, 100] {
            let allowed = match request.shape().fds {
                Fds::Optional => count <= 1,
                _ => count == legal_fds(request),
            };
            if allowed {
                continue;
            }
            let (device, server, front) = simple(kind_for(request));
            front.hello(BASIC);
            let fds = borrow(&extra[..count]);
            front.send(request, &legal_body(request), &fds);
            assert_ends(server, &front, request.name());
            drop((device, front));
            let now = open_fds();
            assert_eq!(now, *before.get_or_insert(now), "{request:?} with {count} leaks");
        }
    }
}

#[test]
fn abuse_P4_repeated_messages_leak_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let (device, _server, front) = simple(DeviceKind::Block);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    let inflight =
        codec::Inflight { mmap_size: 0, mmap_offset: 0, num_queues: 2, queue_size: 8, padding: 0 };
    let word = 0u64.to_ne_bytes();
    let mut settled = None;
    for round in 0..100 {
        front.get_base(0);
        front.state(Request::SetVringNum, 0, 16);
        front.set_memory(&driver);
        front.set_doorbells(0, &driver);
        front.get_base(0);
        drop(front.ask(Request::GetInflightFd, inflight.as_bytes()));
        front.ok(Request::SetVringErr, &word, &[driver.err_event().as_fd()]);
        let log = codec::Log { size: 4096, offset: 0 };
        front.send(Request::SetLogBase, log.as_bytes(), &[memfd(4096).as_fd()]);
        front.reply();
        front.ok(Request::SetLogFd, &[], &[memfd(0).as_fd()]);
        front.ok(Request::SetBackendReqFd, &[], &[UnixStream::pair().unwrap().0.as_fd()]);
        // When this is answered, everything before it is off the socket.
        front.get_u64(Request::GetStatus);
        if round < 2 {
            // The process' first ring of a doorbell opens a file.
            continue;
        }
        let open = open_fds();
        assert_eq!(open, *settled.get_or_insert(open), "after {round} rounds");
    }
    drop(front);
    device.wait_for(&Call::Connected(false));
}
