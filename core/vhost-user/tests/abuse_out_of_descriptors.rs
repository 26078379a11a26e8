//! A process without a free descriptor. A process of its own: the limit is one for all.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vhost_user::codec::Request;
use vhost_user::testing::*;
use vhost_user::{DeviceKind, Endpoint, NullStore};

/// Sets how many descriptors there may be; gives the old number.
fn limit(soft: libc::rlim_t) -> libc::rlim_t {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `old` is a valid `struct rlimit` for both calls.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old), 0);
        let new = libc::rlimit { rlim_cur: soft, ..old };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new), 0);
    }
    old.rlim_cur
}

#[test]
fn abuse_P10_a_stranger_that_cannot_be_accepted_does_not_end_the_session() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port.sock");
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    let front = FrontEnd::dial(&path);
    front.hello(BASIC);
    let stranger =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let address = SocketAddrUnix::new(&path).unwrap();
    // The lowest free number is the first that may not be used any more.
    let free = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    let old = limit(free as libc::rlim_t);
    connect(&stranger, &address).unwrap();
    for _ in 0..20 {
        assert_ne!(front.get_u64(Request::GetFeatures), 0);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    limit(old);
    assert_eq!(server.status().sessions, 1);
    // And it is sent away as soon as it can be.
    assert!(FrontEnd::on(stranger).try_reply().is_none());
    assert_eq!(server.status().refused, 1);
    assert_ne!(front.get_u64(Request::GetFeatures), 0);
}
