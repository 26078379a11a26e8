//! Messages between the daemon and a VM's process of modules: one packet each, as JSON, some with
//! descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use base::packet::{self, MAX_FDS};
use rustix::io::Errno;
use rustix::net::SendFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::folder::Counts;
use crate::folder::written::Written;
use crate::limits::SYNC_CHARGE_BYTES;
use crate::{ModuleStats, ModulesError};

/// Limit of the length of a message: settings of 16 modules.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Modules whose counters are in one message: with histograms that have a value in each bucket they
/// take 8 KiB each.
pub(crate) const STATS_OF_MESSAGE: usize = 4;

/// Setup of a module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleSetup {
    /// Name.
    pub name: String,
    /// SHA-256 of its WebAssembly, in hexadecimal digits.
    pub hash: String,
    /// Limit of the CPU time of a call.
    pub deadline_ms: u32,
    /// Share of a core that its thread may take, in percent.
    pub cpu_percent: u32,
    /// Limit of its memory.
    pub memory_bytes: u64,
    /// Limit of the bytes of its files.
    pub disk_bytes: u64,
}

/// Setup of a region for rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingSetup {
    /// Length in bytes.
    pub bytes: u64,
    /// Time for which modules look at rings before they sleep.
    pub spin_us: u32,
}

/// Message of the daemon to a process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ToProcess {
    /// Sets the process up, first of all. With the descriptors of each module's code and folder, in
    /// turn, and of the region for rings.
    Setup {
        /// Name of the VM.
        vm: String,
        /// Modules.
        modules: Vec<ModuleSetup>,
        /// Region for rings, if there is one.
        ring: Option<RingSetup>,
        /// Whether the guest's requests come by rings alone.
        needs_ring: bool,
    },
    /// Connection, with its descriptor.
    Connection {
        /// Whether it is the guest's; else it is one of a program of the host.
        of_guest: bool,
    },
    /// Tells that the guest has gone, or begun anew: its clients go, and do not linger.
    GuestGone,
    /// Asks for [`FromProcess::Stats`].
    Stats,
    /// Asks for a step of a copy of a module's files, answered by [`FromProcess::Copied`] between
    /// two calls.
    Copy {
        /// Name of the module.
        module: String,
        /// Number of the step, for its answer.
        turn: u64,
        /// Step.
        step: CopyStep,
    },
    /// Tells the process to finish, and to end.
    End,
}

/// Step of a copy of a module's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyStep {
    /// Begin to log what is written.
    Begin,
    /// Tell what was written since the last step.
    Look,
    /// Tell the same, and write nothing until [`CopyStep::End`], or for too long.
    Hold,
    /// End the copy. An error: the files were not held still up to now.
    End,
}

/// Message of a process to the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FromProcess {
    /// The process has loaded the code, and waits for the folders.
    Loaded,
    /// The process is confined, and takes connections.
    Ready,
    /// Result of the first start of a module.
    Started {
        /// Name of the module.
        module: String,
        /// Reason of a failure; none: it started.
        failed: Option<String>,
    },
    /// The process cannot run, for this reason, and ends.
    Failed(String),
    /// Counters of modules: as many as a message has room for ([`STATS_OF_MESSAGE`]).
    Stats {
        /// Counters.
        stats: Vec<ModuleStats>,
        /// Whether it is the last message of the answer.
        last: bool,
    },
    /// Use of the disk by a module since its last report.
    Used(DiskUse),
    /// Answer to a step of a copy.
    Copied {
        /// Number of the step.
        turn: u64,
        /// Parts that were written; an error: why the files cannot be copied.
        written: Result<Written, String>,
    },
}

/// Use of the disk by a VM's modules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUse {
    /// Bytes read and written, and [`SYNC_CHARGE_BYTES`] for each sync.
    pub bytes: u64,
    /// Number of syncs: what is written before one is one request for the disk.
    pub requests: u32,
}

impl DiskUse {
    /// Use between two moments.
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
    if fds.len() > MAX_FDS {
        return Err(ModulesError::Control(format!("more than {MAX_FDS} descriptors")));
    }
    packet::send(socket, &text, fds, flags).map_err(failed("sending"))
}

/// Receives a message. None: the other end has gone.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
) -> Result<Option<(T, Vec<OwnedFd>)>, ModulesError> {
    let mut text = vec![0; MAX_MESSAGE_BYTES];
    let got = packet::receive(socket, &mut text).map_err(failed("receiving"))?;
    let Some((len, fds)) = got else { return Ok(None) };
    let message = serde_json::from_slice(&text[..len])
        .map_err(|e| ModulesError::Control(format!("a message: {e}")))?;
    Ok(Some((message, fds)))
}
