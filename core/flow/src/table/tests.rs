use base::alloc_count::{Counting, allocations};
use proptest::prelude::*;

use super::*;
use crate::segment::{ACK, FIN, PSH, RST};
use crate::testing::{Build, key, mirror, timestamps};
use crate::{FlowError, Snapshot};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The connection to the peer's port `n`.
fn name(n: u16) -> FlowKey {
    FlowKey { remote_port: n, ..key(n % 2 == 1) }
}

fn guest(table: &mut FlowTable, n: u16, flags: u8, seq: u32, now_ns: u64) -> Vec<FlowEvent> {
    let mut frame = Build::new(name(n), flags, seq, 1).frame();
    let segment = Segment::parse(&frame, frame.len()).unwrap();
    let mut events = Vec::new();
    table.guest_sends(&mut frame, &segment, true, now_ns, &mut |_, event| events.push(event));
    events
}

fn connect(table: &mut FlowTable, n: u16, now_ns: u64) {
    guest(table, n, SYN | ACK, 100, now_ns);
    peer(table, n, 0, 101, now_ns);
}

fn peer(table: &mut FlowTable, n: u16, flags: u8, ack: u32, now_ns: u64) {
    let mut new = Build::new(mirror(&name(n)), flags | ACK, 1, ack);
    new.window = 500;
    let frame = new.frame();
    let segment = Segment::parse(&frame, frame.len()).unwrap();
    let Some(flow) = table.get(&name(n)) else { return };
    flow.seen_ns = now_ns;
    flow.peer_sends(&frame, &segment, crate::verdict::Checksum::Right, &mut |_, _| {});
}

fn settle(table: &mut FlowTable, n: u16) -> bool {
    let flow = table.get(&name(n)).unwrap();
    flow.snapshot(0, 1).is_ok()
}

fn start(table: &mut FlowTable, n: u16) {
    let flow = table.get(&name(n)).unwrap();
    let Ok(Snapshot::Ready(taken)) = flow.snapshot(0, 1) else { panic!("not ready") };
    flow.start(1, &taken, 10).unwrap();
}

/// A pipe of ten bytes, from its beginning to its end.
fn shift(table: &mut FlowTable, n: u16, now_ns: u64) {
    start(table, n);
    let mut frame = Build { payload: vec![0; 10], ..Build::new(name(n), ACK, 101, 1) }.frame();
    let segment = Segment::parse(&frame, frame.len()).unwrap();
    let flow = table.get(&name(n)).unwrap();
    assert!(flow.edit_from_twin(&mut frame, &segment, true, &mut |_, _| {}));
    peer(table, n, 0, 111, now_ns);
    table.get(&name(n)).unwrap().finish(1, 10).unwrap();
}

fn flood(table: &mut FlowTable, count: u16, now_ns: u64) {
    (0..count).for_each(|n| connect(table, 10_000 + n, now_ns));
}

#[test]
fn the_longest_unseen_makes_room() {
    let mut table = FlowTable::new(4);
    (0..4).for_each(|n| connect(&mut table, n, 10 + u64::from(n)));
    guest(&mut table, 0, PSH | ACK, 101, 20);
    peer(&mut table, 1, PSH, 101, 21);
    connect(&mut table, 4, 30);
    let known = |table: &mut FlowTable| (0..5).filter(|n| table.get(&name(*n)).is_some()).collect();
    let left: Vec<u16> = known(&mut table);
    assert_eq!((left, table.untracked), (vec![0, 1, 3, 4], 0));
    // What is over goes first.
    guest(&mut table, 4, FIN | ACK, 101, 31);
    peer(&mut table, 4, FIN, 102, 32);
    connect(&mut table, 2, 33);
    let left: Vec<u16> = known(&mut table);
    assert_eq!(left, [0, 1, 2, 3]);
}

