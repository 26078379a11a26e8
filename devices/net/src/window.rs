//! Receive window: how much may lie before a guest's kernel when the next datagram waits.
//!
//! A kernel that is handed frames without end goes on taking them, and its programs do not run:
//! what they should have read is dropped at their sockets (receive livelock: Mogul and
//! Ramakrishnan, "Eliminating receive livelock in an interrupt-driven kernel", 1997). Its ring is
//! empty all the time, so nobody waits for buffers. As in that paper the kernel has a quota of
//! buffers, [`WINDOW`], and a share of the time, [`SHARE`]: with the quota before it, the next
//! datagrams come when it has taken all and its programs have had their part.
//!
//! A driver that has taken everything asks for an interrupt at the next buffer, which is seen in
//! its ring. Nothing tells the switch of that moment, so it looks: once for each window at the end
//! of its time, and in one window of [`PROBE_EVERY`] once more before, to learn how long the guest
//! takes for a buffer. Had it taken all, the next probe comes sooner, else later, so that a quarter
//! of them find it so. A slower quantile would count times in which the guest had no CPU.

use frame::{IPPROTO_TCP, L4};

use crate::fdb::PortId;
use crate::outcome::Sender;

/// Most buffers of datagrams before a kernel that has not asked for more: what Linux takes in one
/// turn of its driver, and less than a socket of default size can hold.
pub(crate) const WINDOW: usize = 64;

/// A window lasts so many times as long as the kernel needs for it: half of the time is for what
/// reads the datagrams. Less leaves it behind (1.5: a third of a flood was lost by an emulated
/// guest of one CPU), and with more the guest idles (2.25: a fifth less arrived).
const SHARE: u64 = 2;

/// One window of so many is probed.
const PROBE_EVERY: u32 = 8;

/// Least and most time that a guest is thought to take for a buffer. The most makes a window of
/// 13 ms: longer waits are the switch's hold time's to end.
const TAKE_NS: std::ops::RangeInclusive<u64> = 50..=100_000;

/// Whether a frame waits for a window: anything but TCP, which nobody sends faster than its
/// receiver reads.
#[inline]
pub(crate) fn applies(eth: &[u8]) -> bool {
    L4::find(eth).is_none_or(|l4| l4.proto != IPPROTO_TCP)
}

/// Account of what lies before the kernel of one receive queue.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Buffers of datagrams that were published since it was opened.
    untaken: usize,
    /// Time at which the first of them became visible.
    since_ns: u64,
    /// When the next look is worth it.
    look_ns: u64,
    pace: Pace,
    /// The driver was seen waiting, so it asks for interrupts.
    is_known: bool,
    /// A sender waits for it.
    pub is_awaited: bool,
    pub line: Line,
}

impl Window {
    /// Buffers were published, so many of them with datagrams; the driver had taken all that were
    /// there before, or not. Says whether the window was opened.
    #[inline]
    pub fn published(&mut self, datagrams: usize, driver_waited: bool, now_ns: u64) -> bool {
        let opens = driver_waited && now_ns >= self.end_ns();
        if driver_waited {
            self.is_known = true;
        }
        if opens {
            let was_shut = self.untaken > 0;
            self.open();
            // It is open for those in line: what did not wait is not counted this time.
            if was_shut && self.line.count > 0 {
                return true;
            }
        }
        if datagrams > 0 {
            if self.untaken == 0 {
                self.since_ns = now_ns;
                self.untaken = datagrams;
                self.pace.window_began();
            } else {
                // The guest may have begun to take what came before.
                self.pace.is_probe = false;
                // What does not wait must not put the end off for ever.
                let all = self.untaken.saturating_add(datagrams);
                self.untaken = self.untaken.max(all.min(WINDOW));
            }
            self.look_ns = self.first_look_ns();
        }
        opens
    }

    fn open(&mut self) {
        self.untaken = 0;
    }

    /// When the kernel has taken it, as learnt.
    fn taken_ns(&self) -> u64 {
        self.since_ns.saturating_add(self.untaken as u64 * self.pace.take_ns)
    }

    /// When it may be opened.
    fn end_ns(&self) -> u64 {
        self.since_ns + SHARE * (self.taken_ns() - self.since_ns)
    }

    /// When it is looked at first: for a probe, or to open it.
    fn first_look_ns(&self) -> u64 {
        if self.pace.is_probe { self.taken_ns() } else { self.end_ns() }
    }

