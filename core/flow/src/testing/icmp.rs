//! ICMP errors for tests, made without the code under test.

#![allow(clippy::unwrap_used, missing_docs)]

use std::net::IpAddr;

use crate::testing::{Build, words};

const TOO_BIG_V4: [u8; 2] = [3, 4];
const TOO_BIG_V6: [u8; 2] = [2, 0];

pub fn too_big(v6: bool) -> [u8; 2] {
    if v6 { TOO_BIG_V6 } else { TOO_BIG_V4 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// An error to be made about a segment.
#[derive(Debug, Clone)]
pub struct BuildError {
    pub about: Build,
    /// Type and code.
    pub kind: [u8; 2],
    /// Bytes of the segment that are quoted, with its IP header.
    pub quoted: usize,
    pub macs: [[u8; 6]; 2],
    /// IPv4 options, or one IPv6 extension header whose first byte is that of ICMP.
    pub extra: Vec<u8>,
    /// Behind the packet.
    pub padding: usize,
}

impl BuildError {
    pub fn new(about: Build, macs: [[u8; 6]; 2]) -> Self {
        let kind = too_big(about.key.local.is_ipv6());
        Self { about, kind, quoted: usize::MAX, macs, extra: Vec::new(), padding: 0 }
    }

    fn v6(&self) -> bool {
        self.about.key.local.is_ipv6()
    }

    pub fn ip_len(&self) -> usize {
        if self.v6() { 40 } else { 20 + self.about.extra.len() }
    }

    /// Quotes so much of the TCP header.
    pub fn short(self, tcp_len: usize) -> Self {
        Self { quoted: self.ip_len() + tcp_len, ..self }
    }

    /// From a router between the two.
    pub fn frame(&self) -> Vec<u8> {
        let local = self.about.key.local;
        let router: Vec<u8> =
            octets(local).split_last().map(|(_, a)| [a, &[254]].concat()).unwrap();
        let sent = self.about.frame();
        let quoted = &sent[14..sent.len().min(self.quoted.saturating_add(14))];
        let mut icmp = [&self.kind[..], &[0, 0, 0, 0, 5, 20], quoted].concat();
        let pseudo = match self.v6() {
            true => {
                let len = (icmp.len() as u32).to_be_bytes();
                [&router[..], &octets(local), &len, &[0, 0, 0, 58]].concat()
            }
            false => Vec::new(),
        };
        let check = !words(&[&pseudo[..], &icmp].concat());
        icmp[2..4].copy_from_slice(&check.to_be_bytes());
        let len = (self.extra.len() + icmp.len()) as u16;
        let ip = if self.v6() {
            let proto = if self.extra.is_empty() { 58 } else { 60 };
            let first = [&[0x60, 0, 0, 0][..], &len.to_be_bytes(), &[proto, 255]].concat();
            [&[0x86, 0xdd][..], &first, &router, &octets(local), &self.extra].concat()
        } else {
            let first = [0x45 + self.extra.len() as u8 / 4, 0xc0];
            let rest = [0, 0, 0, 0, 64, 1, 0, 0];
            let len = (20 + len).to_be_bytes();
            let mut ip = [&first[..], &len, &rest, &router, &octets(local), &self.extra].concat();
            let check = !words(&ip);
            ip[10..12].copy_from_slice(&check.to_be_bytes());
            [&[8, 0][..], &ip].concat()
        };
        [&self.macs.concat()[..], &ip, &icmp, &vec![0x77; self.padding]].concat()
    }
}