#[test]
fn those_that_find_no_room_are_counted() {
    let mut table = FlowTable::new(40);
    for n in 0..40 {
        connect(&mut table, n, 1);
        match n % 3 {
            0 => shift(&mut table, n, 1),
            1 => start(&mut table, n),
            _ => assert!(settle(&mut table, n)),
        }
    }
    flood(&mut table, 100, 2);
    assert_eq!(table.untracked, 100);
    assert!((0..40).all(|n| table.get(&name(n)).unwrap().is_needed()));
    // One that is known needs no room.
    assert_eq!(guest(&mut table, 1, SYN, 900, 3), [FlowEvent::Reset]);
    assert_eq!(guest(&mut table, 2, SYN, 900, 3), [FlowEvent::Reset]);
    assert_eq!(guest(&mut table, 0, SYN, 900, 3), []);
    assert!((0..3).all(|n| !table.get(&name(n)).unwrap().is_needed()));
    assert_eq!(table.untracked, 100);
    // And now those three can go.
    flood(&mut table, 100, 4);
    assert!((0..3).all(|n| table.get(&name(n)).is_none()));
    assert!((3..40).all(|n| table.get(&name(n)).is_some()));
}

/// A segment of the connection to port 1, from the guest or its peer.
fn says(table: &mut FlowTable, build: Build, now_ns: u64) {
    let is_guests = build.key == name(1);
    let mut frame = build.frame();
    let segment = Segment::parse(&frame, frame.len()).unwrap();
    let mut tell = |_, event| panic!("{event:?}");
    if is_guests {
        table.guest_sends(&mut frame, &segment, true, now_ns, &mut tell);
    } else {
        let flow = table.get(&name(1)).unwrap();
        flow.peer_sends(&frame, &segment, crate::verdict::Checksum::Right, &mut tell);
    }
}

fn from_guest(flags: u8, seq: u32, ack: u32) -> Build {
    Build { options: timestamps(70, 80), ..Build::new(name(1), flags, seq, ack) }
}

fn from_peer(flags: u8, seq: u32, ack: u32) -> Build {
    Build { options: timestamps(80, 70), ..Build::new(mirror(&name(1)), flags, seq, ack) }
}

/// A connection of which each side has sent a SYN.
fn accepted() -> FlowTable {
    let mut table = FlowTable::new(4);
    says(&mut table, from_guest(SYN | ACK, 100, 501), 5);
    says(&mut table, from_peer(PSH | ACK, 501, 101), 6);
    table
}

/// A SYN passes behind the peer's first words where its answer was lost, or was on its way.
#[test]
fn a_syn_that_is_sent_again_begins_nothing() {
    let later = |build| Build { options: timestamps(75, 80), macs: [[6; 6], [8; 6]], ..build };
    let mut accepts = accepted();
    says(&mut accepts, later(from_guest(SYN | ACK, 100, 501)), 9);
    let mut connects = FlowTable::new(4);
    says(&mut connects, from_guest(SYN, 100, 0), 5);
    says(&mut connects, from_peer(SYN | ACK, 500, 101), 6);
    says(&mut connects, later(from_guest(SYN, 100, 0)), 8);
    says(&mut connects, later(from_guest(ACK, 101, 501)), 9);
    for table in [&mut accepts, &mut connects] {
        let flow = table.get(&name(1)).unwrap();
        assert!(flow.is_heard && flow.is_open);
        let known = (flow.begun_ns, flow.seen_ns, flow.send.base, flow.receive.base);
        assert_eq!(known, (5, 9, Some(101), Some(501)));
        // What has changed is told to a twin.
        assert_eq!((flow.clock.sent, flow.macs[0], flow.macs[6]), (Some(75), 6, 8));
    }
    // It is nothing to a pipe that is about to begin, either.
    assert!(settle(&mut accepts, 1));
    says(&mut accepts, from_guest(SYN | ACK, 100, 501), 10);
    assert!(accepts.get(&name(1)).unwrap().is_needed());
}

