//! Rules by hand; the model has the rest.

use super::*;
use crate::ReceiveStart;
use crate::flow::Flow;
use crate::journal::Record;
use crate::scenario::*;
use crate::segment::PSH;
use crate::takeover::Resets;
use crate::testing::{Build, Read, mirror, read, sacks};
use crate::verdict::{Checksum, GuestVerdict};

/// Shares where a twin that receives gets all.
const WHOLE: Shares = Shares { guest: Share::Nothing, twin: Share::Whole };

/// Place and length of what the peer sent, as somebody finds it.
fn piece(read: &Read) -> (u32, usize) {
    (read.seq, read.payload.len())
}

#[test]
fn the_stream_is_split_at_both_ends_of_the_twins_part() {
    let mut case = Scenario::receiving(500);
    // Old bytes are the guest's.
    let (to, guest, _) = case.peer(PSH, theirs(20), 0, 80);
    assert_eq!((to, piece(&guest)), (GUEST, (theirs(20), 80)));
    // Across the beginning: each has its part; the twin's kernel knows what is old.
    let (to, guest, twin) = case.peer(PSH, theirs(90), 0, 30);
    assert_eq!(to, Shares { guest: Share::First(10), twin: Share::Whole });
    let twin = twin.unwrap();
    assert_eq!((piece(&guest), piece(&twin)), ((theirs(90), 10), (theirs(90), 30)));
    assert_eq!((guest.off_by, twin.off_by, guest.flags, twin.flags), (0, 0, ACK, ACK | PSH));
    let (to, _, twin) = case.peer(PSH, theirs(120), 0, 300);
    let twin = twin.unwrap();
    assert_eq!((to, piece(&twin), twin.ack, twin.off_by), (WHOLE, (theirs(120), 300), OURS, 0));
    // Across the end: the rest comes again.
    let (to, _, twin) = case.peer(PSH, theirs(420), 0, 300);
    assert_eq!(to, Shares { guest: Share::Nothing, twin: Share::First(180) });
    let twin = twin.unwrap();
    assert_eq!((piece(&twin), twin.flags, twin.off_by), ((theirs(420), 180), ACK, 0));
    assert_eq!(case.peer(PSH, theirs(600), 0, 50).0, Shares::NOBODY);
    // With all that is in front of it, it is the guest's, at its own numbers.
    assert_eq!(case.twin_acks(600, 900, &[]).unwrap().ack, theirs(600));
    let (to, guest, _) = case.peer(PSH, theirs(600), 0, 50);
    assert_eq!((to, piece(&guest), guest.off_by), (GUEST, (theirs(100), 50), 0));
    // Also behind old bytes of the twin's, which are old at the guest, too.
    assert_eq!(piece(&case.peer(PSH, theirs(590), 0, 100).1), (theirs(90), 100));
    let (to, left) = case.guest(0, 0, theirs(150), 0);
    assert_eq!((to, left.ack, left.window), (GuestVerdict::Pass, theirs(650), 1000));
}

/// Bytes that passed to the guest after the twin's numbers were taken are the guest's.
#[test]
fn the_twins_part_begins_behind_what_has_passed() {
    let mut case = Scenario::open(false);
    case.peer(PSH, THEIRS, 0, 100);
    case.guest(0, 0, theirs(100), 0);
    let taken = case.flow.receive_snapshot(100, TOKEN).unwrap();
    assert_eq!((taken.receive_seq, taken.send_seq), (theirs(100), OURS));
    case.peer(PSH, theirs(100), 0, 40);
    case.guest(PSH, 0, theirs(140), 25);
    let start = case.flow.receive_start(TOKEN, &taken, 100, 500);
    assert_eq!(start, Ok(ReceiveStart { own_bytes: 40, twin_bytes: 460 }));
    let (to, _, twin) = case.peer(PSH, theirs(140), 25, 60);
    let twin = twin.unwrap();
    // It has sent nothing of what the guest has sent.
    assert_eq!((to.twin, piece(&twin), twin.ack), (Share::Whole, (theirs(100), 60), OURS));
    let left = case.twin_acks(200, 700, &[(230, 260)]).unwrap();
    assert_eq!((left.ack, left.seq, left.window), (theirs(200), ours(25), 700));
    assert_eq!(left.sacks, [(theirs(230), theirs(260))]);
    // Nothing is left for a twin.
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 40);
    let start = case.flow.receive_start(TOKEN, &taken, 0, 40);
    assert_eq!(start, Ok(ReceiveStart { own_bytes: 40, twin_bytes: 0 }));
    assert!(!case.flow.is_needed());
}

