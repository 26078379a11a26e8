//! Guest, switch, network and peer; and the pipes.

use std::collections::VecDeque;

use super::ends::{End, MSS, SCALE, content};
use super::receive::{Stretch, Takes};
use super::{Part, Plan};
use crate::journal::Record;
use crate::scenario::finish;
use crate::segment::{ACK, SYN, Segment, after};
use crate::table::FlowTable;
use crate::testing::{Build, Read, key, mirror, read, timestamps, words};
use crate::verdict::{Checksum, GuestVerdict, Share};
use crate::{FlowEvent, FlowSnapshot};

/// By then every run is over.
const MAX_TICKS: u32 = 200_000;
pub const OUT: u8 = 0x11;
pub const BACK: u8 = 0xee;

pub struct Rng(u64);

impl Rng {
    pub fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) as u32).checked_rem(n).unwrap_or(0)
    }

    pub fn chance(&mut self, of_a_thousand: u32) -> bool {
        self.below(1000) < of_a_thousand
    }
}

/// Stage of the pipe in hand.
pub enum Stage {
    Idle,
    /// The guest has bytes on their way: since when nothing was heard.
    Asked {
        len: u32,
        waits: bool,
        since: u32,
    },
    Ready {
        len: u32,
        taken: FlowSnapshot,
        at: u32,
    },
    Runs {
        len: u32,
        twin: Box<End>,
        cut: Option<u32>,
    },
    /// The same of a twin that receives.
    Receives(Takes),
}

pub struct Simulation {
    pub plan: Plan,
    pub rng: Rng,
    pub now: u32,
    pub table: FlowTable,
    pub guest: End,
    pub peer: End,
    /// From the guest to the switch, in order; and both ways between switch and peer.
    pub ring: VecDeque<(u32, Vec<u8>)>,
    pub out: Vec<(u32, Vec<u8>)>,
    pub back: Vec<(u32, Vec<u8>)>,
    pub stage: Stage,
    pub token: u64,
    pub events: Vec<(u64, FlowEvent)>,
    /// Pipes that ran: behind how many bytes of the guest's, and how many bytes.
    pub pipes: Vec<(u32, u32)>,
    /// Stretches of the peer's stream that went to twins.
    pub stretches: Vec<Stretch>,
    /// Record that the daemon noted last.
    pub noted: Option<Record>,
    pub parts: VecDeque<Part>,
    pub last_ts: Option<u32>,
    pub is_new_daemon: bool,
}

impl Simulation {
    pub fn new(plan: Plan) -> Self {
        let here = key(plan.v6);
        let [a, b] = plan.first;
        let mut guest =
            End::new("guest", here, a.wrapping_add(1), b.wrapping_add(1), plan.clocks[0]);
        let mut peer =
            End::new("peer", mirror(&here), b.wrapping_add(1), a.wrapping_add(1), plan.clocks[1]);
        for end in [&mut guest, &mut peer] {
            end.has_timestamps = plan.timestamps;
            end.has_sack = plan.sack;
        }
        peer.buffer = plan.peer_buffer;
        let mut simulation = Self {
            rng: Rng(plan.seed | 1),
            now: 0,
            table: FlowTable::new(4),
            guest,
            peer,
            ring: VecDeque::new(),
            out: Vec::new(),
            back: Vec::new(),
            stage: Stage::Idle,
            token: 1,
            events: Vec::new(),
            pipes: Vec::new(),
            stretches: Vec::new(),
            noted: None,
            parts: plan.parts.iter().copied().collect(),
            last_ts: None,
            is_new_daemon: false,
            plan,
        };
        simulation.shake_hands();
        simulation
    }

