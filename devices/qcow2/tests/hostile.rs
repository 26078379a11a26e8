//! Images made to do harm, one fault each: what is refused stays as it is, nothing is taken without
//! bound, and a layer's damage is not another's.

#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::kinds::qemu;
use common::oracle::{self, Verdict};
use common::sample::{self, COMPRESSED, COPIED, CORRUPT, OFFSET, at, get_u64, put_u64, set_dirty};
use qcow2::testing::{Bytes, Event, Recorder};
use qcow2::{Chain, Clear, FileStore, Image, Layer, Options, Plan, Scratch, Store};

fn write(chain: &Chain, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut view = chain.view(Arc::new(|| {}));
    chain.write(&mut view, &mut Scratch::default(), data, offset)
}

fn read(chain: &Chain, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut view = chain.view(Arc::new(|| {}));
    let mut bytes = vec![0xee; len];
    chain.read(&mut view, &mut Scratch::default(), &mut bytes, offset)?;
    Ok(bytes)
}

fn is_corrupt(store: &Recorder) -> bool {
    get_u64(&store.bytes(), at::INCOMPATIBLE) & CORRUPT != 0
}

/// Q5. A cluster that is referred to more often than a refcount can say is found in the second
/// block, after a count in the first was found to be too low.
#[test]
fn abuse_Q5_what_cannot_be_mended_is_not_mended_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let options = "refcount_bits=1,cluster_size=512";
    let mut bytes = sample::image(dir.path(), options, "4M", &["write -P 1 0 4M"]);
    let block = get_u64(&bytes, get_u64(&bytes, at::REFCOUNT_TABLE));
    bytes.write(&[0x7f], block + 100);
    let last = sample::l2_table(&bytes, 127) + 63 * 8;
    let entry = get_u64(&bytes, last);
    put_u64(&mut bytes, last - 8, entry);
    set_dirty(&mut bytes);
    let (store, opened) = sample::open(bytes);
    let text = opened.unwrap_err().to_string();
    assert!(text.contains("is referred to 2 times"), "{text}");
    assert_eq!(store.take_log(), [], "what is refused is untouched");
}

/// A bitmap's table of 512 MiB in a sparse file.
#[test]
fn a_bitmaps_table_has_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    sample::image(dir.path(), "cluster_size=64k", "4M", &[]);
    let path = dir.path().join("sample.qcow2");
    qemu("qemu-img", &["bitmap", "--add", path.to_str().unwrap(), "b0"]);
    let mut bytes = Bytes::load(&path).unwrap();
    // Its extension is behind the header and the table of names of features.
    let directory = (104..4096)
        .step_by(8)
        .find(|&at| get_u64(&bytes, at) == 0x2385_2875_0000_0018)
        .map(|at| get_u64(&bytes, at + 24))
        .unwrap();
    bytes.write(&(1u32 << 26).to_be_bytes(), directory + 8);
    bytes.set_len(1 << 30);
    set_dirty(&mut bytes);
    let (store, opened) = sample::open(bytes);
    let text = opened.unwrap_err().to_string();
    assert!(text.contains("table of bitmap 0"), "{text}");
    assert_eq!(store.take_log(), []);
}

/// Counts what is read.
#[derive(Debug)]
struct Counted<S> {
    inner: S,
    read: AtomicU64,
}

impl<S: Store> Store for Counted<S> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.inner.write_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.inner.set_len(len_bytes)
    }

    fn zero(&self, offset: u64, len_bytes: u64, may_unmap: bool) -> io::Result<()> {
        self.inner.zero(offset, len_bytes, may_unmap)
    }

    fn may_have_data(&self, offset: u64, len_bytes: u64) -> bool {
        self.inner.may_have_data(offset, len_bytes)
    }

    fn can_grow(&self) -> bool {
        true
    }
}

