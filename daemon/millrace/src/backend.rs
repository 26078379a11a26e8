//! A single vhost-user back end, by QEMU's conventions for such programs (docs/interop/vhost-user,
//! "Backend program conventions"): what a management layer starts per device.

use std::ffi::{OsStr, OsString};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use base::clock::{Clock, MonotonicClock};
use block::CheckProgress;
use clap::{Args, Parser, ValueEnum};
use config::{
    BlockSize, DiskConfig, DiskFormat, EndpointConfig, NetConfig, OnError, SocketMode, UplinkConfig,
};
use control::systemd::Notifier;
use net::{Switch, SwitchConfig};
use sidecore::{Sidecore, SidecoreConfig, VmId};
use vhost_user::{Endpoint, NullStore, PortConfig, PortServer, VmShare};
use vsock::{Domain, DomainConfig, VsockPortConfig};

use crate::host::engine::{self, Engine, Opening};
use crate::host::{huge_pages, switches};
use crate::process::EndSignals;
use crate::{exit, journal, log, process};

/// Polling time without work, in microseconds: such a program has no CPU of its own.
const SPIN_US: u32 = 20;

/// Socket options of QEMU's conventions for back-end programs.
#[derive(Debug, Args)]
pub struct Convention {
    /// Listen on this Unix socket
    #[arg(long, value_name = "PATH", required_unless_present = "fd", conflicts_with = "fd")]
    socket_path: Option<PathBuf>,
    /// Use this inherited descriptor: a connected or listening Unix socket
    #[arg(long, value_name = "FDNUM", value_parser = clap::value_parser!(i32).range(3..))]
    fd: Option<RawFd>,
    /// Print the capabilities as JSON and end
    #[arg(long)]
    print_capabilities: bool,
}

/// `millrace-blk`.
#[derive(Debug, Parser)]
#[command(name = "millrace-blk", version, about = "A vhost-user disk")]
pub struct Blk {
    /// Socket options.
    #[command(flatten)]
    convention: Convention,
    /// Image file or block device
    #[arg(long, value_name = "PATH")]
    blk_file: PathBuf,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Format of the image; never guessed
    #[arg(long, value_enum, default_value = "raw")]
    format: ImageFormat,
    /// Folder from which a qcow2 image's backing files may come
    #[arg(long, value_name = "DIR")]
    backing_dir: Option<PathBuf>,
    /// File with the data of a qcow2 image that keeps it apart
    #[arg(long, value_name = "PATH")]
    data_file: Option<PathBuf>,
    /// Pass by the page cache
    #[arg(long)]
    direct: bool,
    /// Most queues that the front end may set up
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=32))]
    num_queues: u16,
    /// Serial number, at most 20 bytes
    #[arg(long, default_value = "")]
    serial: String,
}

/// Formats that have a file.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ImageFormat {
    Raw,
    Qcow2,
}

/// `millrace-net`.
#[derive(Debug, Parser)]
#[command(name = "millrace-net", version, about = "A vhost-user network port on a TAP interface")]
pub struct Net {
    /// Socket options.
    #[command(flatten)]
    convention: Convention,
    /// TAP interface; made when it is not there
    #[arg(long, value_name = "NAME")]
    tap: String,
    /// Bridge to put the TAP into
    #[arg(long, value_name = "NAME")]
    bridge: Option<String>,
    /// Pairs of queues
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    queue_pairs: u16,
}

/// `millrace-vsock`.
#[derive(Debug, Parser)]
#[command(name = "millrace-vsock", version, about = "A vhost-user vsock port")]
pub struct Vsock {
    /// Socket options.
    #[command(flatten)]
    convention: Convention,
    /// The guest's context id
    #[arg(long, value_parser = clap::value_parser!(u64).range(3..=4_294_967_294))]
    guest_cid: u64,
    /// Base of the host's Unix sockets: guests reach PATH_port, programs connect to PATH
    #[arg(long, value_name = "PATH")]
    uds_path: PathBuf,
}

