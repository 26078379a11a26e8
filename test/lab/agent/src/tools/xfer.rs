//! Sending a known stream from one end to the other and proving that every byte arrived, over TCP,
//! UDP, vsock or a Unix socket (the host's end of a guest's vsock).
//!
//! On a byte stream: sender → `magic, bytes: u64, seed: u64`, then the bytes; receiver →
//! XXH3-128 of what it got, which the sender compares with its own. Either side may be the one
//! that connects.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use xxhash_rust::xxh3::Xxh3;

use super::arguments::{address, vsock_address};
use super::xfer_udp;
use crate::AgentError;
use crate::stream::{Check, Stream};

/// Port used when the address names none.
pub const XFER_PORT: u16 = 7002;
const MAGIC: [u8; 8] = *b"mr-xfer1";
const BUFFER_BYTES: usize = 256 * 1024;

/// Content that is sent: that many bytes of the stream of that seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Length of the transfer.
    pub bytes: u64,
    /// Seed of [`Stream`].
    pub seed: u64,
}

/// Report of one end of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// XXH3-128 of them; equal at both ends.
    pub hash: u128,
    /// From the first byte to the last acknowledgement.
    pub took: Duration,
    /// Datagrams sent again (UDP only).
    pub resent: u64,
}

impl Report {
    /// `{"bytes":…, "hash":"…", "secs":…, "mbit_s":…, "resent":…}`
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        let mut hash = String::new();
        // Writing to a String cannot fail.
        let _ = write!(hash, "{:032x}", self.hash);
        let secs = self.took.as_secs_f64();
        serde_json::json!({
            "op": "xfer", "bytes": self.bytes, "hash": hash, "secs": secs,
            "mbit_s": self.bytes as f64 * 8.0 / secs.max(1e-9) / 1e6, "resent": self.resent,
        })
    }
}

/// The command line's form: `side` is `send` or `recv`, `kind` is `tcp`, `udp`, `vsock` or `unix`,
/// `role` is `connect` or `listen`. A vsock address is `CID:PORT`, a Unix one a path. A UDP
/// transfer's sender connects and its receiver listens.
///
/// # Errors
/// Usage, socket errors, and [`AgentError::Mismatch`] when a byte is wrong.
pub fn run(
    side: &str,
    kind: &str,
    role: &str,
    addr: &str,
    content: Content,
) -> Result<Report, AgentError> {
    match (kind, role, side) {
        ("udp", "connect", "send") => xfer_udp::send(address(addr, XFER_PORT)?, content),
        ("udp", "listen", "recv") => {
            let socket = xfer_udp::bind(address(addr, XFER_PORT)?)?;
            announce(addr);
            xfer_udp::receive(&socket, content)
        }
        ("tcp" | "vsock" | "unix", "connect" | "listen", "send") => {
            send(open(kind, role, addr)?, content)
        }
        ("tcp" | "vsock" | "unix", "connect" | "listen", "recv") => {
            receive(open(kind, role, addr)?, content)
        }
        _ => Err(AgentError::Usage(format!("xfer {side} {kind} {role}: no such combination"))),
    }
}

/// Tells whoever started this process that it may connect now.
fn announce(addr: &str) {
    println!("{}", serde_json::json!({"listening": addr}));
}

/// A connected byte stream of any kind.
pub trait Duplex: Read + Write {}
impl<T: Read + Write> Duplex for T {}

fn open(kind: &str, role: &str, addr: &str) -> Result<Box<dyn Duplex>, AgentError> {
    let what = format!("{role} {kind} {addr}");
    let listen = role == "listen";
    match kind {
        "tcp" => {
            let at = address(addr, XFER_PORT)?;
            let stream = if listen {
                let listener = TcpListener::bind(at).map_err(AgentError::io(&what))?;
                announce(addr);
                listener.accept().map_err(AgentError::io(&what))?.0
            } else {
                TcpStream::connect(at).map_err(AgentError::io(&what))?
            };
            Ok(Box::new(stream))
        }
        "unix" => {
            let stream = if listen {
                let listener = UnixListener::bind(addr).map_err(AgentError::io(&what))?;
                announce(addr);
                listener.accept().map_err(AgentError::io(&what))?.0
            } else {
                UnixStream::connect(addr).map_err(AgentError::io(&what))?
            };
            Ok(Box::new(stream))
        }
        _ => {
            let (cid, port) = vsock_address(addr)?;
            let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)
                .map_err(AgentError::io("vsock socket"))?;
            let at = SockAddr::vsock(cid, port);
            if !listen {
                socket.connect(&at).map_err(AgentError::io(&what))?;
                return Ok(Box::new(socket));
            }
            socket.bind(&at).map_err(AgentError::io(&what))?;
            socket.listen(1).map_err(AgentError::io(&what))?;
            announce(addr);
            Ok(Box::new(socket.accept().map_err(AgentError::io(&what))?.0))
        }
    }
}

