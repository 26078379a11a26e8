use super::*;
use guest_abi::module::{FRAME_BYTES, failure as codes};
use proptest::prelude::*;
use zerocopy::little_endian::{U16, U32, U64};

fn welcome(instance: u64, known_seq: u64, max_in_flight: u32) -> Vec<u8> {
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        modules: U16::new(1),
        max_in_flight: U32::new(max_in_flight),
        max_body_bytes: U32::new(1000),
        linger_ms: U32::new(5000),
        instance: U64::new(instance),
        known_seq: U64::new(known_seq),
    };
    let mut info = ModuleInfo { name: [0; 32], hash: [9; 32] };
    info.name[..2].copy_from_slice(b"kv");
    [welcome.as_bytes(), info.as_bytes()].concat()
}

fn push(session: &mut Session, kind: u16, flags: u16, seq: u64, body: &[u8]) {
    let mut bytes = Vec::new();
    raw::put(&mut bytes, kind, flags, seq, body);
    session.room()[..bytes.len()].copy_from_slice(&bytes);
    session.filled(bytes.len());
}

fn told(session: &mut Session, kind: u16, flags: u16, seq: u64, body: &[u8]) -> Option<Event> {
    push(session, kind, flags, seq, body);
    session.next_event().unwrap()
}

/// Frames that the host would get.
fn sent(session: &mut Session) -> Vec<(u16, u16, u64, Vec<u8>)> {
    let mut inbox = Inbox::default();
    let bytes = session.to_send().to_vec();
    session.sent(bytes.len());
    inbox.room()[..bytes.len()].copy_from_slice(&bytes);
    inbox.filled(bytes.len());
    let next = |_| inbox.next(MAX_BODY_BYTES).unwrap().map(|f| (f.kind, f.flags, f.seq, f.body));
    (0..).map_while(next).collect()
}

fn up(max_in_flight: u32) -> Session {
    let mut session = Session::new([7; 16], [0; MAX_NAME_BYTES]);
    session.connected();
    let hello = sent(&mut session);
    assert_eq!((hello[0].0, hello[0].3.len()), (kind::HELLO, 64));
    let Some(Event::Welcome(greeting)) =
        told(&mut session, kind::WELCOME, 0, 0, &welcome(1, 0, max_in_flight))
    else {
        panic!()
    };
    assert!(greeting.is_kept);
    assert_eq!(greeting.modules, [ModuleName { name: "kv".into(), hash: [9; 32] }]);
    session
}

#[test]
fn replies_come_in_any_order_and_the_oldest_holds_the_window() {
    let mut session = up(3);
    for n in 1..=3 {
        assert_eq!(session.request(vec![n], false).unwrap(), u64::from(n));
    }
    for seq in [2, 3] {
        let answer = Ok(b"x".to_vec());
        assert_eq!(
            told(&mut session, kind::REPLY, 0, seq, b"x"),
            Some(Event::Reply { seq, answer })
        );
        assert!(matches!(session.request(vec![], false), Err(RelayError::Full(3))));
    }
    told(&mut session, kind::REPLY, 0, 1, b"");
    assert_eq!(session.in_flight(), 0);
    assert_eq!(session.request(vec![], true).unwrap(), 4);
    assert_eq!(sent(&mut session)[3], (kind::REQUEST, flag::REPEATABLE, 4, vec![]));
    assert!(matches!(session.request(vec![0; 1001], false), Err(RelayError::TooLong { .. })));
}

