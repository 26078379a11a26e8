//! Rate of the store by itself, natively, on files in memory: `cargo run --release --example rate`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use guest_abi::table::{Batch, Op, limits, op, op_flag};
use sdk::testing::EventBytes;
use sdk::{Errno, Events, File, Host, Module};
use table_module::{Config, Store};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Files in memory, and nothing else.
#[derive(Default)]
struct Memory {
    files: Vec<Vec<u8>>,
    names: BTreeMap<String, usize>,
    replies: u64,
    bytes: u64,
    wake: bool,
    spent: Duration,
}

impl Host for Memory {
    fn reply(&mut self, _: u32, _: u64, _: u32, body: &[u8]) -> Result<(), Errno> {
        self.replies += 1;
        self.bytes += body.len() as u64;
        assert_eq!(body[..2], [0, 0], "{}", String::from_utf8_lossy(body));
        Ok(())
    }
    fn open(&mut self, name: &str, flags: u32) -> Result<File, Errno> {
        if let Some(file) = self.names.get(name) {
            return Ok(File(*file as i32));
        }
        if flags & sdk::open::CREATE == 0 {
            return Err(Errno::NOENT);
        }
        self.files.push(Vec::new());
        self.names.insert(name.into(), self.files.len() - 1);
        Ok(File(self.files.len() as i32 - 1))
    }
    fn close(&mut self, _: File) {}
    fn len(&mut self, file: File) -> Result<u64, Errno> {
        Ok(self.files[file.0 as usize].len() as u64)
    }
    fn read(&mut self, file: File, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let begin = Instant::now();
        let bytes = &self.files[file.0 as usize][at as usize..];
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        self.spent += begin.elapsed();
        Ok(len)
    }
    fn write(&mut self, _: File, _: u64, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::INVAL)
    }
    fn append(&mut self, file: File, bytes: &[u8]) -> Result<u64, Errno> {
        let begin = Instant::now();
        let file = &mut self.files[file.0 as usize];
        file.extend_from_slice(bytes);
        self.spent += begin.elapsed();
        Ok((file.len() - bytes.len()) as u64)
    }
    fn sync(&mut self, _: File) -> Result<(), Errno> {
        Ok(())
    }
    fn truncate(&mut self, file: File, len: u64) -> Result<(), Errno> {
        self.files[file.0 as usize].truncate(len as usize);
        Ok(())
    }
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        let file = self.names.remove(from).ok_or(Errno::NOENT)?;
        self.names.insert(to.into(), file);
        Ok(())
    }
    fn remove(&mut self, name: &str) -> Result<(), Errno> {
        let file = self.names.remove(name).ok_or(Errno::NOENT)?;
        self.files[file] = Vec::new();
        Ok(())
    }
    fn list(&mut self) -> Result<Vec<String>, Errno> {
        Ok(self.names.keys().cloned().collect())
    }
    fn now_ms(&mut self) -> u64 {
        0
    }
    fn random(&mut self, _: &mut [u8]) -> Result<(), Errno> {
        Ok(())
    }
    fn wake_after(&mut self, ms: u32) {
        self.wake |= ms == 0;
    }
    fn log(&mut self, _: u32, text: &str) {
        println!("log: {text}");
    }
}

/// An op: kind, flags, key, value, extra.
type Step = (u8, u16, Vec<u8>, Vec<u8>, u64);

fn ask(ops: &[Step]) -> Vec<u8> {
    let head = Batch {
        tx: U64::ZERO,
        ops: U32::new(ops.len() as u32),
        flags: U16::ZERO,
        reserved: U16::ZERO,
        wait_ms: U32::ZERO,
        reserved2: U32::ZERO,
    };
    let mut bytes = head.as_bytes().to_vec();
    for (kind, flags, key, value, extra) in ops {
        let head = Op {
            kind: *kind,
            index: 0,
            flags: U16::new(*flags),
            table: U32::new(1),
            key_bytes: U32::new(key.len() as u32),
            value_bytes: U32::new(value.len() as u32),
            extra: U64::new(*extra),
        };
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(value);
    }
    bytes
}

struct Bench {
    host: Memory,
    store: Store,
    seq: u64,
}

impl Bench {
    fn serve(&mut self, events: &EventBytes) {
        self.store.serve(&mut self.host, Events::new(events.bytes())).expect("the store works");
    }

    fn run(&mut self, what: &str, unit: &str, per: u64, requests: &[Vec<u8>]) {
        let calls: Vec<_> = requests
            .iter()
            .map(|body| {
                self.seq += 1;
                EventBytes::new().request(0, self.seq, 0, body)
            })
            .collect();
        let (begin, replies) = (Instant::now(), self.host.replies);
        self.host.spent = Duration::ZERO;
        for call in &calls {
            self.serve(call);
        }
        while self.host.replies - replies < calls.len() as u64 {
            self.serve(&EventBytes::new().wake());
        }
        let (all, count) = (begin.elapsed(), (calls.len() as u64 * per) as f64);
        let files = self.host.spent;
        let ns = |time: Duration| time.as_nanos() as f64 / count;
        println!("{what}: {:.0} ns a {unit}, and {:.0} for files", ns(all - files), ns(files));
    }

