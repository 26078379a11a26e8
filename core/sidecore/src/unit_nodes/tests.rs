//! Real sidecores that are told to be on two nodes.

use std::sync::atomic::{AtomicU32, Ordering};

use base::clock::MonotonicClock;

use super::*;
use crate::{Arm, Ledger, SidecoreConfig, Worker, WorkerRef};

struct Still;

impl Worker for Still {
    fn poll(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> usize {
        0
    }
    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

/// Memory of a guest: the node, which can change, and the length in bytes; node 9 is unknown.
struct Guest(AtomicU32, u64);

impl Guest {
    fn new(node: Node, len_bytes: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU32::new(node), len_bytes))
    }
}

impl NumaMemory for Guest {
    fn spread(&self, _turn: u32) -> Spread {
        match self.0.load(Ordering::Relaxed) {
            9 => Spread::default(),
            node => Spread::on(node, self.1),
        }
    }
}

fn cores(nodes: &[Option<Node>]) -> Vec<Sidecore> {
    let spawn = |(index, &node): (usize, &Option<Node>)| {
        let config = SidecoreConfig { index, node, ..SidecoreConfig::default() };
        Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
    };
    nodes.iter().enumerate().map(spawn).collect()
}

fn look(nodes: &mut UnitNodes, cores: &[Sidecore]) {
    let seats: Vec<_> = cores.iter().map(Sidecore::seats).collect();
    let unit = |(core, seats): (usize, &Vec<Arc<crate::core::Seat>>)| {
        seats.iter().map(|s| (Arc::clone(&s.unit), core)).collect::<Vec<_>>()
    };
    let units: Vec<_> = seats.iter().enumerate().flat_map(unit).collect();
    nodes.look(cores, units.iter().map(|(unit, core)| (unit, *core)));
}

fn id(cores: &[Sidecore], worker: &WorkerRef<Still>) -> u32 {
    let core = cores.iter().find(|core| core.is(&worker.core())).unwrap();
    core.seats()[0].unit.id
}

#[test]
fn a_unit_is_where_most_of_its_workers_memory_is() {
    let cores = cores(&[Some(0), Some(1)]);
    let worker = cores[0].add(Still).unwrap();
    let mut nodes = UnitNodes::default();
    let id = id(&cores, &worker);
    look(&mut nodes, &cores);
    assert_eq!(nodes.of(id), None);
    let (small, large) = (Guest::new(1, 100), Guest::new(9, 1000));
    worker.works_on(1, &small);
    worker.works_on(2, &large);
    (0..10).for_each(|_| look(&mut nodes, &cores));
    assert_eq!(nodes.of(id), Some(1), "asked again soon");
    large.0.store(0, Ordering::Relaxed);
    look(&mut nodes, &cores);
    (0..100).for_each(|_| look(&mut nodes, &cores));
    assert_eq!(nodes.of(id), Some(0), "asked again in time");
    // What nobody holds any more does not count.
    drop(large);
    (0..100).for_each(|_| look(&mut nodes, &cores));
    assert_eq!(nodes.of(id), Some(1));
    small.0.store(9, Ordering::Relaxed);
    (0..100).for_each(|_| look(&mut nodes, &cores));
    assert_eq!(nodes.of(id), Some(1), "what cannot be seen is where it was");
    let equal = Guest::new(0, 100);
    small.0.store(1, Ordering::Relaxed);
    worker.works_on(3, &equal);
    (0..100).for_each(|_| look(&mut nodes, &cores));
    assert_eq!(nodes.of(id), None, "mixed");
    worker.remove().unwrap();
    look(&mut nodes, &cores);
    assert!(nodes.known.is_empty());
    cores.iter().for_each(Sidecore::shutdown);
}

#[test]
fn nothing_is_asked_where_there_is_one_node() {
    struct Never;
    impl NumaMemory for Never {
        fn spread(&self, _turn: u32) -> Spread {
            panic!("asked");
        }
    }
    for kind in [&[Some(0), Some(0)][..], &[None, None], &[Some(1)]] {
        let cores = cores(kind);
        let worker = cores[0].add(Still).unwrap();
        let memory = Arc::new(Never);
        worker.works_on(0, &memory);
        let mut nodes = UnitNodes::default();
        (0..200).for_each(|_| look(&mut nodes, &cores));
        assert_eq!(nodes.of(id(&cores, &worker)), None);
        assert!(Sidecore::for_memory(&cores, 5, &*memory).is(&cores[5 % cores.len()]));
        cores.iter().for_each(Sidecore::shutdown);
    }
}

#[test]
fn a_new_worker_goes_near_its_memory_if_there_is_room() {
    let cores = cores(&[Some(0), Some(1), Some(1)]);
    let at = |turn, node| Sidecore::for_memory(&cores, turn, &*Guest::new(node, 1)).index();
    assert_eq!([at(0, 0), at(0, 1), at(2, 1), at(1, 0), at(4, 1)], [0, 1, 2, 0, 1]);
    assert_eq!([at(0, 9), at(1, 9), at(2, 7)], [0, 1, 2], "unknown, and nobody's");
    let set = |core: usize, load| cores[core].stats().load_percent.set(load);
    set(1, 60);
    assert_eq!(at(0, 1), 2);
    cores[2].stats().active.set(0);
    assert_eq!(at(0, 1), 0, "a full one and a parked one are no help");
    cores.iter().for_each(Sidecore::shutdown);
}