#[test]
fn nothing_is_acknowledged_before_all_in_front_of_it() {
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.guest(0, 0, theirs(60), 0);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    // The guest lacks some of its own: the twin waits, the guest says what it has, and its window.
    assert!(case.twin_acks(300, 900, &[]).is_none());
    let (_, left) = case.guest(PSH, 0, theirs(60), 10);
    assert_eq!((left.ack, left.window), (theirs(60), 1000));
    let (_, left) = case.guest(0, 10, theirs(100), 0);
    assert_eq!((left.ack, left.window, left.seq), (theirs(300), 900, ours(10)));
    // From now on the twin, whoever speaks.
    assert_eq!(case.twin_acks(400, 800, &[]).unwrap().seq, ours(10));
    let (_, left) = case.guest(PSH, 10, theirs(100), 10);
    assert_eq!((left.ack, left.window, left.off_by), (theirs(400), 800, 0));
    // Never back.
    assert!(case.twin_acks(399, 800, &[]).is_none());
    // Nor beyond its part.
    assert!(case.twin_acks(601, 800, &[]).is_none());
    let left = case.twin_acks(600, 0, &[]).unwrap();
    assert_eq!((left.ack, left.window), (theirs(600), 1000));
    // It has no say any more.
    assert!(case.twin_acks(600, 5, &[]).is_none());
    let (_, left) = case.guest(PSH, 20, theirs(100), 10);
    assert_eq!((left.ack, left.window), (theirs(600), 1000));
}

/// The peer's clock is told by who heard it last, and what a guest invents is not passed on.
#[test]
fn the_guest_speaks_for_the_twin() {
    let mut case = Scenario::receiving(500);
    let clock = case.clocks[1];
    case.clocks[1] = clock.wrapping_add(70);
    case.twin_acks(200, 900, &[]).unwrap();
    case.clocks[1] = clock;
    let (_, left) = case.guest(PSH, 0, theirs(100), 10);
    assert_eq!(left.timestamps.unwrap().1, clock.wrapping_add(70));
    case.clocks[1] = clock.wrapping_add(90);
    let (_, left) = case.guest(PSH, 10, theirs(100), 10);
    assert_eq!(left.timestamps.unwrap().1, clock.wrapping_add(90));
    let mut heard = |l, r| {
        let blocks = sacks(&[(theirs(l), theirs(r))]);
        let new = Build::new(case.key, ACK, ours(20), theirs(100));
        read(&case.guest_raw(Build { options: blocks, ..new }).1).sacks
    };
    assert_eq!(heard(40, 100), [(theirs(40), theirs(100))]);
    assert_eq!((heard(40, 101), heard(100, 200)), (vec![], vec![]));
}

