//! A domain that is there already, with its memory and devices as the ports of a VM need them.
//!
//! # Theory of operation
//! The text stays as it is, but for the places that change. A port takes the place of the card or
//! disk that it stands for: that one's MAC address or name, its address on the bus and its place in
//! the boot order stay, so that the guest finds it where it was. A card is found by the MAC address
//! that the config says, or else is the next one; a disk by its image; a port that was put in
//! before and has another socket now, by its alias. Ports without such a device come after the last
//! one. A domain that was changed once is not changed by a second time.
//!
//! Nothing is lost in silence. What a device has besides is on a list of what means nothing at a
//! port, such as the name of a TAP device; anything else, a filter or a ceiling say, is refused,
//! and so is what the guest would find changed.
//!
//! # Limits
//! - A domain has up to 1 MiB and 100,000 nodes; libvirt's have some ten KiB.
//! - Only what libvirt has an element for: no vsock, and no disk whose socket QEMU makes.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, bail};
use config::{BlockSize, DiskConfig, DiskFormat, NetConfig, VmConfig, format_mac};
use roxmltree::{Document, Node, ParsingOptions};

use super::device::{self, Kept};
use super::domain::{self, QEMU_SPACE};
use super::xml::Xml;
use crate::cli::DomainKind;

/// Most bytes of a domain.
pub const MAX_DOMAIN_BYTES: usize = 1 << 20;
/// Most elements, attributes and texts of it.
const MAX_NODES: u32 = 100_000;
/// Size of a disk's blocks where the domain does not say.
const USUAL_BLOCK_BYTES: &str = "512";
/// Depth of devices in what libvirt prints.
const DEVICE_DEPTH: usize = 2;

/// Elements that a card keeps, besides its MAC address.
const KEPT_OF_CARD: [&str; 4] = ["boot", "rom", "acpi", "address"];
/// Elements of a card that mean nothing at a port: where it was attached, and how QEMU served it.
const LEFT_OF_CARD: [&str; 7] = ["mac", "source", "model", "driver", "target", "alias", "backend"];
/// Elements that a disk keeps, besides its target.
const KEPT_OF_DISK: [&str; 3] = ["boot", "acpi", "address"];
/// Elements of a disk that mean nothing at a port, or are compared with its settings.
const LEFT_OF_DISK: [&str; 7] =
    ["driver", "source", "target", "backingStore", "alias", "readonly", "serial"];

/// Writes the domain `text` with the ports of `vm` in it.
pub fn write(vm: &VmConfig, text: &str) -> anyhow::Result<String> {
    refuse_what_has_no_element(vm)?;
    if text.len() > MAX_DOMAIN_BYTES {
        bail!("the domain has {} bytes; the limit is {MAX_DOMAIN_BYTES}", text.len());
    }
    let options = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    let document =
        Document::parse_with_options(text, options).context("the domain is not well-formed")?;
    let mut domain = Domain::new(text, &document)?;
    domain.refuse_private_memory()?;
    super::check_memory(domain.memory_bytes(), vm)?;
    domain.share_memory()?;
    let (mut cards, mut disks) = (domain.elements("interface"), domain.elements("disk"));
    // Those that name their card first, so that no other takes it.
    let (named, others): (Vec<_>, Vec<_>) = vm.nets.iter().partition(|net| net.mac.is_some());
    for net in named.into_iter().chain(others) {
        domain.take_card(net, &mut cards)?;
    }
    let vcpus = child(domain.root, "vcpu").and_then(|v| v.text()?.trim().parse().ok());
    for disk in &vm.disks {
        domain.take_disk(disk, &mut disks, vcpus.unwrap_or(1))?;
    }
    domain.override_properties(&vm.nets)?;
    Ok(domain.finish())
}

fn refuse_what_has_no_element(vm: &VmConfig) -> anyhow::Result<()> {
    let dialed = vm.disks.iter().find(|disk| !device::has_element(disk)).map(|d| d.name.as_str());
    match dialed.or(vm.vsock.as_ref().map(|_| "vsock")) {
        Some(port) => bail!(
            "libvirt has no element for {port}: without --domain its arguments of QEMU are printed, \
             to be put in by hand"
        ),
        None => Ok(()),
    }
}

/// An element inside another one, by its name.
fn child<'a>(parent: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    parent.children().find(|node| node.has_tag_name(name))
}

