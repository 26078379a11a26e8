//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use config::{DEFAULT_CONFIG, DEFAULT_RUN_DIR};

use crate::backend;

/// One host-side I/O plane for Linux VMs.
#[derive(Debug, Parser)]
#[command(name = "millrace", version, about, after_help = AFTER_HELP)]
#[command(arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// Command.
    #[command(subcommand)]
    pub command: Command,
}

const AFTER_HELP: &str = "\
Exit status: 0 ok, 1 the config is wrong or the daemon could not start, 2 wrong command line,
3 no daemon answers, 4 the daemon refused. The manual page millrace(1) says more.";

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon
    Serve(Serve),
    /// Check a config and tell everything that is wrong with it
    Check(Check),
    /// Print a VM of the config as a domain of libvirt
    Libvirt(Libvirt),
    /// Show sidecores, switches and ports; with --json also VMs
    Status(Listing),
    /// List ports
    Ports(Listing),
    /// Transfers that the host makes for programs of VMs
    #[command(subcommand)]
    Pipe(PipeCommand),
    /// Shared memory between VMs of one trust domain
    #[command(subcommand)]
    Channel(ChannelCommand),
    /// WebAssembly modules that serve programs of VMs
    #[command(subcommand)]
    Module(ModuleCommand),
    /// Show live what VMs, ports and sidecores do
    Top(Top),
    /// Attach a port to a VM while the daemon runs
    Attach(Attach),
    /// Start a port that could not be started, or one of the config file that was detached
    Start(PortArgs),
    /// Detach a port
    Detach(PortArgs),
    /// Take over a disk's new size
    Resize(Resize),
    /// Have requests of a disk go on that wait for its storage
    Resume(PortArgs),
    /// Plug a network port's cable in or out
    Link(Link),
    /// Change what a VM is granted of the host's I/O
    #[command(subcommand)]
    Vm(VmCommand),
    /// Show what is logged, or change it until the daemon ends
    LogLevel(LogLevel),
    /// Print the counters in Prometheus' text format
    Metrics(Socket),
    /// Stop the daemon
    Stop(Stop),
    /// Show the version
    Version(Version),
    /// Keep sessions while the daemon restarts
    Holder(Holder),
    /// Print a completion script for a shell
    Completions(Completions),
    /// Run a VM's modules; the daemon starts it
    #[command(hide = true)]
    ModuleProcess(ModuleProcess),
    /// Move VMs' memory into huge pages; the daemon starts it
    #[command(hide = true)]
    HugePagesProcess,
    /// A single vhost-user disk (see millrace-blk)
    #[command(hide = true)]
    VhostUserBlk(backend::Blk),
    /// A single vhost-user network port (see millrace-net)
    #[command(hide = true)]
    VhostUserNet(backend::Net),
    /// A single vhost-user vsock port (see millrace-vsock)
    #[command(hide = true)]
    VhostUserVsock(backend::Vsock),
}

/// Path of the config file.
#[derive(Debug, Args)]
pub struct ConfigFile {
    /// Config file, by default /etc/millrace/millrace.toml; drop-ins are read from the folder of
    /// the same name with .d
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The same as FILE
    #[arg(short, long, value_name = "FILE", conflicts_with = "file")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    /// Path of the config file; the default one where none was named.
    pub fn path(&self) -> PathBuf {
        let named = self.file.as_ref().or(self.config.as_ref());
        named.cloned().unwrap_or_else(|| DEFAULT_CONFIG.into())
    }
}

/// `serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// The config.
    #[command(flatten)]
    pub file: ConfigFile,
    /// Check the config and end
    #[arg(long)]
    pub check_only: bool,
    /// Log as JSON, one object per line
    #[arg(long)]
    pub log_json: bool,
    /// Holder where the config has no `holder`; without one that answers the daemon goes without
    #[arg(long, value_name = "PATH")]
    pub default_holder: Option<PathBuf>,
}

/// `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The config.
    #[command(flatten)]
    pub file: ConfigFile,
    /// Print the config with all defaults, or the problems, as JSON
    #[arg(long)]
    pub json: bool,
}

