//! Images with faults of all kinds, opened and worked on: nothing panics, runs for ever or takes
//! memory without bound; tables are never written over with the guest's data; what is refused is
//! untouched; and what QEMU can read of them is what we can read.
//!
//! `MILLRACE_IMAGES` is their number (200; 5,000 in a soak run), `MILLRACE_SEED` the first seed.

#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use base::random::{Random, Seeded};
use common::KINDS;
use common::kinds::{Backing, Kind, qemu};
use common::mutate::{Tables, mutate};
use common::sample::get_u64;
use qcow2::testing::{Bytes, Event, Recorder};
use qcow2::{Chain, Clear, FileStore, Image, Layer, Options, Plan, Scratch, Store};

/// Byte that the guest writes.
const GUEST: u8 = 0xa5;

/// Most address space for a process: 32-bit counts of entries must not become memory.
const MAX_ADDRESS_SPACE_LEN_BYTES: u64 = 4 << 30;

/// Errors with which we refuse to open an image that QEMU opens for reading, and the reason.
const WE_REFUSE: &[(&str, &str)] = &[
    ("header extension", "QEMU reads what is behind the file's end as zeroes"),
    ("it is damaged: ", "it was not closed, and what is wrong cannot be mended without loss"),
    ("refcount table", "QEMU does not look at refcounts for reading"),
    ("the header's length", "QEMU takes a length that is no multiple of 8"),
    ("the number of snapshots", "QEMU reads a snapshot table that reaches behind the file's end"),
    ("is no text", "QEMU takes names that are no UTF-8 as they are"),
    ("the offset of", "QEMU opens read-only without the tables that writing needs"),
    ("all snapshots' L1 tables", "QEMU reads them when they are used"),
    ("bitmap", "QEMU does not load bitmaps for reading"),
    ("the size of the disk", "more than 2^56 bytes"),
    ("a data file is configured, and the image has none", "QEMU is told of none"),
];

/// A request fails with us, and not with QEMU.
const WE_FAIL: &[(&str, &str)] = &[
    ("of the L1 table points at no table", "QEMU reads a table behind the file's end as zeroes"),
    ("contradicts itself: the entry", "QEMU takes entries whose reserved bits contradict them"),
];

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// An image of a kind with some content, and what it stands on.
struct Original {
    kind: Kind,
    dir: tempfile::TempDir,
    image: Bytes,
    data: Option<Bytes>,
}

impl Original {
    fn new(kind: &Kind) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        kind.make(dir.path());
        let path = dir.path().join("disk.qcow2");
        for n in 0..4u64 {
            let at = kind.len_bytes() / 512 * n / 4 * 512;
            let command = format!("write -P {} {at} 20k", n + 1);
            qemu("qemu-io", &["-f", "qcow2", "-c", &command, path.to_str().unwrap()]);
        }
        let data = kind.data_file.then(|| Bytes::load(&dir.path().join("data.raw")).unwrap());
        Self { kind: *kind, image: Bytes::load(&path).unwrap(), data, dir }
    }

    fn below(&self) -> Vec<Layer> {
        let store = |name: &str| -> Arc<dyn Store> {
            Arc::new(FileStore::new(File::open(self.dir.path().join(name)).unwrap()).unwrap())
        };
        match self.kind.backing {
            Backing::None => Vec::new(),
            Backing::Qcow2 => {
                let options = Options::new("base", false);
                let opened = Image::open(store("base.qcow2"), None, &options, &mut |_| {});
                vec![Layer::Qcow2(Box::new(opened.unwrap().0))]
            }
            _ => {
                let store = store("base.raw");
                let len_bytes = store.len().unwrap();
                vec![Layer::Raw { store, len_bytes }]
            }
        }
    }

    fn open(&self, image: &Arc<Recorder>, writable: bool) -> Result<Chain, qcow2::Error> {
        let mut options = Options::new(self.kind.name, writable);
        options.cache_len_bytes = 0;
        let data = self.data.clone().map(|data| Arc::new(Recorder::new(data)) as Arc<dyn Store>);
        let (image, _) = Image::open(image.clone(), data, &options, &mut |_| {})?;
        // One whose name was lost stands on nothing, for QEMU and for whoever opens chains here.
        let has_below = image.header().backing_name.is_some();
        let below = if has_below { self.below() } else { Vec::new() };
        Ok(Chain::new(image, below))
    }
}

