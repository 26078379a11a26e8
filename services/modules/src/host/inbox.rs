//! Requests to the thread of a VM's modules.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use base::sync::lock;
use rustix::event::{EventfdFlags, eventfd};

use super::config::ModuleConfig;
use crate::control::CopyStep;
use crate::folder::written::Written;
use crate::{ModuleStats, ModulesError};

/// Limit of connections that wait for a process.
pub(super) const MAX_WAITING: usize = 256;

/// Request to the thread.
#[derive(Debug)]
pub(super) enum Request {
    /// Whether it is the guest's.
    Connection(OwnedFd, bool),
    GuestGone,
    Stats(SyncSender<Vec<ModuleStats>>),
    Load(Vec<ModuleConfig>, SyncSender<Result<(), String>>),
    Copy(String, CopyStep, SyncSender<Result<Written, String>>),
    Drain(SyncSender<Result<(), String>>),
    Resume(SyncSender<Result<(), String>>),
}

/// Requests to the thread, and what it tells without being asked.
#[derive(Debug)]
pub(super) struct Inbox {
    requests: SyncSender<Request>,
    pub event: OwnedFd,
    /// Reason why no process is ready, when the last one ended before that.
    trouble: Mutex<Option<String>>,
    stopping: AtomicBool,
    /// Number of lines of processes that were not logged.
    pub dropped: Arc<AtomicU64>,
}

impl Inbox {
    /// Makes an empty inbox, with the receiver for the thread.
    pub fn new() -> Result<(Self, Receiver<Request>), ModulesError> {
        let (requests, receiver) = sync_channel(MAX_WAITING);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ModulesError::io("making an event"))?;
        let inbox = Self {
            requests,
            event,
            trouble: Mutex::default(),
            stopping: AtomicBool::new(false),
            dropped: Arc::default(),
        };
        Ok((inbox, receiver))
    }

    pub fn trouble(&self) -> Option<String> {
        lock(&self.trouble).clone()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn ring(&self) {
        // Full: then it is told already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn note(&self, trouble: Option<String>) {
        *lock(&self.trouble) = trouble;
    }

    /// Waits for room, however many connections come: the thread takes all that there is with each
    /// turn.
    pub fn ask_surely(&self, request: Request) -> Result<(), ModulesError> {
        self.ring();
        self.requests.send(request).map_err(|_| ModulesError::Control("it has ended".into()))?;
        self.ring();
        Ok(())
    }

    /// False: there is no room.
    pub fn ask(&self, request: Request) -> bool {
        let taken = self.requests.try_send(request).is_ok();
        self.ring();
        taken
    }

    /// Has the thread end.
    pub fn begin_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.ring();
    }
}
