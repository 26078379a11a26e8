//! Filter of the frames that a port takes, as its driver asked over the control queue (virtio 1.2,
//! 5.1.6.5.1 to 5.1.6.5.3). A port whose control queue is the VMM's has no filter, and takes all.

use frame::{Mac, be16};

/// Addresses of each kind that a driver can name; with more, all of that kind pass, as the
/// specification allows.
pub(crate) const MAX_FILTER_MACS: usize = 64;

/// Every VLAN id there is.
const VLAN_IDS: usize = 4096;

const BROADCAST: [u8; 6] = [0xff; 6];

/// Receive modes that the driver switches on and off, by the command of class `VIRTIO_NET_CTRL_RX`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RxModes {
    /// All frames.
    pub promisc: bool,
    /// All multicasts.
    pub all_multicast: bool,
    /// All unicasts.
    pub all_unicast: bool,
    /// No multicasts.
    pub no_multicast: bool,
    /// No unicasts.
    pub no_unicast: bool,
    /// No broadcasts.
    pub no_broadcast: bool,
}

/// Addresses of one kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MacList {
    macs: [Mac; MAX_FILTER_MACS],
    len: usize,
    overflows: bool,
}

impl MacList {
    /// No addresses.
    pub fn empty() -> Self {
        Self { macs: [Mac::default(); MAX_FILTER_MACS], len: 0, overflows: false }
    }

    /// More than we hold: all pass.
    pub fn overflowing() -> Self {
        Self { overflows: true, ..Self::empty() }
    }

    /// One more; what is beyond the limit makes all pass.
    pub fn add(&mut self, mac: Mac) {
        match self.macs.get_mut(self.len) {
            Some(place) => {
                *place = mac;
                self.len += 1;
            }
            None => self.overflows = true,
        }
    }

    fn has(&self, mac: Mac) -> bool {
        self.overflows || self.macs[..self.len].contains(&mac)
    }
}

/// A port's filter of frames.
#[derive(Debug)]
pub(crate) struct Filter {
    pub modes: RxModes,
    /// The card's own address; none: not known to us, and all unicasts pass.
    pub mac: Option<Mac>,
    pub unicast: MacList,
    pub multicast: MacList,
    /// A bit for each VLAN that passes; none: all do.
    vlans: Option<Box<[u64; VLAN_IDS / 64]>>,
}

impl Filter {
    /// Filter that a driver finds: all frames pass until it says what it wants, as on QEMU's
    /// device. With `filters_vlans` and out of promiscuous mode no tagged frame does.
    pub fn new(mac: Option<Mac>, filters_vlans: bool) -> Self {
        Self {
            modes: RxModes { promisc: true, ..RxModes::default() },
            mac,
            unicast: MacList::empty(),
            multicast: MacList::empty(),
            vlans: filters_vlans.then(|| Box::new([0; VLAN_IDS / 64])),
        }
    }

    /// Lets a VLAN pass or not. False: there is no such VLAN.
    pub fn set_vlan(&mut self, id: u16, passes: bool) -> bool {
        let (at, bit) = (usize::from(id / 64), 1 << (id % 64));
        let Some(word) = self.vlans.as_mut().and_then(|vlans| vlans.get_mut(at)) else {
            return false;
        };
        *word = if passes { *word | bit } else { *word & !bit };
        true
    }

    /// Whether a unicast to `dst` passes, if its VLAN does.
    pub fn takes_unicast(&self, dst: Mac) -> bool {
        let modes = &self.modes;
        if modes.promisc || modes.no_unicast {
            return modes.promisc;
        }
        modes.all_unicast || self.mac.is_none_or(|mac| mac == dst) || self.unicast.has(dst)
    }

    /// Whether it depends on a frame's tag if it passes.
    pub fn looks_at_tags(&self) -> bool {
        self.vlans.is_some() && !self.modes.promisc
    }

    /// Whether a frame with this beginning passes.
    pub fn takes(&self, eth: &[u8]) -> bool {
        if self.modes.promisc {
            return true;
        }
        let dst = Mac::read(eth);
        self.takes_tag(eth)
            && match dst.bytes() {
                BROADCAST => !self.modes.no_broadcast,
                _ if dst.is_group() => self.takes_multicast(dst),
                _ => self.takes_unicast(dst),
            }
    }