/// Value of an attribute of an element inside another one.
fn within<'a>(parent: Node<'a, 'a>, name: &str, attribute: &str) -> Option<&'a str> {
    child(parent, name)?.attribute(attribute)
}

/// A domain and what changes in it.
struct Domain<'a> {
    text: &'a str,
    root: Node<'a, 'a>,
    devices: Node<'a, 'a>,
    kind: DomainKind,
    /// Targets of disks, with those of new ones.
    targets: Vec<String>,
    /// Places, and what is there instead.
    edits: Vec<(Range<usize>, String)>,
}

impl<'a> Domain<'a> {
    fn new(text: &'a str, document: &'a Document<'a>) -> anyhow::Result<Self> {
        let root = document.root_element();
        if !root.has_tag_name("domain") {
            bail!("no domain of libvirt: its first element is {}", root.tag_name().name());
        }
        let devices = child(root, "devices").filter(|d| d.last_element_child().is_some());
        let devices = devices.context("the domain has no devices")?;
        let is_emulated = root.attribute("type") == Some("qemu");
        let kind = if is_emulated { DomainKind::Qemu } else { DomainKind::Kvm };
        let mut domain = Self { text, root, devices, kind, targets: Vec::new(), edits: Vec::new() };
        let disks = domain.elements("disk").into_iter();
        domain.targets = disks.filter_map(|d| within(d, "target", "dev").map(Into::into)).collect();
        Ok(domain)
    }

    fn elements(&self, name: &str) -> Vec<Node<'a, 'a>> {
        self.devices.children().filter(|node| node.has_tag_name(name)).collect()
    }

