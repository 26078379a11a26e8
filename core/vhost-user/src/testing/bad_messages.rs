//! Helpers of tests of bad messages.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::FrontEnd;
use crate::codec::{Fds, Request, Sizes};
use crate::{DeviceKind, PortServer};

/// The session must end, with a reason that names `what`.
pub fn assert_ends(server: PortServer, front: &FrontEnd, what: &str) {
    let error = last_words(&server, front);
    assert!(error.contains(what), "{error:?} does not name {what}");
}

pub fn last_words(server: &PortServer, front: &FrontEnd) -> String {
    while front.try_reply().is_some() {}
    server.status().last_error.expect("the session ended without a reason")
}

pub fn kind_for(request: Request) -> DeviceKind {
    match request {
        Request::SendRarp | Request::NetSetMtu => DeviceKind::Net,
        _ => DeviceKind::Block,
    }
}

/// A legal size for the message, and a payload that passes the size check.
pub fn legal_body(request: Request) -> Vec<u8> {
    let size = match request.shape().sizes {
        Sizes::Exact(n) | Sizes::Either(_, n) => n,
        Sizes::Range(min, _) => min,
    };
    vec![0; size as usize]
}

pub fn legal_fds(request: Request) -> usize {
    match request.shape().fds {
        Fds::Exact(n) => n,
        Fds::UnlessNoFd => 1,
        Fds::Optional | Fds::PerRegion => 0,
    }
}

pub fn borrow(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
