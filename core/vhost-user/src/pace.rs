//! Budget of messages and CPU time that the front ends of a VM may use in session threads.
//!
//! Each message is a few system calls, and with a holder some more in that process, which serves
//! all ports; and a session's thread computes on the host's account, not on a guest's CPU. A VMM
//! sends some hundred messages at a start or a move, and a few when a guest masks an interrupt; one
//! that sends without an end is made to wait. No message says so: its socket fills.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::cpu::thread_time;
use base::sync::lock;

/// Most messages in a second from all ports of a VM, and most at once.
const MAX_MESSAGES_PER_S: u32 = 10_000;
/// Divisor of a CPU: the session threads of a VM use one part in 100.
const CPU_PART: u32 = 100;
/// CPU time at once, for a VM that used none for a while: twice the time in which sixteen ports of
/// sixteen queue pairs start.
const CPU_BURST: Duration = Duration::from_millis(100);
/// CPU time charged for a descriptor. It comes twice, and threads outside of every budget close it:
/// each is woken and takes 6 to 8 µs where descriptors come one by one.
const CLOSE: Duration = Duration::from_micros(10);
/// Time added to each wait: many messages are then served together, by one wake-up.
const MIN_WAIT: Duration = Duration::from_millis(100);
/// Longest wait that one message costs, the rest is forgiven: to unmap much memory takes long, and
/// a VM does it at its end or in a move.
const MAX_EACH: Duration = Duration::from_secs(1);
/// Longest wait beyond the limits. Each port waits for itself, so sixteen ports whose messages cost
/// [`MAX_EACH`] have four hundredths of a CPU, and four ports have one.
const MAX_OVER: Duration = Duration::from_secs(4);

/// Budget of session threads, one for all ports of a VM.
#[derive(Debug)]
pub struct Pace(Mutex<Debts>);

#[derive(Debug)]
struct Debts {
    messages: Debt,
    cpu: Debt,
}

/// Use of one budget, as the time at which it is paid off.
#[derive(Debug)]
struct Debt {
    paid_at: Instant,
}

impl Pace {
    /// Makes the budget of a VM that has sent nothing.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Debts::new(Instant::now()))))
    }

    /// Charges a message with `fds` descriptors, which the calling thread served. Returns how long
    /// the thread must wait before the next one.
    pub(crate) fn note(&self, fds: usize) -> Option<Duration> {
        let used = lap() + CLOSE * u32::try_from(fds).unwrap_or(u32::MAX);
        lock(&self.0).note(Instant::now(), used)
    }
}

impl Debts {
    fn new(now: Instant) -> Self {
        Self { messages: Debt { paid_at: now }, cpu: Debt { paid_at: now } }
    }

    fn note(&mut self, now: Instant, used: Duration) -> Option<Duration> {
        let second = Duration::from_secs(1);
        let messages = self.messages.add(now, second / MAX_MESSAGES_PER_S, second);
        let cpu = self.cpu.add(now, used * CPU_PART, CPU_BURST * CPU_PART);
        messages.max(cpu).map(|over| over + MIN_WAIT)
    }
}

impl Debt {
    /// Adds `time`. Returns by how much the debt is then beyond `limit`.
    fn add(&mut self, now: Instant, time: Duration, limit: Duration) -> Option<Duration> {
        let paid_at = self.paid_at.max(now) + time.min(MAX_EACH);
        self.paid_at = paid_at.min(now + limit + MAX_OVER);
        let over = self.paid_at.checked_duration_since(now + limit)?;
        (!over.is_zero()).then_some(over)
    }
}

/// CPU time of the calling thread since its last call.
fn lap() -> Duration {
    thread_local!(static LAST: Cell<Duration> = const { Cell::new(Duration::ZERO) });
    let now = thread_time();
    now.saturating_sub(LAST.replace(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages in five seconds, from front ends that send as fast as they may.
    fn sent(ports: usize, each: Duration) -> u32 {
        let start = Instant::now();
        let (mut debts, mut messages) = (Debts::new(start), 0);
        let mut free_at = vec![start; ports];
        loop {
            let Some(next) = free_at.iter_mut().min() else { unreachable!("there are ports") };
            *next += each;
            if *next >= start + Duration::from_secs(5) {
                return messages;
            }
            messages += 1;
            *next += debts.note(*next, each).unwrap_or_default();
        }
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V6_ten_thousand_messages_a_second_from_all_ports_of_a_vm() {
        for ports in [1, 3, 16] {
            let messages = sent(ports, Duration::from_nanos(100));
            assert!((45_000..=60_000 + ports as u32).contains(&messages), "{ports}: {messages}");
        }
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V6_a_hundredth_of_a_cpu_for_all_ports_of_a_vm() {
        for ports in [1, 3, 16] {
            let each = Duration::from_micros(20);
            let used = each * sent(ports, each);
            let most = Duration::from_secs(5) / CPU_PART + CPU_BURST + each * ports as u32;
            assert!(used <= most && used > most * 9 / 10, "{ports}: {used:?} of {most:?}");
        }
    }

    /// A message may be sent a byte at a time: it counts as long as it took, up to [`MAX_EACH`].
    #[test]
    #[allow(non_snake_case)]
    fn abuse_V6_messages_that_take_long_have_no_more() {
        let each = Duration::from_millis(10);
        for (ports, part) in [(1, CPU_PART), (3, CPU_PART), (16, CPU_PART / 4)] {
            let used = each * sent(ports, each);
            let most = CPU_BURST + Duration::from_secs(5) / part + each * (ports as u32 + 1);
            assert!(used <= most, "{ports}: {used:?} of {most:?}");
        }
    }

    #[test]
    fn a_start_or_a_move_waits_for_nothing() {
        let now = Instant::now();
        let mut debts = Debts::new(now);
        // Seven messages for each ring of sixteen large ports.
        for _ in 0..16 * 32 * 7 {
            assert_eq!(debts.note(now, Duration::from_micros(25)), None);
        }
        // Nor does who is slower.
        let mut now = now + Duration::from_secs(20);
        for _ in 0..20_000 {
            now += Duration::from_micros(101);
            assert_eq!(debts.note(now, Duration::from_micros(1)), None);
        }
    }

    #[test]
    fn letting_go_of_much_memory_is_not_waited_for_long() {
        let now = Instant::now();
        let mut debts = Debts::new(now);
        // Ten ports of a VM that ends wait for nothing, however much it was.
        let take = Duration::from_secs(2);
        assert!((0..10).all(|_| debts.note(now, take).is_none()));
        assert_eq!(debts.note(now, take), Some(MAX_EACH + MIN_WAIT));
        assert!((0..50).all(|_| debts.note(now, take) <= Some(MAX_OVER + MIN_WAIT)));
        assert_eq!(debts.note(now + MAX_OVER + MIN_WAIT, Duration::from_micros(10)), None);
    }

    #[test]
    fn a_thread_counts_its_own_time() {
        lap();
        let begin = Instant::now();
        let thread = std::thread::spawn(|| {
            let mut used = lap();
            while used < Duration::from_millis(20) {
                used += lap();
            }
        });
        thread.join().unwrap();
        let own = lap();
        assert!(own < begin.elapsed() / 2, "{own:?}");
        while lap().is_zero() {}
    }
}
