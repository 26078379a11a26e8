//! Loads of the VMs: generated from a seed, or recorded.

use std::io::BufRead;

use base::random::{Random, Seeded};
use serde::{Deserialize, Serialize};
use sidecore::Settings;
use thiserror::Error;

/// Kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A frame.
    Net,
    /// A disk request.
    Disk,
}

/// How a VM asks.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Requests at random times (Poisson), so many a second.
    Poisson {
        /// Requests a second.
        rate: f64,
    },
    /// The same, in bursts: exponentially long times with and without.
    OnOff {
        /// Requests a second while on.
        rate: f64,
        /// Mean length of a burst, in nanoseconds.
        on_ns: f64,
        /// Mean length of a silence, in nanoseconds.
        off_ns: f64,
    },
    /// `window` requests at a time; each is asked anew some time after its answer. Request and
    /// response with a window of 1, bulk with a large one.
    Closed {
        /// Requests in flight.
        window: u32,
        /// Mean time from an answer to the next request, in nanoseconds (exponential).
        think_ns: f64,
    },
    /// At these times, in nanoseconds, with these bytes and kinds.
    Recorded(Vec<(u64, u32, Kind)>),
}

/// A VM.
#[derive(Debug, Clone)]
pub struct Vm {
    /// Class of the VM, for the report.
    pub class: &'static str,
    /// How it asks.
    pub source: Source,
    /// Kind of the VM's requests, where the source does not say.
    pub kind: Kind,
    /// Bytes of a request.
    pub len_bytes: u32,
    /// Asks for nothing before, in nanoseconds; a recording has its own times.
    pub from_ns: u64,
    /// Settings that the VM is granted.
    pub grant: Settings,
}

impl Vm {
    /// One that asks from the beginning, and is granted what is usual.
    pub fn new(class: &'static str, kind: Kind, len_bytes: u32, source: Source) -> Self {
        Self { class, source, kind, len_bytes, from_ns: 0, grant: Settings::default() }
    }
}

