//! A domain that is there already, with its memory and devices as the ports of a VM need them.
//!
//! # Theory of operation
//! The text stays as it is, but for the places that change. A port takes the place of the card or
//! disk that it stands for: that one's MAC address or name, its address on the bus and its place in
//! the boot order stay, so that the guest finds it where it was. A port that was put in before is
//! found by its alias, else by its socket, before any other takes its device. Else a card is found
//! by the MAC address that the config says, or is the next one, and a disk by its image. Ports
//! without such a device come after the last one. A domain that was changed once is not changed by
//! a second time.
//!
//! Nothing is lost in silence. What a device has besides is on a list of what means nothing at a
//! port, such as the name of a TAP device; anything else, a filter or a ceiling say, is refused,
//! and so is what the guest would find changed ([`checks`]).
//!
//! # Limits
//! - A domain has up to 1 MiB and 100,000 nodes; libvirt's have some ten KiB.
//! - Only what libvirt has an element for: no vsock, and no disk whose socket QEMU makes.
//! - A card without an MTU in the domain takes the port's, whatever the guest has now.

mod checks;
mod element;
mod overrides;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, bail};
use config::{DiskConfig, NetConfig, VmConfig, format_mac};
use roxmltree::{Document, Node, ParsingOptions};

use element::{bytes, child, has_alias, has_mac, is_vhost_user, socket, which, within};
use overrides::Overrides;

use super::device::{self, Kept};
use super::domain::{self, QEMU_SPACE};
use super::xml::Xml;
use crate::cli::DomainKind;

/// Most bytes of a domain.
pub const MAX_DOMAIN_BYTES: usize = 1 << 20;
/// Most elements, attributes and texts of it.
const MAX_NODES: u32 = 100_000;
/// Depth of devices in what libvirt prints.
const DEVICE_DEPTH: usize = 2;

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
    super::check_memory(domain.memory_bytes()?, vm)?;
    domain.share_memory()?;
    domain.put_cards(vm)?;
    domain.put_disks(vm)?;
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

