//! Time that a hypervisor took from CPUs that had work: "steal" in proc_stat(5). A measuring
//! machine may be a VM itself; what its host takes shows in no run queue of ours, and comes in
//! spells.

use std::time::Instant;

use crate::harness::cpu::TICKS_PER_S;

/// Part of a CPU's time above which a load says nothing of who served it.
pub const STEAL_LIMIT: f64 = 0.03;

/// Counters of some CPUs at one moment.
#[derive(Debug)]
pub struct Steal {
    at: Instant,
    /// Seconds, in the order asked for; none of a CPU that the kernel does not list.
    stolen_s: Vec<Option<f64>>,
}

/// Reads the counters of `cpus`. A kernel that does not count says that nothing is stolen.
pub fn read(cpus: &[usize]) -> Steal {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    Steal { at: Instant::now(), stolen_s: cpus.iter().map(|cpu| stolen_s(&text, *cpu)).collect() }
}

fn stolen_s(stat: &str, cpu: usize) -> Option<f64> {
    let name = format!("cpu{cpu}");
    let mut lines = stat.lines().map(str::split_ascii_whitespace);
    let mut fields = lines.find_map(|mut l| (l.next() == Some(&name)).then_some(l))?;
    // user, nice, system, idle, iowait, irq, softirq, steal
    Some(fields.nth(7)?.parse::<f64>().ok()? / TICKS_PER_S)
}

impl Steal {
    /// When it was read.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// The part of the time since `earlier` that was taken from the CPU that lost most of it.
    pub fn since(&self, earlier: &Steal) -> f64 {
        let wall_s = self.at.duration_since(earlier.at).as_secs_f64().max(1e-9);
        let both = self.stolen_s.iter().zip(&earlier.stolen_s);
        let lost = both.filter_map(|(now, then)| Some((*now)? - (*then)?));
        (lost.fold(0.0, f64::max) / wall_s).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const STAT: &str = "cpu  9 0 9 9 9 0 9 900 0 0\ncpu0 1 2 3 4 5 6 7 250 0 0\n\
                        cpu1 1 2 3 4 5 6 7 80 0 0\ncpu10 1 2 3 4\nintr 5\n";

    #[test]
    fn a_cpus_own_line_is_read() {
        let all = [0, 1, 10, 2].map(|cpu| stolen_s(STAT, cpu));
        assert_eq!(all, [Some(2.5), Some(0.8), None, None]);
        assert_eq!(stolen_s("", 0), None);
    }

    #[test]
    fn the_cpu_that_lost_most_tells() {
        let t = Instant::now();
        let then = Steal { at: t, stolen_s: vec![Some(1.0), Some(5.0), None] };
        let at = t + Duration::from_secs(2);
        let now = Steal { at, stolen_s: vec![Some(1.5), Some(5.1), Some(9.0)] };
        assert!((now.since(&then) - 0.25).abs() < 1e-9);
        assert_eq!(then.since(&then), 0.0);
    }

    #[test]
    fn this_machine_can_be_read() {
        let first = read(&[0]);
        assert!((0.0..=1.0).contains(&read(&[0]).since(&first)));
    }
}
