//! Edge cases by hand; the model has the rest.

use super::*;
use crate::scenario::*;
use crate::segment::PSH;
use crate::takeover::Snapshot;
use crate::testing::{Build, mirror, read, sacks, timestamps};

/// The peer's first number and clock are in the upper half of their spaces.
#[test]
fn the_twin_says_what_the_guest_said_last() {
    for guest_connects in [false, true] {
        let mut case = Scenario::open(guest_connects);
        let taken = case.snapshot(0);
        assert_eq!((taken.send_seq, taken.receive_seq), (OURS, THEIRS));
        assert_eq!((taken.acked_seq, taken.send_window, taken.receive_window), (OURS, 777, 1000));
        case.flow.start(TOKEN, &taken, 1000).unwrap();
        let left = case.twin(ACK | PSH, 0, 100).unwrap();
        assert_eq!((left.seq, left.ack, left.window, left.off_by), (OURS, THEIRS, 1000, 0));
        assert_eq!(left.timestamps, Some((case.clocks[0].wrapping_add(500), case.clocks[1])));
    }
}

/// Before the guest's acknowledgement, the peer's answer has all that there is.
#[test]
fn the_answer_to_a_syn_has_an_unscaled_window() {
    let mut case = Scenario::open(true);
    let options = vec![1, 3, 3, 5];
    let frame = Build::new(case.key, SYN, ISS, 0).frame();
    case.flow = Flow::begin(&frame, &Segment::parse(&frame, frame.len()).unwrap());
    let new = Build::new(mirror(&case.key), SYN | ACK, IRS, OURS);
    case.peer_raw(Build { options, window: 64_000, ..new.clone() });
    assert_eq!(case.flow.send.window, 2000);
    // Forged ones, of another attempt or too late, say nothing.
    case.peer_raw(Build { window: 1, ack: OURS + 5, ..new.clone() });
    case.guest(0, 0, THEIRS, 0);
    case.peer_raw(Build { seq: 5, window: 1, ..new });
    assert_eq!((case.flow.send.window, case.flow.receive.end), (2000, THEIRS));
}

#[test]
fn a_reset_of_the_peer_is_told_in_each_phase() {
    let mut case = Scenario::open(false);
    assert_eq!(case.flow.snapshot(10, TOKEN), Ok(Snapshot::Waiting));
    case.peer(RST, THEIRS, 0, 0);
    assert_eq!((case.told(), case.flow.reset), (vec![FlowEvent::Reset], true));
    let mut case = Scenario::piped(50);
    let (to, guest, _) = case.peer(RST, THEIRS, 120, 0);
    assert_eq!((to, case.told()), (GUEST, vec![FlowEvent::Reset]));
    assert_eq!((guest.flags & RST, guest.ack), (RST, ours(100)));
    let mut case = Scenario::shifted(50);
    let (to, guest, _) = case.peer(RST, THEIRS, 150, 0);
    assert_eq!((to, case.told(), case.flow.reset), (GUEST, vec![], true));
    assert_eq!((guest.seq, guest.ack), (THEIRS, ours(100)));
}

/// A stranger who does not know the numbers can reset nothing (RFC 5961): the guest gets it, and
/// judges.
#[test]
fn a_blind_reset_is_not_believed() {
    let mut case = Scenario::piped(50);
    case.peer(PSH, THEIRS, 100, 30);
    for seq in [THEIRS - 1, THEIRS + 31, THEIRS + 900, 0, IRS ^ 0x8000_0000] {
        assert_eq!(case.peer(RST, seq, 100, 0).0, GUEST);
        assert_eq!((case.told(), case.flow.reset), (vec![], false), "{seq:x}");
    }
    case.peer(RST, THEIRS + 30, 100, 0);
    assert_eq!(case.told(), [FlowEvent::Reset]);
}

