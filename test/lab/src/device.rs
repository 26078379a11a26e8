//! The devices a guest can have, and QEMU's arguments for each.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::{Qemu, qemu72};

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Net {
    /// QEMU's own device on a TAP of the lab's network namespace.
    Tap {
        /// The TAP's name; it must exist ([`crate::NetLab::tap`]).
        ifname: String,
        /// The host's kernel serves its rings ([`crate::vhost_net`]), not QEMU.
        vhost: bool,
    },
    /// A vhost-user back end.
    VhostUser(VhostUserNet),
    /// A slot without a card, so that the next card keeps its number.
    None,
}

/// A vhost-user network card. MAC addresses follow the guest and slot unless given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserNet {
    /// The socket.
    pub socket: PathBuf,
    /// Queue pairs.
    pub queues: u16,
    /// Offer packed rings.
    pub packed: bool,
    /// Offer mergeable receive buffers.
    pub mergeable: bool,
    /// QEMU listens and the daemon dials (`mode = "dial"` in the daemon's config).
    pub server: bool,
    /// Seconds between QEMU's own attempts to connect again; 0 for none. QEMU refuses it together
    /// with `server`.
    pub reconnect_s: u32,
    /// The card's MAC address.
    pub mac: Option<String>,
    /// Has QEMU's ROM (iPXE), by which a firmware boots from the network.
    pub boot_rom: bool,
    /// More properties of the QEMU device, such as `host_mtu=9000`.
    pub properties: Vec<String>,
}

impl Net {
    /// A TAP.
    #[must_use]
    pub fn tap(ifname: impl Into<String>) -> Self {
        Self::Tap { ifname: ifname.into(), vhost: false }
    }

    /// A TAP whose rings the host's kernel serves. QEMU ends where that cannot be.
    #[must_use]
    pub fn tap_vhost(ifname: impl Into<String>) -> Self {
        Self::Tap { ifname: ifname.into(), vhost: true }
    }

    /// A vhost-user card with one queue pair, split rings, mergeable buffers, QEMU connecting and
    /// reconnecting every second.
    #[must_use]
    pub fn vhost_user(socket: impl Into<PathBuf>) -> VhostUserNet {
        VhostUserNet {
            socket: socket.into(),
            queues: 1,
            packed: false,
            mergeable: true,
            server: false,
            reconnect_s: 1,
            mac: None,
            boot_rom: false,
            properties: Vec::new(),
        }
    }
}

impl From<VhostUserNet> for Net {
    fn from(net: VhostUserNet) -> Self {
        Self::VhostUser(net)
    }
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// QEMU's own virtio-blk on a file.
    QemuFile(QemuFile),
    /// A vhost-user back end.
    VhostUser(VhostUserDisk),
}

/// The format of a disk image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain bytes.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

/// How QEMU uses the host's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// Through it, flushing when the guest asks.
    Writeback,
    /// Around it (`O_DIRECT`).
    None,
    /// Through it, never flushing.
    Unsafe,
}

/// How QEMU waits for the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// A pool of threads.
    Threads,
    /// Linux AIO; needs [`CacheMode::None`].
    Native,
    /// Engine `io_uring`.
    IoUring,
}

/// A file behind QEMU's own virtio-blk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuFile {
    /// The image.
    pub path: PathBuf,
    /// Format of the disk.
    pub format: Format,
    /// The page cache.
    pub cache: CacheMode,
    /// Asynchronous I/O.
    pub aio: Aio,
    /// Serve it in a thread of its own.
    pub iothread: bool,
    /// Refuse writes.
    pub read_only: bool,
}

/// A vhost-user disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserDisk {
    /// The socket.
    pub socket: PathBuf,
    /// Queues; none leaves it to QEMU, which sets up one for each CPU.
    pub queues: Option<u16>,
    /// Offer packed rings.
    pub packed: bool,
    /// QEMU listens and the daemon dials.
    pub server: bool,
    /// Seconds between QEMU's own attempts to connect again; 0 for none.
    pub reconnect_s: u32,
    /// More properties of the QEMU device, such as `queue-size=256`.
    pub properties: Vec<String>,
}

