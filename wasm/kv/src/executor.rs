//! Executor of commands on the cache.

use alloc::format;
use alloc::vec::Vec;

use sdk::Host;
use sdk::stream::Step;

use crate::cache::Cache;
use crate::command::{Command, CommandError, MAX_LINE_BYTES, Mode, Store, number, parse};

/// Limit of an expiry in seconds: more is a date.
const MAX_EXPIRY_S: i64 = 60 * 60 * 24 * 30;
/// First byte of the binary protocol.
const BINARY: u8 = 0x80;

/// State that all clients share.
#[derive(Debug)]
pub struct Shared {
    cache: Cache,
    now_ms: u64,
    started_ms: u64,
    flush_at_ms: Option<u64>,
    counts: Counts,
    /// Number of clients.
    pub clients: usize,
}

#[derive(Debug, Default)]
struct Counts {
    get: u64,
    set: u64,
    touch: u64,
    flush: u64,
    get_hits: u64,
    delete_hits: u64,
    delete_misses: u64,
    incr_hits: u64,
    incr_misses: u64,
    decr_hits: u64,
    decr_misses: u64,
    cas_hits: u64,
    cas_bad: u64,
    cas_misses: u64,
    touch_hits: u64,
}

impl Shared {
    /// Begins with an empty cache.
    pub fn new(cache: Cache, now_ms: u64) -> Self {
        let counts = Counts::default();
        Self { cache, now_ms, started_ms: now_ms, flush_at_ms: None, counts, clients: 0 }
    }

    /// Sets the time, and flushes the cache if that is due.
    pub fn set_now_ms(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        if self.flush_at_ms.is_some_and(|at| at <= now_ms) {
            self.flush_at_ms = None;
            self.cache.flush();
        }
    }

    /// Time at which an item expires; 0: never. None: `expiry` is a date.
    fn expires_ms(&self, expiry: i64) -> Option<u64> {
        match expiry {
            0 => Some(0),
            // Long ago.
            ..0 => Some(1),
            1..=MAX_EXPIRY_S => Some(self.now_ms + expiry as u64 * 1000),
            _ => None,
        }
    }
}

/// `get` that is being answered. Its line stays in the input until all keys are looked up.
#[derive(Debug)]
struct OpenGet {
    /// Beginning of the keys that are left.
    at: usize,
    /// End of the keys.
    end: usize,
    /// Beginning of the next line.
    next: usize,
    with_cas: bool,
    expires_ms: Option<u64>,
}

/// Executor of one client's commands.
#[derive(Debug, Default)]
pub struct Executor {
    open_get: Option<OpenGet>,
    skip: u64,
}

const FORMAT: &[u8] = b"CLIENT_ERROR bad command line format\r\n";
const CHUNK: &[u8] = b"CLIENT_ERROR bad data chunk\r\n";
const NO_NUMBER: &[u8] = b"CLIENT_ERROR cannot increment or decrement non-numeric value\r\n";
const NO_MEMORY: &[u8] = b"SERVER_ERROR out of memory storing object\r\n";
const TOO_LARGE: &[u8] = b"SERVER_ERROR object too large for cache\r\n";
const NO_DATES: &[u8] = b"SERVER_ERROR expiry as a date (over 30 days) is not supported\r\n";

impl sdk::stream::Executor for Executor {
    type Shared = Shared;

    fn step(
        &mut self,
        shared: &mut Shared,
        _: &mut dyn Host,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        if let Some(open_get) = &mut self.open_get {
            if open_get.next_key(shared, input, out) {
                return Step::go_on(0);
            }
            let used = open_get.next;
            self.open_get = None;
            return Step::go_on(used);
        }
        if self.skip > 0 && !input.is_empty() {
            let used = self.skip.min(input.len() as u64);
            self.skip -= used;
            return Step::go_on(used as usize);
        }
        if input.first() == Some(&BINARY) {
            return Step::close();
        }
        let most = input.len().min(MAX_LINE_BYTES);
        match input[..most].iter().position(|&b| b == b'\n') {
            Some(end) => self.line(shared, input, end, out),
            None if input.len() < MAX_LINE_BYTES => Step::wait(),
            None => {
                out.extend_from_slice(b"CLIENT_ERROR line too long\r\n");
                Step::close()
            }
        }
    }
}

