//! The config as the daemon uses it: defaults filled in, every value inside its limits.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use crate::value::{format_mac, format_sha256};

/// The whole configuration of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Config {
    /// The daemon itself.
    pub daemon: DaemonConfig,
    /// Polling threads.
    pub sidecore: SidecoreConfig,
    /// Channels between VMs.
    pub channel: ChannelsConfig,
    /// Modules that VMs may use, by their order in the files.
    #[serde(rename = "module")]
    pub modules: Vec<ModuleConfig>,
    /// Switches, by their order in the files.
    #[serde(rename = "switch")]
    pub switches: Vec<SwitchConfig>,
    /// VMs, by their order in the files.
    #[serde(rename = "vm")]
    pub vms: Vec<VmConfig>,
}

/// `[daemon]`: folders, sockets, log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DaemonConfig {
    /// Default folder of sockets.
    pub run_dir: PathBuf,
    /// Folder of files that outlive a reboot: those of modules, and their native code.
    pub state_dir: PathBuf,
    /// Socket of the control API.
    pub control_socket: PathBuf,
    /// Second socket of the control API, for listings and metrics only.
    #[serde(flatten)]
    pub read_socket: Option<ReadSocketConfig>,
    /// File mode of the vhost-user sockets: decides which users may run a VMM on them.
    #[serde(serialize_with = "mode_text")]
    pub socket_mode: u32,
    /// Holder of the sessions across a restart.
    pub holder: HolderConfig,
    /// Whether VMs' memory is put into huge pages. `None`: unless the daemon's memory is limited.
    pub huge_pages: Option<bool>,
    /// Log filter: a level, or directives such as `info,net=debug`.
    pub log: String,
}

/// `read_socket` and `read_group` of `[daemon]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReadSocketConfig {
    /// Path of the socket.
    #[serde(rename = "read_socket")]
    pub path: PathBuf,
    /// Group that may connect, besides the owner.
    #[serde(rename = "read_group")]
    pub group: String,
}

fn mode_text<S: Serializer>(mode: &u32, s: S) -> Result<S::Ok, S::Error> {
    format!("{mode:04o}").serialize(s)
}

/// Holder of the sessions while the daemon restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HolderConfig {
    /// The holder of `serve --default-holder`, which the packaged unit passes; without it, none.
    Default,
    /// No holder: a restart disconnects the VMMs.
    None,
    /// A process that the daemon starts, at `run_dir/holder.sock`, and that outlives it.
    Own,
    /// A holder that the daemon does not start (it has its own systemd unit), at this socket.
    External(PathBuf),
}

/// `[sidecore]`: the polling threads.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct SidecoreConfig {
    /// Number of sidecores, and their CPUs.
    pub placement: Placement,
    /// Fewest that are active; none: 1 with [`Placement::Auto`] and with `max`, else all.
    pub min: Option<usize>,
    /// Most that are active; none: all.
    pub max: Option<usize>,
    /// Longest poll without work before sleeping, in microseconds; none: by the machine's size.
    pub spin_us: Option<u32>,
    /// Whether the polling time adapts.
    pub spin: SpinKind,
    /// Instruction between two empty polls.
    pub pause: PauseKind,
    /// Whether the CPU is given away between empty polls; none: by the machine's size.
    #[serde(rename = "yield")]
    pub yields: Option<bool>,
}

/// Whether the polling time adapts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SpinKind {
    /// Between 0 and `spin_us`.
    #[default]
    Adaptive,
    /// Always `spin_us`.
    Fixed,
}

/// Instruction between two empty polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub enum PauseKind {
    /// `C01` where the CPU can, else `Spin`.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// The `pause` instruction.
    #[serde(rename = "spin")]
    Spin,
    /// `tpause` into C0.1.
    #[serde(rename = "c0.1")]
    C01,
    /// `tpause` into C0.2.
    #[serde(rename = "c0.2")]
    C02,
}

/// Number of sidecores, and their CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// A number that fits the machine's size, not pinned.
    #[default]
    Auto,
    /// A fixed number, not pinned.
    Count(usize),
    /// One on each of these CPUs.
    Cpus(Vec<usize>),
}

/// `[[switch]]`: a switch for network ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SwitchConfig {
    /// Name.
    pub name: String,
    /// Longest wait of a frame for a receiver without buffers, or whose kernel has not taken what
    /// it was given, in microseconds.
    pub hold_us: u32,
    /// Lifetime of a learned MAC address without traffic, in seconds.
    pub mac_age_s: u32,
    /// Connection to the network of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink: Option<UplinkConfig>,
}

