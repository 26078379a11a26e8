use guest_abi::pipe::{Extent, Hello, Pipe};
use proptest::prelude::*;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::*;

fn message(kind: u16, id: u64, body: &[u8]) -> Vec<u8> {
    [Header::new(kind, id, body.len()).as_bytes(), body].concat()
}

fn socket_end() -> SocketEnd {
    let mut end = SocketEnd::read_from_bytes(&[0; size_of::<SocketEnd>()]).unwrap();
    end.family = family::V4;
    end.local[..4].copy_from_slice(&[10, 0, 0, 1]);
    end.remote[..4].copy_from_slice(&[10, 0, 0, 2]);
    (end.local_port, end.remote_port) = (U16::new(80), U16::new(4000));
    end
}

fn file_to_socket(extents: &[(u64, u64)], said: u32) -> Vec<u8> {
    let len = extents.iter().map(|e| e.1).sum();
    let (source, sink, len_bytes) = (end::FILE, end::SOCKET, U64::new(len));
    let head = Pipe { source, sink, flags: pipe::flag::CACHED, reserved: [0; 5], len_bytes };
    let mut body = head.as_bytes().to_vec();
    body.extend(FileEnd { disk: U32::new(7), extents: U32::new(said) }.as_bytes());
    for &(offset, len) in extents {
        let extent = Extent { offset: U64::new(offset), len_bytes: U64::new(len) };
        body.extend(extent.as_bytes());
    }
    body.extend(socket_end().as_bytes());
    body
}

#[test]
fn a_pipe_is_read_as_it_was_meant() {
    let body = file_to_socket(&[(4096, 8192), (u64::MAX, 100)], 2);
    let bytes = message(kind::PIPE, 5, &body);
    let (id, message) = MessageReader::new(&bytes[..]).receive().unwrap();
    let Message::Pipe(request) = message else { panic!("{message:?}") };
    assert_eq!((id, request.len_bytes, request.is_cached), (5, 8292, true));
    let extents = vec![(4096, 8192), (u64::MAX, 100)];
    assert_eq!(request.source, End::File { disk: 7, extents });
    let End::Socket(socket) = request.sink else { panic!() };
    assert_eq!(socket.key.local, "10.0.0.1".parse::<IpAddr>().unwrap());
    assert_eq!((socket.key.local_port, socket.key.remote_port), (80, 4000));
}

#[test]
fn a_file_that_is_written_and_what_is_said_of_it() {
    let (source, sink, len_bytes) = (end::SOCKET, end::PLACES, U64::new(9));
    let mut body = Pipe { source, sink, flags: 0, reserved: [0; 5], len_bytes }.as_bytes().to_vec();
    body.extend(socket_end().as_bytes());
    let places = PlacesEnd { tag: [3; 16], skew_bytes: U32::new(17), disk: U32::new(1) };
    body.extend(places.as_bytes());
    let taken = Taken { at: U64::new(4096), len_bytes: U32::new(9), errno: U32::new(28) };
    let own = pipe::Own { own_bytes: U64::new(5) };
    let own_to_socket = [own.as_bytes(), socket_end().as_bytes()].concat();
    let mut bytes = message(kind::PIPE, 1, &body);
    for (kind, body) in [
        (kind::OWN, own.as_bytes()),
        (kind::OWN, &own_to_socket),
        (kind::TAKEN, taken.as_bytes()),
        (kind::PING, &[]),
        (kind::REFUSALS, &[84, 0, 9, 9, 1, 0, 0, 0, 255, 255, 0, 0, 2, 0, 0, 0]),
        (kind::PROBE_WRITE, &[4; size_of::<ProbePlaces>()]),
        // Too long.
        (kind::OWN, &[own_to_socket.as_slice(), &[0]].concat()),
    ] {
        bytes.extend(message(kind, 1, body));
    }
    let mut reader = MessageReader::new(&bytes[..]);
    let mut next = || reader.receive().map(|(_, message)| message);
    let Message::Pipe(request) = next().unwrap() else { panic!() };
    assert_eq!((request.sink, request.is_cached), (End::Places(places), false));
    assert!(matches!(next().unwrap(), Message::Answer(Answer::Own(None))));
    assert!(
        matches!(next().unwrap(), Message::Answer(Answer::Own(Some(end))) if end == socket_end())
    );
    assert!(matches!(next().unwrap(), Message::Answer(Answer::Written(got)) if got == taken));
    assert!(matches!(next().unwrap(), Message::Ping));
    let Message::Refusals(all) = next().unwrap() else { panic!() };
    assert_eq!(all, [(Reason::Extents, 1), (Reason::Unknown, 2)]);
    assert!(matches!(next().unwrap(), Message::ProbeWrite(probe) if probe.secret == [4; 32]));
    assert!(matches!(next(), Err(MessageError::Malformed { kind: kind::OWN, .. })));
}