impl Executor {
    fn line(&mut self, shared: &mut Shared, input: &[u8], end: usize, out: &mut Vec<u8>) -> Step {
        let line = &input[..end];
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let (command, is_quiet) = match parse(line) {
            Ok(parsed) => parsed,
            Err(wrong) => return self.wrong(shared, wrong, line, end + 1, out),
        };
        let before = out.len();
        let step = match command {
            Command::Store(store) => {
                return shared.store(&store, is_quiet, &input[end + 1..], end + 1, out);
            }
            Command::Get { keys, with_cas, expiry } => {
                let expires_ms = match expiry.map(|e| shared.expires_ms(e)) {
                    Some(None) => {
                        out.extend_from_slice(NO_DATES);
                        return Step::go_on(end + 1);
                    }
                    Some(time) => time,
                    None => None,
                };
                // The keys are the last part of the line.
                let (at, next) = (line.len() - keys.len(), end + 1);
                self.open_get = Some(OpenGet { at, end: line.len(), next, with_cas, expires_ms });
                Step::go_on(0)
            }
            Command::Quit => Step::close(),
            other => {
                shared.simple(other, out);
                Step::go_on(end + 1)
            }
        };
        if is_quiet {
            out.truncate(before);
        }
        step
    }

    fn wrong(
        &mut self,
        shared: &mut Shared,
        wrong: CommandError,
        line: &[u8],
        used: usize,
        out: &mut Vec<u8>,
    ) -> Step {
        let (text, skip): (&[u8], u64) = match wrong {
            CommandError::Unknown => (b"ERROR\r\n", 0),
            CommandError::Format => (FORMAT, 0),
            CommandError::Delta => (b"CLIENT_ERROR invalid numeric delta argument\r\n", 0),
            CommandError::Expiry => (b"CLIENT_ERROR invalid exptime argument\r\n", 0),
            CommandError::Data(skip) => (FORMAT, skip),
            CommandError::TooLarge(skip) => {
                // What is there is out of date.
                let key = line.split(|&b| b == b' ').filter(|w| !w.is_empty()).nth(1);
                shared.cache.remove(key.unwrap_or_default(), shared.now_ms);
                (TOO_LARGE, skip)
            }
            CommandError::Length => {
                out.extend_from_slice(CHUNK);
                return Step::close();
            }
        };
        out.extend_from_slice(text);
        self.skip = skip;
        Step::go_on(used)
    }
}

impl OpenGet {
    /// Looks up one key. False: there was none left.
    fn next_key(&mut self, shared: &mut Shared, input: &[u8], out: &mut Vec<u8>) -> bool {
        let rest = input.get(self.at..self.end).unwrap_or_default();
        let Some(start) = rest.iter().position(|&b| b != b' ') else {
            out.extend_from_slice(b"END\r\n");
            return false;
        };
        let word = &rest[start..];
        let len = word.iter().position(|&b| b == b' ').unwrap_or(word.len());
        let key = &word[..len];
        shared.counts.get += 1;
        if let Some(at) = self.expires_ms {
            shared.counts.touch += 1;
            shared.counts.touch_hits += u64::from(shared.cache.touch(key, at, shared.now_ms));
        }
        if let Some(item) = shared.cache.get(key, shared.now_ms) {
            shared.counts.get_hits += 1;
            out.extend_from_slice(b"VALUE ");
            out.extend_from_slice(key);
            let (flags, len) = (item.flags, item.value.len());
            let head = match self.with_cas {
                true => format!(" {flags} {len} {}\r\n", item.cas),
                false => format!(" {flags} {len}\r\n"),
            };
            out.extend_from_slice(head.as_bytes());
            out.extend_from_slice(&item.value);
            out.extend_from_slice(b"\r\n");
        }
        self.at += start + len;
        true
    }
}