/// Answer to `--print-capabilities` of a program of this kind (QEMU's
/// docs/interop/vhost-user.json).
fn capabilities(kind: &str) -> &'static str {
    match kind {
        "blk" => r#"{"type":"block","features":["read-only","blk-file"]}"#,
        "net" => r#"{"type":"net"}"#,
        _ => r#"{"type":"vsock"}"#,
    }
}

/// Runs as `millrace-blk` and the like when called by that name, or as the hidden subcommand; the
/// exit code, or none when this is the ordinary command.
pub fn called_as(arguments: &[OsString]) -> Option<u8> {
    let program = Path::new(arguments.first()?).file_name()?.to_str()?;
    let by_name = program.strip_prefix("millrace-");
    let by_command = arguments.get(1).and_then(|a| a.to_str()?.strip_prefix("vhost-user-"));
    let kind = by_name.or(by_command).filter(|k| matches!(*k, "blk" | "net" | "vsock"))?;
    // The conventions: print, ignore all other arguments, end.
    if arguments.iter().any(|a| a == OsStr::new("--print-capabilities")) {
        let printed = process::print_line(capabilities(kind));
        return Some(if printed.is_ok() { exit::OK } else { exit::FAILED });
    }
    by_name?;
    Some(match kind {
        "blk" => run_blk(&Blk::parse_from(arguments)),
        "net" => run_net(&Net::parse_from(arguments)),
        _ => run_vsock(&Vsock::parse_from(arguments)),
    })
}

/// A disk.
pub fn run_blk(args: &Blk) -> u8 {
    let path = args.blk_file.clone();
    let format = match args.format {
        ImageFormat::Raw => {
            DiskFormat::Raw { path, direct: args.direct, registered_memory_bytes: 0 }
        }
        ImageFormat::Qcow2 => DiskFormat::Qcow2 {
            path,
            direct: args.direct,
            backing_dir: args.backing_dir.clone(),
            data_file: args.data_file.clone(),
            map_cache_bytes: None,
        },
    };
    let config = DiskConfig {
        name: "blk".into(),
        format,
        read_only: args.read_only,
        queues: args.num_queues,
        seg_max: block::limits::SEG_MAX,
        block_size: BlockSize::Bytes(512),
        serial: args.serial.clone(),
        writeback: true,
        on_error: OnError::default(),
        packed: true,
        endpoint: no_endpoint(),
    };
    run("blk", &args.convention, |core, clock| {
        let opening = Opening {
            cores: std::slice::from_ref(core),
            clock,
            session_store: &NullStore,
            progress: CheckProgress::default(),
        };
        Ok((engine::disk("blk", VmId::NONE, &config, opening)?, Keep::Nothing))
    })
}

/// A network port on a TAP.
pub fn run_net(args: &Net) -> u8 {
    let config = NetConfig {
        name: "net".into(),
        switch: "net".into(),
        mac: None,
        addresses: Vec::new(),
        // One VM and one wire: there is nobody else to protect.
        bind: config::BindMode::Off,
        bind_also: Default::default(),
        allow: Vec::new(),
        queue_pairs: args.queue_pairs,
        broadcasts_per_s: 0,
        mtu: 1500,
        offloads: true,
        packed: true,
        whole_device: false,
        endpoint: no_endpoint(),
    };
    let (tap, bridge) = (args.tap.clone(), args.bridge.clone());
    let uplink = UplinkConfig { tap, bridge, offloads: true };
    run("net", &args.convention, |core, clock| {
        let switch = Switch::new(core, SwitchConfig::new("net"), Arc::clone(clock))?;
        switches::plug(&switch, &uplink, config.mtu)?;
        Ok((engine::net("net", VmId::NONE, &config, &switch)?, Keep::Nothing))
    })
}

/// A vsock port.
pub fn run_vsock(args: &Vsock) -> u8 {
    run("vsock", &args.convention, |core, clock| {
        let domain = Domain::new(core, DomainConfig::new("vsock", false), Arc::clone(clock))?;
        let config = VsockPortConfig::new("vsock", args.guest_cid, args.uds_path.clone());
        Ok((Engine::Vsock(domain.add_port(config)?), Keep::Domain(domain)))
    })
}