/// The twin is done before the guest: bytes behind it are known at the guest by their own numbers.
#[test]
fn the_guest_may_be_the_last() {
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.guest(0, 0, theirs(60), 0);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    assert!(case.twin_acks(600, 900, &[]).is_none());
    assert_eq!(piece(&case.peer(PSH, theirs(600), 0, 50).1), (theirs(100), 50));
    assert_eq!(piece(&case.peer(PSH, theirs(60), 0, 40).1), (theirs(60), 40));
    // Across both: not in one piece.
    let (to, guest, _) = case.peer(PSH, theirs(60), 0, 700);
    assert_eq!((to.guest, piece(&guest)), (Share::First(40), (theirs(60), 40)));
    let blocks = sacks(&[(theirs(100), theirs(150)), (theirs(70), theirs(80))]);
    let heard =
        case.guest_raw(Build { options: blocks, ..Build::new(case.key, ACK, OURS, theirs(60)) });
    let heard = read(&heard.1);
    assert_eq!(heard.sacks, [(theirs(600), theirs(650)), (theirs(70), theirs(80))]);
    assert_eq!(heard.ack, theirs(60));
    // Its end is not the pipe's.
    assert_eq!(case.flow.receive_finish(TOKEN, 500), Ok(()));
    assert_eq!(case.flow.receive_snapshot(60, TOKEN), Err(FlowError::Busy));
    assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Busy));
    let (_, left) = case.guest(0, 0, theirs(150), 0);
    assert_eq!((left.ack, case.flow.shift.receive), (theirs(650), 500));
    assert!(case.flow.receive.twin.is_none());
}

/// The agent has read what its kernel has not acknowledged: the connection is free for the next
/// pipe at once, and an old acknowledgement changes nothing.
#[test]
fn the_agent_speaks_for_the_guest() {
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.guest(0, 0, theirs(60), 0);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    case.peer(PSH, theirs(100), 0, 500);
    assert!(case.twin_acks(300, 900, &[]).is_none());
    assert_eq!(case.flow.receive_own(TOKEN + 1), Err(FlowError::Unknown));
    assert_eq!(case.flow.receive_own(TOKEN), Ok(()));
    assert_eq!((case.flow.receive.wire_ack(), case.flow.receive.wire_window()), (theirs(300), 900));
    assert_eq!(case.twin_acks(600, 0, &[]).unwrap().ack, theirs(600));
    assert_eq!(case.flow.receive_own(TOKEN), Ok(()));
    assert_eq!(case.flow.receive_finish(TOKEN, 500), Ok(()));
    assert!(case.flow.receive.twin.is_none());
    assert_eq!((case.flow.receive.wire_ack(), case.flow.shift.receive), (theirs(600), 500));
    case.guest(0, 0, theirs(60), 0);
    assert_eq!(case.flow.receive.wire_ack(), theirs(600));
    let (_, left) = case.guest(0, 0, theirs(100), 0);
    assert_eq!(left.ack, theirs(600));
    assert!(case.flow.receive_snapshot(100, TOKEN).is_ok());
}

#[test]
fn the_guest_hears_of_its_own_bytes() {
    let mut case = Scenario::receiving(5000);
    case.guest(PSH, 0, theirs(100), 200);
    let news = Shares { guest: Share::Bare, twin: Share::Whole };
    let (to, guest, twin) = case.peer(PSH, theirs(100), 50, 30);
    assert_eq!((to, piece(&guest), guest.ack, guest.off_by), (news, (theirs(100), 0), ours(50), 0));
    assert_eq!((guest.flags, twin.unwrap().ack), (ACK, OURS));
    // Nothing new: it sleeps, and nobody looks at the checksum.
    let segment = |case: &Scenario, at, acks, window| {
        let new = Build::new(mirror(&case.key), ACK, theirs(at), ours(acks));
        let frame = Build { payload: vec![2; 30], window, ..new }.frame();
        Segment::parse(&frame, frame.len()).unwrap()
    };
    assert!(!case.flow.wants_checksum(&segment(&case, 130, 50, 777)));
    assert_eq!(case.peer(PSH, theirs(130), 50, 30).0, WHOLE);
    for (at, acks, window) in [(160, 51, 777), (160, 50, 778), (90, 50, 777), (5090, 50, 777)] {
        assert!(
            case.flow.wants_checksum(&segment(&case, at, acks, window)),
            "{at} {acks} {window}"
        );
    }
    // A pure acknowledgement is the guest's, at the place where it waits.
    let (to, guest, _) = case.peer(0, theirs(160), 50, 0);
    assert_eq!((to, guest.seq, guest.ack), (GUEST, theirs(100), ours(50)));
    // With blocks, or another window, it is news without new numbers.
    let blocks = sacks(&[(ours(100), ours(150))]);
    let new = Build::new(mirror(&case.key), ACK, theirs(160), ours(50));
    let with = Build { options: blocks, payload: vec![2; 9], window: 777, ..new.clone() };
    let (to, guest, twin) = case.peer_raw(with);
    assert_eq!((to, guest.sacks), (news, vec![(ours(100), ours(150))]));
    assert_eq!(twin.unwrap().sacks, []);
    let wider = Build { payload: vec![2; 9], window: 800, ..new };
    assert_eq!((case.peer_raw(wider.clone()).0, case.peer_raw(wider).0), (news, WHOLE));
    // What was never sent is not acknowledged, and its segment is nobody's.
    assert_eq!(case.peer(PSH, theirs(200), 201, 30).0, Shares::NOBODY);
}