/// Nor acknowledge anything to the twin: its sequence number is looked at here, not there.
#[test]
fn what_the_guest_would_not_accept_tells_the_twin_nothing() {
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 50).unwrap();
    // The window: 1000, scaled by 2.
    for seq in [THEIRS - 1, THEIRS + 4001, 0, IRS ^ 0x8000_0000] {
        assert_eq!(case.peer(0, seq, 150, 0).0, GUEST, "{seq:x}");
    }
    assert_eq!((case.told(), case.flow.send.acked), (vec![], ours(100)));
    // What was never sent cannot be acknowledged.
    assert_eq!(case.peer(0, THEIRS, 151, 0).0, Shares::NOBODY);
    let (to, guest, _) = case.peer(0, THEIRS, 151, 5);
    assert_eq!((to, guest.ack), (GUEST, ours(100)));
    assert_eq!(case.peer(0, THEIRS + 4000, 150, 0).0, TWIN);
    assert_eq!(case.told(), [FlowEvent::Acknowledged]);
}

#[test]
fn a_damaged_segment_tells_nothing() {
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 50).unwrap();
    let before = format!("{:?}", case.flow);
    for flags in [ACK, ACK | RST, ACK | FIN, ACK | SYN] {
        let frame = Build::new(mirror(&case.key), flags, THEIRS, ours(150)).frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let to = case.flow.peer_sends(&frame, &segment, Checksum::Wrong, &mut |_, _| panic!());
        assert_eq!((to, &format!("{:?}", case.flow)), (GUEST, &before));
    }
}

#[test]
fn a_reset_of_the_guest_is_told_in_each_phase() {
    let mut case = Scenario::open(false);
    assert_eq!(case.flow.snapshot(10, TOKEN), Ok(Snapshot::Waiting));
    assert_eq!(case.guest(RST, 0, THEIRS, 0).0, GuestVerdict::Pass);
    assert_eq!(case.told(), [FlowEvent::Reset]);
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 30).unwrap();
    let (to, left) = case.guest(RST, 100, THEIRS, 0);
    assert_eq!(
        (to, left.seq, case.told()),
        (GuestVerdict::Pass, ours(130), vec![FlowEvent::Reset])
    );
    let mut case = Scenario::shifted(50);
    let (to, left) = case.guest(RST, 100, THEIRS, 0);
    assert_eq!((to, left.seq, case.told()), (GuestVerdict::Pass, ours(150), vec![]));
}

#[test]
fn data_and_the_end_of_the_peer_reach_the_guest_during_a_pipe() {
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 50).unwrap();
    let (to, guest, twin) = case.peer(PSH | FIN, THEIRS, 130, 20);
    let twin = twin.unwrap();
    assert_eq!(to, BOTH);
    assert_eq!((guest.ack, guest.payload.len(), guest.flags), (ours(100), 20, ACK | PSH | FIN));
    assert_eq!((twin.ack, twin.payload.len(), twin.flags), (ours(130), 0, ACK));
    assert_eq!((twin.seq, twin.off_by, guest.off_by), (THEIRS, 0, 0));
    // The guest's acknowledgement goes on, and the twin's segments say the same.
    let (to, left) = case.guest(0, 100, THEIRS + 21, 0);
    assert_eq!((to, left.seq, left.ack), (GuestVerdict::Pass, ours(150), THEIRS + 21));
    assert_eq!(case.twin(ACK, 130, 20).unwrap().ack, THEIRS + 21);
    // The same again: the guest answers it; it does not wake for a pure acknowledgement.
    assert_eq!(case.peer(FIN, THEIRS + 20, 130, 0).0, BOTH);
    assert_eq!(case.peer(0, THEIRS + 21, 150, 0).0, TWIN);
    assert_eq!(case.told(), [FlowEvent::Acknowledged]);
}

#[test]
fn what_the_guest_writes_during_a_pipe_waits() {
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 50).unwrap();
    let (to, left) = case.guest(PSH, 100, THEIRS, 70);
    assert!(matches!(to, GuestVerdict::Bare(_)));
    assert_eq!((left.seq, left.payload.len(), left.flags, left.off_by), (ours(150), 0, ACK, 0));
    // Its end, too.
    let (to, left) = case.guest(FIN, 170, THEIRS, 0);
    assert!(matches!(to, GuestVerdict::Bare(_)));
    assert_eq!((left.flags, case.flow.send.is_closed), (ACK, false));
    // Resent together with old bytes: those go on, the rest waits.
    let (to, left) = case.guest(PSH, 90, THEIRS, 80);
    assert!(matches!(to, GuestVerdict::Trimmed(_)));
    assert_eq!((left.seq, left.payload.len(), left.flags), (ours(90), 10, ACK));
    // So the guest has not heard that they are acknowledged.
    assert_eq!(case.peer(0, THEIRS, 130, 0).0, BOTH);
    assert_eq!(case.peer(0, THEIRS, 150, 0).0, TWIN);
    // After the pipe it comes behind the twin's.
    case.flow.finish(TOKEN, 50).unwrap();
    let (to, left) = case.guest(PSH, 100, THEIRS, 70);
    assert_eq!((to, left.seq, left.payload.len()), (GuestVerdict::Pass, ours(150), 70));
    let (_, guest, _) = case.peer(0, THEIRS, 220, 0);
    assert_eq!((guest.ack, guest.timestamps.unwrap().0), (ours(170), case.clocks[1]));
}

