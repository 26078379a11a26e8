//! Sidecores: how many, where, and how long they poll.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use anyhow::Context;
use base::clock::Clock;
use base::numa::{Node, Nodes};
use config::{PauseKind, Placement, SidecoreConfig as Wanted, SpinKind};
use sidecore::placement::Limits;
use sidecore::{Pause, Sidecore, SidecoreConfig};

/// Most CPUs of a small machine: guests need every core, polling must be short.
const SMALL_MACHINE_CPUS: usize = 4;

/// CPUs per sidecore with `auto`.
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
    /// Handle of the sidecore.
    pub handle: Sidecore,
    /// Settings that it was started with.
    pub config: SidecoreConfig,
}

/// Number of sidecores, and how many of them may be active.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    threads: usize,
    min: usize,
    max: usize,
}

fn counts(wanted: &Wanted, cpus: usize) -> Counts {
    let least = wanted.min.unwrap_or(1);
    let threads = match &wanted.placement {
        Placement::Auto => (cpus / CPUS_PER_SIDECORE).clamp(1, MAX_AUTO).max(least),
        Placement::Count(count) => *count,
        Placement::Cpus(cpus) => cpus.len(),
    };
    let max = wanted.max.unwrap_or(threads).min(threads);
    // Who says how many wants so many, unless told otherwise.
    let follows = wanted.placement == Placement::Auto || wanted.max.is_some();
    let min = wanted.min.unwrap_or(if follows { 1 } else { threads }).min(max);
    Counts { threads, min, max }
}

/// Settings for each sidecore on a machine with `cpus` CPUs.
fn plan(wanted: &Wanted, cpus: usize) -> Vec<SidecoreConfig> {
    let small = cpus <= SMALL_MACHINE_CPUS;
    let spin_us = wanted.spin_us.unwrap_or(if small { SPIN_US.0 } else { SPIN_US.1 });
    let pins: Vec<Option<usize>> = match &wanted.placement {
        Placement::Cpus(cpus) => cpus.iter().copied().map(Some).collect(),
        _ => vec![None; counts(wanted, cpus).threads],
    };
    let pause = match wanted.pause {
        PauseKind::Auto => Pause::Auto,
        PauseKind::Spin => Pause::Spin,
        PauseKind::C01 => Pause::C01,
        PauseKind::C02 => Pause::C02,
    };
    pins.into_iter()
        .enumerate()
        .map(|(index, cpu)| SidecoreConfig {
            index,
            cpu,
            node: None,
            spin_us,
            fixed_spin: wanted.spin == SpinKind::Fixed,
            pause,
            // A CPU that was named is the sidecore's own: nobody asks it back, and a yield costs
            // the latency of a system call. A shared one is asked back, by the guests.
            yield_when_idle: wanted.yields.unwrap_or(cpu.is_none()),
            panicked: None,
        })
        .collect()
}

/// The NUMA node of a sidecore: that of its CPU, or of all that it may run on.
fn node(nodes: &Nodes, pinned: Option<usize>, allowed: &[usize]) -> Option<Node> {
    match pinned {
        Some(cpu) => nodes.of_cpus(&[cpu]),
        None => nodes.of_cpus(allowed),
    }
}

/// Starts all sidecores; the limits say how many of them may be active.
/// `panicked` gets the names of workers that panicked.
pub fn start(
    wanted: &Wanted,
    clock: &Arc<dyn Clock>,
    panicked: &Sender<String>,
) -> anyhow::Result<(Vec<Core>, Limits)> {
    let cpus = base::cpu::allowed_cpus().context("asking for the CPUs of this process")?;
    let Counts { min, max, .. } = counts(wanted, cpus.len());
    let mut cores = Vec::new();
    for mut config in plan(wanted, cpus.len()) {
        let (index, cpu) = (config.index, config.cpu);
        config.panicked = Some(panicked.clone());
        config.node = node(Nodes::of_machine(), cpu, &cpus);
        let handle =
            Sidecore::spawn(config.clone(), Arc::clone(clock)).with_context(|| match cpu {
                Some(cpu) => format!("starting sidecore {index} on CPU {cpu} (sidecore.cpus)"),
                None => format!("starting sidecore {index}"),
            })?;
        cores.push(Core { handle, config });
    }
    Ok((cores, Limits::new(min, max)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(cpus: usize) -> Vec<SidecoreConfig> {
        plan(&Wanted::default(), cpus)
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
        let placement = Placement::Cpus(vec![5, 7]);
        let wanted = Wanted { placement, spin_us: Some(3), ..Wanted::default() };
        let cores = plan(&wanted, 8);
        let pins: Vec<_> = cores.iter().map(|c| (c.index, c.cpu, c.spin_us)).collect();
        assert_eq!(pins, [(0, Some(5), 3), (1, Some(7), 3)]);
        assert!(cores.iter().all(|c| !c.yield_when_idle));
        assert!(auto(8)[0].yield_when_idle);
    }

    #[test]
    fn only_shared_cpus_are_given_away_unless_told_otherwise() {
        let wanted = Wanted { spin_us: Some(20), ..Wanted::default() };
        for cpus in [2, 64] {
            assert!(plan(&wanted, cpus)[0].yield_when_idle);
            let pinned = Wanted { placement: Placement::Cpus(vec![1]), ..wanted.clone() };
            assert!(!plan(&pinned, cpus)[0].yield_when_idle);
            let told = Wanted { yields: Some(true), ..pinned };
            assert!(plan(&told, cpus)[0].yield_when_idle);
            let never = Wanted { yields: Some(false), ..wanted.clone() };
            assert!(!plan(&never, cpus)[0].yield_when_idle);
        }
    }

    #[test]
    fn as_many_are_active_as_was_said() {
        let counts_of =
            |placement, min, max| counts(&Wanted { placement, min, max, ..Wanted::default() }, 64);
        let all = |threads, min, max| Counts { threads, min, max };
        assert_eq!(counts_of(Placement::Auto, None, None), all(8, 1, 8));
        assert_eq!(counts_of(Placement::Auto, Some(10), None), all(10, 10, 10));
        assert_eq!(counts_of(Placement::Count(4), None, None), all(4, 4, 4));
        assert_eq!(counts_of(Placement::Count(4), Some(2), None), all(4, 2, 4));
        assert_eq!(counts_of(Placement::Count(4), None, Some(4)), all(4, 1, 4));
        assert_eq!(counts_of(Placement::Cpus(vec![1, 2, 3]), None, None), all(3, 3, 3));
        assert_eq!(counts_of(Placement::Cpus(vec![1, 2, 3]), Some(1), Some(2)), all(3, 1, 2));
    }

    #[test]
    fn a_sidecore_is_on_the_node_of_its_cpus() {
        let root = std::env::temp_dir().join(format!("cores-nodes-{}", std::process::id()));
        for (name, list) in [("node0", "0-1"), ("node1", "2-3")] {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("cpulist"), list).unwrap();
        }
        let nodes = Nodes::read(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(node(&nodes, Some(2), &[0, 1, 2, 3]), Some(1));
        assert_eq!(node(&nodes, None, &[0, 1, 2, 3]), None);
        assert_eq!(node(&nodes, None, &[0, 1]), Some(0), "as under numactl --cpunodebind");
    }
}
