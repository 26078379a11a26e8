//! An image at work, as a daemon has it: writes in place and into new clusters as a sidecore plans
//! them, several under way at a time, and the longer ways in between.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use base::random::{Random, Seeded};
use qcow2::testing::{Bytes, Event, Recorder, killed_at, power_cut_at};
use qcow2::{
    Allocation, Chain, ChainView, Clear, FileStore, Image, Layer, Options, Plan, Scratch, Store,
};

use super::kinds::{Backing, Kind, qemu};
use super::model::{Model, SECTOR, Value, ZEROES, bytes_of};
use super::oracle::{self, Verdict};

/// A write into new clusters that is not over.
struct Pending {
    allocation: Allocation,
    /// The entries are in the file.
    is_written: bool,
    op: usize,
    sectors: Range<u64>,
}

/// A file of the image: what it was, and all that was done to it.
struct Tape {
    before: Bytes,
    store: Arc<Recorder>,
    log: Vec<Event>,
    times: Vec<u64>,
}

impl Tape {
    fn new(store: Recorder) -> Self {
        Self { before: store.bytes(), store: Arc::new(store), log: Vec::new(), times: Vec::new() }
    }

    fn take(&mut self) {
        (self.log, self.times) = self.store.take_log_with_times();
    }

    /// Events before `at`.
    fn upto(&self, at: usize) -> &[Event] {
        &self.log[..self.times.partition_point(|&time| time < at as u64)]
    }
}

/// Files that a death leaves: the image and, if there is one, the data file.
#[derive(Clone)]
struct Left {
    image: Bytes,
    data: Option<Bytes>,
}

/// An image at work, with its model and all that was done to its files.
pub struct World {
    kind: Kind,
    dir: tempfile::TempDir,
    image: Tape,
    /// The data file, if the image has one.
    data: Option<Tape>,
    chain: Chain,
    view: ChainView,
    scratch: Scratch,
    model: Model,
    pending: Vec<Pending>,
    random: Seeded,
    value: Value,
    len_bytes: u64,
    initial: File,
    seed: u64,
}

fn below(kind: &Kind, dir: &Path) -> Vec<Layer> {
    let store = |name: &str| -> Arc<dyn Store> {
        Arc::new(FileStore::new(File::open(dir.join(name)).unwrap()).unwrap())
    };
    match kind.backing {
        Backing::None => Vec::new(),
        Backing::Raw | Backing::ShortRaw | Backing::LongRaw => {
            let store = store("base.raw");
            let len_bytes = store.len().unwrap();
            vec![Layer::Raw { store, len_bytes }]
        }
        Backing::Qcow2 => {
            let options = Options::new("base", false);
            let (image, _) = Image::open(store("base.qcow2"), None, &options, &mut |_| {}).unwrap();
            vec![Layer::Qcow2(Box::new(image))]
        }
    }
}

fn open(
    store: Arc<dyn Store>,
    data: Option<Arc<dyn Store>>,
    kind: &Kind,
    dir: &Path,
    writable: bool,
) -> Chain {
    let mut options = Options::new(kind.name, writable);
    options.cache_len_bytes = 0;
    let (image, _) = Image::open(store, data, &options, &mut |_| {}).unwrap();
    Chain::new(image, below(kind, dir))
}

