//! Segments without payload that the tracker makes: resets, window updates, prompts.

use std::net::IpAddr;

use frame::{ETH_LEN, IPPROTO_TCP, L4, PLAIN, VNET_LEN, fold, sum};

use crate::segment::{Answer, pseudo_sum};
use crate::types::FlowKey;

/// TCP header, with a timestamps option behind two paddings.
const TCP_LEN: usize = 20;
const TIMESTAMPS_LEN: usize = 12;

/// Longest segment without payload: Ethernet, IPv6 and TCP, behind a virtio-net header.
const MAX_LEN: usize = VNET_LEN + ETH_LEN + 40 + TCP_LEN + TIMESTAMPS_LEN;

/// Receiver of a segment of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipient {
    /// The owner of its destination address, past the connections of that port.
    Addressee,
    /// The guest, as it is: it is in the guest's numbers already.
    Guest,
}

/// A segment without payload that is to be sent.
#[derive(Debug, Clone, Copy)]
pub struct BareSegment {
    bytes: [u8; MAX_LEN],
    len: usize,
    /// Receiver of the segment.
    pub to: Recipient,
}

impl BareSegment {
    /// Makes one from the flow's local end to its remote end. `macs`: destination, source.
    pub(crate) fn new(key: &FlowKey, macs: &[u8; 12], answer: &Answer) -> Self {
        let mut bytes = [0; MAX_LEN];
        let len = bare(&mut bytes, key, macs, answer);
        Self { bytes, len, to: Recipient::Addressee }
    }

    /// Makes one of the guest's peer for the guest itself; `key` and `macs` are the guest's.
    pub(crate) fn to_guest(key: &FlowKey, macs: &[u8; 12], answer: &Answer) -> Self {
        Self { to: Recipient::Guest, ..Self::new(&key.mirror(), &reversed(macs), answer) }
    }

    /// The frame, virtio-net header first.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Hardware addresses of a segment that goes the other way.
pub(crate) fn reversed(macs: &[u8; 12]) -> [u8; 12] {
    let mut back = *macs;
    back.rotate_left(6);
    back
}

fn bare(out: &mut [u8; MAX_LEN], key: &FlowKey, macs: &[u8; 12], answer: &Answer) -> usize {
    out[..VNET_LEN].copy_from_slice(&PLAIN);
    let eth = &mut out[VNET_LEN..];
    eth[..12].copy_from_slice(macs);
    let tcp_len = TCP_LEN + answer.timestamps.map_or(0, |_| TIMESTAMPS_LEN);
    let l4 = put_ip(eth, key, tcp_len);
    let tcp = &mut eth[l4.offset..l4.offset + tcp_len];
    tcp[..2].copy_from_slice(&key.local_port.to_be_bytes());
    tcp[2..4].copy_from_slice(&key.remote_port.to_be_bytes());
    tcp[4..8].copy_from_slice(&answer.seq.to_be_bytes());
    tcp[8..12].copy_from_slice(&answer.ack.to_be_bytes());
    tcp[12] = (tcp_len as u8 / 4) << 4;
    tcp[13] = answer.flags;
    tcp[14..16].copy_from_slice(&answer.window.to_be_bytes());
    if let Some((value, echo)) = answer.timestamps {
        tcp[20..24].copy_from_slice(&[1, 1, 8, 10]);
        tcp[24..28].copy_from_slice(&value.to_be_bytes());
        tcp[28..32].copy_from_slice(&echo.to_be_bytes());
    }
    let end = l4.offset + tcp_len;
    let check = fold(sum(&eth[l4.offset..end], pseudo_sum(eth, l4, tcp_len)));
    eth[l4.offset + 16..l4.offset + 18].copy_from_slice(&check.to_be_bytes());
    VNET_LEN + end
}

fn put_ip(eth: &mut [u8], key: &FlowKey, tcp_len: usize) -> L4 {
    let ip = ETH_LEN;
    let (kind, header_len) = match (key.local, key.remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            eth[ip] = 0x45;
            eth[ip + 2..ip + 4].copy_from_slice(&(20 + tcp_len as u16).to_be_bytes());
            eth[ip + 6] = 0x40;
            eth[ip + 8] = 64;
            eth[ip + 9] = 6;
            eth[ip + 12..ip + 16].copy_from_slice(&local.octets());
            eth[ip + 16..ip + 20].copy_from_slice(&remote.octets());
            let check = fold(sum(&eth[ip..ip + 20], 0));
            eth[ip + 10..ip + 12].copy_from_slice(&check.to_be_bytes());
            (0x0800_u16, 20)
        }
        // A flow's addresses are of one family: they are read from one packet.
        (local, remote) => {
            eth[ip] = 0x60;
            eth[ip + 4..ip + 6].copy_from_slice(&(tcp_len as u16).to_be_bytes());
            eth[ip + 6] = 6;
            eth[ip + 7] = 64;
            eth[ip + 8..ip + 24].copy_from_slice(&v6(local));
            eth[ip + 24..ip + 40].copy_from_slice(&v6(remote));
            (0x86dd, 40)
        }
    };
    eth[12..14].copy_from_slice(&kind.to_be_bytes());
    let v6 = header_len == 40;
    L4 { ip, offset: ip + header_len, proto: IPPROTO_TCP, v6, fragment: false, later: false }
}

fn v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
    }
}
