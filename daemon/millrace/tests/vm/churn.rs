//! A web server under load whose files change all the time: replaced by rename, rewritten in place,
//! cut and made longer again. What a client gets was in the file that it asked for, at that place,
//! at some moment between its question and the answer's end.

use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab_agent::stream::Stream;

use crate::common::alone;
use crate::web::{Client, LARGE, Load, NGINX, PATIENCE, SMALL, World, assert_served, world, wrk};

/// Writers and clients do at least so much, however short the load is.
const LEAST_VERSIONS: u64 = 4;
const LEAST_ROUNDS: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// By rename: who opens the file has one version and keeps it.
    Replaced,
    /// Without truncation: any mixture of versions.
    Rewritten,
    /// Cut to [`SHORT_BYTES`] and extended, which makes zeros, then rewritten.
    Truncated,
}

/// Rest of a truncated file: within a block, and below the shim's threshold.
const SHORT_BYTES: u64 = 50_001;

/// A file and its versions, which have numbers from 1 on.
struct Changing {
    change: Change,
    name: String,
    len_bytes: u64,
    seed: u64,
    /// The version that the file may have in part.
    begun: AtomicU64,
    /// The version that the whole file had, at least.
    done: AtomicU64,
    /// The version whose writer has come to where lazy clients are to read on: while a truncated
    /// file is short, others when they have it all.
    read_on: AtomicU64,
    /// Milliseconds.
    longest: AtomicU64,
}

impl Changing {
    fn new(number: u64, change: Change, len_bytes: u64) -> Self {
        let name = format!("{change:?}-{len_bytes}").to_lowercase();
        let [begun, done, read_on, longest] = [(); 4].map(|()| AtomicU64::new(0));
        Self { change, name, len_bytes, seed: number << 32, begun, done, read_on, longest }
    }

    /// Replaced files differ in length, but not all of them.
    fn len_bytes_of(&self, version: u64) -> u64 {
        match self.change {
            Change::Replaced => self.len_bytes + version % 3 * 4097,
            Change::Rewritten | Change::Truncated => self.len_bytes,
        }
    }

    fn content(&self, version: u64) -> Vec<u8> {
        let mut content = vec![0; self.len_bytes_of(version) as usize];
        Stream::new(self.seed + version).fill(&mut content);
        content
    }

    /// Every other version is on the disk before the next comes, the others only in the page cache.
    fn write_next(&self, world: &World) {
        let version = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let (len_bytes, seed) = (self.len_bytes_of(version), self.seed + version);
        let (new, file) = (format!("/tmp/{}", self.name), format!("/mnt/{}", self.name));
        let rewrite = format!("dd if={new} of={file} bs=32k conv=notrunc 2>/dev/null");
        let sync = if version.is_multiple_of(2) { "&& sync" } else { "" };
        let begin = Instant::now();
        world.sh(&format!("agent fill {new} {len_bytes} {seed}"));
        match self.change {
            Change::Replaced => {
                world.sh(&format!("cp {new} {file}.new && mv -f {file}.new {file} {sync}"));
            }
            Change::Truncated if version > 1 => {
                world.sh(&truncate(&file, SHORT_BYTES));
                self.read_on.store(version, Ordering::SeqCst);
                // The pause is for who asks or reads meanwhile.
                let extend = truncate(&file, len_bytes);
                world.sh(&format!("sleep 0.2; {extend} && {rewrite} {sync}"));
            }
            Change::Rewritten | Change::Truncated => world.sh(&format!("{rewrite} {sync}")),
        }
        self.longest.fetch_max(begin.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.done.store(version, Ordering::SeqCst);
        self.read_on.store(version, Ordering::SeqCst);
    }

    /// Asks for the file; true when all of it came. A lazy client reads only when the file has
    /// changed since its question.
    fn get(&self, client: &mut Client, is_lazy: bool) -> bool {
        let oldest = self.done.load(Ordering::SeqCst);
        client.ask(&format!("/{}", self.name));
        let len_bytes = client.read_header();
        if is_lazy {
            // The version that was begun already may have come before the question.
            self.wait_for(oldest + 2);
        }
        let (begin, mut body) = (Instant::now(), Vec::new());
        let end = client.0.by_ref().take(len_bytes).read_to_end(&mut body);
        let (len, time) = (body.len(), begin.elapsed());
        let told = format!("{}: {len} of {len_bytes} bytes in {time:?}: {end:?}", self.name);
        let ended = end.map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |_| true);
        let whole = len as u64 == len_bytes;
        assert!(whole || ended && self.change == Change::Truncated, "{told}");
        if !whole {
            println!("{told}");
        }
        self.check(&body, len_bytes, oldest..self.begun.load(Ordering::SeqCst) + 1);
        whole
    }

