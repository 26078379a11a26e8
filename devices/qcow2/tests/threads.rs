//! Several threads on one image on a real file: each has sectors of its own, in clusters that it
//! shares with the others, and knows what they hold; others read everything, and look after the
//! map.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::random::{Random, Seeded};
use common::KINDS;
use common::kinds::Backing;
use common::oracle::{self, Verdict};
use qcow2::{
    Allocation, Chain, ChainView, Clear, FileStore, Image, Layer, Options, Plan, Scratch, Store,
};

const SECTOR: u64 = 512;
const WRITERS: u64 = 4;
/// Sectors that the writers share, so that each cluster has all of them.
const SHARED: u64 = 1024;
/// Bytes of the disk that are a writer's alone: whole clusters are discarded there.
const OWN_LEN_BYTES: u64 = 128 << 10;
const OPERATIONS: u64 = 1500;

fn store(path: &Path, writable: bool) -> Arc<dyn Store> {
    let file = OpenOptions::new().read(true).write(writable).open(path).unwrap();
    Arc::new(FileStore::new(file).unwrap())
}

/// A word of a sector: who wrote it, when, and where it is.
fn word(writer: u64, turn: u64, sector: u64) -> u64 {
    1 << 63 | writer << 56 | turn << 32 | sector
}

fn sector_of(word: u64) -> Vec<u8> {
    word.to_be_bytes().repeat(SECTOR as usize / 8)
}

struct Worker<'a> {
    chain: &'a Chain,
    view: ChainView,
    scratch: Scratch,
    file: File,
    number: u64,
    random: Seeded,
    /// The word of each sector that was written; 0: zeroes.
    known: Vec<Option<u64>>,
}

impl<'a> Worker<'a> {
    fn new(chain: &'a Chain, path: &Path, number: u64) -> Self {
        let this = std::thread::current();
        Self {
            chain,
            view: chain.view(Arc::new(move || this.unpark())),
            scratch: Scratch::default(),
            file: OpenOptions::new().write(true).open(path).unwrap(),
            number,
            random: Seeded::new(number + 1),
            known: vec![None; (chain.top().len_bytes() / SECTOR) as usize],
        }
    }

    /// One of this worker's sectors among the shared ones.
    fn shared(&mut self) -> u64 {
        u64::from(self.random.below((SHARED / WRITERS) as u32)) * WRITERS + self.number
    }

    /// The first sector that is this worker's alone, and how many there are.
    fn own(&self) -> (u64, u64) {
        let len = OWN_LEN_BYTES / SECTOR;
        (SHARED + self.number * len, len)
    }

    fn step(&mut self, turn: u64) {
        let (own, own_len) = self.own();
        match self.random.below(10) {
            0..6 => {
                let sector = self.shared();
                self.write(sector, 1, turn);
            }
            6 => {
                let from = u64::from(self.random.below(own_len as u32));
                let len = (own_len - from).min(24);
                self.write(own + from, len, turn);
            }
            7 => {
                let sector = self.shared();
                self.clear(sector, 1, Clear::Zero { may_unmap: turn.is_multiple_of(2) });
            }
            8 => self.clear(own, own_len, Clear::Zero { may_unmap: true }),
            _ => {
                let sector = self.shared();
                self.look(sector);
            }
        }
    }

    fn write(&mut self, from: u64, count: u64, turn: u64) {
        let data: Vec<u8> = (from..from + count)
            .flat_map(|sector| sector_of(word(self.number, turn, sector)))
            .collect();
        let mut at = 0;
        while at < data.len() {
            let (rest, offset) = (&data[at..], from * SECTOR + at as u64);
            let stay = self.chain.enter(&mut self.view);
            let done = match self.chain.plan(&mut self.view, offset, rest.len() as u64) {
                Plan::InPlace { host, len } => {
                    self.file.write_all_at(&rest[..len as usize], host).unwrap();
                    len as usize
                }
                Plan::Allocate(allocation) => self.allocate(allocation, rest),
                Plan::Busy => 0,
                Plan::Slow => {
                    let chain = self.chain;
                    chain.write(&mut self.view, &mut self.scratch, rest, offset).unwrap();
                    rest.len()
                }
            };
            self.chain.leave(&mut self.view, stay);
            if done == 0 {
                std::thread::park();
            }
            at += done;
        }
        for sector in from..from + count {
            self.known[sector as usize] = Some(word(self.number, turn, sector));
        }
    }

    fn allocate(&mut self, allocation: Allocation, data: &[u8]) -> usize {
        let len = allocation.len as usize;
        self.file.write_all_at(&data[..len], allocation.host).unwrap();
        let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
        let entries_len = allocation.encode(&mut entries);
        self.file.write_all_at(&entries[..entries_len], allocation.entries_offset()).unwrap();
        self.chain.commit(allocation);
        len
    }