impl Disk {
    /// A raw file through the page cache with io_uring and a thread of its own.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> QemuFile {
        QemuFile {
            path: path.into(),
            format: Format::Raw,
            cache: CacheMode::Writeback,
            aio: Aio::IoUring,
            iothread: true,
            read_only: false,
        }
    }

    /// A vhost-user disk with a queue for each CPU and split rings, QEMU connecting and
    /// reconnecting every second.
    #[must_use]
    pub fn vhost_user(socket: impl Into<PathBuf>) -> VhostUserDisk {
        VhostUserDisk {
            socket: socket.into(),
            queues: None,
            packed: false,
            server: false,
            reconnect_s: 1,
            properties: Vec::new(),
        }
    }
}

impl From<QemuFile> for Disk {
    fn from(file: QemuFile) -> Self {
        Self::QemuFile(file)
    }
}

impl From<VhostUserDisk> for Disk {
    fn from(disk: VhostUserDisk) -> Self {
        Self::VhostUser(disk)
    }
}

/// A vsock device; the guest's CID comes from the back end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vsock {
    /// The back end's socket.
    pub socket: PathBuf,
}

impl Vsock {
    /// A vhost-user back end.
    #[must_use]
    pub fn vhost_user(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }
}

/// Most root ports that a guest can have: a channel has that many members besides the guest.
pub const MAX_ROOT_PORTS: u8 = 31;
/// Chassis, slot and PCI addresses of root ports begin above those that QEMU gives out itself.
const FIRST_CHASSIS: u8 = 32;
const FIRST_ADDRESS: u8 = 16;
/// Functions of one PCI device.
const FUNCTIONS: u8 = 8;
/// Room for BARs behind one root port.
const ROOT_PORT_RESERVE: &str = "1G";

/// A path in a QEMU option list, where a comma separates and two stand for one.
pub(crate) fn quoted(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

/// A locally administered MAC address from a guest's name and a slot: the same every time.
#[must_use]
pub fn mac_of(guest: &str, slot: usize) -> String {
    let hash = xxhash_rust::xxh3::xxh3_64(guest.as_bytes()).to_le_bytes();
    format!("52:54:{:02x}:{:02x}:{:02x}:{slot:02x}", hash[0], hash[1], hash[2])
}

/// First version that counts the time to a new connection in milliseconds; the older word is to go.
const RECONNECT_MS: (u32, u32) = (9, 2);

/// Arguments of a QEMU, in the making.
pub(crate) struct Arguments<'a> {
    pub(crate) words: Vec<String>,
    qemu: &'a Qemu,
}

impl<'a> Arguments<'a> {
    pub(crate) fn for_qemu(qemu: &'a Qemu) -> Self {
        Self { words: Vec::new(), qemu }
    }

    pub(crate) fn add(&mut self, option: &str, value: impl fmt::Display) {
        self.words.extend([format!("-{option}"), value.to_string()]);
    }

    fn chardev(&mut self, id: &str, socket: &Path, server: bool, reconnect_s: u32) {
        let mut text = format!("socket,id={id},path={}", quoted(socket));
        if server {
            text.push_str(",server=on,wait=off");
        } else if reconnect_s > 0 && self.qemu.version() < RECONNECT_MS {
            text.push_str(&format!(",reconnect={reconnect_s}"));
        } else if reconnect_s > 0 {
            text.push_str(&format!(",reconnect-ms={}", reconnect_s * 1000));
        }
        self.add("chardev", text);
    }

