//! What the daemon and a VM's process of modules say to each other: one packet, one message, as JSON, with
//! descriptors where it says so.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::folder::Counts;
use crate::folder::written::Written;
use crate::limits::SYNC_CHARGE_BYTES;
use crate::{ModuleStats, ModulesError};

/// Longest message: settings of 16 modules.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Modules whose counters are in one message: with histograms that have a value in each bucket they take
/// 8 KiB each.
pub(crate) const STATS_OF_MESSAGE: usize = 4;

/// Most descriptors of a message: code and folder of 16 modules, and a region for rings.
const MAX_FDS: usize = 33;

/// How a module is to be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleSetup {
    /// Its name.
    pub name: String,
    /// SHA-256 of its WebAssembly, in hexadecimal digits.
    pub hash: String,
    /// CPU time of a call.
    pub deadline_ms: u32,
    /// Share of a core that its thread may take, in percent.
    pub cpu_percent: u32,
    /// Most memory.
    pub memory_bytes: u64,
    /// Most bytes of files.
    pub disk_bytes: u64,
}

/// A region for rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingSetup {
    /// Its length.
    pub bytes: u64,
    /// How long modules look at rings before they sleep.
    pub spin_us: u32,
}

/// Daemon to process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ToProcess {
    /// First. With the descriptors of each module's code and folder, in turn, and of the region for rings.
    Setup {
        /// Whose process it is.
        vm: String,
        /// What it runs.
        modules: Vec<ModuleSetup>,
        /// None: there is no region.
        ring: Option<RingSetup>,
        /// The guest's requests come by rings alone.
        needs_ring: bool,
    },
    /// A connection, with its descriptor.
    Connection {
        /// Of the guest; else of a program of the host.
        of_guest: bool,
    },
    /// The guest has gone, or begun anew: all that was its is over, and nothing of it lingers.
    GuestGone,
    /// Asks for [`FromProcess::Stats`].
    Stats,
    /// A step of a copy of a module's files, answered by [`FromProcess::Copied`] between two calls.
    Copy {
        /// Whose files.
        module: String,
        /// Which answer is meant.
        turn: u64,
        /// What is to be done.
        step: CopyStep,
    },
    /// Finish, and end.
    End,
}

/// A step of a copy of a module's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyStep {
    /// From now on what is written is logged.
    Begin,
    /// What was written since the last step.
    Look,
    /// The same, and nothing more is written until [`CopyStep::End`], or for too long.
    Hold,
    /// It is over. An error: the files were not held still up to now.
    End,
}

/// Process to daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FromProcess {
    /// It has loaded the code, and waits for the folders.
    Loaded,
    /// It is confined, and takes connections.
    Ready,
    /// How the first start of a module went.
    Started {
        /// Which.
        module: String,
        /// Why it failed; none: it did not.
        failed: Option<String>,
    },
    /// It cannot: why. It ends.
    Failed(String),
    /// Of some modules: all that a message has room for, in any case ([`STATS_OF_MESSAGE`]).
    Stats {
        /// Theirs.
        stats: Vec<ModuleStats>,
        /// The others were told before.
        last: bool,
    },
    /// What a module did with its files since it said so last.
    Used(DiskUse),
    /// What was written, as the step of this turn asked for.
    Copied {
        /// Which.
        turn: u64,
        /// An error: why it cannot be copied.
        written: Result<Written, String>,
    },
}

/// What the disk had to do for a VM's modules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUse {
    /// Bytes read and written, and [`SYNC_CHARGE_BYTES`] for each sync.
    pub bytes: u64,
    /// Syncs: what is written in front of one is one request for the disk.
    pub requests: u32,
}

impl DiskUse {
    /// What was done between two moments.
    pub(crate) fn between(before: Counts, now: Counts) -> Self {
        let bytes = |c: Counts| c.written_bytes.saturating_add(c.read_bytes);
        let syncs = now.syncs.saturating_sub(before.syncs);
        let moved = bytes(now).saturating_sub(bytes(before));
        Self {
            bytes: moved.saturating_add(syncs.saturating_mul(SYNC_CHARGE_BYTES)),
            requests: u32::try_from(syncs).unwrap_or(u32::MAX),
        }
    }
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> ModulesError {
    move |e| ModulesError::Control(format!("{what}: {e}"))
}

/// Sends a message.
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), ModulesError> {
    let text = serde_json::to_vec(message).map_err(|e| ModulesError::Control(e.to_string()))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(ModulesError::Control(format!("more than {MAX_FDS} descriptors")));
    }
    let pieces = [std::io::IoSlice::new(&text)];
    let flags = flags | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket.as_fd(), &pieces, &mut ancillary, flags)
    })
    .map(drop)
    .map_err(failed("sending"))
}

/// Receives a message. None: the other end has gone.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> Result<Option<(T, Vec<OwnedFd>)>, ModulesError> {
    let mut text = vec![0; MAX_MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut pieces = [std::io::IoSliceMut::new(&mut text)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket.as_fd(), &mut pieces, &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            got => break got.map_err(failed("receiving"))?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(got) = message {
            fds.extend(got);
        }
    }
    let message = serde_json::from_slice(&text[..got.bytes])
        .map_err(|e| ModulesError::Control(format!("a message: {e}")))?;
    Ok(Some((message, fds)))
}
