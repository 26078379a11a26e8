//! The command line of `frontend`: one run, one JSON object on standard output.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::access::Access;
use crate::disk::{DiskLoad, DiskRun, Op};
use crate::error::FrontendError;
use crate::hostile;
use crate::idle::Idle;
use crate::many::plan::Plan;
use crate::many::{self, ManyReport};
use crate::net::{Mode, NetPair, NetRun};
use crate::port::Reach;
use crate::report::Report;
use crate::ring::RingShape;
use crate::session::Session;

/// A virtio driver in user space: loads and checks vhost-user back ends without a VM.
#[derive(Debug, Parser)]
#[command(name = "frontend", version, about)]
struct Cli {
    #[command(subcommand)]
    load: Load,
}

#[derive(Debug, Subcommand)]
enum Load {
    /// Frames between two network ports
    Net(NetArgs),
    /// Requests to a disk
    Disk(DiskArgs),
    /// Many VMs' ports at once, as a plan says
    Many(ManyArgs),
    /// Ports that are attached and left alone, until standard input ends
    Idle(IdleArgs),
    /// Attacks on ports in all ways at once, until standard input ends; prints the rounds at each
    Hostile {
        /// The ports
        #[arg(required = true)]
        sockets: Vec<PathBuf>,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RingKind {
    Split,
    /// Split, used in order
    InOrder,
    Packed,
    PackedInOrder,
}

#[derive(Debug, Args)]
struct Common {
    /// Format of the rings
    #[arg(long, value_enum, default_value = "split")]
    ring: RingKind,
    /// Negotiate the event index
    #[arg(long)]
    event_idx: bool,
    /// Chains of several buffers go through indirect tables
    #[arg(long)]
    indirect: bool,
    /// Descriptors of each queue
    #[arg(long, default_value_t = 256)]
    queue_size: u16,
    /// Seconds to measure
    #[arg(long, default_value_t = 1.0)]
    secs: f64,
    /// Seconds before, which do not count
    #[arg(long, default_value_t = 0.2)]
    warmup: f64,
    /// CPU to run on
    #[arg(long)]
    cpu: Option<usize>,
    /// Compare every byte
    #[arg(long)]
    verify: bool,
    /// Sleep on interrupts instead of polling
    #[arg(long)]
    wait: bool,
    /// Listen; the back end connects
    #[arg(long)]
    listen: bool,
    /// Guest memory of huge pages
    #[arg(long)]
    hugepages: bool,
}

#[derive(Debug, Args)]
struct NetArgs {
    /// Flood: as many frames as go from a to b; rr: one frame, to and fro
    #[arg(long, value_parser = mode, default_value = "flood")]
    mode: Mode,
    /// Socket of the sender's port
    #[arg(long)]
    a: PathBuf,
    /// Socket of the receiver's port
    #[arg(long)]
    b: PathBuf,
    /// Receive buffers of 4 KiB, as many as a frame needs
    #[arg(long)]
    mergeable: bool,
    /// Length of frames, with Ethernet header
    #[arg(long, default_value_t = 64)]
    frame_bytes: usize,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct DiskArgs {
    /// The disk's socket
    #[arg(long)]
    socket: PathBuf,
    /// Read, write or mixed
    #[arg(long, value_parser = op, default_value = "read")]
    op: Op,
    /// Bytes of a request
    #[arg(long, default_value_t = 4096)]
    block_bytes: usize,
    /// Requests under way
    #[arg(long, default_value_t = 1)]
    depth: usize,
    /// For the order of blocks
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// From the first block to the last, over and over, instead of at random
    #[arg(long)]
    sequential: bool,
    /// One block of each stretch of so many bytes, and each stretch once: an eighth of them as the
    /// warm-up, whatever --warmup says, the others count. --secs is the longest time for either
    #[arg(long, value_name = "BYTES")]
    once_per_bytes: Option<usize>,
    /// Negotiate FLUSH: writes are answered before they are durable
    #[arg(long)]
    write_cache: bool,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct ManyArgs {
    /// JSON (see the library's `many::plan::Plan`); "-" is standard input
    #[arg(long)]
    plan: PathBuf,
    /// CPU to run on
    #[arg(long)]
    cpu: Option<usize>,
}

#[derive(Debug, Args)]
struct IdleArgs {
    /// Ports in all: half of them network ports, half disks
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=1024))]
    count: u32,
    /// Sockets of the network ports, with {} for 0 to half the count
    #[arg(long)]
    net: String,
    /// Sockets of the disks
    #[arg(long)]
    disk: String,
}

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "flood" => Ok(Mode::Flood),
        "rr" => Ok(Mode::RoundTrip),
        _ => Err("flood or rr".to_owned()),
    }
}

fn op(text: &str) -> Result<Op, String> {
    match text {
        "read" => Ok(Op::Read),
        "write" => Ok(Op::Write),
        "mixed" => Ok(Op::Mixed),
        _ => Err("read, write or mixed".to_owned()),
    }
}

