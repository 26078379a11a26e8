use super::*;

const RULES: LearnRules = LearnRules { owner_limit: 3, may_move: true };
const STAY: LearnRules = LearnRules { may_move: false, ..RULES };
const S: u64 = 1_000_000_000;

fn mac(n: u16) -> Mac {
    let [a, b] = n.to_be_bytes();
    Mac::new([2, 0, 0, 0, a, b])
}

fn table(max: usize) -> Table<Mac> {
    Table::new(max, 300 * S, 7)
}

#[test]
fn learns_moves_and_ages() {
    let mut t = table(64);
    assert_eq!(t.learn(mac(1), 1, S, RULES), Learn::New);
    assert_eq!(t.learn(mac(1), 1, 2 * S, RULES), Learn::Known);
    assert_eq!(t.owner(mac(1), 302 * S), Some(1));
    assert_eq!(t.owner(mac(1), 302 * S + 1), None);
    assert_eq!(t.learn(mac(1), 2, 3 * S, STAY), Learn::Taken);
    assert_eq!(t.learn(mac(1), 2, 3 * S, RULES), Learn::Moved { from: 1 });
    assert_eq!(t.owner(mac(1), 3 * S), Some(2));
    // What has aged may move in any case.
    assert_eq!(t.learn(mac(1), 3, 400 * S, STAY), Learn::New);
}

#[test]
fn an_owner_keeps_to_its_limit_and_gets_room_by_ageing() {
    let mut t = table(64);
    for n in 0..3 {
        assert_eq!(t.learn(mac(n), 1, S, RULES), Learn::New);
    }
    assert_eq!(t.learn(mac(3), 1, S, RULES), Learn::OwnerFull);
    assert_eq!(t.learn(mac(3), 2, S, RULES), Learn::New);
    assert_eq!(t.learn(mac(3), 1, S, RULES), Learn::OwnerFull, "nor by moving");
    assert_eq!(t.learn(mac(4), 1, 302 * S, RULES), Learn::New);
    t.forget(1, |_, _| true);
    assert_eq!(t.list(302 * S), []);
    assert_eq!(t.learn(mac(5), 1, 302 * S, RULES), Learn::New);
}

#[test]
fn fixed_entries_neither_age_nor_move() {
    let mut t = table(64);
    t.learn(mac(1), 2, S, RULES);
    assert_eq!(t.fix(mac(1), 1, S), Learn::New);
    assert_eq!(t.fix(mac(1), 1, S), Learn::Known);
    assert_eq!(t.fix(mac(1), 2, S), Learn::Taken);
    assert_eq!(t.learn(mac(1), 2, S, RULES), Learn::Taken);
    assert_eq!(t.owner(mac(1), u64::MAX), Some(1));
    assert_eq!(t.list(5 * S), [Listed { key: mac(1), owner: 1, fixed: true, age_ns: 0 }]);
    t.forget(1, |_, fixed| !fixed);
    assert_eq!(t.owner(mac(1), S), Some(1));
    t.forget(1, |_, fixed| fixed);
    assert_eq!(t.owner(mac(1), S), None);
}

/// A flood of learned addresses, live or aged, never keeps a bound one out.
#[test]
fn a_fixed_entry_takes_the_place_of_the_oldest_learned_one() {
    let rules = LearnRules { owner_limit: u32::MAX, may_move: true };
    let mut t = table(32);
    let mut n = 0;
    while t.list(S).len() < 32 {
        t.learn(mac(n), n % 5, S + u64::from(n), rules);
        n += 1;
    }
    assert_eq!(t.owner(mac(0), S), Some(0));
    for k in 0..16 {
        let at_ns = if k % 2 == 0 { 2 * S } else { 900 * S };
        assert_eq!(t.fix(mac(5000 + k), 9, at_ns), Learn::New, "{k}");
        assert_eq!((t.len, t.fixed), (32, usize::from(k) + 1));
    }
    assert_eq!(t.owner(mac(0), S), None, "the oldest one is gone");
    assert_eq!(t.counts.iter().sum::<u32>(), 16);
    // Only what is fixed is in the way.
    let mut t = table(4);
    (0..4).for_each(|k| assert_eq!(t.fix(mac(k), 9, S), Learn::New));
    assert_eq!(t.fix(mac(4), 9, 900 * S), Learn::TableFull);
    assert_eq!(t.learn(mac(4), 9, 900 * S, rules), Learn::TableFull);
    t.forget(9, |key, _| key == mac(0));
    assert_eq!(t.fix(mac(4), 9, 900 * S), Learn::New);
}

#[test]
fn a_full_table_says_so_and_counts_stay_right() {
    let rules = LearnRules { owner_limit: u32::MAX, may_move: true };
    let mut t = table(32);
    let mut learned = 0;
    for n in 0..1000 {
        match t.learn(mac(n), n % 5, S, rules) {
            Learn::New => learned += 1,
            other => assert_eq!(other, Learn::TableFull),
        }
    }
    assert_eq!((t.list(S).len(), learned), (32, 32));
    assert_eq!(t.counts.iter().sum::<u32>(), 32);
    // All of them aged: as many again.
    for n in 1000..1032 {
        t.learn(mac(n), 1, 400 * S, rules);
    }
    assert!(t.list(400 * S).len() > 16);
    (0..5).for_each(|owner| t.forget(owner, |_, _| true));
    assert_eq!((t.len, t.counts.iter().sum::<u32>()), (0, 0));
}

#[test]
fn addresses_survive_the_way_through_a_key() {
    for text in ["10.0.0.1", "fe80::1", "2001:db8::5"] {
        let addr: IpAddr = text.parse().unwrap();
        assert_eq!(IpAddr::from(Ip::from(addr)), addr);
    }
    assert_eq!(Mac::new([1, 2, 3, 4, 5, 6]).to_string(), "01:02:03:04:05:06");
}
