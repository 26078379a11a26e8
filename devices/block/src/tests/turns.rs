//! Large requests beside other VMs, at ceilings, and at the end of their queue.

use std::sync::mpsc;

use sidecore::{Accounts, Arm, Ledger, Settings, Worker};

use crate::backend::Backend;
use crate::limits::{POLL_BUDGET_BYTES, SHORT_STEP_LEN_BYTES};
use crate::memory::MemoryBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions, UNTOUCHED};

const MIB: u64 = 1 << 20;

/// The most that a VM may take in a round beside others: the sidecore's `TURN_BYTES`.
const TURN_BYTES: u64 = 40 << 10;

/// Offers `count` reads of `len` bytes into the same buffer.
fn hoard(rig: &mut Rig, count: usize, len: u64) {
    let header = rig.header(kind::IN, 0);
    let data = rig.driver.buffer(&vec![0; len as usize]);
    let status = rig.status_byte();
    for _ in 0..count {
        rig.driver.offer(&[header], &[data, status]);
    }
}

fn used(rig: &mut Rig) -> usize {
    std::iter::from_fn(|| rig.driver.used()).count()
}

#[test]
fn all_queues_of_a_vm_have_one_turn_in_a_round_and_one_step_beyond() {
    const QUEUES: usize = 8;
    let accounts = Accounts::default();
    let mut ledger = Ledger::default();
    let [vm, other] = ["vm", "other"].map(|name| {
        let account = accounts.open(name, Settings::default());
        ledger.enrol(account.clone());
        account.id()
    });
    let rig = |disk: &ModelDisk, vm| {
        Rig::sized(BOTH[0], 64, disk.boxed(), RigOptions { vm, ..RigOptions::default() })
    };
    let disks: Vec<ModelDisk> = (0..QUEUES).map(|_| ModelDisk::new(4 << 20)).collect();
    let mut rigs: Vec<Rig> = disks.iter().map(|disk| rig(disk, vm)).collect();
    let mut ping = rig(&ModelDisk::new(4096), other);
    for rig in &mut rigs {
        hoard(rig, 4, 4 * MIB);
    }
    let (mut moved, mut done, mut largest, mut now_ns) = (0, 0, 0, 0);
    for round in 0..3000 {
        now_ns += 10_000;
        // From the third round on the other one asks for something in each: until then the queues
        // take what they can get.
        if round >= 2 {
            ping.ask(kind::IN, 0, 512);
            ping.engine.poll(now_ns, &mut ledger);
            used(&mut ping);
        }
        let first = ledger.draw_below(QUEUES);
        for n in 0..QUEUES {
            rigs[(first + n) % QUEUES].engine.poll(now_ns, &mut ledger);
        }
        ledger.end_round(now_ns);
        let so_far: u64 =
            disks.iter().flat_map(|d| std::mem::take(&mut d.state().log)).map(|l| l.2).sum();
        moved += so_far;
        if round > 2 {
            largest = so_far.max(largest);
        }
        done += rigs.iter_mut().map(used).sum::<usize>();
    }
    assert!(largest <= TURN_BYTES + u64::from(SHORT_STEP_LEN_BYTES), "{largest} bytes in a round");
    assert_eq!((done, moved), (QUEUES * 4, QUEUES as u64 * 16 * MIB));
}

#[test]
fn a_poll_takes_no_more_than_its_share_and_one_request() {
    let disk = ModelDisk::new(4 << 20);
    disk.state().hold = true;
    let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
    let len = 128 << 10;
    hoard(&mut rig, 20, len);
    rig.engine.poll(1, &mut rig.ledger);
    let taken = rig.engine.requests.in_flight.slab.taken() as u64;
    assert!(taken > 0 && taken <= POLL_BUDGET_BYTES / len + 1, "{taken}");
    disk.let_go();
    assert_eq!(rig.settle().len(), 20);
}

/// A queue at a ceiling of 10 MB/s, 1 MB at once.
fn limited(ledger: &mut Ledger) -> Rig {
    let settings = Settings { ceiling_bytes_per_s: 10_000_000, ..Settings::default() };
    let account = Accounts::default().open("vm", settings);
    ledger.enrol(account.clone());
    let disk = MemoryBackend::new(16 * MIB).unwrap().open_queue(64).unwrap();
    Rig::with_disk(BOTH[0], disk, RigOptions { vm: account.id(), ..RigOptions::default() })
}

#[test]
fn a_large_request_at_a_ceiling_goes_on_step_by_step_and_lets_others_pass() {
    let mut ledger = Ledger::default();
    let mut rig = limited(&mut ledger);
    let large = rig.ask(kind::IN, 0, 8 << 20);
    let mut now_ns = 5_000_000_000;
    while rig.engine.poll(now_ns, &mut ledger) > 0 {}
    let Arm::Until(at_ns) = rig.engine.arm(now_ns, &mut ledger) else { panic!("no timer") };
    assert!(at_ns > now_ns);
    rig.engine.disarm();
    let small = rig.ask(kind::IN, 0, 512);
    let [mut small_ns, mut large_ns] = [0; 2];
    for _ in 0..1000 {
        now_ns += 1_000_000;
        rig.engine.poll(now_ns, &mut ledger);
        ledger.end_round(now_ns);
        for (at_ns, request) in [(&mut small_ns, small), (&mut large_ns, large)] {
            *at_ns += u64::from(rig.status(request) == UNTOUCHED) * 1_000_000;
        }
    }
    // 8 MiB at 10 MB/s; a step or two of 1 MiB go before the small one.
    assert!(small_ns < 250_000_000, "{small_ns}");
    assert!((600_000_000..950_000_000).contains(&large_ns), "{large_ns}");
}

#[test]
fn a_queue_at_its_ceiling_ends_without_waiting_for_it() {
    let mut ledger = Ledger::default();
    let mut rig = limited(&mut ledger);
    let large = rig.ask(kind::IN, 0, 8 << 20);
    let now_ns = 5_000_000_000;
    while rig.engine.poll(now_ns, &mut ledger) > 0 {}
    assert_eq!(rig.status(large), UNTOUCHED);
    let (notice, drained) = mpsc::channel();
    rig.engine.drain(notice, false);
    // One step is done.
    for _ in 0..7 {
        assert!(drained.try_recv().is_err());
        rig.engine.poll(now_ns, &mut ledger);
    }
    assert!(drained.try_recv().is_ok());
    assert_eq!(rig.status(large), 0);
}
