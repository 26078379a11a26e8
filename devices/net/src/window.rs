//! Receive window: how much may lie before a guest's kernel when the next datagram waits.
//!
//! A kernel that is handed frames without end goes on taking them, and its programs do not run:
//! what they should have read is dropped at their sockets (receive livelock: Mogul and
//! Ramakrishnan, 1997). Its ring is empty all the time, so nobody waits for buffers. But a driver
//! that has taken everything says so, as it asks for an interrupt at the next buffer. Until then it
//! gets [`WINDOW`] buffers of datagrams and no more. Nothing tells the switch of that moment, so it
//! looks: about once or twice for each window, as it learns how long the guest takes.

use frame::{IPPROTO_TCP, L4};

/// Most buffers of datagrams before a kernel that has not asked for more: what Linux takes in one
/// turn of its driver, and less than a socket of default size can hold. Half as many left the guest
/// idle in between, twice as many lost 12 % of a flood (one CPU, emulated).
pub(crate) const WINDOW: usize = 64;

/// Least time that a buffer is thought to take, so that looks do not follow each other at once.
const MIN_BUFFER_NS: u64 = 50;

/// Whether a frame waits for a window: anything but TCP, which nobody sends faster than its
/// receiver reads.
#[inline]
pub(crate) fn applies(eth: &[u8]) -> bool {
    L4::find(eth).is_none_or(|l4| l4.proto != IPPROTO_TCP)
}

/// Account of what lies before the kernel of one receive queue.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Buffers of datagrams that were published since the driver was seen waiting.
    untaken: usize,
    /// Time at which the first of them became visible.
    since_ns: u64,
    /// Time after which a look at a buffer is worth it, as learnt.
    buffer_ns: u64,
    /// When the next look is worth it.
    look_ns: u64,
    /// A look was too early.
    was_early: bool,
    /// The driver was seen waiting, so it asks for interrupts.
    is_known: bool,
    /// The sender that was held last waits for this, and not for buffers.
    pub is_awaited: bool,
}

impl Window {
    /// Buffers were published, so many of them with datagrams; the driver had taken all that were
    /// there before, or not.
    #[inline]
    pub fn published(&mut self, datagrams: usize, driver_waited: bool, now_ns: u64) {
        if driver_waited {
            self.open();
            self.is_known = true;
        }
        if self.untaken == 0 {
            self.since_ns = now_ns;
        }
        self.untaken = self.untaken.saturating_add(datagrams);
        if !self.was_early {
            self.look_ns = self.since_ns.saturating_add(self.untaken as u64 * self.buffer_ns);
        }
    }

    fn open(&mut self) {
        (self.untaken, self.was_early) = (0, false);
    }

    /// Lets everything pass until the driver is seen waiting again.
    pub fn forget(&mut self) {
        self.open();
        self.is_known = false;
    }

    /// Whether datagrams are worth counting.
    #[inline]
    pub fn counts(&self) -> bool {
        self.is_known
    }

    /// Whether there is enough before the kernel, with `unpublished` buffers that are filled and
    /// not told of. A kernel that has nothing may get all of a round.
    #[inline]
    pub fn is_full(&self, unpublished: usize) -> bool {
        let is_before_it = self.is_known && self.untaken > 0;
        is_before_it && self.untaken.saturating_add(unpublished) >= WINDOW
    }

    /// Whether a full window is open again: looks if it is time to.
    pub fn look(&mut self, now_ns: u64, driver_waits: impl FnOnce() -> bool) -> bool {
        if now_ns < self.look_ns {
            return false;
        }
        if driver_waits() {
            if !self.was_early {
                self.buffer_ns /= 2;
            }
            self.open();
            return true;
        }
        let took_ns = now_ns.saturating_sub(self.since_ns) / self.untaken.max(1) as u64;
        // Not more than twice as much at once: it may have had no CPU for a while.
        let most_ns = (2 * self.buffer_ns).max(MIN_BUFFER_NS);
        self.buffer_ns = self.buffer_ns.max(took_ns.clamp(MIN_BUFFER_NS, most_ns));
        self.was_early = true;
        self.look_ns = now_ns.saturating_add(self.untaken as u64 * self.buffer_ns / 4);
        false
    }

    /// When the next look is worth it.
    pub fn look_ns(&self) -> u64 {
        self.look_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window with as much as it takes, published at time 0.
    fn full(buffer_ns: u64) -> Window {
        let mut window = Window { buffer_ns, ..Window::default() };
        window.published(WINDOW, true, 0);
        window
    }

    #[test]
    fn it_is_full_when_a_driver_that_asks_for_interrupts_has_taken_nothing() {
        let mut window = Window::default();
        window.published(10 * WINDOW, false, 0);
        assert!(!window.is_full(0), "this driver may never ask");
        window.published(WINDOW - 2, true, 0);
        assert!(!window.is_full(1) && window.is_full(2));
        window.published(1, false, 0);
        assert!(window.is_full(1));
        window.published(1, true, 0);
        assert!(!window.is_full(WINDOW - 2));
        window.open();
        assert!(!window.is_full(4 * WINDOW));
        window.forget();
        window.published(WINDOW, false, 0);
        assert!(!window.is_full(0));
    }

    #[test]
    fn looks_come_as_often_as_the_guest_needs() {
        let mut window = full(1_000);
        let end_ns = WINDOW as u64 * 1_000;
        assert_eq!(window.look_ns(), end_ns);
        assert!(!window.look(end_ns - 1, || panic!("too early")));
        // Too early: twice the time from now on, and a quarter of it until the next look.
        assert!(!window.look(2 * end_ns, || false));
        assert_eq!(window.look_ns(), 2 * end_ns + end_ns / 2);
        assert!(window.look(3 * end_ns, || true) && !window.is_full(0));
        // In time: half of it.
        window.published(WINDOW, true, 0);
        assert_eq!(window.look_ns(), 2 * end_ns);
        assert!(window.look(2 * end_ns, || true));
        window.published(WINDOW, true, 0);
        assert_eq!(window.look_ns(), end_ns);
    }

    #[test]
    fn only_tcp_does_not_wait() {
        let tcp = frame::testing::super_packet(false, false, 2000, 500).0;
        let udp = frame::testing::super_packet(true, true, 2000, 500).0;
        assert!(!applies(&tcp) && applies(&udp) && applies(&[0; 60]));
    }
}
