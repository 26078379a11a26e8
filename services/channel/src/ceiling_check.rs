//! Check that a member keeps to its ceiling, by what its peers say that they received of it.
//!
//! A member's kernel module has the ceiling from its mailbox and holds back what is above it. One
//! that does not would lie about what it sent, so its own counters are not asked.
//!
//! What peers received is charged to an *excess*, which falls by [`TOLERANCE`] times the ceiling
//! and never below zero. An honest member sends at most the ceiling and its burst. Its peers may
//! take later what waited in their rings, and report later what they took: so the excess stays
//! below its burst, all that fits into the rings, and what it may send within the longest delay of
//! a report. Above that, it is over its ceiling.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use guest_abi::channel::{
    CHUNK_LEN, MAX_FIFO_CHUNKS, MAX_MESSAGE_LEN, MIN_CHARGE_LEN, RING_LEN, SLOTS,
};

use crate::ceiling::Ceiling;

/// Factor of the ceiling by which the excess falls, as a fraction: clocks differ, and a kernel's
/// timers are late.
const TOLERANCE: (u128, u128) = (5, 4);
/// Longest delay of a report, and of a new ceiling on its way to the module.
const MIN_DELAY_MS: u64 = 10_000;
/// Heartbeats, each with a report, that one may be late by.
const LATE_BEATS: u64 = 4;
const NS_PER_S: u128 = 1_000_000_000;

/// Bytes that wait in one ring at most: pages by reference, and copies.
const RING_BYTES: u64 =
    SLOTS as u64 * MAX_MESSAGE_LEN as u64 + (MAX_FIFO_CHUNKS * CHUNK_LEN) as u64;

/// Amounts that one peer has received of the member since their link began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    /// Number of the peer's load of its module.
    pub generation: u64,
    pub messages: u64,
    pub bytes: u64,
}

impl Received {
    /// Amounts that came since `last`. Where they are less, or of another load, the link has begun
    /// anew: all of them.
    fn since(self, last: Option<Self>) -> (u64, u64) {
        let goes_on = |last: &Self| {
            last.generation == self.generation
                && last.messages <= self.messages
                && last.bytes <= self.bytes
        };
        match last.filter(goes_on) {
            Some(last) => (self.messages - last.messages, self.bytes - last.bytes),
            None => (self.messages, self.bytes),
        }
    }
}

/// Facts of a domain that bound what an honest member may seem to exceed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slack {
    /// Rings to each peer.
    pub queues: u64,
    pub heartbeat_ms: u32,
}

impl Slack {
    fn delay_ms(self) -> u64 {
        MIN_DELAY_MS.max(LATE_BEATS * u64::from(self.heartbeat_ms))
    }
}

/// Check of one member.
#[derive(Debug)]
pub(crate) struct CeilingCheck {
    ceiling: Ceiling,
    /// Ceiling that the module may still keep to, and until when.
    earlier: Option<(Ceiling, Instant)>,
    /// Last counters of each peer, by the serial number of its membership; none: no link.
    seen: BTreeMap<u64, Option<Received>>,
    bytes: Excess,
    messages: Excess,
    at: Instant,
}

impl CeilingCheck {
    /// Makes a check of a member whose module has the ceiling from its start.
    pub fn new(ceiling: Ceiling, now: Instant) -> Self {
        let (bytes, messages) = (Excess::new("bytes", now), Excess::new("messages", now));
        Self { ceiling, earlier: None, seen: BTreeMap::new(), bytes, messages, at: now }
    }

    /// Ceiling for the module.
    pub fn ceiling(&self) -> Ceiling {
        self.ceiling
    }

    /// Changes the ceiling. Until the module has surely read the new one, and peers have reported
    /// what they received before, the looser of both is checked.
    pub fn set(&mut self, ceiling: Ceiling, slack: Slack, now: Instant) {
        if ceiling != self.ceiling {
            let until = now + Duration::from_millis(slack.delay_ms());
            self.earlier = Some((self.checked(now), until));
            self.ceiling = ceiling;
        }
    }

