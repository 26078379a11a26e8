//! A file from a VM's disk to a client, as in the vPipe paper: the VM shares its CPU with busy
//! ones.
//!
//! # Theory of operation
//! One server VM and up to three neighbours whose guests run a busy loop share one host CPU
//! ([`bed`]). The daemon, with its sidecore, its pipes' threads and their twins, and the client
//! run on another, as the paper's driver domain does.
//!
//! Part one ([`files`]; figures 3 and 4): one connection, one file, moved by a pipe, by `sendfile`
//! or by `read` and `write`, with 0 to 3 busy neighbours, each with the guest's page cache cold and
//! warm. A process of the host that sends the same bytes by `sendfile` over a veth pair into the
//! same bridge is the reference. CPU time is read thread by thread and told by component
//! ([`meter`]).
//!
//! Part two ([`servers`]; figure 5): nginx and lighttpd, unmodified, with the preload shim against
//! without, over file sizes and some keep-alive connections.
//!
//! A round is everything once. Who begins changes from round to round, and the first round is
//! thrown away; rows ([`rows`]) are medians of the rounds' own ratios.
//!
//! # Limits
//! - Files of 1 to 1,024 MiB: one pipe moves no more, and the guest's memory holds the file, so
//!   that its cache can be warm.
//! - Guests are emulated: a byte that passes through a guest costs several times what it costs
//!   under KVM, so the CPU that pipes save is overstated.
//! - The client shares its CPU with the daemon; in the paper it is another machine.
//! - What the guest does after the client has everything is counted for [`files::TAIL`] only.

pub mod bed;
pub(crate) mod command;
pub mod fetch;
pub mod files;
pub mod http;
pub mod meter;
pub mod output;
pub mod plot;
pub mod reference;
pub mod rounds;
pub mod rows;
pub mod servers;
#[cfg(test)]
mod testing;

use std::path::PathBuf;
use std::time::Duration;

use lab::KernelChoice;
use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::{self, Failure};
use meter::Cpu;

/// Failures of a load after which it is not put on any more: those of one round.
const GIVEN_UP: usize = 2;

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Rounds that count.
    pub rounds: u32,
    /// The file of part one.
    pub file_bytes: u64,
    /// Least time of a load.
    pub length: Duration,
    /// Numbers of busy neighbours of part one.
    pub busy: Vec<usize>,
    /// Web servers of part two.
    pub servers: Vec<Server>,
    /// File sizes of part two.
    pub sizes_bytes: Vec<u64>,
    /// Numbers of busy neighbours in part two.
    pub servers_busy: Vec<usize>,
    /// Number of keep-alive connections in part two.
    pub connections: usize,
    /// Smallest file that the shim pipes; its own default when left out.
    pub min_bytes: Option<u64>,
    /// The CPU of all VMs, and that of everything else.
    pub cpus: (usize, usize),
    /// Kernel of all guests.
    pub kernel: KernelChoice,
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// More lines for the daemon's `[sidecore]` table.
    pub sidecore: String,
    /// Folder of the results and, meanwhile, the disks.
    pub out: PathBuf,
}

impl Setup {
    /// Bytes of all files of part two.
    pub fn servers_files_bytes(&self) -> u64 {
        if self.servers.is_empty() { 0 } else { self.sizes_bytes.iter().sum() }
    }
}

/// A web server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    /// Web server nginx, one worker.
    Nginx,
    /// Web server lighttpd.
    Lighttpd,
}

impl Server {
    /// Name of the server in results.
    pub fn name(self) -> &'static str {
        match self {
            Server::Nginx => "nginx",
            Server::Lighttpd => "lighttpd",
        }
    }
}

/// Mover of the bytes in part one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The host, by a pipe.
    Pipe,
    /// The guest's kernel.
    Sendfile,
    /// The guest's program.
    ReadWrite,
    /// A process of the host, without VM.
    HostSendfile,
}

impl Mode {
    /// Modes that run in the guest.
    pub const IN_GUEST: [Mode; 3] = [Mode::Pipe, Mode::Sendfile, Mode::ReadWrite];

    /// Name of the mode in results.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Pipe => "pipe",
            Mode::Sendfile => "sendfile",
            Mode::ReadWrite => "read-write",
            Mode::HostSendfile => "host-sendfile",
        }
    }
}

/// State of the guest's page cache before a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Empty: the guest reads its disk.
    Cold,
    /// Full: the whole file is in it.
    Warm,
}

impl Cache {
    /// Both.
    pub const ALL: [Cache; 2] = [Cache::Cold, Cache::Warm];

    /// Name of the cache's state in results.
    pub fn name(self) -> &'static str {
        match self {
            Cache::Cold => "cold",
            Cache::Warm => "warm",
        }
    }
}

/// Sample that a load gave.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Throughput at the client.
    pub mb_per_s: f64,
    /// CPU time by component.
    pub cpu: Cpu,
    /// Part of the CPU that lost most which a hypervisor took.
    pub stolen: f64,
    /// Part of the machine that strangers used; the kernel's threads are among them.
    pub foreign: f64,
}

/// A load of part one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileLoad {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// Busy neighbours.
    pub busy: usize,
    /// State of the guest's page cache.
    pub cache: Cache,
    /// Mode that moved the bytes.
    pub mode: Mode,
    /// Sample that the load gave.
    pub sample: Sample,
}

/// A load of part two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerLoad {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// Busy neighbours.
    pub busy: usize,
    /// The program.
    pub server: Server,
    /// Length of each file.
    pub size_bytes: u64,
    /// With the shim.
    pub shim: bool,
    /// Complete requests.
    pub requests_per_s: f64,
    /// Part of the bytes that pipes moved, as the daemon counts.
    pub piped: f64,
    /// The rest.
    pub sample: Sample,
}

/// Everything that was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Part one.
    pub files: Vec<FileLoad>,
    /// Part two.
    pub servers: Vec<ServerLoad>,
    /// Loads that failed, and why; those put on again with success are marked so.
    pub failed: Vec<Failure>,
    /// Text in which the agent names the smallest pipe that pays.
    #[serde(default)]
    pub threshold: String,
}

/// Runs a load as [`repeat::with_repeats`] does, noted with what was measured.
fn with_repeats<T>(
    name: (&str, &str),
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
    load: impl FnMut(u32) -> Result<T, BenchError>,
) -> Option<T> {
    repeat::with_repeats(GIVEN_UP, name, round, &mut measured.failed, progress, load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_fails_is_put_on_again_and_noted() {
        let mut quiet = Progress::to(Box::new(std::io::sink()), false);
        let mut measured = Measured::default();
        let mut times = 0;
        let mut load = |fail_times: u32, measured: &mut Measured| {
            times = 0;
            with_repeats(("c", "pipe"), 3, measured, &mut quiet, |time| {
                times = time + 1;
                let fails = time < fail_times;
                if fails { Err(BenchError::lab("x", "y\nconsole")) } else { Ok(times) }
            })
        };
        assert_eq!(load(0, &mut measured), Some(1));
        assert!(measured.failed.is_empty());
        assert_eq!(load(1, &mut measured), Some(2));
        assert_eq!(load(9, &mut measured), None);
        let told: Vec<_> = measured.failed.iter().map(|f| (f.why.as_str(), f.repeated)).collect();
        assert_eq!(
            told,
            [("round 3: x: y", true), ("round 3: x: y", false), ("round 3: x: y", false)]
        );
    }
}