/// `[switch.uplink]`: a TAP interface of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UplinkConfig {
    /// Name of the TAP interface, made when it is not there.
    pub tap: String,
    /// Bridge to put it into.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// Whether super-packets and partial checksums may cross it.
    pub offloads: bool,
}

/// `[[vm]]`: a VM, its ports, and its use of pipes, channels and modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmConfig {
    /// Name.
    pub name: String,
    /// Whether the VM is in a config file: then it stays when its last port goes.
    #[serde(skip)]
    pub from_file: bool,
    /// Share of I/O under contention, floor and ceilings.
    #[serde(flatten)]
    pub credit: CreditConfig,
    /// Trust domain: VMs of one domain may talk over vsock, and have channels; none: this VM talks
    /// to the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
    /// Most bytes of memory that its front ends may share, all of its ports together; none: twice
    /// the host's memory, 1 TiB at least. From a config file only.
    #[serde(rename = "memory_limit", skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// Network ports.
    #[serde(rename = "net")]
    pub nets: Vec<NetConfig>,
    /// Disks.
    #[serde(rename = "disk")]
    pub disks: Vec<DiskConfig>,
    /// The vsock port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockConfig>,
    /// Pipes, in which the host moves bytes for programs; none: it has no pipes. From a config file
    /// only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipes: Option<PipesConfig>,
    /// Membership in channels; none: it takes no part. From a config file only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<ChannelConfig>,
    /// Modules that it may use; none: it has none. From a config file only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules: Option<VmModulesConfig>,
}

/// `[vm.pipes]`: its presence switches pipes on. A VM from a file has a vsock and a network port
/// with it, but both may be detached while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PipesConfig {
    /// Most pipes at a time; more are refused.
    pub max: u32,
    /// Threads that move bytes.
    pub threads: u32,
    /// File with the secret of its agent; none: root, or a program that may use low ports, is taken
    /// for the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<PathBuf>,
}

/// Credit of a VM: its grant of the host's I/O, network and disks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreditConfig {
    /// Share under contention.
    pub weight: u32,
    /// Floor in bytes per second: below it the weight never holds the VM back; 0: no floor.
    pub floor_bytes_per_s: u64,
    /// Ceiling in bytes per second; 0: no ceiling.
    pub ceiling_bytes_per_s: u64,
    /// Ceiling in frames, packets and disk requests per second; 0: no ceiling.
    pub ceiling_ops_per_s: u64,
    /// Milliseconds of the ceilings that the VM may use at once after a pause.
    pub ceiling_burst_ms: u32,
}

impl Default for CreditConfig {
    fn default() -> Self {
        Self {
            weight: DEFAULT_WEIGHT,
            floor_bytes_per_s: 0,
            ceiling_bytes_per_s: 0,
            ceiling_ops_per_s: 0,
            ceiling_burst_ms: 100,
        }
    }
}

/// Weight of a VM whose config names none: leaves room for lighter ones.
pub const DEFAULT_WEIGHT: u32 = 100;

/// Path of a vhost-user socket, and the side that makes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndpointConfig {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Side of the socket that the daemon is.
    pub mode: SocketMode,
}

/// Side of a vhost-user socket that the daemon is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketMode {
    /// The daemon listens, the VMM connects.
    Listen,
    /// The VMM listens, the daemon connects.
    Dial,
}

/// Check of a frame's source by a network port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BindMode {
    /// Nothing.
    Off,
    /// The MAC address.
    Mac,
    /// MAC and IP addresses, in IP, ARP and NDP.
    MacAndIp,
}

/// `[[vm.net]]`: a network port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetConfig {
    /// Name of the port, unique in the VM.
    pub name: String,
    /// Name of its switch.
    pub switch: String,
    /// The VM's MAC address; none: the first one seen.
    #[serde(serialize_with = "mac_text", skip_serializing_if = "Option::is_none")]
    pub mac: Option<[u8; 6]>,
    /// IP addresses of the VM; empty: learned.
    pub addresses: Vec<IpAddr>,
    /// Check of a frame's source.
    pub bind: BindMode,
    /// Further addresses that it may use, shared with the other ports that name them.
    #[serde(skip_serializing_if = "BindAlso::is_empty")]
    pub bind_also: BindAlso,
    /// Frames that it may send besides ARP and IP.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Allowed>,
    /// Pairs of queues.
    pub queue_pairs: u16,
    /// Most broadcasts of the VM that are passed in a second; 0: no ceiling.
    pub broadcasts_per_s: u32,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Whether checksum and segmentation offloads are offered.
    pub offloads: bool,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// Whether control queue and config space are offered to QEMU too: for its `vhost-user-device`,
    /// which has none of its own, as its network device has.
    pub whole_device: bool,
    /// The vhost-user socket.
    #[serde(flatten)]
    pub endpoint: EndpointConfig,
}

