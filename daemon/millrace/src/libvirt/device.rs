//! Devices of a VM: elements of libvirt where it has one, else QEMU's own arguments.

use base::limits::MAX_DISK_QUEUES;
use config::{DiskConfig, EndpointConfig, NetConfig, SocketMode, VsockConfig, format_mac};

use super::xml::Xml;

/// Seconds until QEMU tries again to connect to a daemon that ended.
const RECONNECT_S: &str = "1";

/// First slot of PCI bus 0 for devices that libvirt knows nothing of; the next ones go down.
/// libvirt gives out slots from 1 upwards, eight root ports a slot, and has places of its own on a
/// q35 machine above this: 0x1a and 0x1d for USB, 0x1b for sound, 0x1e for a bridge, 0x1f for the
/// chipset.
const FIRST_SLOT: usize = 0x19;

/// Most devices that libvirt knows nothing of: the last has slot 0x10.
pub const MAX_OWN_DEVICES: usize = 10;

/// Alias of a port's device, by which `virsh` finds it. libvirt takes letters, digits, `_` and `-`.
pub fn alias(port: &str) -> String {
    format!("ua-{}", port.replace('.', "_2e"))
}

/// Whether a disk has an element: QEMU connects in all of those.
pub fn has_element(disk: &DiskConfig) -> bool {
    disk.endpoint.mode == SocketMode::Listen
}

/// Path of a socket. A config is UTF-8, and so are its paths.
fn path(endpoint: &EndpointConfig) -> String {
    endpoint.socket.to_string_lossy().into_owned()
}

fn reconnect(xml: &mut Xml) {
    xml.empty("reconnect", &[("enabled", "yes"), ("timeout", RECONNECT_S)]);
}

/// Elements that a device keeps of the one whose place it takes, as they stand in that domain.
#[derive(Default)]
pub struct Kept<'a> {
    /// MAC address or target, by which its guest and its host know it.
    pub name: Option<&'a str>,
    /// Places on the bus and in the boot order.
    pub rest: Vec<&'a str>,
}

/// Writes a network card.
pub fn net(xml: &mut Xml, net: &NetConfig, kept: &Kept<'_>) {
    xml.within("interface", &[("type", "vhostuser")], |xml| {
        match (kept.name, net.mac) {
            (Some(mac), _) => xml.raw(mac),
            (None, Some(mac)) => xml.empty("mac", &[("address", &format_mac(mac))]),
            (None, None) => xml.comment(
                "The config has no `mac`: libvirt makes one up, and the port takes the first that \
                 it sees.",
            ),
        }
        let path = path(&net.endpoint);
        let source = [("type", "unix"), ("path", &path), ("mode", card_mode(&net.endpoint))];
        match net.endpoint.mode {
            SocketMode::Listen => xml.within("source", &source, reconnect),
            SocketMode::Dial => {
                xml.comment("QEMU makes this socket, and waits until the daemon has connected.");
                xml.empty("source", &source);
            }
        }
        xml.empty("model", &[("type", "virtio")]);
        if let Some(queues) = card_queues(net) {
            xml.empty("driver", &[("queues", &queues)]);
        }
        xml.empty("alias", &[("name", &alias(&net.name))]);
        kept.rest.iter().for_each(|element| xml.raw(element));
    });
}

/// QEMU's side of a card's socket.
pub fn card_mode(endpoint: &EndpointConfig) -> &'static str {
    match endpoint.mode {
        SocketMode::Listen => "client",
        SocketMode::Dial => "server",
    }
}

/// Number of a card's queue pairs where QEMU has to be told.
pub fn card_queues(net: &NetConfig) -> Option<String> {
    (net.queue_pairs > 1).then(|| net.queue_pairs.to_string())
}

