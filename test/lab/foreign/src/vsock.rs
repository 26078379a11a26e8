//! A connection to the host by vsock, which sends back what it gets.

use alloc::vec;

use virtio_drivers::device::socket::{
    VirtIOSocket, VsockAddr, VsockConnectionManager, VsockEventType,
};
use virtio_drivers::transport::pci::PciTransport;

use crate::memory::Identity;
use crate::serial::say;

/// The host's program.
const HOST: VsockAddr = VsockAddr { cid: 2, port: 9001 };
const OWN_PORT: u32 = 1024;
/// Messages, and their size: less than what the driver takes in.
const MESSAGES: usize = 64;
const MESSAGE_BYTES: usize = 1000;

/// Sends messages, and compares what comes back.
pub fn exercise(transport: PciTransport) {
    let driver = VirtIOSocket::<Identity, PciTransport>::new(transport).expect("a vsock device");
    let mut vsock = VsockConnectionManager::new(driver);
    say!("foreign: CID {}", vsock.guest_cid());
    vsock.connect(HOST, OWN_PORT).expect("a request");
    loop {
        let event = vsock.wait_for_event().expect("an event");
        match event.event_type {
            VsockEventType::Connected => break,
            VsockEventType::Disconnected { reason } => panic!("not connected: {reason:?}"),
            _ => {}
        }
    }
    say!("foreign: connected");
    for message in 0..MESSAGES {
        let sent = vec![message as u8 + 1; MESSAGE_BYTES];
        vsock.send(HOST, OWN_PORT, &sent).expect("a message sent");
        let mut got = vec![0; MESSAGE_BYTES];
        let mut len = 0;
        while len < got.len() {
            vsock.wait_for_event().expect("an event");
            len += vsock.recv(HOST, OWN_PORT, &mut got[len..]).expect("bytes");
        }
        assert!(got == sent, "message {message} differs");
        vsock.update_credit(HOST, OWN_PORT).expect("credit");
    }
    vsock.force_close(HOST, OWN_PORT).expect("the end");
    say!("foreign: vsock done");
}