/// `libvirt`.
#[derive(Debug, Args)]
pub struct Libvirt {
    /// VM
    pub vm: String,
    /// Config file; drop-ins are read from the folder of the same name with .d
    #[arg(short, long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub config: PathBuf,
    /// Print only this port's device, for `virsh attach-device`
    #[arg(long, value_name = "PORT", conflicts_with_all = ["kind", "memory", "emulator", "kernel"])]
    pub device: Option<String>,
    /// Put the ports into this domain, in place of its own devices; - is the standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "kind", "memory", "vcpus",
          "emulator", "kernel"])]
    pub domain: Option<PathBuf>,
    /// Whether KVM runs the VM, or QEMU's emulator
    #[arg(long = "type", value_enum, default_value_t = DomainKind::Kvm)]
    pub kind: DomainKind,
    /// Memory, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = memory)]
    pub memory: u64,
    /// Virtual CPUs; 1 unless set
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub vcpus: Option<u32>,
    /// QEMU's program; left out: libvirt's choice
    #[arg(long, value_name = "PATH", value_parser = full_path)]
    pub emulator: Option<String>,
    /// Kernel that QEMU loads; left out: the VM boots from its first disk
    #[arg(long, value_name = "PATH", value_parser = full_path)]
    pub kernel: Option<String>,
    /// Initial file system of that kernel
    #[arg(long, value_name = "PATH", value_parser = full_path, requires = "kernel")]
    pub initrd: Option<String>,
    /// Command line of that kernel
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub append: Option<String>,
}

impl Libvirt {
    /// Number of virtual CPUs.
    pub fn vcpu_number(&self) -> u32 {
        self.vcpus.unwrap_or(1)
    }
}

/// Kind of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DomainKind {
    /// KVM runs it
    Kvm,
    /// QEMU emulates it
    Qemu,
}

impl DomainKind {
    /// The word that libvirt has for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Qemu => "qemu",
        }
    }
}

/// Reads a size of memory.
fn memory(text: &str) -> Result<u64, String> {
    let bytes = config::parse_size(text).ok_or("write a size such as 512MiB or 4GiB")?;
    if bytes == 0 || bytes % (1 << 20) != 0 { Err("write whole MiB".into()) } else { Ok(bytes) }
}

/// Reads a path, and writes it from the root on: libvirt takes no other.
fn full_path(text: &str) -> Result<String, String> {
    let path = std::path::absolute(text).map_err(|e| e.to_string())?;
    path.into_os_string().into_string().map_err(|_| "the path is not UTF-8".into())
}

/// Address of the daemon.
#[derive(Debug, Args)]
pub struct Socket {
    /// The daemon's control socket
    #[arg(long, value_name = "PATH", env = "MILLRACE_SOCKET",
          default_value_os_t = default_socket())]
    pub socket: PathBuf,
}

fn default_socket() -> PathBuf {
    PathBuf::from(DEFAULT_RUN_DIR).join("control.sock")
}