#[test]
fn abuse_Q3_a_mutated_image_does_no_harm_and_is_read_as_qemu_reads_it() {
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let count = number("MILLRACE_IMAGES", if soak { 5000 } else { 200 });
    let first = number("MILLRACE_SEED", 1);
    let limit = rustix::process::Rlimit {
        current: Some(MAX_ADDRESS_SPACE_LEN_BYTES),
        maximum: rustix::process::getrlimit(rustix::process::Resource::As).maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    // QEMU would copy all of a disk of a few TiB.
    let kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.len_kib < 1 << 20).collect();
    let mut originals: Vec<Option<Original>> = kinds.iter().map(|_| None).collect();
    let mut tally = Tally::default();
    for n in first..first + count {
        let index = n as usize % kinds.len();
        let original = originals[index].get_or_insert_with(|| Original::new(kinds[index]));
        let mut random = Seeded::new(n);
        let mut bytes = original.image.clone();
        let what = format!("seed {n}, {}: {}", kinds[index].name, mutate(&mut bytes, &mut random));
        compare(original, &bytes, &what, &mut tally);
        work(original, bytes, &what, &mut random, &mut tally);
    }
    println!("{count} images: {tally:?}");
    assert_eq!(tally.unknown, [""; 0]);
}

#[derive(Debug, Default)]
struct Tally {
    both_read: u64,
    both_refuse: u64,
    we_refuse: u64,
    qemu_refuses: u64,
    clusters_equal: u64,
    clusters_both_fail: u64,
    clusters_we_fail: u64,
    refused_for_writing: u64,
    worked: u64,
    /// Images on which we and QEMU differ for no known reason.
    unknown: Vec<String>,
}

impl Tally {
    fn note(&mut self, is_right: bool, text: impl FnOnce() -> String) {
        if !is_right {
            self.unknown.push(text());
        }
    }
}

/// QEMU's reading of an image: its content and the clusters that it cannot read.
struct ByQemu {
    raw: File,
    failed: Vec<u64>,
}

/// Runs a tool, with a limit of time; whether it succeeded, and what it said.
fn run(program: &str, args: &[&str]) -> (bool, String) {
    let out = Command::new("timeout").args(["60", program]).args(args).output().unwrap();
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert_ne!(out.status.code(), Some(124), "{program} {args:?}: took too long");
    (out.status.success(), text.concat())
}

/// Lets QEMU read it; an error is why it does not open it.
fn by_qemu(dir: &Path, cluster: u64) -> Result<ByQemu, String> {
    let (image, raw) = (dir.join("mutated.qcow2"), dir.join("mutated.raw"));
    let (image, raw) = (image.to_str().unwrap(), raw.to_str().unwrap());
    let (is_whole, text) = run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", image, raw]);
    if is_whole {
        return Ok(ByQemu { raw: File::open(raw).unwrap(), failed: Vec::new() });
    }
    let salvage = ["convert", "--salvage", "-f", "qcow2", "-O", "raw", image, raw];
    if !run("qemu-img", &salvage).0 {
        return Err(text);
    }
    let raw = File::open(raw).unwrap();
    let clusters = raw.metadata().unwrap().len() / cluster;
    let reads: Vec<String> =
        (0..clusters).map(|n| format!("read {} {cluster}", n * cluster)).collect();
    let mut failed = Vec::new();
    for (n, part) in reads.chunks(256).enumerate() {
        let commands = part.iter().flat_map(|read| ["-c", read]);
        let args: Vec<&str> = ["-r", "-f", "qcow2"].into_iter().chain(commands).collect();
        let (_, text) = run("qemu-io", &[&args[..], &[image]].concat());
        // On standard output each read has a line, `read N/N bytes` or `read failed`, in their
        // order.
        let results: Vec<&str> = text.lines().filter(|line| line.starts_with("read ")).collect();
        assert_eq!(results.len(), part.len(), "{text}");
        let bad = results.iter().enumerate().filter(|(_, line)| line.starts_with("read failed"));
        failed.extend(bad.map(|(m, _)| (n * 256 + m) as u64));
    }
    Ok(ByQemu { raw, failed })
}