impl World {
    pub fn new(kind: &Kind, seed: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        kind.make(dir.path());
        let (image, raw) = (dir.path().join("disk.qcow2"), dir.path().join("initial.raw"));
        qemu("qemu-img", &["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()]);
        let image = Tape::new(Recorder::new(Bytes::load(&image).unwrap()));
        let data = kind.data_file.then(|| {
            let bytes = Bytes::load(&dir.path().join("data.raw")).unwrap();
            Tape::new(image.store.beside(bytes))
        });
        let data_store = data.as_ref().map(|tape| tape.store.clone() as Arc<dyn Store>);
        let chain = open(image.store.clone(), data_store, kind, dir.path(), true);
        let view = chain.view(Arc::new(|| {}));
        Self {
            kind: *kind,
            initial: File::open(raw).unwrap(),
            dir,
            image,
            data,
            len_bytes: chain.top().len_bytes(),
            chain,
            view,
            scratch: Scratch::default(),
            model: Model::default(),
            pending: Vec::new(),
            random: Seeded::new(seed),
            value: 0,
            seed,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.next_u64() % bound.max(1)
    }

    /// A range: near others, so that they meet; of any length, mostly short.
    fn range(&mut self) -> Range<u64> {
        let disk = self.len_bytes / SECTOR;
        let cluster = self.chain.top().geometry().cluster_len() / SECTOR;
        let zones = 4;
        let zone = self.below(zones) * (disk / zones);
        let span = (cluster * 6).min(disk / zones).max(1);
        let mut from = zone + self.below(span);
        let len = match self.below(6) {
            0 => 1,
            1 => 1 + self.below(16),
            2 => {
                from -= from % cluster;
                cluster * (1 + self.below(3))
            }
            3 => 1 + self.below(cluster * 3),
            _ => 8,
        };
        let from = from.min(disk - 1);
        from..(from + len.min(2048)).min(disk)
    }

    /// Does this number of random operations.
    pub fn run(&mut self, count: usize) {
        for _ in 0..count {
            match self.below(41) {
                40 => self.grow(),
                n => self.step(n / 2),
            }
            while self.pending.len() > 3 {
                self.advance();
            }
        }
        while !self.pending.is_empty() {
            self.advance();
        }
        if self.below(2) == 0 {
            self.chain.top().close().unwrap();
        }
        self.image.take();
        self.data.iter_mut().for_each(Tape::take);
    }

    fn step(&mut self, n: u64) {
        match n {
            0..10 => self.write(true),
            10..12 => self.write(false),
            12..14 => self.flush(),
            14 => self.clear(Clear::Discard),
            15 => self.clear(Clear::Zero { may_unmap: true }),
            16 => self.clear(Clear::Zero { may_unmap: false }),
            17 => self.chain.top().maintain().unwrap(),
            18 => self.look(),
            _ => self.advance(),
        }
    }

    /// Grows the disk, by a little or so that the L1 table has to move.
    fn grow(&mut self) {
        let far = if self.len_bytes > 1 << 33 { 1 << 30 } else { self.len_bytes };
        let more = if self.below(2) == 0 { 1 + self.below(200) } else { far / SECTOR };
        let len = self.len_bytes + more * SECTOR;
        let op = self.model.begin(self.at());
        match self.chain.grow(&mut self.view, len) {
            Ok(()) => self.len_bytes = len,
            Err(_) => assert!(!self.kind.can_grow(), "{}: {len}", self.kind.name),
        }
        self.model.set_len(op, self.chain.top().len_bytes());
        self.model.end(op, self.at(), false);
    }

    /// File into which data of the disk goes.
    fn data_store(&self) -> &Recorder {
        &self.data.as_ref().unwrap_or(&self.image).store
    }

    fn at(&self) -> usize {
        self.image.store.now() as usize
    }

    /// One step of a write that is under way.
    fn advance(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let n = self.below(self.pending.len() as u64) as usize;
        self.advance_one(n);
    }

    fn advance_one(&mut self, n: usize) {
        let pending = &mut self.pending[n];
        if !pending.is_written {
            let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
            let len = pending.allocation.encode(&mut entries);
            let offset = pending.allocation.entries_offset();
            self.image.store.write_at(&entries[..len], offset).unwrap();
            pending.is_written = true;
            return;
        }
        let Pending { allocation, op, .. } = self.pending.swap_remove(n);
        self.chain.commit(allocation);
        self.model.end(op, self.at(), false);
    }

    /// Ends what is under way in the same clusters.
    fn end_others(&mut self, sectors: &Range<u64>) {
        let cluster = self.chain.top().geometry().cluster_len() / SECTOR;
        let wide = |r: &Range<u64>| r.start / cluster..r.end.div_ceil(cluster);
        let mine = wide(sectors);
        while let Some(n) = self.pending.iter().position(|p| {
            let other = wide(&p.sectors);
            other.start < mine.end && mine.start < other.end
        }) {
            self.advance_one(n);
        }
    }

    fn data(&self, sectors: &Range<u64>, value: Value) -> Vec<u8> {
        let mut data = vec![0; ((sectors.end - sectors.start) * SECTOR) as usize];
        for (sector, bytes) in sectors.clone().zip(data.chunks_exact_mut(SECTOR as usize)) {
            bytes_of(value, sector, bytes);
        }
        data
    }

    fn write(&mut self, is_fast: bool) {
        let mut sectors = self.range();
        // Writes that are under way beside each other are in other clusters, or in the same one and
        // then the second finds it taken: that is for tests with threads.
        self.end_others(&sectors);
        self.value += 1;
        let value = self.value;
        while !sectors.is_empty() {
            let data = self.data(&sectors, value);
            let offset = sectors.start * SECTOR;
            let op = self.model.begin(self.at());
            let stay = self.chain.enter(&mut self.view);
            let plan = match is_fast {
                true => self.chain.plan(&mut self.view, offset, data.len() as u64),
                false => Plan::Slow,
            };
            let done = match plan {
                Plan::InPlace { host, len } => {
                    self.data_store().write_at(&data[..len as usize], host).unwrap();
                    len
                }
                Plan::Allocate(allocation) => {
                    let len = allocation.len;
                    self.image.store.write_at(&data[..len as usize], allocation.host).unwrap();
                    let sectors = sectors.start..sectors.start + len / SECTOR;
                    self.pending.push(Pending { allocation, is_written: false, op, sectors });
                    len
                }
                Plan::Busy => panic!("a claim that is not pending"),
                Plan::Slow => {
                    self.chain.write(&mut self.view, &mut self.scratch, &data, offset).unwrap();
                    data.len() as u64
                }
            };
            self.chain.leave(&mut self.view, stay);
            let part = sectors.start..sectors.start + done / SECTOR;
            self.model.set(op, part.clone(), value);
            if self.pending.last().is_none_or(|p| p.op != op) {
                self.model.end(op, self.at(), false);
            }
            sectors.start = part.end;
        }
    }

    fn flush(&mut self) {
        let op = self.model.begin(self.at());
        self.chain.top().sync().unwrap();
        self.model.end(op, self.at(), true);
    }

    fn clear(&mut self, how: Clear) {
        let sectors = self.range();
        self.end_others(&sectors);
        let op = self.model.begin(self.at());
        let range = sectors.start * SECTOR..sectors.end * SECTOR;
        self.chain.clear(&mut self.view, &mut self.scratch, range, how).unwrap();
        // Of a discard only whole clusters go, and then they are zero.
        for sector in sectors {
            let bytes = self.read(sector);
            if how != Clear::Discard || bytes.iter().all(|&b| b == 0) {
                assert!(bytes.iter().all(|&b| b == 0), "{}: sector {sector}", self.kind.name);
                self.model.set(op, sector..sector + 1, ZEROES);
            }
        }
        self.model.end(op, self.at(), false);
    }

    fn read(&mut self, sector: u64) -> Vec<u8> {
        let mut bytes = vec![0xee; SECTOR as usize];
        self.chain.read(&mut self.view, &mut self.scratch, &mut bytes, sector * SECTOR).unwrap();
        bytes
    }

    /// Reads, and compares with the model.
    fn look(&mut self) {
        let sectors = self.range();
        self.end_others(&sectors);
        for sector in sectors {
            let found = self.read(sector);
            let states = [self.model.now(sector)];
            self.assert_one_of(&found, sector, &states, "while it is served");
        }
    }

    fn assert_one_of(&self, found: &[u8], sector: u64, states: &[Option<Value>], when: &str) {
        let mut want = vec![0; SECTOR as usize];
        for state in states {
            match state {
                Some(value) => bytes_of(*value, sector, &mut want),
                None => {
                    want.fill(0);
                    let _ = self.initial.read_at(&mut want, sector * SECTOR).unwrap();
                }
            }
            if want == found {
                return;
            }
        }
        let (kind, seed) = (self.kind.name, self.seed);
        panic!(
            "{kind}, seed {seed}, {when}: sector {sector} is {:x?}, none of {states:?}",
            &found[..16]
        );
    }

    /// Dies at `count` points of what was done, by a kill and by a power cut each. Returns how
    /// often.
    pub fn die_everywhere(&mut self, count: u64) -> u64 {
        let end = self.image.store.now();
        for n in 0..count {
            let at = self.below(end + 1) as usize;
            // QEMU looks at some, of which there are enough where there are many.
            let is_sampled = n % if count < 400 { 8 } else { 32 } == 0;
            let killed = |tape: &Tape| killed_at(&tape.before, tape.upto(at));
            let left = Left { image: killed(&self.image), data: self.data.as_ref().map(killed) };
            if n % 4 == 1 {
                self.die_again(left.clone(), at, true);
            }
            self.verify(left, at, true, is_sampled);
            let random = &mut self.random;
            let mut cut = |tape: &Tape| power_cut_at(&tape.before, tape.upto(at), random);
            let left = Left { image: cut(&self.image), data: self.data.as_ref().map(cut) };
            if n % 4 == 1 {
                self.die_again(left.clone(), at, false);
            }
            self.verify(left, at, false, is_sampled);
        }
        count * 2 + (count + 2) / 4 * 2
    }

    /// Dies once more, while what the first death left is opened and mended.
    fn die_again(&mut self, left: Left, at: usize, is_kill: bool) {
        let mut image = Tape::new(Recorder::new(left.image));
        let data = left.data.map(|bytes| Arc::new(Recorder::new(bytes)));
        let data_store = data.clone().map(|store| store as Arc<dyn Store>);
        drop(open(image.store.clone(), data_store, &self.kind, self.dir.path(), true));
        image.take();
        let log = &image.log[..self.below(image.log.len() as u64 + 1) as usize];
        let left = match self.below(2) {
            0 => killed_at(&image.before, log),
            _ => power_cut_at(&image.before, log, &mut self.random),
        };
        let left = Left { image: left, data: data.map(|store| store.bytes()) };
        self.verify(left, at, is_kill, false);
    }

    fn verify(&self, left: Left, at: usize, is_kill: bool, is_sampled: bool) {
        let when = format!("{} at event {at}", if is_kill { "killed" } else { "power cut" });
        let (kind, seed) = (self.kind.name, self.seed);
        let path = self.dir.path().join("left.qcow2");
        // Of version 2 QEMU would not know that it was not closed: no count may be too low.
        let is_v2 = self.chain.top().geometry().version < 3;
        if (is_kill || is_v2) && is_sampled {
            self.save(&left);
            let (verdict, text) = oracle::check(&path);
            assert!(verdict != Verdict::Errors, "{kind}, seed {seed}, {when}: {text}");
        }
        if is_sampled {
            self.verify_by_qemu(&left, at, is_kill, &when);
        }
        let image = Arc::new(Recorder::new(left.image));
        let data = left.data.map(|bytes| Arc::new(Recorder::new(bytes)));
        let data_store = data.clone().map(|store| store as Arc<dyn Store>);
        let chain = open(image.clone(), data_store, &self.kind, self.dir.path(), true);
        self.compare(&chain, at, is_kill, &format!("{when}, mended by us"));
        self.live_on(&chain, at as u64, &when);
        chain.top().close().unwrap();
        if is_sampled {
            self.save(&Left { image: image.bytes(), data: data.map(|store| store.bytes()) });
            let (verdict, text) = oracle::check(&path);
            assert!(verdict == Verdict::Clean, "{kind}, seed {seed}, {when}, mended: {text}");
        }
    }

    /// Writes sectors here and there after a death: nothing but them changes, whatever was in the
    /// clusters that they go to.
    fn live_on(&self, chain: &Chain, seed: u64, when: &str) {
        let mut random = Seeded::new(seed);
        let (mut view, mut scratch) = (chain.view(Arc::new(|| {})), Scratch::default());
        let cluster = chain.top().geometry().cluster_len().min(32 << 10);
        let disk = chain.top().len_bytes() / SECTOR;
        let data = [0xc3; SECTOR as usize];
        for _ in 0..8 {
            let sector = random.next_u64() % disk;
            let begin = sector * SECTOR / cluster * cluster;
            let len = cluster.min(disk * SECTOR - begin) as usize;
            let (mut before, mut after) = (vec![0; len], vec![0; len]);
            chain.read(&mut view, &mut scratch, &mut before, begin).unwrap();
            chain.write(&mut view, &mut scratch, &data, sector * SECTOR).unwrap();
            let at = (sector * SECTOR - begin) as usize;
            before[at..at + SECTOR as usize].copy_from_slice(&data);
            chain.read(&mut view, &mut scratch, &mut after, begin).unwrap();
            let (kind, seed) = (self.kind.name, self.seed);
            assert!(before == after, "{kind}, seed {seed}, {when}: a write at sector {sector}");
        }
    }

    /// Makes files of it.
    fn save(&self, left: &Left) {
        left.image.save(&self.dir.path().join("left.qcow2")).unwrap();
        // The image names it.
        let data = self.dir.path().join("data.raw");
        left.data.iter().for_each(|bytes| bytes.save(&data).unwrap());
    }

    /// QEMU mends it as well.
    fn verify_by_qemu(&self, left: &Left, at: usize, is_kill: bool, when: &str) {
        let (kind, seed) = (self.kind.name, self.seed);
        let path = self.dir.path().join("left.qcow2");
        self.save(left);
        let (verdict, text) = oracle::mend(&path);
        assert!(verdict == Verdict::Clean, "{kind}, seed {seed}, {when}, by QEMU: {text}");
        let store = Arc::new(Recorder::new(Bytes::load(&path).unwrap()));
        let data = left.data.clone().map(|bytes| Arc::new(Recorder::new(bytes)) as Arc<dyn Store>);
        let chain = open(store, data, &self.kind, self.dir.path(), false);
        self.compare(&chain, at, is_kill, &format!("{when}, mended by QEMU"));
    }

    fn compare(&self, chain: &Chain, at: usize, is_kill: bool, when: &str) {
        let mut view = chain.view(Arc::new(|| {}));
        let mut scratch = Scratch::default();
        let mut found = vec![0; SECTOR as usize];
        let lens = self.model.lens(self.kind.len_bytes(), at, is_kill);
        let len = chain.top().len_bytes();
        assert!(lens.contains(&len), "{}, {when}: {len}, none of {lens:?}", self.kind.name);
        for sector in self.model.sectors() {
            chain.read(&mut view, &mut scratch, &mut found, sector * SECTOR).unwrap();
            let states = match is_kill {
                true => self.model.after_kill(sector, at),
                false => self.model.after_cut(sector, at),
            };
            self.assert_one_of(&found, sector, &states, when);
        }
    }
}
