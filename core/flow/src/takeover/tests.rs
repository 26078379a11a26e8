use super::*;
use crate::FlowEvent;
use crate::scenario::*;
use crate::segment::{ACK, FIN, PSH, RST};
use crate::testing::{Build, read};
use crate::verdict::GuestVerdict;

#[test]
fn a_pipe_waits_until_the_guests_bytes_have_passed() {
    let mut case = Scenario::open(false);
    case.guest(PSH, 0, THEIRS, 60);
    assert_eq!(case.flow.snapshot(100, TOKEN), Ok(Snapshot::Waiting));
    assert_eq!(case.flow.snapshot(100, 8), Err(FlowError::Busy));
    assert_eq!(case.flow.snapshot(100, TOKEN), Ok(Snapshot::Waiting));
    case.guest(0, 60, THEIRS, 0);
    case.guest(PSH, 60, THEIRS, 39);
    case.guest(PSH, 0, THEIRS, 60);
    assert_eq!(case.told(), []);
    case.guest(PSH, 99, THEIRS, 1);
    assert_eq!(case.told(), [FlowEvent::Settled]);
    case.guest(0, 100, THEIRS, 0);
    case.guest(PSH, 60, THEIRS, 40);
    assert_eq!(case.told(), []);
    let taken = case.snapshot(100);
    assert_eq!((taken.send_seq, taken.acked_seq), (ours(100), OURS));
    case.guest(0, 100, THEIRS, 0);
    assert_eq!(case.told(), []);
    // Another thread writes.
    case.guest(PSH, 100, THEIRS, 1);
    assert_eq!(case.flow.start(TOKEN, &taken, 5), Err(FlowError::Changed));
    assert_eq!(case.flow.snapshot(100, TOKEN), Err(FlowError::Changed));
    // Nobody has it now.
    assert!(!case.flow.is_needed());
    assert!(matches!(case.flow.snapshot(101, 8), Ok(Snapshot::Ready(_))));
    assert_eq!(case.flow.start(TOKEN, &taken, 5), Err(FlowError::Busy));
    case.flow.finish(8, 0).unwrap();
    assert!(!case.flow.is_needed());
}

#[test]
fn one_twin_at_a_time_and_none_for_a_closing_connection() {
    let mut case = Scenario::piped(50);
    for token in [TOKEN, 8] {
        assert_eq!(case.flow.snapshot(100, token), Err(FlowError::Busy));
    }
    // A stranger's end is not the twin's.
    assert_eq!(case.flow.finish(8, 50), Ok(()));
    assert!(case.flow.give_up(8).is_none() && case.flow.send.twin.is_some());
    let mut case = Scenario::open(false);
    case.guest(FIN, 0, THEIRS, 0);
    assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Closing));
    let mut case = Scenario::open(false);
    case.peer(RST, THEIRS, 0, 0);
    assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Closing));
    // The other direction may be closed.
    let mut case = Scenario::open(false);
    case.peer(FIN, THEIRS, 0, 0);
    assert_eq!(case.snapshot(0).receive_seq, THEIRS + 1);
}

#[test]
fn unacknowledged_bytes_of_a_twin_break_the_connection() {
    for (sent, acked, len) in [(50, 149, 50), (40, 140, 50), (50, 150, 40), (10, 100, 0)] {
        let mut case = Scenario::piped(50);
        case.twin(ACK, 100, sent).unwrap();
        case.peer(0, THEIRS, acked, 0);
        assert_eq!(case.flow.finish(TOKEN, len), Err(FlowError::Broken));
        let Resets { to_peer: (to_peer, _), to_guest: (to_guest, _) } =
            case.flow.give_up(TOKEN).unwrap();
        assert_eq!((to_peer, to_guest), (ours(acked), THEIRS));
        // Its next bytes would be taken for the twin's: they get a reset instead.
        let (to, mut frame, segment) = case.guest_raw(Build {
            payload: vec![1; 9],
            ..Build::new(case.key, ACK, ours(100), THEIRS)
        });
        assert_eq!(to, GuestVerdict::Answer);
        let with = case.flow.answer_to_probe(&frame, &segment);
        let len = segment.answer(&mut frame, &with);
        let answer = read(&frame[..len]);
        assert_eq!((answer.flags, answer.seq, answer.ack), (RST | ACK, THEIRS, ours(109)));
        // Its own resets need not have the number that the peer expects: they have the peer say it.
        let reset = Build::new(case.key, RST, ours(100), THEIRS);
        let (to, mut frame, segment) = case.guest_raw(reset);
        assert_eq!(to, GuestVerdict::Answer);
        let len = case.flow.edit_prompt(&mut frame, &segment, true);
        let prompt = read(&frame[..len]);
        assert_eq!((prompt.flags, prompt.seq, prompt.off_by), (ACK, ours(acked) - 1, 0));
    }
}

/// The guest's own bytes may be on their way still; all is as if nothing had been.
#[test]
fn a_twin_that_sent_nothing_leaves_nothing() {
    let mut case = Scenario::open(false);
    case.guest(PSH, 0, THEIRS, 100);
    let taken = case.snapshot(100);
    case.flow.start(TOKEN, &taken, 50).unwrap();
    assert!(!case.flow.send.retarget(TOKEN, 0));
    assert_eq!(case.flow.finish(TOKEN, 0), Ok(()));
    assert!(!case.flow.is_needed() && !case.flow.reset);
    let (to, left) = case.guest(PSH, 0, THEIRS, 110);
    assert_eq!((to, left.seq, left.payload.len()), (GuestVerdict::Pass, OURS, 110));
}

#[test]
fn a_shorter_pipe_is_acknowledged_earlier() {
    let mut case = Scenario::piped(1000);
    case.twin(ACK, 100, 50).unwrap();
    assert!(!case.flow.send.retarget(TOKEN, 50));
    assert!(!case.flow.send.retarget(8, 0));
    case.peer(0, THEIRS, 150, 0);
    case.peer(0, THEIRS, 150, 0);
    assert_eq!(case.told(), [FlowEvent::Acknowledged]);
    assert!(case.flow.send.retarget(TOKEN, 40));
    assert_eq!(case.told(), []);
}