/// A random time with this mean.
pub fn exponential(random: &mut Seeded, mean: f64) -> u64 {
    // 53 bits, never 0.
    let unit = ((random.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    (-unit.ln() * mean) as u64
}

/// A VM's arrivals as they are drawn.
#[derive(Debug, Clone)]
pub struct Draw {
    random: Seeded,
    /// End of the burst that an on-off source is in.
    on_until_ns: u64,
    next: usize,
}

impl Draw {
    /// The arrivals of VM number `vm` under `seed`.
    pub fn new(seed: u64, vm: usize) -> Self {
        let mut random = Seeded::new(seed ^ (vm as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        // Neighbouring seeds must not give neighbouring sequences.
        random.next_u64();
        Self { random, on_until_ns: 0, next: 0 }
    }

    /// The next arrival after one at `now_ns`, or after an answer at that time for closed sources.
    pub fn next(&mut self, vm: &Vm, now_ns: u64) -> Option<(u64, u32, Kind)> {
        let at = |at_ns| Some((at_ns, vm.len_bytes, vm.kind));
        match &vm.source {
            Source::Poisson { rate } => at(now_ns + exponential(&mut self.random, 1e9 / rate)),
            Source::Closed { think_ns, .. } => {
                at(now_ns + exponential(&mut self.random, *think_ns))
            }
            Source::OnOff { rate, on_ns, off_ns } => {
                let mut at_ns = now_ns + exponential(&mut self.random, 1e9 / rate);
                if at_ns >= self.on_until_ns {
                    let begin_ns = self.on_until_ns.max(now_ns);
                    at_ns = begin_ns + exponential(&mut self.random, *off_ns);
                    self.on_until_ns = at_ns + exponential(&mut self.random, *on_ns);
                }
                at(at_ns)
            }
            Source::Recorded(all) => {
                let found = all.get(self.next).copied();
                self.next += 1;
                found
            }
        }
    }

    /// How many arrivals are on their way at a time.
    pub fn parallel(vm: &Vm) -> u32 {
        match vm.source {
            Source::Closed { window, .. } => window,
            _ => 1,
        }
    }
}

/// One line of a recording.
#[derive(Debug, Deserialize)]
struct Line {
    t_ns: u64,
    vm: u32,
    bytes: u32,
    kind: Kind,
}

/// Most VMs of a recording: the daemon's most ports.
const MAX_VMS: u32 = 1024;

/// Why a recording is not one.
#[derive(Debug, Error)]
pub enum LoadError {
    /// Reading failed.
    #[error("line {line} of the recording: {source}")]
    Io {
        /// Number of the line, from 1.
        line: usize,
        /// The cause.
        source: std::io::Error,
    },
    /// Line that is not `{"t_ns":…,"vm":…,"bytes":…,"kind":"net"|"disk"}`.
    #[error("line {line} of the recording: {source}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// A VM's number is too large.
    #[error("line {line} of the recording: VM {vm}; the limit is {limit}", limit = MAX_VMS - 1)]
    Vm {
        /// Number of the line, from 1.
        line: usize,
        /// The VM's.
        vm: u32,
    },
}

/// Reads a recording: JSON lines with `t_ns`, `vm`, `bytes`, `kind`; VMs are numbered from 0.
pub fn recorded(input: impl BufRead) -> Result<Vec<Vm>, LoadError> {
    let mut vms: Vec<Vec<(u64, u32, Kind)>> = Vec::new();
    for (at, text) in input.lines().enumerate() {
        let line = at + 1;
        let text = text.map_err(|source| LoadError::Io { line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let found: Line =
            serde_json::from_str(&text).map_err(|source| LoadError::Line { line, source })?;
        if found.vm >= MAX_VMS {
            return Err(LoadError::Vm { line, vm: found.vm });
        }
        let vm = found.vm as usize;
        if vms.len() <= vm {
            vms.resize_with(vm + 1, Vec::new);
        }
        vms[vm].push((found.t_ns, found.bytes, found.kind));
    }
    let vm = |mut all: Vec<(u64, u32, Kind)>| {
        all.sort_by_key(|(t_ns, ..)| *t_ns);
        Vm::new("recorded", Kind::Net, 0, Source::Recorded(all))
    };
    Ok(vms.into_iter().map(vm).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(source: Source) -> f64 {
        let vm = Vm::new("t", Kind::Net, 64, source);
        let mut draw = Draw::new(1, 0);
        let (mut now_ns, mut count) = (0, 0u64);
        while now_ns < 20_000_000_000 {
            now_ns = draw.next(&vm, now_ns).unwrap().0;
            count += 1;
        }
        count as f64 / 20.0
    }

    #[test]
    fn sources_keep_their_rates() {
        let poisson = rate(Source::Poisson { rate: 5000.0 });
        assert!((poisson / 5000.0 - 1.0).abs() < 0.02, "{poisson}");
        let burst = rate(Source::OnOff { rate: 20_000.0, on_ns: 1e7, off_ns: 3e7 });
        assert!((burst / 5000.0 - 1.0).abs() < 0.15, "{burst}");
    }

    #[test]
    fn recordings_are_read_and_mistakes_are_told_with_their_line() {
        let text = "{\"t_ns\":5,\"vm\":1,\"bytes\":64,\"kind\":\"net\"}\n\n\
                    {\"t_ns\":2,\"vm\":1,\"bytes\":4096,\"kind\":\"disk\"}\n";
        let vms = recorded(text.as_bytes()).unwrap();
        assert_eq!(vms.len(), 2);
        let wanted = vec![(2, 4096, Kind::Disk), (5, 64, Kind::Net)];
        assert_eq!(vms[1].source, Source::Recorded(wanted));
        let wrong = recorded("\n{\"t_ns\":5}".as_bytes()).unwrap_err().to_string();
        assert!(wrong.contains("line 2") && wrong.contains("missing field"), "{wrong}");
        let far = "{\"t_ns\":5,\"vm\":5000,\"bytes\":64,\"kind\":\"net\"}";
        let wrong = recorded(far.as_bytes()).unwrap_err().to_string();
        assert!(wrong.contains("VM 5000; the limit is 1023"), "{wrong}");
    }
}