#[test]
fn what_has_no_reply_is_sent_again_with_its_number_and_its_cancel() {
    let mut session = up(8);
    for n in 1..=4 {
        session.request(vec![n], n == 3).unwrap();
    }
    session.cancel(4).unwrap();
    told(&mut session, kind::REPLY, 0, 2, b"");
    session.disconnected();
    assert!(session.to_send().is_empty());
    session.connected();
    assert_eq!(session.request(vec![5], false).unwrap(), 5);
    assert_eq!(sent(&mut session).len(), 1);
    let Some(Event::Welcome(greeting)) = told(&mut session, kind::WELCOME, 0, 0, &welcome(1, 4, 8))
    else {
        panic!()
    };
    assert!(greeting.is_kept);
    let request = |seq: u8, flags| (kind::REQUEST, flags, u64::from(seq), vec![seq]);
    assert_eq!(
        sent(&mut session),
        [
            request(1, flag::AGAIN),
            request(3, flag::AGAIN | flag::REPEATABLE),
            request(4, flag::AGAIN),
            (kind::CANCEL, 0, 4, vec![]),
            request(5, 0),
        ]
    );
    assert!(matches!(session.cancel(2), Err(RelayError::Unknown(2))));
    assert!(matches!(session.cancel(6), Err(RelayError::Unknown(6))));
}

#[test]
fn another_life_of_the_module_and_a_forgotten_client_are_noticed() {
    for (instance, known, kept) in [(1, 1, true), (2, 1, false), (1, 0, false)] {
        let mut session = up(8);
        session.request(vec![1], false).unwrap();
        session.connected();
        let event = told(&mut session, kind::WELCOME, 0, 0, &welcome(instance, known, 8));
        let Some(Event::Welcome(greeting)) = event else { panic!() };
        assert_eq!(greeting.is_kept, kept);
    }
}

#[test]
fn what_may_not_come_is_refused() {
    let mut twice = up(8);
    twice.request(vec![], false).unwrap();
    told(&mut twice, kind::REPLY, 0, 1, b"");
    for (kind, seq) in [(kind::REPLY, 1), (kind::REPLY, 9), (kind::WELCOME, 0), (kind::HELLO, 0)] {
        let mut session = up(8);
        push(&mut session, kind, 0, seq, b"");
        assert!(session.next_event().is_err(), "{kind} {seq}");
    }
    push(&mut twice, kind::REPLY, 0, 1, b"");
    assert!(twice.next_event().is_err());
    for (at, byte) in [(0, 0), (8, 9), (12, 65), (10, 2), (19, 255)] {
        let mut session = Session::new([7; 16], [0; MAX_NAME_BYTES]);
        session.connected();
        let mut body = welcome(1, 0, 8);
        body[at] = byte;
        push(&mut session, kind::WELCOME, 0, 0, &body);
        assert!(matches!(session.next_event(), Err(WireError::Welcome(_))), "{at}");
    }
}

#[test]
fn failures_and_goodbyes_have_a_code_and_a_text_that_is_fit_to_print() {
    let mut session = up(8);
    session.request(vec![], false).unwrap();
    let code = Code { code: U32::new(codes::STOPPED), reserved: U32::ZERO };
    let body = [code.as_bytes(), b"too\nslow"].concat();
    let failure = Failure { code: codes::STOPPED, text: "too slow".into() };
    let event = told(&mut session, kind::REPLY, flag::FAILED, 1, &body);
    assert_eq!(event, Some(Event::Reply { seq: 1, answer: Err(failure.clone()) }));
    assert_eq!(told(&mut session, kind::GOODBYE, 0, 0, &body), Some(Event::Goodbye(failure)));
    push(&mut session, kind::GOODBYE, 0, 0, b"short");
    assert!(session.next_event().is_err());
    assert!(session.ping(&[0; 65]).is_err());
    assert_eq!(FRAME_BYTES, 24);
}

proptest! {
    #[test]
    fn any_frames_do_no_harm(
        frames in prop::collection::vec(
            (0..10u16, any::<u16>(), 0..5u64, prop::collection::vec(any::<u8>(), 0..70)), 0..20),
    ) {
        let mut session = up(4);
        for _ in 0..3 {
            session.request(vec![1], false).unwrap();
        }
        for (kind, flags, seq, body) in frames {
            push(&mut session, kind, flags, seq, &body);
            if session.next_event().is_err() {
                session.connected();
            }
            prop_assert!(session.in_flight() <= 4);
        }
    }
}
