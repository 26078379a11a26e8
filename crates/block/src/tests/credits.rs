//! Disks that are charged to accounts.

use std::sync::Arc;

use sidecore::{Accounts, Arm, Ledger, Settings, Worker};

use crate::backend::Backend;
use crate::gate::Gate;
use crate::memory::MemoryBackend;
use crate::request::kind;
use crate::test_support::model_disk::ModelDisk;
use crate::test_support::{BOTH, Rig, RigOptions, UNTOUCHED};

/// Enough for more than a share in each round.
const DEPTH: usize = 80;

/// Keeps a disk busy with reads of `len` bytes; returns how many were done in `rounds` rounds.
fn compete(rigs: &mut [Rig; 2], len: [usize; 2], ledger: &mut Ledger, rounds: u64) -> [u64; 2] {
    let bufs = [0, 1].map(|n| {
        let rig: &Rig = &rigs[n];
        let (header, data) = (rig.header(kind::IN, 0), rig.driver.buffer(&vec![0; len[n]]));
        (header, data, rig.driver.buffer(&[UNTOUCHED]))
    });
    let (mut done, mut offered) = ([0; 2], [0u64; 2]);
    for now_ns in 1..=rounds {
        for (n, rig) in rigs.iter_mut().enumerate() {
            while rig.driver.used().is_some() {
                done[n] += 1;
            }
            while offered[n] - done[n] < DEPTH as u64 {
                rig.driver.offer(&[bufs[n].0], &[bufs[n].1, bufs[n].2]);
                offered[n] += 1;
            }
            rig.engine.poll(now_ns * 10_000, ledger);
        }
        ledger.end_round(now_ns * 10_000);
    }
    done
}

fn rigs(settings: [Settings; 2], gate: Option<&Arc<Gate>>, ledger: &mut Ledger) -> [Rig; 2] {
    let accounts = Accounts::default();
    let backend = MemoryBackend::new(1 << 20).unwrap();
    settings.map(|settings| {
        let account = accounts.open("vm", settings);
        let options = RigOptions { vm: account.id(), gate: gate.cloned(), ..RigOptions::default() };
        ledger.enrol(account);
        Rig::sized(BOTH[0], 256, backend.open_queue(256).unwrap(), options)
    })
}

fn weight(weight: u32) -> Settings {
    Settings { weight, ..Settings::default() }
}

#[test]
fn weights_hold_between_two_disks() {
    for len in [[4096, 4096], [64 << 10, 4096], [512, 128 << 10]] {
        for gate in [None, Some(Arc::new(Gate::new(7)))] {
            let mut ledger = Ledger::default();
            let mut rigs = rigs([weight(100), weight(300)], gate.as_ref(), &mut ledger);
            let done = compete(&mut rigs, len, &mut ledger, 4000);
            let bytes = [0, 1].map(|n| (done[n] * len[n].max(4096) as u64) as f64);
            let ratio = bytes[1] / bytes[0] / 3.0;
            assert!((0.95..1.05).contains(&ratio), "{len:?} {done:?}");
        }
    }
}

#[test]
fn a_disk_at_its_ceiling_waits_asleep() {
    let mut ledger = Ledger::default();
    let settings = Settings { ceiling_ops_per_s: 1000, ceiling_burst_ms: 10, ..weight(100) };
    let [mut rig, _other] = rigs([settings, weight(100)], None, &mut ledger);
    let mut now_ns = 1_000_000_000;
    for _ in 0..12 {
        rig.ask(kind::IN, 0, 4096);
    }
    while rig.engine.poll(now_ns, &mut ledger) > 0 {}
    assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 10);
    let Arm::Until(at_ns) = rig.engine.arm(now_ns, &mut ledger) else { panic!("no timer") };
    assert!(at_ns > now_ns && at_ns <= now_ns + 1_000_000);
    rig.engine.disarm();
    now_ns = at_ns + 1_000_000;
    while rig.engine.poll(now_ns, &mut ledger) > 0 {}
    assert!(rig.driver.used().is_some());
}

#[test]
fn requests_in_flight_move_along_with_their_place_in_the_device() {
    let gate = Arc::new(Gate::new(9));
    let accounts = Accounts::default();
    let mut ledgers = [Ledger::default(), Ledger::default()];
    let disks = [ModelDisk::new(1 << 20), ModelDisk::new(1 << 20)];
    let mut rigs = [0, 1].map(|n| {
        disks[n].state().hold = true;
        let account = accounts.open("vm", weight(100));
        ledgers.iter_mut().for_each(|ledger| ledger.enrol(account.clone()));
        let options =
            RigOptions { vm: account.id(), gate: Some(gate.clone()), ..RigOptions::default() };
        Rig::sized(BOTH[0], 256, disks[n].boxed(), options)
    });
    // Seen by two VMs, the device takes 64 requests at a time.
    let poll = |rig: &mut Rig, ledger: &mut Ledger| {
        for now_ns in 1..20 {
            rig.engine.poll(now_ns, ledger);
            ledger.end_round(now_ns);
        }
    };
    rigs[1].ask(kind::IN, 0, 512);
    poll(&mut rigs[1], &mut ledgers[0]);
    for _ in 0..80 {
        rigs[0].ask(kind::IN, 0, 512);
    }
    poll(&mut rigs[0], &mut ledgers[0]);
    let taken = |rig: &Rig| rig.engine.flight.slab.taken();
    let held = taken(&rigs[0]);
    assert!(gate.in_flight() as usize == held + 1 && held < 80, "{held}");

    // The first one moves with what it has in the device. There is no more room there than before.
    ledgers[0].worker_left(20);
    poll(&mut rigs[0], &mut ledgers[1]);
    assert_eq!((taken(&rigs[0]), gate.in_flight() as usize), (held, held + 1));
    // What finishes there makes room, there and where it was.
    disks[0].let_go();
    poll(&mut rigs[0], &mut ledgers[1]);
    assert_eq!(std::iter::from_fn(|| rigs[0].driver.used()).count(), 80);
    assert_eq!(gate.in_flight(), 1);
    rigs[1].ask(kind::IN, 0, 512);
    poll(&mut rigs[1], &mut ledgers[0]);
    assert_eq!((taken(&rigs[1]), gate.in_flight()), (2, 2));
    disks[1].let_go();
}
