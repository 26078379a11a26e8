//! How much the front ends of a VM may have its session threads do.
//!
//! Each message is a few system calls, and with a holder some more in that process, which serves all
//! ports; and what a session's thread computes, no guest's CPU does. A VMM sends some hundred messages at a
//! start or a move, and a few when a guest masks an interrupt; one that sends without an end is made to
//! wait. It is not told: its socket fills.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Messages in a second, from all ports of a VM.
const MAX_MESSAGES_PER_S: u32 = 10_000;
/// Messages at once.
const MESSAGE_BURST: u32 = 1000;
/// Session threads of a VM use one part in so many of a CPU.
const CPU_PART: u32 = 100;
/// CPU time at once, of a VM that used none for a while: some hundred messages for each of many ports.
const CPU_BURST: Duration = Duration::from_millis(50);
/// Who has to wait waits so much longer: many messages are then served together, by one wake-up.
const MIN_WAIT: Duration = Duration::from_millis(100);
/// What one message counts at most: to let go of much memory takes long, and is no reason to wait for long.
const MAX_COUNTED: Duration = Duration::from_millis(1);

/// See the module's text. Ports of one VM have one in common.
#[derive(Debug)]
pub struct Pace(Mutex<Debts>);

#[derive(Debug)]
struct Debts {
    messages: Debt,
    cpu: Debt,
}

/// What was used, as the time that it takes until so much may have been used.
#[derive(Debug)]
struct Debt {
    paid_at: Instant,
}

/// The CPU time of a thread, from one message to the next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter(Duration);

impl Pace {
    /// Of a VM that has sent nothing.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Debts::new(Instant::now()))))
    }

    /// A message was served, in so much CPU time: how long the thread has to wait before the next one.
    pub(crate) fn note(&self, now: Instant, used: Duration) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(now, used)
    }
}

impl Debts {
    fn new(now: Instant) -> Self {
        Self { messages: Debt { paid_at: now }, cpu: Debt { paid_at: now } }
    }

    fn note(&mut self, now: Instant, used: Duration) -> Option<Duration> {
        let message = Duration::from_secs(1) / MAX_MESSAGES_PER_S;
        let messages = self.messages.add(now, message, message * MESSAGE_BURST);
        let cpu = self.cpu.add(now, used.min(MAX_COUNTED) * CPU_PART, CPU_BURST * CPU_PART);
        messages.max(cpu).map(|over| over + MIN_WAIT)
    }
}

impl Debt {
    /// By how much it is beyond its limit then.
    fn add(&mut self, now: Instant, time: Duration, limit: Duration) -> Option<Duration> {
        self.paid_at = self.paid_at.max(now) + time;
        let over = self.paid_at.checked_duration_since(now + limit)?;
        (!over.is_zero()).then_some(over)
    }
}

impl Meter {
    /// Of the thread that calls, from now on.
    pub fn new() -> Self {
        Self(thread_cpu())
    }

    /// What it has used since the last call.
    pub fn lap(&mut self) -> Duration {
        let now = thread_cpu();
        now.saturating_sub(std::mem::replace(&mut self.0, now))
    }
}

fn thread_cpu() -> Duration {
    // It is never negative.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
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
            assert!((45_000..=51_000 + ports as u32).contains(&messages), "{ports}: {messages}");
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

    #[test]
    fn a_start_or_a_move_waits_for_nothing() {
        let now = Instant::now();
        let mut debts = Debts::new(now);
        for _ in 0..1000 {
            assert_eq!(debts.note(now, Duration::from_micros(50)), None);
        }
        // Nor does who is slower.
        let mut now = now + Duration::from_secs(10);
        for _ in 0..20_000 {
            now += Duration::from_micros(101);
            assert_eq!(debts.note(now, Duration::from_micros(2)), None);
        }
    }

    #[test]
    fn letting_go_of_much_memory_counts_like_a_message() {
        let now = Instant::now();
        let mut debts = Debts::new(now);
        for _ in 0..50 {
            assert_eq!(debts.note(now, Duration::from_secs(2)), None);
        }
        let wait = debts.note(now, Duration::from_secs(2));
        assert_eq!(wait, Some(MAX_COUNTED * CPU_PART + MIN_WAIT));
    }

    #[test]
    fn a_meter_counts_its_own_thread() {
        let (mut meter, begin) = (Meter::new(), Instant::now());
        let thread = std::thread::spawn(|| {
            let mut meter = Meter::new();
            while meter.0 < Duration::from_millis(20) {
                meter.lap();
            }
        });
        thread.join().unwrap();
        let own = meter.lap();
        assert!(own < begin.elapsed() / 2, "{own:?}");
        while meter.lap().is_zero() {}
    }
}
