//! A VM as a domain of libvirt.

use anyhow::bail;
use config::{NetConfig, SocketMode, VmConfig};

use super::device::{self, Kept, MAX_OWN_DEVICES, OwnDevices};
use super::xml::Xml;
use crate::cli::{DomainKind, Libvirt};

/// Name space of QEMU's own arguments (libvirt's documentation, `drvqemu`).
pub const QEMU_SPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Root ports without a device: a q35 machine takes a device while it runs only into such a one.
const SPARE_ROOT_PORTS: usize = 4;

/// MTU that guests take when nobody tells them.
const USUAL_MTU: u16 = 1500;
/// Property of a card that tells its guest the MTU.
pub const HOST_MTU: &str = "host_mtu";

/// Writes the domain of a VM.
pub fn write(args: &Libvirt, vm: &VmConfig) -> anyhow::Result<String> {
    let own = own_devices(args, vm);
    if own.len() > MAX_OWN_DEVICES {
        bail!(
            "VM {} has {} devices that libvirt has no element for (vsock, disks with mode = \
             \"dial\"); the limit is {MAX_OWN_DEVICES}",
            vm.name,
            own.len()
        );
    }
    let mut xml = Xml::default();
    let kind = args.kind.name();
    xml.within("domain", &[("type", kind), ("xmlns:qemu", QEMU_SPACE)], |xml| {
        xml.comment(&format!("Made by `millrace libvirt {}`.", vm.name));
        xml.leaf("name", &[], &vm.name);
        memory(xml, args.memory);
        xml.leaf("vcpu", &[], &args.vcpu_number().to_string());
        system(xml, args, vm);
        xml.within("features", &[], |xml| {
            // Without ACPI nothing is plugged in while it runs.
            xml.empty("acpi", &[]);
            xml.empty("apic", &[]);
        });
        cpu(xml, args.kind);
        xml.empty("clock", &[("offset", "utc")]);
        xml.within("devices", &[], |xml| devices(xml, args, vm));
        qemu(xml, &own);
        overrides(xml, args.kind, &vm.nets.iter().collect::<Vec<_>>());
    });
    xml.finish()
}

fn memory(xml: &mut Xml, bytes: u64) {
    xml.leaf("memory", &[("unit", "KiB")], &(bytes >> 10).to_string());
    xml.within("memoryBacking", &[], |xml| {
        xml.comment("The daemon maps the VM's memory: without these two no device works.");
        xml.empty("source", &[("type", "memfd")]);
        xml.empty("access", &[("mode", "shared")]);
    });
}

fn system(xml: &mut Xml, args: &Libvirt, vm: &VmConfig) {
    xml.within("os", &[], |xml| {
        xml.leaf("type", &[("arch", "x86_64"), ("machine", "q35")], "hvm");
        if let Some(kernel) = &args.kernel {
            xml.leaf("kernel", &[], kernel);
            for (name, value) in [("initrd", &args.initrd), ("cmdline", &args.append)] {
                if let Some(value) = value {
                    xml.leaf(name, &[], value);
                }
            }
        } else if vm.disks.is_empty() {
            xml.comment("The VM has no disk: name a kernel here, or add something to boot from.");
        }
    });
}

fn cpu(xml: &mut Xml, kind: DomainKind) {
    match kind {
        DomainKind::Kvm => {
            xml.comment("All that this host's CPU can do; for moves between hosts name a model.");
            xml.empty("cpu", &[("mode", "host-passthrough")]);
        }
        DomainKind::Qemu => xml.within("cpu", &[("mode", "maximum")], |xml| {
            xml.comment("With these QEMU's emulator copies byte by byte.");
            for name in ["erms", "fsrm"] {
                xml.empty("feature", &[("policy", "disable"), ("name", name)]);
            }
        }),
    }
}

fn devices(xml: &mut Xml, args: &Libvirt, vm: &VmConfig) {
    if let Some(emulator) = &args.emulator {
        xml.leaf("emulator", &[], emulator);
    }
    let elements = vm.disks.iter().filter(|disk| device::has_element(disk)).count();
    root_ports(xml, vm.nets.len() + elements);
    xml.empty("controller", &[("type", "usb"), ("model", "none")]);
    for net in &vm.nets {
        device::net(xml, net, &Kept::default());
    }
    for (slot, disk) in vm.disks.iter().enumerate().filter(|(_, d)| device::has_element(d)) {
        let boots = boots(args, slot);
        device::disk(xml, disk, slot, boots, Some(args.vcpu_number()), &Kept::default());
    }
    xml.within("serial", &[("type", "pty")], |xml| xml.empty("target", &[("port", "0")]));
    xml.within("console", &[("type", "pty")], |xml| {
        xml.empty("target", &[("type", "serial"), ("port", "0")]);
    });
    xml.empty("memballoon", &[("model", "none")]);
    if vm.channel.is_some() {
        xml.comment(
            "The VM has [vm.channel]: its monitor and root ports are not here; see \
             operate/channels.md.",
        );
    }
    if vm.modules.as_ref().is_some_and(|modules| modules.ring.is_some()) {
        xml.comment(
            "The VM has [vm.modules.ring]: its memory is not here; see operate/modules.md.",
        );
    }
}