#[test]
fn old_numbers_are_answered_by_who_has_the_last_word() {
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    assert_eq!(case.peer(0, THEIRS.wrapping_sub(1), 0, 0).0, GUEST);
    case.guest(0, 0, theirs(100), 0);
    let (to, _, twin) = case.peer(0, theirs(99), 0, 0);
    assert_eq!((to, twin.unwrap().seq), (WHOLE, theirs(99).wrapping_sub(100)));
    case.twin_acks(200, 0, &[]).unwrap();
    // A closed window: probes with a byte, with none, and old bytes.
    assert_eq!(case.peer(PSH, theirs(200), 0, 1).0, WHOLE);
    assert_eq!(case.peer(0, theirs(199), 0, 0).0, WHOLE);
    assert_eq!(case.peer(0, theirs(150), 0, 50).0, WHOLE);
    // What they say of the guest's bytes may be old, too.
    case.guest(PSH, 0, theirs(100), 20);
    assert_eq!(case.peer(0, theirs(149), 10, 50).0, WHOLE);
    assert_eq!(case.flow.send.acked, OURS);
    case.twin_acks(600, 0, &[]).unwrap();
    let (to, guest, _) = case.peer(0, theirs(599), 0, 0);
    assert_eq!((to, guest.seq), (GUEST, theirs(99)));
    // The last acknowledgement was lost: the guest says it again.
    assert_eq!(piece(&case.peer(0, theirs(500), 0, 100).1), (theirs(0), 100));
}

#[test]
fn the_end_of_the_stream_waits_for_the_end_of_the_pipe() {
    for (fin, told_at) in [(100, 100), (300, 300), (600, 600)] {
        let mut case = Scenario::receiving(500);
        let bare = |to: Shares| to.guest != Share::Whole;
        let (to, _, twin) = case.peer(PSH | FIN, theirs(fin), 0, 0);
        assert!(bare(to) && twin.is_none());
        if told_at > 100 {
            assert_eq!(case.told(), []);
            let (to, _, twin) = case.peer(FIN, theirs(100), 0, fin as usize - 100);
            assert!(bare(to) && twin.is_some_and(|twin| twin.flags == ACK));
            case.twin_acks(fin - 1, 900, &[]).unwrap();
            assert_eq!(case.told(), []);
            assert_eq!(case.twin_acks(fin, 900, &[]).unwrap().ack, theirs(fin));
        }
        assert_eq!(case.told(), [FlowEvent::Ended]);
        case.peer(FIN, theirs(fin), 0, 0);
        assert_eq!(case.told(), []);
        let at = case.flow.receive.twin.unwrap().fin;
        assert_eq!((case.flow.receive_stop(TOKEN, 0), at), (Ok(fin - 100), Some(theirs(fin))));
        assert_eq!(case.flow.receive_finish(TOKEN, fin - 100), Ok(()));
        let says = case.flow.fin_to_guest(at).unwrap();
        assert_eq!((says.flags, says.seq, says.window), (FIN | ACK, theirs(fin), 777));
        let (to, guest, _) = case.peer(FIN, theirs(fin), 0, 0);
        assert_eq!((to, guest.seq, guest.flags), (GUEST, theirs(100), FIN | ACK));
        assert_eq!(case.guest(0, 0, theirs(101), 0).1.ack, theirs(fin + 1));
        assert!(case.flow.fin_to_guest(at).is_none());
        assert_eq!(case.flow.receive_snapshot(101, TOKEN), Err(FlowError::Closing));
    }
}

