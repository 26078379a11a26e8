//! A file in memory that records every change and every sync.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use base::sync::lock;

use super::bytes::Bytes;
use crate::store::Store;

/// Event of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Bytes were written.
    Write {
        /// Offset in the file.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// A range was zeroed.
    Zero {
        /// Offset in the file.
        offset: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// The length was set.
    SetLen(u64),
    /// All before was made durable.
    Sync,
}

/// Recording file in memory.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Counts the events of this file, and of those beside it.
    clock: Arc<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes: Bytes,
    log: Vec<Event>,
    /// Clock's time of each event.
    times: Vec<u64>,
    /// Calls that may succeed before one fails.
    fail_after: Option<u64>,
    /// Changes before one that is made and fails, see [`Recorder::fail_one_made`].
    fail_made_after: Option<u64>,
    fail_syncs: bool,
    is_device: bool,
}

impl Recorder {
    /// A file with these bytes.
    pub fn new(bytes: Bytes) -> Self {
        Self::at(Arc::default(), bytes)
    }

    /// A second file with the same clock, so that the order of events is known.
    pub fn beside(&self, bytes: Bytes) -> Self {
        Self::at(Arc::clone(&self.clock), bytes)
    }

    fn at(clock: Arc<AtomicU64>, bytes: Bytes) -> Self {
        Self { clock, state: Mutex::new(State { bytes, ..State::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Events so far.
    pub fn count(&self) -> usize {
        self.lock().log.len()
    }

    /// Events so far, of this file and of those beside it: the time of the next one.
    pub fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    /// Takes the log.
    pub fn take_log(&self) -> Vec<Event> {
        self.take_log_with_times().0
    }

    /// Takes the log, and the time of each event.
    pub fn take_log_with_times(&self) -> (Vec<Event>, Vec<u64>) {
        let mut state = self.lock();
        (std::mem::take(&mut state.log), std::mem::take(&mut state.times))
    }

    fn change(&self, event: Event) -> io::Result<()> {
        self.lock().change(event, &self.clock)
    }

    /// The bytes as they are now.
    pub fn bytes(&self) -> Bytes {
        self.lock().bytes.clone()
    }

    /// Lets every change fail with ENOSPC after `changes` more; `None`: changes succeed again.
    pub fn fail_after(&self, changes: Option<u64>) {
        self.lock().fail_after = changes;
    }

    /// Lets one change fail with EIO after `changes` more; it is made nevertheless.
    pub fn fail_one_made(&self, changes: u64) {
        self.lock().fail_made_after = Some(changes);
    }

    /// Fixes the length, as of a device.
    pub fn be_device(&self) {
        self.lock().is_device = true;
    }

    /// Syncs fail with EIO.
    pub fn fail_syncs(&self, fail: bool) {
        self.lock().fail_syncs = fail;
    }
}

impl State {
    fn change(&mut self, event: Event, clock: &AtomicU64) -> io::Result<()> {
        match &mut self.fail_after {
            Some(0) => return Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            Some(left) => *left -= 1,
            None => {}
        }
        apply(&mut self.bytes, &event);
        self.note(event, clock);
        match &mut self.fail_made_after {
            Some(0) => {
                self.fail_made_after = None;
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn note(&mut self, event: Event, clock: &AtomicU64) {
        self.log.push(event);
        self.times.push(clock.fetch_add(1, SeqCst));
    }
}

/// Makes a change to bytes.
pub(super) fn apply(bytes: &mut Bytes, event: &Event) {
    match event {
        Event::Write { offset, data } => bytes.write(data, *offset),
        Event::Zero { offset, len_bytes } => bytes.zero(*offset, *len_bytes),
        Event::SetLen(len) => bytes.set_len(*len),
        Event::Sync => {}
    }
}

impl Store for Recorder {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.lock().bytes.read(buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.change(Event::Write { offset, data: buf.to_vec() })
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.fail_syncs {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        state.note(Event::Sync, &self.clock);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.change(Event::SetLen(len_bytes))
    }

    fn zero(&self, offset: u64, len_bytes: u64, _may_unmap: bool) -> io::Result<()> {
        self.change(Event::Zero { offset, len_bytes })
    }

    fn can_grow(&self) -> bool {
        !self.lock().is_device
    }
}
