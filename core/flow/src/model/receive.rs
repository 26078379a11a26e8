//! The parts of a run in which a twin receives, and restarts.

use super::ends::{End, SCALE, content};
use super::simulation::{BACK, Simulation, Stage};
use crate::FlowError;
use crate::flow::Flow;
use crate::segment::{ACK, FIN, PSH};
use crate::testing::{Build, mirror, read, timestamps};
use crate::{FlowEvent, FlowSnapshot};

/// A part of the peer's stream that went to a twin.
#[derive(Debug)]
pub struct Stretch {
    /// Behind so many bytes of the guest's own.
    own: u32,
    /// How many bytes the twin is to have.
    len: u32,
    /// How many it has.
    got: u32,
}

/// A pipe that takes what a twin receives.
pub struct Takes {
    wanted: u32,
    until: u32,
    appetite: u32,
    buffer: u32,
    reserved: Option<(FlowSnapshot, u32, u32)>,
    twin: Option<Box<End>>,
    is_stopped: bool,
}

impl Takes {
    pub fn new(wanted: u32, until: u32, appetite: u32, buffer: u32) -> Self {
        let (reserved, twin, is_stopped) = (None, None, false);
        Self { wanted, until, appetite, buffer, reserved, twin, is_stopped }
    }
}

impl Simulation {
    fn flow(&mut self) -> &mut Flow {
        self.table.get(&self.guest.key).unwrap()
    }

    /// How far the peer's stream has arrived, whoever has it.
    pub fn arrived(&self) -> u32 {
        let mut twins = 0;
        for stretch in &self.stretches {
            if self.guest.next < stretch.own {
                return self.guest.next + twins;
            }
            twins += stretch.got.min(stretch.len);
            if stretch.got < stretch.len {
                return stretch.own + twins;
            }
        }
        self.guest.next + twins
    }

    /// Place in the peer's stream of a byte of the guest's.
    pub fn place_of_own(&self, at: u32) -> u32 {
        let before = self.stretches.iter().filter(|stretch| stretch.own <= at);
        at + before.map(|stretch| stretch.len).sum::<u32>()
    }

    /// Checks that the guest has all that went to no twin, byte for byte.
    pub fn check_stretches(&self) {
        let twins: u32 = self.stretches.iter().map(|stretch| stretch.len).sum();
        assert_eq!(self.guest.came.len() as u32 + twins, self.plan.peer_bytes);
        for (at, byte) in self.guest.came.iter().enumerate() {
            let place = self.place_of_own(at as u32);
            assert_eq!(*byte, Some(content(BACK, place)), "back at {at}, {:?}", self.stretches);
        }
    }

    /// Keeps a record, as the journal is written.
    pub fn note(&mut self) {
        let key = self.guest.key;
        let flow = self.flow();
        let is_new = flow.is_shifted() || flow.is_broken;
        let record = is_new.then(|| flow.record(key));
        let was = self.noted;
        // Segments alone are noted only when they change the shift.
        if was.map(|r| (r.shift, r.has_twin)) != record.map(|r| (r.shift, r.has_twin)) {
            self.noted = record;
        }
    }

    pub fn restart(&mut self) {
        // What is not shifted is not known to the next daemon, and without pipes from then on; a
        // twin would be lost.
        let Some(record) = self.noted.filter(|record| !record.has_twin) else { return };
        let now_ns = self.now.into();
        *self.flow() = Flow::restored(&record, now_ns);
        self.is_new_daemon = true;
    }

    pub fn drive_receiving(&mut self, takes: Takes) -> Stage {
        if takes.twin.is_some() {
            return self.take_from(takes);
        }
        match takes.reserved {
            None => self.ask_to_receive(takes),
            Some((_, _, at)) if at > self.now => Stage::Receives(takes),
            Some((taken, received, _)) => self.start_receiving(takes, taken, received),
        }
    }