impl Shared {
    /// Executes a storage command, if its data have come.
    fn store(
        &mut self,
        store: &Store<'_>,
        is_quiet: bool,
        data: &[u8],
        line_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Step {
        let Some(data) = data.get(..store.len + 2) else {
            return Step::wait();
        };
        let Some(value) = data.strip_suffix(b"\r\n") else {
            out.extend_from_slice(CHUNK);
            return Step::close();
        };
        self.counts.set += 1;
        let answer = self.put(store, value);
        if !is_quiet {
            out.extend_from_slice(answer);
        }
        Step::go_on(line_bytes + data.len())
    }

    fn put(&mut self, store: &Store<'_>, value: &[u8]) -> &'static [u8] {
        let now_ms = self.now_ms;
        let old = self.cache.get(store.key, now_ms).map(|item| (item.cas, item.flags));
        let (mut flags, mut is_joined) = (store.flags, None);
        match (store.mode, old) {
            (Mode::Add, Some(_)) | (Mode::Replace | Mode::Append | Mode::Prepend, None) => {
                return b"NOT_STORED\r\n";
            }
            (Mode::Cas(_), None) => {
                self.counts.cas_misses += 1;
                return b"NOT_FOUND\r\n";
            }
            (Mode::Cas(wanted), Some((cas, _))) if wanted != cas => {
                self.counts.cas_bad += 1;
                return b"EXISTS\r\n";
            }
            (Mode::Cas(_), Some(_)) => self.counts.cas_hits += 1,
            (Mode::Append | Mode::Prepend, Some((_, old_flags))) => {
                flags = old_flags;
                is_joined = Some(store.mode == Mode::Append);
            }
            _ => {}
        }
        let Some(expires_ms) = (match is_joined {
            // What is joined to something expires with it.
            Some(_) => Some(self.cache.expires_ms(store.key, now_ms)),
            None => self.expires_ms(store.expiry),
        }) else {
            self.cache.remove(store.key, now_ms);
            return NO_DATES;
        };
        let Some(value) = self.joined(store.key, value, is_joined) else { return TOO_LARGE };
        match self.cache.set(store.key, value, flags, expires_ms, now_ms) {
            Ok(_) => b"STORED\r\n",
            Err(_) => NO_MEMORY,
        }
    }

    /// The value, behind or in front of the one that is there. None: that is too long.
    fn joined(&mut self, key: &[u8], value: &[u8], is_behind: Option<bool>) -> Option<Vec<u8>> {
        let old = match is_behind {
            Some(_) => self.cache.get(key, self.now_ms).map_or(&[][..], |item| &item.value),
            None => &[],
        };
        let all = if is_behind == Some(true) { [old, value] } else { [value, old] };
        (old.len() + value.len() <= crate::command::MAX_VALUE_BYTES).then(|| all.concat())
    }

    /// Executes a command that needs no data and has one answer.
    fn simple(&mut self, command: Command<'_>, out: &mut Vec<u8>) {
        let answer: &[u8] = match command {
            Command::Delete(key) => match self.cache.remove(key, self.now_ms) {
                true => {
                    self.counts.delete_hits += 1;
                    b"DELETED\r\n"
                }
                false => {
                    self.counts.delete_misses += 1;
                    b"NOT_FOUND\r\n"
                }
            },
            Command::Count { key, by, is_up } => return self.count(key, by, is_up, out),
            Command::Touch(key, expiry) => self.touch(key, expiry),
            Command::Flush(delay) => self.flush(delay),
            Command::Stats => return self.stats(out),
            Command::OtherStats => b"END\r\n",
            Command::Version => {
                concat!("VERSION ", env!("CARGO_PKG_VERSION"), "-millrace\r\n").as_bytes()
            }
            _ => b"OK\r\n",
        };
        out.extend_from_slice(answer);
    }

    fn touch(&mut self, key: &[u8], expiry: i64) -> &'static [u8] {
        let Some(expires_ms) = self.expires_ms(expiry) else { return NO_DATES };
        self.counts.touch += 1;
        if !self.cache.touch(key, expires_ms, self.now_ms) {
            return b"NOT_FOUND\r\n";
        }
        self.counts.touch_hits += 1;
        b"TOUCHED\r\n"
    }

    fn flush(&mut self, delay: i64) -> &'static [u8] {
        self.counts.flush += 1;
        match self.expires_ms(delay) {
            None => return NO_DATES,
            Some(0 | 1) => {
                self.flush_at_ms = None;
                self.cache.flush();
            }
            Some(at) => self.flush_at_ms = Some(at),
        }
        b"OK\r\n"
    }