/// Whether a VM boots from the disk of this number.
fn boots(args: &Libvirt, slot: usize) -> bool {
    slot == 0 && args.kernel.is_none()
}

/// Writes root ports, one for each device and some more.
fn root_ports(xml: &mut Xml, devices: usize) {
    let root = [("type", "pci"), ("index", "0"), ("model", "pcie-root")];
    xml.empty("controller", &root);
    xml.comment(&format!(
        "One for each device, and {SPARE_ROOT_PORTS} for what `virsh attach-device` brings."
    ));
    for index in 1..=devices + SPARE_ROOT_PORTS {
        let index = index.to_string();
        let port = [("type", "pci"), ("index", index.as_str()), ("model", "pcie-root-port")];
        xml.empty("controller", &port);
    }
}

fn own_devices(args: &Libvirt, vm: &VmConfig) -> OwnDevices {
    let mut own = OwnDevices::default();
    for (slot, disk) in vm.disks.iter().enumerate().filter(|(_, d)| !device::has_element(d)) {
        own.disk(disk, boots(args, slot), args.vcpu_number());
    }
    if let Some(vsock) = &vm.vsock {
        own.vsock(vsock);
    }
    own
}

fn qemu(xml: &mut Xml, own: &OwnDevices) {
    if own.len() == 0 {
        return;
    }
    xml.comment(
        "libvirt has no element for these. Their slots on PCI bus 0 are ones that it leaves free.",
    );
    xml.within("qemu:commandline", &[], |xml| {
        for argument in &own.arguments {
            xml.empty("qemu:arg", &[("value", argument)]);
        }
    });
}

/// Writes properties of network cards that libvirt has no attribute for.
pub fn overrides(xml: &mut Xml, kind: DomainKind, nets: &[&NetConfig]) {
    if nets.iter().any(|net| !properties(kind, net).is_empty()) {
        xml.within("qemu:override", &[], |xml| override_devices(xml, kind, nets));
    }
}

/// Writes the inside of that element.
pub fn override_devices(xml: &mut Xml, kind: DomainKind, nets: &[&NetConfig]) {
    let cards = nets.iter().map(|net| (net, properties(kind, net)));
    let cards: Vec<_> = cards.filter(|(_, properties)| !properties.is_empty()).collect();
    if kind == DomainKind::Qemu && !cards.is_empty() {
        xml.comment(
            "QEMU before 8.2 ends under emulation unless `vectors` is 0; newer ones do not.",
        );
    }
    for (net, properties) in cards {
        xml.within("qemu:device", &[("alias", &device::alias(&net.name))], |xml| {
            xml.within("qemu:frontend", &[], |xml| {
                for (name, value) in &properties {
                    let property = [("name", *name), ("type", "unsigned"), ("value", value)];
                    xml.empty("qemu:property", &property);
                }
            });
        });
    }
}

/// Properties of a card that libvirt has no attribute for: names and values.
pub fn properties(kind: DomainKind, net: &NetConfig) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if kind == DomainKind::Qemu {
        all.push(("vectors", "0".to_string()));
    }
    if net.mtu != USUAL_MTU {
        // libvirt's `mtu` would be set at an interface of the host, which there is not.
        all.push((HOST_MTU, net.mtu.to_string()));
    }
    all
}

/// Writes one device, for `virsh attach-device`.
pub fn write_device(args: &Libvirt, vm: &VmConfig, port: &str) -> anyhow::Result<String> {
    let mut xml = Xml::default();
    if let Some(net) = vm.nets.iter().find(|net| net.name == port) {
        device::net(&mut xml, net, &Kept::default());
        return xml.finish();
    }
    let named = |port: &config::PortConfig| port.name().to_string();
    let Some(slot) = vm.disks.iter().position(|disk| disk.name == port) else {
        if vm.ports().any(|known| known.name() == port) {
            bail!(
                "libvirt has no element for vsock: it is there from the VM's start, or not at all"
            );
        }
        let known: Vec<String> = vm.ports().map(|port| named(&port)).collect();
        bail!("VM {} has no port {port:?}; it has: {}", vm.name, known.join(", "));
    };
    let disk = &vm.disks[slot];
    if disk.endpoint.mode == SocketMode::Dial {
        bail!(
            "libvirt has no element for a disk whose socket QEMU makes: take mode = \"dial\" out, \
             or have {port} there from the VM's start"
        );
    }
    device::disk(&mut xml, disk, slot, false, args.vcpus, &Kept::default());
    xml.finish()
}