    fn ask_to_receive(&mut self, mut takes: Takes) -> Stage {
        let received = self.guest.next;
        let (token, at) = (self.token, self.now + self.rng.below(30));
        match self.flow().receive_snapshot(received.into(), token) {
            Ok(taken) => {
                takes.reserved = Some((taken, received, at));
                Stage::Receives(takes)
            }
            Err(FlowError::Closing) => Stage::Idle,
            Err(FlowError::Busy) if self.now >= takes.until => Stage::Idle,
            // Another one's stream is not joined yet; or the new daemon has not heard the guest.
            Err(FlowError::Busy | FlowError::Changed) if self.now < takes.until => {
                Stage::Receives(takes)
            }
            Err(FlowError::Changed) => {
                assert!(self.is_new_daemon);
                Stage::Idle
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn start_receiving(&mut self, mut takes: Takes, taken: FlowSnapshot, received: u32) -> Stage {
        let (token, wanted) = (self.token, takes.wanted);
        let start = self.flow().receive_start(token, &taken, received.into(), wanted);
        self.note();
        let start = match start {
            Ok(start) if start.twin_bytes > 0 => start,
            Ok(_) | Err(FlowError::Closing) => {
                assert!(!self.flow().is_needed() || self.flow().is_shifted());
                self.token += 1;
                return Stage::Idle;
            }
            Err(error) => panic!("{error}"),
        };
        assert_eq!(start.own_bytes + start.twin_bytes, wanted);
        let own = received + start.own_bytes;
        self.stretches.push(Stretch { own, len: start.twin_bytes, got: 0 });
        let clock = taken.timestamp.wrapping_sub(self.now).wrapping_add(self.rng.below(50));
        let (first, theirs) = (taken.send_seq, taken.receive_seq);
        let mut twin = End::new("receiver", self.guest.key, first, theirs, clock);
        (twin.has_timestamps, twin.has_sack) = (self.plan.timestamps, self.plan.sack);
        twin.open(u32::from(taken.receive_window) << SCALE);
        (twin.buffer, twin.now) = (takes.buffer, self.now);
        takes.twin = Some(Box::new(twin));
        if self.flow().receive.split().is_some()
            && !self.flow().receive.twin_speaks()
            && self.rng.chance(500)
        {
            let (seq, ack) = self.flow().prompt();
            let frame = Build::new(mirror(&self.guest.key), ACK, seq, ack).frame();
            self.guest_gets(&read(&frame));
        }
        Stage::Receives(takes)
    }

    /// The pipe takes what has arrived, and ends when it has all, or no more comes.
    fn take_from(&mut self, mut takes: Takes) -> Stage {
        let Some(twin) = takes.twin.as_mut() else { panic!("no twin") };
        let token = self.token;
        let told = self.events.iter().filter(|e| **e == (token, FlowEvent::Ended)).count();
        assert!(told <= 1, "told twice");
        if told == 1 && !takes.is_stopped {
            let twins: u32 = self.stretches.iter().map(|s| s.got.min(s.len)).sum();
            let at = self.stretches.last().unwrap().own + twins;
            // A damaged number may have set the twin's beginning behind the end.
            let is_behind = twin.next == 0 && at >= self.plan.peer_bytes;
            assert!(is_behind || at == self.plan.peer_bytes, "the end is elsewhere: {at}");
        }
        let stretch = self.stretches.last_mut().unwrap();
        let most = stretch.len.saturating_sub(twin.taken());
        twin.read(takes.appetite.min(most).min(twin.next - twin.taken()));
        let is_over = told == 1 || self.now >= takes.until;
        if is_over && !std::mem::replace(&mut takes.is_stopped, true) {
            let (taken, has) = (twin.taken(), twin.next);
            let len = self.flow().receive_stop(token, taken).unwrap();
            assert!(taken <= len && len <= has, "{taken} {len} {has}");
            self.stretches.last_mut().unwrap().len = len;
            let again = self.flow().receive_stop(token, taken);
            assert_eq!(again, Ok(len));
            self.tell_both(None);
        }
        let len = self.stretches.last().unwrap().len;
        let is_taken = takes.twin.as_ref().is_some_and(|twin| twin.taken() == len);
        if !is_taken || !self.rng.chance(200) {
            return Stage::Receives(takes);
        }
        let fin = self.flow().receive.twin.and_then(|twin| twin.fin);
        assert_eq!(self.flow().receive_finish(token, len), Ok(()));
        self.note();
        self.tell_both(fin);
        self.token += 1;
        Stage::Idle
    }

    /// Delivers what the port sends when a twin stops or goes; it may be lost.
    fn tell_both(&mut self, fin: Option<u32>) {
        if self.rng.chance(300) {
            return;
        }
        let key = self.guest.key;
        let has_timestamps = self.plan.timestamps;
        let (to_peer, to_guest) = (self.flow().to_peer(), self.flow().fin_to_guest(fin));
        let build = |key, says: crate::segment::Answer| {
            let options = says.timestamps.map_or(vec![], |(value, echo)| timestamps(value, echo));
            assert!(has_timestamps || options.is_empty());
            let new = Build::new(key, says.flags, says.seq, says.ack);
            Build { window: says.window, options, ..new }.frame()
        };
        self.leave(build(key, to_peer));
        if let Some(says) = to_guest {
            self.switch_from_peer(build(mirror(&key), says));
        }
    }

    pub fn receiver_gets(&mut self, frame: &[u8]) {
        let Stage::Receives(Takes { twin: Some(twin), .. }) = &mut self.stage else {
            panic!("no twin")
        };
        let read = read(frame);
        assert!(read.flags & !(ACK | PSH | 0xc0) == 0 && read.flags & FIN == 0);
        assert!(read.sacks.is_empty() || read.off_by != 0);
        // A damaged one passes here, and its kernel drops it.
        if read.off_by != 0 {
            return;
        }
        assert_eq!(read.ack, twin.first);
        let stretch = self.stretches.last_mut().unwrap();
        let end = read.seq.wrapping_sub(twin.their_first) as i32 + read.payload.len() as i32;
        assert!(end <= stretch.len as i32, "{end} for {stretch:?}");
        let delay = self.rng.chance(300);
        let answer = twin.take(&read, delay);
        stretch.got = twin.next;
        let first = stretch.own + self.stretches.iter().rev().skip(1).map(|s| s.len).sum::<u32>();
        for (at, byte) in
            twin.came.iter().enumerate().skip(end as usize - read.payload.len().min(end as usize))
        {
            if let Some(byte) = byte {
                assert_eq!(*byte, content(BACK, first + at as u32), "at {at} of the twin");
            }
        }
        if let Some(answer) = answer {
            self.twin_puts(answer);
        }
    }

    pub fn drive_receiver(&mut self) {
        let now = self.now;
        let Stage::Receives(Takes { twin: Some(twin), .. }) = &mut self.stage else { return };
        twin.now = now;
        for frame in twin.tick(0) {
            // What is for a TAP may be lost there, too.
            if !self.rng.chance(self.plan.loss) {
                self.twin_puts(frame);
            }
        }
    }
}