    /// The text of an element.
    fn raw(&self, node: Node<'_, '_>) -> &'a str {
        &self.text[node.range()]
    }

    /// Texts of those elements inside another one that have one of these names.
    fn kept(&self, parent: Node<'_, '_>, names: &[&str]) -> Vec<&'a str> {
        let elements = parent.children().filter(Node::is_element);
        let kept = elements.filter(|node| names.contains(&node.tag_name().name()));
        kept.map(|node| self.raw(node)).collect()
    }

    /// Puts an element that was written into the place of another one.
    fn replace(&mut self, node: Node<'_, '_>, xml: Xml) -> anyhow::Result<()> {
        self.edits.push((node.range(), xml.finish()?.trim().into()));
        Ok(())
    }

    /// Puts an element that was written behind another one.
    fn insert_after(&mut self, node: Node<'_, '_>, xml: Xml) -> anyhow::Result<()> {
        let at = node.range().end;
        self.edits.push((at..at, format!("\n{}", xml.finish()?.trim_end())));
        Ok(())
    }

    /// Refuses memory of which a part stays private, whatever is said of the whole, and memory that
    /// is encrypted.
    fn refuse_private_memory(&self) -> anyhow::Result<()> {
        let numa = child(self.root, "cpu").and_then(|cpu| child(cpu, "numa"));
        let mut cells = numa.into_iter().flat_map(|numa| numa.children());
        if cells.any(|cell| cell.attribute("memAccess") == Some("private")) {
            bail!("a NUMA cell of the domain has memAccess='private': the daemon could not map it");
        }
        let modules = self.elements("memory");
        if modules.iter().any(|module| module.attribute("access") == Some("private")) {
            bail!(
                "a memory module of the domain has access='private': the daemon could not map it"
            );
        }
        if child(self.root, "launchSecurity").is_some() {
            bail!(
                "the domain's memory is encrypted (<launchSecurity>): the daemon could not read it"
            );
        }
        Ok(())
    }

    /// Memory that the VM may come to have.
    fn memory_bytes(&self) -> u64 {
        let elements =
            ["memory", "maxMemory"].into_iter().filter_map(|name| child(self.root, name));
        elements.filter_map(bytes).max().unwrap_or_default()
    }

    /// Makes the memory one that the daemon can map.
    fn share_memory(&mut self) -> anyhow::Result<()> {
        let old = child(self.root, "memoryBacking");
        let source = old.and_then(|old| child(old, "source"));
        // Files may have been chosen with care; QEMU's own memory is nobody else's.
        let source = source.filter(|s| matches!(s.attribute("type"), Some("memfd" | "file")));
        let is_shared = old.and_then(|old| within(old, "access", "mode")) == Some("shared");
        if source.is_some() && is_shared {
            return Ok(());
        }
        let others = old.into_iter().flat_map(|old| old.children().filter(Node::is_element));
        let others = others.filter(|node| !matches!(node.tag_name().name(), "source" | "access"));
        let others: Vec<&str> = others.map(|node| self.raw(node)).collect();
        let mut xml = Xml::at(1);
        xml.within("memoryBacking", &[], |xml| {
            match source {
                Some(source) => xml.raw(self.raw(source)),
                None => xml.empty("source", &[("type", "memfd")]),
            }
            xml.empty("access", &[("mode", "shared")]);
            others.iter().for_each(|other| xml.raw(other));
        });
        let memory = || child(self.root, "currentMemory").or(child(self.root, "memory"));
        match (old, memory()) {
            (Some(old), _) => self.replace(old, xml),
            (None, Some(memory)) => self.insert_after(memory, xml),
            (None, None) => bail!("the domain has no <memory>"),
        }
    }

    /// Puts a network port into the place of a card, which `cards` has no longer then.
    fn take_card(&mut self, net: &NetConfig, cards: &mut Vec<Node<'a, 'a>>) -> anyhow::Result<()> {
        let socket = net.endpoint.socket.to_string_lossy();
        if let Some(at) = cards.iter().position(|card| is_on(*card, &socket)) {
            cards.remove(at);
            return Ok(());
        }
        let at = match net.mac.map(format_mac) {
            Some(mac) => {
                let has_it = |card: &Node<'_, '_>| {
                    within(*card, "mac", "address").is_some_and(|m| m.eq_ignore_ascii_case(&mac))
                };
                match cards.iter().position(has_it) {
                    None if !cards.is_empty() => bail!(
                        "no card of the domain has the mac {mac} of port {}; without `mac` the port \
                         takes the next card",
                        net.name
                    ),
                    at => at,
                }
            }
            None => cards
                .iter()
                .position(|card| is_port(*card, &net.name))
                .or_else(|| cards.iter().position(|card| !is_vhost_user(*card))),
        };
        let mut xml = Xml::at(DEVICE_DEPTH);
        let Some(card) = at.map(|at| cards.remove(at)) else {
            device::net(&mut xml, net, &Kept::default());
            return self.append(xml);
        };
        check_card(net, card)?;
        if !is_port(card, &net.name) {
            self.check_override(card, &net.name)?;
        }
        let name = child(card, "mac").map(|mac| self.raw(mac));
        let kept = Kept { name, rest: self.kept(card, &KEPT_OF_CARD) };
        device::net(&mut xml, net, &kept);
        self.replace(card, xml)
    }

    /// Puts a disk's port into the place of the disk that has its image.
    fn take_disk(
        &mut self,
        disk: &DiskConfig,
        disks: &mut Vec<Node<'a, 'a>>,
        vcpus: u32,
    ) -> anyhow::Result<()> {
        let socket = disk.endpoint.socket.to_string_lossy();
        if disks.iter().any(|old| is_on(*old, &socket)) {
            return Ok(());
        }
        let has_image = |old: &Node<'_, '_>| {
            let file = within(*old, "source", "file").or(within(*old, "source", "dev"));
            file.zip(image(disk)).is_some_and(|(file, image)| is_same(Path::new(file), image))
        };
        let mut xml = Xml::at(DEVICE_DEPTH);
        let found = disks.iter().position(has_image);
        let found = found.or_else(|| disks.iter().position(|old| is_port(*old, &disk.name)));
        let found = found.map(|at| disks.remove(at));
        // Else two devices would have one image.
        if disks.iter().any(has_image) {
            bail!("the domain has the image of port {} twice", disk.name);
        }
        let Some(old) = found else {
            refuse_hidden_image(disk, disks)?;
            let slot = (0..).find(|slot| !self.targets.contains(&device::target(*slot)));
            let slot = slot.unwrap_or_default();
            self.targets.push(device::target(slot));
            device::disk(&mut xml, disk, slot, false, Some(vcpus), &Kept::default());
            return self.append(xml);
        };
        if !is_port(old, &disk.name) {
            check_disk(disk, old)?;
            self.check_override(old, &disk.name)?;
        }
        let name = child(old, "target").map(|target| self.raw(target));
        let kept = Kept { name, rest: self.kept(old, &KEPT_OF_DISK) };
        device::disk(&mut xml, disk, 0, false, Some(vcpus), &kept);
        self.replace(old, xml)
    }

    fn append(&mut self, xml: Xml) -> anyhow::Result<()> {
        match self.devices.last_element_child() {
            Some(last) => self.insert_after(last, xml),
            None => Ok(()),
        }
    }

    /// Properties of QEMU's devices that the domain overrides.
    fn overrides(&self) -> Option<Node<'a, 'a>> {
        self.root.children().find(|node| node.has_tag_name((QEMU_SPACE, "override")))
    }

    /// Refuses to replace a device of which the domain overrides properties, or to change the
    /// number by which it names another one.
    fn check_override(&self, device: Node<'_, '_>, port: &str) -> anyhow::Result<()> {
        let own = within(device, "alias", "name");
        // libvirt's own aliases, such as `net0`: it counts the devices that have no other.
        let prefix = if device.has_tag_name("interface") { "net" } else { "virtio-disk" };
        let is_counted = |alias: &str| {
            let number = alias.strip_prefix(prefix);
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let entries = self.overrides().into_iter().flat_map(|old| old.children());
        let mut aliases = entries.filter_map(|entry| entry.attribute("alias"));
        match aliases.find(|alias| own == Some(*alias) || is_counted(alias)) {
            Some(alias) => bail!(
                "<qemu:override> has properties of device {alias}, which may be the one that port \
                 {port} replaces, or get another number: take them out first"
            ),
            None => Ok(()),
        }
    }

    /// Adds properties of cards that libvirt has no attribute for.
    fn override_properties(&mut self, nets: &[NetConfig]) -> anyhow::Result<()> {
        let old = self.overrides();
        let last = old.and_then(|old| old.last_element_child());
        let is_missing = |net: &&NetConfig| {
            let alias = device::alias(&net.name);
            let mut entries = old.into_iter().flat_map(|old| old.children());
            !entries.any(|entry| entry.attribute("alias") == Some(&alias))
        };
        let missing: Vec<&NetConfig> = nets.iter().filter(is_missing).collect();
        let mut xml = Xml::at(if last.is_some() { 2 } else { 1 });
        match last {
            Some(_) => domain::override_devices(&mut xml, self.kind, &missing),
            None => domain::overrides(&mut xml, self.kind, &missing),
        }
        if xml.is_empty() {
            return Ok(());
        }
        match self.root.lookup_namespace_uri(Some("qemu")) {
            Some(QEMU_SPACE) => {}
            Some(other) => bail!("the domain's name space `qemu` is {other}, not {QEMU_SPACE}"),
            None => {
                let at = self.root.range().start + "<domain".len();
                self.edits.push((at..at, format!(" xmlns:qemu='{QEMU_SPACE}'")));
            }
        }
        match (old, last.or(self.root.last_element_child())) {
            (Some(old), _) if last.is_none() => self.replace(old, xml),
            (_, Some(last)) => self.insert_after(last, xml),
            (_, None) => Ok(()),
        }
    }

    fn finish(mut self) -> String {
        // From the last one on, so that the places of the others stay; those at one place come in
        // the order in which they were put there.
        self.edits.sort_by_key(|(range, _)| range.start);
        let mut text = self.text.to_string();
        for (range, new) in self.edits.into_iter().rev() {
            text.replace_range(range, &new);
        }
        text
    }
}