#[test]
fn a_stop_leaves_the_twin_what_was_taken_or_told() {
    for (told, taken, len) in [(100, 0, 0), (100, 30, 30), (250, 30, 150), (250, 200, 200)] {
        let mut case = Scenario::receiving(500);
        case.peer(PSH, theirs(100), 0, 400);
        case.twin_acks(told, 0, &[(460, 480)]).unwrap();
        assert_eq!(case.flow.receive_stop(8, taken), Err(FlowError::Unknown));
        assert_eq!(case.flow.receive_stop(TOKEN, 501), Err(FlowError::Changed));
        assert_eq!(case.flow.receive_stop(TOKEN, taken), Ok(len));
        // From now on the guest receives; what the twin has beyond does not count.
        let says = case.flow.to_peer();
        assert_eq!((says.ack, says.window, says.seq), (theirs(100 + len), 1000, OURS));
        assert!(case.twin_acks(500, 900, &[]).is_none());
        let (to, guest, _) = case.peer(PSH, theirs(100 + len), 0, 40);
        assert_eq!((to, piece(&guest)), (GUEST, (theirs(100), 40)));
        case.guest(0, 0, theirs(140), 0);
        assert_eq!(case.flow.receive_stop(TOKEN, taken), Ok(len));
        assert_eq!(case.flow.receive_finish(8, 1), Ok(()));
        assert!(case.flow.is_needed());
        assert_eq!(case.flow.receive_finish(TOKEN, len), Ok(()));
        assert_eq!(case.flow.is_needed(), len > 0);
        assert_eq!(case.flow.shift.receive, len);
        assert_eq!(case.guest(0, 0, theirs(140), 0).1.ack, theirs(140 + len));
    }
}

/// A guest that has not acknowledged its own, and may have bytes from behind the twin's.
#[test]
fn a_stop_that_comes_late_changes_nothing() {
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    case.twin_acks(600, 900, &[]);
    assert_eq!(piece(&case.peer(PSH, theirs(600), 0, 50).1), (theirs(100), 50));
    assert_eq!(case.flow.receive_stop(TOKEN, 10), Ok(500));
    assert_eq!(piece(&case.peer(PSH, theirs(600), 0, 50).1), (theirs(100), 50));
    assert_eq!(case.flow.receive_finish(TOKEN, 10), Err(FlowError::Broken));
    // In time, what the twin has is of no account.
    let mut case = Scenario::open(false);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(PSH, THEIRS, 0, 100);
    case.flow.receive_start(TOKEN, &taken, 0, 600).unwrap();
    case.twin_acks(500, 900, &[]);
    assert_eq!(case.flow.receive_stop(TOKEN, 10), Ok(10));
    case.guest(0, 0, theirs(100), 0);
    assert_eq!((case.flow.receive.wire_ack(), case.flow.shift.receive), (theirs(110), 10));
}