#[test]
fn a_syn_with_anything_new_begins_a_connection() {
    let is_new = |table: &mut FlowTable, syn| {
        says(table, syn, 8);
        table.get(&name(1)).unwrap().begun_ns == 8
    };
    let same = || from_guest(SYN | ACK, 100, 501);
    let scaled = Build { options: [timestamps(75, 80), vec![1, 3, 3, 2]].concat(), ..same() };
    let others = [
        from_guest(SYN | ACK, 99, 501),
        from_guest(SYN | ACK, 100, 502),
        from_guest(SYN, 100, 0),
        Build { options: vec![], ..same() },
        scaled,
    ];
    assert!(!is_new(&mut accepted(), same()));
    for other in others {
        assert!(is_new(&mut accepted(), other.clone()), "{other:?}");
    }
    // What has ended does not go on.
    for end in [RST | ACK, FIN | ACK] {
        let mut table = accepted();
        says(&mut table, from_guest(end, 101, 502), 7);
        assert!(is_new(&mut table, same()));
    }
    // The bytes of the first one are sent later.
    let mut table = FlowTable::new(4);
    says(&mut table, Build { payload: vec![1; 9], ..from_guest(SYN, 100, 0) }, 5);
    assert!(is_new(&mut table, from_guest(SYN, 100, 0)));
}

#[test]
fn bound_are_those_that_pipes_have_or_have_shifted_until_all_is_over() {
    let mut table = FlowTable::new(8);
    (0..4).for_each(|n| connect(&mut table, n, 7));
    let bound = |table: &FlowTable, now_ns| {
        let mut ports: Vec<u16> = table.bound(now_ns).iter().map(|key| key.remote_port).collect();
        ports.sort_unstable();
        ports
    };
    assert!(bound(&table, 7).is_empty());
    assert!(settle(&mut table, 0));
    start(&mut table, 1);
    shift(&mut table, 2, 7);
    assert_eq!(bound(&table, 7), [0, 1, 2]);
    // What was not shifted is free again.
    table.get(&name(0)).unwrap().finish(1, 0).unwrap();
    assert_eq!(bound(&table, 7), [1, 2]);
    assert_eq!(table.get(&name(3)).unwrap().begun_ns, 7);
    peer(&mut table, 2, RST, 111, 1000);
    assert_eq!(bound(&table, 1000 + STRAGGLER_NS), [1, 2]);
    assert_eq!(bound(&table, 1001 + STRAGGLER_NS), [1]);
}

#[test]
fn a_shift_is_kept_while_stragglers_may_come() {
    let mut table = FlowTable::new(2);
    (0..2).for_each(|n| connect(&mut table, n, 1));
    shift(&mut table, 0, 1);
    start(&mut table, 1);
    let is_there = |table: &mut FlowTable, n| table.get(&name(n)).is_some();
    // In silence, for days.
    flood(&mut table, 20, FORGET_NS + 1);
    assert!(is_there(&mut table, 0));
    // After its end, for two minutes.
    peer(&mut table, 0, RST, 111, 1000);
    assert!(table.get(&name(0)).unwrap().is_over());
    flood(&mut table, 20, 1000 + STRAGGLER_NS);
    assert!(is_there(&mut table, 0));
    flood(&mut table, 20, 1001 + STRAGGLER_NS);
    assert!(!is_there(&mut table, 0));
    // A twin is for ever.
    flood(&mut table, 20, 10 * FORGET_NS);
    assert!(is_there(&mut table, 1));
}

