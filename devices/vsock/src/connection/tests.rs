//! The state machine: single steps, and random packets against a model of the credit.

use proptest::prelude::*;

use super::*;

const KEY: ConnectionKey = ConnectionKey { guest_port: 1, peer_cid: 2, peer_port: 3 };
const BUFFER: u32 = 8192;

fn packet(op: Op, len: u32) -> Header {
    Header { key: KEY, op, len, flags: 0, buf_alloc: 1000, fwd_cnt: 0 }
}

fn open() -> Connection {
    let mut c = Connection::incoming(&packet(Op::Request, 0), BUFFER, 99);
    c.accept();
    let (op, _) = c.take_op(true, 5, 0).unwrap();
    assert_eq!(op, Op::Response);
    c
}

#[test]
fn an_answer_opens_and_clears_the_deadline() {
    let mut c = Connection::outgoing(KEY, BUFFER, 99);
    assert_eq!((c.deadline_ns(), c.is_half_open()), (99, true));
    assert_eq!(c.take_op(true, 5, 0).map(|(op, _)| op), Some(Op::Request));
    assert_eq!(c.next_op(true), None);
    assert_eq!(c.on_packet(&packet(Op::Response, 0)), Event::Accepted);
    assert_eq!((c.phase(), c.deadline_ns()), (Phase::Open, NEVER_NS));
}

#[test]
fn an_answer_to_nothing_is_a_violation() {
    let mut c = Connection::outgoing(KEY, BUFFER, 99);
    assert!(matches!(c.on_packet(&packet(Op::Response, 0)), Event::Violation(_)));
    // The guest was never asked: it is told nothing.
    c.abort();
    assert_eq!(c.next_op(true), None);
}

#[test]
fn every_packet_in_the_wrong_phase_is_a_violation() {
    for op in [Op::Rw, Op::Shutdown, Op::CreditRequest, Op::Response] {
        let mut c = Connection::incoming(&packet(Op::Request, 0), BUFFER, 99);
        assert!(matches!(c.on_packet(&packet(op, 0)), Event::Violation(_)), "{op:?} answering");
    }
    for op in [Op::Request, Op::Response] {
        assert!(matches!(open().on_packet(&packet(op, 0)), Event::Violation(_)), "{op:?} open");
    }
}

#[test]
fn data_beyond_our_credit_is_a_violation() {
    let mut c = open();
    assert_eq!(c.on_packet(&packet(Op::Rw, BUFFER)), Event::Data(BUFFER));
    assert!(matches!(c.on_packet(&packet(Op::Rw, 1)), Event::Violation(_)));
    let mut c = open();
    c.on_packet(&packet(Op::Rw, BUFFER));
    c.note_forwarded(10);
    assert_eq!(c.on_packet(&packet(Op::Rw, 10)), Event::Data(10));
}

#[test]
fn data_after_the_guest_shut_that_half_is_a_violation() {
    let mut c = open();
    let end = Header { flags: u32::from(SHUT_SEND), ..packet(Op::Shutdown, 0) };
    assert_eq!(c.on_packet(&end), Event::Shutdown(SHUT_SEND));
    assert_eq!(c.on_packet(&end), Event::Nothing);
    assert!(matches!(c.on_packet(&packet(Op::Rw, 1)), Event::Violation(_)));
}

#[test]
fn credit_is_told_when_half_the_buffer_is_free_again() {
    let mut c = open();
    c.on_packet(&packet(Op::Rw, BUFFER));
    c.note_forwarded(BUFFER / 2 - 1);
    assert_eq!(c.next_op(true), None);
    c.note_forwarded(1);
    let (op, header) = c.take_op(true, 5, 0).unwrap();
    assert_eq!((op, header.fwd_cnt.get()), (Op::CreditUpdate, BUFFER / 2));
    assert_eq!(c.next_op(true), None);
}

#[test]
fn the_guests_credit_is_kept_and_asked_for_once() {
    let mut c = open();
    assert_eq!(c.send_room(), 1000);
    c.note_sent(1000);
    assert_eq!(c.send_room(), 0);
    c.request_credit();
    assert_eq!(c.take_op(true, 5, 0).map(|(op, _)| op), Some(Op::CreditRequest));
    c.request_credit();
    assert_eq!(c.next_op(true), None);
    c.on_packet(&Header { fwd_cnt: 400, ..packet(Op::CreditUpdate, 0) });
    assert_eq!(c.send_room(), 400);
    // An older count, and one of bytes that were never sent, raise nothing.
    for fwd_cnt in [100, 1001, u32::MAX] {
        c.on_packet(&Header { fwd_cnt, ..packet(Op::CreditUpdate, 0) });
        assert_eq!(c.send_room(), 400, "fwd_cnt {fwd_cnt}");
    }
    // A buffer that shrank below what is under way gives none.
    c.on_packet(&Header { buf_alloc: 10, fwd_cnt: 400, ..packet(Op::CreditUpdate, 0) });
    assert_eq!(c.send_room(), 0);
}

#[test]
fn the_end_is_told_after_the_bytes() {
    let mut c = open();
    c.far_shutdown(SHUT_BOTH);
    let (op, header) = c.take_op(false, 5, 0).unwrap();
    assert_eq!((op, header.flags.get()), (Op::Shutdown, u32::from(SHUT_RECEIVE)));
    assert_eq!(c.next_op(false), None);
    assert!(c.may_send());
    let (op, header) = c.take_op(true, 5, 7).unwrap();
    assert_eq!((op, header.flags.get()), (Op::Shutdown, u32::from(SHUT_SEND)));
    assert!(!c.may_send());
    assert_eq!(c.deadline_ns(), 7 + CLOSE_TIMEOUT_NS);
}

