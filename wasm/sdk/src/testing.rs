//! A host for tests: files in memory that lose what was not synced, faults on demand, a clock that
//! stands still until it is told to go on.
//!
//! # Theory of operation
//! Each file has the bytes that its last sync made durable, and the changes since then.
//! [`TestHost::crash`] is a power cut: for each file it keeps all changes, none, the first few and
//! a part of the next, or any of them; names that were made or removed and not synced may be back
//! where they were. [`TestHost::kill`] is the end of the process alone: the kernel has all bytes.
//! Both forget handles and held replies. All chance comes from one seed.
//!
//! A reply with [`reply::DURABLE`] is held until [`TestHost::release`], which stands for the real
//! host's thread: it syncs all files and then hands out what was held.
//!
//! [`TestHost::die_after`] ends the host in the middle of a call: from then on every call fails and
//! does nothing. [`TestHost::fail`] makes single calls fail.

mod disk;
mod events;

pub use events::EventBytes;

use std::collections::BTreeMap;
use std::string::String;
use std::vec::Vec;

use guest_abi::module_call as abi;

use disk::{Change, Inode};

use crate::{Errno, Events, File, Host, Module, open, reply};

/// The calls that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`Host::open`].
    Open,
    /// [`Host::len`].
    Len,
    /// [`Host::read`].
    Read,
    /// [`Host::write`].
    Write,
    /// [`Host::append`].
    Append,
    /// [`Host::sync`].
    Sync,
    /// [`Host::truncate`].
    Truncate,
    /// [`Host::rename`].
    Rename,
    /// [`Host::remove`].
    Remove,
    /// [`Host::list`].
    List,
}

/// A reply that the module gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// To whom.
    pub client: u32,
    /// To which request.
    pub seq: u64,
    /// [`reply`]'s flags.
    pub flags: u32,
    /// Bytes of the reply.
    pub body: Vec<u8>,
}

impl Reply {
    /// Whether it waits for a sync.
    pub fn is_durable(&self) -> bool {
        self.flags & reply::DURABLE != 0
    }
}

/// A small generator of numbers.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Begins with a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any() % end.max(1)
    }
}

/// A call that is to fail.
#[derive(Debug, Clone, Copy)]
struct Fault {
    /// Kind of the calls; none: any.
    call: Option<Call>,
    /// Number of calls that succeed first.
    after: u64,
    /// Number of calls that fail then.
    times: u64,
    errno: Errno,
}

/// The host.
#[derive(Debug, Clone)]
pub struct TestHost {
    inodes: BTreeMap<u64, Inode>,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    handles: BTreeMap<i32, u64>,
    next: u64,
    faults: Vec<Fault>,
    life: Option<u64>,
    rng: Rng,
    now_ms: u64,
    wake_at_ms: Option<u64>,
    held: Vec<Reply>,
    out: Vec<Reply>,
    /// Limit of the bytes of all files; appends and writes beyond fail with [`Errno::NOSPC`].
    pub capacity_bytes: u64,
    /// The clock goes on by so much each time that it is looked at.
    pub tick_ms: u64,
    /// Number of calls of each kind.
    pub calls: BTreeMap<&'static str, u64>,
    /// Lines of the log, with their levels.
    pub lines: Vec<(u32, String)>,
}

impl TestHost {
    /// Begins without files.
    pub fn new(seed: u64) -> Self {
        Self {
            inodes: BTreeMap::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            handles: BTreeMap::new(),
            next: 1,
            faults: Vec::new(),
            life: None,
            rng: Rng::new(seed),
            now_ms: 1_000,
            wake_at_ms: None,
            held: Vec::new(),
            out: Vec::new(),
            capacity_bytes: u64::MAX,
            tick_ms: 0,
            calls: BTreeMap::new(),
            lines: Vec::new(),
        }
    }

    /// Hands events to a module.
    pub fn serve<M: Module>(&mut self, module: &mut M, events: &EventBytes) -> Result<(), Errno> {
        if self.wake_at_ms.is_some_and(|at| at <= self.now_ms) {
            self.wake_at_ms = None;
        }
        module.serve(self, Events::new(&events.bytes))
    }

    /// The replies that clients got since the last call: those that are not held.
    pub fn replies(&mut self) -> Vec<Reply> {
        std::mem::take(&mut self.out)
    }

    /// Replies that wait for [`TestHost::release`].
    pub fn held(&self) -> &[Reply] {
        &self.held
    }

    /// Makes all durable, and hands out the replies that waited for it.
    pub fn release(&mut self) {
        if self.life == Some(0) {
            return;
        }
        self.sync_all();
        self.out.append(&mut self.held);
    }