/// Bytes of an element with a unit, by itself KiB (libvirt, Memory Allocation).
fn bytes(element: Node<'_, '_>) -> Option<u64> {
    let unit = match element.attribute("unit").unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KB" => 1_000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    element.text()?.trim().parse::<u64>().ok()?.checked_mul(unit)
}

fn is_vhost_user(device: Node<'_, '_>) -> bool {
    device.attribute("type") == Some("vhostuser")
}

/// Whether a device is the one that was put in for a port.
fn is_port(device: Node<'_, '_>, port: &str) -> bool {
    let alias = device::alias(port);
    is_vhost_user(device) && within(device, "alias", "name") == Some(&alias)
}

/// Whether a device is on this socket already.
fn is_on(device: Node<'_, '_>, socket: &str) -> bool {
    is_vhost_user(device) && device.children().any(|s| s.attribute("path") == Some(socket))
}

/// Image of a disk; none where it is memory.
fn image(disk: &DiskConfig) -> Option<&Path> {
    match &disk.format {
        DiskFormat::Raw { path, .. } | DiskFormat::Qcow2 { path, .. } => Some(path),
        DiskFormat::Memory { .. } | DiskFormat::Null { .. } => None,
    }
}

/// Refuses to add a disk whose image one of these disks may have without naming it as its source.
fn refuse_hidden_image(disk: &DiskConfig, disks: &[Node<'_, '_>]) -> anyhow::Result<()> {
    let Some(image) = image(disk) else { return Ok(()) };
    let is_below = |node: Node<'_, '_>| {
        node.attribute("file").is_some_and(|file| is_same(Path::new(file), image))
    };
    for other in disks {
        let target = within(*other, "target", "dev").unwrap_or_default();
        if other.attribute("type") == Some("volume") {
            bail!("disk {target} is a volume of a pool: name its file as the source first");
        }
        if other.descendants().any(is_below) {
            bail!(
                "the image of port {} lies below disk {target}: end its snapshot first",
                disk.name
            );
        }
    }
    Ok(())
}