/// A million tables of 2 MiB, all of them in a hole: 2 TiB to read, and to read again for the
/// marks.
#[test]
fn tables_that_are_holes_are_not_read() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=2M", "1M", &["write 0 4k"]);
    let (count, place, first) = (1u64 << 20, 32u64 << 20, 64u64);
    bytes.write(&(count as u32).to_be_bytes(), at::L1_ENTRIES);
    put_u64(&mut bytes, at::L1_OFFSET, place);
    (0..count).for_each(|n| put_u64(&mut bytes, place + n * 8, (first + n) << 21 | COPIED));
    set_dirty(&mut bytes);
    let path = dir.path().join("sparse.qcow2");
    bytes.save(&path).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    file.set_len((first + count) << 21).unwrap();
    let inner = FileStore::new(file).unwrap();
    let store = Arc::new(Counted { inner, read: AtomicU64::new(0) });
    let options = Options::new("sample", true);
    let (_, opened) = Image::open(store.clone(), None, &options, &mut |_| {}).unwrap();
    assert!(opened.outcome.errors >= count);
    let read = store.read.load(Ordering::Relaxed);
    // Once for the counts and once for the marks.
    assert!(read < 3 << 30, "{read} bytes were read");
}

/// An L1 table whose entries all point at the same table of 2 MiB: with the largest L1 table it
/// would be 8 TiB to read.
#[test]
fn a_table_that_many_entries_point_at_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=2M", "256T", &["write 0 4k"]);
    let (l1, first) = (get_u64(&bytes, at::L1_OFFSET), sample::l2_table(&bytes, 0));
    (0..512).for_each(|n| put_u64(&mut bytes, l1 + n * 8, first | COPIED));
    set_dirty(&mut bytes);
    let store = Arc::new(Counted { inner: Recorder::new(bytes), read: AtomicU64::new(0) });
    let options = Options::new("sample", true);
    let opened = Image::open(store.clone(), None, &options, &mut |_| {});
    let text = opened.map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("an L2 table that is used twice"), "{text}");
    let read = store.read.load(Ordering::Relaxed);
    assert!(read < 32 << 20, "{read} bytes were read");
}

/// An L1 table, without a count, where the refcount table's reach ends: a larger table would go
/// there.
#[test]
fn abuse_Q4_a_larger_refcount_table_goes_over_no_table() {
    let dir = tempfile::tempdir().unwrap();
    let options = "refcount_bits=64,cluster_size=512";
    let mut bytes = sample::image(dir.path(), options, "4M", &["write -P 1 0 1M"]);
    let clusters = u64::from(sample::get_u32(&bytes, 56));
    let reach = clusters * 64 * 64 * 512;
    assert!(bytes.len() < reach);
    let (l1, len) = (get_u64(&bytes, at::L1_OFFSET), sample::get_u32(&bytes, at::L1_ENTRIES) * 8);
    let mut table = vec![0; len as usize];
    bytes.read(&mut table, l1);
    bytes.write(&table, reach);
    put_u64(&mut bytes, at::L1_OFFSET, reach);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    let results: Vec<_> =
        (0..8u64).map(|n| write(&chain, (1 << 20) + (n << 18), &vec![7; 256 << 10])).collect();
    assert!(results.iter().any(Result::is_err), "there is room, and it was not looked for");
    let mut after = vec![0; len as usize];
    store.bytes().read(&mut after, reach);
    let is_kept = |n: usize| table[n..n + 8] == [0; 8] || after[n..n + 8] == table[n..n + 8];
    assert!((0..after.len()).step_by(8).all(is_kept), "the L1 table was written over");
}

/// A chain over a base whose first cluster is compressed and garbage, and whose second has an entry
/// that points into a cluster.
fn over_a_bad_base() -> (tempfile::TempDir, Arc<Recorder>, Chain) {
    let dir = tempfile::tempdir().unwrap();
    let mut base = sample::image(dir.path(), "cluster_size=64k", "1M", &["write -c 0 64k"]);
    let (table, size) = (sample::l2_table(&base, 0), "1M");
    let data = get_u64(&base, table) & 0x003f_ffff_ffff_ffff;
    base.write(&[0xff; 64], data);
    put_u64(&mut base, table + 8, 0x1200 | COPIED);
    let store = Arc::new(Recorder::new(base));
    let options = Options::new("base", false);
    let (image, _) = Image::open(store, None, &options, &mut |_| {}).unwrap();
    let top = sample::image(dir.path(), "cluster_size=64k", size, &[]);
    let (store, opened) = sample::open_over(top, vec![Layer::Qcow2(Box::new(image))]);
    (dir, store, opened.unwrap())
}

