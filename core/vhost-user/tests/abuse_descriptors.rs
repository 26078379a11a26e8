//! Descriptors that are not what the message says.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, OwnedFd};

use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::DeviceKind;
use vhost_user::codec::Request;
use vhost_user::testing::*;

/// A pipe or a socket could block whoever rings it, a file of the attacker's file system whoever
/// watches it.
#[test]
fn abuse_P1_doorbells_that_are_no_eventfds_end_the_session() {
    let others: [fn() -> OwnedFd; 4] = [
        || rustix::pipe::pipe().unwrap().0,
        || rustix::pipe::pipe().unwrap().1,
        || pair().0,
        || memfd(4096),
    ];
    for request in [Request::SetVringKick, Request::SetVringCall, Request::SetVringErr] {
        for other in others {
            let (device, server, front) = simple(DeviceKind::Net);
            front.hello(BASIC);
            front.set_memory(&ModelDriver::new(Layout::Split, 16));
            front.send(request, &1u64.to_ne_bytes(), &[other().as_fd()]);
            let error = last_words(&server, &front);
            for part in [request.name(), "vm/port", "queue 1", "is not an eventfd"] {
                assert!(error.contains(part), "{error}");
            }
            assert!(device.running().is_empty());
        }
    }
}