    fn wait_for(&self, version: u64) {
        let until = Instant::now() + PATIENCE;
        while self.read_on.load(Ordering::SeqCst) < version {
            assert!(Instant::now() < until, "{}: no version {version}", self.name);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A body that the header said to be so long, of a file that had these versions meanwhile.
    fn check(&self, body: &[u8], len_bytes: u64, versions: Range<u64>) {
        let contents: Vec<_> = versions.clone().map(|version| self.content(version)).collect();
        let is_one = contents.iter().any(|content| content == body);
        let zeros_from = match self.change {
            Change::Truncated if versions.end - versions.start > 1 => SHORT_BYTES as usize,
            _ => usize::MAX,
        };
        let is_known = |at: usize, byte: u8| {
            let mut bytes = contents.iter().filter_map(|content| content.get(at));
            bytes.any(|&known| known == byte) || byte == 0 && at >= zeros_from
        };
        let wrong = (0..body.len()).find(|&at| !is_known(at, body[at]));
        let found = wrong.map(|at| self.origin(&body[at..]));
        let of = format!("{} of {versions:?}, {} of {len_bytes} bytes", self.name, body.len());
        assert_eq!((wrong, found), (None, None), "{of}: a byte of no version");
        let may_mix = self.change != Change::Replaced && contents.len() > 1;
        assert!(is_one || may_mix, "{of}: not one version");
    }

    /// For the one who has to find out where wrong bytes come from: zeros, or an older version.
    fn origin(&self, bytes: &[u8]) -> String {
        let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
        let part = &bytes[..bytes.len().min(8)];
        let older = (1..=self.begun.load(Ordering::SeqCst))
            .find(|&version| self.content(version).windows(part.len()).any(|has| has == part));
        format!("{zeros} zeros; begins as version {older:?}")
    }
}

/// The tool opens with `O_NONBLOCK`: instead of waiting for the end of a pipe's lease, it fails.
fn truncate(file: &str, len_bytes: u64) -> String {
    format!("until truncate -s {len_bytes} {file} 2>/tmp/truncate; do sleep 0.01; done")
}

/// Ends the loops of others, also when its owner panics.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Changes files in turn.
fn write(world: &World, files: &[&Changing], stop: &AtomicBool) {
    let mut versions = 1;
    while !stop.load(Ordering::SeqCst) || versions < LEAST_VERSIONS {
        files.iter().for_each(|file| file.write_next(world));
        versions += 1;
    }
}

/// Count of files that a client has got.
#[derive(Debug, Default, Clone, Copy)]
struct Got {
    whole: u64,
    cut: u64,
}

/// One whose window is so small that most of a file is still on its way when the client waits.
fn lazy_client() -> Client {
    let client = Client::new();
    rustix::net::sockopt::set_socket_recv_buffer_size(client.0.get_ref(), 32 << 10).unwrap();
    client
}

/// Asks for files in turn over one connection, or the next when the server ends it.
fn read(files: &[&Changing], is_lazy: bool, over: &AtomicBool) -> Got {
    let new_client = || if is_lazy { lazy_client() } else { Client::new() };
    let (mut client, mut got) = (new_client(), Got::default());
    let mut rounds = 0;
    while !over.load(Ordering::SeqCst) || rounds < LEAST_ROUNDS {
        for file in files {
            if file.get(&mut client, is_lazy) {
                got.whole += 1;
            } else {
                got.cut += 1;
                client = new_client();
            }
        }
        rounds += 1;
    }
    got
}

/// The same for files that never change: `wrk` does not compare.
fn read_unchanged(names: &[u64], over: &AtomicBool) -> Got {
    let (mut client, mut got) = (Client::new(), Got::default());
    while !over.load(Ordering::SeqCst) {
        names.iter().for_each(|&name| client.get(name));
        got.whole += names.len() as u64;
    }
    got
}

/// Writers, clients and the load at once, until the load ends.
fn churn(world: &World, files: &[Changing], clients: usize, load: &Load) -> String {
    let kinds = [Change::Replaced, Change::Rewritten, Change::Truncated];
    let of = |kind| files.iter().filter(|file| file.change == kind).collect::<Vec<_>>();
    let (over, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let read_kind =
        |kind, is_lazy| world.lab.net().inside(|| read(&of(kind), is_lazy, &over)).unwrap();
    let names = [&SMALL[..], &LARGE[..4]].concat();
    let read_others = || world.lab.net().inside(|| read_unchanged(&names, &over)).unwrap();
    thread::scope(|scope| {
        let stops = Ends(&stop);
        let writers = kinds.map(|kind| {
            let (of, stop) = (&of, &stop);
            scope.spawn(move || write(world, &of(kind), stop))
        });
        let ends = Ends(&over);
        let read_kind = &read_kind;
        let readers: Vec<_> = (0..clients)
            .flat_map(|_| kinds.map(|kind| [(kind, false), (kind, true)]))
            .flatten()
            .map(|(kind, is_lazy)| (kind, is_lazy, scope.spawn(move || read_kind(kind, is_lazy))))
            .collect();
        let others = scope.spawn(read_others);
        let told = wrk(world, load);
        drop(ends);
        // First all ends are awaited, then the failures come: whoever looks for one sees all of
        // them.
        let got: Vec<_> = readers
            .into_iter()
            .map(|(kind, is_lazy, reader)| (kind, is_lazy, reader.join()))
            .collect();
        let others = others.join();
        drop(stops);
        let written = writers.map(|writer| writer.join());
        tell(world, files);
        for (kind, is_lazy, got) in got {
            println!("{kind:?}, lazy {is_lazy}: {:?}", got.unwrap());
        }
        println!("unchanged: {:?}", others.unwrap());
        written.into_iter().for_each(|written| written.unwrap());
        told
    })
}

fn tell(world: &World, files: &[Changing]) {
    for file in files {
        let [done, longest] = [&file.done, &file.longest].map(|n| n.load(Ordering::Relaxed));
        println!("{}: {done} versions, the longest change took {longest} ms", file.name);
    }
    println!("{}", world.reasons());
    println!("{}", world.guest.run("cat /tmp/error.log").unwrap().text());
}

#[test]
fn files_change_under_a_thousand_connections() {
    let _alone = alone();
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let world = world();
    let _agent = world.agent();
    let kinds = [
        (Change::Replaced, 100_000),
        (Change::Replaced, 700_001),
        (Change::Rewritten, 131_072),
        (Change::Rewritten, 1_000_003),
        (Change::Truncated, 131_072),
        (Change::Truncated, 1_000_003),
    ];
    let files: Vec<_> = (1..)
        .zip(kinds)
        .map(|(number, (change, len_bytes))| Changing::new(number, change, len_bytes))
        .collect();
    files.iter().for_each(|file| file.write_next(&world));
    let server = world.serve("nginx -c /tmp/config", NGINX);

    let replaced = files.iter().filter(|file| file.change == Change::Replaced);
    let unchanged = SMALL.iter().chain(&LARGE[..3]).map(|name| format!("/{name}"));
    let paths: Vec<_> = replaced.map(|file| format!("/{}", file.name)).chain(unchanged).collect();
    let (connections, secs, clients) = if soak { (1000, 60, 4) } else { (100, 8, 1) };
    let told = churn(&world, &files, clients, &Load { connections, secs, paths: &paths });
    assert_served(&told);
    assert!(world.moved() > 0.0);

    // Nothing changes any more: all of the last version, and by a pipe again.
    let pipes = world.complete();
    let last = || {
        let mut client = Client::new();
        assert!(files.iter().all(|file| file.get(&mut client, false)));
    };
    world.lab.net().inside(last).unwrap();
    println!("{} by pipes in the end", world.complete() - pipes);
    assert!(world.complete() > pipes);
    server.kill().unwrap();
}
