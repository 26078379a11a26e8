//! Readers of the ports' tables: `[[vm.net]]`, `[[vm.disk]]`, `[vm.vsock]`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use base::limits::{MAX_DISK_QUEUES, MAX_NAME_LEN_BYTES, MAX_QUEUE_PAIRS};

use crate::model::{
    Allowed, BindAlso, BindMode, BlockSize, DiskConfig, DiskFormat, EndpointConfig, NetConfig,
    OnError, SocketMode, VSOCK_PORT_NAME, VsockConfig,
};
use crate::node::Value;
use crate::reader::Reader;
use crate::value::parse_mac;

/// Largest disk of memory: what the block engine takes.
const MAX_MEMORY_DISK_LEN_BYTES: u64 = 64 << 30;

/// Largest null disk (1 PiB): sectors stay far from 64-bit overflow.
const MAX_NULL_DISK_LEN_BYTES: u64 = 1 << 50;

/// A disk's serial number: `VIRTIO_BLK_ID_BYTES`.
const MAX_SERIAL_LEN_BYTES: usize = 20;

/// Most IP addresses bound to one port.
const MAX_ADDRESSES: usize = 64;

/// Most entries of `allow`: each is compared with the type of a frame that is no IP.
const MAX_ALLOWED: usize = 16;

/// Bytes that `_4294967295`, the longest port, adds to the base of a vsock's Unix sockets.
const VSOCK_SUFFIX_LEN_BYTES: usize = 11;

/// Run folder and VM of a port, which make the path of its default socket.
pub(crate) struct Home<'a> {
    pub(crate) run_dir: &'a Path,
    pub(crate) vm: &'a str,
}

fn endpoint(r: &mut Reader<'_, '_>, home: &Home<'_>, port: &str) -> EndpointConfig {
    let default = || home.run_dir.join(format!("{}-{port}.sock", home.vm));
    let socket = r.path("socket").unwrap_or_else(default);
    r.socket_fits("socket", &socket, 0);
    let mode = r.choice("mode", &[("listen", SocketMode::Listen), ("dial", SocketMode::Dial)]);
    EndpointConfig { socket, mode }
}

/// Checks the length of `vm/port`, by which engines, the holder and logs name a port.
fn full_name_fits(r: &mut Reader<'_, '_>, home: &Home<'_>, port: &str) {
    let len = home.vm.len() + 1 + port.len();
    if len > MAX_NAME_LEN_BYTES && home.vm.len() <= MAX_NAME_LEN_BYTES {
        let what = format!("{}/{port} has {len} bytes, the limit is {MAX_NAME_LEN_BYTES}", home.vm);
        r.bad("name", what, "shorten the VM's name or the port's");
    }
}

/// Reads the name of a network port or disk.
fn port_name(r: &mut Reader<'_, '_>, home: &Home<'_>) -> String {
    let name = r.name();
    full_name_fits(r, home, &name);
    if name == VSOCK_PORT_NAME {
        r.bad("name", "\"vsock\" is the name of every VM's vsock port", "take another name");
    }
    name
}

pub(crate) fn net(mut r: Reader<'_, '_>, home: &Home<'_>) -> NetConfig {
    let name = port_name(&mut r, home);
    let switch = r.required("switch", "\"...\"").unwrap_or("").into();
    let mac = mac(&mut r);
    let addresses = addresses(&mut r, MAX_ADDRESSES);
    let bind = r.choice(
        "bind",
        &[("mac-and-ip", BindMode::MacAndIp), ("mac", BindMode::Mac), ("off", BindMode::Off)],
    );
    if !addresses.is_empty() && bind != BindMode::MacAndIp {
        let fix = "write bind = \"mac-and-ip\", or take the addresses out";
        r.bad("addresses", "are checked only with bind = \"mac-and-ip\"", fix);
    }
    let bind_also = bind_also(&mut r, mac);
    let allow = allow(&mut r);
    if !allow.is_empty() && bind != BindMode::MacAndIp {
        let fix = "write bind = \"mac-and-ip\", or take it out: without it all may be sent";
        r.bad("allow", "limits only ports with bind = \"mac-and-ip\"", fix);
    }
    let queue_pairs = r.int("queue_pairs", 1, 1..=u64::from(MAX_QUEUE_PAIRS)) as u16;
    let broadcasts_per_s = r.int("broadcasts_per_s", 10_000, 0..=1_000_000_000) as u32;
    let mtu = r.int("mtu", 1500, 68..=65_535) as u16;
    let offloads = r.bool("offloads", true);
    let packed = r.bool("packed", true);
    let whole_device = r.bool("whole_device", false);
    let endpoint = endpoint(&mut r, home, &name);
    r.finish();
    NetConfig {
        name,
        switch,
        mac,
        addresses,
        bind,
        bind_also,
        allow,
        queue_pairs,
        broadcasts_per_s,
        mtu,
        offloads,
        packed,
        whole_device,
        endpoint,
    }
}

