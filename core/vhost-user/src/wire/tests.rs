use std::os::fd::OwnedFd;

use base::event::Event;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;

struct Wire {
    ours: OwnedFd,
    theirs: OwnedFd,
    stop: Event,
}

impl Wire {
    fn new() -> Self {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        Self { ours, theirs, stop: Event::new().unwrap() }
    }

    fn put(&self, request: Request, body: &[u8], fds: usize) {
        let header = Header::request(request as u32, body.len() as u32, false);
        let event = Event::new().unwrap();
        let fds: Vec<_> = (0..fds).map(|_| event.as_fd()).collect();
        let bytes = [header.as_bytes(), body].concat();
        assert_eq!(send_once(self.theirs.as_fd(), &bytes, &fds).unwrap(), bytes.len());
    }

    fn receive(&self) -> Result<Received, VhostUserError> {
        receive(self.ours.as_fd(), self.stop.as_fd())
    }

    fn message(&self) -> Incoming {
        match self.receive().unwrap() {
            Received::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_message_stays_until_it_is_consumed() {
    let wire = Wire::new();
    assert!(matches!(wire.receive().unwrap(), Received::Nothing));
    wire.put(Request::SetVringKick, &7u64.to_ne_bytes(), 1);
    wire.put(Request::GetFeatures, &[], 0);
    for _ in 0..3 {
        let message = wire.message();
        assert_eq!(message.request, Request::SetVringKick);
        assert_eq!((message.fds.len(), message.payload), (1, 7u64.to_ne_bytes().to_vec()));
    }
    wire.message().consume(wire.ours.as_fd()).unwrap();
    let mut message = wire.message();
    assert_eq!(message.request, Request::GetFeatures);
    message.consume(wire.ours.as_fd()).unwrap();
    drop(wire.theirs.try_clone().unwrap());
    assert!(matches!(wire.receive().unwrap(), Received::Nothing));
}

/// Linux shows the next message's descriptors to whoever peeks at a message without any.
#[test]
fn descriptors_of_the_next_message_are_not_this_ones() {
    let wire = Wire::new();
    wire.put(Request::SetFeatures, &[0; 8], 0);
    wire.put(Request::SetVringKick, &[0; 8], 1);
    let mut first = wire.message();
    assert!(first.fds.is_empty());
    first.consume(wire.ours.as_fd()).unwrap();
    let mut second = wire.message();
    assert_eq!(second.fds.len(), 1);
    second.consume(wire.ours.as_fd()).unwrap();
}

/// The same quirk the other way: a message that brings what it must not, with another behind it.
#[test]
fn descriptors_that_only_the_last_read_sees_are_an_error() {
    let wire = Wire::new();
    wire.put(Request::SetFeatures, &[0; 8], 2);
    wire.put(Request::GetFeatures, &[], 0);
    let error = wire.message().consume(wire.ours.as_fd()).unwrap_err().to_string();
    assert_eq!(error, "SET_FEATURES: 2 file descriptors; 0 expected");

    let wire = Wire::new();
    wire.put(Request::SetVringCall, &[0; 8], 0);
    wire.put(Request::SetVringKick, &[0; 8], 1);
    assert!(wire.message().consume(wire.ours.as_fd()).is_err(), "a borrowed descriptor");
}

#[test]
fn a_message_in_two_writes_keeps_its_descriptors() {
    let wire = Wire::new();
    let header = Header::request(Request::SetVringKick as u32, 8, false);
    let event = Event::new().unwrap();
    send_once(wire.theirs.as_fd(), header.as_bytes(), &[event.as_fd()]).unwrap();
    send_once(wire.theirs.as_fd(), &[0; 8], &[]).unwrap();
    let mut message = wire.message();
    assert_eq!(message.fds.len(), 1);
    message.consume(wire.ours.as_fd()).unwrap();
    assert!(matches!(wire.receive().unwrap(), Received::Nothing));
}

#[test]
fn stop_ends_the_wait_for_the_rest() {
    let wire = Wire::new();
    send_once(wire.theirs.as_fd(), &[1, 0, 0, 0, 1], &[]).unwrap();
    wire.stop.signal().unwrap();
    assert!(matches!(wire.receive().unwrap(), Received::Stopped));
}

#[test]
fn an_end_within_a_message_is_an_error_and_between_two_is_not() {
    let wire = Wire::new();
    send_once(wire.theirs.as_fd(), &[1, 0, 0, 0, 1], &[]).unwrap();
    let Wire { ours, theirs, stop } = wire;
    drop(theirs);
    let error = receive(ours.as_fd(), stop.as_fd()).unwrap_err();
    assert!(matches!(error, VhostUserError::Cut { got: 5, want: 12 }));
    assert!(matches!(receive(ours.as_fd(), stop.as_fd()).unwrap(), Received::Closed));
}

#[test]
fn a_reply_to_somebody_who_does_not_read_waits_for_stop() {
    let wire = Wire::new();
    let header = Header::reply(1, 4000);
    let put = || send(wire.ours.as_fd(), wire.stop.as_fd(), &header, &[0; 4000], &[]);
    wire.stop.signal().unwrap();
    // Until the socket is full, stop does not matter: nothing has to wait.
    while put().unwrap() {}
}