    fn clear(&mut self, from: u64, count: u64, how: Clear) {
        let range = from * SECTOR..(from + count) * SECTOR;
        let stay = self.chain.enter(&mut self.view);
        self.chain.clear(&mut self.view, &mut self.scratch, range, how).unwrap();
        self.chain.leave(&mut self.view, stay);
        (from..from + count).for_each(|sector| self.known[sector as usize] = Some(0));
    }

    fn look(&mut self, sector: u64) {
        let Some(word) = self.known[sector as usize] else { return };
        assert_eq!(self.read(sector), sector_of(word), "sector {sector}: {word:x}");
    }

    fn read(&mut self, sector: u64) -> Vec<u8> {
        let mut bytes = vec![0xee; SECTOR as usize];
        let stay = self.chain.enter(&mut self.view);
        let chain = self.chain;
        chain.read(&mut self.view, &mut self.scratch, &mut bytes, sector * SECTOR).unwrap();
        chain.leave(&mut self.view, stay);
        bytes
    }
}

fn open(dir: &Path, backing: Backing, writable: bool) -> Chain {
    let mut options = Options::new("threads", writable);
    options.cache_len_bytes = 0;
    let path = dir.join("disk.qcow2");
    let (image, _) = Image::open(store(&path, writable), None, &options, &mut |_| {}).unwrap();
    let below = match backing {
        Backing::None => Vec::new(),
        _ => {
            let store = store(&dir.join("base.raw"), false);
            let len_bytes = store.len().unwrap();
            vec![Layer::Raw { store, len_bytes }]
        }
    };
    Chain::new(image, below)
}

/// Every word that is found is of its own sector: of a writer, or as it was at the beginning.
fn read_all(chain: &Chain, path: &Path, initial: &Chain, over: &AtomicU64) {
    let mut reader = Worker::new(chain, path, 9);
    let mut before = Worker::new(initial, path, 9);
    while over.load(Ordering::Acquire) < WRITERS {
        let sector = u64::from(reader.random.below(SHARED as u32));
        let (found, old) = (reader.read(sector), before.read(sector));
        for (word, old) in found.chunks_exact(8).zip(old.chunks_exact(8)) {
            let value = u64::from_be_bytes(word.try_into().unwrap());
            let is_written = value >> 63 == 1
                && value & 0xffff_ffff == sector
                && value >> 56 & 0x7f == sector % WRITERS;
            assert!(value == 0 || word == old || is_written, "sector {sector}: {value:x}");
        }
    }
}

fn run(name: &str) {
    let kind = KINDS.iter().find(|kind| kind.name == name).unwrap();
    let (dir, initial_dir) =
        (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    kind.make(dir.path());
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), initial_dir.path().join(entry.file_name())).unwrap();
    }
    let path = dir.path().join("disk.qcow2");
    let chain = open(dir.path(), kind.backing, true);
    let initial = open(initial_dir.path(), kind.backing, false);
    let over = AtomicU64::new(0);
    let known: Vec<Vec<Option<u64>>> = std::thread::scope(|scope| {
        scope.spawn(|| read_all(&chain, &path, &initial, &over));
        scope.spawn(|| {
            while over.load(Ordering::Acquire) < WRITERS {
                chain.top().sync().unwrap();
                chain.top().maintain().unwrap();
            }
        });
        let writer = |number| {
            let (chain, path, over) = (&chain, &path, &over);
            scope.spawn(move || {
                // Also when it fails, so that the others end.
                let ended = Ended(over);
                let mut worker = Worker::new(chain, path, number);
                (1..OPERATIONS).for_each(|turn| worker.step(turn));
                drop(ended);
                worker.known
            })
        };
        let writers: Vec<_> = (0..WRITERS).map(writer).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    chain.top().close().unwrap();
    let (verdict, text) = oracle::check(&path);
    assert_eq!(verdict, Verdict::Clean, "{name}: {text}");
    let chain = open(dir.path(), kind.backing, false);
    for (number, known) in known.into_iter().enumerate() {
        let mut worker = Worker::new(&chain, &path, number as u64);
        worker.known = known;
        (0..worker.known.len() as u64).for_each(|sector| worker.look(sector));
    }
}

struct Ended<'a>(&'a AtomicU64);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

#[test]
fn threads_share_clusters_of_an_image() {
    run("v3-4k");
    run("v2-4k-full");
}

#[test]
fn threads_share_clusters_that_replace_content() {
    run("snapshots");
    run("compressed");
    run("backed-raw");
    run("backed-raw-v2");
}

#[test]
fn threads_share_clusters_with_pieces() {
    run("extended-full");
    run("extended-backed");
}
