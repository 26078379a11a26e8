//! Sidecores: how many, where, and how long they poll.

use std::sync::Arc;

use anyhow::Context;
use base::clock::Clock;
use control::config::{Placement, SidecoreConfig as Wanted};
use sidecore::{Sidecore, SidecoreConfig};

/// Up to so many CPUs a machine is small: guests need every core, polling must be short.
const SMALL_MACHINE_CPUS: usize = 4;

/// With `auto`, one sidecore for so many CPUs.
const CPUS_PER_SIDECORE: usize = 8;

/// Most sidecores with `auto`: what one host's network and disks can keep busy.
const MAX_AUTO: usize = 16;

/// Polling time on small and on other machines, in microseconds. On a small one whatever is polled
/// away is missing to the guests: round trips between two emulated guests on 2 cores were 0.8 of
/// the kernel bridge's with 100 µs, 0.9 with 20 and 1.15 with none. On others, the time between two
/// packets of a busy VM.
const SPIN_US: (u32, u32) = (0, 50);

/// A running sidecore and how it was started.
#[derive(Debug, Clone)]
pub struct Core {
    /// Its handle.
    pub handle: Sidecore,
    /// Its settings.
    pub config: SidecoreConfig,
}

/// Settings for each sidecore on a machine with `cpus` CPUs.
fn plan(wanted: &Wanted, cpus: usize) -> Vec<SidecoreConfig> {
    let small = cpus <= SMALL_MACHINE_CPUS;
    let spin_us = wanted.spin_us.unwrap_or(if small { SPIN_US.0 } else { SPIN_US.1 });
    let pins: Vec<Option<usize>> = match &wanted.placement {
        Placement::Auto => vec![None; (cpus / CPUS_PER_SIDECORE).clamp(1, MAX_AUTO)],
        Placement::Count(count) => vec![None; *count],
        Placement::Cpus(cpus) => cpus.iter().copied().map(Some).collect(),
    };
    pins.into_iter()
        .enumerate()
        .map(|(index, cpu)| SidecoreConfig {
            index,
            cpu,
            spin_us,
            // A CPU of its own is not asked back; a shared one is, by the guests.
            yield_when_idle: cpu.is_none() || small,
        })
        .collect()
}

/// Starts all sidecores.
pub fn start(wanted: &Wanted, clock: &Arc<dyn Clock>) -> anyhow::Result<Vec<Core>> {
    let cpus = base::cpu::allowed_cpus().context("asking for the CPUs of this process")?.len();
    let mut cores = Vec::new();
    for config in plan(wanted, cpus) {
        let (index, cpu) = (config.index, config.cpu);
        let handle =
            Sidecore::spawn(config.clone(), Arc::clone(clock)).with_context(|| match cpu {
                Some(cpu) => format!("starting sidecore {index} on CPU {cpu} (sidecore.cpus)"),
                None => format!("starting sidecore {index}"),
            })?;
        cores.push(Core { handle, config });
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(cpus: usize) -> Vec<SidecoreConfig> {
        plan(&Wanted { placement: Placement::Auto, spin_us: None }, cpus)
    }

    #[test]
    fn auto_fits_the_machine() {
        assert_eq!((auto(2).len(), auto(2)[0].spin_us), (1, 0));
        assert_eq!((auto(8).len(), auto(8)[0].spin_us), (1, 50));
        assert_eq!(auto(64).len(), 8);
        assert_eq!(auto(1024).len(), 16);
    }

    #[test]
    fn cpus_are_pinned_and_only_own_cpus_are_kept() {
        let wanted = Wanted { placement: Placement::Cpus(vec![5, 7]), spin_us: Some(3) };
        let cores = plan(&wanted, 8);
        let pins: Vec<_> = cores.iter().map(|c| (c.index, c.cpu, c.spin_us)).collect();
        assert_eq!(pins, [(0, Some(5), 3), (1, Some(7), 3)]);
        assert!(cores.iter().all(|c| !c.yield_when_idle));
        assert!(auto(8)[0].yield_when_idle);
    }
}