#[test]
fn both_halves_shut_by_the_guest_are_confirmed_with_a_reset() {
    let mut c = open();
    c.on_packet(&packet(Op::Rw, 100));
    let end = Header { flags: u32::from(SHUT_BOTH), ..packet(Op::Shutdown, 0) };
    assert_eq!(c.on_packet(&end), Event::Shutdown(SHUT_BOTH));
    assert_eq!((c.phase(), c.unread()), (Phase::Closing, 100));
    assert_eq!(c.take_op(true, 5, 0).map(|(op, _)| op), Some(Op::Rst));
    assert_eq!(c.next_op(true), None);
    c.note_forwarded(100);
    assert_eq!(c.next_op(true), None);
}

/// An event that may happen to a connection.
#[derive(Debug, Clone)]
enum Step {
    Packet { op: Op, len: u32, flags: u32, buf_alloc: u32, fwd_cnt: u32 },
    Honest { taken: u32 },
    Accept,
    PassOn(u32),
    Send(u32),
    FarShut(u8),
    WantCredit,
    TakeOp(bool),
    Abort,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => Just(Op::Request),
        1 => Just(Op::Response),
        1 => Just(Op::Shutdown),
        3 => Just(Op::Rw),
        1 => Just(Op::CreditUpdate),
        1 => Just(Op::CreditRequest),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (op(), 0..BUFFER + 2, 0..5u32, any::<u32>(), any::<u32>()).prop_map(
            |(op, len, flags, buf_alloc, fwd_cnt)| {
                Step::Packet { op, len, flags, buf_alloc, fwd_cnt }
            }
        ),
        4 => any::<u32>().prop_map(|taken| Step::Honest { taken }),
        1 => Just(Step::Accept),
        4 => any::<u32>().prop_map(Step::PassOn),
        4 => any::<u32>().prop_map(Step::Send),
        1 => (0..4u8).prop_map(Step::FarShut),
        2 => Just(Step::WantCredit),
        6 => any::<bool>().prop_map(Step::TakeOp),
        1 => Just(Step::Abort),
    ]
}

/// The sums that the connection keeps modulo 2^32, kept in 64 bits.
#[derive(Default)]
struct Model {
    accepted: u64,
    forwarded: u64,
    sent: u64,
    taken: u64,
    /// The guest lied about its counts: only our own limits can be checked.
    lied: bool,
}

fn apply(c: &mut Connection, m: &mut Model, step: Step) {
    match step {
        Step::Packet { op, len, flags, buf_alloc, fwd_cnt } => {
            m.lied = true;
            if let Event::Data(n) =
                c.on_packet(&Header { key: KEY, op, len, flags, buf_alloc, fwd_cnt })
            {
                assert_eq!(n, len);
                m.accepted += u64::from(n);
            }
        }
        Step::Honest { taken } => {
            let under_way = m.sent - m.taken;
            m.taken += u64::from(taken) % (under_way + 1);
            let h = Header { fwd_cnt: m.taken as u32, ..packet(Op::CreditUpdate, 0) };
            assert_eq!(c.on_packet(&h), Event::Nothing);
        }
        Step::Accept => c.accept(),
        Step::PassOn(n) => {
            let n = n.checked_rem(c.unread() + 1).unwrap_or(0);
            c.note_forwarded(n);
            m.forwarded += u64::from(n);
        }
        Step::Send(n) => {
            let room = c.send_room();
            let n = n.checked_rem(room.saturating_add(1)).unwrap_or(0);
            c.note_sent(n);
            m.sent += u64::from(n);
        }
        Step::FarShut(flags) => c.far_shutdown(flags),
        Step::WantCredit => c.request_credit(),
        Step::TakeOp(far_empty) => {
            let next = c.next_op(far_empty);
            let taken = c.take_op(far_empty, 5, 1);
            assert_eq!(next, taken.map(|(op, _)| op));
            if let Some((_, header)) = taken {
                assert_eq!((header.buf_alloc.get(), header.len.get()), (BUFFER, 0));
            }
        }
        Step::Abort => {
            c.abort();
            m.forwarded = m.accepted;
        }
    }
}

proptest! {
    #[test]
    fn random_packets_never_break_the_credit(
        incoming in any::<bool>(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut c = if incoming {
            Connection::incoming(&packet(Op::Request, 0), BUFFER, 9)
        } else {
            Connection::outgoing(KEY, BUFFER, 9)
        };
        let mut m = Model::default();
        for step in steps {
            apply(&mut c, &mut m, step);
            prop_assert!(c.unread() <= BUFFER, "the buffer can overflow");
            prop_assert_eq!(u64::from(c.unread()), m.accepted - m.forwarded);
            if !m.lied {
                prop_assert!(m.sent - m.taken <= 1000, "the guest's credit was exceeded");
            }
        }
        // However it went, the guest can always be told that it is over, once.
        c.abort();
        let mut resets = 0;
        while let Some((op, _)) = c.take_op(true, 5, 2) {
            prop_assert_eq!(op, Op::Rst);
            resets += 1;
        }
        prop_assert!(resets <= 1);
    }
}
