//! A disk that is full, or fails, at every point of random operations: whatever was acknowledged is
//! there, a sync that failed stays failed, and what is left is mended clean.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use base::random::{Random, Seeded};
use common::KINDS;
use common::kinds::Kind;
use common::model::{SECTOR, Value, ZEROES, bytes_of};
use common::oracle::{self, Verdict};
use qcow2::testing::{Bytes, Recorder};
use qcow2::{Chain, ChainView, Clear, Error, Image, Options, Plan, Scratch, Store};

/// Kinds that take all the ways of writing.
const CHOSEN: &[&str] =
    &["v3-512", "v2-4k-full", "bits-64", "snapshots-v2", "compressed-zstd", "extended-full"];

struct Guest {
    name: String,
    store: Arc<Recorder>,
    chain: Chain,
    view: ChainView,
    scratch: Scratch,
    random: Seeded,
    /// States that a sector may have: one, or several after an error. None: as at the beginning.
    states: BTreeMap<u64, Vec<Option<Value>>>,
    value: Value,
}

fn open(store: Arc<Recorder>) -> Result<Chain, Error> {
    let mut options = Options::new("failures", true);
    options.cache_len_bytes = 0;
    let (image, _) = Image::open(store as Arc<dyn Store>, None, &options, &mut |_| {})?;
    Ok(Chain::new(image, Vec::new()))
}

impl Guest {
    fn new(kind: &Kind, bytes: &Bytes, seed: u64) -> Self {
        let store = Arc::new(Recorder::new(bytes.clone()));
        let chain = open(store.clone()).unwrap();
        let view = chain.view(Arc::new(|| {}));
        Self {
            name: format!("{}, seed {seed}", kind.name),
            store,
            chain,
            view,
            scratch: Scratch::default(),
            random: Seeded::new(seed),
            states: BTreeMap::new(),
            value: 0,
        }
    }

    fn note(&mut self, from: u64, count: u64, value: Value, is_done: bool) {
        for sector in from..from + count {
            let states = self.states.entry(sector).or_insert_with(|| vec![None]);
            if is_done {
                states.clear();
            }
            states.push(Some(value));
        }
    }

    /// One random operation; an error is the store's.
    fn step(&mut self) -> io::Result<()> {
        let disk = self.chain.top().len_bytes() / SECTOR;
        let from = u64::from(self.random.below(4)) * (disk / 4) + u64::from(self.random.below(60));
        let count = (1 + u64::from(self.random.below(40))).min(disk - from);
        match self.random.below(8) {
            0..5 => self.write(from, count),
            5 => {
                let how = Clear::Zero { may_unmap: count % 2 == 0 };
                let range = from * SECTOR..(from + count) * SECTOR;
                let done = self.chain.clear(&mut self.view, &mut self.scratch, range, how);
                self.note(from, count, ZEROES, done.is_ok());
                done
            }
            6 => self.chain.top().sync(),
            _ => self.chain.top().maintain(),
        }
    }

    fn write(&mut self, from: u64, count: u64) -> io::Result<()> {
        self.value += 1;
        let value = self.value;
        let mut data = vec![0; (count * SECTOR) as usize];
        for (sector, bytes) in (from..).zip(data.chunks_exact_mut(SECTOR as usize)) {
            bytes_of(value, sector, bytes);
        }
        let mut at = 0;
        while at < data.len() {
            let sector = from + at as u64 / SECTOR;
            let (rest, offset) = (&data[at..], sector * SECTOR);
            let (done, len) = match self.chain.plan(&mut self.view, offset, rest.len() as u64) {
                Plan::InPlace { host, len } => {
                    (self.store.write_at(&rest[..len as usize], host), len as usize)
                }
                Plan::Allocate(allocation) => {
                    let len = allocation.len as usize;
                    (self.allocate(allocation, rest), len)
                }
                Plan::Busy => panic!("nobody else is there"),
                Plan::Slow => {
                    let chain = &self.chain;
                    let done = chain.write(&mut self.view, &mut self.scratch, rest, offset);
                    (done, rest.len())
                }
            };
            self.note(sector, len as u64 / SECTOR, value, done.is_ok());
            done?;
            at += len;
        }
        Ok(())
    }