#[test]
fn a_probe_of_the_guest_is_answered_in_its_own_numbers() {
    // In the second pipe, so that all is shifted.
    let mut case = Scenario::shifted(50);
    case.peer(PSH, THEIRS, 150, 9);
    let taken = case.snapshot(100);
    assert_eq!(taken.send_seq, ours(150));
    case.flow.start(TOKEN, &taken, 60).unwrap();
    case.twin(ACK, 150, 60).unwrap();
    for len in [0, 1] {
        let options = timestamps(case.clocks[0].wrapping_add(3), 4);
        let new = Build::new(case.key, ACK, ours(99), THEIRS + 9);
        let probe = Build { payload: vec![0; len], options, window: 55, ..new };
        let (to, mut frame, segment) = case.guest_raw(probe);
        assert_eq!(to, GuestVerdict::Answer);
        let with = case.flow.answer_to_probe(&frame, &segment);
        let len = segment.answer(&mut frame, &with);
        let answer = read(&frame[..len]);
        assert_eq!((answer.seq, answer.ack, answer.flags), (THEIRS + 9, ours(100), ACK));
        assert_eq!((answer.window, answer.off_by, answer.payload.len()), (777, 0, 0));
        let stamps = (case.clocks[1], case.clocks[0].wrapping_add(3));
        assert_eq!(answer.timestamps, Some(stamps));
    }
    // With bytes of its own on their way it is no probe, but a resend.
    let mut case = Scenario::open(false);
    case.guest(PSH, 0, THEIRS, 100);
    let taken = case.snapshot(100);
    case.flow.start(TOKEN, &taken, 60).unwrap();
    assert_eq!(case.guest(PSH, 99, THEIRS, 1).0, GuestVerdict::Pass);
}

/// The guest answers it, and the answer stands behind what the twin has sent.
#[test]
fn a_probe_of_the_peer_reaches_the_guest() {
    let mut case = Scenario::piped(50);
    case.twin(ACK, 100, 20).unwrap();
    let (to, guest, _) = case.peer(0, THEIRS - 1, 120, 0);
    assert_eq!((to, guest.ack), (GUEST, ours(100)));
    assert_eq!(case.guest(0, 100, THEIRS, 0).1.seq, ours(120));
}

#[test]
fn selective_acknowledgements_are_the_guests_own() {
    let mut case = Scenario::shifted(50);
    let mut heard = |blocks: &[(u32, u32)]| {
        let blocks: Vec<_> = blocks.iter().map(|(l, r)| (ours(*l), ours(*r))).collect();
        let new = Build::new(mirror(&case.key), ACK, THEIRS, ours(150));
        case.peer_raw(Build { options: sacks(&blocks), ..new }).1.sacks
    };
    assert_eq!(heard(&[(160, 170), (190, 200)]), [(ours(110), ours(120)), (ours(140), ours(150))]);
    assert_eq!(heard(&[(150, 160)]), [(ours(100), ours(110))]);
    // Of the twin's bytes, or across.
    assert_eq!(heard(&[(120, 130)]), []);
    assert_eq!(heard(&[(149, 160)]), []);
    // During a pipe those of the twin are not for the guest; its own are.
    let mut case = Scenario::open(false);
    case.guest(PSH, 0, THEIRS, 100);
    let taken = case.snapshot(100);
    case.flow.start(TOKEN, &taken, 60).unwrap();
    let mut heard = |l, r| {
        let new = Build::new(mirror(&case.key), ACK, THEIRS, ours(0));
        case.peer_raw(Build { options: sacks(&[(ours(l), ours(r))]), ..new }).1.sacks
    };
    assert_eq!(heard(50, 100), [(ours(50), ours(100))]);
    assert_eq!(heard(50, 101), []);
    assert_eq!(heard(110, 120), []);
}