/// `bind_also`: addresses that several ports may use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BindAlso {
    /// MAC addresses.
    pub macs: Vec<[u8; 6]>,
    /// IP addresses.
    pub addresses: Vec<IpAddr>,
}

impl BindAlso {
    /// Whether it names nothing.
    pub fn is_empty(&self) -> bool {
        self.macs.is_empty() && self.addresses.is_empty()
    }
}

impl Serialize for BindAlso {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let macs = self.macs.iter().copied().map(format_mac);
        s.collect_seq(macs.chain(self.addresses.iter().map(ToString::to_string)))
    }
}

/// An entry of `allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// Answers of a DHCP server.
    DhcpServer,
    /// Router advertisements and redirects.
    Router,
    /// Packets in packets.
    Tunnel,
    /// Frames with a length and an LLC header.
    Llc,
    /// All EtherTypes.
    Any,
    /// One EtherType.
    EtherType(u16),
}

impl Allowed {
    /// Entries with a name, and that name.
    pub const NAMED: [(&'static str, Self); 5] = [
        ("dhcp-server", Self::DhcpServer),
        ("router", Self::Router),
        ("tunnel", Self::Tunnel),
        ("llc", Self::Llc),
        ("any", Self::Any),
    ];
}

impl Serialize for Allowed {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        if let Self::EtherType(kind) = self {
            return s.collect_str(&format_args!("{kind:#06x}"));
        }
        let named = Self::NAMED.iter().find(|(_, named)| named == self);
        s.serialize_str(named.map_or("", |(name, _)| name))
    }
}

fn mac_text<S: Serializer>(mac: &Option<[u8; 6]>, s: S) -> Result<S::Ok, S::Error> {
    mac.map(format_mac).serialize(s)
}

/// `[[vm.disk]]`: a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    /// Name of the port, unique in the VM.
    pub name: String,
    /// Storage behind the disk.
    #[serde(flatten)]
    pub format: DiskFormat,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Most queues that a VMM may set up; queues that it leaves out cost next to nothing.
    pub queues: u16,
    /// Most data segments of a request, 1 to 254, as the driver is told.
    pub seg_max: u32,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Serial number shown to the guest, at most 20 bytes.
    pub serial: String,
    /// Whether the write cache is on when the driver does not say.
    pub writeback: bool,
    /// Treatment of requests that the storage fails.
    pub on_error: OnError,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// The vhost-user socket.
    #[serde(flatten)]
    pub endpoint: EndpointConfig,
}

/// Logical block size of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum BlockSize {
    /// Bytes: 512, 1024, 2048 or 4096.
    Bytes(u32),
    /// 512 bytes, or the size that direct I/O needs on the file system of a raw image.
    Auto(BlockSizeAuto),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockSizeAuto {
    /// The word.
    Auto,
}

impl BlockSize {
    /// The word `auto`.
    pub const AUTO: Self = Self::Auto(BlockSizeAuto::Auto);

    /// Size in bytes; the least one where the image's file system decides.
    pub fn least_bytes(self) -> u32 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Auto(_) => 512,
        }
    }
}

/// Treatment of a disk's requests that the storage fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The guest sees every error.
    Report,
    /// Every request that fails waits until the storage takes it; only flushes and impossible
    /// requests are reported.
    Hold,
    /// Requests that find no space wait; every other error is reported.
    #[default]
    Enospc,
}