    /// The guest may send its SYN once more, behind what the peer says first.
    fn shake_hands(&mut self) {
        let [a, b] = self.plan.first;
        let here = self.guest.key;
        let syn = |key, flags, seq, ack, clock, echo| {
            let mut options = vec![1, 3, 3, SCALE];
            if self.plan.timestamps {
                options.extend(timestamps(clock, echo));
            }
            Build { window: 4000, options, ..Build::new(key, flags, seq, ack) }.frame()
        };
        let [ours, theirs] = self.plan.clocks;
        if self.plan.guest_connects {
            let first = syn(here, SYN, a, 0, ours, 0);
            let second = syn(mirror(&here), SYN | ACK, b, a.wrapping_add(1), theirs, ours);
            self.ring.push_back((0, first.clone()));
            self.switch_from_guest();
            self.switch_from_peer(second);
            self.ring.extend(self.plan.syn_again.then_some((0, first)));
        } else {
            let answer = |clock| syn(here, SYN | ACK, a, b.wrapping_add(1), clock, theirs);
            let (first, again) = (answer(ours), answer(ours.wrapping_add(1)));
            self.ring.push_back((0, first));
            self.switch_from_guest();
            // The peer is heard in the first tick.
            self.ring.extend(self.plan.syn_again.then_some((2, again)));
        }
        (self.guest.recent_ts, self.peer.recent_ts) = (Some(theirs), Some(ours));
        if self.plan.guest_connects {
            self.ring.push_back((0, self.guest.ack()));
        } else {
            self.back.push((0, self.peer.ack()));
        }
    }

    pub fn run(mut self) {
        while self.now < MAX_TICKS {
            self.step();
            let is_quiet = self.parts.is_empty() && matches!(self.stage, Stage::Idle);
            let is_over = |a: &End, b: &End| a.is_all_acked() && (!a.closes || b.is_all_read());
            let is_closed = self.guest.closes && self.peer.closes;
            if is_quiet
                && is_closed
                && is_over(&self.guest, &self.peer)
                && is_over(&self.peer, &self.guest)
            {
                return self.check_all();
            }
        }
        let (key, ends) = (self.guest.key, [&self.guest, &self.peer].map(End::brief));
        panic!("no end: {ends:?} {:?} {:?}", self.stretches, self.table.get(&key));
    }

    fn check_all(&self) {
        let total = self.guest.written.len() as u32 + self.pipes.iter().map(|p| p.1).sum::<u32>();
        assert!(self.peer.is_all_read() && self.peer.came.len() as u32 == total);
        for (at, byte) in self.peer.came.iter().enumerate() {
            assert_eq!(*byte, Some(content(OUT, at as u32)), "at {at} of {total}");
        }
        self.check_stretches();
    }

    fn step(&mut self) {
        self.now += 1;
        (self.guest.now, self.peer.now) = (self.now, self.now);
        self.drive_peer();
        self.drive_pipe();
        let stretch = MSS * (1 + self.rng.below(3) as usize);
        let sent = self.guest.tick(stretch);
        for frame in sent {
            self.guest_puts(frame);
        }
        if self.rng.chance(5) && self.guest.una == self.guest.nxt && self.guest.una > 0 {
            let probe = self.guest.probe();
            self.guest_puts(probe);
        }
        self.guest.read(1 + self.rng.below(2000));
        self.switch_from_guest();
        self.drive_twin();
        self.network();
    }

    pub fn guest_puts(&mut self, frame: Vec<u8>) {
        let at = self.now + self.rng.below(4);
        self.ring.push_back((at, frame));
    }

    fn drive_peer(&mut self) {
        let left = self.plan.peer_bytes - self.peer.written.len() as u32;
        if left > 0 && self.rng.chance(30) {
            let n = left.min(1 + self.rng.below(800));
            let from = self.peer.written.len() as u32;
            self.peer.written.extend((from..from + n).map(|at| content(BACK, at)));
        }
        let is_last = self.peer.written.len() as u32 == self.plan.peer_bytes;
        // Early, or as an answer to the guest's end.
        self.peer.closes = is_last && (self.plan.peer_closes || self.peer.is_all_read());
        // Now and then it does not read for a while.
        if self.now % 700 < 500 {
            self.peer.read(self.rng.below(300));
        }
        let mut frames = self.peer.tick(MSS);
        if self.rng.chance(4) {
            frames.push(self.peer.probe());
        }
        for frame in frames {
            self.send_on(frame, false);
        }
    }

    /// Over the network.
    fn send_on(&mut self, frame: Vec<u8>, to_peer: bool) {
        let copies = 1 + u32::from(self.rng.chance(self.plan.twice));
        for _ in 0..copies {
            if self.rng.chance(self.plan.loss) {
                continue;
            }
            let mut copy = frame.clone();
            if self.rng.chance(self.plan.damage) {
                // Somewhere in the TCP segment, but for the length of its header.
                let first = if self.plan.v6 { 54 } else { 34 };
                let at = first + self.rng.below((copy.len() - first) as u32) as usize;
                if at != first + 12 && at > first + 3 {
                    copy[at] ^= 1 << self.rng.below(8);
                }
            }
            let late = if self.rng.chance(self.plan.late) { self.rng.below(100) } else { 0 };
            let at = self.now + 3 + late;
            if to_peer { self.out.push((at, copy)) } else { self.back.push((at, copy)) }
        }
    }