/// Reads `bind_also`: MAC and IP addresses, in any order.
fn bind_also(r: &mut Reader<'_, '_>, own: Option<[u8; 6]>) -> BindAlso {
    let mut also = BindAlso::default();
    for (_, node) in r.list("bind_also") {
        let Value::Str(text) = &node.value else {
            let fix = "write strings: [\"00:00:5e:00:01:0a\", \"192.0.2.100\"]";
            r.bad("bind_also", format!("has {}", node.value.kind()), fix);
            continue;
        };
        match (text.parse::<IpAddr>(), check_mac(text)) {
            (Ok(ip), _) if ip.is_multicast() || ip.is_unspecified() => {
                r.bad("bind_also", format!("{ip} belongs to no host"), "write addresses of hosts");
            }
            (Ok(ip), _) => also.addresses.push(ip),
            (_, Ok(mac)) if Some(mac) == own => {
                let what = format!("names {text}, the port's own `mac`");
                r.bad("bind_also", what, "an address that several ports use is no port's `mac`");
            }
            (_, Ok(mac)) => also.macs.push(mac),
            (_, Err((what, _))) => {
                r.bad("bind_also", what, "write MAC and IP addresses as strings");
            }
        }
    }
    if also.macs.len() + also.addresses.len() > MAX_ADDRESSES {
        let what = format!("has {} entries", also.macs.len() + also.addresses.len());
        r.bad("bind_also", what, format!("the limit is {MAX_ADDRESSES}"));
    }
    also
}

/// Reads `allow`: names of roles, and EtherTypes as they are written everywhere: `"0x8847"`.
fn allow(r: &mut Reader<'_, '_>) -> Vec<Allowed> {
    let mut all = Vec::new();
    for (_, node) in r.list("allow") {
        let text = match &node.value {
            Value::Str(text) => text.as_str(),
            _ => "",
        };
        let named = Allowed::NAMED.iter().find(|(name, _)| *name == text).map(|(_, named)| *named);
        let hex = text.strip_prefix("0x").and_then(|hex| u16::from_str_radix(hex, 16).ok());
        match named.or(hex.filter(|kind| *kind >= 0x600).map(Allowed::EtherType)) {
            Some(entry) if all.contains(&entry) => {
                r.bad("allow", format!("names {text} twice"), "name it once");
            }
            Some(entry) => all.push(entry),
            None => {
                let names = Allowed::NAMED.map(|(name, _)| name).join("\", \"");
                let what = match &node.value {
                    Value::Str(text) => format!("{text:?} is no role and no EtherType"),
                    other => format!("has {}", other.kind()),
                };
                r.bad("allow", what, format!("write \"{names}\", or an EtherType: \"0x8847\""));
            }
        }
    }
    if all.len() > MAX_ALLOWED {
        let what = format!("has {} entries", all.len());
        r.bad("allow", what, format!("the limit is {MAX_ALLOWED}; \"any\" names all EtherTypes"));
    }
    all
}

fn mac(r: &mut Reader<'_, '_>) -> Option<[u8; 6]> {
    match check_mac(r.string("mac")?) {
        Ok(mac) => Some(mac),
        Err((what, fix)) => {
            r.bad("mac", what, fix);
            None
        }
    }
}

/// Parses the MAC address of a card; the error says what is wrong and how to mend it.
pub(crate) fn check_mac(text: &str) -> Result<[u8; 6], (String, &'static str)> {
    match parse_mac(text) {
        None => Err((format!("{text:?} is no MAC address"), "write six hex bytes with `:`")),
        Some([first, ..]) if first & 1 != 0 => {
            Err((format!("{text} is a group address"), "make the first byte even: 02:..."))
        }
        Some([0, 0, 0, 0, 0, 0]) => Err(("is all zero".into(), "write an address: 02:...")),
        Some(mac) => Ok(mac),
    }
}

