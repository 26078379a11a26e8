//! Properties of QEMU's devices that a domain overrides (libvirt, `<qemu:override>`).

use anyhow::bail;
use config::NetConfig;
use roxmltree::Node;

use super::element::{has_alias, within};
use crate::cli::DomainKind;
use crate::libvirt::device;
use crate::libvirt::domain::{HOST_MTU, QEMU_SPACE, properties};

/// The override of a domain, if it has one.
#[derive(Clone, Copy)]
pub struct Overrides<'a>(pub Option<Node<'a, 'a>>);

impl<'a> Overrides<'a> {
    /// Finds that of the domain `root`.
    pub fn of(root: Node<'a, 'a>) -> Self {
        Self(root.children().find(|node| node.has_tag_name((QEMU_SPACE, "override"))))
    }

    /// The last thing in it.
    pub fn last(self) -> Option<Node<'a, 'a>> {
        self.0?.children().rfind(|node| node.is_element() || node.is_comment())
    }

    fn entries(self) -> impl Iterator<Item = Node<'a, 'a>> {
        self.0.into_iter().flat_map(|node| node.children()).filter(Node::is_element)
    }

    /// Refuses to replace a device of which properties are overridden, or to change the number by
    /// which another one is named. A port's own device keeps its alias.
    pub fn check_replaced(self, device: Node<'_, '_>, port: &str) -> anyhow::Result<()> {
        if has_alias(device, port) {
            return Ok(());
        }
        let own = within(device, "alias", "name");
        let target = within(device, "target", "dev");
        let is_meant = |alias: &str| match device.has_tag_name("interface") {
            // libvirt counts the cards that have no alias of their own.
            true => alias.strip_prefix("net").is_some_and(|n| n.parse::<u32>().is_ok()),
            false => {
                let number = alias.strip_prefix("virtio-disk").and_then(|n| n.parse().ok());
                number.is_some_and(|slot| target == Some(&device::target(slot)))
            }
        };
        let mut aliases = self.entries().filter_map(|entry| entry.attribute("alias"));
        match aliases.find(|alias| own == Some(*alias) || is_meant(alias)) {
            Some(alias) => bail!(
                "<qemu:override> has properties of device {alias}, which port {port} may replace or \
                 give another number: take them out first"
            ),
            None => Ok(()),
        }
    }

    /// Ports whose properties it lacks. Refuses one that has others of them than the port needs.
    pub fn missing(self, kind: DomainKind, nets: &[NetConfig]) -> anyhow::Result<Vec<&NetConfig>> {
        let mut missing = Vec::new();
        for net in nets {
            let alias = device::alias(&net.name);
            match self.entries().find(|entry| entry.attribute("alias") == Some(&alias)) {
                Some(entry) => check_entry(entry, kind, net)?,
                None => missing.push(net),
            }
        }
        Ok(missing)
    }
}

/// Refuses properties of a port's device that are not those that the port needs.
fn check_entry(entry: Node<'_, '_>, kind: DomainKind, net: &NetConfig) -> anyhow::Result<()> {
    let front = entry.children().find(|node| node.has_tag_name((QEMU_SPACE, "frontend")));
    let value_of = |name: &str| {
        let mut properties = front.into_iter().flat_map(|front| front.children());
        let property = properties.find(|property| property.attribute("name") == Some(name))?;
        property.attribute("value")
    };
    let needed = properties(kind, net);
    let differs = needed.iter().find(|(name, value)| value_of(name) != Some(value));
    if let Some((name, value)) = differs {
        bail!(
            "port {} needs {name} {value} in the <qemu:override> that the domain has of it: say so \
             there first, or take that out",
            net.name
        );
    }
    let has_mtu = needed.iter().any(|(name, _)| *name == HOST_MTU);
    match value_of(HOST_MTU) {
        Some(mtu) if !has_mtu => bail!(
            "<qemu:override> gives port {} an MTU of {mtu}, and the config one of {}: take that out \
             first",
            net.name,
            net.mtu
        ),
        _ => Ok(()),
    }
}
