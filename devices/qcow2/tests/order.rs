//! The order in which an image's file changes, rule by rule, seen in the events themselves. The
//! tests of deaths find most breaks of it; here are those that a second rule would hide.

#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::io;
use std::sync::Arc;

use common::kinds::qemu;
use common::sample::{self, COPIED, at, get_u64, l2_table, put_u64};
use qcow2::testing::{Bytes, Event, Recorder};
use qcow2::{Chain, Clear, Scratch};

const CLUSTER: u64 = 64 << 10;

fn write(chain: &Chain, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut view = chain.view(Arc::new(|| {}));
    chain.write(&mut view, &mut Scratch::default(), data, offset)
}

fn discard(chain: &Chain, offset: u64) {
    let mut view = chain.view(Arc::new(|| {}));
    let range = offset..offset + CLUSTER;
    chain.clear(&mut view, &mut Scratch::default(), range, Clear::Discard).unwrap();
}

/// Offset of the 16-bit count for a byte of the file.
fn count_at(bytes: &Bytes, host: u64) -> u64 {
    get_u64(bytes, get_u64(bytes, at::REFCOUNT_TABLE)) + host / CLUSTER * 2
}

fn count(store: &Recorder, host: u64) -> u32 {
    let bytes = store.bytes();
    sample::get_u32(&bytes, count_at(&bytes, host)) >> 16
}

fn host_of(bytes: &Bytes, cluster: u64) -> u64 {
    get_u64(bytes, l2_table(bytes, 0) + cluster * 8) & !COPIED
}

fn is_write_to(event: &Event, from: u64, len: u64) -> bool {
    matches!(event, Event::Write { offset, data }
        if *offset < from + len && offset + data.len() as u64 > from)
}

/// The place of the first event that is so, from `from` on.
fn find(log: &[Event], from: usize, is: impl Fn(&Event) -> bool) -> usize {
    from + log[from..].iter().position(is).expect("no such event")
}

#[test]
fn a_freed_cluster_keeps_its_count_and_its_content_until_a_sync() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let host = host_of(&bytes, 3);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    write(&chain, 0, &[1; 512]).unwrap();
    chain.top().sync().unwrap();
    discard(&chain, 3 * CLUSTER);
    store.take_log();
    (0..4).for_each(|_| chain.top().maintain().unwrap());
    let place = count_at(&store.bytes(), host);
    let is_zero = |e: &Event| matches!(e, Event::Zero { offset, .. } if *offset == host);
    let log = store.take_log();
    // Maintaining may need a sync for another reason.
    let upto = log.iter().position(|e| *e == Event::Sync).unwrap_or(log.len());
    assert!(!log[..upto].iter().any(|e| is_zero(e) || is_write_to(e, place, 2)), "{log:x?}");
    let is_freed = log.iter().any(is_zero);
    chain.top().sync().unwrap();
    chain.top().maintain().unwrap();
    assert_eq!(count(&store, host), 0);
    assert!(is_freed || store.take_log().iter().any(is_zero), "its room is not given back");
}

#[test]
fn a_freed_cluster_stays_while_somebody_who_saw_it_is_at_work() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let host = host_of(&bytes, 3);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    let mut view = chain.view(Arc::new(|| {}));
    let stay = chain.enter(&mut view);
    discard(&chain, 3 * CLUSTER);
    for _ in 0..4 {
        chain.top().sync().unwrap();
        chain.top().maintain().unwrap();
        assert_eq!(count(&store, host), 1);
    }
    assert!(chain.top().close().is_err(), "somebody is at work");
    chain.leave(&mut view, stay);
    chain.top().maintain().unwrap();
    assert_eq!(count(&store, host), 0);
    chain.top().close().unwrap();
}