/// Storage behind a disk. Named by the config, never guessed from content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "format")]
pub enum DiskFormat {
    /// A file or block device, byte for byte.
    Raw {
        /// Path of the file.
        path: PathBuf,
        /// Whether I/O bypasses the page cache.
        direct: bool,
        /// Most bytes of guest memory that are registered with the kernel, and pinned; 0: none.
        #[serde(rename = "registered_memory")]
        registered_memory_bytes: u64,
    },
    /// A qcow2 image.
    Qcow2 {
        /// Path of the file.
        path: PathBuf,
        /// Whether I/O bypasses the page cache.
        direct: bool,
        /// The only folder from which backing files are opened; none: images with one are refused.
        #[serde(skip_serializing_if = "Option::is_none")]
        backing_dir: Option<PathBuf>,
        /// File with the data of an image that keeps it outside; replaces the name in the image.
        #[serde(skip_serializing_if = "Option::is_none")]
        data_file: Option<PathBuf>,
        /// Bytes of the map that stay in memory, 64 KiB to 1 GiB; none: the usual 32 MiB.
        #[serde(rename = "map_cache", skip_serializing_if = "Option::is_none")]
        map_cache_bytes: Option<u64>,
    },
    /// Memory. The holder keeps it when the daemon ends; without a holder it is lost.
    Memory {
        /// Size in bytes.
        #[serde(rename = "size")]
        len_bytes: u64,
    },
    /// Nothing: writes are forgotten, reads are zeroes. For measurements.
    Null {
        /// Size in bytes.
        #[serde(rename = "size")]
        len_bytes: u64,
    },
}

impl DiskFormat {
    /// The word used in the config.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Raw { .. } => "raw",
            Self::Qcow2 { .. } => "qcow2",
            Self::Memory { .. } => "memory",
            Self::Null { .. } => "null",
        }
    }

    /// The image's path, for formats that have one.
    pub fn path(&self) -> Option<&PathBuf> {
        match self {
            Self::Raw { path, .. } | Self::Qcow2 { path, .. } => Some(path),
            Self::Memory { .. } | Self::Null { .. } => None,
        }
    }
}

/// `[vm.vsock]`: the vsock port, whose name is `vsock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VsockConfig {
    /// The VM's context id, unique on the host.
    pub cid: u64,
    /// Base of the host's Unix sockets: guests reach `<path>_<port>`, programs on the host connect
    /// to `<path>` and ask for a port.
    pub path: PathBuf,
    /// The vhost-user socket.
    #[serde(flatten)]
    pub endpoint: EndpointConfig,
}

/// Default prefix of the ids of QEMU's root ports that are for channels.
pub const DEFAULT_ROOT_PORTS: &str = "millrace";

/// `[channel]`: settings of all channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ChannelsConfig {
    /// Doorbells of each member: one for control, the others for queues.
    pub vectors: u32,
    /// Interval of heartbeats, in milliseconds.
    pub heartbeat_ms: u32,
    /// Time without a heartbeat after which a member is dead, in milliseconds.
    pub dead_after_ms: u32,
    /// Longest time for a member to leave, in milliseconds.
    pub drain_timeout_ms: u64,
}

impl Default for ChannelsConfig {
    fn default() -> Self {
        Self { vectors: 5, heartbeat_ms: 500, dead_after_ms: 2_000, drain_timeout_ms: 10_000 }
    }
}

/// `[vm.channel]`: its presence lets the VM take part in channels. The VM has a trust domain, whose
/// other members see its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChannelConfig {
    /// Socket of QEMU's monitor (QMP), for Millrace alone.
    pub qmp: PathBuf,
    /// Prefix of the ids of its root ports for channels.
    pub root_ports: String,
    /// MAC addresses of its network cards that are no ports of Millrace.
    #[serde(serialize_with = "macs_text")]
    pub macs: Vec<[u8; 6]>,
    /// IP addresses of those cards.
    pub addresses: Vec<IpAddr>,
    /// Whether it joins without being asked.
    pub auto: bool,
    /// Whether its memory file may lack a seal against shrinking.
    pub allow_unsealed: bool,
}

fn macs_text<S: Serializer>(macs: &[[u8; 6]], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(macs.iter().map(|mac| format_mac(*mac)))
}

/// `[[module]]`: a module that VMs may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModuleConfig {
    /// Name.
    pub name: String,
    /// File of its WebAssembly.
    pub path: PathBuf,
    /// SHA-256 that the file must have.
    #[serde(serialize_with = "sha256_text")]
    pub sha256: [u8; 32],
    /// Most bytes of memory.
    #[serde(rename = "memory")]
    pub memory_bytes: u64,
    /// CPU time of a call, in milliseconds.
    pub deadline_ms: u32,
}

fn sha256_text<S: Serializer>(hash: &[u8; 32], s: S) -> Result<S::Ok, S::Error> {
    format_sha256(hash).serialize(s)
}

