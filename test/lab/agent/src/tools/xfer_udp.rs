//! The transfer over UDP: numbered datagrams, cumulative acknowledgements, go-back-N.
//!
//! A data datagram is `magic: u32, number: u32, payload`; an acknowledgement is
//! `magic: u32, next: u32`. The sender keeps [`WINDOW`] datagrams in flight and goes back to the
//! first unacknowledged one after [`RESEND_AFTER`] without progress. After the last datagram the
//! receiver stays for a moment to repeat its last acknowledgement.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::xfer::{Content, Report};
use crate::AgentError;
use crate::stream::{Check, Stream};

const DATA: u32 = 0x4d52_4454;
const ACK: u32 = 0x4d52_4143;
const PAYLOAD_BYTES: usize = 1400;
const WINDOW: u32 = 64;
const RESEND_AFTER: Duration = Duration::from_millis(50);
/// Time without any progress after which either end gives up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(20);
/// How long the receiver repeats its last acknowledgement.
const LINGER: Duration = Duration::from_millis(500);

pub(super) fn bind(at: SocketAddr) -> Result<UdpSocket, AgentError> {
    UdpSocket::bind(at).map_err(AgentError::io(format!("bind UDP {at}")))
}

fn header(magic: u32, number: u32) -> [u8; 8] {
    let mut header = [0; 8];
    header[..4].copy_from_slice(&magic.to_le_bytes());
    header[4..].copy_from_slice(&number.to_le_bytes());
    header
}

fn parse(datagram: &[u8], magic: u32) -> Option<(u32, &[u8])> {
    let (head, payload) = datagram.split_first_chunk::<8>()?;
    let number = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    (head[..4] == magic.to_le_bytes()).then_some((number, payload))
}

fn count(content: Content) -> Result<u32, AgentError> {
    u32::try_from(content.bytes.div_ceil(PAYLOAD_BYTES as u64))
        .map_err(|_| AgentError::Refused(format!("{} bytes: too many datagrams", content.bytes)))
}

/// Receives one datagram; `None` after the socket's time-out or an ICMP error, which only says
/// that the other end is not there yet.
fn datagram<'a>(socket: &UdpSocket, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>, AgentError> {
    match socket.recv(buffer) {
        Ok(len) => Ok(Some(&buffer[..len])),
        Err(error)
            if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionRefused) =>
        {
            Ok(None)
        }
        Err(error) => Err(AgentError::io("receive a datagram")(error)),
    }
}

/// Datagrams made ahead of their acknowledgement, kept for sending again.
struct Window {
    source: Stream,
    hash: Xxh3,
    left: u64,
    kept: std::collections::VecDeque<Vec<u8>>,
}

impl Window {
    fn make(&mut self, number: u32) {
        let len = usize::try_from(self.left).unwrap_or(PAYLOAD_BYTES).min(PAYLOAD_BYTES);
        let mut datagram = header(DATA, number).to_vec();
        datagram.resize(8 + len, 0);
        self.source.fill(&mut datagram[8..]);
        self.hash.update(&datagram[8..]);
        self.left -= len as u64;
        self.kept.push_back(datagram);
    }
}

