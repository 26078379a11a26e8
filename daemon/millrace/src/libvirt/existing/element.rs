//! Reading of a domain's elements.

use std::path::Path;

use roxmltree::Node;

use crate::libvirt::device;

/// An element inside another one, by its name.
pub fn child<'a>(parent: Node<'a, 'a>, name: &str) -> Option<Node<'a, 'a>> {
    parent.children().find(|node| node.has_tag_name(name))
}

/// Value of an attribute of an element inside another one.
pub fn within<'a>(parent: Node<'a, 'a>, name: &str, attribute: &str) -> Option<&'a str> {
    child(parent, name)?.attribute(attribute)
}

/// Bytes of an element with a unit, by itself KiB (libvirt, Memory Allocation).
pub fn bytes(element: Node<'_, '_>) -> Option<u64> {
    let unit = element.attribute("unit").unwrap_or_default().to_ascii_lowercase();
    let unit_bytes = match unit.as_str() {
        "" => 1024,
        "b" | "byte" | "bytes" => 1,
        unit => {
            let (prefix, rest) = unit.split_at_checked(1)?;
            let power = "kmgtpe".find(prefix)? as u32 + 1;
            match rest {
                "" | "ib" => 1024_u64.checked_pow(power)?,
                "b" => 1000_u64.checked_pow(power)?,
                _ => return None,
            }
        }
    };
    element.text()?.trim().parse::<u64>().ok()?.checked_mul(unit_bytes)
}

/// Whether a device is on a vhost-user socket.
pub fn is_vhost_user(device: Node<'_, '_>) -> bool {
    device.attribute("type") == Some("vhostuser")
}

/// Whether a device has the alias of a port.
pub fn has_alias(device: Node<'_, '_>, port: &str) -> bool {
    within(device, "alias", "name") == Some(&device::alias(port))
}

/// Whether a card has a MAC address.
pub fn has_mac(card: Node<'_, '_>, mac: &str) -> bool {
    within(card, "mac", "address").is_some_and(|own| own.eq_ignore_ascii_case(mac))
}

/// Socket of a vhost-user device.
pub fn socket<'a>(device: Node<'a, 'a>) -> Option<&'a Path> {
    is_vhost_user(device).then(|| within(device, "source", "path").map(Path::new))?
}

/// Name of a device by which a reader finds it.
pub fn which(device: Node<'_, '_>) -> String {
    if device.has_tag_name("interface") {
        format!("card {}", within(device, "mac", "address").unwrap_or("without a mac"))
    } else {
        format!("disk {}", within(device, "target", "dev").unwrap_or_default())
    }
}