/// Reads `addresses`, at most `limit`.
pub(crate) fn addresses(r: &mut Reader<'_, '_>, limit: usize) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = Vec::new();
    for (_, node) in r.list("addresses") {
        let parsed = match &node.value {
            Value::Str(s) => s.parse::<IpAddr>().map_err(|_| format!("{s:?} is no IP address")),
            other => Err(format!("has {}", other.kind())),
        };
        match parsed {
            Err(what) => r.bad("addresses", what, "write strings: [\"192.0.2.1\", \"fe80::1\"]"),
            Ok(ip) if ip.is_multicast() || ip.is_unspecified() => {
                r.bad("addresses", format!("{ip} belongs to no host"), "write the VM's own");
            }
            Ok(ip) if all.contains(&ip) => {
                r.bad("addresses", format!("names {ip} twice"), "name it once");
            }
            Ok(ip) => all.push(ip),
        }
    }
    if all.len() > limit {
        let what = format!("has {} entries", all.len());
        r.bad("addresses", what, format!("the limit is {limit}"));
    }
    all
}

pub(crate) fn disk(mut r: Reader<'_, '_>, home: &Home<'_>) -> DiskConfig {
    let name = port_name(&mut r, home);
    let block_size = block_size(&mut r);
    let format = format(&mut r, block_size.least_bytes());
    let read_only = r.bool("read_only", false);
    let most = u64::from(MAX_DISK_QUEUES);
    let queues = r.int("queues", most, 1..=most) as u16;
    let seg_max = r.int("seg_max", 126, 1..=254) as u32;
    let serial = r.string("serial").unwrap_or("").to_string();
    if serial.len() > MAX_SERIAL_LEN_BYTES || !serial.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        r.bad("serial", format!("{serial:?} is no serial number"), "use at most 20 ASCII bytes");
    }
    let writeback = r.bool("writeback", true);
    let on_error = on_error(&mut r);
    let packed = r.bool("packed", true);
    let endpoint = endpoint(&mut r, home, &name);
    r.finish();
    DiskConfig {
        name,
        format,
        read_only,
        queues,
        seg_max,
        block_size,
        serial,
        writeback,
        on_error,
        packed,
        endpoint,
    }
}

fn on_error(r: &mut Reader<'_, '_>) -> OnError {
    let words = [("enospc", OnError::Enospc), ("hold", OnError::Hold), ("report", OnError::Report)];
    r.choice("on_error", &words)
}

fn block_size(r: &mut Reader<'_, '_>) -> BlockSize {
    if r.get("block_size").is_some_and(|node| matches!(node.value, Value::Str(_))) {
        return r.choice("block_size", &[("auto", BlockSize::AUTO)]);
    }
    let size = r.int("block_size", 512, 512..=4096) as u32;
    if !size.is_power_of_two() {
        r.bad("block_size", format!("is {size}"), "write 512, 1024, 2048, 4096 or \"auto\"");
        return BlockSize::Bytes(512);
    }
    BlockSize::Bytes(size)
}

fn format(r: &mut Reader<'_, '_>, block_size: u32) -> DiskFormat {
    #[derive(Clone, Copy)]
    enum Word {
        Missing,
        Raw,
        Qcow2,
        Memory,
        Null,
    }
    let words = [
        ("raw", Word::Raw),
        ("qcow2", Word::Qcow2),
        ("memory", Word::Memory),
        ("null", Word::Null),
    ];
    let word = if r.get("format").is_none() {
        let fix = "add `format = \"raw\"`, \"qcow2\", \"memory\" or \"null\": it is never guessed, \
                   since a guest can write any header";
        r.bad("format", "is missing", fix);
        Word::Missing
    } else {
        r.choice("format", &words)
    };
    let fields = FormatFields {
        path: r.path("path"),
        path_here: r.get("path").is_some(),
        size: r.size("size"),
        size_here: r.get("size").is_some(),
        direct: r.bool("direct", false),
        registered_memory_bytes: r.size("registered_memory").unwrap_or(0),
        backing_dir: r.path("backing_dir"),
        data_file: r.path("data_file"),
        map_cache_bytes: r.size("map_cache"),
    };
    match word {
        Word::Raw => fields.raw(r),
        Word::Qcow2 => fields.qcow2(r),
        Word::Memory => DiskFormat::Memory {
            len_bytes: fields.sized(r, "memory", block_size, MAX_MEMORY_DISK_LEN_BYTES),
        },
        Word::Null => DiskFormat::Null {
            len_bytes: fields.sized(r, "null", block_size, MAX_NULL_DISK_LEN_BYTES),
        },
        // Already noted; which of the other settings fit cannot be said.
        Word::Missing => DiskFormat::Null { len_bytes: 0 },
    }
}