#[test]
fn a_bad_backing_file_fails_its_requests_and_does_not_mark_the_image() {
    let (_dir, store, chain) = over_a_bad_base();
    for cluster in 0..2 {
        let offset = cluster << 16;
        let text = read(&chain, offset, 512).unwrap_err().to_string();
        assert!(!text.is_empty());
        write(&chain, offset + 512, &[1; 512]).unwrap_err();
        assert!(!is_corrupt(&store), "cluster {cluster}: {text}");
        write(&chain, offset, &vec![2; 64 << 10]).unwrap();
        assert_eq!(read(&chain, offset, 64 << 10).unwrap(), vec![2; 64 << 10]);
    }
    write(&chain, 2 << 16, &[3; 512]).unwrap();
    chain.top().close().unwrap();
}

/// QEMU fails the request, too, and goes on.
#[test]
fn a_compressed_cluster_of_garbage_fails_its_requests_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "", "1M", &["write -c 0 64k"]);
    let data = get_u64(&bytes, sample::l2_table(&bytes, 0)) & 0x003f_ffff_ffff_ffff;
    bytes.write(&[0xff; 64], data);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    write(&chain, 512, &[1; 512]).unwrap_err();
    assert!(!is_corrupt(&store));
    write(&chain, 0, &vec![2; 64 << 10]).unwrap();
    chain.top().close().unwrap();
}

/// The header cannot be written while the L1 table moves, or an error says so and it was: entries
/// that come later must be where the header says.
#[test]
fn a_disk_that_could_not_be_grown_keeps_what_is_written_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "cluster_size=512", "2M", &["write 0 64k"]);
    for is_made in [false, true] {
        for after in 0.. {
            let (store, opened) = sample::open(bytes.clone());
            let chain = opened.unwrap();
            let mut view = chain.view(Arc::new(|| {}));
            match is_made {
                false => store.fail_after(Some(after)),
                true => store.fail_one_made(after),
            }
            let is_done = chain.grow(&mut view, 64 << 20).is_ok();
            store.fail_after(None);
            if is_made && write(&chain, 1 << 20, &[7; 4096]).is_err() {
                assert!(is_done && after > 3, "it came after the growing");
                break;
            }
            write(&chain, 1 << 20, &[7; 4096]).unwrap();
            let (_, again) = sample::open(store.bytes());
            let found = read(&again.unwrap(), 1 << 20, 4096).unwrap();
            let when = format!("change {after} failed, made: {is_made}");
            assert!(found == [7; 4096], "{when}: what was written is lost");
            if is_done && !is_made {
                assert!(after > 3);
                break;
            }
        }
    }
}

/// An entry that points at no table would be one without a table in the larger L1 table.
#[test]
fn a_bad_l1_entry_is_not_moved_to_a_larger_table() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=512", "2M", &["write 0 64k"]);
    let place = get_u64(&bytes, at::L1_OFFSET) + 8;
    let entry = 1 << 40 | COPIED;
    put_u64(&mut bytes, place, entry);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    chain.grow(&mut chain.view(Arc::new(|| {})), 64 << 20).unwrap_err();
    let after = store.bytes();
    assert_eq!(get_u64(&after, get_u64(&after, at::L1_OFFSET) + 8), entry);
}

