//! The daemon is killed before every single store; the next one must go on without losing or
//! doubling a completion.

use std::sync::Arc;

use base::shm::SharedMemory;

use crate::crash::injected::run;
use crate::inflight::InflightRegion;
use crate::queue::Queue;
use crate::seg::copy_out;
use crate::setup::{Completion, Layout};
use crate::slot::{PositionSlot, SLOT_LEN_BYTES};
use crate::testing::{ModelDriver, ModelOptions};
use crate::vring::Vring;
use crate::{Batch, Chain};

/// Chains that the driver wants done. Enough for several laps of the small rings used here.
const CHAINS: u32 = 30;

/// Memory that survives a daemon.
#[derive(Clone)]
enum Kept {
    Slot(PositionSlot),
    Region(Arc<InflightRegion>),
}

/// The driver's side of the experiment: it numbers its chains and checks what comes back.
struct Guest {
    driver: ModelDriver,
    offered: u32,
    /// Number of the chain with each id.
    number: Vec<Option<u32>>,
    finished: Vec<u32>,
}

impl Guest {
    fn new(layout: Layout, size: u16) -> Self {
        let options = ModelOptions { event_idx: true, mem_bytes: 1 << 20, ..Default::default() };
        let driver = ModelDriver::with_options(layout, size, options);
        let number = vec![None; usize::from(size)];
        Self { driver, offered: 0, number, finished: Vec::new() }
    }

    /// Consumes what is used and offers as much as fits: chains of one to three descriptors.
    fn act(&mut self) {
        while let Some((id, written)) = self.driver.used() {
            let number = self.number[usize::from(id)].take().expect("completed twice");
            assert_eq!(written, 100 + number, "the wrong length for chain {number}");
            self.finished.push(number);
        }
        while self.offered < CHAINS {
            let descs = 1 + (self.offered % 3) as usize;
            if self.driver.free_descriptors() < descs {
                break;
            }
            let number = self.driver.buffer(&self.offered.to_le_bytes());
            let reply = (self.driver.alloc(200), 200);
            let id = if descs == 1 {
                self.driver.offer_indirect(&[number], &[reply])
            } else {
                self.driver.offer(&vec![number; descs - 1], &[reply])
            };
            self.number[usize::from(id)] = Some(self.offered);
            self.offered += 1;
        }
    }

    fn is_done(&self) -> bool {
        self.finished.len() == CHAINS as usize
    }
}

fn complete(chain: Chain<'_>) -> Completion {
    let mut number = [0; 4];
    assert_eq!(copy_out(chain.readable, 0, &mut number), 4);
    Completion { id: chain.id, ndesc: chain.ndesc, written: 100 + u32::from_le_bytes(number) }
}

fn start(guest: &Guest, kept: &Kept, again: bool) -> Vring {
    let (memory, setup) = (guest.driver.memory(), guest.driver.setup());
    let mut parts = guest.driver.parts(0);
    let queue = match kept {
        Kept::Slot(slot) => {
            parts.slot = Some(slot.clone());
            if again {
                Queue::resume(memory, setup, slot).unwrap()
            } else {
                Queue::new(memory, setup).unwrap()
            }
        }
        Kept::Region(region) => {
            parts.inflight = Some(Arc::clone(region));
            Queue::new(memory, setup).unwrap()
        }
    };
    Vring::new(queue, parts).unwrap()
}

/// A daemon's life: takes batches of three and completes them, in order where the kept state is a
/// position, else the newest first and one left behind until the end of the round.
fn serve(guest: &mut Guest, kept: &Kept, again: bool) {
    let mut vring = start(guest, kept, again);
    let mut batch = Batch::new(3, 64);
    let mut late: Vec<Completion> = Vec::new();
    for round in 0..4 * CHAINS {
        guest.act();
        vring.pop(&mut batch, 3);
        if round % 5 == 1 && batch.len() > 1 {
            vring.unpop(&mut batch, 1);
        }
        let mut done: Vec<_> = (0..batch.len()).map(|i| complete(batch.get(i))).collect();
        if let Kept::Region(_) = kept {
            done.extend(std::mem::take(&mut late));
            done.reverse();
            if round % 3 != 0 {
                late.extend(done.pop());
            }
        }
        vring.push(&done);
        vring.notify();
        assert!(guest.driver.health().is_live(), "{:?}", guest.driver.health().reason());
        if guest.is_done() {
            return;
        }
    }
    panic!("requests were lost: {:?}", guest.number);
}

fn kept(layout: Layout, size: u16, region: bool) -> Kept {
    if region {
        return Kept::Region(InflightRegion::new(1, size, layout).unwrap());
    }
    let shm = Arc::new(SharedMemory::new("slots", SLOT_LEN_BYTES).unwrap());
    Kept::Slot(PositionSlot::new(shm, 0).unwrap())
}

/// Kills the first daemon before every store there is, and the second one some stores later.
fn kill_everywhere(layout: Layout, size: u16, region: bool) {
    for second in [None, Some(0), Some(1), Some(2), Some(3), Some(5), Some(8), Some(13), Some(21)] {
        for stores in 0.. {
            let mut guest = Guest::new(layout, size);
            let kept = kept(layout, size, region);
            if run(stores, || serve(&mut guest, &kept, false)).is_some() {
                assert!(stores > u64::from(2 * CHAINS), "the daemon hardly stored anything");
                break;
            }
            // The guest goes on while no daemon is there, or it does not.
            if stores % 2 == 0 {
                guest.act();
            }
            let killed_again =
                second.is_some_and(|n| run(n, || serve(&mut guest, &kept, true)).is_none());
            if killed_again || second.is_none() {
                serve(&mut guest, &kept, true);
            }
            assert!(guest.is_done(), "killed before store {stores}");
            if !region {
                let in_order: Vec<u32> = (0..CHAINS).collect();
                assert_eq!(guest.finished, in_order);
            }
        }
    }
}

#[test]
fn split_position() {
    kill_everywhere(Layout::Split, 8, false);
}

#[test]
fn packed_position() {
    kill_everywhere(Layout::Packed, 7, false);
}

#[test]
fn split_inflight() {
    kill_everywhere(Layout::Split, 8, true);
}

#[test]
fn packed_inflight() {
    kill_everywhere(Layout::Packed, 7, true);
}