    /// Makes all durable; held replies stay.
    pub fn sync_all(&mut self) {
        self.inodes.values_mut().for_each(Inode::sync);
        self.durable_names = self.names.clone();
    }

    /// A power cut. What was not synced may be there or not.
    pub fn crash(&mut self) {
        let mut rng = self.rng.clone();
        let mut names = self.durable_names.clone();
        for (name, inode) in &self.names {
            if self.durable_names.get(name) != Some(inode) && rng.below(2) == 0 {
                names.insert(name.clone(), *inode);
            }
        }
        for name in self.durable_names.keys() {
            if !self.names.contains_key(name) && rng.below(2) == 0 {
                names.remove(name);
            }
        }
        self.inodes.values_mut().for_each(|inode| inode.crash(&mut rng));
        self.rng = rng;
        self.names = names.clone();
        self.durable_names = names;
        self.forget();
    }

    /// The process ends, the machine goes on: all bytes are there, and those that were not synced
    /// may still be lost by a power cut that follows.
    pub fn kill(&mut self) {
        self.forget();
    }

    fn forget(&mut self) {
        let (now, durable) = (&self.names, &self.durable_names);
        self.inodes.retain(|id, _| now.values().chain(durable.values()).any(|n| n == id));
        self.handles.clear();
        self.held.clear();
        self.out.clear();
        self.faults.clear();
        self.life = None;
        self.wake_at_ms = None;
    }

    /// After so many more calls about files the host is dead: nothing has an effect any more. What
    /// follows is [`TestHost::crash`] or [`TestHost::kill`].
    pub fn die_after(&mut self, calls: u64) {
        self.life = Some(calls);
    }

    /// Whether [`TestHost::die_after`] has come true.
    pub fn is_dead(&self) -> bool {
        self.life == Some(0)
    }

    /// After `after` more calls of that kind (none: of any), `times` of them fail.
    pub fn fail(&mut self, call: Option<Call>, after: u64, times: u64, errno: Errno) {
        self.faults.push(Fault { call, after, times, errno });
    }

    /// No call fails any more.
    pub fn heal(&mut self) {
        self.faults.clear();
    }

    /// Time goes on.
    pub fn advance(&mut self, ms: u64) {
        self.now_ms += ms;
    }

    /// Time at which the module wants to be called.
    pub fn wake_at_ms(&self) -> Option<u64> {
        self.wake_at_ms
    }

    /// Time goes on to where the module wants to be woken; false: it does not want to.
    pub fn advance_to_wake(&mut self) -> bool {
        self.now_ms = self.now_ms.max(self.wake_at_ms.unwrap_or(0));
        self.wake_at_ms.is_some()
    }

    /// The names of files.
    pub fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    /// A file's bytes, as they are now.
    pub fn bytes(&self, name: &str) -> Option<&Vec<u8>> {
        Some(&self.inodes.get(self.names.get(name)?)?.now)
    }

    /// Puts a file there, durably.
    pub fn put(&mut self, name: &str, bytes: &[u8]) {
        let id = self.next;
        self.next += 1;
        let (synced, now) = (bytes.to_vec(), bytes.to_vec());
        self.inodes.insert(id, Inode { synced, now, changes: Vec::new() });
        self.names.insert(name.into(), id);
        self.durable_names.insert(name.into(), id);
    }

    /// Bytes of all files that have a name.
    pub fn used_bytes(&self) -> u64 {
        let inodes = self.names.values().filter_map(|id| self.inodes.get(id));
        inodes.map(|inode| inode.now.len() as u64).sum()
    }

    fn called(&mut self, call: Call, name: &'static str) -> Result<(), Errno> {
        *self.calls.entry(name).or_default() += 1;
        match &mut self.life {
            Some(0) => return Err(Errno::IO),
            Some(left) => *left -= 1,
            None => {}
        }
        let mut failed = Ok(());
        for fault in self.faults.iter_mut().filter(|f| f.call.is_none_or(|c| c == call)) {
            match (fault.after, fault.times) {
                (0, 0) => {}
                (0, _) => {
                    fault.times -= 1;
                    failed = Err(fault.errno);
                }
                _ => fault.after -= 1,
            }
        }
        failed
    }

    fn inode(&mut self, file: File) -> Result<&mut Inode, Errno> {
        let id = self.handles.get(&file.0).ok_or(Errno::BADF)?;
        self.inodes.get_mut(id).ok_or(Errno::BADF)
    }

    fn room(&self, more: u64) -> Result<(), Errno> {
        let fits = self.used_bytes().saturating_add(more) <= self.capacity_bytes;
        fits.then_some(()).ok_or(Errno::NOSPC)
    }
}

