//! The config as the daemon uses it: defaults filled in, every value inside its limits.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use super::channel::{ChannelConfig, ChannelsConfig};
use super::modules::{ModuleConfig, VmModulesConfig};
use super::value::format_mac;

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Config {
    /// The daemon itself.
    pub daemon: DaemonConfig,
    /// Its polling threads.
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

/// `[daemon]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DaemonConfig {
    /// Where sockets are made by default.
    pub run_dir: PathBuf,
    /// What outlives a reboot: files of modules, and their native code.
    pub state_dir: PathBuf,
    /// The control API's socket.
    pub control_socket: PathBuf,
    /// The API's second socket, for listings and metrics only; none: there is none.
    #[serde(flatten)]
    pub read_socket: Option<ReadSocketConfig>,
    /// File mode of the vhost-user sockets: who may be the VMM.
    #[serde(serialize_with = "mode_text")]
    pub socket_mode: u32,
    /// Who keeps the sessions across a restart.
    pub holder: HolderConfig,
    /// What is logged: a level, or directives such as `info,net=debug`.
    pub log: String,
}

/// `read_socket` and `read_group` of `[daemon]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReadSocketConfig {
    /// Where it is.
    #[serde(rename = "read_socket")]
    pub path: PathBuf,
    /// Who may connect, besides the owner.
    #[serde(rename = "read_group")]
    pub group: String,
}

fn mode_text<S: Serializer>(mode: &u32, s: S) -> Result<S::Ok, S::Error> {
    format!("{mode:04o}").serialize(s)
}

/// Who keeps the sessions while the daemon restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HolderConfig {
    /// As `serve --default-holder` says, which the packaged unit does; else nobody.
    Default,
    /// Nobody: a restart disconnects the VMMs.
    None,
    /// A process that the daemon starts, at `run_dir/holder.sock`, and that outlives it.
    Own,
    /// A holder started by somebody else (its own systemd unit), at this socket.
    External(PathBuf),
}

/// `[sidecore]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct SidecoreConfig {
    /// How many, and where.
    pub placement: Placement,
    /// Fewest that are active; none: 1 with [`Placement::Auto`] and with `max`, else all.
    pub min: Option<usize>,
    /// Most that are active; none: all.
    pub max: Option<usize>,
    /// Longest poll without work before sleeping, in microseconds; none: by the machine's size.
    pub spin_us: Option<u32>,
    /// Whether the polling time adapts.
    pub spin: SpinKind,
    /// What is done between two empty polls.
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

/// What is done between two empty polls.
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

/// How many sidecores, and on which CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    #[default]
    /// By the machine's size, not pinned.
    Auto,
    /// So many, not pinned.
    Count(usize),
    /// One on each of these CPUs.
    Cpus(Vec<usize>),
}

/// `[[switch]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SwitchConfig {
    /// Name.
    pub name: String,
    /// How long frames wait for a receiver without buffers, in microseconds.
    pub hold_us: u32,
    /// How long a learned MAC lives without traffic, in seconds.
    pub mac_age_s: u32,
    /// The way out of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink: Option<UplinkConfig>,
}

/// `[switch.uplink]`.
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

/// `[[vm]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VmConfig {
    /// Name.
    pub name: String,
    /// It is in a config file, and stays without ports.
    #[serde(skip)]
    pub from_file: bool,
    /// Its share of I/O under contention, what it has in any case, and what it never exceeds.
    #[serde(flatten)]
    pub credit: CreditConfig,
    /// VMs of one trust domain may talk over vsock, and have channels; none: this VM talks to the
    /// host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
    /// Most bytes of memory that its front ends may share, all of its ports together; none: twice the
    /// host's memory, 1 TiB at least. Of a config file only.
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
    /// What the host moves for its programs; none: it has no pipes. Of a config file only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipes: Option<PipesConfig>,
    /// How it takes part in channels; none: it does not. Of a config file only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<ChannelConfig>,
    /// The modules that it may use; none: it has none. Of a config file only.
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
    /// The file with what its agent must know; none: root, and who may use low ports, is the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<PathBuf>,
}