/// QEMU and we read the same, cluster by cluster.
fn compare(original: &Original, bytes: &Bytes, what: &str, tally: &mut Tally) {
    let dir = original.dir.path();
    bytes.save(&dir.join("mutated.qcow2")).unwrap();
    let ours = original.open(&Arc::new(Recorder::new(bytes.clone())), false);
    let cluster = ours.as_ref().map_or(65_536, |chain| chain.top().geometry().cluster_len());
    let (ours, theirs) = match (ours, by_qemu(dir, cluster)) {
        (Err(_), Err(_)) => return tally.both_refuse += 1,
        (Ok(_), Err(_)) => return tally.qemu_refuses += 1,
        (Err(e), Ok(_)) => {
            let text = e.to_string();
            let is_known = WE_REFUSE.iter().any(|(known, _)| text.contains(known));
            tally.note(is_known, || format!("{what}: QEMU opens it, we do not: {text}"));
            return tally.we_refuse += 1;
        }
        (Ok(ours), Ok(theirs)) => (ours, theirs),
    };
    tally.both_read += 1;
    let mut view = ours.view(Arc::new(|| {}));
    let mut scratch = Scratch::default();
    let len = ours.top().len_bytes() / 512 * 512;
    for n in 0..len.div_ceil(cluster) {
        let part = cluster.min(len - n * cluster) as usize;
        let (mut found, mut want) = (vec![0; part], vec![0; part]);
        let result = ours.read(&mut view, &mut scratch, &mut found, n * cluster);
        theirs.raw.read_exact_at(&mut want, n * cluster).unwrap();
        match (result, theirs.failed.contains(&n)) {
            (Ok(()), false) => {
                let text = || format!("{what}: cluster {n} differs from what QEMU reads");
                tally.note(found == want, text);
                tally.clusters_equal += 1;
            }
            (Err(_), true) => tally.clusters_both_fail += 1,
            (Ok(()), true) => {
                tally.note(false, || format!("{what}: cluster {n}: QEMU cannot read it, we can"));
            }
            (Err(e), false) => {
                let text = e.to_string();
                let is_known = WE_FAIL.iter().any(|(known, _)| text.contains(known));
                let text = || format!("{what}: cluster {n}: QEMU reads it, we do not: {text}");
                tally.note(is_known, text);
                tally.clusters_we_fail += 1;
            }
        }
    }
}

/// Serves it for a while.
fn work(original: &Original, bytes: Bytes, what: &str, random: &mut Seeded, tally: &mut Tally) {
    let store = Arc::new(Recorder::new(bytes.clone()));
    let chain = match original.open(&store, true) {
        Ok(chain) => chain,
        Err(e) => {
            assert!(!e.to_string().is_empty());
            assert_eq!(store.take_log(), [], "{what}: it was refused ({e}) and changed");
            return tally.refused_for_writing += 1;
        }
    };
    tally.worked += 1;
    let mut view = chain.view(Arc::new(|| {}));
    let mut scratch = Scratch::default();
    let disk = chain.top().len_bytes() / 512;
    for _ in 0..40 {
        if disk == 0 {
            break;
        }
        let from = random.next_u64() % disk;
        let len = (1 + u64::from(random.below(200))).min(disk - from);
        let (offset, len) = (from * 512, len * 512);
        let stay = chain.enter(&mut view);
        let data = vec![GUEST; len as usize];
        let _ = match random.below(8) {
            0..3 => plan(&chain, &store, &mut view, &data, offset),
            3 => chain.write(&mut view, &mut scratch, &data, offset),
            4 => chain.clear(&mut view, &mut scratch, offset..offset + len, Clear::Discard),
            5 => {
                let how = Clear::Zero { may_unmap: len % 1024 == 0 };
                chain.clear(&mut view, &mut scratch, offset..offset + len, how)
            }
            6 => chain.read(&mut view, &mut scratch, &mut vec![0; len as usize], offset),
            _ => chain.top().sync().and_then(|()| chain.top().maintain()),
        };
        chain.leave(&mut view, stay);
    }
    let more = chain.top().len_bytes() / 512 * 512 + 512;
    let _ = chain.grow(&mut view, more).and_then(|()| {
        chain.top().close().map_err(|source| qcow2::Error::Io { what: "closing it", source })
    });
    check(&bytes, &store, what);
}