    fn count(&mut self, key: &[u8], by: u64, is_up: bool, out: &mut Vec<u8>) {
        let counts = &mut self.counts;
        let (hits, misses) = match is_up {
            true => (&mut counts.incr_hits, &mut counts.incr_misses),
            false => (&mut counts.decr_hits, &mut counts.decr_misses),
        };
        let Some(item) = self.cache.get(key, self.now_ms) else {
            *misses += 1;
            return out.extend_from_slice(b"NOT_FOUND\r\n");
        };
        *hits += 1;
        let (flags, old) = (item.flags, number(item.value.trim_ascii_end()));
        let Some(old) = old else { return out.extend_from_slice(NO_NUMBER) };
        let new = if is_up { old.wrapping_add(by) } else { old.saturating_sub(by) };
        let text = format!("{new}");
        let expires_ms = self.cache.expires_ms(key, self.now_ms);
        let value = text.as_bytes().to_vec();
        match self.cache.set(key, value, flags, expires_ms, self.now_ms) {
            Ok(_) => out.extend_from_slice(format!("{text}\r\n").as_bytes()),
            Err(_) => out.extend_from_slice(NO_MEMORY),
        }
    }

    fn stats(&self, out: &mut Vec<u8>) {
        let (counts, cache) = (&self.counts, self.cache.counters);
        let mut stat = |name: &str, value: u64| {
            out.extend_from_slice(format!("STAT {name} {value}\r\n").as_bytes());
        };
        stat("uptime", (self.now_ms - self.started_ms) / 1000);
        stat("pointer_size", usize::BITS.into());
        stat("curr_connections", self.clients as u64);
        stat("cmd_get", counts.get);
        stat("cmd_set", counts.set);
        stat("cmd_flush", counts.flush);
        stat("cmd_touch", counts.touch);
        stat("get_hits", counts.get_hits);
        stat("get_misses", counts.get - counts.get_hits);
        stat("get_expired", cache.expired);
        stat("delete_hits", counts.delete_hits);
        stat("delete_misses", counts.delete_misses);
        stat("incr_hits", counts.incr_hits);
        stat("incr_misses", counts.incr_misses);
        stat("decr_hits", counts.decr_hits);
        stat("decr_misses", counts.decr_misses);
        stat("cas_hits", counts.cas_hits);
        stat("cas_badval", counts.cas_bad);
        stat("cas_misses", counts.cas_misses);
        stat("touch_hits", counts.touch_hits);
        stat("touch_misses", counts.touch - counts.touch_hits);
        stat("limit_maxbytes", self.cache.limit_bytes() as u64);
        stat("bytes", self.cache.bytes() as u64);
        stat("curr_items", self.cache.len() as u64);
        stat("total_items", cache.stored);
        stat("evictions", cache.evicted);
        out.extend_from_slice(b"END\r\n");
    }
}