/// What a VM is granted of the host's I/O, network and disks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreditConfig {
    /// Share under contention.
    pub weight: u32,
    /// Bytes per second that it is never kept from by its weight; 0: none.
    pub floor_bytes_per_s: u64,
    /// Bytes per second that it is kept from exceeding; 0: no ceiling.
    pub ceiling_bytes_per_s: u64,
    /// Frames, packets and disk requests per second that it is kept from exceeding; 0: no ceiling.
    pub ceiling_ops_per_s: u64,
    /// Milliseconds of its ceilings that it may use at once after a pause.
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

/// Weight of a VM whose config does not say: room for lighter ones.
pub const DEFAULT_WEIGHT: u32 = 100;

/// Where the vhost-user socket is, and who makes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndpointConfig {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Who listens.
    pub mode: SocketMode,
}

/// Which side of a vhost-user socket we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketMode {
    /// We listen, the VMM connects.
    Listen,
    /// The VMM listens, we connect.
    Dial,
}

/// What a network port checks of a frame's source.
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

/// `[[vm.net]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetConfig {
    /// Name of the port, unique in the VM.
    pub name: String,
    /// The switch it is on.
    pub switch: String,
    /// The VM's MAC address; none: the first one seen.
    #[serde(serialize_with = "mac_text", skip_serializing_if = "Option::is_none")]
    pub mac: Option<[u8; 6]>,
    /// Its IP addresses; empty: learned.
    pub addresses: Vec<IpAddr>,
    /// What is checked of a frame's source.
    pub bind: BindMode,
    /// What it may use besides, shared with the other ports that name it.
    #[serde(skip_serializing_if = "BindAlso::is_empty")]
    pub bind_also: BindAlso,
    /// What it may send besides ARP and IP.
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
    /// Whether control queue and config space are offered to QEMU too, whose own network device has
    /// its own: its `vhost-user-device` has none.
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
    /// Those with a name.
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

/// `[[vm.disk]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskConfig {
    /// Name of the port, unique in the VM.
    pub name: String,
    /// What is behind it.
    #[serde(flatten)]
    pub format: DiskFormat,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The most queues that a VMM may set up; those that it does not cost next to nothing.
    pub queues: u16,
    /// Data segments of a request that the driver is told of, 1 to 254.
    pub seg_max: u32,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Serial number shown to the guest, at most 20 bytes.
    pub serial: String,
    /// Whether the write cache is on when the driver does not say.
    pub writeback: bool,
    /// What becomes of requests that the storage fails.
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
    /// 512 bytes, or what direct I/O asks for where a raw image is.
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

    /// Its bytes, the smallest ones where it depends on the image's place.
    pub fn least_bytes(self) -> u32 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Auto(_) => 512,
        }
    }
}

/// What becomes of a disk's request that the storage fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The guest sees every error.
    Report,
    /// Every request that fails waits until the storage takes it; flushes are reported, and what can
    /// never be done.
    Hold,
    /// Requests that find no space wait; every other error is reported.
    #[default]
    Enospc,
}

/// What is behind a disk. Named by the config, never guessed from content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "format")]
pub enum DiskFormat {
    /// A file or block device, byte for byte.
    Raw {
        /// Its path.
        path: PathBuf,
        /// Whether the page cache is passed by.
        direct: bool,
        /// Most of the guest's memory that is registered with the kernel, and pinned; 0: none.
        #[serde(rename = "registered_memory")]
        registered_memory_bytes: u64,
    },
    /// A qcow2 image.
    Qcow2 {
        /// Its path.
        path: PathBuf,
        /// Whether the page cache is passed by.
        direct: bool,
        /// The only folder from which backing files are opened; none: images with one are refused.
        #[serde(skip_serializing_if = "Option::is_none")]
        backing_dir: Option<PathBuf>,
        /// The file with the data of an image that keeps it apart, whatever name the image has for it.
        #[serde(skip_serializing_if = "Option::is_none")]
        data_file: Option<PathBuf>,
        /// Bytes of the map that are kept in memory, 64 KiB to 1 GiB; none: the usual 32 MiB.
        #[serde(rename = "map_cache", skip_serializing_if = "Option::is_none")]
        map_cache_bytes: Option<u64>,
    },
    /// Memory; the holder keeps it over the daemon's end, and without one it is gone then.
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

/// `[vm.vsock]`. The port's name is `vsock`.
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

/// Name of every VM's vsock port: there is one at most.
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

    /// All its ports: nets, disks, vsock.
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