#[test]
fn bytes_that_the_peer_forgot_break_the_connection() {
    for (told, len) in [(250, 149), (600, 499), (250, 501), (600, 501)] {
        let mut case = Scenario::receiving(500);
        case.guest(PSH, 0, theirs(100), 20);
        case.peer(PSH, theirs(100), 10, 500);
        case.twin_acks(told, 900, &[]);
        assert_eq!(case.flow.receive_finish(TOKEN, len), Err(FlowError::Broken));
        let Resets { to_peer: (seq, ack), to_guest: (to_guest, _) } =
            case.flow.give_up(TOKEN).unwrap();
        assert_eq!((seq, ack), (ours(10), theirs(told)));
        // Through the port it goes to the guest at the number that it waits for.
        let (to, guest, _) = case.peer(RST, to_guest, 10, 0);
        assert_eq!((to, guest.seq), (GUEST, theirs(100)));
        assert!(case.flow.is_broken && case.flow.reset && case.flow.receive.twin.is_none());
        let (to, ..) = case.guest_raw(Build::new(case.key, ACK, ours(20), theirs(100)));
        assert_eq!(to, GuestVerdict::Answer);
    }
}

#[test]
fn a_reset_is_the_guests_and_told() {
    let mut case = Scenario::receiving(500);
    case.peer(PSH, theirs(100), 0, 300);
    case.twin_acks(200, 900, &[]).unwrap();
    for seq in [199, 401, 9000] {
        case.peer(RST, theirs(seq), 0, 0);
        assert_eq!((case.told(), case.flow.reset), (vec![], false), "{seq}");
    }
    let (to, guest, _) = case.peer(RST, theirs(300), 0, 0);
    assert_eq!((to, guest.seq, case.told()), (GUEST, theirs(100), vec![FlowEvent::Reset]));
    assert!(case.flow.reset);
    let mut case = Scenario::receiving(500);
    case.twin_acks(150, 900, &[]).unwrap();
    let (to, left) = case.guest(RST, 0, theirs(100), 0);
    assert_eq!(
        (to, left.ack, case.told()),
        (GuestVerdict::Pass, theirs(150), vec![FlowEvent::Reset])
    );
}

#[test]
fn only_acknowledgements_of_a_twin_leave() {
    let mut case = Scenario::receiving(500);
    let new = Build::new(case.key, ACK, OURS, theirs(200));
    for bad in [
        Build { flags: RST | ACK, ..new.clone() },
        Build { flags: FIN | ACK, ..new.clone() },
        Build { flags: SYN | ACK, ..new.clone() },
        Build { flags: PSH, ..new.clone() },
        Build { payload: vec![1], ..new.clone() },
        Build { seq: OURS.wrapping_sub(1), ..new.clone() },
        Build { ack: theirs(99), ..new.clone() },
    ] {
        assert!(case.twin_raw(bad.clone()).is_none(), "{bad:?}");
    }
    assert_eq!(case.flow.receive.wire_ack(), theirs(100));
    let left = case.twin_raw(Build { flags: ACK | ECE, ..new.clone() }).unwrap();
    assert_eq!((left.flags, left.ack), (ACK, theirs(200)));
    case.flow.receive_finish(TOKEN, 100).unwrap();
    assert!(case.twin_raw(new).is_none());
}

#[test]
fn a_damaged_segment_is_nobodys_while_the_stream_is_split() {
    let mut case = Scenario::receiving(500);
    let before = format!("{:?}", case.flow);
    for flags in [ACK, ACK | RST, ACK | FIN] {
        let new = Build::new(mirror(&case.key), flags, theirs(100), OURS);
        let frame = Build { payload: vec![2; 40], ..new }.frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let to = case.flow.peer_sends(&frame, &segment, Checksum::Wrong, &mut |_, _| panic!());
        assert_eq!((to, &format!("{:?}", case.flow)), (Shares::NOBODY, &before));
    }
}