/// Bytes that a guest sends by itself are remembered for the comparison of blocks only so far back.
#[test]
fn blocks_are_known_after_gigabytes() {
    let mut case = Scenario::shifted(50);
    for gigabytes in 1..=5_u32 {
        let at = gigabytes.wrapping_mul(1 << 30);
        case.guest(PSH, at, THEIRS, 100);
        case.peer(0, THEIRS, at.wrapping_add(50), 0);
        let block = (ours(at.wrapping_add(100)), ours(at.wrapping_add(150)));
        let new = Build::new(mirror(&case.key), ACK, THEIRS, ours(at.wrapping_add(50)));
        let (_, guest, _) = case.peer_raw(Build { options: sacks(&[block]), ..new });
        assert_eq!(guest.sacks, [(ours(at.wrapping_add(50)), ours(at.wrapping_add(100)))]);
    }
}

#[test]
fn the_guests_clock_never_goes_back_behind_its_twins() {
    let mut case = Scenario::shifted(50);
    let twins = case.clocks[0].wrapping_add(500);
    let (_, left) = case.guest(PSH, 100, THEIRS, 5);
    assert_eq!(left.timestamps.unwrap().0, twins);
    case.clocks[0] = case.clocks[0].wrapping_add(3);
    let (_, left) = case.guest(PSH, 105, THEIRS, 5);
    assert_eq!(left.timestamps.unwrap().0, twins.wrapping_add(3));
    // And the echo comes back as the guest's own.
    let new = Build::new(mirror(&case.key), ACK, THEIRS, ours(160));
    let options = timestamps(case.clocks[1], twins.wrapping_add(3));
    let (_, guest, _) = case.peer_raw(Build { options, ..new });
    assert_eq!(guest.timestamps.unwrap().1, case.clocks[0]);
}

#[test]
fn only_data_and_acknowledgements_of_a_twin_leave() {
    let mut case = Scenario::piped(50);
    for (flags, at) in [(RST | ACK, 100), (FIN | ACK, 100), (SYN | ACK, 100), (PSH, 100), (ACK, 98)]
    {
        assert!(case.twin(flags, at, 0).is_none(), "{flags} {at}");
    }
    assert_eq!(case.flow.send.end, ours(100));
    assert!(case.twin(ACK, 99, 0).is_some());
    // Congestion is what the guest saw of it.
    assert_eq!(case.twin(ACK | ECE, 100, 0).unwrap().flags, ACK);
    case.guest(ECE, 100, THEIRS, 0);
    assert_eq!(case.twin(ACK | ECE, 100, 0).unwrap().flags, ACK | ECE);
    case.flow.finish(TOKEN, 0).unwrap();
    assert!(case.twin(ACK, 100, 0).is_none());
}

/// The peer uses its port again, and nobody listens any more: of a reset in shifted numbers it
/// would believe nothing, and wait for minutes. But a SYN that comes twice is no new connection's:
/// the guest of a peer that never sends a byte resets with just that number.
#[test]
fn a_new_connection_is_refused_in_its_own_numbers() {
    for (syn, ack, is_refusal) in [(77, 79, false), (77, 78, true), (IRS, THEIRS, false)] {
        let mut case = Scenario::open(false);
        (case.flow.shift.send, case.flow.shift.receive) = (500, 1000);
        let syn = Build::new(mirror(&case.key), SYN, syn, 0).frame();
        let segment = Segment::parse(&syn, syn.len()).unwrap();
        let to = case.flow.peer_sends(&syn, &segment, Checksum::Right, &mut |_, _| {});
        assert_eq!(to, GUEST);
        let mut reset = Build::new(case.key, RST | ACK, 0, ack).frame();
        let before = reset.clone();
        let segment = Segment::parse(&reset, reset.len()).unwrap();
        let answer = case.flow.guest_sends(&mut reset, &segment, true, &mut |_, _| {});
        assert_eq!((answer, reset == before), (GuestVerdict::Pass, is_refusal), "{ack}");
        assert_eq!(case.flow.reset, !is_refusal, "{ack}");
    }
}
