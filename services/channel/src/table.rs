//! Host's half of a mailbox, built from the members' states.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use guest_abi::channel::{
    EXCLUDE_OFF, Exclude, GUEST_OFF, Host, MAX_ADDRESSES, MAX_MACS, MAX_REGIONS, Member, NAME_LEN,
    Region, TABLE_OFF, VERSION,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::config::Flow;
use crate::mailbox::{HOST_WORDS, HostHalf};
use crate::memory::MemoryRegion;

/// Protocol number of TCP (`IPPROTO_TCP`).
const TCP: u32 = 6;

/// Host's half of a mailbox as bytes, while it is built.
#[derive(Debug)]
pub(crate) struct Table(Vec<u8>);

impl Table {
    /// Makes a table with the parts that do not depend on other members.
    pub fn new(
        mut host: Host,
        domain: &str,
        regions: &[MemoryRegion],
        excludes: &[Flow],
        excludes_seq: u32,
    ) -> Self {
        host.version = VERSION.into();
        host.domain = name(domain);
        let region = |region: &MemoryRegion| Region {
            gpa: region.gpa.into(),
            len: region.len.into(),
            off: region.off.into(),
        };
        for (to, from) in host.regions.iter_mut().zip(regions) {
            *to = region(from);
        }
        host.regions_len = count(regions.len().min(MAX_REGIONS)).into();
        host.excludes_len = count(excludes.len()).into();
        host.excludes_seq = excludes_seq.into();
        let mut table = Self(vec![0; GUEST_OFF]);
        table.put(0, host.as_bytes());
        for (index, flow) in excludes.iter().enumerate() {
            let exclude = exclude(flow);
            table.put(EXCLUDE_OFF + index * size_of::<Exclude>(), exclude.as_bytes());
        }
        table
    }

    /// Sets a member's entry.
    pub fn set(&mut self, index: usize, member: &Member) {
        self.put(TABLE_OFF + index * size_of::<Member>(), member.as_bytes());
    }

    /// Returns the words for the mailbox.
    pub fn words(&self) -> HostHalf {
        let mut words = [0; HOST_WORDS];
        for (word, bytes) in words.iter_mut().zip(self.0.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    fn put(&mut self, off: usize, bytes: &[u8]) {
        // Counts are checked where they come in; what were too much is left out.
        if let Some(to) = self.0.get_mut(off..off + bytes.len()) {
            to.copy_from_slice(bytes);
        }
    }
}

/// Makes an entry with names and addresses; the rest is zero.
pub(crate) fn entry(vm: &str, macs: &[[u8; 6]], addresses: &[IpAddr]) -> Member {
    let mut entry = Member::new_zeroed();
    entry.name = name(vm);
    for (to, from) in entry.macs.iter_mut().zip(macs) {
        to[..6].copy_from_slice(from);
    }
    for (to, from) in entry.addresses.iter_mut().zip(addresses) {
        *to = octets(*from);
    }
    entry.macs_len = count(macs.len().min(MAX_MACS)).into();
    entry.addresses_len = count(addresses.len().min(MAX_ADDRESSES)).into();
    entry
}

fn exclude(flow: &Flow) -> Exclude {
    let end = |end: SocketAddr| (octets(end.ip()), end.port().into());
    let ((local, local_port), (remote, remote_port)) = (end(flow.local), end(flow.remote));
    Exclude { local, remote, local_port, remote_port, protocol: TCP.into() }
}

/// Octets of an IPv6 address, or of an IPv4 one as `::ffff:a.b.c.d`.
fn octets(address: IpAddr) -> [u8; 16] {
    let address: Ipv6Addr = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    address.octets()
}

/// Copies a name. At least one zero remains: names are checked where they come in.
fn name(name: &str) -> [u8; NAME_LEN] {
    let mut bytes = [0; NAME_LEN];
    for (to, from) in bytes[..NAME_LEN - 1].iter_mut().zip(name.bytes()) {
        *to = from;
    }
    bytes
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use guest_abi::channel::{MAX_EXCLUDES, MAX_MEMBERS};

    use super::*;
    use crate::mailbox::Mailbox;
    use crate::mailbox::testing::MemberSide;

    #[test]
    fn everything_is_where_the_member_looks_for_it() {
        let mut mailbox = Mailbox::new().unwrap();
        let member = MemberSide::new(mailbox.file().as_fd().try_clone_to_owned().unwrap());
        let regions = [MemoryRegion { gpa: 1 << 32, len: 8192, off: 4096 }; MAX_REGIONS];
        let flow = Flow {
            local: "10.0.0.1:80".parse().unwrap(),
            remote: "[fd00::2]:1234".parse().unwrap(),
        };
        let mut host = Host::new_zeroed();
        host.vectors = 5.into();
        let mut table = Table::new(host, "trust", &regions, &[flow; MAX_EXCLUDES], 7);
        let mut one = entry("vm", &[[1, 2, 3, 4, 5, 6]], &["10.0.0.1".parse().unwrap()]);
        one.id = 32.into();
        table.set(MAX_MEMBERS - 1, &one);
        mailbox.publish(&table.words());

        let host = member.host();
        assert_eq!((host.version.get(), host.vectors.get()), (VERSION, 5));
        assert_eq!((host.regions_len.get(), host.regions[7].gpa.get()), (8, 1 << 32));
        assert_eq!((host.excludes_len.get(), host.excludes_seq.get()), (128, 7));
        assert_eq!(&host.domain[..6], b"trust\0");
        assert_eq!(member.member(31), one);
        assert_eq!(&one.addresses[0], b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\0\0\x01");
        assert_eq!(&one.macs[0], &[1, 2, 3, 4, 5, 6, 0, 0]);
        assert_eq!(member.member(0), Member::new_zeroed());
        let bytes = member.host_bytes();
        let last = EXCLUDE_OFF + (MAX_EXCLUDES - 1) * size_of::<Exclude>();
        assert_eq!(&bytes[last + 10..last + 16], [255, 255, 10, 0, 0, 1]);
        assert_eq!(bytes[last + 32..last + 36], [80, 0, 0xd2, 0x04]);
    }
}
