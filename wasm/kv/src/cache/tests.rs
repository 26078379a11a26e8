use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

fn cache(items: usize) -> Cache {
    Cache::new(items * (ITEM_BYTES + 10), [7; 16])
}

fn put(cache: &mut Cache, key: u64) {
    let key = std::format!("{key:06}");
    cache.set(key.as_bytes(), vec![0; 4], 0, 0, 0).unwrap();
}

fn has(cache: &mut Cache, key: u64) -> bool {
    cache.get(std::format!("{key:06}").as_bytes(), 0).is_some()
}

#[test]
fn a_scan_displaces_nothing_that_is_in_use() {
    let mut cache = cache(1000);
    (0..500).for_each(|key| put(&mut cache, key));
    for _ in 0..3 {
        assert!((0..500).all(|key| has(&mut cache, key)));
    }
    (10_000..30_000).for_each(|key| put(&mut cache, key));
    let left = (0..500).filter(|&key| has(&mut cache, key)).count();
    assert_eq!(left, 500);
    assert!(cache.bytes() <= cache.limit_bytes());
    assert!(cache.ghosts.order.len() <= 1000 && cache.ghosts.known.len() <= 1000);
}

#[test]
fn what_comes_back_soon_goes_to_the_main_queue() {
    let mut cache = cache(100);
    (0..150).for_each(|key| put(&mut cache, key));
    assert!(!has(&mut cache, 20));
    put(&mut cache, 20);
    (1000..1100).for_each(|key| put(&mut cache, key));
    assert!(has(&mut cache, 20));
}

#[test]
fn time_ends_items_and_a_flush_all_of_them() {
    let mut cache = cache(10);
    cache.set(b"a", vec![1], 0, 100, 0).unwrap();
    assert!(cache.get(b"a", 99).is_some() && cache.get(b"a", 100).is_none());
    assert_eq!((cache.len(), cache.bytes(), cache.counters.expired), (0, 0, 1));
    cache.set(b"a", vec![1], 0, 100, 0).unwrap();
    assert!(cache.touch(b"a", 200, 99) && cache.get(b"a", 150).is_some());
    put(&mut cache, 1);
    cache.flush();
    assert!(cache.is_empty() && !has(&mut cache, 1) && !cache.touch(b"a", 0, 0));
    // What was flushed makes room first, and counts as nothing.
    (0..100).for_each(|key| put(&mut cache, key));
    assert_eq!((cache.len(), cache.counters.evicted), (10, 90));
}

#[test]
fn what_is_larger_than_the_cache_is_refused_and_the_key_is_gone() {
    let mut cache = cache(2);
    cache.set(b"k", vec![0; 9], 0, 0, 0).unwrap();
    assert_eq!(cache.set(b"k", vec![0; 400], 0, 0, 0), Err(NoRoom));
    assert_eq!((cache.len(), cache.bytes()), (0, 0));
}

#[derive(Debug, Clone)]
enum Op {
    Set(u8, u16),
    Get(u8),
    Remove(u8),
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (any::<u8>(), 0..600u16).prop_map(|(key, len)| Op::Set(key, len)),
        8 => any::<u8>().prop_map(Op::Get),
        2 => any::<u8>().prop_map(Op::Remove),
        1 => Just(Op::Flush),
    ]
}

proptest! {
    /// A value that is found is the last one put there, and memory is never more than the limit.
    #[test]
    fn nothing_wrong_is_ever_found(ops in prop::collection::vec(op(), 0..600)) {
        let (mut cache, mut model) = (Cache::new(8000, [1; 16]), HashMap::new());
        for (n, op) in ops.into_iter().enumerate() {
            match op {
                Op::Set(key, len) => {
                    let mut value = vec![n as u8; len as usize];
                    value.extend((n as u32).to_le_bytes());
                    model.insert(key, value.clone());
                    cache.set(&[key], value, 0, 0, 0).unwrap();
                }
                Op::Get(key) => if let Some(item) = cache.get(&[key], 0) {
                    prop_assert_eq!(Some(&item.value), model.get(&key));
                },
                Op::Remove(key) => {
                    let was_there = cache.remove(&[key], 0);
                    let known = model.remove(&key).is_some();
                    prop_assert!(known || !was_there);
                }
                Op::Flush => {
                    cache.flush();
                    model.clear();
                }
            }
            let items = cache.slots.items.iter().flatten();
            let (count, bytes) = items.fold((0, 0), |(n, sum), i| (n + 1, sum + i.bytes()));
            prop_assert_eq!((count, bytes), (cache.table.len(), cache.bytes()));
            prop_assert!(cache.bytes() <= 8000 && cache.len() <= count);
            prop_assert_eq!(cache.small.len + cache.main.len, count);
        }
    }
}
