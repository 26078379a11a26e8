//! Inbox of a module's thread: messages of other threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use base::sync::lock;
use rustix::event::{EventfdFlags, eventfd};

use crate::clients::ClientId;
use crate::control::CopyStep;
use crate::folder::written::Written;
use crate::limits::MAX_CLIENTS;
use crate::{ModuleStats, ModulesError};

/// Message of another thread to a module's thread.
#[derive(Debug)]
pub(crate) enum Message {
    /// Connection that said hello.
    Connection {
        fd: OwnedFd,
        client: ClientId,
        /// Whether it is the guest's; else it is one of a program of the host.
        of_guest: bool,
    },
    /// Clients of the guest are gone.
    GuestGone,
    /// Wants the counters.
    Stats(std::sync::mpsc::SyncSender<ModuleStats>),
    /// Wants a step of a copy of the files.
    Copy(CopyStep, CopyAnswer),
    /// Wants it to finish, and to end.
    End,
}

/// Takes the result of a step of a copy.
pub(crate) struct CopyAnswer(pub Box<dyn FnOnce(Result<Written, String>) + Send>);

impl std::fmt::Debug for CopyAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CopyAnswer")
    }
}

/// Inbox of a module's thread.
#[derive(Debug)]
pub(crate) struct Inbox {
    messages: Mutex<Vec<Message>>,
    event: OwnedFd,
}

impl Inbox {
    pub fn new() -> Result<Self, ModulesError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ModulesError::io("making an event"))?;
        Ok(Self { messages: Mutex::default(), event })
    }

    pub fn send(&self, message: Message) {
        let mut all = lock(&self.messages);
        if matches!(message, Message::GuestGone) {
            // However often it is sent: what came before is over, and takes no room.
            let over = |t: &Message| {
                matches!(t, Message::GuestGone | Message::Connection { of_guest: true, .. })
            };
            all.retain(|t| !over(t));
        }
        // A connection that finds no room is closed: its program connects again.
        if all.len() < MAX_CLIENTS || !matches!(message, Message::Connection { .. }) {
            all.push(message);
        }
        drop(all);
        // Full: then it is told already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    pub fn take(&self) -> Vec<Message> {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        std::mem::take(&mut *lock(&self.messages))
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