/// A domain and what changes in it.
struct Domain<'a> {
    text: &'a str,
    root: Node<'a, 'a>,
    devices: Node<'a, 'a>,
    kind: DomainKind,
    overrides: Overrides<'a>,
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
        let overrides = Overrides::of(root);
        let (targets, edits) = (Vec::new(), Vec::new());
        let mut domain = Self { text, root, devices, kind, overrides, targets, edits };
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
    fn memory_bytes(&self) -> anyhow::Result<u64> {
        let mut most = 0;
        for element in ["memory", "maxMemory"].iter().filter_map(|name| child(self.root, name)) {
            let bytes = bytes(element).with_context(|| {
                format!("<{}> of the domain is no size", element.tag_name().name())
            })?;
            most = most.max(bytes);
        }
        Ok(most)
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

    /// Puts the VM's network ports into the places of cards.
    fn put_cards(&mut self, vm: &VmConfig) -> anyhow::Result<()> {
        let mut cards = self.elements("interface");
        let ports = vm.nets.iter().map(|net| (net.name.as_str(), net.endpoint.socket.as_path()));
        let own = take_own(&mut cards, vm, &ports.collect::<Vec<_>>())?;
        // Those that name their card first, so that no other takes it.
        let ports = vm.nets.iter().zip(own);
        let (named, others): (Vec<_>, Vec<_>) = ports.partition(|(net, _)| net.mac.is_some());
        for (net, own) in named.into_iter().chain(others) {
            self.put_card(net, own, &mut cards)?;
        }
        Ok(())
    }

    /// Puts a network port into the place of its own card, or of one that `cards` has no longer
    /// then.
    fn put_card(
        &mut self,
        net: &NetConfig,
        own: Option<Node<'a, 'a>>,
        cards: &mut Vec<Node<'a, 'a>>,
    ) -> anyhow::Result<()> {
        let card = match own {
            Some(card) if is_card_of(net, card)? => return Ok(()),
            Some(card) => Some(card),
            None => next_card(net, cards)?.map(|at| cards.remove(at)),
        };
        let mut xml = Xml::at(DEVICE_DEPTH);
        let Some(card) = card else {
            device::net(&mut xml, net, &Kept::default());
            return self.append(xml);
        };
        checks::card(net, card)?;
        self.overrides.check_replaced(card, &net.name)?;
        let name = child(card, "mac").map(|mac| self.raw(mac));
        let kept = Kept { name, rest: self.kept(card, &checks::KEPT_OF_CARD) };
        device::net(&mut xml, net, &kept);
        self.replace(card, xml)
    }

    /// Puts the VM's disks into the places of those that have their images.
    fn put_disks(&mut self, vm: &VmConfig) -> anyhow::Result<()> {
        let vcpus = child(self.root, "vcpu").and_then(|v| v.text()?.trim().parse().ok());
        let mut disks = self.elements("disk");
        let ports =
            vm.disks.iter().map(|disk| (disk.name.as_str(), disk.endpoint.socket.as_path()));
        let own = take_own(&mut disks, vm, &ports.collect::<Vec<_>>())?;
        for (disk, own) in vm.disks.iter().zip(own) {
            self.put_disk(disk, own, &mut disks, vcpus.unwrap_or(1))?;
        }
        Ok(())
    }

    /// Puts a disk's port into the place of its own disk, or of the one that has its image.
    fn put_disk(
        &mut self,
        disk: &DiskConfig,
        own: Option<Node<'a, 'a>>,
        disks: &mut Vec<Node<'a, 'a>>,
        vcpus: u32,
    ) -> anyhow::Result<()> {
        let mut xml = Xml::at(DEVICE_DEPTH);
        let has_image = |old: &Node<'_, '_>| checks::has_image(disk, *old);
        let old = own.or_else(|| disks.iter().position(has_image).map(|at| disks.remove(at)));
        // Else two devices would have one image.
        if let Some(other) = disks.iter().find(|old| has_image(old)) {
            bail!("{} has the image of port {}, too", which(*other), disk.name);
        }
        let Some(old) = old else {
            checks::hidden_image(disk, disks)?;
            let slot = (0..).find(|slot| !self.targets.contains(&device::target(*slot)));
            let slot = slot.unwrap_or_default();
            self.targets.push(device::target(slot));
            device::disk(&mut xml, disk, slot, false, Some(vcpus), &Kept::default());
            return self.append(xml);
        };
        match is_vhost_user(old) {
            true if is_disk_of(disk, old, vcpus) => return Ok(()),
            true => checks::disk_on_socket(old)?,
            false => checks::disk(disk, old)?,
        }
        self.overrides.check_replaced(old, &disk.name)?;
        let name = child(old, "target").map(|target| self.raw(target));
        let kept = Kept { name, rest: self.kept(old, &checks::KEPT_OF_DISK) };
        device::disk(&mut xml, disk, 0, false, Some(vcpus), &kept);
        self.replace(old, xml)
    }

    fn append(&mut self, xml: Xml) -> anyhow::Result<()> {
        match self.devices.last_element_child() {
            Some(last) => self.insert_after(last, xml),
            None => Ok(()),
        }
    }

    /// Adds properties of cards that libvirt has no attribute for.
    fn override_properties(&mut self, nets: &[NetConfig]) -> anyhow::Result<()> {
        let missing = self.overrides.missing(self.kind, nets)?;
        let last = self.overrides.last();
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
        match (last, self.overrides.0, self.root.last_element_child()) {
            (Some(last), ..) | (None, None, Some(last)) => self.insert_after(last, xml),
            (None, Some(empty), _) => self.replace(empty, xml),
            (None, None, None) => Ok(()),
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

/// Takes the devices that were put in for ports, given by name and socket, out of `devices`.
/// Refuses one that was put in for a port of another name.
fn take_own<'a>(
    devices: &mut Vec<Node<'a, 'a>>,
    vm: &VmConfig,
    ports: &[(&str, &Path)],
) -> anyhow::Result<Vec<Option<Node<'a, 'a>>>> {
    let mut take = |is_own: &dyn Fn(Node<'_, '_>) -> bool| {
        devices.iter().position(|device| is_own(*device)).map(|at| devices.remove(at))
    };
    // Aliases first: sockets may have changed their ports.
    let mut own = Vec::with_capacity(ports.len());
    for (name, _) in ports {
        own.push(take(&|device| is_vhost_user(device) && has_alias(device, name)));
    }
    for (own, (_, path)) in own.iter_mut().zip(ports).filter(|(own, _)| own.is_none()) {
        *own = take(&|device| socket(device) == Some(path));
    }
    let folders = || ports.iter().filter_map(|(_, path)| path.parent());
    let is_here = |path: &Path| folders().any(|folder| path.parent() == Some(folder));
    let lost = devices.iter().find_map(|d| socket(*d).filter(|s| is_here(s)).map(|s| (*d, s)));
    if let Some((device, path)) = lost {
        bail!(
            "{} is on {}, a socket that no port of VM {} has: give a port that name, or take the \
             device out first",
            which(device),
            path.display(),
            vm.name
        );
    }
    Ok(own)
}

/// Whether a port's own card is as the config has it. Refuses one that has another MAC address.
fn is_card_of(net: &NetConfig, card: Node<'_, '_>) -> anyhow::Result<bool> {
    if let Some(wanted) = net.mac.map(format_mac).filter(|wanted| !has_mac(card, wanted)) {
        let Some(mac) = within(card, "mac", "address") else { return Ok(false) };
        bail!("port {} has the mac {wanted} in the config, and {mac} in the domain", net.name);
    }
    Ok(has_alias(card, &net.name)
        && socket(card) == Some(&net.endpoint.socket)
        && within(card, "source", "mode") == Some(device::card_mode(&net.endpoint))
        && within(card, "driver", "queues") == device::card_queues(net).as_deref())
}

/// Whether a port's own disk is as the config has it.
fn is_disk_of(disk: &DiskConfig, old: Node<'_, '_>, vcpus: u32) -> bool {
    has_alias(old, &disk.name)
        && socket(old) == Some(&disk.endpoint.socket)
        && within(old, "driver", "queues") == device::queues(disk, Some(vcpus)).as_deref()
}

/// Place of the card that a port takes which has none yet.
fn next_card(net: &NetConfig, cards: &[Node<'_, '_>]) -> anyhow::Result<Option<usize>> {
    let Some(mac) = net.mac.map(format_mac) else {
        return Ok(cards.iter().position(|card| !is_vhost_user(*card)));
    };
    match cards.iter().position(|card| has_mac(*card, &mac)) {
        None if !cards.is_empty() => bail!(
            "no card of the domain has the mac {mac} of port {}; without `mac` the port takes the \
             next card",
            net.name
        ),
        at => Ok(at),
    }
}
