//! The same image changed by QEMU and by us in turns, with snapshots and chains made by `qemu-img`
//! in between: after each turn `qemu-img check` is clean and the content is the model's.
//!
//! `MILLRACE_TURNS` is the number of turns (one for each kind; 200 and more in a soak run), and
//! `MILLRACE_SEED` the seed.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use base::random::{Random, Seeded};
use common::KINDS;
use common::kinds::{Backing, Kind, qemu};
use common::oracle::{self, Verdict};
use qcow2::{Chain, ChainView, Clear, FileStore, Image, Layer, Options, Plan, Scratch, Store};

const SECTOR: u64 = 512;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// An image, with all that it stands on, and a raw file that has what it should read as.
struct Disk {
    kind: Kind,
    dir: tempfile::TempDir,
    /// Overlays over `disk.qcow2`, the last one is written.
    overlays: Vec<PathBuf>,
    model: File,
    snapshots: u32,
    random: Seeded,
    name: String,
}

fn store(path: &Path, writable: bool) -> Arc<FileStore> {
    let file = OpenOptions::new().read(true).write(writable).open(path).unwrap();
    Arc::new(FileStore::new(file).unwrap())
}

impl Disk {
    fn new(kind: &Kind, seed: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        kind.make(dir.path());
        let (image, raw) = (dir.path().join("disk.qcow2"), dir.path().join("model.raw"));
        qemu("qemu-img", &["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()]);
        let model = OpenOptions::new().read(true).write(true).open(raw).unwrap();
        let (random, name) = (Seeded::new(seed), format!("{}, seed {seed}", kind.name));
        Self { kind: *kind, dir, overlays: Vec::new(), model, snapshots: 0, random, name }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn top(&self) -> PathBuf {
        self.overlays.last().cloned().unwrap_or_else(|| self.path("disk.qcow2"))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.next_u64() % bound.max(1)
    }

    fn len(&self) -> u64 {
        self.model.metadata().unwrap().len()
    }

    /// Some sectors, often the same ones.
    fn range(&mut self) -> (u64, usize) {
        let disk = self.len() / SECTOR;
        let from = self.below(4) * (disk / 4) + self.below(300.min(disk / 4));
        let len = match self.below(3) {
            0 => 1 + self.below(8),
            1 => 1 + self.below(300),
            _ => 128,
        };
        (from * SECTOR, (len.min(disk - from) * SECTOR) as usize)
    }

    fn open(&self) -> Chain {
        let mut below = Vec::new();
        let mut all = vec![self.path("disk.qcow2")];
        all.extend(self.overlays.iter().cloned());
        let top = all.pop().unwrap();
        let image = |path: &Path, writable| {
            let data = (self.kind.data_file && path.ends_with("disk.qcow2"))
                .then(|| store(&self.path("data.raw"), writable) as Arc<dyn Store>);
            let options = Options::new(self.kind.name, writable);
            Image::open(store(path, writable), data, &options, &mut |_| {}).unwrap().0
        };
        for path in all.iter().rev() {
            below.push(Layer::Qcow2(Box::new(image(path, false))));
        }
        match self.kind.backing {
            Backing::None => {}
            Backing::Qcow2 => {
                below.push(Layer::Qcow2(Box::new(image(&self.path("base.qcow2"), false))));
            }
            _ => {
                let store = store(&self.path("base.raw"), false);
                let len_bytes = store.len().unwrap();
                below.push(Layer::Raw { store, len_bytes });
            }
        }
        Chain::new(image(&top, true), below)
    }

    fn our_turn(&mut self) {
        let chain = self.open();
        let mut view = chain.view(Arc::new(|| {}));
        let mut scratch = Scratch::default();
        for _ in 0..24 {
            let (offset, len) = self.range();
            match self.below(10) {
                0..6 => {
                    let data = vec![1 + self.below(255) as u8; len];
                    self.write(&chain, &mut view, &data, offset);
                }
                6 | 7 => {
                    let end = offset + len as u64;
                    let how = Clear::Zero { may_unmap: self.below(2) == 0 };
                    chain.clear(&mut view, &mut scratch, offset..end, how).unwrap();
                    self.model.write_all_at(&vec![0; len], offset).unwrap();
                }
                8 => {
                    let end = offset + len as u64;
                    chain.clear(&mut view, &mut scratch, offset..end, Clear::Discard).unwrap();
                    // Whole clusters are zero after it, and the others as they were.
                    let mut data = vec![0; len];
                    chain.read(&mut view, &mut scratch, &mut data, offset).unwrap();
                    self.model.write_all_at(&data, offset).unwrap();
                }
                _ => {
                    chain.top().sync().unwrap();
                    chain.top().maintain().unwrap();
                }
            }
            self.look(&chain, &mut view, offset, len);
        }
        if self.kind.can_grow() && self.snapshots == 0 && self.below(4) == 0 {
            let len = self.len() + (1 + self.below(100)) * SECTOR;
            // An overlay may be of version 2 over something longer.
            if chain.grow(&mut view, len).is_ok() {
                self.model.set_len(len).unwrap();
            }
        }
        chain.top().close().unwrap();
    }

    fn write(&mut self, chain: &Chain, view: &mut ChainView, data: &[u8], offset: u64) {
        self.model.write_all_at(data, offset).unwrap();
        let image = OpenOptions::new().write(true).open(self.top()).unwrap();
        let data_file = match chain.top().geometry().data_file {
            true => OpenOptions::new().write(true).open(self.path("data.raw")).unwrap(),
            false => image.try_clone().unwrap(),
        };
        let mut at = 0;
        while at < data.len() {
            let (rest, here) = (&data[at..], offset + at as u64);
            at += match chain.plan(view, here, rest.len() as u64) {
                Plan::InPlace { host, len } => {
                    data_file.write_all_at(&rest[..len as usize], host).unwrap();
                    len as usize
                }
                Plan::Allocate(allocation) => {
                    let len = allocation.len as usize;
                    image.write_all_at(&rest[..len], allocation.host).unwrap();
                    let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
                    let entries_len = allocation.encode(&mut entries);
                    let offset = allocation.entries_offset();
                    image.write_all_at(&entries[..entries_len], offset).unwrap();
                    chain.commit(allocation);
                    len
                }
                Plan::Busy => panic!("nobody else is there"),
                Plan::Slow => {
                    chain.write(view, &mut Scratch::default(), rest, here).unwrap();
                    rest.len()
                }
            };
        }
    }

    fn look(&self, chain: &Chain, view: &mut ChainView, offset: u64, len: usize) {
        let begin = offset.saturating_sub(64 << 10);
        let len = (len as u64 + (128 << 10)).min(self.len() - begin) as usize;
        let (mut found, mut want) = (vec![0xee; len], vec![0; len]);
        chain.read(view, &mut Scratch::default(), &mut found, begin).unwrap();
        self.model.read_exact_at(&mut want, begin).unwrap();
        assert!(found == want, "{}: at {begin:#x}, {len} bytes", self.name);
    }

    fn qemus_turn(&mut self) {
        let mut commands = Vec::new();
        for _ in 0..8 {
            let (offset, len) = self.range();
            let value = 1 + self.below(255) as u8;
            let (flags, value) = match self.below(4) {
                0 => ("-z".to_owned(), 0),
                1 => ("-z -u".to_owned(), 0),
                _ => (format!("-P {value}"), value),
            };
            commands.push(format!("write {flags} {offset} {len}"));
            self.model.write_all_at(&vec![value; len], offset).unwrap();
        }
        let top = self.top();
        let args = commands.iter().flat_map(|command| ["-c", command]);
        let args: Vec<&str> = ["-f", "qcow2"].into_iter().chain(args).collect();
        qemu("qemu-io", &[&args[..], &[top.to_str().unwrap()]].concat());
    }

    /// Does to the image, between two turns, what an operator may do.
    fn operate(&mut self) {
        let top = self.top();
        let top = top.to_str().unwrap();
        match self.below(5) {
            0 => {
                let name = format!("t{}", self.snapshots);
                let args = ["snapshot", "-c", &name, top];
                // With refcounts of one bit nothing can be shared, with a data file neither.
                let is_done =
                    Command::new("qemu-img").args(args).output().unwrap().status.success();
                self.snapshots += u32::from(is_done);
                if !is_done {
                    // QEMU leaks what it had taken for it.
                    oracle::mend(&self.top());
                }
            }
            1 if self.snapshots > 0 => {
                self.snapshots -= 1;
                qemu("qemu-img", &["snapshot", "-d", &format!("t{}", self.snapshots), top]);
            }
            2 if self.snapshots == 0 && self.overlays.len() < 3 => self.stack(),
            3 if self.snapshots == 0 && !self.overlays.is_empty() => {
                qemu("qemu-img", &["commit", "-q", "-f", "qcow2", top]);
                self.overlays.pop();
            }
            _ => {}
        }
    }

    /// One more overlay.
    fn stack(&mut self) {
        let options = ["cluster_size=4k", "compat=0.10", "extended_l2=on", "cluster_size=512"];
        let options = options[self.below(4) as usize];
        let path = self.path(&format!("over{}.qcow2", self.overlays.len()));
        let (base, new) = (self.top(), path.to_str().unwrap().to_owned());
        // An L1 table for 64 TiB in clusters of 512 bytes is too long.
        let options = if self.len() > 1 << 30 { "cluster_size=64k" } else { options };
        let args = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-o", options, "-b"];
        let rest = [base.to_str().unwrap(), &*new];
        qemu("qemu-img", &[&args[..], &rest].concat());
        self.overlays.push(path);
    }

    fn check(&self, who: &str) {
        let top = self.top();
        let (verdict, text) = oracle::check(&top);
        assert_eq!(verdict, Verdict::Clean, "{}, after {who}: {text}", self.name);
        self.compare("qcow2", &top, who);
        if self.kind.options.contains("data_file_raw") && self.overlays.is_empty() {
            self.compare("raw", &self.path("data.raw"), who);
        }
    }

    fn compare(&self, format: &str, path: &Path, who: &str) {
        let (path, model) = (path.to_str().unwrap(), self.path("model.raw"));
        let args = ["compare", "-f", format, "-F", "raw", path, model.to_str().unwrap()];
        let out = Command::new("qemu-img").args(args).output().unwrap();
        let text = [out.stdout, out.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
        assert!(out.status.success(), "{}, after {who}: {}", self.name, text.concat());
    }
}

#[test]
fn qemu_and_we_change_the_same_image_in_turns() {
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let kinds = KINDS.len() as u64;
    let turns = number("MILLRACE_TURNS", if soak { 200.max(kinds * 12) } else { kinds });
    let seed = number("MILLRACE_SEED", 1);
    let only = std::env::var("MILLRACE_KIND").ok();
    for (n, kind) in (0..).zip(KINDS) {
        if only.as_deref().is_some_and(|only| only != kind.name) {
            continue;
        }
        let mut disk = Disk::new(kind, seed + n);
        for _ in 0..turns.div_ceil(kinds) {
            disk.our_turn();
            disk.check("us");
            disk.operate();
            disk.qemus_turn();
            disk.check("QEMU");
        }
    }
}
