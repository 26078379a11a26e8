//! A queue's flushes: one at a time in the disk, shared by all requests that wait for one.
//!
//! The kernel reports a write-back error once to each opening of a file. Of two flushes at the same
//! time one would get it and the other succeed, and the first answer decides what the guest
//! believes. So a queue has one flush in the disk. Requests that come meanwhile wait, and share the
//! next one: it begins after all writes that they cover. (Kernels merge the flushes of a device in
//! the same way.) Queues do not share openings: see `raw.rs`.
//!
//! Once one failed, all fail: see [`PortState::flush_failure`](crate::port_state::PortState).

/// Slots that wait for a flush. The lists never grow beyond the queue's depth.
pub(super) struct Flushes {
    /// Slot whose flush is in the disk.
    leader: Option<u16>,
    /// Other slots that share this flush.
    shared: Vec<u16>,
    /// Slots that came while it was in the disk: they share the next one.
    next: Vec<u16>,
}

impl Flushes {
    /// Lists for a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        let list = || Vec::with_capacity(usize::from(depth));
        Self { leader: None, shared: list(), next: list() }
    }

    /// Notes that the disk has a flush for this slot: all that wait share it.
    pub fn lead(&mut self, slot: u16) {
        self.leader = Some(slot);
        self.shared.append(&mut self.next);
    }

    /// Lets a slot wait for the next flush. False when no other slot's flush is in the disk.
    pub fn join(&mut self, slot: u16) -> bool {
        let is_led_by_other = self.leader.is_some_and(|leader| leader != slot);
        if is_led_by_other {
            self.next.push(slot);
        }
        is_led_by_other
    }

    /// Ends the leader's flush. `is_lost`: no flush succeeds any more, so those that wait for the
    /// next one end with it.
    pub fn end(&mut self, is_lost: bool) {
        self.leader = None;
        if is_lost {
            self.shared.append(&mut self.next);
        }
    }

    /// Takes a slot that shared the flush which ended.
    pub fn take_shared(&mut self) -> Option<u16> {
        self.shared.pop()
    }

    /// Takes a slot whose flush is the next one; the others share it.
    pub fn take_next(&mut self) -> Option<u16> {
        self.next.pop()
    }
}