#[test]
fn who_may_have_the_receiving_half() {
    let mut case = Scenario::piped(50);
    assert_eq!(case.flow.receive_snapshot(0, TOKEN), Err(FlowError::Busy));
    let mut case = Scenario::receiving(50);
    assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Busy));
    assert_eq!(case.flow.receive_snapshot(100, TOKEN), Err(FlowError::Busy));
    let mut case = Scenario::open(true);
    case.peer(PSH, THEIRS, 0, 10);
    let taken = case.flow.receive_snapshot(10, TOKEN).unwrap();
    assert_eq!(case.flow.receive_snapshot(10, 8), Err(FlowError::Busy));
    assert_eq!(case.flow.receive_start(8, &taken, 10, 5), Err(FlowError::Busy));
    // More than has passed, or less than can be.
    assert_eq!(case.flow.receive_start(TOKEN, &taken, 11, 5), Err(FlowError::Changed));
    assert_eq!(case.flow.receive_snapshot(11, TOKEN), Err(FlowError::Changed));
    assert!(!case.flow.is_needed());
    // Numbers of another time.
    let mut late = case.flow.receive_snapshot(10, TOKEN).unwrap();
    late.receive_seq = theirs(11);
    assert_eq!(case.flow.receive_start(TOKEN, &late, 10, 5), Err(FlowError::Changed));
    // It closes, or is reset, before the twin is there.
    let taken = case.flow.receive_snapshot(10, TOKEN).unwrap();
    case.peer(FIN, theirs(10), 0, 0);
    assert_eq!(case.flow.receive_start(TOKEN, &taken, 10, 5), Err(FlowError::Closing));
    let mut case = Scenario::open(true);
    let taken = case.flow.receive_snapshot(0, TOKEN).unwrap();
    case.peer(RST, THEIRS, 0, 0);
    assert_eq!(case.flow.receive_start(TOKEN, &taken, 0, 5), Err(FlowError::Closing));
    // An answer to its SYN that it did not believe.
    let mut case = Scenario::open(true);
    case.flow.receive.base = None;
    assert_eq!(case.flow.receive_snapshot(0, TOKEN), Err(FlowError::Unknown));
}

/// A new daemon does not know what the guest has behind a gap, until all is acknowledged that the
/// peer may have sent before.
#[test]
fn after_a_restart_a_windows_worth_has_to_pass() {
    let mut case = Scenario::receiving(500);
    case.twin_acks(600, 900, &[]).unwrap();
    assert!(case.flow.record(case.key).has_twin);
    assert_eq!(case.flow.receive_finish(TOKEN, 500), Ok(()));
    let record: Record = case.flow.record(case.key);
    assert!(!record.has_twin);
    case.flow = Flow::restored(&record, 1);
    assert_eq!(case.flow.receive.passage, Passage::Unknown);
    assert_eq!(case.flow.receive_snapshot(100, TOKEN), Err(FlowError::Changed));
    assert_eq!(case.guest(0, 0, theirs(120), 0).1.ack, theirs(620));
    assert_eq!(case.flow.receive.passage, Passage::Before(theirs(4620)));
    assert_eq!(case.flow.receive_snapshot(120, TOKEN), Err(FlowError::Changed));
    case.peer(PSH, theirs(620), 0, 4000);
    case.guest(0, 0, theirs(4119), 0);
    assert_eq!(case.flow.receive_snapshot(4119, TOKEN), Err(FlowError::Changed));
    case.guest(0, 0, theirs(4120), 0);
    let taken = case.flow.receive_snapshot(4120, TOKEN).unwrap();
    assert_eq!(taken.receive_seq, theirs(4620));
}

/// A window that the peer was told counts as long as it may be on its way: the beginning of the
/// next twin's part depends on it.
#[test]
fn the_window_of_a_twin_outlives_it() {
    let mut case = Scenario::receiving(500);
    case.twin_acks(500, 4000, &[]).unwrap();
    assert_eq!(case.flow.receive_stop(TOKEN, 400), Ok(400));
    case.flow.receive_finish(TOKEN, 400).unwrap();
    // 16,000 bytes, where the guest has allowed 4,000.
    case.peer(PSH, theirs(16_000), 0, 100);
    assert_eq!(case.flow.receive.end, theirs(16_100));
}
