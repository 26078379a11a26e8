//! Requests of pipes to a connection, between two of its segments.

use base::clock::{Clock, MonotonicClock};

use crate::bare_segment::{BareSegment, reversed};
use crate::flow::Flow;
use crate::segment::{ACK, Answer, RST};
use crate::takeover::{Relief, Resets, Snapshot};
use crate::tracker::Tracker;
use crate::types::{FlowError, FlowKey, FlowSnapshot, ReceiveStart};

impl Tracker {
    fn flow(&mut self, key: &FlowKey) -> Result<&mut Flow, FlowError> {
        self.table.get(key).ok_or(FlowError::Unknown)
    }

    /// Changes a connection; what comes of it is noted before the next segment.
    fn change(
        &mut self,
        key: &FlowKey,
        f: impl FnOnce(&mut Flow) -> Result<(), FlowError>,
    ) -> Result<(), FlowError> {
        let answer = f(self.flow(key)?);
        self.table.save(key);
        answer
    }

    /// Time since which segments of the connection could have gone another way than by this port:
    /// since it began, as [`MonotonicClock`] counts. None: it is shifted, so that they could not.
    pub fn free_since_ns(&mut self, key: &FlowKey) -> Result<Option<u64>, FlowError> {
        let flow = self.flow(key)?;
        Ok((!flow.is_shifted()).then_some(flow.begun_ns))
    }

    /// Connections whose segments have to pass this port from now on: a pipe has them or is about
    /// to, or they are shifted.
    pub fn bound(&self) -> Vec<FlowKey> {
        self.table.bound(MonotonicClock.now_ns())
    }

    /// Ends connections that lost a twin with the last daemon: the guest is asked to speak, and
    /// what it says is answered with a reset; then its peer is. Returns how many there are.
    pub fn end_broken(&mut self, notices: &mut Vec<BareSegment>) -> usize {
        // The guest alone: the peer is asked once the guest has spoken ([`Flow::edit_prompt`]). It
        // answers such a segment only twice a second, and the guest must be past its reset by then.
        let before = notices.len();
        notices.extend(self.table.broken().map(|(key, flow)| prompt(key, flow)));
        notices.len() - before
    }

    /// Asks for the numbers of a sending twin, and reserves the connection for the pipe of that
    /// token until [`Tracker::start`] or [`Tracker::finish`]. `sent_bytes` is what the guest says
    /// that it has sent over the connection, each byte once.
    pub fn snapshot(
        &mut self,
        key: &FlowKey,
        sent_bytes: u64,
        token: u64,
    ) -> Result<Snapshot, FlowError> {
        self.flow(key)?.snapshot(sent_bytes, token)
    }