    pub(crate) fn net(&mut self, guest: &str, slot: usize, net: &Net) {
        let mut device = format!("virtio-net-pci,id=net{slot},netdev=nd{slot}");
        // A ROM costs each boot a second.
        if !matches!(net, Net::VhostUser(net) if net.boot_rom) {
            device.push_str(",romfile=");
        }
        match net {
            Net::None => return,
            Net::Tap { ifname, vhost } => {
                let options = format!("script=no,downscript=no,vhost={}", on(*vhost));
                self.add("netdev", format!("tap,id=nd{slot},ifname={ifname},{options}"));
                device.push_str(&format!(",mac={}", mac_of(guest, slot)));
            }
            Net::VhostUser(net) => {
                let (id, queues) = (format!("nc{slot}"), net.queues);
                self.chardev(&id, &net.socket, net.server, net.reconnect_s);
                let netdev = format!("vhost-user,id=nd{slot},chardev={id},queues={queues}");
                self.add("netdev", netdev);
                let mac = net.mac.clone().unwrap_or_else(|| mac_of(guest, slot));
                device.push_str(&format!(
                    ",mac={mac}{},mq={},packed={},mrg_rxbuf={}",
                    qemu72::net_properties(self.qemu),
                    on(queues > 1),
                    on(net.packed),
                    on(net.mergeable)
                ));
                for property in &net.properties {
                    device.push_str(&format!(",{property}"));
                }
            }
        }
        self.add("device", device);
    }

    pub(crate) fn disk(&mut self, slot: usize, disk: &Disk) {
        match disk {
            Disk::QemuFile(file) => self.qemu_file(slot, file),
            Disk::VhostUser(disk) => {
                let id = format!("dc{slot}");
                self.chardev(&id, &disk.socket, disk.server, disk.reconnect_s);
                let mut device = format!(
                    "vhost-user-blk-pci,id=disk{slot},chardev={id},packed={}",
                    on(disk.packed)
                );
                if let Some(queues) = disk.queues {
                    device.push_str(&format!(",num-queues={queues}"));
                }
                for property in &disk.properties {
                    device.push_str(&format!(",{property}"));
                }
                self.add("device", device);
            }
        }
    }

    fn qemu_file(&mut self, slot: usize, file: &QemuFile) {
        let aio = match file.aio {
            Aio::Threads => "threads",
            Aio::Native => "native",
            Aio::IoUring => "io_uring",
        };
        let direct = on(file.cache == CacheMode::None);
        let no_flush = on(file.cache == CacheMode::Unsafe);
        let read_only = on(file.read_only);
        let path = quoted(&file.path);
        self.add(
            "blockdev",
            format!(
                "driver=file,node-name=file{slot},filename={path},aio={aio},read-only={read_only},\
                 cache.direct={direct},cache.no-flush={no_flush},discard=unmap"
            ),
        );
        let driver = match file.format {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        };
        self.add(
            "blockdev",
            format!(
                "driver={driver},node-name=image{slot},file=file{slot},read-only={read_only},\
                 cache.direct={direct},cache.no-flush={no_flush},discard=unmap"
            ),
        );
        let mut device = format!("virtio-blk-pci,id=disk{slot},drive=image{slot}");
        if file.iothread {
            self.add("object", format!("iothread,id=io{slot}"));
            device.push_str(&format!(",iothread=io{slot}"));
        }
        self.add("device", device);
    }

    /// Eight root ports are the functions of one device, or there would not be room for all.
    pub(crate) fn root_ports(&mut self, number: u8) {
        for port in 0..number {
            let (address, function) = (FIRST_ADDRESS + port / FUNCTIONS, port % FUNCTIONS);
            let chassis = FIRST_CHASSIS + port;
            self.add(
                "device",
                format!(
                    "pcie-root-port,id=millrace{port},bus=pcie.0,addr={address:#x}.{function},\
                     multifunction=on,chassis={chassis},slot={chassis},\
                     pref64-reserve={ROOT_PORT_RESERVE}"
                ),
            );
        }
    }