impl Common {
    fn shape(&self) -> RingShape {
        RingShape {
            size: self.queue_size,
            packed: matches!(self.ring, RingKind::Packed | RingKind::PackedInOrder),
            in_order: matches!(self.ring, RingKind::InOrder | RingKind::PackedInOrder),
            event_idx: self.event_idx,
            indirect: self.indirect,
        }
    }

    /// Runs the warm-up, then what counts.
    fn measure(
        &self,
        mut run: impl FnMut(u64) -> Result<Report, FrontendError>,
    ) -> Result<Report, FrontendError> {
        if self.warmup > 0.0 {
            run(ns(self.warmup))?;
        }
        run(ns(self.secs))
    }

    fn pin(&self) -> Result<(), FrontendError> {
        pin(self.cpu)
    }
}

fn ns(secs: f64) -> u64 {
    (secs.clamp(0.0, 3600.0) * 1e9) as u64
}

fn pin(cpu: Option<usize>) -> Result<(), FrontendError> {
    let io = FrontendError::io("pinning to the CPU asked for");
    cpu.map_or(Ok(()), base::cpu::pin_current_thread).map_err(io)
}

fn reach(path: &Path, listen: bool) -> Result<Reach<'_>, FrontendError> {
    Ok(if listen { Reach::Accept(Session::listen(path)?) } else { Reach::Dial(path) })
}

fn run_net(args: &NetArgs) -> Result<Report, FrontendError> {
    let common = &args.common;
    // Both listen before the first back end is waited for: one may dial both at once.
    let (a, b) = (reach(&args.a, common.listen)?, reach(&args.b, common.listen)?);
    let run = NetRun {
        mode: args.mode,
        shape: common.shape(),
        mergeable: args.mergeable,
        frame_bytes: args.frame_bytes,
        verify: common.verify,
        wait: common.wait,
        huge: common.hugepages,
    };
    common.pin()?;
    let mut pair = NetPair::start(a, b, run)?;
    let report = common.measure(|ns| pair.run(ns))?;
    pair.stop()?;
    Ok(report)
}

fn run_disk(args: &DiskArgs) -> Result<Report, FrontendError> {
    let common = &args.common;
    let run = DiskRun {
        op: args.op,
        shape: common.shape(),
        block_bytes: args.block_bytes,
        depth: args.depth,
        verify: common.verify,
        wait: common.wait,
        huge: common.hugepages,
        seed: args.seed,
    };
    let access = Access {
        sequential: args.sequential,
        once_per_bytes: args.once_per_bytes,
        write_cache: args.write_cache,
    };
    common.pin()?;
    let mut load = DiskLoad::start_with(reach(&args.socket, common.listen)?, run, access)?;
    let report = match args.once_per_bytes {
        Some(_) => load.run_once(ns(common.secs))?,
        None => common.measure(|ns| load.run(ns))?,
    };
    load.stop()?;
    Ok(report)
}

fn run_many(args: &ManyArgs) -> Result<ManyReport, FrontendError> {
    let text = match args.plan.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(&args.plan),
    };
    let text = text.map_err(FrontendError::io("reading the plan"))?;
    let plan: Plan =
        serde_json::from_str(&text).map_err(|e| FrontendError::Usage(format!("the plan: {e}")))?;
    pin(args.cpu)?;
    many::run(&plan)
}

/// Attaches all ports, says so, and waits until standard input ends.
fn run_idle(args: &IdleArgs) -> Result<(), FrontendError> {
    let sockets = |pattern: &str| -> Vec<PathBuf> {
        (0..args.count / 2).map(|i| pattern.replace("{}", &i.to_string()).into()).collect()
    };
    let ports = Idle::attach(&sockets(&args.net), &sockets(&args.disk))?;
    println!("{{\"attached\":{}}}", ports.count());
    stdin_ends().map_err(FrontendError::io("waiting for the end of standard input"))?;
    ports.detach()
}

fn stdin_ends() -> std::io::Result<()> {
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).map(drop)
}

fn run_hostile(sockets: &[PathBuf]) -> Result<Vec<u64>, FrontendError> {
    hostile::attack_all(sockets, stdin_ends).map_err(FrontendError::io("attacking"))
}

fn json<T: Serialize>(report: &T) -> Result<String, FrontendError> {
    serde_json::to_string(report)
        .map_err(|e| FrontendError::io("writing the report")(std::io::Error::other(e)))
}

/// The command. Exit code: 0 fine, 1 something failed, 2 usage.
pub fn main() -> ExitCode {
    let text = match Cli::parse().load {
        Load::Net(args) => run_net(&args).and_then(|r| json(&r)),
        Load::Disk(args) => run_disk(&args).and_then(|r| json(&r)),
        Load::Many(args) => run_many(&args).and_then(|r| json(&r)),
        Load::Idle(args) => run_idle(&args).map(|()| String::new()),
        Load::Hostile { sockets } => run_hostile(&sockets).and_then(|rounds| json(&rounds)),
    };
    match text {
        Ok(text) => {
            print!("{text}{}", if text.is_empty() { "" } else { "\n" });
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("frontend: {e}");
            ExitCode::from(if matches!(e, FrontendError::Usage(_)) { 2 } else { 1 })
        }
    }
}