    fn rest(&mut self) {
        let begin = Instant::now();
        let mut calls = 0;
        let mut longest = 0;
        while std::mem::take(&mut self.host.wake) {
            let begin = Instant::now();
            self.serve(&EventBytes::new().wake());
            longest = longest.max(begin.elapsed().as_micros());
            calls += 1;
        }
        println!(
            "chores: {} ms, {calls} calls, {longest} us the longest",
            begin.elapsed().as_millis()
        );
    }
}

fn key(i: u64) -> Vec<u8> {
    // Scattered.
    i.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes().to_vec()
}

fn main() {
    let mut host = Memory::default();
    let store = Store::start_with(&mut host, Config::default()).expect("the store works");
    let mut bench = Bench { host, store, seq: 0 };
    bench.serve(&EventBytes::new().opened(0, [1; 16]));
    bench.run("create", "table", 1, &[ask(&[(op::CREATE, 0, b"t".to_vec(), vec![], 1)])]);
    let n = 100_000;
    let insert = |i: u64, len| (op::INSERT, 0, key(i), vec![i as u8; len], 0);
    let commit = || (op::COMMIT, 0, vec![], vec![], 0);
    let requests: Vec<_> = (0..n).map(|i| ask(&[insert(i, 1024), commit()])).collect();
    bench.run("insert and commit 1 KB", "row", 1, &requests);
    let batches: Vec<_> = (n / 100..2 * n / 100)
        .map(|b| {
            ask(&(0..100).map(|i| insert(b * 100 + i, 1024)).chain([commit()]).collect::<Vec<_>>())
        })
        .collect();
    bench.run("insert 1 KB, 100 in a commit", "row", 100, &batches);
    let tiny: Vec<_> = (2 * n..4 * n).map(|i| ask(&[insert(i, 32), commit()])).collect();
    bench.run("insert and commit 32 B", "row", 1, &tiny);
    let large: Vec<_> =
        (4 * n..4 * n + 2000).map(|i| ask(&[insert(i, 128 << 10), commit()])).collect();
    bench.run("insert and commit 128 KB", "row", 1, &large);
    let gets: Vec<_> = (0..n).map(|i| ask(&[(op::GET, 0, key(i), vec![], 0)])).collect();
    bench.run("get 1 KB", "row", 1, &gets);
    let updates: Vec<_> =
        (0..n).map(|i| ask(&[(op::UPDATE, 0, key(i), vec![1; 1024], 0), commit()])).collect();
    bench.run("update and commit 1 KB", "row", 1, &updates);
    let scans: Vec<_> = (0..1000)
        .map(|i| ask(&[(op::SCAN, op_flag::NO_HIGH, key(i), vec![], limits(100, 0))]))
        .collect();
    bench.run("scan, scattered", "row", 100, &scans);
    bench.rest();
    let Bench { mut host, store, .. } = bench;
    drop(store);
    let begin = Instant::now();
    drop(Store::start_with(&mut host, Config::default()).expect("it starts"));
    let ms = begin.elapsed().as_millis();
    println!("start with a checkpoint and {} MB of log: {ms} ms", len_mb(&host));
    // Once more, without checkpoints.
    let config = Config { checkpoint_bytes: u64::MAX, ..Config::default() };
    let mut host = Memory::default();
    let store = Store::start_with(&mut host, config).expect("it starts");
    let mut bench = Bench { host, store, seq: 0 };
    bench.serve(&EventBytes::new().opened(0, [1; 16]));
    bench.run("create", "table", 1, &[ask(&[(op::CREATE, 0, b"t".to_vec(), vec![], 1)])]);
    for (what, len, count) in [("1 KB", 1024, n), ("100 B", 100, 3 * n)] {
        let requests: Vec<_> =
            (0..count).map(|i| ask(&[insert(i + len * n * 10, len as usize), commit()])).collect();
        bench.run(what, "row", 1, &requests);
        let Bench { mut host, store, seq } = bench;
        drop(store);
        let begin = Instant::now();
        let store = Store::start_with(&mut host, config).expect("it starts");
        let ms = begin.elapsed().as_millis().max(1);
        println!("replay of all {} MB: {ms} ms, {} MB/s", len_mb(&host), len_mb(&host) * 1000 / ms);
        bench = Bench { host, store, seq };
        bench.serve(&EventBytes::new().opened(0, [1; 16]));
    }
}

/// Megabytes of log.
fn len_mb(host: &Memory) -> u128 {
    let logs = host.names.iter().filter(|(name, _)| name.starts_with("log"));
    logs.map(|(_, file)| host.files[*file].len() as u128).sum::<u128>() >> 20
}
