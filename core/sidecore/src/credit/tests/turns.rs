//! One VM's part of a round.

use crate::credit::{LONE_TURN_BYTES, TURN_BYTES, VmId};
use crate::{Accounts, Allowance, Ledger, Settings, Spent};

const LOOK_NS: u64 = crate::credit::LOOK_INTERVAL_NS;

fn ledger(vms: usize) -> (Ledger, Vec<VmId>) {
    let accounts = Accounts::default();
    let mut ledger = Ledger::default();
    let open = |n| {
        let account = accounts.open(&format!("vm{n}"), Settings::default());
        let id = account.id();
        ledger.enrol(account);
        id
    };
    let ids = (0..vms).map(open).collect();
    (ledger, ids)
}

fn spend(ledger: &mut Ledger, vm: VmId, bytes: u64) {
    ledger.charge(vm, Spent { bytes, requests: 1 }, true, 0);
}

#[test]
fn among_others_a_vm_has_one_turn_in_a_round_for_all_its_queues() {
    let (mut ledger, ids) = ledger(2);
    ids.iter().for_each(|&vm| spend(&mut ledger, vm, 100));
    ledger.end_round(0);
    assert_eq!(ledger.allowance(ids[0], 0).bytes, TURN_BYTES);
    spend(&mut ledger, ids[0], 1000);
    assert_eq!(ledger.allowance(ids[0], 0).bytes, TURN_BYTES - 1000);
    // A request too long for what is left: no more in this round.
    spend(&mut ledger, ids[0], TURN_BYTES);
    assert!(ledger.allowance(ids[0], 0).is_none());
    assert_eq!(ledger.allowance(ids[1], 0).bytes, TURN_BYTES);
    ledger.end_round(0);
    assert_eq!(ledger.allowance(ids[0], 0).bytes, TURN_BYTES);
}

#[test]
fn a_vm_alone_has_a_longer_turn() {
    let (mut ledger, ids) = ledger(2);
    ids.iter().for_each(|&vm| spend(&mut ledger, vm, 100));
    // The other one did nothing between two looks.
    for round in 1..=3 {
        ledger.end_round(round * LOOK_NS);
        spend(&mut ledger, ids[0], 10 * TURN_BYTES);
    }
    assert!(ledger.allowance(ids[0], 3 * LOOK_NS).is_none(), "this round's is over");
    ledger.end_round(3 * LOOK_NS);
    let all = Allowance { bytes: LONE_TURN_BYTES, ..Allowance::UNLIMITED };
    assert_eq!(ledger.allowance(ids[0], 3 * LOOK_NS), all);
}

#[test]
fn whose_turn_is_over_is_not_short_of_credit() {
    let (mut ledger, ids) = ledger(2);
    // The second one is in debt and waits, the first has credit.
    spend(&mut ledger, ids[1], 100 * TURN_BYTES);
    spend(&mut ledger, ids[0], 100);
    ledger.end_round(0);
    let rises = ledger.rises();
    // One queue was served all that it had; another one finds the turn over.
    ledger.charge(ids[0], Spent { bytes: TURN_BYTES, requests: 1 }, false, 0);
    assert!(ledger.allowance(ids[0], 0).is_none());
    ledger.held_back(ids[0], 0);
    ledger.held_back(ids[1], 0);
    ledger.end_round(0);
    assert_eq!(ledger.rises(), rises, "who has credit and work is waited for");
}

#[test]
fn each_queue_of_each_worker_comes_first_as_often() {
    const ROUNDS: usize = 20_000;
    for (workers, queues) in [(2, 2), (3, 2), (3, 4), (4, 3), (5, 1)] {
        let mut ledger = Ledger::default();
        let mut firsts = vec![0; workers * queues];
        for round in 0..ROUNDS {
            let worker = ledger.draw_below(workers);
            // Other workers of this round draw as well, more of them in some rounds than in others.
            for _ in 0..round % workers {
                ledger.draw_below(queues);
            }
            firsts[worker * queues + ledger.draw_below(queues)] += 1;
        }
        let due = ROUNDS / firsts.len();
        assert!(firsts.iter().all(|n| (due * 9 / 10..=due * 11 / 10).contains(n)), "{firsts:?}");
    }
    assert_eq!(Ledger::default().draw_below(0), 0);
}