fn checked_name(name: &str) -> Result<(), Errno> {
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
    let length = 1..=abi::MAX_FILE_NAME_BYTES;
    let fine = name.bytes().all(fine) && length.contains(&name.len()) && !name.starts_with('.');
    fine.then_some(()).ok_or(Errno::INVAL)
}

impl Host for TestHost {
    fn reply(&mut self, client: u32, seq: u64, flags: u32, body: &[u8]) -> Result<(), Errno> {
        if self.is_dead() {
            return Err(Errno::IO);
        }
        let made = Reply { client, seq, flags, body: body.to_vec() };
        if made.is_durable() {
            self.held.push(made)
        } else {
            self.out.push(made)
        }
        Ok(())
    }

    fn open(&mut self, name: &str, flags: u32) -> Result<File, Errno> {
        self.called(Call::Open, "open")?;
        checked_name(name)?;
        let id = match self.names.get(name) {
            Some(id) => *id,
            None if flags & open::CREATE == 0 => return Err(Errno::NOENT),
            None => {
                let id = self.next;
                self.inodes.insert(id, Inode::default());
                self.names.insert(name.into(), id);
                id
            }
        };
        if flags & open::TRUNCATE != 0 {
            self.inodes.entry(id).or_default().change(Change::Len(0));
        }
        if self.handles.len() >= abi::MAX_FILES {
            return Err(Errno::MFILE);
        }
        self.next += 1;
        let handle = self.next as i32;
        self.handles.insert(handle, id);
        Ok(File(handle))
    }

    fn close(&mut self, file: File) {
        self.handles.remove(&file.0);
    }

    fn len(&mut self, file: File) -> Result<u64, Errno> {
        self.called(Call::Len, "len")?;
        Ok(self.inode(file)?.now.len() as u64)
    }

    fn read(&mut self, file: File, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.called(Call::Read, "read")?;
        let bytes = &self.inode(file)?.now;
        let at = usize::try_from(at).map_err(|_| Errno::INVAL)?.min(bytes.len());
        let len = into.len().min(bytes.len() - at);
        into[..len].copy_from_slice(&bytes[at..at + len]);
        Ok(len)
    }

    fn write(&mut self, file: File, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.called(Call::Write, "write")?;
        let len = self.inode(file)?.now.len() as u64;
        self.room((at + bytes.len() as u64).saturating_sub(len))?;
        self.inode(file)?.change(Change::Write(at, bytes.to_vec()));
        Ok(())
    }

    fn append(&mut self, file: File, bytes: &[u8]) -> Result<u64, Errno> {
        self.called(Call::Append, "append")?;
        let at = self.inode(file)?.now.len() as u64;
        self.room(bytes.len() as u64)?;
        self.inode(file)?.change(Change::Write(at, bytes.to_vec()));
        Ok(at)
    }

    fn sync(&mut self, file: File) -> Result<(), Errno> {
        self.called(Call::Sync, "sync")?;
        self.inode(file)?.sync();
        let id = self.handles.get(&file.0).copied();
        for (name, _) in self.names.iter().filter(|(_, n)| Some(**n) == id) {
            self.durable_names.insert(name.clone(), id.unwrap_or(0));
        }
        Ok(())
    }

    fn truncate(&mut self, file: File, len_bytes: u64) -> Result<(), Errno> {
        self.called(Call::Truncate, "truncate")?;
        let len = self.inode(file)?.now.len() as u64;
        if len_bytes > len {
            self.room(len_bytes - len)?;
        }
        self.inode(file)?.change(Change::Len(len_bytes));
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        self.called(Call::Rename, "rename")?;
        checked_name(to)?;
        let id = self.names.remove(from).ok_or(Errno::NOENT)?;
        self.names.insert(to.into(), id);
        self.durable_names.remove(from);
        self.durable_names.insert(to.into(), id);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> Result<(), Errno> {
        self.called(Call::Remove, "remove")?;
        self.names.remove(name).map(drop).ok_or(Errno::NOENT)
    }

    fn list(&mut self) -> Result<Vec<String>, Errno> {
        self.called(Call::List, "list")?;
        Ok(self.names())
    }

    fn now_ms(&mut self) -> u64 {
        self.now_ms += self.tick_ms;
        self.now_ms
    }

    fn random(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        into.iter_mut().for_each(|b| *b = self.rng.any() as u8);
        Ok(())
    }

    fn wake_after(&mut self, ms: u32) {
        let at = self.now_ms + u64::from(ms);
        self.wake_at_ms = Some(self.wake_at_ms.map_or(at, |old| old.min(at)));
    }

    fn log(&mut self, level: u32, text: &str) {
        self.lines.push((level, text.into()));
    }
}

#[cfg(test)]
mod tests;
