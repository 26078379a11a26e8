//! The connections of one port.

use std::collections::HashMap;

use crate::flow::Flow;
use crate::journal::Journal;
use crate::segment::{ACK, SYN, Segment};
use crate::types::{FlowEvent, FlowKey, MAX_FLOWS};
use crate::verdict::GuestVerdict;

/// Connections looked at to find one that can go.
const PROBES: usize = 16;

/// Time in which stragglers of a shifted connection that is over may come: two segment lifetimes,
/// as TIME-WAIT takes (RFC 9293, 3.4.2), which Linux keeps for a minute.
const STRAGGLER_NS: u64 = 120_000_000_000;

/// Time that a shifted connection is remembered in silence: what Linux's connection tracking does.
const FORGET_NS: u64 = 5 * 86_400 * 1_000_000_000;

/// Table of a port's connections. Never allocates after it was made.
pub(crate) struct FlowTable {
    map: HashMap<FlowKey, u32>,
    slots: Vec<Option<(FlowKey, Flow)>>,
    free: Vec<u32>,
    /// Slot from which the next one that can go is looked for.
    hand: usize,
    /// Connections that found no room.
    pub untracked: u64,
    /// Records of those that are needed, for the next daemon.
    journal: Option<Journal>,
}

impl FlowTable {
    pub fn new(max: usize) -> Self {
        Self {
            // With room for as many again, places of those that went are cleared where they are.
            map: HashMap::with_capacity(2 * max),
            slots: (0..max).map(|_| None).collect(),
            free: (0..max as u32).rev().collect(),
            hand: 0,
            untracked: 0,
            journal: None,
        }
    }

    /// Makes a table that goes on where the last daemon's ended, and is noted for the next one.
    pub fn restored(mut journal: Journal, now_ns: u64) -> Self {
        let mut table = Self::new(MAX_FLOWS);
        for (at, record) in journal.records() {
            // Two places with one name: the later one counts, as it does in the map.
            if let Some(old) = table.map.insert(record.key, at) {
                table.slots[old as usize] = None;
                journal.clear(old);
            }
            table.slots[at as usize] = Some((record.key, Flow::restored(&record, now_ns)));
        }
        table.free.retain(|&at| table.slots[at as usize].is_none());
        table.journal = Some(journal);
        table
    }

    /// Notes what became of a connection.
    pub fn save(&mut self, key: &FlowKey) {
        let (Some(journal), Some(&at)) = (self.journal.as_mut(), self.map.get(key)) else { return };
        let Some((_, flow)) = &mut self.slots[at as usize] else { return };
        flow.mark = flow.journal_mark();
        match flow.is_journaled() {
            true => journal.put(at, &flow.record(*key)),
            false => journal.clear(at),
        }
    }

    /// Connections that lost a twin with the last daemon.
    pub fn broken(&self) -> impl Iterator<Item = (&FlowKey, &Flow)> {
        let all = self.slots.iter().flatten().map(|(key, flow)| (key, flow));
        all.filter(|(_, flow)| flow.is_broken)
    }

    /// Connections that pipes have, are about to have, or have shifted, unless all of it is over.
    pub fn bound(&self, now_ns: u64) -> Vec<FlowKey> {
        let all = self.slots.iter().flatten();
        let bound = all.filter(|(_, flow)| flow.is_needed() && !may_go(flow, now_ns));
        bound.map(|(key, _)| *key).collect()
    }

    /// The connection of that name.
    pub fn get(&mut self, key: &FlowKey) -> Option<&mut Flow> {
        let at = *self.map.get(key)?;
        self.slots[at as usize].as_mut().map(|(_, flow)| flow)
    }

    /// Takes a segment of the guest's.
    #[inline]
    pub fn guest_sends(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        now_ns: u64,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> GuestVerdict {
        let key = segment.key_of_sender(eth);
        if segment.has(SYN) {
            match self.get(&key).filter(|flow| is_sent_again(flow, eth, segment)) {
                Some(flow) => flow.note_syn_again(eth, segment, now_ns),
                None => self.begin(key, eth, segment, now_ns, tell),
            }
            return GuestVerdict::Pass;
        }
        let Some(flow) = self.get(&key) else { return GuestVerdict::Pass };
        flow.seen_ns = now_ns;
        let was = flow.shift;
        let answer = flow.guest_sends(eth, segment, summed, tell);
        // The guest's clock fell behind, and was moved up.
        if flow.shift != was || flow.is_record_stale() {
            self.save(&key);
        }
        answer
    }

    fn begin(
        &mut self,
        key: FlowKey,
        eth: &[u8],
        segment: &Segment,
        now_ns: u64,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) {
        let mut fresh = Flow::begin(eth, segment);
        (fresh.seen_ns, fresh.begun_ns) = (now_ns, now_ns);
        if let Some(flow) = self.get(&key) {
            flow.token().into_iter().for_each(|token| tell(token, FlowEvent::Reset));
            let was_journaled = flow.is_journaled();
            *flow = fresh;
            if was_journaled {
                self.save(&key);
            }
            return;
        }
        match self.free.pop().or_else(|| self.make_room(now_ns)) {
            Some(at) => {
                self.slots[at as usize] = Some((key, fresh));
                self.map.insert(key, at);
            }
            None => self.untracked += 1,
        }
    }

    /// Takes the place of the one that was not seen for longest among the next few.
    fn make_room(&mut self, now_ns: u64) -> Option<u32> {
        let count = self.slots.len();
        let next = (0..PROBES.min(count)).map(|k| (self.hand + k) % count);
        let oldest = next
            .filter_map(|at| self.slots[at].as_ref().map(|(_, flow)| (at, flow)))
            .filter(|(_, flow)| may_go(flow, now_ns))
            .min_by_key(|(_, flow)| (!flow.is_over(), flow.seen_ns))
            .map(|(at, _)| at);
        self.hand = (self.hand + PROBES) % count;
        let at = oldest?;
        let (key, flow) = self.slots[at].take()?;
        self.map.remove(&key);
        if let (Some(journal), true) = (self.journal.as_mut(), flow.is_journaled()) {
            journal.clear(at as u32);
        }
        Some(at as u32)
    }
}

/// Whether a SYN of the guest's is that of a connection that is known already. What answers it may
/// have been lost, or be on its way: then it passes behind what the peer says first, and what was
/// heard must not be forgotten. A new connection has other numbers, or anything of the old one has
/// changed.
fn is_sent_again(flow: &Flow, eth: &[u8], syn: &Segment) -> bool {
    let has_its_numbers = Some(syn.seq.wrapping_add(1)) == flow.send.base
        && match syn.has(ACK) {
            true => flow.is_open && Some(syn.ack) == flow.receive.base,
            // Without the bytes of the first one, if it had some: its answer has another number.
            false => !flow.is_open && syn.end() == flow.send.end,
        };
    let has_its_options = syn.scale == flow.receive.scale
        && syn.timestamps(eth).is_some() == flow.clock.sent.is_some();
    // A guest that sends it behind a pipe has gone back in time, to where there was none.
    let has_gone_on = flow.send.is_closed || flow.reset || flow.is_shifted();
    has_its_numbers && has_its_options && !has_gone_on
}

fn may_go(flow: &Flow, now_ns: u64) -> bool {
    let unseen_ns = now_ns.saturating_sub(flow.seen_ns);
    let is_stale = unseen_ns > FORGET_NS || (flow.is_over() && unseen_ns > STRAGGLER_NS);
    !flow.is_needed() || (!flow.has_twin() && is_stale)
}

#[cfg(test)]
mod tests;