    /// Ceiling that is checked now.
    fn checked(&self, now: Instant) -> Ceiling {
        match self.earlier {
            Some((earlier, until)) if now < until => earlier.loosest(self.ceiling),
            _ => self.ceiling,
        }
    }

    /// Charges what each peer, by the serial number of its membership, has received since the last
    /// time. Returns by how much the member is over its ceiling, as a text.
    pub fn check(
        &mut self,
        peers: &[(u64, Option<Received>)],
        slack: Slack,
        now: Instant,
    ) -> Option<String> {
        let step = now.saturating_duration_since(self.at);
        self.at = now;
        if self.ceiling.is_none() {
            self.seen.clear();
            return None;
        }
        let (messages, bytes) = self.take_new(peers);
        let ceiling = self.checked(now);
        let rings = peers.len() as u64 * slack.queues;
        let spare_ms = u64::from(ceiling.burst_ms) + slack.delay_ms();
        let bytes = bytes.max(messages.saturating_mul(MIN_CHARGE_LEN.into()));
        let limit = Limit { rate: ceiling.bytes_per_s, spare_ms, spare: rings * RING_BYTES };
        let over = self.bytes.charge(bytes, &limit, step, now);
        let limit = Limit { rate: ceiling.ops_per_s, spare_ms, spare: rings * RING_LEN as u64 };
        over.or(self.messages.charge(messages, &limit, step, now))
    }

    /// Messages and bytes that are new. What a peer had received before it was first looked at is
    /// not: there may have been no ceiling then.
    fn take_new(&mut self, peers: &[(u64, Option<Received>)]) -> (u64, u64) {
        let mut sum = (0_u64, 0_u64);
        for (peer, received) in peers {
            let last = self.seen.insert(*peer, *received);
            if let (Some(last), Some(received)) = (last, received) {
                let (messages, bytes) = received.since(last);
                sum = (sum.0.saturating_add(messages), sum.1.saturating_add(bytes));
            }
        }
        self.seen.retain(|serial, _| peers.iter().any(|(peer, _)| peer == serial));
        sum
    }
}

/// Limit of an excess.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// Ceiling, per second; 0: none.
    rate: u64,
    /// Time of the ceiling that an honest member may seem to exceed.
    spare_ms: u64,
    /// Amount besides.
    spare: u64,
}

/// Amount received above a ceiling.
#[derive(Debug)]
struct Excess {
    unit: &'static str,
    /// Amount, times nanoseconds of a second and the tolerance's denominator: nothing is rounded.
    level: u128,
    /// Time since which it is above zero, and all that was received since.
    since: Instant,
    sum: u64,
}

impl Excess {
    fn new(unit: &'static str, now: Instant) -> Self {
        Self { unit, level: 0, since: now, sum: 0 }
    }

    /// Charges what was received within `step`, until now.
    fn charge(
        &mut self,
        amount: u64,
        limit: &Limit,
        step: Duration,
        now: Instant,
    ) -> Option<String> {
        let scale = NS_PER_S * TOLERANCE.1;
        let before = self.level;
        let fall = u128::from(limit.rate) * step.as_nanos() * TOLERANCE.0;
        self.level = (before + u128::from(amount) * scale).saturating_sub(fall);
        if self.level == 0 || limit.rate == 0 {
            *self = Self::new(self.unit, now);
            return None;
        }
        if before == 0 {
            self.since = now.checked_sub(step).unwrap_or(now);
        }
        self.sum = self.sum.saturating_add(amount);
        let most = u128::from(limit.rate) * u128::from(limit.spare_ms) / 1000;
        (self.level > (most + u128::from(limit.spare)) * scale).then(|| self.text(limit.rate, now))
    }

    fn text(&self, rate: u64, now: Instant) -> String {
        let (sum, unit) = (self.sum, self.unit);
        let ms = now.saturating_duration_since(self.since).as_millis().max(1);
        let had = u128::from(sum) * 1000 / ms;
        format!(
            "its peers received {sum} {unit} of it in {ms} ms, which is {had} per second; its \
             ceiling is {rate}"
        )
    }
}

#[cfg(test)]
mod tests;