    fn network(&mut self) {
        for (_, frame) in extract(&mut self.out, self.now) {
            let read = read(&frame);
            if read.off_by != 0 {
                continue;
            }
            let delay = self.rng.chance(300);
            if let Some(answer) = self.peer.take(&read, delay) {
                self.send_on(answer, false);
            }
        }
        for (_, frame) in extract(&mut self.back, self.now) {
            self.switch_from_peer(frame);
        }
    }

    /// Leaves the switch: nothing of the peer's is claimed to be here that is not, no clock goes
    /// back.
    pub fn leave(&mut self, frame: Vec<u8>) {
        let read = read(&frame);
        assert_eq!(read.off_by, 0, "a wrong checksum leaves");
        let (ack, arrived) = (read.ack.wrapping_sub(self.peer.first), self.arrived());
        assert!(ack as i32 <= arrived as i32, "{ack} acknowledged of {arrived}");
        if let Some((value, echo)) = read.timestamps {
            assert!(self.last_ts.is_none_or(|last| !after(last, value)), "the clock goes back");
            self.last_ts = Some(value);
            let clock = self.peer.clock.wrapping_add(self.now);
            // A new daemon has heard nothing yet: its twins echo nothing.
            let is_nothing = self.is_new_daemon && echo == 0;
            assert!(is_nothing || !after(echo, clock), "an echo of what was never said");
        }
        let end = read.seq.wrapping_sub(self.peer.their_first) as i32 + read.payload.len() as i32;
        for (k, byte) in read.payload.iter().enumerate() {
            let place = (end - read.payload.len() as i32) as u32 + k as u32;
            // A resend from before a pipe comes shifted when it passes after it: among bytes that
            // the peer has acknowledged, and does not look at.
            assert!(
                place < self.peer.next || *byte == content(OUT, place),
                "wrong at {place} on the wire"
            );
        }
        self.send_on(frame, true);
    }

    fn switch_from_guest(&mut self) {
        while self.ring.front().is_some_and(|(at, _)| *at <= self.now) {
            let (_, mut frame) = self.ring.pop_front().unwrap();
            let segment = Segment::parse(&frame, frame.len()).unwrap();
            let events = &mut self.events;
            let mut tell = |token, event| events.push((token, event));
            let now_ns = u64::from(self.now);
            let to = self.table.guest_sends(&mut frame, &segment, true, now_ns, &mut tell);
            self.note();
            match to {
                GuestVerdict::Pass if segment.has(SYN) => {}
                GuestVerdict::Pass => self.leave(frame),
                GuestVerdict::Bare(len) => {
                    frame.truncate(len);
                    self.leave(frame);
                }
                GuestVerdict::Trimmed(len) => {
                    frame.truncate(len);
                    let check = !words(&frame[segment.offset()..]);
                    let at = segment.offset() + 16;
                    frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
                    self.leave(frame);
                }
                GuestVerdict::Drop => {}
                GuestVerdict::Answer => {
                    let flow = self.table.get(&self.guest.key).unwrap();
                    let with = flow.answer_to_probe(&frame, &segment);
                    let len = segment.answer(&mut frame, &with);
                    let read = read(&frame[..len]);
                    assert!(read.ack.wrapping_sub(self.guest.first) >= self.guest.una);
                    self.guest_gets(&read);
                }
            }
        }
    }