    pub(crate) fn monitor(&mut self, socket: &Path) {
        self.chardev("qmp-more", socket, true, 0);
        self.add("mon", "chardev=qmp-more,mode=control");
    }

    pub(crate) fn vsock(&mut self, vsock: &Vsock) {
        self.chardev("vsock-c", &vsock.socket, false, 0);
        self.add("device", "vhost-user-vsock-pci,id=vsock,chardev=vsock-c");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(build: impl FnOnce(&mut Arguments)) -> String {
        let qemu = Qemu::of_version(10, 0);
        let mut arguments = Arguments::for_qemu(&qemu);
        build(&mut arguments);
        arguments.words.join(" ")
    }

    #[test]
    fn vhost_user_net_listens_when_told() {
        let mut net = Net::vhost_user("/run/a.sock");
        let got = text(|arguments| arguments.net("a", 0, &net.clone().into()));
        assert!(got.contains("path=/run/a.sock,reconnect-ms=1000 "), "{got}");
        assert!(
            got.contains(",mq=off,packed=off,mrg_rxbuf=on") && !got.contains("vectors"),
            "{got}"
        );
        net.server = true;
        net.queues = 2;
        net.mac = Some("52:00:00:00:00:09".into());
        let got = text(|arguments| arguments.net("a", 0, &net.into()));
        assert!(got.contains("server=on,wait=off ") && !got.contains("reconnect"), "{got}");
        assert!(got.contains("queues=2") && got.contains("mq=on"), "{got}");
        assert!(got.contains("mac=52:00:00:00:00:09"), "{got}");
        assert_eq!(text(|arguments| arguments.net("a", 0, &Net::None)), "");
    }

    #[test]
    fn the_kernel_serves_a_tap_only_where_told() {
        let got = text(|arguments| arguments.net("a", 1, &Net::tap("t1")));
        assert!(got.starts_with("-netdev tap,id=nd1,ifname=t1,"), "{got}");
        assert!(got.contains(",vhost=off -device virtio-net-pci,id=net1"), "{got}");
        let with = text(|arguments| arguments.net("a", 1, &Net::tap_vhost("t1")));
        assert_eq!(with, got.replace("vhost=off", "vhost=on"), "they differ in nothing else");
    }

    #[test]
    fn an_older_qemu_gets_its_own_words() {
        let qemu = Qemu::of_version(7, 2);
        let mut arguments = Arguments::for_qemu(&qemu);
        arguments.net("a", 0, &Net::vhost_user("/run/a.sock").into());
        let got = arguments.words.join(" ");
        assert!(got.contains("path=/run/a.sock,reconnect=1 ") && got.contains(",vectors=0,mq=off"));
    }

    #[test]
    fn root_ports_share_devices_by_eight() {
        let got = text(|arguments| arguments.root_ports(9));
        let port = |id: u8, place: &str| {
            let chassis = 32 + id;
            let port = format!("id=millrace{id},bus=pcie.0,addr={place},multifunction=on");
            got.contains(&format!("{port},chassis={chassis},slot={chassis},pref64-reserve=1G"))
        };
        assert!(port(0, "0x10.0") && port(7, "0x10.7") && port(8, "0x11.0"), "{got}");
        assert_eq!(text(|arguments| arguments.root_ports(0)), "");
    }

    #[test]
    fn macs_differ_between_guests_and_slots_and_stay() {
        assert_eq!(mac_of("a", 0), mac_of("a", 0));
        assert_ne!(mac_of("a", 0), mac_of("b", 0));
        assert_ne!(mac_of("a", 0), mac_of("a", 1));
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_the_option() {
        let got = text(|arguments| arguments.disk(0, &Disk::file("/a,b").into()));
        assert!(got.contains("filename=/a,,b,aio=io_uring"), "{got}");
        assert!(got.contains("drive=image0,iothread=io0"), "{got}");
    }
}