/// Whether two paths are one, links in them followed where they exist.
fn is_same(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}

/// Refuses a device with an element that is neither kept nor left out knowingly.
fn check_elements(device: Node<'_, '_>, which: &str, known: [&[&str]; 2]) -> anyhow::Result<()> {
    let mut names = device.children().filter(Node::is_element).map(|node| node.tag_name().name());
    let known = known.concat();
    match names.find(|name| !known.contains(name)) {
        Some(name) => bail!(
            "{which} has <{name}>, which a port does not take over: say it in the config, if that \
             has it, and take it out of the domain first"
        ),
        None => Ok(()),
    }
}

/// Refuses a driver that keeps the device behind the guest's IOMMU, or has switches of its own.
fn check_driver(device: Node<'_, '_>, which: &str) -> anyhow::Result<()> {
    let Some(driver) = child(device, "driver") else { return Ok(()) };
    if let Some(name) = ["iommu", "ats"].iter().find(|name| driver.attribute(**name) == Some("on"))
    {
        bail!("the driver of {which} has {name}='on', which ports do not offer");
    }
    refuse_elements(driver, which)
}

/// Refuses a part of a device that has elements of its own.
fn refuse_elements(part: Node<'_, '_>, which: &str) -> anyhow::Result<()> {
    let Some(inside) = part.first_element_child() else { return Ok(()) };
    let (part, name) = (part.tag_name().name(), inside.tag_name().name());
    bail!("the {part} of {which} has <{name}>, which a port does not take over")
}

/// Refuses a card that the guest would find changed, or that loses something.
fn check_card(net: &NetConfig, card: Node<'_, '_>) -> anyhow::Result<()> {
    let which = format!("card {}", within(card, "mac", "address").unwrap_or("without a mac"));
    match within(card, "model", "type") {
        Some("virtio" | "virtio-net-pci" | "virtio-non-transitional") => {}
        model => bail!(
            "{which} is a {:?}, and ports are virtio: give it that model first, and see that the \
             guest finds it",
            model.unwrap_or("card of the hypervisor's choice")
        ),
    }
    check_driver(card, &which)?;
    let attached = (card.attribute("type"), within(card, "source", "portgroup"));
    if let (Some("direct" | "hostdev" | "vdpa"), _) | (_, Some(_)) = attached {
        bail!(
            "{which} is attached by {:?}, or by a group of ports, which says who may reach it: say \
             that in the config, and attach it to the plain network first",
            attached.0.unwrap_or_default()
        );
    }
    match within(card, "mtu", "size") {
        Some(mtu) if mtu != net.mtu.to_string() => {
            bail!("{which} has an MTU of {mtu} in the domain, and port {} of {}", net.name, net.mtu)
        }
        _ => check_elements(card, &which, [&KEPT_OF_CARD, &[&LEFT_OF_CARD[..], &["mtu"]].concat()]),
    }
}

/// Refuses a disk of a domain that the guest would find changed, or that loses something.
fn check_disk(disk: &DiskConfig, old: Node<'_, '_>) -> anyhow::Result<()> {
    let which = format!("disk {}", within(old, "target", "dev").unwrap_or_default());
    let kind = old.attribute("device").unwrap_or("disk");
    match (kind, within(old, "target", "bus")) {
        ("disk", Some("virtio")) => {}
        (kind, bus) => bail!(
            "{which} is a {kind} on bus {:?}, and ports are virtio: give it that bus first, and see \
             that the guest starts from it",
            bus.unwrap_or_default()
        ),
    }
    let format = disk.format.name();
    if let Some(kind) = within(old, "driver", "type").filter(|kind| *kind != format) {
        bail!("{which} is {kind:?} in the domain, and port {} is {format:?}", disk.name);
    }
    match (child(old, "readonly").is_some(), disk.read_only) {
        (true, false) => bail!("{which} is read-only in the domain, and port {} is not", disk.name),
        (false, true) => bail!("{which} is writable in the domain, and port {} is not", disk.name),
        _ => check_driver(old, &which)?,
    }
    let serial = child(old, "serial").and_then(|serial| serial.text()).unwrap_or_default();
    if !serial.is_empty() && serial != disk.serial {
        bail!("{which} has the serial {serial:?} in the domain, and port {} not", disk.name);
    }
    // Part of a file, or what is encrypted in it.
    child(old, "source").map_or(Ok(()), |source| refuse_elements(source, &which))?;
    let blocks = check_blocks(disk, old, &which)?;
    check_elements(old, &which, [&KEPT_OF_DISK, &[&LEFT_OF_DISK[..], blocks].concat()])
}

