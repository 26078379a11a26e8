//! The guest memory that a worker works on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use base::numa::{NumaMemory, Spread};
use base::sync::lock;

/// The guest memory that one worker works on, by key: one for a disk, one for each port of a
/// switch. Not kept alive by this.
#[derive(Default)]
pub(crate) struct WorkerMemory(Mutex<BTreeMap<u64, Weak<dyn NumaMemory>>>);

impl WorkerMemory {
    /// Replaces the memory of a key, and forgets what nobody else holds any more.
    pub(crate) fn set(&self, key: u64, memory: &Arc<dyn NumaMemory>) {
        let mut all = lock(&self.0);
        all.retain(|_, memory| memory.strong_count() > 0);
        all.insert(key, Arc::downgrade(memory));
    }

    /// Nodes of all of it. Not asked under the lock: each answer is a system call or more.
    pub(crate) fn spread(&self, turn: u32) -> Spread {
        let all: Vec<Arc<dyn NumaMemory>> =
            lock(&self.0).values().filter_map(Weak::upgrade).collect();
        let mut sum = Spread::default();
        all.iter().for_each(|memory| sum.add(&memory.spread(turn)));
        sum
    }
}