/// `[vm.modules]`: modules of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmModulesConfig {
    /// Names of the modules.
    #[serde(rename = "use")]
    pub names: Vec<String>,
    /// Most bytes of files of each module.
    #[serde(rename = "disk")]
    pub disk_bytes: u64,
    /// Most of a core that each module may take, in percent.
    pub cpu_percent: u32,
    /// Folder of their files.
    pub dir: PathBuf,
    /// Socket at which programs of the host reach them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Whether any user of the guest reaches them over vsock. Else root and programs with
    /// `CAP_NET_BIND_SERVICE` do; and where requests come by rings alone, the users who may open
    /// the memory.
    pub guest_users: bool,
    /// Memory that its clients and modules share; none: they use sockets alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ring: Option<RingConfig>,
}

/// `[vm.modules.ring]`: memory in place of sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RingConfig {
    /// File of the memory, which QEMU maps too.
    pub path: PathBuf,
    /// Length of the file, a power of two.
    #[serde(rename = "size")]
    pub bytes: u64,
    /// Time that a module's thread polls rings before it sleeps, in microseconds.
    pub spin_us: u32,
    /// Whether requests of the guest are taken by rings alone.
    pub required: bool,
}

/// A port of any kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PortConfig {
    /// A network port.
    Net(NetConfig),
    /// A disk.
    Disk(DiskConfig),
    /// The vsock port.
    Vsock(VsockConfig),
}

/// Name of a VM's vsock port: a VM has one at most.
pub const VSOCK_PORT_NAME: &str = "vsock";

impl PortConfig {
    /// Name within the VM.
    pub fn name(&self) -> &str {
        match self {
            Self::Net(net) => &net.name,
            Self::Disk(disk) => &disk.name,
            Self::Vsock(_) => VSOCK_PORT_NAME,
        }
    }

    /// The vhost-user socket.
    pub fn endpoint(&self) -> &EndpointConfig {
        match self {
            Self::Net(net) => &net.endpoint,
            Self::Disk(disk) => &disk.endpoint,
            Self::Vsock(vsock) => &vsock.endpoint,
        }
    }
}

/// Folder below `daemon.state_dir` for native code of all modules.
const CODE_DIR: &str = "code";

impl Config {
    /// Folder for the native code of modules.
    #[must_use]
    pub fn code_dir(&self) -> PathBuf {
        self.daemon.state_dir.join(CODE_DIR)
    }

    /// Modules of a VM, in the order of its `use`; none: it has none.
    #[must_use]
    pub fn modules_of(&self, vm: &str) -> Option<(&VmModulesConfig, Vec<&ModuleConfig>)> {
        let used = self.vms.iter().find(|v| v.name == vm)?.modules.as_ref()?;
        let named = |name: &String| self.modules.iter().find(|module| module.name == *name);
        Some((used, used.names.iter().filter_map(named).collect()))
    }
}

impl VmConfig {
    /// A VM without ports, made at run time.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            from_file: false,
            credit: CreditConfig::default(),
            trust_domain: None,
            memory_limit_bytes: None,
            nets: Vec::new(),
            disks: Vec::new(),
            vsock: None,
            pipes: None,
            channel: None,
            modules: None,
        }
    }

    /// All ports of the VM: network, disks, vsock.
    pub fn ports(&self) -> impl Iterator<Item = PortConfig> + '_ {
        let nets = self.nets.iter().cloned().map(PortConfig::Net);
        let disks = self.disks.iter().cloned().map(PortConfig::Disk);
        nets.chain(disks).chain(self.vsock.iter().cloned().map(PortConfig::Vsock))
    }

    /// Takes one port in, without any check.
    pub(crate) fn push_port(&mut self, port: PortConfig) {
        match port {
            PortConfig::Net(net) => self.nets.push(net),
            PortConfig::Disk(disk) => self.disks.push(disk),
            PortConfig::Vsock(vsock) => self.vsock = Some(vsock),
        }
    }

    /// Forgets one port; false when there is none of this name.
    pub(crate) fn remove_port(&mut self, name: &str) -> bool {
        let before = self.nets.len() + self.disks.len() + usize::from(self.vsock.is_some());
        self.nets.retain(|n| n.name != name);
        self.disks.retain(|d| d.name != name);
        if name == VSOCK_PORT_NAME {
            self.vsock = None;
        }
        before != self.nets.len() + self.disks.len() + usize::from(self.vsock.is_some())
    }
}
