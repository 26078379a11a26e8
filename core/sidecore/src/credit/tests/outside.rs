//! Bytes that are moved for a VM outside of all sidecores.

use super::sim::{MS, NET, Queue, SECOND, Sim};
use crate::{Settings, Spent};

/// Runs for a second, in which VM 0 is charged `bytes` outside, in 200 pieces. Returns what both
/// had in all.
fn second(sim: &mut Sim, bytes: u64) -> [u64; 2] {
    let account = sim.accounts.find("vm0").unwrap();
    let mut sum = [0; 2];
    for _ in 0..200 {
        let spent = Spent { bytes: bytes / 200, requests: 10 };
        account.charge(spent, sim.now_ns());
        sum[0] += spent.bytes;
        sim.run(5 * MS).into_iter().zip(&mut sum).for_each(|(had, sum)| *sum += had);
    }
    sum
}

#[test]
fn it_is_kept_back_from_what_the_vm_earns() {
    let queues = [0, 1].map(|vm| Queue::new(vm, NET, 1500));
    let mut sim = Sim::weights(&[100, 100], &queues);
    let [alone, _] = second(&mut sim, 0);
    let [with, other] = second(&mut sim, alone / 20);
    let ratio = with as f64 / other as f64;
    assert!((0.97..1.03).contains(&ratio), "{with} beside {other}");
}

#[test]
fn it_counts_to_the_ceiling() {
    let rate = 100_000_000;
    let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
    let mut sim = Sim::new(&[ceiling, Settings::default()], &[Queue::new(0, NET, 1500)]);
    sim.run(SECOND);
    for bytes in [0, rate / 2, rate * 9 / 10] {
        let [all, _] = second(&mut sim, bytes);
        let off = all as f64 / rate as f64 - 1.0;
        assert!(off.abs() < 0.05, "{all} for {rate} with {bytes} outside");
    }
}