pub(super) fn send(to: SocketAddr, content: Content) -> Result<Report, AgentError> {
    let total = count(content)?;
    let socket = bind(if to.is_ipv6() { ([0; 8], 0).into() } else { ([0; 4], 0).into() })?;
    socket.connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    socket.set_read_timeout(Some(RESEND_AFTER)).map_err(AgentError::io("read time-out"))?;
    let mut window = Window {
        source: Stream::new(content.seed),
        hash: Xxh3::new(),
        left: content.bytes,
        kept: std::collections::VecDeque::new(),
    };
    let start = Instant::now();
    let mut progress = start;
    // `base` is acknowledged up to, `next` sent up to, `made` generated up to.
    let (mut base, mut next, mut made, mut resent) = (0u32, 0u32, 0u32, 0u64);
    let mut buffer = [0; 64];
    while base < total {
        while next < total && next - base < WINDOW {
            if next == made {
                window.make(next);
                made += 1;
            } else {
                resent += 1;
            }
            match socket.send(&window.kept[(next - base) as usize]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => break,
                Err(error) => return Err(AgentError::io(format!("send datagram {next}"))(error)),
            }
            next += 1;
        }
        match datagram(&socket, &mut buffer)?.and_then(|bytes| parse(bytes, ACK)) {
            Some((acked, _)) if acked > base && acked <= made => {
                window.kept.drain(..(acked - base) as usize);
                base = acked;
                next = next.max(base);
                progress = Instant::now();
            }
            Some(_) => {}
            None => next = base,
        }
        if progress.elapsed() > GIVE_UP_AFTER {
            let text = format!("no acknowledgement after datagram {base} of {total}");
            return Err(AgentError::Mismatch(text));
        }
    }
    let hash = window.hash.digest128();
    Ok(Report { bytes: content.bytes, hash, took: start.elapsed(), resent })
}

pub(super) fn receive(socket: &UdpSocket, content: Content) -> Result<Report, AgentError> {
    let total = count(content)?;
    let mut check = Check::new(content.seed);
    let mut buffer = [0; 2048];
    let mut next = 0u32;
    socket.set_read_timeout(Some(GIVE_UP_AFTER)).map_err(AgentError::io("read time-out"))?;
    let mut start = None;
    while next < total {
        let (len, from) = socket
            .recv_from(&mut buffer)
            .map_err(AgentError::io(format!("wait for datagram {next} of {total}")))?;
        let Some((number, payload)) = parse(&buffer[..len], DATA) else { continue };
        start.get_or_insert_with(Instant::now);
        if number == next {
            check.take(payload)?;
            next += 1;
        }
        // A lost acknowledgement is made good by the next one.
        let _ = socket.send_to(&header(ACK, next), from);
    }
    let took = start.map_or(Duration::ZERO, |start| start.elapsed());
    socket.set_read_timeout(Some(LINGER)).map_err(AgentError::io("read time-out"))?;
    while let Ok((_, from)) = socket.recv_from(&mut buffer) {
        let _ = socket.send_to(&header(ACK, next), from);
    }
    if check.received() != content.bytes {
        let text = format!("{} of {} bytes arrived", check.received(), content.bytes);
        return Err(AgentError::Mismatch(text));
    }
    Ok(Report { bytes: check.received(), hash: check.hash(), took, resent: 0 })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const CONTENT: Content = Content { bytes: 300_001, seed: 4 };

    #[test]
    fn every_byte_arrives() {
        let socket = bind(([127, 0, 0, 1], 0).into()).unwrap();
        let to = socket.local_addr().unwrap();
        let receiver = thread::spawn(move || receive(&socket, CONTENT).unwrap());
        let sent = send(to, CONTENT).unwrap();
        assert_eq!(sent.hash, receiver.join().unwrap().hash);
    }

    #[test]
    fn lost_datagrams_both_ways_are_sent_again() {
        let socket = bind(([127, 0, 0, 1], 0).into()).unwrap();
        let to = socket.local_addr().unwrap();
        let middle = bind(([127, 0, 0, 1], 0).into()).unwrap();
        let through = middle.local_addr().unwrap();
        let receiver = thread::spawn(move || receive(&socket, CONTENT).unwrap());
        // A relay that loses every 50th datagram of either direction.
        thread::spawn(move || {
            let (mut buffer, mut sender, mut seen) = ([0; 2048], None, [0u32; 2]);
            while let Ok((len, from)) = middle.recv_from(&mut buffer) {
                let target = if from == to { sender } else { Some(to) };
                if from != to {
                    sender = Some(from);
                }
                let seen = &mut seen[usize::from(from == to)];
                *seen += 1;
                if let (Some(target), true) = (target, *seen % 50 != 0) {
                    let _ = middle.send_to(&buffer[..len], target);
                }
            }
        });
        let sent = send(through, CONTENT).unwrap();
        assert!(sent.resent > 0);
        assert_eq!(sent.hash, receiver.join().unwrap().hash);
    }
}