#[test]
fn a_file_that_is_read_without_a_lease_and_what_is_said_of_it() {
    let (source, sink, len_bytes) = (end::PLACES, end::SOCKET, U64::new(9));
    let mut body = Pipe { source, sink, flags: 0, reserved: [0; 5], len_bytes }.as_bytes().to_vec();
    let places = PlacesEnd { tag: [3; 16], skew_bytes: U32::new(17), disk: U32::new(1) };
    body.extend(places.as_bytes());
    body.extend(socket_end().as_bytes());
    let given = |len| Taken { at: U64::new(4096), len_bytes: U32::new(len), errno: U32::ZERO };
    let mut bytes = message(kind::PIPE, 1, &body);
    bytes.extend(message(kind::PROBE_READ, 1, &[4; size_of::<ProbePlaces>()]));
    bytes.extend(message(kind::GIVEN, 1, given(1 << 20).as_bytes()));
    bytes.extend(message(kind::GIVEN, 1, &[given(3).as_bytes(), b"abc"].concat()));
    bytes.extend(message(kind::GIVEN, 1, &[given(2).as_bytes(), b"abc"].concat()));
    let mut reader = MessageReader::new(&bytes[..]);
    let mut next = || reader.receive().map(|(_, message)| message);
    let Message::Pipe(request) = next().unwrap() else { panic!() };
    assert_eq!(request.source, End::Places(places));
    assert!(matches!(next().unwrap(), Message::ProbeRead(probe) if probe.secret == [4; 32]));
    let mut said = || match next().unwrap() {
        Message::Answer(said) => said,
        other => panic!("{other:?}"),
    };
    assert_eq!(said(), Answer::Read(given(1 << 20), Vec::new()));
    assert_eq!(said(), Answer::Read(given(3), b"abc".to_vec()));
    assert!(matches!(next(), Err(MessageError::Malformed { kind: kind::GIVEN, .. })));
    // More than was ever asked for at once.
    let len = MAX_TAKE_BYTES as u32 + 1;
    let body = [given(len).as_bytes(), &vec![0; len as usize]].concat();
    let bytes = message(kind::GIVEN, 1, &body);
    let received = MessageReader::new(&bytes[..]).receive();
    assert!(matches!(received, Err(MessageError::Malformed { kind: kind::GIVEN, .. })));
}

#[test]
#[allow(non_snake_case)]
fn abuse_R9_counts_that_do_not_fit_are_refused_and_the_stream_goes_on() {
    let one = [(0, 1)];
    for said in [0, 2, MAX_EXTENTS, MAX_EXTENTS + 1, u32::MAX] {
        let mut bytes = message(kind::PIPE, 1, &file_to_socket(&one, said));
        bytes.extend(message(kind::CANCEL, 2, &[1, 0, 0, 0, 0, 0, 0, 0]));
        let mut reader = MessageReader::new(&bytes[..]);
        assert!(matches!(reader.receive().unwrap().1, Message::Refused(_)), "{said}");
        assert!(matches!(reader.receive().unwrap(), (2, Message::Cancel(Reason::Cancelled))));
    }
}