/// Writes a disk that has an element; `slot` is its number among the VM's disks. It is booted from
/// where `boots`. `vcpus` are the VM's CPUs where they are known.
pub fn disk(
    xml: &mut Xml,
    disk: &DiskConfig,
    slot: usize,
    boots: bool,
    vcpus: Option<u32>,
    kept: &Kept<'_>,
) {
    xml.within("disk", &[("type", "vhostuser"), ("device", "disk")], |xml| {
        let driver = [("name", "qemu"), ("type", "raw")];
        match queues(disk, vcpus) {
            Some(queues) => xml.empty("driver", &[driver[0], driver[1], ("queues", &queues)]),
            None => xml.empty("driver", &driver),
        }
        let path = path(&disk.endpoint);
        xml.within("source", &[("type", "unix"), ("path", &path)], reconnect);
        match kept.name {
            Some(target) => xml.raw(target),
            None => xml.empty("target", &[("dev", &target(slot)), ("bus", "virtio")]),
        }
        if boots {
            xml.empty("boot", &[("order", "1")]);
        }
        xml.empty("alias", &[("name", &alias(&disk.name))]);
        kept.rest.iter().for_each(|element| xml.raw(element));
    });
}

/// Number of a disk's queues where QEMU has to be told: it takes one for each CPU by itself, and
/// ends when the port has fewer.
pub fn queues(disk: &DiskConfig, vcpus: Option<u32>) -> Option<String> {
    let wanted = vcpus.unwrap_or_else(|| u32::from(MAX_DISK_QUEUES));
    (u32::from(disk.queues) < wanted).then(|| disk.queues.to_string())
}

/// Name of a disk in libvirt: `vda` to `vdz`, `vdaa` and so on. Guests may count in another order.
pub fn target(slot: usize) -> String {
    let letter = |n: usize| char::from(b'a' + (n % 26) as u8);
    let (mut name, mut rest) = (String::new(), slot + 1);
    while rest > 0 {
        name.insert(0, letter(rest - 1));
        rest = (rest - 1) / 26;
    }
    format!("vd{name}")
}

/// Arguments of QEMU for devices that libvirt has no element for.
#[derive(Default)]
pub struct OwnDevices {
    pub arguments: Vec<String>,
    number: usize,
}

impl OwnDevices {
    /// Number of devices.
    pub fn len(&self) -> usize {
        self.number
    }

    /// Adds a vsock device.
    pub fn vsock(&mut self, vsock: &VsockConfig) {
        self.device("vsock", "vhost-user-vsock-pci", "", &vsock.endpoint);
    }

    /// Adds a disk whose socket QEMU makes.
    pub fn disk(&mut self, disk: &DiskConfig, boots: bool, vcpus: u32) {
        let mut more = String::new();
        if let Some(queues) = queues(disk, Some(vcpus)) {
            more.push_str(&format!(",num-queues={queues}"));
        }
        if boots {
            // libvirt begins at 1.
            more.push_str(",bootindex=0");
        }
        self.device(&disk.name, "vhost-user-blk-pci", &more, &disk.endpoint);
    }

    fn device(&mut self, name: &str, driver: &str, more: &str, endpoint: &EndpointConfig) {
        // A comma ends an option, two are one.
        let path = path(endpoint).replace(',', ",,");
        let side = match endpoint.mode {
            SocketMode::Listen => "",
            SocketMode::Dial => ",server=on,wait=off",
        };
        // Not libvirt's `ua-`, which stands for devices that it knows.
        let id = alias(name).replacen("ua-", "millrace-", 1);
        let slot = FIRST_SLOT.saturating_sub(self.number);
        self.number += 1;
        self.add("-chardev", format!("socket,id={id}-socket,path={path}{side}"));
        let place = format!("bus=pcie.0,addr={slot:#x}");
        self.add("-device", format!("{driver},id={id},chardev={id}-socket,{place}{more}"));
    }

    fn add(&mut self, option: &str, value: String) {
        self.arguments.extend([option.into(), value]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_count_on_after_z() {
        let names = [0, 1, 25, 26, 27, 51, 52, 701, 702].map(target);
        let wanted = ["vda", "vdb", "vdz", "vdaa", "vdab", "vdaz", "vdba", "vdzz", "vdaaa"];
        assert_eq!(names, wanted);
    }

    #[test]
    fn an_alias_has_no_dot() {
        assert_eq!(alias("net-0_a.b"), "ua-net-0_a_2eb");
    }
}