    /// Whether the kernel has more to take than it can: it was not seen waiting for so long that
    /// the window is of no use. Others feed it, who do not wait.
    pub fn is_late(&self, now_ns: u64, hold_ns: u64) -> bool {
        self.untaken > 0 && now_ns.saturating_sub(self.since_ns) >= hold_ns
    }

    /// Lets everything pass until the driver is seen waiting again.
    pub fn forget(&mut self) {
        self.open();
        (self.is_known, self.line) = (false, Line::default());
    }

    /// Whether datagrams are worth counting.
    #[inline]
    pub fn counts(&self) -> bool {
        self.is_known
    }

    /// Whether there is enough before the kernel, with `unpublished` buffers that are filled and
    /// not told of.
    #[inline]
    pub fn is_full(&self, unpublished: usize) -> bool {
        self.is_known && self.untaken.saturating_add(unpublished) >= WINDOW
    }

    /// Whether a full window is open again: looks if it is time to. One that was filled in this
    /// round is not.
    pub fn look(&mut self, now_ns: u64, driver_waits: impl FnOnce() -> bool) -> bool {
        if self.untaken == 0 || now_ns < self.look_ns {
            return false;
        }
        let waits = driver_waits();
        if self.pace.is_probe {
            let late_ns = now_ns.saturating_sub(self.taken_ns());
            let is_late = late_ns > ((self.taken_ns() - self.since_ns) / 4).max(MAX_LATE_NS);
            if is_late && (waits || self.pace.is_learnt) {
                // It may have waited for long. Only to count the others would favour long times.
                self.pace.put_off();
            } else {
                self.pace.probed(waits);
            }
            self.look_ns = self.first_look_ns();
        }
        if now_ns < self.look_ns {
            return false;
        }
        if waits {
            self.open();
        } else {
            let been_ns = now_ns.saturating_sub(self.since_ns);
            self.look_ns = now_ns.saturating_add((been_ns / 4).max(*TAKE_NS.start()));
        }
        waits
    }

    /// When the next look is worth it.
    pub fn look_ns(&self) -> u64 {
        self.look_ns
    }
}

/// A probe may be so late in any case, else by a quarter of what it measures.
const MAX_LATE_NS: u64 = 5_000;

/// Ports that have a place in the line of a window. Others wait until there is one.
const MAX_LINE: usize = 64;

/// Line of the ports that wait for one window: each has a turn, with all its queues.
///
/// Whoever is asked first when it opens would fill it: always the same one, where its place in the
/// rounds and their number between two windows are in step.
#[derive(Debug)]
pub(crate) struct Line {
    ports: [PortId; MAX_LINE],
    count: usize,
    /// Round in which the turn of the first is over, once the window is open.
    end_round: Option<u64>,
    /// Port that has a turn, and the round of it.
    turn: Option<(PortId, u64)>,
}

impl Default for Line {
    fn default() -> Self {
        Self { ports: [0; MAX_LINE], count: 0, end_round: None, turn: None }
    }
}

impl Line {
    /// Whether a sender has to wait for others.
    #[inline]
    pub fn is_before(&self, sender: &Sender) -> bool {
        self.count > 0 && self.turn != Some((sender.port, sender.round))
    }

    /// A sender meets a window that is shut. One that has just had its turn joins a round later,
    /// after those that are asked after it.
    pub fn refused(&mut self, sender: &Sender) {
        if self.turn != Some((sender.port, sender.round)) {
            self.join(sender.port);
        }
        self.end_round = None;
    }

    fn join(&mut self, port: PortId) {
        if self.count < MAX_LINE && !self.ports[..self.count].contains(&port) {
            self.ports[self.count] = port;
            self.count += 1;
        }
    }

    fn end_first(&mut self) {
        self.ports.copy_within(1..self.count, 0);
        self.count -= 1;
        self.end_round = None;
    }

    /// Whether a sender may send, now that the window is open; else it joins. The one whose turn it
    /// is, is asked within a round, if it is still there; others wait for it so long.
    pub fn is_turn_of(&mut self, sender: &Sender) -> bool {
        while self.is_before(sender) {
            let end_round = *self.end_round.get_or_insert(sender.round + 2);
            let is_first = self.ports[0] == sender.port;
            if !is_first && sender.round < end_round {
                self.join(sender.port);
                return false;
            }
            self.end_first();
            if is_first {
                break;
            }
        }
        self.turn = Some((sender.port, sender.round));
        true
    }
}