    fn takes_multicast(&self, dst: Mac) -> bool {
        let modes = &self.modes;
        !modes.no_multicast && (modes.all_multicast || self.multicast.has(dst))
    }

    fn takes_tag(&self, eth: &[u8]) -> bool {
        let Some(vlans) = &self.vlans else { return true };
        // Customer tags only: those are what a driver's VLAN filter is about.
        if be16(eth, 12) != Some(0x8100) {
            return true;
        }
        let id = be16(eth, 14).unwrap_or(0) & 0xfff;
        vlans[usize::from(id / 64)] & 1 << (id % 64) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

    fn to(dst: [u8; 6]) -> Vec<u8> {
        [&dst[..], &OTHER, &[8, 0]].concat()
    }

    fn tagged(dst: [u8; 6], id: u16) -> Vec<u8> {
        [&dst[..], &OTHER, &[0x81, 0], &(0xe000 | id).to_be_bytes(), &[8, 0]].concat()
    }

    fn filter(modes: RxModes) -> Filter {
        Filter { modes, ..Filter::new(Some(Mac::new(OWN)), true) }
    }

    #[test]
    fn modes_say_which_kinds_pass() {
        let none = RxModes::default();
        // Own unicast, other unicast, multicast, broadcast.
        let cases = [
            (none, [true, false, false, true]),
            (RxModes { promisc: true, no_unicast: true, ..none }, [true; 4]),
            (RxModes { all_multicast: true, ..none }, [true, false, true, true]),
            (RxModes { all_unicast: true, ..none }, [true, true, false, true]),
            (
                RxModes { all_multicast: true, no_multicast: true, ..none },
                [true, false, false, true],
            ),
            (RxModes { all_unicast: true, no_unicast: true, ..none }, [false, false, false, true]),
            (RxModes { no_broadcast: true, ..none }, [true, false, false, false]),
        ];
        for (modes, want) in cases {
            let filter = filter(modes);
            let got = [OWN, OTHER, GROUP, BROADCAST].map(|dst| filter.takes(&to(dst)));
            assert_eq!(got, want, "{modes:?}");
            assert_eq!([OWN, OTHER].map(|dst| filter.takes_unicast(Mac::new(dst))), want[..2]);
        }
    }

    #[test]
    fn named_addresses_pass_and_too_many_let_all_of_their_kind_pass() {
        let mut filter = filter(RxModes::default());
        filter.multicast.add(Mac::new(GROUP));
        assert!(filter.takes(&to(GROUP)) && !filter.takes(&to([1, 0, 0x5e, 0, 0, 2])));
        for n in 0..=MAX_FILTER_MACS {
            assert!(!filter.takes(&to(OTHER)), "after {n}");
            filter.unicast.add(Mac::new([2, 9, 9, 9, 9, n as u8]));
        }
        assert!(filter.takes(&to(OTHER)));
        filter.unicast = MacList::empty();
        assert!(!filter.takes(&to(OTHER)));
        filter.mac = None;
        assert!(filter.takes(&to(OTHER)), "nobody knows whose address that is");
    }

    #[test]
    fn vlans_pass_by_their_bit() {
        let mut filter = filter(RxModes::default());
        assert!(!filter.takes(&tagged(OWN, 7)) && filter.takes(&to(OWN)));
        assert!(filter.set_vlan(7, true) && filter.set_vlan(4095, true));
        assert!(!filter.set_vlan(4096, true) && !filter.set_vlan(u16::MAX, false));
        assert!(filter.takes(&tagged(OWN, 7)) && filter.takes(&tagged(OWN, 4095)));
        assert!(!filter.takes(&tagged(OWN, 8)) && !filter.takes(&tagged(OTHER, 7)));
        assert!(filter.set_vlan(7, false) && !filter.takes(&tagged(OWN, 7)));
        let mut all = Filter::new(None, false);
        assert!(!all.set_vlan(7, true));
        all.modes.promisc = false;
        assert!(all.takes(&tagged(OWN, 7)));
    }

    #[test]
    fn a_frame_cut_short_is_no_reason_to_fall_over() {
        let filter = filter(RxModes::default());
        for len in 12..16 {
            filter.takes(&tagged(OWN, 7)[..len]);
        }
    }
}
