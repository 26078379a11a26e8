use super::*;
use crate::conn::frame;
use guest_abi::module::kind;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn reply(seq: u64, len: usize) -> Bytes {
    frame(kind::REPLY, 0, seq, &[&vec![1; len]])
}

fn client() -> Client {
    Client::new([1; 16], Instant::now(), &Purse::alone())
}

#[test]
fn a_request_is_executed_once_and_its_reply_told_again() {
    let (mut client, now) = (client(), Instant::now());
    assert!(matches!(client.accept(1, 0, now), Verdict::Execute));
    assert!(matches!(client.accept(1, flag::AGAIN, now), Verdict::Wait));
    assert!(client.take_answered(1).is_some());
    client.keep(1, &reply(1, 10));
    assert!(matches!(client.accept(1, flag::AGAIN, now), Verdict::Resend(b) if b.len() == 34));
    // Not sent again, and not after the one before.
    assert!(matches!(client.accept(1, 0, now), Verdict::Bad(_)));
    assert!(client.take_answered(1).is_none());
}

#[test]
fn what_changes_nothing_is_executed_again() {
    let (mut client, now) = (client(), Instant::now());
    let flags = flag::REPEATABLE;
    assert!(matches!(client.accept(5, flags, now), Verdict::Execute));
    assert!(client.take_answered(5).is_some_and(|w| w.repeatable));
    assert!(matches!(client.accept(5, flags | flag::AGAIN, now), Verdict::Execute));
}

#[test]
fn replies_are_kept_up_to_a_limit() {
    let (mut client, now) = (client(), Instant::now());
    for seq in 1..=3 {
        assert!(matches!(client.accept(seq, 0, now), Verdict::Execute));
        client.take_answered(seq);
        client.keep(seq, &reply(seq, KEPT_BYTES / 2 - 100));
    }
    let again = |client: &mut Client, seq| client.accept(seq, flag::AGAIN, now);
    assert!(matches!(again(&mut client, 1), Verdict::Refuse(failure::OUT_OF_ORDER, _)));
    assert!(matches!(again(&mut client, 2), Verdict::Resend(_)));
    assert!(matches!(again(&mut client, 3), Verdict::Resend(_)));
}

#[test]
fn the_largest_number_is_no_end() {
    let (mut client, now) = (client(), Instant::now());
    assert!(matches!(client.accept(u64::MAX, 0, now), Verdict::Bad(_)));
    let last = i64::MAX as u64;
    assert!(matches!(client.accept(last, 0, now), Verdict::Execute));
    client.take_answered(last);
    client.keep(last, &reply(last, 8));
    let again = flag::AGAIN | flag::REPEATABLE;
    assert!(matches!(client.accept(7, again, now), Verdict::Execute));
}

#[test]
fn too_many_in_flight_is_a_fault() {
    let (mut client, now) = (client(), Instant::now());
    for seq in 1..=u64::from(MAX_IN_FLIGHT) {
        assert!(matches!(client.accept(seq, 0, now), Verdict::Execute));
    }
    assert!(matches!(client.accept(65, 0, now), Verdict::Bad(_)));
}

#[test]
fn a_client_lingers_and_then_is_gone() {
    let (mut all, now) = (Clients::new(&Purse::alone()), Instant::now());
    let (number, new) = all.find([1; 16], now).unwrap();
    assert!(new);
    all.get_mut(number).unwrap().conn = Some(7);
    assert_eq!(all.expired(now + 2 * LINGER), (vec![], None));
    all.disconnected(number, now);
    assert_eq!(all.expired(now), (vec![], Some(now + LINGER)));
    assert_eq!(all.find([1; 16], now), Some((number, false)));
    assert_eq!(all.expired(now + LINGER), (vec![number], None));
    all.remove(number);
    assert_eq!(all.find([1; 16], now), Some((number, true)));
}

#[test]
fn there_is_a_limit_of_clients() {
    let (mut all, now) = (Clients::new(&Purse::alone()), Instant::now());
    let id = |n: usize| std::array::from_fn(|i| (n >> (8 * (i % 4))) as u8);
    for n in 0..MAX_CLIENTS {
        let (number, _) = all.find(id(n), now).unwrap();
        all.get_mut(number).unwrap().conn = Some(n);
    }
    assert_eq!(all.find(id(MAX_CLIENTS), now), None);
    assert_eq!(all.longest_gone(), None);
    all.disconnected(3, now);
    assert_eq!(all.longest_gone(), Some(3));
}

proptest! {
    /// A client that keeps to the rules, breaks now and then and sends everything again: each of
    /// its requests is executed at least once, and more often only if it changes nothing.
    #[test]
    fn breaks_double_nothing(
        steps in proptest::collection::vec(
            (0u8..4, any::<bool>(), any::<prop::sample::Index>()),
            1..400,
        ),
    ) {
        let (mut client, now) = (client(), Instant::now());
        let (mut next, mut executed) = (1u64, BTreeMap::<u64, u32>::new());
        let (mut open, mut pending) = (BTreeMap::<u64, bool>::new(), BTreeSet::<u64>::new());
        for (step, repeatable, at) in steps {
            match step {
                // A new request.
                0 | 1 if open.len() < MAX_IN_FLIGHT as usize => {
                    let flags = if repeatable { flag::REPEATABLE } else { 0 };
                    prop_assert!(matches!(client.accept(next, flags, now), Verdict::Execute));
                    *executed.entry(next).or_default() += 1;
                    open.insert(next, repeatable);
                    pending.insert(next);
                    next += 1;
                }
                // The module answers one; the client may get it.
                2 if !pending.is_empty() => {
                    let seq = *pending.iter().nth(at.index(pending.len())).unwrap();
                    pending.remove(&seq);
                    let waiting = client.take_answered(seq).unwrap();
                    if !waiting.repeatable {
                        client.keep(seq, &reply(seq, 8));
                    }
                    if repeatable {
                        open.remove(&seq);
                    }
                }
                // The connection breaks: all without a reply are sent again.
                3 => for (seq, repeatable) in open.clone() {
                    let flags = flag::AGAIN | if repeatable { flag::REPEATABLE } else { 0 };
                    match client.accept(seq, flags, now) {
                        Verdict::Execute => {
                            prop_assert!(repeatable);
                            *executed.entry(seq).or_default() += 1;
                            pending.insert(seq);
                        }
                        Verdict::Wait => prop_assert!(pending.contains(&seq)),
                        Verdict::Resend(_) => { open.remove(&seq); }
                        other => prop_assert!(false, "{other:?}"),
                    }
                },
                _ => {}
            }
        }
        prop_assert!((1..next).all(|seq| executed.contains_key(&seq)));
    }
}