/// Time that a guest takes for a buffer, learnt by probes.
#[derive(Debug, Default)]
struct Pace {
    /// A quarter of the probes find that it needed no more. None yet: it was never seen busy.
    take_ns: u64,
    /// The next look is one.
    is_probe: bool,
    /// Windows until the next one with a probe.
    windows_left: u32,
    /// A probe has found the guest waiting: no longer a first guess.
    is_learnt: bool,
}

impl Pace {
    fn window_began(&mut self) {
        self.is_probe = self.windows_left == 0;
        self.windows_left = self.windows_left.checked_sub(1).unwrap_or(PROBE_EVERY - 1);
    }

    /// The probe was too late: the next window has one.
    fn put_off(&mut self) {
        (self.is_probe, self.windows_left) = (false, 0);
    }

    /// A probe found the driver waiting, or not. A first guess is doubled until one does.
    fn probed(&mut self, waits: bool) {
        let take_ns = match (waits, self.is_learnt) {
            (true, true) => self.take_ns - self.take_ns * 3 / 32,
            (true, false) => self.take_ns,
            (false, true) => self.take_ns + (self.take_ns / 32).max(1),
            (false, false) => self.take_ns * 2,
        };
        self.is_probe = !waits && !self.is_learnt && take_ns < *TAKE_NS.end();
        if waits && take_ns == 0 {
            return;
        }
        self.is_learnt = !self.is_probe;
        self.take_ns = take_ns.clamp(*TAKE_NS.start(), *TAKE_NS.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time of a full window.
    fn end_ns(take_ns: u64) -> u64 {
        SHARE * WINDOW as u64 * take_ns
    }

    /// A window with as much as it takes, published at time 0, after `windows_left` of which the
    /// next one is probed.
    fn full(take_ns: u64, windows_left: u32) -> Window {
        let pace = Pace { take_ns, is_probe: false, windows_left, is_learnt: true };
        let mut window = Window { pace, ..Window::default() };
        window.published(WINDOW, true, 0);
        window
    }

    #[test]
    fn it_is_full_when_a_driver_that_asks_for_interrupts_has_taken_nothing() {
        let mut window = Window::default();
        window.published(10 * WINDOW, false, 0);
        assert!(!window.is_full(0), "this driver may never ask");
        let mut window = full(1_000, 1);
        assert!(window.is_full(0));
        assert!(!window.published(1, true, end_ns(1_000) - 1) && window.is_full(0));
        assert!(window.published(1, true, 2 * end_ns(1_000)) && !window.is_full(WINDOW - 2));
        assert!(window.is_full(WINDOW - 1));
        window.open();
        assert!(!window.is_full(WINDOW - 1) && window.is_full(WINDOW));
        assert!(!window.look(u64::MAX, || panic!("nothing is published")));
        window.forget();
        window.published(WINDOW, false, 0);
        assert!(!window.is_full(0));
    }

    #[test]
    fn it_opens_when_the_kernel_has_taken_all_and_programs_had_their_share() {
        let mut window = full(1_000, 1);
        assert_eq!(window.look_ns(), end_ns(1_000));
        assert!(!window.look(end_ns(1_000) - 1, || panic!("too early")));
        // The guest takes longer: looks come less and less often.
        assert!(!window.look(end_ns(1_000), || false));
        assert_eq!(window.look_ns(), end_ns(1_000) * 5 / 4);
        assert!(window.look(2 * end_ns(1_000), || true) && !window.is_full(0));
        // This one is probed: seen waiting, it is not open yet.
        window.published(WINDOW, true, 0);
        let taken_ns = WINDOW as u64 * 1_000;
        assert_eq!(window.look_ns(), taken_ns);
        assert!(!window.look(taken_ns, || true) && window.is_full(0));
        assert_eq!(window.pace.take_ns, 1_000 - 93);
        assert!(window.look(end_ns(1_000 - 93), || true));
        // Not one of the next seven.
        for _ in 1..PROBE_EVERY {
            window.published(WINDOW, true, 0);
            assert!(window.look(end_ns(1_000 - 93), || true));
        }
        window.published(WINDOW, true, 0);
        assert!(!window.look(WINDOW as u64 * (1_000 - 93), || false));
        assert_eq!(window.pace.take_ns, 907 + 28);
    }

    #[test]
    fn frames_that_do_not_wait_put_its_end_off_for_a_window_at_most() {
        let mut window = full(1_000, 1);
        for now_ns in 0..100 {
            window.published(WINDOW, false, now_ns);
        }
        assert_eq!(window.look_ns(), end_ns(1_000));
        assert!(!window.is_late(999, 1_000) && window.is_late(1_000, 1_000));
        assert!(window.look(end_ns(1_000), || true) && !window.is_late(1_000, 1_000));
    }

    #[test]
    fn a_window_that_came_in_pieces_is_not_probed() {
        let mut window = full(1_000, 1);
        window.open();
        window.published(WINDOW / 2, true, 0);
        window.published(WINDOW / 2, false, 10);
        assert_eq!(window.look_ns(), end_ns(1_000));
    }

    #[test]
    fn pace_is_learnt_in_the_first_window_and_follows_the_guest() {
        let taken_in = |window: &mut Window, buffer_ns: u64| {
            window.open();
            window.published(WINDOW, true, 0);
            let taken_ns = WINDOW as u64 * buffer_ns;
            loop {
                let now_ns = window.look_ns();
                if window.look(now_ns, || now_ns >= taken_ns) {
                    break;
                }
            }
        };
        let mut window = Window::default();
        for (buffer_ns, windows) in [(7_000, 1), (700, 400), (7_000, 700)] {
            for _ in 0..windows {
                taken_in(&mut window, buffer_ns);
            }
            let take_ns = window.pace.take_ns;
            assert!((buffer_ns * 8 / 10..2 * buffer_ns).contains(&take_ns), "{take_ns}");
        }
    }

    #[test]
    fn ports_have_turns_in_line_and_whoever_has_gone_is_left_out() {
        let at = |round| [1, 2, 3].map(|port| Sender { port, round, ..Sender::default() });
        let mut line = Line::default();
        let [a, b, c] = at(7);
        assert!(line.is_turn_of(&at(6)[0]) && !line.is_before(&at(6)[0]));
        line.refused(&b);
        line.refused(&at(8)[0]);
        line.refused(&b);
        // The third joins as it is asked.
        assert!(!line.is_turn_of(&a) && !line.is_turn_of(&c) && line.is_turn_of(&b));
        assert!(!line.is_before(&b) && line.is_turn_of(&b) && line.is_before(&c));
        assert!(line.ports[..line.count] == [1, 3] && line.is_turn_of(&a));
        // It has just had its turn.
        line.refused(&a);
        assert_eq!(line.ports[..line.count], [3]);
        line.refused(&at(8)[0]);
        // Not asked for a round: the next one's turn.
        assert!(!line.is_turn_of(&at(7)[1]) && !line.is_turn_of(&at(8)[0]));
        assert!(line.is_turn_of(&at(9)[0]));
        assert_eq!(line.ports[..line.count], [2]);
        for port in 0..2 * MAX_LINE as u16 {
            line.join(port);
        }
        assert_eq!(line.count, MAX_LINE);
    }

    #[test]
    fn a_window_that_opens_as_others_fill_it_is_open_for_those_in_line() {
        let mut window = full(1_000, 1);
        window.line.join(3);
        assert!(window.published(WINDOW, true, end_ns(1_000)) && !window.is_full(0));
        // The next ones are of the turn of one of them, while others are in line.
        assert!(window.published(WINDOW, true, end_ns(1_000)) && window.is_full(0));
    }

    #[test]
    fn a_probe_that_comes_late_teaches_nothing() {
        let mut window = full(1_000, 0);
        assert!(window.look(2 * end_ns(1_000), || true));
        assert_eq!(window.pace.take_ns, 1_000);
        // The next one has a probe.
        window.published(WINDOW, true, 0);
        assert!(!window.look(WINDOW as u64 * 1_000, || true));
        assert!(window.pace.take_ns < 1_000);
    }

    #[test]
    fn only_tcp_does_not_wait() {
        let tcp = frame::testing::super_packet(false, false, 2000, 500).0;
        let udp = frame::testing::super_packet(true, true, 2000, 500).0;
        assert!(!applies(&tcp) && applies(&udp) && applies(&[0; 60]));
    }
}
