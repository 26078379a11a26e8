//! Disks that are charged to accounts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore::{Accounts, Arm, Ledger, SEG_CHARGE_BYTES, Settings, Worker};

use crate::backend::{Backend, Demands};
use crate::gate::Gate;
use crate::memory::MemoryBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::placeholders::{ImmediateHandler, TAG, offer_to, sectors};
use crate::testing::{BOTH, Rig, RigOptions, UNTOUCHED, range};

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
    let taken = |rig: &Rig| rig.engine.requests.in_flight.slab.taken();
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

/// Polls until nothing goes on any more; returns what the account was charged since.
fn charge_of(rig: &mut Rig, ledger: &mut Ledger, account: &sidecore::Account) -> u64 {
    let charged = |ledger: &mut Ledger| {
        ledger.settle(1_000_000_000);
        account.stats.charged_bytes.load(Ordering::Relaxed)
    };
    let before = charged(ledger);
    let mut now_ns = 1_000_000_000;
    loop {
        now_ns += 10_000;
        let work = rig.engine.poll(now_ns, ledger);
        if work == 0 && rig.engine.requests.in_flight.slab.taken() == 0 {
            break;
        }
        ledger.end_round(now_ns);
    }
    while rig.driver.used().is_some() {}
    charged(ledger) - before
}

#[test]
fn requests_are_charged_by_what_they_move() {
    const MIB: u64 = 1 << 20;
    let at_once = Demands { max_range_bytes: MIB, ..Demands::NONE };
    for (demands, discarded) in [(at_once, 40 * MIB), (Demands::NONE, 40 * MIB / 256)] {
        let accounts = Accounts::default();
        let account = accounts.open("vm", weight(100));
        let mut ledger = Ledger::default();
        ledger.enrol(account.clone());
        let disk = ModelDisk::new(200 << 20);
        let gate = Some(Arc::new(Gate::new(11)));
        let options = RigOptions { vm: account.id(), gate, demands, ..RigOptions::default() };
        let mut rig = Rig::sized(BOTH[0], 256, disk.boxed(), options);
        // 20 MiB each.
        let ranges = [range(0, 40960, 0), range(40960, 0, 0), range(81920, 40960, 0)].concat();
        let charge = |rig: &mut Rig, ledger: &mut Ledger| charge_of(rig, ledger, &account);

        rig.send(kind::WRITE_ZEROES, 0, &ranges);
        assert_eq!(charge(&mut rig, &mut ledger), 40 * MIB);
        rig.send(kind::DISCARD, 0, &ranges);
        assert_eq!(charge(&mut rig, &mut ledger), discarded);
        rig.ask(kind::IN, 0, (5 * MIB / 2) as usize);
        assert_eq!(charge(&mut rig, &mut ledger), 5 * MIB / 2, "each step once");
        rig.ask(kind::IN, 0, 512);
        assert_eq!(charge(&mut rig, &mut ledger), 4096);
        rig.ask(kind::IN, u64::MAX / 1024, 8192);
        assert_eq!(charge(&mut rig, &mut ledger), 4096, "refused");
        // 128 pieces of 4 bytes, the header and the status.
        let header = rig.header(kind::IN, 0);
        let mut pieces: Vec<_> = (0..128).map(|_| rig.driver.buffer(&[0; 4])).collect();
        pieces.push(rig.driver.buffer(&[UNTOUCHED]));
        rig.driver.offer(&[header], &pieces);
        assert_eq!(charge(&mut rig, &mut ledger), 130 * SEG_CHARGE_BYTES, "pieces");
        // The disk has no such operation. The second try of the first step was paid with the first.
        disk.state().script.push_back(Err(libc::EOPNOTSUPP));
        rig.send(kind::WRITE_ZEROES, 0, &range(0, 2048, 0));
        assert!((MIB..=2 * MIB).contains(&charge(&mut rig, &mut ledger)));
    }
}

#[test]
fn placed_writes_are_charged_like_the_writes_that_they_are() {
    const MIB: usize = 1 << 20;
    let accounts = Accounts::default();
    let account = accounts.open("vm", weight(100));
    let mut ledger = Ledger::default();
    ledger.enrol(account.clone());
    let options = RigOptions { vm: account.id(), ..RigOptions::default() };
    let mut rig = Rig::sized(BOTH[0], 256, ModelDisk::new(4 * MIB).boxed(), options);
    offer_to(&mut rig, Arc::new(ImmediateHandler));
    // The last two are given back: the one with three steps after two of them were paid.
    let other = [9; 16];
    for (tag, len, charge) in [
        (TAG, 512, 4096),
        (TAG, 65536, 65536),
        (TAG, 5 * MIB / 2, 5 * MIB / 2),
        (other, 65536, 65536),
        (other, 5 * MIB / 2, 9 * MIB / 2),
    ] {
        rig.send(kind::OUT, 0, &sectors(tag, 0, len));
        assert_eq!(charge_of(&mut rig, &mut ledger, &account), charge as u64, "{tag:?} {len}");
    }
    assert_eq!((rig.stats.placeholders.get(), rig.stats.writes.get()), (3, 5));
}

#[test]
fn zeroes_count_against_a_ceiling() {
    let mut ledger = Ledger::default();
    let accounts = Accounts::default();
    let settings =
        Settings { ceiling_bytes_per_s: 1_000_000, ceiling_burst_ms: 600, ..weight(100) };
    let account = accounts.open("vm", settings);
    ledger.enrol(account.clone());
    let backend = MemoryBackend::new(1 << 30).unwrap();
    let demands = backend.demands();
    let options = RigOptions { vm: account.id(), demands, ..RigOptions::default() };
    let disk = backend.open_queue(256).unwrap();
    let mut rig = Rig::sized(BOTH[0], 256, disk, options);
    rig.send(kind::WRITE_ZEROES, 0, &range(0, 1 << 11, 0));
    let read = rig.ask(kind::IN, 0, 512);
    // 1 MiB at 1 MB/s, less the burst of 0.6 s.
    let mut now_ns = 10_000_000_000;
    let end_ns = now_ns + 440_000_000;
    while now_ns < end_ns {
        rig.engine.poll(now_ns, &mut ledger);
        ledger.end_round(now_ns);
        now_ns += 1_000_000;
    }
    assert_eq!((rig.status(read), rig.stats.reads.get()), (UNTOUCHED, 0));
    while now_ns < end_ns + 100_000_000 {
        rig.engine.poll(now_ns, &mut ledger);
        now_ns += 1_000_000;
    }
    assert_eq!((rig.status(read), rig.stats.write_zeroes.get()), (0, 1));
}
