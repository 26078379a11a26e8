//! Time of the current round, and the next deadline of connections and handshakes.

use crate::connection::NEVER_NS;

/// Clock of a round, with the earliest deadline that was noted.
#[derive(Debug)]
pub(crate) struct Timer {
    now_ns: u64,
    next_ns: u64,
}

impl Timer {
    pub fn new(now_ns: u64) -> Self {
        Self { now_ns, next_ns: NEVER_NS }
    }

    /// Begins a round.
    pub fn set_now_ns(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Earliest deadline that was noted ([`NEVER_NS`]: none).
    pub fn next_ns(&self) -> u64 {
        self.next_ns
    }

    pub fn is_due(&self) -> bool {
        self.now_ns >= self.next_ns
    }

    /// Time `ns` after the start of the round.
    pub fn after_ns(&self, ns: u64) -> u64 {
        self.now_ns.saturating_add(ns)
    }

    /// Notes a deadline.
    pub fn note(&mut self, at_ns: u64) {
        self.next_ns = self.next_ns.min(at_ns);
    }

    /// Forgets all deadlines.
    pub fn clear(&mut self) {
        self.next_ns = NEVER_NS;
    }
}
