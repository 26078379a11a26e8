//! Monitors and members that send arbitrary bytes, for the fuzzer.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use base::event::Event;
use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType};
use serde_json::{Value, json};

use crate::error::QmpError;
use crate::mailbox::testing::MemberSide;
use crate::mailbox::{HOST_WORDS, Mailbox};
use crate::member_report::{MemberReport, ModuleState};
use crate::qmp::{MAX_EVENTS, MAX_LINE_LEN_BYTES, Qmp};

/// Runs a monitor that sends `bytes` and ends, for any command. Returns the answer to the first
/// command.
///
/// # Errors
/// There is no answer.
///
/// # Panics
/// More is kept than there may be.
pub fn qmp(bytes: &[u8]) -> Result<Value, QmpError> {
    let io = |source: io::Error| QmpError::Io { command: "fuzz", source };
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.map_err(|error| io(error.into()))?;
    let stop = Arc::new(Event::new().map_err(io)?);
    // Bytes that do not fit into the socket are not sent.
    let _ = rustix::net::send(&theirs, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let _ = rustix::net::shutdown(&theirs, Shutdown::Write);
    let mut qmp = Qmp::over(ours, stop, Duration::from_secs(10));
    let answer = qmp.run("fuzz", json!({}));
    // It ends with the socket, or with nonsense.
    while qmp.read_available().is_ok() {}
    assert!(qmp.kept_bytes() <= MAX_LINE_LEN_BYTES + bytes.len());
    let events = std::iter::from_fn(|| qmp.take_event()).count();
    assert!(events <= MAX_EVENTS, "{events} events");
    answer
}

/// Runs a member that writes words of `bytes`, each with its place in front, anywhere into its
/// mailbox.
///
/// # Errors
/// There is no memory.
///
/// # Panics
/// What it wrote over the host's half stays there; what is taken for sane is not.
pub fn mailbox(bytes: &[u8], window_len: u64) -> io::Result<()> {
    let mut mailbox = Mailbox::new()?;
    let member = MemberSide::new(mailbox.file().as_fd().try_clone_to_owned()?);
    let mut half = [7; HOST_WORDS];
    for (at, change) in bytes.chunks_exact(10).enumerate() {
        let (place, value) = change.split_at(2);
        let off = usize::from(u16::from_le_bytes([place[0], place[1]])) / 8 * 8;
        let value = value.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        member.scribble(off % guest_abi::channel::MAILBOX_LEN, value);
        if at % 8 == 7 {
            half[HOST_WORDS - 1] = at as u64;
            mailbox.publish(&half);
            check_host(&member, &half);
        }
        check_report(&mailbox, window_len);
    }
    half[HOST_WORDS - 1] = u64::MAX;
    mailbox.publish(&half);
    check_host(&member, &half);
    mailbox.clear_guest();
    assert!(matches!(MemberReport::check(&mailbox.guest(), window_len), Ok(None)));
    Ok(())
}

fn check_host(member: &MemberSide, half: &[u64; HOST_WORDS]) {
    let host = member.host();
    assert_eq!(host.magic, guest_abi::channel::HOST_MAGIC);
    assert!(host.table_seq.get().is_multiple_of(2));
    let last = (HOST_WORDS - 1) * size_of::<u64>();
    assert_eq!(member.word(last), half[HOST_WORDS - 1]);
}

fn check_report(mailbox: &Mailbox, window_len: u64) {
    let guest = mailbox.guest();
    match MemberReport::check(&guest, window_len) {
        Ok(Some(report)) => {
            let is_inside = report.dir_off.checked_add(4096).is_some_and(|end| end <= window_len);
            assert!(report.state != ModuleState::Active || is_inside);
            for (index, status) in guest.links.iter().enumerate() {
                let link = report.link(index);
                let announced = (status.borrowed.get(), status.lent.get());
                assert_eq!((link.borrowed, link.lent), announced);
                let is_free = link.borrowed == 0 && link.lent == 0;
                let gone = matches!(report.state, ModuleState::None | ModuleState::Left)
                    || link.state == crate::LinkState::None;
                let id = link.peer_id as u16;
                assert!(gone || is_free || !report.has_closed(index, id));
            }
        }
        Ok(None) => assert_eq!(guest.magic, 0),
        Err(why) => assert!(!why.is_empty() && why.len() < 300),
    }
}