/// Free clusters that hold something, as a power cut may leave them: enough for a whole reserve.
#[test]
fn abuse_Q1_a_free_cluster_is_zeroed_counted_and_synced_before_it_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "", "4M", &["write -P 9 0 4M"]);
    let host = host_of(&bytes, 3);
    let (entry, counted) = (l2_table(&bytes, 0) + 3 * 8, count_at(&bytes, host));
    bytes.write(&[0; 40 * 8], entry);
    bytes.write(&[0; 40 * 2], counted);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    store.take_log();
    write(&chain, 3 * CLUSTER + 512, &[7; 512]).unwrap();
    let log = store.take_log();
    let zero = find(&log, 0, |e| matches!(e, Event::Zero { offset, .. } if *offset == host));
    let count = find(&log, zero, |e| is_write_to(e, counted, 2));
    let sync = find(&log, count, |e| *e == Event::Sync);
    let data = find(&log, 0, |e| is_write_to(e, host, CLUSTER));
    let entry = find(&log, 0, |e| is_write_to(e, entry, 8));
    assert!(sync < data && data < entry);
}

/// Nothing tells QEMU that an image of version 2 was not closed.
#[test]
fn abuse_Q1_in_version_2_a_count_is_durable_before_an_entry_needs_it() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "compat=0.10", "1M", &["write -P 9 0 64k"]);
    let (entry, free) = (l2_table(&bytes, 0) + 8, bytes.len());
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    write(&chain, CLUSTER, &[7; 512]).unwrap();
    let bytes = store.bytes();
    let host = host_of(&bytes, 1);
    assert!(host >= free);
    let log = store.take_log();
    let count = find(&log, 0, |e| is_write_to(e, count_at(&bytes, host), 2));
    let sync = find(&log, count, |e| *e == Event::Sync);
    let entry = find(&log, 0, |e| is_write_to(e, entry, 8));
    assert!(sync < entry);
}

/// The same for a new block of counts, which the table refers to.
#[test]
fn abuse_Q1_in_version_2_a_block_of_counts_is_durable_before_the_table_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "compat=0.10,cluster_size=512", "1M", &[]);
    let table = get_u64(&bytes, at::REFCOUNT_TABLE);
    let (store, opened) = sample::open(bytes);
    write(&opened.unwrap(), 0, &[7; 256 << 10]).unwrap();
    let log = store.take_log();
    let has_block = find(&log, 0, |e| is_write_to(e, table + 8, 8));
    let block = get_u64(&store.bytes(), table + 8);
    let written = find(&log, 0, |e| is_write_to(e, block, 512));
    assert!(written < has_block && log[written..has_block].contains(&Event::Sync));
}

#[test]
fn the_dirty_bit_is_durable_before_the_first_change_and_goes_after_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let (store, opened) = sample::open(sample::image(dir.path(), "", "1M", &[]));
    let chain = opened.unwrap();
    let is_mark = |e: &Event| is_write_to(e, at::INCOMPATIBLE, 8);
    let log = store.take_log();
    assert!(is_mark(&log[0]) && log[1] == Event::Sync && log.len() == 2, "{log:x?}");
    write(&chain, 0, &[7; 512]).unwrap();
    chain.top().close().unwrap();
    let log = store.take_log();
    let mark = log.iter().rposition(is_mark).unwrap();
    assert!(
        log[mark - 1] == Event::Sync && log[mark + 1..] == [Event::Sync],
        "{:x?}",
        &log[mark..]
    );
    assert_eq!(log.iter().filter(|e| is_mark(e)).count(), 1);
}

/// A write whose bytes begin with `word`, at `offset`.
fn is_word(event: &Event, at: u64, word: u64) -> bool {
    matches!(event, Event::Write { offset, data }
        if *offset == at && data.starts_with(&word.to_be_bytes()))
}

#[test]
fn a_copied_table_is_durable_before_the_l1_entry_has_it() {
    let dir = tempfile::tempdir().unwrap();
    sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let path = dir.path().join("sample.qcow2");
    qemu("qemu-img", &["snapshot", "-c", "s", path.to_str().unwrap()]);
    let (store, opened) = sample::open(Bytes::load(&path).unwrap());
    write(&opened.unwrap(), 0, &[7; 512]).unwrap();
    let (bytes, log) = (store.bytes(), store.take_log());
    let (l1, table) = (get_u64(&bytes, at::L1_OFFSET), l2_table(&bytes, 0));
    let copy = find(&log, 0, |e| is_write_to(e, table, CLUSTER));
    let entry = find(&log, 0, |e| is_word(e, l1, table | COPIED));
    assert!(copy < entry && log[copy..entry].contains(&Event::Sync));
}

