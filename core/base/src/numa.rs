//! NUMA nodes: of CPUs, of memory that is mapped, and of new memory.
//!
//! All answers are hints: a node that cannot be found out is unknown, and only speed depends on it.
//! Asking changes nothing: no page is brought in, moved or made.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

mod kernel;
mod near;

pub use kernel::Node;
pub use near::{NodePreference, prefer_node};

/// Folder in which Linux lists its nodes.
const ROOT: &str = "/sys/devices/system/node";

/// Pages asked for per range, besides those that the caller names. A hint needs no more, and one
/// call for this many takes some 10 µs.
pub const SAMPLES: u64 = 64;

/// Page size by which ranges are sampled.
const PAGE_BYTES: u64 = 4096;

/// The nodes of a machine, and their CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nodes {
    /// All nodes, also those without CPUs.
    all: Vec<Node>,
    of_cpu: BTreeMap<usize, Node>,
}

impl Nodes {
    /// Reads a folder like `/sys/devices/system/node`. One that is not there, or lists nothing, is
    /// a machine with the one node 0.
    pub fn read(root: &Path) -> Self {
        let (mut all, mut of_cpu) = (Vec::new(), BTreeMap::new());
        let number = |name: &str| name.strip_prefix("node")?.parse::<Node>().ok();
        for entry in std::fs::read_dir(root).into_iter().flatten().flatten() {
            let Some(node) = entry.file_name().to_str().and_then(number) else { continue };
            all.push(node);
            let list = std::fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
            of_cpu.extend(cpus_of(&list).into_iter().map(|cpu| (cpu, node)));
        }
        if all.is_empty() {
            all.push(0);
        }
        all.sort_unstable();
        Self { all, of_cpu }
    }

    /// Nodes of this machine, read once.
    pub fn of_machine() -> &'static Self {
        static MACHINE: OnceLock<Nodes> = OnceLock::new();
        MACHINE.get_or_init(|| Self::read(Path::new(ROOT)))
    }

    /// Whether there is only one node: then nodes decide nothing.
    pub fn is_one(&self) -> bool {
        self.all.len() == 1
    }

    /// The node of a thread that may run on these CPUs; none when they are on several.
    pub fn of_cpus(&self, cpus: &[usize]) -> Option<Node> {
        if let [only] = self.all[..] {
            return Some(only);
        }
        let node = *self.of_cpu.get(cpus.first()?)?;
        cpus.iter().all(|cpu| self.of_cpu.get(cpu) == Some(&node)).then_some(node)
    }
}

/// Most CPUs that a list is believed to name: eight times what Linux supports.
const MAX_CPU: usize = 65_536;

/// CPUs of a list such as `0-3,8`; parts that cannot be parsed are left out.
fn cpus_of(list: &str) -> Vec<usize> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last < MAX_CPU).then_some(first..=last)
    };
    list.trim().split(',').filter_map(part).flatten().collect()
}

/// Bytes on each node, as far as known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spread(BTreeMap<Node, u64>);

impl Spread {
    /// Bytes on one node.
    pub fn on(node: Node, len_bytes: u64) -> Self {
        Self(BTreeMap::from([(node, len_bytes)]))
    }

    /// Adds the bytes of another spread.
    pub fn add(&mut self, other: &Self) {
        for (node, len_bytes) in &other.0 {
            let sum = self.0.entry(*node).or_default();
            *sum = sum.saturating_add(*len_bytes);
        }
    }

    /// Whether no byte has a known node.
    pub fn is_unknown(&self) -> bool {
        self.0.is_empty()
    }

    /// Node of at least two thirds of the known bytes; none when they are mixed or unknown. With
    /// half as the bound, a worker of two VMs of one size would move to and fro.
    pub fn most(&self) -> Option<Node> {
        let all: u128 = self.0.values().map(|&bytes| u128::from(bytes)).sum();
        let (&node, &most) = self.0.iter().max_by_key(|(_, bytes)| **bytes)?;
        (most > 0 && 3 * u128::from(most) >= 2 * all).then_some(node)
    }
}

/// Memory that can be asked for its node.
pub trait NumaMemory: Send + Sync {
    /// Nodes that the memory is on now. Each `turn` looks at other pages.
    fn spread(&self, turn: u32) -> Spread;
}

/// Nodes that a mapped range is on. Linux is asked for [`SAMPLES`] of its pages, others in each
/// `turn`, and for those at `known`, addresses in it that are in use. Linux only knows pages that
/// this process has touched itself; when these are none, the answer is the node that the range is
/// bound to, if any.
pub fn spread_of(start: *const u8, len_bytes: u64, turn: u32, known: &[*const u8]) -> Spread {
    let mut asked = samples(start, len_bytes, turn);
    asked.extend_from_slice(known);
    let mut counts: BTreeMap<Node, u64> = BTreeMap::new();
    for status in kernel::statuses(&asked).unwrap_or_default() {
        // Negative: -ENOENT, a page that nobody here has touched yet, and the like.
        if let Ok(node) = Node::try_from(status) {
            *counts.entry(node).or_default() += 1;
        }
    }
    let sum: u64 = counts.values().sum();
    if sum == 0 {
        let bound = kernel::policy_of(start).and_then(|policy| policy.only_node());
        return bound.map(|node| Spread::on(node, len_bytes)).unwrap_or_default();
    }
    let part = |count: u64| (u128::from(len_bytes) * u128::from(count) / u128::from(sum)) as u64;
    Spread(counts.into_iter().map(|(node, count)| (node, part(count))).collect())
}

/// Addresses in up to [`SAMPLES`] pages, evenly spaced.
fn samples(start: *const u8, len_bytes: u64, turn: u32) -> Vec<*const u8> {
    let pages = len_bytes.div_ceil(PAGE_BYTES);
    let stride = pages.div_ceil(SAMPLES).max(1);
    // Another place each time; the golden ratio visits all parts of the stride soon.
    let first = (u64::from(turn.wrapping_mul(0x9e37_79b9)) * stride) >> 32;
    let address = |page: u64| start.wrapping_add((page * PAGE_BYTES) as usize);
    (first..pages).step_by(stride as usize).map(address).collect()
}

#[cfg(test)]
mod tests;