/// Else a busy server's old connections would fill the next daemon's table for days.
#[test]
fn those_that_were_over_under_the_last_daemon_go_as_soon() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flows");
    let mut table = FlowTable::new(3);
    table.journal = Some(Journal::open(&path).unwrap());
    (0..3).for_each(|n| connect(&mut table, n, 1));
    for n in 0..3 {
        shift(&mut table, n, 1);
        table.save(&name(n));
    }
    // The first by both sides' FIN, the second by the guest's reset.
    peer(&mut table, 0, FIN, 111, 2);
    guest(&mut table, 0, FIN | ACK, 101, 2);
    guest(&mut table, 1, RST, 101, 2);
    let mut table = FlowTable::restored(Journal::open(&path).unwrap(), 1000);
    let over = |table: &mut FlowTable, n| table.get(&name(n)).unwrap().is_over();
    assert_eq!([0, 1, 2].map(|n| over(&mut table, n)), [true, true, false]);
    let may_go = |table: &mut FlowTable, n, now| may_go(table.get(&name(n)).unwrap(), now);
    assert_eq!([0, 1].map(|n| may_go(&mut table, n, 1000 + STRAGGLER_NS)), [false; 2]);
    assert_eq!([0, 1].map(|n| may_go(&mut table, n, 1001 + STRAGGLER_NS)), [true; 2]);
    assert!(!may_go(&mut table, 2, 1001 + STRAGGLER_NS));
}

/// Numbers are compared over half of their space: what is noted must not fall behind by so much.
#[test]
fn a_shifted_connection_that_goes_on_is_noted_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flows");
    let mut table = FlowTable::new(1);
    table.journal = Some(Journal::open(&path).unwrap());
    connect(&mut table, 0, 1);
    shift(&mut table, 0, 1);
    table.save(&name(0));
    let noted = || {
        let restored = FlowTable::restored(Journal::open(&path).unwrap(), 1);
        restored.slots.iter().flatten().next().map(|(_, flow)| flow.send.end)
    };
    let first = noted();
    let mut seq = 101_u32;
    for _ in 0..7 {
        seq = seq.wrapping_add(1 << 29);
        guest(&mut table, 0, ACK, seq, 2);
        let flow = table.get(&name(0)).unwrap();
        let behind = flow.send.end.wrapping_sub(noted().unwrap());
        assert!(behind <= 1 << 29, "{behind}");
    }
    assert_ne!(noted(), first);
}

/// A connection whose twin was lost before it had sent anything: the next daemon must not take a
/// new one for it.
#[test]
fn a_broken_connection_without_a_shift_is_remembered_so_long_and_no_longer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flows");
    let mut table = FlowTable::new(2);
    table.journal = Some(Journal::open(&path).unwrap());
    let noted = || Journal::open(&path).unwrap().records().len();
    connect(&mut table, 0, 1);
    start(&mut table, 0);
    table.get(&name(0)).unwrap().give_up(1).unwrap();
    assert!(!table.get(&name(0)).unwrap().is_shifted());
    table.save(&name(0));
    flood(&mut table, 20, 1 + STRAGGLER_NS);
    assert!(table.get(&name(0)).is_some());
    assert_eq!(noted(), 1);
    flood(&mut table, 20, 2 + STRAGGLER_NS);
    assert!(table.get(&name(0)).is_none());
    assert_eq!(noted(), 0);
}

#[test]
fn a_silent_shift_is_forgotten_after_days() {
    let mut table = FlowTable::new(1);
    connect(&mut table, 0, 1);
    shift(&mut table, 0, 1);
    flood(&mut table, 5, FORGET_NS + 2);
    assert!(table.get(&name(0)).is_none());
}

/// The same addresses begin anew: nothing of the old connection is left.
#[test]
fn a_syn_ends_the_shift() {
    let mut table = FlowTable::new(4);
    connect(&mut table, 0, 1);
    shift(&mut table, 0, 1);
    connect(&mut table, 0, 2);
    let flow = table.get(&name(0)).unwrap();
    assert!(!flow.is_shifted());
    assert_eq!(
        flow.snapshot(0, 5).map(|s| matches!(s, Snapshot::Ready(t) if t.send_seq == 101)),
        Ok(true)
    );
    // The old pipe has no say in it.
    assert_eq!(flow.finish(1, 10), Ok(()));
    assert!(flow.give_up(1).is_none() && flow.reservation.is_some());
    assert_eq!(flow.snapshot(0, 1), Err(FlowError::Busy));
}