/// Refuses blocks of another size than the port's; the element that means nothing besides.
fn check_blocks(
    disk: &DiskConfig,
    old: Node<'_, '_>,
    which: &str,
) -> anyhow::Result<&'static [&'static str]> {
    // Where the file system decides, nobody knows here.
    let BlockSize::Bytes(bytes) = disk.block_size else { return Ok(&[]) };
    let element = child(old, "blockio");
    let logical = element.and_then(|e| e.attribute("logical_block_size"));
    let logical = logical.unwrap_or(USUAL_BLOCK_BYTES);
    if logical != bytes.to_string() {
        bail!(
            "{which} has blocks of {logical} bytes in the domain, and port {} of {bytes}",
            disk.name
        );
    }
    let has_more =
        element.is_some_and(|e| e.attributes().any(|a| a.name() != "logical_block_size"));
    Ok(if has_more { &[] } else { &["blockio"] })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = include_str!("golden/own.xml");
    const CHANGED: &str = include_str!("golden/own-changed.xml");
    const CONFIG: &str = r#"
[[switch]]
name = "lan"
[[vm]]
name = "own"
[[vm.net]]
name = "net0"
switch = "lan"
[[vm.disk]]
name = "root"
format = "qcow2"
path = "/var/lib/libvirt/images/own.qcow2"
queues = 2
[[vm.disk]]
name = "scratch"
format = "memory"
size = "64MiB"
"#;

    /// The domain `text` with the ports of that VM, whose config has `new` in place of `old`.
    fn put(text: &str, (old, new): (&str, &str)) -> Result<String, String> {
        assert!(CONFIG.contains(old));
        let config = CONFIG.replacen(old, new, 1);
        let config = config::parse(Path::new("m.toml"), &config).unwrap();
        write(&config.vms[0], text).map_err(|e| format!("{e:#}"))
    }

    const AS_IT_IS: (&str, &str) = ("", "");

    #[test]
    fn ports_take_the_places_of_devices() {
        let changed = put(OWN, AS_IT_IS).unwrap();
        assert_eq!(changed, CHANGED, "{changed}");
    }

    #[test]
    fn a_second_time_changes_nothing() {
        assert_eq!(put(CHANGED, AS_IT_IS).unwrap(), CHANGED);
        let emulated = put(&OWN.replace("'kvm'", "'qemu'"), AS_IT_IS).unwrap();
        assert_eq!(put(&emulated, AS_IT_IS).unwrap(), emulated);
    }

    #[test]
    fn an_emulated_domain_gets_properties_of_its_cards() {
        let changed = put(&OWN.replace("'kvm'", "'qemu'"), AS_IT_IS).unwrap();
        let start = format!("<domain xmlns:qemu='{QEMU_SPACE}' type='qemu'>");
        assert!(changed.starts_with(&start), "{changed}");
        let end = changed.split_once("</devices>").unwrap().1;
        assert!(end.contains("<qemu:device alias='ua-net0'>"), "{changed}");
        assert!(end.ends_with("  </qemu:override>\n</domain>\n"), "{changed}");
    }

    /// The emulated domain with this inside of its override.
    fn overriding(inside: &str) -> String {
        let head = format!("<domain type='qemu' xmlns:qemu='{QEMU_SPACE}'>");
        let own = OWN.replace("<domain type='kvm'>", &head);
        own.replace("</domain>", &format!("  <qemu:override>{inside}</qemu:override>\n</domain>"))
    }

    #[test]
    fn an_override_is_added_to() {
        for inside in ["", "\n    <qemu:device alias='ua-other'/>\n  "] {
            let changed = put(&overriding(inside), AS_IT_IS).unwrap();
            assert_eq!(changed.matches("<qemu:override>").count(), 1, "{changed}");
            assert!(changed.contains(inside.trim()), "{changed}");
            assert_eq!(changed.matches("alias='ua-net0'>").count(), 1, "{changed}");
            assert_eq!(put(&changed, AS_IT_IS).unwrap(), changed);
        }
        // One of two cards has a property.
        let second = "switch = \"lan\"\n[[vm.net]]\nname = \"wide\"\nswitch = \"lan\"\nmtu = 9000";
        let two = |text: &str| put(text, ("switch = \"lan\"", second)).unwrap();
        let changed = two(OWN);
        assert_eq!(changed.matches("<qemu:device").count(), 1, "{changed}");
        assert_eq!(two(&changed), changed);
        for alias in ["net0", "net1", "virtio-disk0"] {
            let told = put(&overriding(&format!("<qemu:device alias='{alias}'/>")), AS_IT_IS);
            let told = told.unwrap_err();
            assert!(told.contains(&format!("has properties of device {alias},")), "{told}");
        }
    }

    #[test]
    fn a_port_with_another_socket_stays_where_it_is() {
        let moved = CHANGED.replace("/run/millrace/own-", "/run/before/own-");
        assert_eq!(put(&moved, AS_IT_IS).unwrap(), CHANGED);
    }

    #[test]
    fn memory_and_blocks_are_as_the_config_has_them() {
        let limit = |size| ("name = \"own\"", format!("name = \"own\"\nmemory_limit = \"{size}\""));
        let put_limited = |size, text: &str| put(text, (limit(size).0, &limit(size).1));
        assert!(put_limited("2GiB", OWN).is_ok());
        let told = put_limited("1GiB", OWN).unwrap_err();
        assert!(told.starts_with("2048 MiB of memory are more than VM own may share"), "{told}");
        let more =
            OWN.replace("  <memory ", "  <maxMemory slots='2' unit='G'>4</maxMemory>\n  <memory ");
        assert!(put_limited("2GiB", &more).unwrap_err().starts_with("4096 MiB"));
        let large = ("queues = 2", "block_size = 4096");
        let told = put(OWN, large).unwrap_err();
        assert_eq!(told, "disk vda has blocks of 512 bytes in the domain, and port root of 4096");
        let blocks = |more: &str| {
            let element = format!("<blockio logical_block_size='4096'{more}/>");
            put(&OWN.replacen("<backingStore/>", &element, 1), large)
        };
        assert!(!blocks("").unwrap().contains("blockio"));
        let told = blocks(" physical_block_size='8192'").unwrap_err();
        assert!(told.starts_with("disk vda has <blockio>"), "{told}");
    }

    #[test]
    fn a_mac_address_names_the_card() {
        let mac = |mac| ("switch = \"lan\"", format!("switch = \"lan\"\nmac = \"{mac}\""));
        let (old, second) = mac("52:54:00:12:34:57");
        let changed = put(OWN, (old, &second)).unwrap();
        assert!(changed.contains("<source network='default'/>"), "{changed}");
        assert!(!changed.contains("<source bridge='br0'/>"), "{changed}");
        let (old, third) = mac("52:54:00:12:34:58");
        let told = put(OWN, (old, &third)).unwrap_err();
        assert!(told.starts_with("no card of the domain has the mac 52:54:00:12:34:58"), "{told}");
    }

    #[test]
    fn memory_stays_in_huge_pages_and_becomes_shared() {
        let backing = |inside: &str| {
            let own = OWN
                .replace("  <vcpu", &format!("  <memoryBacking>{inside}</memoryBacking>\n  <vcpu"));
            let changed = put(&own, AS_IT_IS).unwrap();
            let (_, rest) = changed.split_once("<memoryBacking>").unwrap();
            let inside = rest.split_once("</memoryBacking>").unwrap().0;
            inside.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let shared = "<source type='memfd'/> <access mode='shared'/>";
        assert_eq!(backing("<hugepages/>"), format!("{shared} <hugepages/>"));
        let private = "<source type='anonymous'/><access mode='private'/><locked/>";
        assert_eq!(backing(private), format!("{shared} <locked/>"));
        let file = "<source type='file'/> <access mode='shared'/>";
        assert_eq!(backing(file), file);
    }

    #[test]
    fn what_a_guest_would_find_changed_is_refused() {
        let told = |old, new| put(&OWN.replacen(old, new, 1), AS_IT_IS).unwrap_err();
        let sata = told("dev='vda' bus='virtio'", "dev='sdb' bus='sata'");
        assert!(sata.starts_with("disk sdb is a disk on bus \"sata\""), "{sata}");
        let raw = told("type='qcow2'", "type='raw'");
        assert_eq!(raw, "disk vda is \"raw\" in the domain, and port root is \"qcow2\"");
        let fixed = told("<backingStore/>", "<readonly/>");
        assert_eq!(fixed, "disk vda is read-only in the domain, and port root is not");
        let serial = told("<backingStore/>", "<serial>x</serial>");
        assert_eq!(serial, "disk vda has the serial \"x\" in the domain, and port root not");
        let card = told("<model type='virtio'/>", "<model type='e1000'/>");
        assert!(card.starts_with("card 52:54:00:12:34:56 is a \"e1000\""), "{card}");
        let mtu = told("<model type='virtio'/>", "<model type='virtio'/><mtu size='9000'/>");
        assert!(mtu.ends_with("an MTU of 9000 in the domain, and port net0 of 1500"), "{mtu}");
        let dial = put(OWN, ("queues = 2", "mode = \"dial\"")).unwrap_err();
        assert!(dial.starts_with("libvirt has no element for root"), "{dial}");
    }

    #[test]
    fn nothing_is_lost_in_silence() {
        let told = |old: &str, new: &str| put(&OWN.replacen(old, new, 1), AS_IT_IS).unwrap_err();
        let model = "<model type='virtio'/>";
        for lost in ["<filterref filter='clean-traffic'/>", "<bandwidth/>", "<vlan/>", "<port/>"] {
            let name = lost.trim_matches(['<', '>', '/']).split(' ').next().unwrap();
            let told = told(model, &format!("{model}{lost}"));
            assert!(told.starts_with(&format!("card 52:54:00:12:34:56 has <{name}>")), "{told}");
        }
        for lost in ["<iotune/>", "<encryption/>", "<shareable/>", "<transient/>"] {
            let told = told("<backingStore/>", lost);
            assert!(
                told.starts_with(&format!("disk vda has {}", lost.replace("/>", ">"))),
                "{told}"
            );
        }
        let slices = told("own.qcow2'/>", "own.qcow2'><slices/></source>");
        assert!(slices.starts_with("the source of disk vda has <slices>"), "{slices}");
        let cell = "<cpu><numa><cell id='0' memAccess='private'/></numa></cpu>\n  <os>";
        assert!(told("<os>", cell).contains("memAccess='private'"));
        let module = "<memory model='dimm' access='private'/><memballoon";
        assert!(told("<memballoon", module).contains("access='private'"));
        assert!(told("<os>", "<launchSecurity/><os>").contains("encrypted"));
        let driver = "<driver name='qemu' iommu='on'/>";
        assert!(told(model, &format!("{model}{driver}")).contains("iommu='on'"));
        let group = told("network='default'", "network='default' portgroup='a'");
        assert!(group.contains("group of ports"), "{group}");
        let ovs = told(model, &format!("{model}<virtualport type='openvswitch'/>"));
        assert!(ovs.contains("has <virtualport>"), "{ovs}");
        let below = "own.snap1'/><backingStore><source file='/var/lib/libvirt/images/own.qcow2'/>\
                     </backingStore>";
        let snapshot = told("own.qcow2'/>\n      <backingStore/>", below);
        assert!(snapshot.contains("lies below disk vda"), "{snapshot}");
        let pool = OWN.replacen("type='file'", "type='volume'", 1);
        let file = "file='/var/lib/libvirt/images/own.qcow2'";
        let pool = put(&pool.replacen(file, "pool='default' volume='own.qcow2'", 1), AS_IT_IS);
        assert!(pool.unwrap_err().contains("volume of a pool"));
    }

    #[test]
    fn what_is_no_domain_is_told() {
        let told = |text: &str| put(text, AS_IT_IS).unwrap_err();
        assert!(told("<domain>").starts_with("the domain is not well-formed: "));
        assert!(told("<network/>").ends_with("its first element is network"));
        assert_eq!(told("<domain/>"), "the domain has no devices");
        assert!(told("<!DOCTYPE d [<!ENTITY a 'a'>]><domain/>").contains("not well-formed"));
        assert!(told(&" ".repeat(MAX_DOMAIN_BYTES + 1)).ends_with("the limit is 1048576"));
    }
}