/// Settings that only some formats of disks have.
struct FormatFields {
    path: Option<PathBuf>,
    path_here: bool,
    size: Option<u64>,
    size_here: bool,
    direct: bool,
    registered_memory_bytes: u64,
    backing_dir: Option<PathBuf>,
    data_file: Option<PathBuf>,
    map_cache_bytes: Option<u64>,
}

impl FormatFields {
    fn file(&self, r: &mut Reader<'_, '_>, format: &str) -> PathBuf {
        if !self.path_here {
            r.bad("path", "is missing", format!("a {format} disk needs the path of its image"));
        }
        if self.size_here {
            let what = format!("does not go with format = \"{format}\"");
            r.bad("size", what, "take it out: the size is that of the file");
        }
        self.path.clone().unwrap_or_default()
    }

    fn raw(self, r: &mut Reader<'_, '_>) -> DiskFormat {
        let path = self.file(r, "raw");
        for (key, here, fix) in [
            ("backing_dir", self.backing_dir.is_some(), "only qcow2 has backing files"),
            ("data_file", self.data_file.is_some(), "only qcow2 has data files"),
            ("map_cache", self.map_cache_bytes.is_some(), "only qcow2 has a map"),
        ] {
            if here {
                r.bad(key, "does not go with format = \"raw\"", fix);
            }
        }
        if self.registered_memory_bytes > 0 && !self.direct {
            let fix = "add `direct = true`: the page cache copies, and gains nothing by it";
            r.bad("registered_memory", "is set, and direct is false", fix);
        }
        let Self { direct, registered_memory_bytes, .. } = self;
        DiskFormat::Raw { path, direct, registered_memory_bytes }
    }

    fn qcow2(self, r: &mut Reader<'_, '_>) -> DiskFormat {
        let path = self.file(r, "qcow2");
        self.no_registered_memory(r, "qcow2");
        let limits = 64 << 10..=1 << 30;
        if self.map_cache_bytes.is_some_and(|bytes| !limits.contains(&bytes)) {
            r.bad("map_cache", "is outside its limits", "write 64KiB to 1GiB, or leave it out");
        }
        let Self { direct, backing_dir, data_file, map_cache_bytes, .. } = self;
        DiskFormat::Qcow2 { path, direct, backing_dir, data_file, map_cache_bytes }
    }

    fn no_registered_memory(&self, r: &mut Reader<'_, '_>, format: &str) {
        if self.registered_memory_bytes > 0 {
            let what = format!("does not go with format = \"{format}\"");
            r.bad("registered_memory", what, "take it out: only direct raw disks have it");
        }
    }

    fn sized(self, r: &mut Reader<'_, '_>, format: &str, block_size: u32, limit: u64) -> u64 {
        self.no_registered_memory(r, format);
        let unfit = format!("does not go with format = \"{format}\"");
        for (key, here) in [
            ("path", self.path_here),
            ("direct", self.direct),
            ("backing_dir", self.backing_dir.is_some()),
            ("data_file", self.data_file.is_some()),
            ("map_cache", self.map_cache_bytes.is_some()),
        ] {
            if here {
                r.bad(key, unfit.as_str(), "take it out: there is no file");
            }
        }
        if !self.size_here {
            r.bad("size", "is missing", format!("a {format} disk needs one: `size = \"64MiB\"`"));
        }
        let Some(size) = self.size else {
            return 0;
        };
        if size == 0 || size > limit || size % u64::from(block_size) != 0 {
            let fix = format!("write a multiple of block_size {block_size} from 1 to {limit}");
            r.bad("size", format!("is {size} bytes"), fix);
        }
        size
    }
}

pub(crate) fn vsock(mut r: Reader<'_, '_>, home: &Home<'_>) -> VsockConfig {
    // 0 to 2 name the hypervisor, the local and the host; 2^32 - 1 is "any".
    let here = r.get("cid").is_some();
    let cid = r.int("cid", 0, 3..=u64::from(u32::MAX) - 1);
    if !here {
        r.bad("cid", "is missing", "add `cid = 3` or another number unique on this host");
    }
    let path = r.path("path");
    if r.get("path").is_none() {
        r.bad("path", "is missing", "add the base of the host's Unix sockets, an absolute path");
    }
    let path = path.unwrap_or_default();
    r.socket_fits("path", &path, VSOCK_SUFFIX_LEN_BYTES);
    full_name_fits(&mut r, home, VSOCK_PORT_NAME);
    let endpoint = endpoint(&mut r, home, VSOCK_PORT_NAME);
    r.finish();
    VsockConfig { cid, path, endpoint }
}
