//! Refusals: of parts that a port does not take over, and of what its guest would find changed.
//!
//! Each element of a device is on one of two lists here, of those that stay and of those that mean
//! nothing at a port. One that is on neither is refused, so that nothing is lost in silence.

use std::path::Path;

use anyhow::bail;
use config::{BlockSize, DiskConfig, DiskFormat, NetConfig};
use roxmltree::Node;

use super::element::{child, which, within};

/// Size of a disk's blocks where the domain does not say.
const USUAL_BLOCK_BYTES: &str = "512";

/// Elements that a card keeps, besides its MAC address.
pub const KEPT_OF_CARD: [&str; 4] = ["boot", "rom", "acpi", "address"];
/// Elements of a card that mean nothing at a port: where it was attached, and how QEMU served it.
const LEFT_OF_CARD: [&str; 7] = ["mac", "source", "model", "driver", "target", "alias", "backend"];
/// Elements that a disk keeps, besides its target.
pub const KEPT_OF_DISK: [&str; 3] = ["boot", "acpi", "address"];
/// Elements of a disk that mean nothing at a port, or are compared with its settings.
const LEFT_OF_DISK: [&str; 7] =
    ["driver", "source", "target", "backingStore", "alias", "readonly", "serial"];

/// Refuses a card that the guest would find changed, or that loses something.
pub fn card(net: &NetConfig, card: Node<'_, '_>) -> anyhow::Result<()> {
    let which = which(card);
    match within(card, "model", "type") {
        Some("virtio" | "virtio-net-pci" | "virtio-non-transitional") => {}
        model => bail!(
            "{which} is a {:?}, and ports are virtio: give it that model first, and see that the \
             guest finds it",
            model.unwrap_or("card of the hypervisor's choice")
        ),
    }
    driver(card, &which)?;
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
        _ => elements(card, &which, [&KEPT_OF_CARD, &[&LEFT_OF_CARD[..], &["mtu"]].concat()]),
    }
}

/// Refuses a disk of a domain that the guest would find changed, or that loses something.
pub fn disk(disk: &DiskConfig, old: Node<'_, '_>) -> anyhow::Result<()> {
    let which = which(old);
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
        _ => driver(old, &which)?,
    }
    let serial = child(old, "serial").and_then(|serial| serial.text()).unwrap_or_default();
    if !serial.is_empty() && serial != disk.serial {
        bail!("{which} has the serial {serial:?} in the domain, and port {} not", disk.name);
    }
    // Part of a file, or what is encrypted in it.
    child(old, "source").map_or(Ok(()), |source| no_elements(source, &which))?;
    let blocks = blocks(disk, old, &which)?;
    elements(old, &which, [&KEPT_OF_DISK, &[&LEFT_OF_DISK[..], blocks].concat()])
}

/// Refuses a disk on a vhost-user socket that loses something as the port's socket takes over.
pub fn disk_on_socket(old: Node<'_, '_>) -> anyhow::Result<()> {
    driver(old, &which(old))?;
    elements(old, &which(old), [&KEPT_OF_DISK, &LEFT_OF_DISK])
}

/// Refuses blocks of another size than the port's. Returns the element that then means nothing.
fn blocks(
    disk: &DiskConfig,
    old: Node<'_, '_>,
    which: &str,
) -> anyhow::Result<&'static [&'static str]> {
    if matches!((disk.block_size, &disk.format), (BlockSize::Auto(_), DiskFormat::Raw { .. })) {
        // The storage decides, and may be another machine's.
        return Ok(&[]);
    }
    let bytes = disk.block_size.least_bytes();
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

/// Refuses a device with an element that is neither kept nor left out knowingly.
fn elements(device: Node<'_, '_>, which: &str, known: [&[&str]; 2]) -> anyhow::Result<()> {
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
fn driver(device: Node<'_, '_>, which: &str) -> anyhow::Result<()> {
    let Some(driver) = child(device, "driver") else { return Ok(()) };
    if let Some(name) = ["iommu", "ats"].iter().find(|name| driver.attribute(**name) == Some("on"))
    {
        bail!("the driver of {which} has {name}='on', which ports do not offer");
    }
    no_elements(driver, which)
}

/// Refuses a part of a device that has elements of its own.
fn no_elements(part: Node<'_, '_>, which: &str) -> anyhow::Result<()> {
    let Some(inside) = part.first_element_child() else { return Ok(()) };
    let (part, name) = (part.tag_name().name(), inside.tag_name().name());
    bail!("the {part} of {which} has <{name}>, which a port does not take over")
}

/// Whether a disk of the domain has the image of a port.
pub fn has_image(disk: &DiskConfig, old: Node<'_, '_>) -> bool {
    let file = within(old, "source", "file").or(within(old, "source", "dev"));
    file.zip(image(disk)).is_some_and(|(file, image)| is_same(Path::new(file), image))
}

/// Refuses to add a disk whose image one of these disks may have without naming it as its source.
pub fn hidden_image(disk: &DiskConfig, disks: &[Node<'_, '_>]) -> anyhow::Result<()> {
    let Some(image) = image(disk) else { return Ok(()) };
    let is_below = |node: Node<'_, '_>| {
        node.attribute("file").is_some_and(|file| is_same(Path::new(file), image))
    };
    for other in disks {
        if other.attribute("type") == Some("volume") {
            bail!("{} is a volume of a pool: name its file as the source first", which(*other));
        }
        if other.descendants().any(is_below) {
            bail!(
                "the image of port {} lies below {}: end its snapshot first",
                disk.name,
                which(*other)
            );
        }
    }
    Ok(())
}

/// Image of a disk; none where it is memory.
fn image(disk: &DiskConfig) -> Option<&Path> {
    match &disk.format {
        DiskFormat::Raw { path, .. } | DiskFormat::Qcow2 { path, .. } => Some(path),
        DiskFormat::Memory { .. } | DiskFormat::Null { .. } => None,
    }
}

/// Whether two paths are one, links in them followed where they exist.
fn is_same(a: &Path, b: &Path) -> bool {
    a == b || a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}
