use super::*;
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

fn pair() -> (OwnedFd, Conn) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    (ours, Conn::new(theirs, 0, &Purse::alone()))
}

fn fill(conn: &mut Conn) {
    conn.fill(&mut vec![0; READ_BYTES]).unwrap();
}

fn send_all(fd: &OwnedFd, mut bytes: &[u8], conn: &mut Conn) {
    while !bytes.is_empty() {
        match rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::AGAIN) => fill(conn),
            Err(e) => panic!("{e}"),
        }
    }
    fill(conn);
}

#[test]
fn frames_come_out_as_they_went_in() {
    let (peer, mut conn) = pair();
    let bodies: Vec<Vec<u8>> =
        [0usize, 1, 100, 300_000, 5].iter().map(|n| (0..*n).map(|i| i as u8).collect()).collect();
    let mut got = Vec::new();
    for (i, body) in bodies.iter().enumerate() {
        let bytes = frame(kind::REQUEST, 0, i as u64 + 1, &[body]);
        for part in bytes.chunks(1000) {
            send_all(&peer, part, &mut conn);
            while let Some((frame, body)) = conn.next().unwrap() {
                let (seq, body) = (frame.seq.get(), body.to_vec());
                conn.advance(body.len());
                got.push((seq, body));
            }
        }
    }
    let wanted: Vec<_> = (1..).zip(bodies).collect();
    assert_eq!(got, wanted);
    assert_eq!(conn.held_bytes(), 0);
    assert!(conn.charged_bytes() <= IDLE_BYTES, "{}", conn.charged_bytes());
    drop(peer);
    fill(&mut conn);
    assert!(conn.ended);
}

#[test]
fn output_waits_for_a_peer_that_does_not_read() {
    let (peer, mut conn) = pair();
    let bytes = frame(kind::REPLY, 0, 1, &[&[7; 100_000]]);
    for _ in 0..20 {
        conn.push(Rc::clone(&bytes));
        conn.flush().unwrap();
    }
    assert!(conn.has_output() && !conn.may_read());
    let mut got = Vec::new();
    while got.len() < 20 * bytes.len() {
        let mut room = [0; 65536];
        let (n, _) = rustix::net::recv(&peer, &mut room, RecvFlags::DONTWAIT).unwrap();
        got.extend_from_slice(&room[..n]);
        conn.flush().unwrap();
    }
    assert_eq!(got, bytes.repeat(20));
    assert!(!conn.has_output() && conn.may_read());
}

#[test]
fn a_length_beyond_the_limit_is_known_from_the_header() {
    let frame = Frame::new(kind::REQUEST, 0, 1, MAX_BODY_BYTES as usize + 1);
    let error = parse(frame.as_bytes()).unwrap_err();
    assert_eq!(error.0, "a frame of 16777217 bytes, the limit is 16777216");
}

proptest! {
    #[test]
    fn any_bytes_are_a_frame_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        // No panic; and a frame by chance has the right hash.
        if let Ok(Some((frame, body))) = parse(&bytes) {
            prop_assert_eq!(frame.check.get(), xxh3_64_with_seed(body, frame.seed()));
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed(
        body in proptest::collection::vec(any::<u8>(), 0..100),
        bit in 0usize..800,
    ) {
        let mut bytes = frame(kind::REQUEST, 0, 9, &[&body]).to_vec();
        let bit = bit % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Longer than what is there, too long, or wrong.
        prop_assert!(!matches!(parse(&bytes), Ok(Some(_))));
    }

    #[test]
    fn a_text_is_cut_between_characters(text in "[aä€😀]{0,600}") {
        let bytes = failure(kind::REPLY, 1, 1, &text);
        let (_, body) = parse(&bytes).unwrap().unwrap();
        let told = std::str::from_utf8(&body[size_of::<Failure>()..]).unwrap();
        prop_assert!(text.starts_with(told) && told.len() <= MAX_TEXT_BYTES);
        prop_assert!(
            text.len() <= MAX_TEXT_BYTES - 3 || told.len() > MAX_TEXT_BYTES - 4 || told == text
        );
    }
}