/// A device has no end to be extended: all of its room is used, beyond what the refcounts that
/// `qemu-img create` makes reach, and what it held before does not show.
#[test]
fn an_image_on_a_device_has_all_of_its_room() {
    let dir = tempfile::tempdir().unwrap();
    for options in ["cluster_size=512,refcount_bits=64", "cluster_size=4k,compat=0.10"] {
        let mut bytes = sample::image(dir.path(), options, "8M", &[]);
        let (begin, device) = (bytes.len(), (4 << 20) + 100);
        bytes.write(&vec![0xee; (device - begin) as usize], begin);
        let store = Arc::new(Recorder::new(bytes));
        let chain = sample::open_device(store.clone());
        let step = 64u64 << 10;
        let is_written = |n: &u64| write(&chain, n * step, &vec![7; step as usize - 512]).is_ok();
        let written = (0..128).take_while(is_written).count() as u64;
        assert!(written * step > 7 << 19, "{options}: {written} x 64 KiB of 4 MiB");
        let error = write(&chain, written * step, &vec![7; step as usize]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{options}: {error}");
        chain.top().close().unwrap();
        let chain = sample::open_device(store.clone());
        for n in 0..written {
            let found = read(&chain, n * step, step as usize).unwrap();
            let (data, rest) = found.split_at(step as usize - 512);
            assert!(data.iter().all(|&b| b == 7) && rest.iter().all(|&b| b == 0), "{options}: {n}");
        }
        chain.top().close().unwrap();
        let after = store.bytes();
        assert_eq!(after.len(), device);
        let path = dir.path().join("device.qcow2");
        after.save(&path).unwrap();
        let (verdict, text) = oracle::check(&path);
        assert_eq!(verdict, Verdict::Clean, "{options}: {text}");
    }
}

/// An L1 table that moves within the device, to a row of 200 clusters that no block counts yet.
#[test]
fn an_image_on_a_device_grows() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=512", "1M", &["write -P 5 0 64k"]);
    bytes.set_len(1 << 20);
    let store = Arc::new(Recorder::new(bytes));
    let chain = sample::open_device(store.clone());
    chain.grow(&mut chain.view(Arc::new(|| {})), 400 << 20).unwrap();
    write(&chain, 399 << 20, &[6; 512]).unwrap();
    chain.top().close().unwrap();
    let (_, again) = sample::open(store.bytes());
    let again = again.unwrap();
    assert_eq!(read(&again, 0, 64 << 10).unwrap(), vec![5; 64 << 10]);
    assert_eq!(read(&again, 399 << 20, 512).unwrap(), [6; 512]);
}

/// Places near the end of what 64 bits can say.
#[test]
fn abuse_Q3_numbers_that_overflow_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    for options in ["cluster_size=512", "compat=0.10"] {
        let mut bytes = sample::image(dir.path(), options, "1M", &["write 0 64k"]);
        let cluster = 1u64 << sample::get_u32(&bytes, 20);
        let table = get_u64(&bytes, at::REFCOUNT_TABLE);
        put_u64(&mut bytes, table + 8, !(cluster - 1));
        if options != "compat=0.10" {
            set_dirty(&mut bytes);
        }
        let (store, opened) = sample::open(bytes);
        let text = opened.unwrap_err().to_string();
        assert!(text.contains("a refcount block at 0xf"), "{text}");
        assert_eq!(store.take_log(), []);
    }
}

/// `qemu-img resize --shrink` leaves the rest of the last cluster as it was.
#[test]
fn what_a_grown_disk_gets_is_zero() {
    let dir = tempfile::tempdir().unwrap();
    sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let path = dir.path().join("sample.qcow2");
    let path = path.to_str().unwrap();
    qemu("qemu-img", &["resize", "-q", "--shrink", "-f", "qcow2", path, "514k"]);
    let (_, opened) = sample::open(Bytes::load(path.as_ref()).unwrap());
    let chain = opened.unwrap();
    let mut view = chain.view(Arc::new(|| {}));
    chain.grow(&mut view, 1 << 20).unwrap();
    assert_eq!(read(&chain, 513 << 10, 1024).unwrap(), [9; 1024]);
    assert_eq!(read(&chain, 514 << 10, 100 << 10).unwrap(), vec![0; 100 << 10]);
}

/// On a file system that cannot zero a range.
#[test]
fn a_data_file_does_not_get_longer_than_the_disk() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let (image, data) = (dir.path().join("sample.qcow2"), dir.path().join("data.raw"));
    let options = format!("data_file={}", data.display());
    sample::image(dir.path(), &options, "1001k", &[]);
    let store = |path| -> Arc<dyn Store> {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        Arc::new(FileStore::new(file).unwrap())
    };
    let options = Options::new("sample", true);
    let opened = Image::open(store(&image), Some(store(&data)), &options, &mut |_| {});
    let chain = Chain::new(opened.unwrap().0, Vec::new());
    write(&chain, 0, &vec![5; 1001 << 10]).unwrap();
    let mut view = chain.view(Arc::new(|| {}));
    let how = Clear::Zero { may_unmap: false };
    chain.clear(&mut view, &mut Scratch::default(), 0..1001 << 10, how).unwrap();
    assert_eq!(std::fs::metadata(&data).unwrap().len(), 1001 << 10);
    chain.top().close().unwrap();
    let (verdict, text) = oracle::check(&image);
    assert_eq!(verdict, Verdict::Clean, "{text}");
}

