//! A write acknowledged before a flush survives a power cut: at every moment of a random run the
//! durable half of the disk is compared with what the driver was promised.

use base::random::{Random, Seeded};
use queue::Layout;
use sidecore::Worker;

use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Offered, Rig, RigOptions};

const BLOCKS: u64 = 16;

/// Promises made for one block.
#[derive(Default, Clone)]
struct Block {
    /// Newest stamp that was offered.
    offered: u64,
    /// Newest stamp that was acknowledged.
    acked: u64,
    /// Oldest stamp that may be found after a cut.
    promised: u64,
}

enum Op {
    Write(u64, u64),
    /// With what was acknowledged when it was offered.
    Flush(Vec<u64>),
}

struct Run {
    rig: Rig,
    disk: ModelDisk,
    random: Seeded,
    blocks: Vec<Block>,
    open: Vec<(Offered, Op)>,
    writeback: bool,
    flushes: u32,
}

impl Run {
    fn new(layout: Layout, seed: u64, writeback: bool) -> Self {
        let disk = ModelDisk::new(BLOCKS as usize * 512);
        disk.state().hold = true;
        let options = RigOptions { writeback, ..RigOptions::default() };
        Self {
            rig: Rig::with_disk(layout, disk.boxed(), options),
            disk,
            random: Seeded::new(seed),
            blocks: vec![Block::default(); BLOCKS as usize],
            open: Vec::new(),
            writeback,
            flushes: 0,
        }
    }

    /// One write per block at a time, as a driver that cares does it.
    fn offer(&mut self) {
        if self.open.len() >= 12 {
            return;
        }
        if self.random.below(5) == 0 {
            let acked = self.blocks.iter().map(|b| b.acked).collect();
            let offered = self.rig.send(kind::FLUSH, 0, &[]);
            return self.open.push((offered, Op::Flush(acked)));
        }
        let block = u64::from(self.random.below(BLOCKS as u32));
        let busy = |o: &(Offered, Op)| matches!(o.1, Op::Write(b, _) if b == block);
        if self.open.iter().any(busy) {
            return;
        }
        let b = &mut self.blocks[block as usize];
        b.offered += 1;
        let stamp = b.offered;
        let offered = self.rig.send(kind::OUT, block, &stamp.to_le_bytes().repeat(64));
        self.open.push((offered, Op::Write(block, stamp)));
    }

    fn acknowledge(&mut self, id: u16) {
        let at = self.open.iter().position(|o| o.0.id == id).unwrap();
        let (offered, op) = self.open.swap_remove(at);
        assert_eq!(self.rig.status(offered), 0);
        match op {
            Op::Write(block, stamp) => {
                let b = &mut self.blocks[block as usize];
                b.acked = stamp;
                if !self.writeback {
                    b.promised = stamp;
                }
            }
            Op::Flush(acked) => {
                self.flushes += 1;
                for (b, stamp) in self.blocks.iter_mut().zip(acked) {
                    b.promised = b.promised.max(stamp);
                }
            }
        }
    }

    /// The power is cut now: is everything promised there?
    fn cut(&self) {
        let state = self.disk.state();
        for (i, b) in self.blocks.iter().enumerate() {
            let found = u64::from_le_bytes(state.durable[i * 512..][..8].try_into().unwrap());
            assert!(found >= b.promised, "block {i}: promised {}, found {found}", b.promised);
            assert!(found <= b.offered);
        }
    }

    fn step(&mut self) {
        self.offer();
        self.rig.engine.poll(0, &mut self.rig.ledger);
        let held = self.disk.state().held.len() as u32;
        if held > 0 && self.random.below(2) == 0 {
            let index = self.random.below(held) as usize;
            self.disk.finish_one(index);
        }
        self.rig.engine.poll(0, &mut self.rig.ledger);
        while let Some((id, _)) = self.rig.driver.used() {
            self.acknowledge(id);
        }
        self.cut();
    }
}

#[test]
fn flushed_writes_survive_a_cut_at_any_moment() {
    for layout in BOTH {
        for seed in 0..20 {
            let mut run = Run::new(layout, seed, true);
            (0..2000).for_each(|_| run.step());
            assert!(run.flushes > 20, "the run flushed");
            assert!(run.blocks.iter().any(|b| b.promised > 5), "the run promised something");
            run.disk.let_go();
        }
    }
}

#[test]
fn write_through_survives_without_any_flush_of_the_driver() {
    for layout in BOTH {
        for seed in 0..20 {
            let mut run = Run::new(layout, seed, false);
            (0..2000).for_each(|_| run.step());
            assert!(run.blocks.iter().any(|b| b.promised > 5), "the run promised something");
            run.disk.let_go();
        }
    }
}

#[test]
fn the_log_shows_a_flush_after_each_write_in_write_through_only() {
    for (writeback, expect) in [(true, vec!["write"]), (false, vec!["write", "flush"])] {
        let disk = ModelDisk::new(4096);
        let options = RigOptions { writeback, ..RigOptions::default() };
        let mut rig = Rig::with_disk(Layout::Split, disk.boxed(), options);
        rig.write(0, &[1; 512]);
        let log: Vec<&str> = disk.state().log.iter().map(|l| l.0).collect();
        assert_eq!(log, expect);
    }
}

#[test]
fn a_failed_flush_is_never_acknowledged_as_good() {
    for writeback in [true, false] {
        let disk = ModelDisk::new(4096);
        let options = RigOptions { writeback, ..RigOptions::default() };
        let mut rig = Rig::with_disk(Layout::Packed, disk.boxed(), options);
        if writeback {
            disk.state().script.push_back(Err(libc::EIO));
            let flush = rig.send(kind::FLUSH, 0, &[]);
            assert_eq!(rig.finish(flush), (1, 1));
        } else {
            disk.state().script.extend([Ok(512), Err(libc::EIO)]);
            let write = rig.send(kind::OUT, 0, &[1; 512]);
            assert_eq!(rig.finish(write), (1, 1));
        }
        assert_eq!(rig.stats.io_errors.get(), 1);
    }
}