/// A listing.
#[derive(Debug, Args)]
pub struct Listing {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `pipe`.
#[derive(Debug, Subcommand)]
pub enum PipeCommand {
    /// List the pipes under way
    Ls(Listing),
}

/// `channel`.
#[derive(Debug, Subcommand)]
pub enum ChannelCommand {
    /// List the VMs that take part in channels, or may, with the reason where they do not
    Ls(Listing),
    /// Make a VM a member of its trust domain's channels
    Join(VmArgs),
    /// End a VM's membership, as before a migration: it gives back what it has of others, waits for
    /// what others have of it, and stays out until `join` or until its front end reconnects
    Leave(VmArgs),
}

/// `module`.
#[derive(Debug, Subcommand)]
pub enum ModuleCommand {
    /// List the modules of all VMs
    Ls(Listing),
    /// Show all that the modules of a VM count
    Stats(ModuleStats),
    /// Replace a VM's modules by those of the config's files, which are read again; clients connect
    /// again. When that fails, the old ones stay
    Load(VmArgs),
    /// Copy a module's files into a file while it serves
    Backup(ModuleBackup),
    /// Check that a copy is whole, and say what it is of
    Verify(ModuleVerify),
    /// Put a copy in the place of a module's files; if the module does not start with it, all is as
    /// it was. Drained modules are not started
    Restore(ModuleRestore),
    /// End a VM's modules until they are resumed, also across restarts: their folder can go
    /// elsewhere
    Drain(VmArgs),
    /// Have modules that were drained serve again, on whichever host their folder is
    Resume(VmArgs),
}

/// `module backup`.
#[derive(Debug, Args)]
pub struct ModuleBackup {
    /// VM, and the daemon's control socket.
    #[command(flatten)]
    pub target: VmArgs,
    /// Module
    pub module: String,
    /// File that gets its name once it is whole; - for the standard output; a pipe or device is
    /// written into
    #[arg(short, long)]
    pub output: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `module verify`.
#[derive(Debug, Args)]
pub struct ModuleVerify {
    /// Copy; - for the standard input
    pub copy: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `module restore`.
#[derive(Debug, Args)]
pub struct ModuleRestore {
    /// VM, and the daemon's control socket.
    #[command(flatten)]
    pub target: VmArgs,
    /// Module
    pub module: String,
    /// Copy; - for the standard input
    pub copy: PathBuf,
    /// Replace files that are there
    #[arg(long)]
    pub replace: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `module stats`.
#[derive(Debug, Args)]
pub struct ModuleStats {
    /// VM, and the daemon's control socket.
    #[command(flatten)]
    pub target: VmArgs,
    /// Module; left out: all
    pub module: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A VM by name.
#[derive(Debug, Args)]
pub struct VmArgs {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// VM
    pub vm: String,
}

/// `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// Time between two samples
    #[arg(long, value_name = "MS", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(100..=3_600_000))]
    pub interval_ms: u32,
    /// Print one snapshot as text, and end
    #[arg(long)]
    pub once: bool,
    /// Print one snapshot as JSON, and end
    #[arg(long)]
    pub json: bool,
}

/// A port by name.
#[derive(Debug, Args)]
pub struct PortArgs {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// VM
    pub vm: String,
    /// Port
    pub port: String,
}

/// `attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// VM; made when there is none of this name
    pub vm: String,
    /// The port as JSON, in the shape of the config: {"disk": {"name": "d", "format": "raw",
    /// "path": "/d.img"}}; or @FILE; or - for the standard input
    #[arg(value_name = "JSON")]
    pub body: String,
    /// Print the new port as JSON
    #[arg(long)]
    pub json: bool,
}

/// `resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The disk.
    #[command(flatten)]
    pub named: PortArgs,
    /// New size, such as 64MiB, of a qcow2 image or a disk without a file; a raw disk has the size
    /// of its file
    pub size: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `link`.
#[derive(Debug, Args)]
pub struct Link {
    /// The network port.
    #[command(flatten)]
    pub named: PortArgs,
    /// Whether the cable is in
    #[arg(value_parser = ["up", "down"])]
    pub state: String,
}

/// `vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Set weight, floor and ceilings, also for later daemons; what is left out stays
    Set(VmSet),
}

/// `vm set`.
#[derive(Debug, Args)]
pub struct VmSet {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// VM
    pub vm: String,
    /// Share under contention, 1 to 10000
    #[arg(long)]
    pub weight: Option<u64>,
    /// Bytes per second that its weight never keeps it from, such as 100MiB; 0: none
    #[arg(long, value_name = "RATE")]
    pub floor: Option<String>,
    /// Most bytes per second that are charged to it; 0: no ceiling
    #[arg(long, value_name = "RATE")]
    pub ceiling: Option<String>,
    /// Most requests per second that are charged to it; 0: no ceiling
    #[arg(long, value_name = "N")]
    pub ceiling_ops: Option<u64>,
    /// Time's worth of its ceilings that it may use at once after a pause
    #[arg(long, value_name = "MS")]
    pub ceiling_burst_ms: Option<u64>,
}

/// `log-level`.
#[derive(Debug, Args)]
pub struct LogLevel {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// Filter: off, error, warn, info, debug, trace, or by part: info,net=debug
    pub filter: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `stop`.
#[derive(Debug, Args)]
pub struct Stop {
    /// Daemon's control socket.
    #[command(flatten)]
    pub socket: Socket,
    /// Drop the sessions that the holder keeps, too
    #[arg(long)]
    pub forget: bool,
}

/// `version`.
#[derive(Debug, Args)]
pub struct Version {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `holder`.
#[derive(Debug, Args)]
pub struct Holder {
    /// Socket to listen on
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Leave the session of the process that started it
    #[arg(long, hide = true)]
    pub detach: bool,
}

/// `module-process`.
#[derive(Debug, Args)]
pub struct ModuleProcess {
    /// VM
    pub vm: String,
    /// Log filter, as in `daemon.log`
    #[arg(long, default_value = "info")]
    pub log: String,
    /// Log as JSON
    #[arg(long)]
    pub log_json: bool,
}

/// `completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell
    pub shell: clap_complete::Shell,
}
