//! The network card: ARP and ICMP echo are answered for one address, as a ping of the host asks.

use virtio_drivers::device::net::{TxBuffer, VirtIONet};
use virtio_drivers::transport::pci::PciTransport;

use crate::memory::Identity;
use crate::serial::say;

/// Sizes of a ring and of a buffer.
const RING: usize = 16;
const BUFFER_BYTES: usize = 2048;
/// Address of this guest.
const ADDRESS: [u8; 4] = [10, 0, 0, 9];
/// Echoes between two lines of the report.
const REPORT: u32 = 100;

const ETHERNET: usize = 14;
const ARP: [u8; 2] = [0x08, 0x06];
const IPV4: [u8; 2] = [0x08, 0x00];
const ICMP: u8 = 1;

/// Answers for ever.
pub fn answer(transport: PciTransport) -> ! {
    let card = VirtIONet::<Identity, PciTransport, RING>::new(transport, BUFFER_BYTES);
    let mut card = card.expect("a network card");
    let own = card.mac_address();
    say!("foreign: card {own:02x?}");
    let mut echoes = 0;
    loop {
        let Ok(mut buffer) = card.receive() else {
            core::hint::spin_loop();
            continue;
        };
        let frame = buffer.packet_mut();
        let is_echo = is_echo(frame);
        let answered = (is_echo && answer_echo(frame)) || answer_arp(frame, own);
        if answered {
            let (to, from) = frame[..12].split_at_mut(6);
            to.copy_from_slice(from);
            from.copy_from_slice(&own);
            card.send(TxBuffer::from(buffer.packet())).expect("a frame sent");
        }
        card.recycle_rx_buffer(buffer).expect("a buffer");
        if is_echo && answered {
            echoes += 1;
            if echoes % REPORT == 0 {
                say!("foreign: {echoes} echoes");
            }
        }
    }
}

/// Whether a frame is an IPv4 packet without options that asks this guest for an echo.
fn is_echo(frame: &[u8]) -> bool {
    frame.len() >= ETHERNET + 28
        && frame[12..14] == IPV4
        && frame[ETHERNET] == 0x45
        && frame[ETHERNET + 9] == ICMP
        && frame[ETHERNET + 16..ETHERNET + 20] == ADDRESS
        && frame[ETHERNET + 20] == 8
}

/// Turns the question into the answer, once its checksum is right.
fn answer_echo(frame: &mut [u8]) -> bool {
    let len = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
    let Some(packet) = frame.get_mut(ETHERNET..ETHERNET + len) else { return false };
    let (header, message) = packet.split_at_mut(20);
    assert!(sum(header) == 0xffff, "a header's checksum");
    assert!(sum(message) == 0xffff, "a message's checksum");
    let (from, to) = header[12..20].split_at_mut(4);
    from.swap_with_slice(to);
    message[0] = 0;
    message[2..4].fill(0);
    let checksum = !sum(message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Sum in ones' complement (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let sum: u32 = bytes.chunks(2).map(word).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

/// Turns a question for this guest's address into the answer (RFC 826).
fn answer_arp(frame: &mut [u8], own: [u8; 6]) -> bool {
    let asks = frame.len() >= ETHERNET + 28
        && frame[12..14] == ARP
        && frame[ETHERNET + 6..ETHERNET + 8] == [0, 1]
        && frame[ETHERNET + 24..ETHERNET + 28] == ADDRESS;
    if asks {
        frame[ETHERNET + 7] = 2;
        frame.copy_within(ETHERNET + 8..ETHERNET + 18, ETHERNET + 18);
        frame[ETHERNET + 8..ETHERNET + 14].copy_from_slice(&own);
        frame[ETHERNET + 14..ETHERNET + 18].copy_from_slice(&ADDRESS);
    }
    asks
}
