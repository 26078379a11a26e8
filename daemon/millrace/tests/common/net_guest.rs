//! A guest of a network port: a scripted front end with a ring for each way.

use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};

use super::{BASIC, FrontEnd, Place, driver, wait_used};

/// A network port's two rings in one memory, receive first.
pub struct NetGuest {
    pub front: FrontEnd,
    pub rx: ModelDriver,
    pub tx: ModelDriver,
    mac: [u8; 6],
}

impl NetGuest {
    /// The guest of port `n` of `vm`.
    pub fn start(place: &Place, vm: &str, last_mac_byte: u8) -> Self {
        let front = FrontEnd::dial(&place.socket(&format!("{vm}-n.sock")));
        let rx = driver(Layout::Split);
        let tx = ModelDriver::in_ram(rx.ram().clone(), Layout::Split, 16, ModelOptions::default());
        // VIRTIO_NET_F_MRG_RXBUF is left out: one buffer takes one frame.
        front.hello(BASIC);
        front.set_memory(&rx);
        front.start_ring(0, &rx, 0);
        front.start_ring(1, &tx, 0);
        Self { front, rx, tx, mac: [2, 0, 0, 0, 0, last_mac_byte] }
    }

    /// Sends a broadcast frame of 60 bytes filled with `fill`.
    pub fn send(&mut self, fill: u8) {
        self.send_with(&[0; 12], 0x88b5, fill);
    }

    /// The same, with a virtio-net header and an EtherType.
    pub fn send_with(&mut self, vnet: &[u8; 12], ether_type: u16, fill: u8) {
        let mut frame = vnet.to_vec();
        frame.extend_from_slice(&[0xff; 6]);
        frame.extend_from_slice(&self.mac);
        frame.extend_from_slice(&ether_type.to_be_bytes());
        frame.resize(12 + 60, fill);
        self.send_bytes(&frame);
    }

    /// Sends a buffer as it is.
    pub fn send_bytes(&mut self, frame: &[u8]) {
        let buffer = self.tx.buffer(frame);
        self.tx.offer(&[buffer], &[]);
        self.tx.kick();
    }

    /// Posts a receive buffer and returns where it is.
    pub fn post(&mut self) -> u64 {
        let buffer = self.rx.alloc(2048);
        self.rx.offer(&[], &[(buffer, 2048)]);
        self.rx.kick();
        buffer
    }

    /// The last byte of the frame received in `buffer`.
    pub fn receive(&mut self, buffer: u64) -> u8 {
        let (_, len) = wait_used(&mut self.rx);
        assert_eq!(len, 72);
        self.rx.read(buffer, 72)[71]
    }
}