    fn allocate(&self, allocation: qcow2::Allocation, data: &[u8]) -> io::Result<()> {
        let written = self.store.write_at(&data[..allocation.len as usize], allocation.host);
        if let Err(e) = written {
            self.chain.abandon(allocation, false);
            return Err(e);
        }
        let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
        let len = allocation.encode(&mut entries);
        match self.store.write_at(&entries[..len], allocation.entries_offset()) {
            Ok(()) => self.chain.commit(allocation),
            Err(e) => {
                self.chain.abandon(allocation, true);
                return Err(e);
            }
        }
        Ok(())
    }

    fn look(&self, chain: &Chain, initial: &Chain, when: &str) {
        let (mut view, mut old_view) = (chain.view(Arc::new(|| {})), initial.view(Arc::new(|| {})));
        let mut scratch = (Scratch::default(), Scratch::default());
        let (mut found, mut want) = (vec![0; SECTOR as usize], vec![0; SECTOR as usize]);
        for (&sector, states) in &self.states {
            chain.read(&mut view, &mut scratch.0, &mut found, sector * SECTOR).unwrap();
            let is_right = states.iter().any(|state| {
                match state {
                    Some(value) => bytes_of(*value, sector, &mut want),
                    None => {
                        let at = sector * SECTOR;
                        initial.read(&mut old_view, &mut scratch.1, &mut want, at).unwrap();
                    }
                }
                found == want
            });
            assert!(is_right, "{}, {when}: sector {sector} is none of {states:?}", self.name);
        }
    }
}

fn made(name: &str, dir: &Path) -> (&'static Kind, Bytes) {
    let kind = KINDS.iter().find(|kind| kind.name == name).unwrap();
    kind.make(dir);
    (kind, Bytes::load(&dir.join("disk.qcow2")).unwrap())
}

fn assert_clean(bytes: &Bytes, path: &Path, when: &str) {
    bytes.save(path).unwrap();
    let (verdict, text) = oracle::check(path);
    assert_eq!(verdict, Verdict::Clean, "{when}: {text}");
}

/// ENOSPC from the `n`th change on, for a while; then there is room again.
#[test]
fn a_full_disk_loses_nothing_that_was_acknowledged() {
    for name in CHOSEN {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (kind, bytes) = made(name, dir.path());
        let initial = open(Arc::new(Recorder::new(bytes.clone()))).unwrap();
        let path = dir.path().join("left.qcow2");
        for n in 0..150 {
            let mut guest = Guest::new(kind, &bytes, n / 50);
            let when = format!("{}, full after {n} changes", guest.name);
            guest.store.fail_after(Some(n));
            let failed = (0..60).filter(|_| guest.step().is_err()).count();
            guest.look(&guest.chain, &initial, &format!("full after {n} changes"));
            let store = Arc::new(Recorder::new(guest.store.bytes()));
            let chain = open(store.clone()).unwrap();
            guest.look(&chain, &initial, &format!("killed, full after {n} changes"));
            chain.top().close().unwrap();
            guest.store.fail_after(None);
            if failed > 0 {
                // All goes on when there is room.
                (0..20).for_each(|_| guest.step().unwrap_or_else(|e| panic!("{when}: {e}")));
                guest.look(&guest.chain, &initial, &format!("room again after {n} changes"));
            }
            guest.chain.top().close().unwrap();
            let again = Arc::new(Recorder::new(guest.store.bytes()));
            let chain = open(again.clone()).unwrap();
            guest.look(&chain, &initial, &format!("closed, full after {n} changes"));
            chain.top().close().unwrap();
            if n % 10 == 0 {
                assert_clean(&again.bytes(), &path, &when);
                assert_clean(&store.bytes(), &path, &format!("{when}, killed"));
            }
        }
    }
}

