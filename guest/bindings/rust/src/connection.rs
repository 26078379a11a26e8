//! Connections to the agent: made, used for a request, and kept for the next call.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_abi::Reason;
use guest_abi::program::{self, Answer, Request};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use rustix::process::{getegid, geteuid, getgid, getpid, getuid};
use zerocopy::{FromBytes, IntoBytes};

use crate::Error;

/// Most connections that are kept. Further calls at the same time make their own and close it.
pub const MAX_KEPT: usize = 16;

/// Idle connections and the process that made them: a child of `fork(2)` must not use its parent's.
struct Kept {
    owner: Option<rustix::process::Pid>,
    idle: Vec<Arc<OwnedFd>>,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept { owner: None, idle: Vec::new() });

fn kept() -> MutexGuard<'static, Kept> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let this = Some(getpid());
    if kept.owner != this {
        kept.idle.clear();
        kept.owner = this;
    }
    kept
}

/// Whether a call may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Waits for as long as it takes.
    Yes,
    /// Never waits, also not for an agent with a full backlog.
    No,
}

/// Connection with one request at a time.
#[derive(Debug)]
pub struct Connection(Arc<OwnedFd>);

/// Path of the agent's socket.
fn socket_path() -> PathBuf {
    let trusted = getuid() == geteuid() && getgid() == getegid();
    let other = std::env::var_os("MILLRACE_AGENT_SOCKET").filter(|_| trusted);
    other.map_or_else(|| PathBuf::from(program::SOCKET), PathBuf::from)
}

impl Connection {
    fn new(wait: Wait) -> Result<Self, Error> {
        let mut flags = SocketFlags::CLOEXEC;
        flags.set(SocketFlags::NONBLOCK, wait == Wait::No);
        let failed = |error| match error {
            Errno::AGAIN => Error::of(Reason::AgentBusy),
            _ => Error::no_agent(),
        };
        let address = SocketAddrUnix::new(socket_path()).map_err(failed)?;
        let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let fd = fd.map_err(failed)?;
        while let Err(error) = connect(&fd, &address) {
            if error != Errno::INTR {
                return Err(failed(error));
            }
        }
        // The connect alone needed it.
        ioctl_fionbio(&fd, false).map_err(failed)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Sends a request on a kept connection, or on a new one: the agent closes those that are idle
    /// for long.
    pub fn send(
        request: &Request,
        fds: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<Connection, Error> {
        for _ in 0..MAX_KEPT {
            let idle = kept().idle.pop();
            let Some(connection) = idle.map(Self) else { break };
            if connection.try_send(request, fds).is_ok() {
                return Ok(connection);
            }
        }
        let connection = Self::new(wait)?;
        match connection.try_send(request, fds) {
            Ok(()) => Ok(connection),
            Err(_) => Err(connection.refusal()),
        }
    }

    fn try_send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            // There is room for two.
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = [IoSlice::new(request.as_bytes())];
        loop {
            match sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// Reason why a new connection takes no request: the agent may have sent one before it closed.
    fn refusal(&self) -> Error {
        for _ in 0..2 {
            if let Ok(Some(answer)) = self.answer(Wait::No) {
                return Error::new(reason(&answer), answer.errno.get() as i32);
            }
        }
        Error::no_agent()
    }

    /// Reads the answer; none when it has not come yet.
    ///
    /// # Errors
    /// There will be no answer.
    pub fn answer(&self, wait: Wait) -> Result<Option<Answer>, Errno> {
        let mut bytes = [0; size_of::<Answer>() + 1];
        let flags = match wait {
            Wait::Yes => RecvFlags::empty(),
            Wait::No => RecvFlags::DONTWAIT,
        };
        let len = loop {
            match recv(&self.0, &mut bytes, flags) {
                Ok((len, _)) => break len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error),
            }
        };
        let answer = Answer::read_from_bytes(&bytes[..len]).map_err(|_| Errno::PROTO)?;
        let known =
            answer.magic.get() == program::MAGIC && answer.version.get() == program::VERSION;
        if known { Ok(Some(answer)) } else { Err(Errno::PROTO) }
    }

    /// Keeps the connection for the next call; the caller drops it now. Only after an answer.
    pub fn keep(&self) {
        let mut kept = kept();
        if kept.idle.len() < MAX_KEPT {
            kept.idle.push(self.0.clone());
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Reason in an answer.
pub fn reason(answer: &Answer) -> Reason {
    Reason::from_number(answer.reason.get())
}