/// A raw data file, read without its image, has the whole disk after it grew.
#[test]
fn a_data_file_grows_with_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (image, data) = (dir.path().join("sample.qcow2"), dir.path().join("data.raw"));
    let options = format!("data_file={},data_file_raw=on", data.display());
    let bytes = sample::image(dir.path(), &options, "1M", &[]);
    let (store, data) = (Recorder::new(bytes), Recorder::new(Bytes::load(&data).unwrap()));
    let (store, data) = (Arc::new(store), Arc::new(data));
    let options = Options::new("sample", true);
    let opened = Image::open(store.clone(), Some(data.clone()), &options, &mut |_| {});
    let chain = Chain::new(opened.unwrap().0, Vec::new());
    let mut view = chain.view(Arc::new(|| {}));
    chain.grow(&mut view, (1 << 20) + 1536).unwrap();
    assert_eq!(data.bytes().len(), (1 << 20) + 1536);
    chain.top().close().unwrap();
    store.bytes().save(&image).unwrap();
    data.bytes().save(&dir.path().join("data.raw")).unwrap();
    let (verdict, text) = oracle::check(&image);
    assert_eq!(verdict, Verdict::Clean, "{text}");
}

/// A sync that failed stays failed, and a damaged image is no exception.
#[test]
fn a_damaged_image_whose_sync_failed_is_not_closed_as_if_it_had_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let entry = sample::l2_table(&bytes, 0) + 8;
    put_u64(&mut bytes, entry, COPIED | 0x200);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    store.fail_syncs(true);
    chain.top().sync().unwrap_err();
    store.fail_syncs(false);
    read(&chain, 1 << 16, 512).unwrap_err();
    assert!(is_corrupt(&store));
    chain.top().close().unwrap_err();
}

/// Clusters that were reserved and not used go back.
#[test]
fn an_image_that_was_written_is_closed_without_leaks() {
    let dir = tempfile::tempdir().unwrap();
    let (store, opened) = sample::open(sample::image(dir.path(), "", "1M", &[]));
    let chain = opened.unwrap();
    write(&chain, 0, &[7; 512]).unwrap();
    chain.top().close().unwrap();
    let path = dir.path().join("closed.qcow2");
    store.bytes().save(&path).unwrap();
    let (verdict, text) = oracle::check(&path);
    assert_eq!(verdict, Verdict::Clean, "{text}");
}

/// Entries of L2 tables that point at tables: Q4.
#[test]
fn abuse_Q4_no_write_goes_where_tables_are() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let table = get_u64(&bytes, at::REFCOUNT_TABLE);
    let targets = [
        0,
        table,
        get_u64(&bytes, table) & OFFSET,
        get_u64(&bytes, at::L1_OFFSET),
        sample::l2_table(&bytes, 0),
    ];
    for target in targets.into_iter().skip(1) {
        let mut bytes = bytes.clone();
        let entry = sample::l2_table(&bytes, 0);
        put_u64(&mut bytes, entry, target | COPIED);
        let (store, opened) = sample::open(bytes.clone());
        let chain = opened.unwrap();
        store.take_log();
        write(&chain, 512, &[0xaa; 512]).unwrap_err();
        let is_mark =
            |event: &Event| matches!(event, Event::Write { offset: 72, data } if data.len() == 8);
        let log = store.take_log();
        assert!(log.iter().all(|event| is_mark(event) || *event == Event::Sync), "{log:x?}");
        assert!(is_corrupt(&store));
        write(&chain, 1 << 16, &[0xaa; 512]).unwrap_err();
    }
}