    /// Begins the twin, which exists by now: it sends `len` bytes.
    pub fn start(
        &mut self,
        key: &FlowKey,
        token: u64,
        taken: &FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError> {
        self.change(key, |flow| flow.start(token, taken, len))
    }

    /// Notes that the twin was given only `len` bytes. True: all of them are acknowledged already,
    /// no event comes.
    pub fn retarget(&mut self, key: &FlowKey, token: u64, len: u32) -> Result<bool, FlowError> {
        Ok(self.flow(key)?.send.retarget(token, len))
    }

    /// Asks for the numbers of another twin that takes the place of the one that sends. Nothing
    /// changes here: both send the same bytes.
    pub fn relief(&mut self, key: &FlowKey, token: u64) -> Result<Relief, FlowError> {
        self.flow(key)?.relief(token)
    }

    /// Ends the twin, all `len` bytes of which the peer has, or none were sent: the guest goes on
    /// behind them. [`FlowError::Broken`]: that is not so, and the connection has to be reset.
    pub fn finish(&mut self, key: &FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        self.change(key, |flow| flow.finish(token, len))
    }

    /// Asks for the numbers of a receiving twin, and reserves the connection for the pipe of that
    /// token until [`Tracker::receive_start`] or [`Tracker::receive_finish`]. `received_bytes` is
    /// what the guest says that it has received over the connection, each byte once. Refuses a
    /// connection whose peer has closed its direction ([`FlowError::Closing`]), and a count that
    /// cannot be ([`FlowError::Changed`]).
    pub fn receive_snapshot(
        &mut self,
        key: &FlowKey,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.flow(key)?.receive_snapshot(received_bytes, token)
    }

    /// Begins a receiving twin, which exists by now, with the numbers of `taken`. The pipe wants
    /// `wanted_bytes` of the peer's stream behind the first `received_bytes`: of these, what has
    /// passed to the guest by now stays the guest's, and the twin receives the rest, 1 GiB at most.
    /// If nothing is left for it, nothing begins, and the connection is free again.
    pub fn receive_start(
        &mut self,
        key: &FlowKey,
        token: u64,
        taken: &FlowSnapshot,
        (received_bytes, wanted_bytes): (u64, u32),
        notices: &mut Vec<BareSegment>,
    ) -> Result<ReceiveStart, FlowError> {
        let flow = self.flow(key)?;
        let answer = flow.receive_start(token, taken, received_bytes, wanted_bytes);
        // The guest may have bytes that it has not acknowledged, and waits with that for company,
        // which will not come: it is asked to speak.
        if flow.receive.split().is_some() && !flow.receive.twin_speaks() {
            notices.push(prompt(key, flow));
        }
        self.table.save(key);
        answer
    }

    /// Notes that the guest has read all of its own bytes, in front of the twin's: the peer hears
    /// of the twin's from now on.
    pub fn receive_own(
        &mut self,
        key: &FlowKey,
        token: u64,
        notices: &mut Vec<BareSegment>,
    ) -> Result<(), FlowError> {
        self.settle(key, notices, |flow| flow.receive_own(token))
    }

    /// Stops the twin: of its bytes those stay that were taken from it, which are at least
    /// `taken_bytes`, and those that the peer was told to have arrived. Returns how many that are:
    /// all of them are in the twin, and more may be, which come to the guest. Asked again, it says
    /// the same.
    pub fn receive_stop(
        &mut self,
        key: &FlowKey,
        token: u64,
        taken_bytes: u32,
        notices: &mut Vec<BareSegment>,
    ) -> Result<u32, FlowError> {
        self.settle(key, notices, |flow| flow.receive_stop(token, taken_bytes))
    }

    /// Ends the twin, from which `len` bytes were taken: the guest goes on behind them. That may be
    /// less than it was to receive only as [`Tracker::receive_stop`] said: of what has arrived
    /// beyond, nobody can tell whether the peer or the guest counts on it already
    /// ([`FlowError::Broken`]), and the connection has to be reset.
    pub fn receive_finish(
        &mut self,
        key: &FlowKey,
        token: u64,
        len: u32,
        notices: &mut Vec<BareSegment>,
    ) -> Result<(), FlowError> {
        self.settle(key, notices, |flow| flow.receive_finish(token, len))
    }

    /// Ends the connection with a reset to both sides: bytes of it are lost. Unless the pipe of
    /// that token has it no more ([`FlowError::Unknown`]).
    pub fn reset(
        &mut self,
        key: &FlowKey,
        token: u64,
        notices: &mut Vec<BareSegment>,
    ) -> Result<(), FlowError> {
        let flow = self.flow(key)?;
        let Resets { to_peer, to_guest } = flow.give_up(token).ok_or(FlowError::Unknown)?;
        let macs = flow.macs;
        self.table.save(key);
        let reset = |numbers| Answer::plain(RST | ACK, numbers);
        notices.push(BareSegment::new(key, &macs, &reset(to_peer)));
        notices.push(BareSegment::new(&key.mirror(), &reversed(&macs), &reset(to_guest)));
        Ok(())
    }

    /// Ends something of a twin that receives: peer and guest are told what they would else hear
    /// only when they ask, the one the guest's window, the other that its stream has ended.
    fn settle<R>(
        &mut self,
        key: &FlowKey,
        notices: &mut Vec<BareSegment>,
        f: impl FnOnce(&mut Flow) -> Result<R, FlowError>,
    ) -> Result<R, FlowError> {
        let flow = self.flow(key)?;
        let fin = flow.receive.twin.and_then(|receiving| receiving.fin);
        let was_there = flow.receive.twin.is_some();
        let answer = f(flow);
        if was_there && answer.is_ok() && !flow.reset {
            let macs = flow.macs;
            notices.push(BareSegment::new(key, &macs, &flow.to_peer()));
            if let Some(says) = flow.fin_to_guest(fin) {
                notices.push(BareSegment::new(&key.mirror(), &reversed(&macs), &says));
            }
        }
        self.table.save(key);
        answer
    }
}

/// Segment that has the guest of a connection speak, in the guest's own numbers.
fn prompt(key: &FlowKey, flow: &Flow) -> BareSegment {
    BareSegment::to_guest(key, &flow.macs, &Answer::plain(ACK, flow.prompt()))
}
