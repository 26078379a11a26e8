//! What other threads tell a module's thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::clients::ClientId;
use crate::control::Step;
use crate::folder::written::Written;
use crate::limits::MAX_CLIENTS;
use crate::{ModuleStats, ModulesError};

/// What other threads tell a module's thread.
#[derive(Debug)]
pub(crate) enum Told {
    /// A connection that said hello.
    Connection {
        fd: OwnedFd,
        client: ClientId,
        /// Else it is one of a program of the host.
        of_guest: bool,
    },
    /// Clients of the guest are no more.
    GuestGone,
    /// Whoever asks gets the counters.
    Stats(std::sync::mpsc::SyncSender<ModuleStats>),
    /// A step of a copy of the files, and who is told.
    Copy(Step, Copied),
    /// Finish, and end.
    End,
}

/// Is told what a step of a copy said.
pub(crate) struct Copied(pub Box<dyn FnOnce(Result<Written, String>) + Send>);

impl std::fmt::Debug for Copied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Copied")
    }
}

/// Where they tell it.
#[derive(Debug)]
pub(crate) struct Inbox {
    told: Mutex<Vec<Told>>,
    event: OwnedFd,
}

impl Inbox {
    pub fn new() -> Result<Self, ModulesError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ModulesError::io("making an event"))?;
        Ok(Self { told: Mutex::default(), event })
    }

    pub fn tell(&self, told: Told) {
        let mut all = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(told, Told::GuestGone) {
            // However often it is told so: what came before is over, and takes no room.
            let over =
                |t: &Told| matches!(t, Told::GuestGone | Told::Connection { of_guest: true, .. });
            all.retain(|t| !over(t));
        }
        // A connection that finds no room is closed: its program connects again.
        if all.len() < MAX_CLIENTS || !matches!(told, Told::Connection { .. }) {
            all.push(told);
        }
        drop(all);
        // Full: then it is told already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn take(&self) -> Vec<Told> {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
