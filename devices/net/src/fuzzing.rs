//! A switch with VMs of which one is hostile, for the fuzzer.

#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use queue::Layout;

use crate::binding::BindMode;
use crate::features;
use crate::hook::PortHook;
use crate::testing::{BROADCAST, HOLD_NS, Lab, MODERN, Model, Spec, frame, mac, no_offload};

/// The VM that sends what it likes. The others are [`FRIEND`] and one more.
const HOSTILE: usize = 0;
const FRIEND: usize = 1;
const OTHER: usize = 2;
/// Receive buffers of each VM.
const BUFFERS: usize = 48;
const BUFFER_BYTES: usize = 4096;
/// Addresses that the hostile VM may send from.
const ADDRESSES: [&str; 2] = ["10.0.0.1", "fd00::1"];

/// Three VMs, an uplink, and a binding by hardware and IP address.
pub struct Switch {
    lab: Lab,
    wire: Arc<Mutex<Model>>,
}

impl Switch {
    /// `choice` says with which features and rings; `hook` is the hostile VM's.
    ///
    /// # Panics
    /// There is no memory.
    #[must_use]
    pub fn new(choice: u8, hook: Option<Box<dyn PortHook>>) -> Self {
        let few = features::VERSION_1 | features::MRG_RXBUF;
        let features = if choice & 1 == 0 { MODERN } else { few };
        let layout = if choice & 2 == 0 { Layout::Split } else { Layout::Packed };
        let spec = |n: usize| Spec { layout, ring: 64, mac: Some(mac(n)), ..Spec::default() };
        let addresses = ADDRESSES.map(|a| a.parse::<IpAddr>().unwrap()).to_vec();
        let hostile = Spec { bind: BindMode::MacAndIp, addresses, ..spec(HOSTILE) };
        let friend = Spec { features, ..spec(FRIEND) };
        let mut lab = Lab::new(vec![hostile, friend, spec(OTHER)]);
        let wire = lab.set_wire();
        if let Some(hook) = hook {
            lab.set_hook(HOSTILE, hook);
        }
        Self { lab, wire }
    }

    /// The hostile VM sends a frame, the header of the driver first, in as many pieces.
    pub fn send(&mut self, bytes: &[u8], pieces: usize) {
        let driver = &mut self.lab.guests[HOSTILE];
        if !bytes.is_empty() && driver.tx[0].free_descriptors() > pieces {
            driver.send(0, &[], bytes, pieces.clamp(1, bytes.len()));
        }
    }

    /// A frame comes from the uplink, its header first.
    pub fn comes(&mut self, bytes: &[u8]) {
        self.wire.lock().unwrap().incoming.push_back(bytes.to_vec());
    }

    /// A round. Time passes, and all VMs but the hostile one take what is for them.
    ///
    /// # Panics
    /// Something was delivered that the hostile VM may not send.
    pub fn turn(&mut self, ns: u64) {
        self.lab.advance(ns);
        self.lab.poll();
        while self.lab.guests[HOSTILE].tx[0].used().is_some() {}
        let mut came = std::mem::take(&mut self.wire.lock().unwrap().sent);
        came.iter_mut().for_each(|whole| drop(whole.drain(..frame::VNET_LEN)));
        for guest in [FRIEND, OTHER] {
            came.extend(self.lab.guests[guest].recv_all(0));
            self.lab.guests[guest].post_up_to(0, BUFFERS, BUFFER_BYTES, 1);
        }
        // Nobody else sends meanwhile; what comes from the uplink goes to VMs, and may say
        // anything.
        for frame in came.iter().filter(|frame| frame[6..12] == mac(HOSTILE)) {
            assert!(may_send(frame), "sent from another's address: {frame:02x?}");
        }
    }

    /// Checks that the others reach each other, whatever happened.
    ///
    /// # Panics
    /// They do not.
    pub fn check_others(&mut self) {
        self.wire.lock().unwrap().incoming.clear();
        // Whoever held something up has used up its time.
        for _ in 0..4 {
            self.turn(HOLD_NS);
        }
        for (from, to) in [(FRIEND, OTHER), (OTHER, FRIEND)] {
            let sent = frame(mac(to), mac(from), 80);
            self.lab.guests[from].send(0, &no_offload(), &sent, 1);
            self.lab.poll();
            assert!(self.lab.guests[to].recv_all(0).contains(&sent), "{from} does not reach {to}");
            while self.lab.guests[from].tx[0].used().is_some() {}
        }
        let sent = frame(BROADCAST, mac(FRIEND), 80);
        self.lab.guests[FRIEND].send(0, &no_offload(), &sent, 1);
        self.lab.poll();
        assert!(self.lab.guests[OTHER].recv_all(0).contains(&sent), "a broadcast is lost");
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").finish_non_exhaustive()
    }
}

/// Plain reading of the binding for a frame of the hostile VM: no address of others as the source
/// of IP, ARP and neighbour messages.
fn may_send(frame: &[u8]) -> bool {
    let (mut at, word) = (12, |at: usize| frame.get(at..at + 2).map(|b| [b[0], b[1]]));
    for _ in 0..2 {
        if matches!(word(at), Some([0x81, 0] | [0x88, 0xa8])) {
            at += 4;
        }
    }
    let Some(kind) = word(at) else { return true };
    let packet = &frame[at + 2..];
    let is_v4 = |bytes: Option<&[u8]>| matches!(bytes, Some([10, 0, 0, 1] | [0, 0, 0, 0]));
    match kind {
        [8, 0] => is_v4(packet.get(12..16)),
        [8, 6] => packet.get(8..14) == Some(&mac(HOSTILE)[..]) && is_v4(packet.get(14..18)),
        [0x86, 0xdd] => match packet.get(8..24) {
            Some([0xfe, second, ..]) => second & 0xc0 == 0x80,
            Some(source) => source == [0; 16] || source == [&[0xfd][..], &[0; 14], &[1]].concat(),
            None => false,
        },
        _ => true,
    }
}
