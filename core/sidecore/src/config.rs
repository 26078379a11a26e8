//! Configuration of a sidecore.

use std::sync::mpsc;

use base::numa::Node;

use crate::pause::Pause;

/// Configuration of a sidecore. The default sleeps at once.
#[derive(Debug, Clone, Default)]
pub struct SidecoreConfig {
    /// Number, for names and metrics.
    pub index: usize,
    /// CPU to pin to; none: the scheduler decides.
    pub cpu: Option<usize>,
    /// NUMA node of the CPUs that it may run on, where they are on one node and that is known.
    pub node: Option<Node>,
    /// Longest poll without work before sleeping, in microseconds; 0 sleeps at once. See
    /// [`crate::Spin`] for how the time adapts.
    pub spin_us: u32,
    /// Always poll for `spin_us`.
    pub fixed_spin: bool,
    /// Wait between two empty rounds.
    pub pause: Pause,
    /// Give the CPU away between polls that found nothing: for hosts where the guests need the
    /// same cores. Costs one system call per empty round, none per busy one.
    pub yield_when_idle: bool,
    /// Receives the name of each worker that panicked, once the worker is dropped.
    pub panicked: Option<mpsc::Sender<String>>,
}