#[test]
fn a_larger_refcount_table_is_durable_before_the_header_has_it_and_then_that_is() {
    let dir = tempfile::tempdir().unwrap();
    let options = "refcount_bits=64,cluster_size=512";
    let (store, opened) = sample::open(sample::image(dir.path(), options, "4M", &[]));
    write(&opened.unwrap(), 0, &vec![7; 3 << 20]).unwrap();
    let (bytes, log) = (store.bytes(), store.take_log());
    let table = get_u64(&bytes, at::REFCOUNT_TABLE);
    let header = find(&log, 0, |e| is_word(e, at::REFCOUNT_TABLE, table));
    let written = log[..header].iter().rposition(|e| is_write_to(e, table, 512)).unwrap();
    assert!(log[written..header].contains(&Event::Sync));
    assert!(log[header + 1] == Event::Sync, "what follows relies on it");
}

#[test]
fn a_larger_l1_table_is_durable_before_the_header_has_it_and_the_size_comes_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=512", "2M", &["write -P 9 0 2M"]);
    // The rest of its last cluster has to be zeroed.
    let size = (2 << 20) - 256;
    put_u64(&mut bytes, at::SIZE, size);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    store.take_log();
    chain.grow(&mut chain.view(Arc::new(|| {})), 64 << 20).unwrap();
    let (bytes, log) = (store.bytes(), store.take_log());
    let table = get_u64(&bytes, at::L1_OFFSET);
    let header = find(&log, 0, |e| is_word(e, at::SIZE, size));
    let written = log[..header].iter().rposition(|e| is_write_to(e, table, 512)).unwrap();
    assert!(log[written..header].contains(&Event::Sync));
    assert!(log[header + 1] == Event::Sync, "what follows relies on it");
    let last = find(&log, 0, |e| is_word(e, at::SIZE, 64 << 20));
    let hidden = log[..last].iter().rposition(|e| *e != Event::Sync).unwrap();
    assert!(hidden > header && log[hidden..last].contains(&Event::Sync));
}

/// A cluster that is in use and has no block for its count: mending makes one.
#[test]
fn a_block_that_mending_makes_is_durable_before_the_table_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let options = "cluster_size=512";
    let mut bytes = sample::image(dir.path(), options, "1M", &["write -P 9 0 512k"]);
    let table = get_u64(&bytes, at::REFCOUNT_TABLE);
    put_u64(&mut bytes, table + 8, 0);
    sample::set_dirty(&mut bytes);
    let (store, opened) = sample::open(bytes);
    opened.unwrap();
    let (bytes, log) = (store.bytes(), store.take_log());
    let block = get_u64(&bytes, table + 8);
    assert!(block != 0);
    let written = find(&log, 0, |e| is_write_to(e, block, 512));
    let has_it = find(&log, 0, |e| is_word(e, table + 8, block));
    assert!(written < has_it && log[written..has_it].contains(&Event::Sync));
}

/// Writes in place of other content: to a new cluster, and to a piece of one.
#[test]
fn what_replaces_content_is_durable_before_its_entry() {
    for options in ["compression_type=zlib", "extended_l2=on"] {
        let dir = tempfile::tempdir().unwrap();
        let commands: &[&str] = match options {
            "extended_l2=on" => &["write -P 9 0 2k"],
            _ => &["write -c -P 9 0 64k"],
        };
        let bytes = sample::image(dir.path(), options, "1M", commands);
        let (store, opened) = sample::open(bytes);
        let chain = opened.unwrap();
        store.take_log();
        write(&chain, 4096, &[7; 2048]).unwrap();
        let (bytes, log) = (store.bytes(), store.take_log());
        let (entry, host) = (l2_table(&bytes, 0), host_of(&bytes, 0));
        let data = find(&log, 0, |e| is_write_to(e, host + 4096, 2048));
        let entry = find(&log, 0, |e| is_write_to(e, entry, 8));
        assert!(data < entry && log[data..entry].contains(&Event::Sync), "{options}");
    }
}