#[test]
#[allow(non_snake_case)]
fn abuse_R9_refusals_are_whole_and_not_too_many() {
    for len in [0, 1, 7, 9, 8 * pipe::MAX_REFUSALS + 8] {
        let bytes = message(kind::REFUSALS, 0, &vec![0; len]);
        let heard = MessageReader::new(&bytes[..]).receive();
        assert!(matches!(heard, Err(MessageError::Malformed { kind: kind::REFUSALS, .. })));
    }
}

#[test]
fn agents_end_pipes_for_their_own_reasons_only() {
    for reason in Reason::ALL {
        let [low, high] = (*reason as u16).to_le_bytes();
        let bytes = message(kind::CANCEL, 2, &[low, high, 0, 0, 0, 0, 0, 0]);
        let (_, heard) = MessageReader::new(&bytes[..]).receive().unwrap();
        let own = [Reason::TimedOut, Reason::LeaseBroken, Reason::SinkFailed, Reason::Unsent];
        let want = if own.contains(reason) { *reason } else { Reason::Cancelled };
        assert!(matches!(heard, Message::Cancel(got) if got == want), "{reason:?}");
    }
}

#[test]
#[allow(non_snake_case)]
fn abuse_R10_a_body_beyond_the_limit_is_not_allocated() {
    let mut header = Header::new(kind::PIPE, 1, 0);
    header.len_bytes = U32::new(u32::MAX);
    let error = MessageReader::new(header.as_bytes()).receive().unwrap_err().to_string();
    assert!(error.contains("65536"), "{error}");
}

#[test]
fn a_hello_of_another_version_or_kind_is_refused() {
    let hello = |magic, lowest, highest| Hello {
        magic: U64::new(magic),
        lowest: U16::new(lowest),
        highest: U16::new(highest),
        reserved: U32::ZERO,
    };
    let say = |kind, hello: Hello| {
        MessageReader::new(&message(kind, 0, hello.as_bytes())[..]).read_hello(&[])
    };
    assert_eq!(say(kind::HELLO, hello(pipe::MAGIC, 1, 3)).unwrap(), 1);
    assert!(say(kind::HELLO, hello(pipe::MAGIC, 2, 3)).is_err());
    assert!(say(kind::HELLO, hello(pipe::MAGIC, 3, 0)).is_err());
    assert!(say(kind::HELLO, hello(1, 1, 1)).is_err());
    assert!(say(kind::PIPE, hello(pipe::MAGIC, 1, 1)).is_err());
}

#[test]
#[allow(non_snake_case)]
fn abuse_V8_a_hello_without_the_secret_is_refused() {
    let hello = Hello {
        magic: U64::new(pipe::MAGIC),
        lowest: U16::new(1),
        highest: U16::new(1),
        reserved: U32::ZERO,
    };
    let say = |told: &[u8], secret: &[u8]| {
        let body = [hello.as_bytes(), told].concat();
        MessageReader::new(&message(kind::HELLO, 0, &body)[..])
            .read_hello(secret)
            .map_err(|e| e.to_string())
    };
    let secret = b"0123456789abcdef";
    assert_eq!(say(secret, secret), Ok(1));
    assert_eq!(say(secret, b""), Ok(1), "a VM without one");
    assert!(say(b"", secret).unwrap_err().contains("has no secret"));
    for wrong in [&secret[..15], b"0123456789abcdeg", b"0123456789abcdef\n", b"0"] {
        assert!(say(wrong, secret).unwrap_err().contains("another secret"), "{wrong:?}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut reader = MessageReader::new(&bytes[..]);
        while reader.receive().is_ok() {}
    }

    #[test]
    fn any_body_of_a_pipe_is_a_pipe_or_refused(
        cut in 0usize..200,
        flips in proptest::collection::vec((0usize..200, any::<u8>()), 0..4),
    ) {
        let mut body = file_to_socket(&[(1, 2), (3, 4)], 2);
        body.truncate(cut);
        for (at, value) in flips {
            if let Some(byte) = body.get_mut(at) {
                *byte = value;
            }
        }
        let bytes = message(kind::PIPE, 1, &body);
        let (_, message) = MessageReader::new(&bytes[..]).receive().unwrap();
        prop_assert!(matches!(message, Message::Pipe(_) | Message::Refused(_)));
    }
}
