//! Addresses by which peers know a VM.

use std::net::IpAddr;

use config::ChannelConfig;
use guest_abi::channel::{MAX_ADDRESSES, MAX_MACS};

/// Addresses of one network port.
#[derive(Debug, Clone, Default)]
pub struct NetAddresses {
    /// MAC address, configured or learned.
    pub mac: Option<[u8; 6]>,
    /// IP addresses in the config.
    pub configured: Vec<IpAddr>,
    /// IP addresses bound to the port now, configured ones among them.
    pub known: Vec<IpAddr>,
}

/// Addresses of a VM; equal sets are in the same order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    /// MAC addresses.
    pub macs: Vec<[u8; 6]>,
    /// IP addresses.
    pub ips: Vec<IpAddr>,
}

/// Gathers a VM's addresses, configured ones first, which fit: learned ones must not push them out.
/// Of the learned ones, link-local ones come last, since peers rarely use them.
pub fn gather(config: &ChannelConfig, nets: &[NetAddresses]) -> Addresses {
    let mut macs = config.macs.clone();
    macs.extend(nets.iter().filter_map(|net| net.mac));
    let mut ips = config.addresses.clone();
    ips.extend(nets.iter().flat_map(|net| &net.configured));
    let mut learned: Vec<IpAddr> = nets.iter().flat_map(|net| net.known.clone()).collect();
    learned.sort_by_key(|ip| (is_link_local(ip), *ip));
    ips.extend(learned);
    Addresses { macs: first(macs, MAX_MACS), ips: first(ips, MAX_ADDRESSES) }
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The first `most` distinct items.
fn first<T: PartialEq>(all: Vec<T>, most: usize) -> Vec<T> {
    let mut found = Vec::with_capacity(most);
    for one in all {
        if found.len() < most && !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ChannelConfig {
        ChannelConfig {
            qmp: "/q".into(),
            root_ports: "r".into(),
            macs: vec![[2; 6]],
            addresses: vec!["10.0.0.9".parse().unwrap()],
            allow_unsealed: false,
            auto: true,
        }
    }

    fn net(mac: u8, configured: &[&str], known: &[&str]) -> NetAddresses {
        let all = |all: &[&str]| all.iter().map(|ip| ip.parse().unwrap()).collect();
        NetAddresses { mac: Some([mac; 6]), configured: all(configured), known: all(known) }
    }

    #[test]
    fn configured_ones_come_first_and_link_local_ones_last() {
        let nets = [
            net(4, &["10.0.0.2"], &["fe80::1", "2001:db8::1", "10.0.0.2"]),
            net(6, &[], &["169.254.0.1", "10.0.0.3"]),
            NetAddresses::default(),
        ];
        let found = gather(&config(), &nets);
        assert_eq!(found.macs, [[2; 6], [4; 6], [6; 6]]);
        let ips: Vec<String> = found.ips.iter().map(ToString::to_string).collect();
        let wanted = ["10.0.0.9", "10.0.0.2", "10.0.0.3", "2001:db8::1", "169.254.0.1", "fe80::1"];
        assert_eq!(ips, wanted);
    }

    #[test]
    fn there_are_never_too_many() {
        let nets: Vec<NetAddresses> = (0..40)
            .map(|i| net(2 * i, &[], &[&format!("10.1.0.{i}"), &format!("10.2.0.{i}")]))
            .collect();
        let found = gather(&config(), &nets);
        assert_eq!((found.macs.len(), found.ips.len()), (8, 16));
        assert_eq!(found.ips[0].to_string(), "10.0.0.9");
    }
}
