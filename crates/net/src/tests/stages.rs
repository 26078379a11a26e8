//! Stages on ports.

use std::sync::{Arc, Mutex};

use queue::testing::ModelOptions;
use stage::{Direction, FrameStage, FrameView, Verdict};

use super::lab::{BROADCAST, Lab, Spec, frame, mac, no_offload};

type Seen = Arc<Mutex<Vec<(Direction, usize, usize, u32)>>>;

/// Notes what it sees, drops frames whose 15th byte is 0xdd, and writes `mark` over the last byte
/// it can reach.
struct Probe {
    payload: bool,
    mark: u8,
    seen: Seen,
}

impl FrameStage for Probe {
    fn name(&self) -> &str {
        "probe"
    }

    fn wants_payload(&self) -> bool {
        self.payload
    }

    fn push(&mut self, direction: Direction, frame: &mut FrameView<'_>) -> Verdict {
        let lens = (frame.header.len(), frame.payload.len());
        self.seen.lock().unwrap().push((direction, lens.0, lens.1, frame.len_bytes));
        if frame.header[14] == 0xdd {
            return Verdict::Drop;
        }
        let last = frame.payload.last_mut().or(frame.header.last_mut());
        *last.unwrap() = self.mark;
        Verdict::Pass
    }
}

fn probe(payload: bool, mark: u8) -> (Vec<Box<dyn FrameStage>>, Seen) {
    let seen = Seen::default();
    (vec![Box::new(Probe { payload, mark, seen: seen.clone() })], seen)
}

fn lab(sender: Vec<Box<dyn FrameStage>>, receiver: Vec<Box<dyn FrameStage>>) -> Lab {
    let spec = |stages| Spec { stages, options: ModelOptions::default(), ..Spec::default() };
    let mut lab = Lab::new(vec![spec(sender), spec(receiver)]);
    lab.introduce();
    lab
}

#[test]
fn a_header_stage_sees_and_changes_our_copy_only() {
    let (stages, seen) = probe(false, 0xaa);
    let mut lab = lab(stages, Vec::new());
    seen.lock().unwrap().clear();
    lab.guests[1].post(0, 4, 1600, 1);
    let sent = frame(mac(1), mac(0), 1000);
    assert_eq!(lab.judge(0, &sent), None);
    let mut wanted = sent;
    wanted[127] = 0xaa;
    assert_eq!(lab.guests[1].recv_all(0), [wanted]);
    assert_eq!(*seen.lock().unwrap(), [(Direction::FromVm, 128, 0, 1000)]);
}

#[test]
fn a_payload_stage_owns_all_bytes_both_ways() {
    for receiver_side in [false, true] {
        let (stages, seen) = probe(true, 0xbb);
        let (sender, receiver) =
            if receiver_side { (Vec::new(), stages) } else { (stages, Vec::new()) };
        let mut lab = lab(sender, receiver);
        seen.lock().unwrap().clear();
        lab.guests[1].post(0, 4, 1600, 1);
        let sent = frame(mac(1), mac(0), 1000);
        assert_eq!(lab.judge(0, &sent), None);
        let mut wanted = sent;
        wanted[999] = 0xbb;
        assert_eq!(lab.guests[1].recv_all(0), [wanted]);
        let way = if receiver_side { Direction::ToVm } else { Direction::FromVm };
        assert_eq!(*seen.lock().unwrap(), [(way, 128, 872, 1000)]);
    }
}

#[test]
fn a_dropped_frame_ends_there_and_is_counted_by_its_stage() {
    for receiver_side in [false, true] {
        let (stages, _) = probe(false, 0);
        let (sender, receiver) =
            if receiver_side { (Vec::new(), stages) } else { (stages, Vec::new()) };
        let mut lab = lab(sender, receiver);
        lab.guests[1].post(0, 4, 1600, 1);
        let mut bad = frame(mac(1), mac(0), 100);
        bad[14] = 0xdd;
        assert_eq!(lab.judge(0, &bad), None);
        assert_eq!(lab.guests[1].recv_all(0).len(), 0);
        let drops = lab.port(usize::from(receiver_side)).stages.drops();
        assert_eq!(drops[0].get(), 1);
    }
}

#[test]
fn a_held_frame_meets_its_stages_once() {
    let (stages, seen) = probe(false, 1);
    let mut lab = lab(stages, Vec::new());
    seen.lock().unwrap().clear();
    lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), 100), 1);
    for _ in 0..3 {
        assert_eq!(lab.poll(), 0);
    }
    assert_eq!(seen.lock().unwrap().len(), 0);
    lab.guests[1].post(0, 1, 1600, 1);
    assert_eq!(lab.poll(), 1);
    assert_eq!(seen.lock().unwrap().len(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

#[test]
fn a_staged_flood_reaches_the_uplink_too() {
    let (stages, _) = probe(true, 0xcc);
    let mut lab = lab(stages, Vec::new());
    let wire = lab.set_wire();
    lab.guests[1].post(0, 4, 1600, 1);
    for n in 0..3 {
        lab.guests[0].send(0, &no_offload(), &frame(BROADCAST, mac(0), 300 + n), 1);
    }
    assert_eq!(lab.poll(), 3);
    let sent = &wire.lock().unwrap().sent;
    for (n, got) in lab.guests[1].recv_all(0).into_iter().enumerate() {
        assert_eq!(got.last(), Some(&0xcc));
        assert_eq!(sent[n][12..], got);
        assert_eq!(got.len(), 300 + n);
    }
    assert_eq!(sent.len(), 3);
}