fn plan(
    chain: &Chain,
    store: &Recorder,
    view: &mut qcow2::ChainView,
    data: &[u8],
    offset: u64,
) -> std::io::Result<()> {
    match chain.plan(view, offset, data.len() as u64) {
        // A data file is beside the image, and not looked at here.
        Plan::InPlace { .. } if chain.top().geometry().data_file => Ok(()),
        Plan::InPlace { host, len } => store.write_at(&data[..len as usize], host),
        Plan::Allocate(allocation) => {
            store.write_at(&data[..allocation.len as usize], allocation.host)?;
            let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
            let len = allocation.encode(&mut entries);
            store.write_at(&entries[..len], allocation.entries_offset())?;
            chain.commit(allocation);
            Ok(())
        }
        Plan::Busy => panic!("nobody else is there"),
        Plan::Slow => chain.write(view, &mut Scratch::default(), data, offset),
    }
}

/// Asserts that nothing was changed that must be as it was.
fn check(before: &Bytes, store: &Recorder, what: &str) {
    let after = store.bytes();
    let fixed = |bytes: &Bytes| {
        let mut header = [0; 104];
        bytes.read(&mut header, 0);
        // Size, L1 table, refcount table and feature bits are changed in place.
        [24..32, 36..60, 72..80, 88..96].into_iter().for_each(|range| header[range].fill(0));
        header
    };
    assert_eq!(fixed(before), fixed(&after), "{what}: the header was written over");
    let features = get_u64(before, 72) ^ get_u64(&after, 72);
    assert!(before.len() < 112 || features & !3 == 0, "{what}: features {features:x}");
    let tables = Tables::of(before);
    let clusters = tables.clusters(before);
    let log = store.take_log();
    let zeroed = zeroed(&log, tables.cluster_bits);
    let kept = Tables::of(&after).clusters(&after);
    let hit = clusters.iter().find(|c| zeroed.contains(c) && kept.binary_search(c).is_ok());
    assert_eq!(hit, None, "{what}: a table was zeroed");
    for event in log {
        let Event::Write { offset, data } = event else { continue };
        if !data.chunks(512).any(|sector| sector.iter().all(|&b| b == GUEST)) {
            continue;
        }
        let bits = tables.cluster_bits;
        let touched = offset >> bits..(offset + data.len() as u64).div_ceil(1 << bits);
        let hit = touched.into_iter().find(|cluster| clusters.binary_search(cluster).is_ok());
        assert_eq!(hit, None, "{what}: the guest's data went over a table");
    }
}

/// Clusters that were zeroed, and not written to after that.
fn zeroed(log: &[Event], bits: u32) -> BTreeSet<u64> {
    let mut all = BTreeSet::new();
    for event in log {
        match event {
            Event::Zero { offset, len_bytes } => {
                all.extend(offset >> bits..(offset + len_bytes).div_ceil(1 << bits));
            }
            Event::Write { offset, data } => {
                let end = (offset + data.len() as u64).div_ceil(1 << bits);
                (offset >> bits..end).for_each(|cluster| {
                    all.remove(&cluster);
                });
            }
            _ => {}
        }
    }
    all
}