    pub fn guest_gets(&mut self, read: &Read) {
        assert_eq!(read.off_by, 0);
        // What is acknowledged, the peer has.
        let ack = read.ack.wrapping_sub(self.guest.first) as i32;
        let ack = ack.clamp(0, self.guest.written.len() as i32) as u32;
        let piped = self.pipes.iter().filter(|(at, _)| *at < ack).map(|p| p.1).sum::<u32>();
        let has = self.peer.next;
        assert!(ack == 0 || ack + piped <= has, "{ack} + {piped} of {has}");
        for (at, byte) in read.payload.iter().enumerate() {
            let place = read.seq.wrapping_sub(self.guest.their_first).wrapping_add(at as u32);
            if (place as i32) >= self.guest.next as i32 {
                let right = content(BACK, self.place_of_own(place));
                let flow = self.table.get(&self.guest.key);
                assert_eq!(*byte, right, "{at} {place} {:?} {flow:?} {read:?}", self.stretches);
            }
        }
        let delay = self.rng.chance(300);
        if let Some(answer) = self.guest.take(read, delay) {
            self.guest_puts(answer);
        }
    }

    pub fn switch_from_peer(&mut self, mut frame: Vec<u8>) {
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let Some(flow) = self.table.get(&segment.key_of_receiver(&frame)) else { return };
        let (first, len) = (segment.headers_len(), segment.payload_len);
        let sum = match segment.is_sum_right(&frame, &frame[first..first + len]) {
            _ if !flow.wants_checksum(&segment) => Checksum::Unknown,
            true => Checksum::Right,
            false => Checksum::Wrong,
        };
        let events = &mut self.events;
        let to = flow.peer_sends(&frame, &segment, sum, &mut |t, event| events.push((t, event)));
        if to.twin != Share::Nothing {
            let mut copy = frame.clone();
            flow.edit_for_twin(&mut copy, &segment, true, to.twin);
            finish(&mut copy, &segment, to.twin);
            self.twin_gets(&copy);
        }
        if to.guest != Share::Nothing && !self.rng.chance(self.plan.no_buffer) {
            let flow = self.table.get(&self.guest.key).unwrap();
            flow.note_delivery(&segment);
            flow.edit_for_guest(&mut frame, &segment, true, to.guest);
            finish(&mut frame, &segment, to.guest);
            let read = read(&frame);
            if read.off_by == 0 && !segment.has(SYN) {
                self.guest_gets(&read);
            }
        }
    }

    fn twin_gets(&mut self, frame: &[u8]) {
        if let Stage::Receives(_) = self.stage {
            return self.receiver_gets(frame);
        }
        let Stage::Runs { twin, .. } = &mut self.stage else { panic!("no twin") };
        let read = read(frame);
        assert_eq!((read.off_by, read.payload.len()), (0, 0));
        assert_eq!(read.seq, twin.their_first);
        assert!(read.flags & !(ACK | 0xc0) == 0);
        // Blocks of the guest's own bytes are behind its back: as the kernel does.
        let sacks = read.sacks.iter().copied().filter(|b| !after(twin.first, b.0)).collect();
        let answer = twin.take(&Read { sacks, ..read }, false);
        // An acknowledgement that came late: it says so, which the switch makes the guest's.
        if let Some(answer) = answer {
            self.twin_puts(answer);
        }
    }

    pub fn twin_puts(&mut self, mut frame: Vec<u8>) {
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let flow = self.table.get(&self.guest.key).unwrap();
        let events = &mut self.events;
        let mut tell = |t, event| events.push((t, event));
        if flow.edit_from_twin(&mut frame, &segment, true, &mut tell) {
            self.leave(frame);
        }
    }

    fn drive_twin(&mut self) {
        let now = self.now;
        self.drive_receiver();
        let Stage::Runs { twin, .. } = &mut self.stage else { return };
        twin.now = now;
        for frame in twin.tick(MSS) {
            // What is for a TAP may be lost there, too.
            if !self.rng.chance(self.plan.loss) {
                self.twin_puts(frame);
            }
        }
    }

    /// Place in the whole stream of the next byte that is written.
    pub fn next_place(&self) -> u32 {
        self.guest.written.len() as u32 + self.pipes.iter().map(|p| p.1).sum::<u32>()
    }

    pub fn guest_writes(&mut self, n: u32) {
        let from = self.next_place();
        self.guest.written.extend((from..from + n).map(|at| content(OUT, at)));
    }
}

fn extract(from: &mut Vec<(u32, Vec<u8>)>, now: u32) -> Vec<(u32, Vec<u8>)> {
    let mut due: Vec<_> = Vec::new();
    let mut k = 0;
    while k < from.len() {
        if from[k].0 <= now { due.push(from.remove(k)) } else { k += 1 }
    }
    due.sort_by_key(|(at, _)| *at);
    due
}