/// A change fails, and is in the file nevertheless: what comes after must not go by what memory
/// says.
#[test]
fn a_change_that_failed_and_was_made_undoes_nothing() {
    for name in CHOSEN {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (kind, bytes) = made(name, dir.path());
        let initial = open(Arc::new(Recorder::new(bytes.clone()))).unwrap();
        for n in 0..300 {
            let mut guest = Guest::new(kind, &bytes, n / 60);
            guest.store.fail_one_made(n);
            for step in 0..60 {
                let _ = guest.step();
                if step % 20 == 19 {
                    let when = format!("step {step}, change {n} failed");
                    guest.look(&guest.chain, &initial, &when);
                    let chain = open(Arc::new(Recorder::new(guest.store.bytes()))).unwrap();
                    guest.look(&chain, &initial, &format!("killed, {when}"));
                }
            }
        }
    }
}

/// The driver zeroes a part of what it could not write, after a write that failed and was made:
/// memory says that it is zero.
#[test]
fn a_part_is_zeroed_where_a_write_failed_and_was_made() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    for name in ["v3-512", "v2-4k-full", "extended-full"] {
        let (kind, bytes) = made(name, dir.path());
        let mut guest = Guest::new(kind, &bytes, 1);
        let len = guest.chain.top().geometry().cluster_len();
        let all = 0..guest.chain.top().len_bytes();
        // All is zero, and has no room.
        let how = Clear::Zero { may_unmap: true };
        guest.chain.clear(&mut guest.view, &mut guest.scratch, all, how).unwrap();
        guest.chain.write(&mut guest.view, &mut guest.scratch, &[1; 512], 0).unwrap();
        let data = vec![9; len as usize];
        // Its data is the first change, its entry the second.
        guest.store.fail_one_made(1);
        let failed = match guest.chain.plan(&mut guest.view, len, len) {
            Plan::Allocate(allocation) => guest.allocate(allocation, &data).is_err(),
            _ => guest.chain.write(&mut guest.view, &mut guest.scratch, &data, len).is_err(),
        };
        assert!(failed, "{name}");
        let part = len..len + 256;
        guest.chain.clear(&mut guest.view, &mut guest.scratch, part, how).unwrap();
        let chain = open(Arc::new(Recorder::new(guest.store.bytes()))).unwrap();
        let mut found = [7; 256];
        let mut view = chain.view(Arc::new(|| {}));
        chain.read(&mut view, &mut Scratch::default(), &mut found, len).unwrap();
        assert_eq!(found, [0; 256], "{name}");
    }
}

/// EIO of syncs at some point, for a moment: the kernel has dropped what it could not write.
#[test]
fn a_sync_that_failed_stays_failed() {
    for name in CHOSEN {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (kind, bytes) = made(name, dir.path());
        let initial = open(Arc::new(Recorder::new(bytes.clone()))).unwrap();
        let path = dir.path().join("left.qcow2");
        for n in 0..20 {
            let mut guest = Guest::new(kind, &bytes, n);
            (0..n).for_each(|_| guest.step().unwrap());
            guest.store.fail_syncs(true);
            guest.chain.top().sync().unwrap_err();
            guest.store.fail_syncs(false);
            for _ in 0..20 {
                guest.chain.top().sync().unwrap_err();
                // A queue's own flush, through another opening, may have found nothing.
                assert!(!guest.chain.flush_ended(guest.chain.flush_begins()));
                let _ = guest.step();
            }
            guest.look(&guest.chain, &initial, "after a sync that failed");
            guest.chain.top().close().unwrap_err();
            // The kernel has it yet: a new daemon finds it.
            let store = Arc::new(Recorder::new(guest.store.bytes()));
            let chain = open(store.clone()).unwrap();
            guest.look(&chain, &initial, "opened again");
            chain.top().close().unwrap();
            assert_clean(&store.bytes(), &path, &guest.name);
        }
    }
}