/// The owner of the port's worker, dropped after the port.
enum Keep {
    Nothing,
    Domain(Domain),
}

/// Endpoint without a socket: the device's config has a place for one, which here comes from the
/// command line.
fn no_endpoint() -> EndpointConfig {
    EndpointConfig { socket: PathBuf::new(), mode: SocketMode::Listen }
}

fn run(
    name: &str,
    convention: &Convention,
    device: impl FnOnce(&Sidecore, &Arc<dyn Clock>) -> anyhow::Result<(Engine, Keep)>,
) -> u8 {
    match serve(name, convention, device) {
        Ok(()) => exit::OK,
        Err(e) => {
            journal::print_error(&format!("millrace-{name}: {}", process::describe(&e)));
            exit::FAILED
        }
    }
}

fn serve(
    name: &str,
    convention: &Convention,
    device: impl FnOnce(&Sidecore, &Arc<dyn Clock>) -> anyhow::Result<(Engine, Keep)>,
) -> anyhow::Result<()> {
    let endpoint = endpoint(convention)?;
    log::init("warn", false)?;
    process::raise_limits();
    let runtime = process::control_thread()?;
    let signals = runtime.block_on(async { EndSignals::new() })?;
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
    let config =
        SidecoreConfig { spin_us: SPIN_US, yield_when_idle: true, ..SidecoreConfig::default() };
    let core = Sidecore::spawn(config, Arc::clone(&clock))?;
    huge_pages::start(None);
    let (engine, keep) = device(&core, &clock)?;
    let own = own_socket(&endpoint)?;
    let config =
        PortConfig { name: name.into(), endpoint, socket_mode: 0o600, share: VmShare::new() };
    let session_store = Arc::new(NullStore);
    let server =
        vhost_user::serve_port(config, engine.device(), engine.queue_stats(), session_store)?;
    Notifier::from_env().ready(&format!("serving one {name} device"));
    runtime.block_on(until_told(signals, server, own))?;
    match keep {
        Keep::Nothing => {}
        Keep::Domain(domain) => drop(domain),
    }
    core.shutdown();
    Ok(())
}

fn endpoint(convention: &Convention) -> anyhow::Result<Endpoint> {
    match (&convention.socket_path, convention.fd) {
        (Some(path), _) => Ok(Endpoint::Listen(path.clone())),
        (None, Some(number)) => Ok(Endpoint::Fd(inherited(number)?)),
        (None, None) => bail!("give --socket-path or --fd"),
    }
}

/// Takes over a descriptor that our parent left open for us.
fn inherited(number: RawFd) -> anyhow::Result<OwnedFd> {
    // SAFETY: only asked whether it is open, within this call.
    let probe = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(probe, rustix::io::FdFlags::CLOEXEC)
        .with_context(|| format!("--fd={number} is not open"))?;
    // SAFETY: it is open and was named by our parent as ours to use; called once, before this
    // program has opened a descriptor of its own.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A second descriptor of a connected socket, with which its session can be ended from outside.
fn own_socket(endpoint: &Endpoint) -> anyhow::Result<Option<OwnedFd>> {
    match endpoint {
        Endpoint::Fd(fd) if !rustix::net::sockopt::socket_acceptconn(fd)? => {
            Ok(Some(fd.try_clone()?))
        }
        _ => Ok(None),
    }
}

/// Serves until SIGTERM or SIGINT, or until the connection we were given has ended.
async fn until_told(
    mut signals: EndSignals,
    server: PortServer,
    connected: Option<OwnedFd>,
) -> anyhow::Result<()> {
    let Some(connected) = connected else {
        signals.next().await;
        return Ok(tokio::task::spawn_blocking(move || server.stop()).await?);
    };
    let mut ended = tokio::task::spawn_blocking(move || server.wait());
    tokio::select! {
        done = &mut ended => return Ok(done?),
        _ = signals.next() => {}
    }
    // The session sees its front end go, finishes what is in flight, and ends.
    rustix::net::shutdown(&connected, rustix::net::Shutdown::Both)?;
    Ok(ended.await?)
}
