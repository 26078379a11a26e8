//! Queues that go from core to core.

use std::sync::atomic::Ordering::Relaxed;

use super::sim::{DISK, MS, NET, Queue, SECOND, Sim};
use crate::Settings;

fn weight(weight: u32) -> Settings {
    Settings { weight, ..Settings::default() }
}

#[test]
fn a_ceiling_holds_for_one_that_moves_all_the_time() {
    // One request is worth more than the ceiling gives between two moves.
    for (kind, len_bytes, rate) in [(NET, 65_000, 2_000_000), (DISK, 4096, 50_000_000)] {
        let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
        let queues = [Queue::new(0, kind, len_bytes), Queue { core: 1, ..Queue::new(1, NET, 64) }];
        let mut sim = Sim::new(&[ceiling, weight(100)], &queues);
        sim.run(200 * MS);
        let before = sim.charged[0];
        for n in 0..100 {
            // It is the last one on either core: the other VM stays.
            let from = n % 2;
            let at = sim.len(from) - 1;
            sim.shift(from, at, 1 - from);
            sim.run(10 * MS);
        }
        let off = (sim.charged[0] - before) as f64 / rate as f64 - 1.0;
        assert!(off.abs() < 0.05, "{len_bytes}: {off:+.3}");
    }
}

#[test]
fn a_mover_has_its_share_where_it_is_and_leaves_nothing_behind() {
    // 0 and 1 on the first core, 2 on the second; 0 moves there when it is held back.
    let queue = |vm, core| Queue { core, ..Queue::new(vm, NET, 1500) };
    let queues = [queue(0, 0), queue(1, 0), queue(2, 1)];
    let mut sim = Sim::new(&[weight(100), weight(300), weight(200)], &queues);
    let got = sim.run(100 * MS);
    assert!((got[1] as f64 / got[0] as f64 / 3.0 - 1.0).abs() < 0.05, "{got:?}");
    let account = sim.accounts.find("vm0").unwrap();
    let held = &account.stats.held_by_weight_ns;
    sim.shift(0, 0, 1);
    let waited = held.load(Relaxed);
    assert!((MS..100 * MS).contains(&waited), "{waited}");
    assert_eq!(account.stats.charged_bytes.load(Relaxed), sim.charged[0], "all of it is told");

    sim.run(10 * MS);
    let alone = sim.wasted_on(0);
    let got = sim.run(100 * MS);
    assert!((got[2] as f64 / got[0] as f64 / 2.0 - 1.0).abs() < 0.05, "{got:?}");
    let fast = got[1] as f64 / (got[0] + got[2]) as f64;
    assert!((0.9..1.15).contains(&fast), "who stayed has its core to itself: {got:?}");
    assert_eq!(sim.wasted_on(0), alone, "nobody waits for who left");

    // Back after a while, in which it is not held back here.
    sim.shift(1, 1, 0);
    let then = held.load(Relaxed);
    assert!(then < 200 * MS);
    sim.run(SECOND / 20);
    let got = sim.run(100 * MS);
    assert!((got[1] as f64 / got[0] as f64 / 3.0 - 1.0).abs() < 0.05, "{got:?}");
    assert!(held.load(Relaxed) - then <= 151 * MS);
}