/// Compressed clusters that are where tables are: to free them would be to free the tables.
#[test]
fn abuse_Q4_no_table_is_freed_with_a_compressed_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 1M"]);
    let (refcounts, l2) = (get_u64(&bytes, at::REFCOUNT_TABLE), sample::l2_table(&bytes, 0));
    let block = get_u64(&bytes, refcounts) & OFFSET;
    for target in [0, refcounts, block, get_u64(&bytes, at::L1_OFFSET), l2] {
        for is_discard in [false, true] {
            let mut bytes = bytes.clone();
            put_u64(&mut bytes, l2, target | COMPRESSED);
            let (store, opened) = sample::open(bytes);
            let chain = opened.unwrap();
            if is_discard {
                let mut view = chain.view(Arc::new(|| {}));
                let range = 0..64 << 10;
                let done = chain.clear(&mut view, &mut Scratch::default(), range, Clear::Discard);
                done.unwrap_err();
            } else {
                write(&chain, 0, &vec![0xaa; 64 << 10]).unwrap_err();
            }
            for _ in 0..3 {
                let _ = chain.top().sync().and_then(|()| chain.top().maintain());
            }
            let _ = chain.top().close();
            let is_freed = |event: &Event| match event {
                Event::Zero { offset, len_bytes } => {
                    *offset < target + (64 << 10) && offset + len_bytes > target
                }
                _ => false,
            };
            assert!(!store.take_log().iter().any(is_freed), "{target:#x}");
            assert!(is_corrupt(&store), "{target:#x}");
        }
    }
}

/// A cluster of data that is not counted as used may become a table at any time.
#[test]
fn abuse_Q4_no_write_goes_where_nothing_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "", "1M", &["write -P 9 0 128k"]);
    let block = get_u64(&bytes, get_u64(&bytes, at::REFCOUNT_TABLE)) & OFFSET;
    let host = get_u64(&bytes, sample::l2_table(&bytes, 0)) & OFFSET;
    bytes.write(&[0, 0], block + (host >> 16) * 2);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    let mut view = chain.view(Arc::new(|| {}));
    // As a sidecore does it: what was read is in memory, and not known to be counted.
    assert_eq!(read(&chain, 0, 512).unwrap(), [9; 512]);
    assert!(matches!(chain.plan(&mut view, 0, 512), Plan::Slow));
    write(&chain, 64 << 10, &[7; 512]).unwrap_err();
    assert!(is_corrupt(&store));
    assert_eq!(read(&chain, 0, 512).unwrap(), [9; 512]);
}

/// An uncounted cluster of data that became a table before the first write: its count is right by
/// now.
#[test]
fn abuse_Q4_no_write_goes_where_a_table_has_come() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = sample::image(dir.path(), "cluster_size=512", "8M", &["write -P 9 0 8k"]);
    let block = get_u64(&bytes, get_u64(&bytes, at::REFCOUNT_TABLE)) & OFFSET;
    let host = get_u64(&bytes, sample::l2_table(&bytes, 0)) & OFFSET;
    bytes.write(&[0, 0], block + (host >> 9) * 2);
    let (store, opened) = sample::open(bytes);
    let chain = opened.unwrap();
    assert_eq!(read(&chain, 0, 512).unwrap(), [9; 512]);
    // Other parts of the disk get tables, one of them there.
    (1..200).for_each(|n| write(&chain, n << 15, &[3; 512]).unwrap());
    write(&chain, 0, &[0xaa; 512]).unwrap_err();
    assert!(is_corrupt(&store));
}

/// Slices that were found right are not looked at again when they come back to memory.
#[test]
fn counts_are_looked_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = sample::image(dir.path(), "cluster_size=512", "8M", &["write -P 9 0 8M"]);
    let store = Arc::new(Recorder::new(bytes));
    let mut options = Options::new("sample", true);
    options.cache_len_bytes = 0;
    let opened = Image::open(store as Arc<dyn Store>, None, &options, &mut |_| {});
    let chain = Chain::new(opened.unwrap().0, Vec::new());
    (0..256).for_each(|n| write(&chain, n << 15, &[3; 512]).unwrap());
    // The first has been evicted.
    assert_eq!(read(&chain, 512, 512).unwrap(), [9; 512]);
    let mut view = chain.view(Arc::new(|| {}));
    assert!(matches!(chain.plan(&mut view, 512, 512), Plan::InPlace { .. }));
}