#[test]
fn nothing_is_allocated_once_it_is_made() {
    for max in [1, 7, 16, 64, 448, 1000] {
        let mut table = FlowTable::new(max);
        // The frames are made before: this counts the table's work alone.
        let build = |n: u16| Build::new(name(n), SYN, 1, 0).frame();
        let mut frames: Vec<_> = (0..20_000).map(build).collect();
        let count = allocations(|| {
            for (at, frame) in frames.iter_mut().enumerate() {
                let segment = Segment::parse(frame, frame.len()).unwrap();
                table.guest_sends(frame, &segment, true, at as u64, &mut |_, _| {});
            }
        });
        assert_eq!((count, table.map.len(), table.untracked), (0, max, 0));
    }
}

/// Limits that the crate's text names.
#[test]
fn a_full_table_is_under_four_megabytes() {
    let per_flow = size_of::<Option<(FlowKey, Flow)>>();
    let map = 4 * MAX_FLOWS * (size_of::<(FlowKey, u32)>() + 1);
    let total = MAX_FLOWS * (per_flow + 4) + map;
    assert!(total < 4_000_000, "{per_flow} each, {total}");
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Connect(u16),
    Settle(u16),
    Shift(u16),
    Start(u16),
    Finish(u16),
    Reset(u16),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let n = 0..60_u16;
    let step = prop_oneof![
        6 => n.clone().prop_map(Step::Connect),
        1 => n.clone().prop_map(Step::Settle),
        1 => n.clone().prop_map(Step::Shift),
        1 => n.clone().prop_map(Step::Start),
        1 => n.clone().prop_map(Step::Finish),
        1 => n.prop_map(Step::Reset),
        1 => (0..2 * STRAGGLER_NS).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 0..400)
}

proptest! {
    /// A connection that is needed stays, with its shift, until its own SYN, whatever happens.
    #[test]
    fn eviction_never_takes_a_needed_one(steps in steps(), max in 1..50_usize) {
        let mut table = FlowTable::new(max);
        let mut now_ns = 1;
        for step in steps {
            now_ns += 1;
            let needed: Vec<_> = (0..60)
                .filter_map(|n| {
                    let flow = table.get(&name(n))?;
                    Some((n, flow.is_needed(), may_go(flow, now_ns)))
                })
                .filter(|(_, is_needed, may_go)| *is_needed && !may_go)
                .map(|(n, ..)| n)
                .collect();
            let fresh = |table: &mut FlowTable, n| {
                table.get(&name(n)).is_some_and(|f| !f.is_needed() && !f.reset)
            };
            let touched = match step {
                Step::Wait(ns) => { now_ns += ns; continue }
                Step::Connect(n) => { connect(&mut table, n, now_ns); n }
                Step::Settle(n) if fresh(&mut table, n) => { settle(&mut table, n); n }
                Step::Shift(n) if fresh(&mut table, n) => { shift(&mut table, n, now_ns); n }
                Step::Start(n) if fresh(&mut table, n) => { start(&mut table, n); n }
                Step::Finish(n) => {
                    if let Some(flow) = table.get(&name(n)) { let _ = flow.finish(1, 0); }
                    n
                }
                Step::Reset(n) => { peer(&mut table, n, RST, 1, now_ns); n }
                _ => continue,
            };
            for n in needed {
                prop_assert!(table.get(&name(n)).is_some(), "{} went", n);
                prop_assert!(n == touched || table.get(&name(n)).unwrap().is_needed());
            }
            // The map and the places agree.
            let used = table.slots.iter().flatten().count();
            prop_assert_eq!(used, table.map.len());
            prop_assert_eq!(used + table.free.len(), max);
            for (key, at) in &table.map {
                prop_assert_eq!(table.slots[*at as usize].as_ref().map(|s| s.0), Some(*key));
            }
        }
    }
}
