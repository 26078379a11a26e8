//! Choice of the part that comes next, and the parts in which a twin sends.

use super::Part;
use super::ends::{End, SCALE, content};
use super::receive::Takes;
use super::simulation::{OUT, Simulation, Stage};
use crate::takeover::Snapshot;
use crate::{FlowError, FlowEvent, FlowSnapshot};

impl Simulation {
    pub fn drive_pipe(&mut self) {
        let stage = std::mem::replace(&mut self.stage, Stage::Idle);
        self.stage = match stage {
            Stage::Idle => self.begin_part(),
            Stage::Asked { len, waits, since } => self.ask(len, waits, since),
            Stage::Receives(takes) => self.drive_receiving(takes),
            Stage::Ready { len, taken, at } if at > self.now => Stage::Ready { len, taken, at },
            Stage::Ready { len, taken, .. } => self.start(len, taken),
            Stage::Runs { len, twin, cut } => self.run_pipe(len, twin, cut),
        };
    }

    fn begin_part(&mut self) -> Stage {
        if self.parts.is_empty() {
            self.guest.closes = true;
            return Stage::Idle;
        }
        if !self.rng.chance(50) {
            return Stage::Idle;
        }
        match self.parts.pop_front().unwrap() {
            Part::Send { bytes, len } => {
                self.guest_writes(bytes);
                Stage::Asked { len, waits: false, since: self.now }
            }
            Part::Receive { wanted, patience, appetite, buffer } => {
                Stage::Receives(Takes::new(wanted, self.now + patience, appetite, buffer))
            }
            Part::Restart => {
                self.restart();
                Stage::Idle
            }
        }
    }

    fn ask(&mut self, len: u32, waits: bool, since: u32) -> Stage {
        let settled =
            self.events.iter().filter(|e| **e == (self.token, FlowEvent::Settled)).count();
        assert!(settled <= 1, "told twice");
        // The agent waits until all is sent. (A pipe that has to wait is told.)
        let is_late = self.is_new_daemon && self.now - since > 2000;
        let is_sending = self.guest.nxt < self.guest.written.len() as u32;
        if !is_late && (is_sending || (waits && settled == 0)) {
            return Stage::Asked { len, waits, since };
        }
        let flow = self.table.get(&self.guest.key).unwrap();
        match flow.snapshot(self.guest.nxt.into(), self.token) {
            // After a restart it may not be known what has passed: no pipe then.
            _ if is_late => {
                flow.finish(self.token, 0).unwrap();
                self.token += 1;
                Stage::Idle
            }
            Ok(Snapshot::Ready(taken)) => {
                Stage::Ready { len, taken, at: self.now + self.rng.below(10) }
            }
            Ok(Snapshot::Waiting) => {
                assert!(!waits || self.is_new_daemon, "settled, but not ready");
                Stage::Asked { len, waits: true, since }
            }
            // The stream is not joined yet.
            Err(FlowError::Busy) => Stage::Asked { len, waits, since },
            Err(error) => panic!("{error}"),
        }
    }

    fn start(&mut self, len: u32, taken: FlowSnapshot) -> Stage {
        // Said to be longer than it is.
        let said = if self.rng.chance(300) { len + 1000 } else { len };
        let flow = self.table.get(&self.guest.key).unwrap();
        flow.start(self.token, &taken, said).unwrap();
        self.note();
        // Its clock is not quite the guest's.
        let clock = taken.timestamp.wrapping_sub(self.now).wrapping_add(self.rng.below(50));
        let (first, theirs) = (taken.send_seq, taken.receive_seq);
        let mut twin = End::new("twin", self.guest.key, first, theirs, clock);
        twin.has_timestamps = self.plan.timestamps;
        let in_flight = taken.send_seq.wrapping_sub(taken.acked_seq);
        twin.edge = (u32::from(taken.send_window) << SCALE).saturating_sub(in_flight);
        let from = self.next_place();
        twin.written = (from..from + len).map(|at| content(OUT, at)).collect();
        self.pipes.push((self.guest.written.len() as u32, len));
        Stage::Runs { len, twin: Box::new(twin), cut: (said > len).then_some(self.now + 50) }
    }

    fn run_pipe(&mut self, len: u32, twin: Box<End>, mut cut: Option<u32>) -> Stage {
        let token = self.token;
        let told = self.events.contains(&(token, FlowEvent::Acknowledged));
        if cut.is_some_and(|at| at <= self.now) {
            cut = None;
            let flow = self.table.get(&self.guest.key).unwrap();
            if flow.send.retarget(token, len) {
                self.events.push((token, FlowEvent::Acknowledged));
            }
        }
        if self.plan.rude && self.rng.chance(10) && self.guest.written.len() < 20_000 {
            let n = 1 + self.rng.below(600);
            self.guest_writes(n);
        }
        if cut.is_none() && len > 0 && twin.is_all_acked() {
            assert!(told || self.events.contains(&(token, FlowEvent::Acknowledged)), "not told");
        }
        if cut.is_some() || !twin.is_all_acked() || !self.rng.chance(100) {
            return Stage::Runs { len, twin, cut };
        }
        let flow = self.table.get(&self.guest.key).unwrap();
        assert_eq!(flow.finish(token, len), Ok(()));
        self.note();
        self.token += 1;
        Stage::Idle
    }
}