/// Sends the content and waits for the receiver's hash.
///
/// # Errors
/// I/O errors; [`AgentError::Mismatch`] when the receiver's hash is another.
pub fn send(mut stream: impl Duplex, content: Content) -> Result<Report, AgentError> {
    let mut header = [0; 24];
    header[..8].copy_from_slice(&MAGIC);
    header[8..16].copy_from_slice(&content.bytes.to_le_bytes());
    header[16..].copy_from_slice(&content.seed.to_le_bytes());
    let start = Instant::now();
    stream.write_all(&header).map_err(AgentError::io("send the header"))?;
    let mut source = Stream::new(content.seed);
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut left = content.bytes;
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        source.fill(&mut buffer[..len]);
        hash.update(&buffer[..len]);
        let at = content.bytes - left;
        stream
            .write_all(&buffer[..len])
            .map_err(AgentError::io(format!("send {len} bytes at {at}")))?;
        left -= len as u64;
    }
    let mut theirs = [0; 16];
    stream.read_exact(&mut theirs).map_err(AgentError::io("receive the other end's hash"))?;
    let (ours, theirs) = (hash.digest128(), u128::from_le_bytes(theirs));
    if ours != theirs {
        let text = format!("hash {theirs:032x} at the receiver, {ours:032x} here");
        return Err(AgentError::Mismatch(text));
    }
    Ok(Report { bytes: content.bytes, hash: ours, took: start.elapsed(), resent: 0 })
}

/// Receives the content and checks every byte.
///
/// # Errors
/// I/O errors; [`AgentError::Mismatch`] naming the first wrong byte or the missing length.
pub fn receive(mut stream: impl Duplex, content: Content) -> Result<Report, AgentError> {
    let mut header = [0; 24];
    stream.read_exact(&mut header).map_err(AgentError::io("receive the header"))?;
    let start = Instant::now();
    let mut wanted = [0; 24];
    wanted[..8].copy_from_slice(&MAGIC);
    wanted[8..16].copy_from_slice(&content.bytes.to_le_bytes());
    wanted[16..].copy_from_slice(&content.seed.to_le_bytes());
    if header != wanted {
        return Err(AgentError::Mismatch(format!(
            "the sender's header {header:02x?} is not {wanted:02x?} (magic, bytes, seed)"
        )));
    }
    let mut check = Check::new(content.seed);
    let mut buffer = vec![0; BUFFER_BYTES];
    while check.received() < content.bytes {
        let left = content.bytes - check.received();
        let most = usize::try_from(left).unwrap_or(BUFFER_BYTES).min(BUFFER_BYTES);
        let at = check.received();
        let len =
            stream.read(&mut buffer[..most]).map_err(AgentError::io(format!("read at {at}")))?;
        if len == 0 {
            let text = format!("the stream ended after {at} of {} bytes", content.bytes);
            return Err(AgentError::Mismatch(text));
        }
        check.take(&buffer[..len])?;
    }
    stream.write_all(&check.hash().to_le_bytes()).map_err(AgentError::io("send the hash"))?;
    Ok(Report { bytes: content.bytes, hash: check.hash(), took: start.elapsed(), resent: 0 })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const CONTENT: Content = Content { bytes: 1_000_003, seed: 9 };

    #[test]
    fn both_ends_of_a_stream_report_the_same_hash() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let receiver = thread::spawn(move || receive(theirs, CONTENT).unwrap());
        let sent = send(ours, CONTENT).unwrap();
        let received = receiver.join().unwrap();
        assert_eq!((sent.hash, sent.bytes), (received.hash, received.bytes));
        assert_eq!(sent.bytes, 1_000_003);
    }

    #[test]
    fn a_changed_byte_and_a_short_stream_are_noticed() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let receiver = thread::spawn(move || receive(theirs, Content { bytes: 100, seed: 9 }));
        let mut message = [0; 24 + 100];
        message[..8].copy_from_slice(&MAGIC);
        message[8] = 100;
        message[16] = 9;
        Stream::new(9).fill(&mut message[24..]);
        message[24 + 50] ^= 0x80;
        ours.write_all(&message).unwrap();
        let error = receiver.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("byte 50"), "{error}");

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let receiver = thread::spawn(move || receive(theirs, Content { bytes: 100, seed: 9 }));
        message[24 + 50] ^= 0x80;
        ours.write_all(&message[..80]).unwrap();
        drop(ours);
        let error = receiver.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("after 56 of 100"), "{error}");
    }

    #[test]
    fn tcp_by_its_command_line() {
        // Other tests' ports are of another address: none gets this one before the receiver
        // listens.
        let at = TcpListener::bind("127.0.0.77:0").unwrap().local_addr().unwrap().to_string();
        let there = at.clone();
        let receiver = thread::spawn(move || run("recv", "tcp", "listen", &there, CONTENT));
        let sent = loop {
            // The receiver's own "listening" line goes to its standard output, out of reach here.
            match run("send", "tcp", "connect", &at, CONTENT) {
                Err(AgentError::Io { .. }) if !receiver.is_finished() => thread::yield_now(),
                other => break other.unwrap(),
            }
        };
        assert_eq!(sent.hash, receiver.join().unwrap().unwrap().hash);
        assert!(matches!(run("send", "udp", "listen", &at, CONTENT), Err(AgentError::Usage(_))));
    }
}
