//! One-way streams: bytes a second over TCP, messages a second over UDP, counted by the receiver.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::rr::Server;
use crate::AgentError;

/// First bytes of a datagram that asks the sink for its count.
const ASK: [u8; 8] = *b"mr-count";
/// The smallest datagram of [`udp`]: the run's number and a flag byte's room.
pub const MIN_DATAGRAM_BYTES: usize = 9;
/// How often the sender asks for the count before it gives up, and how long it waits each time.
const ASK_TRIES: u32 = 50;
const ASK_WAIT: Duration = Duration::from_millis(200);
/// Datagrams between two looks at the clock where one costs less than the other's noise.
const CHUNK: u32 = 1_000;
/// Senders a UDP sink remembers at once.
const MAX_SENDERS: usize = 1024;

/// Starts the sink for [`tcp`] and [`udp`].
///
/// # Errors
/// The port is taken.
pub fn sink(port: u16) -> Result<Server, AgentError> {
    Server::start(port, sink_tcp, sink_udp)
}

fn sink_tcp(listener: &TcpListener) -> Result<(), AgentError> {
    loop {
        let (mut stream, _) = listener.accept().map_err(AgentError::io("accept"))?;
        thread::spawn(move || {
            let mut buffer = vec![0; 256 * 1024];
            let mut total = 0u64;
            while let Ok(len) = stream.read(&mut buffer) {
                if len == 0 {
                    // The sender notices a lost answer by itself.
                    let _ = stream.write_all(&total.to_le_bytes());
                    return;
                }
                total += len as u64;
            }
        });
    }
}

struct Count {
    run: [u8; 8],
    datagrams: u64,
    first: Instant,
    last: Instant,
}

fn sink_udp(socket: &UdpSocket) -> Result<(), AgentError> {
    let mut senders: HashMap<SocketAddr, Count> = HashMap::new();
    let mut buffer = vec![0; 65_536];
    loop {
        let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
        let now = Instant::now();
        let Some((run, _)) = buffer[..len].split_first_chunk::<8>() else { continue };
        if *run == ASK {
            let Some(count) = senders.get(&from) else { continue };
            let took = count.last.duration_since(count.first);
            let mut answer = [0; 16];
            answer[..8].copy_from_slice(&count.datagrams.to_le_bytes());
            let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            answer[8..].copy_from_slice(&nanos.to_le_bytes());
            let _ = socket.send_to(&answer, from);
            continue;
        }
        if senders.len() >= MAX_SENDERS && !senders.contains_key(&from) {
            senders.clear();
        }
        let fresh = Count { run: *run, datagrams: 0, first: now, last: now };
        let count = senders.entry(from).or_insert(fresh);
        if count.run != *run {
            *count = Count { run: *run, datagrams: 0, first: now, last: now };
        }
        count.datagrams += 1;
        count.last = now;
    }
}

/// Writes to the sink for a while; the sink's own byte count is the result.
///
/// # Errors
/// The connection fails.
pub fn tcp(to: SocketAddr, time: Duration, bytes: usize) -> Result<Value, AgentError> {
    if !(1..=1 << 24).contains(&bytes) {
        return Err(AgentError::Refused(format!("write of {bytes} bytes; 1 to 16777216 allowed")));
    }
    let mut stream = TcpStream::connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    let buffer = vec![0x5a; bytes];
    let start = Instant::now();
    while start.elapsed() < time {
        stream.write_all(&buffer).map_err(AgentError::io("send"))?;
    }
    stream.shutdown(Shutdown::Write).map_err(AgentError::io("shutdown"))?;
    let mut total = [0; 8];
    stream.read_exact(&mut total).map_err(AgentError::io("receive the sink's count"))?;
    let (total, secs) = (u64::from_le_bytes(total), start.elapsed().as_secs_f64());
    let mbit_s = total as f64 * 8.0 / secs / 1e6;
    Ok(json!({"op": "tcp_stream", "bytes": bytes, "total": total, "secs": secs, "mbit_s": mbit_s}))
}

/// Sends small datagrams as fast as the socket takes them; the sink counts.
///
/// # Errors
/// The socket fails, or the sink does not answer.
pub fn udp(to: SocketAddr, time: Duration, bytes: usize) -> Result<Value, AgentError> {
    if !(MIN_DATAGRAM_BYTES..=65_000).contains(&bytes) {
        let text = format!("datagram of {bytes} bytes; {MIN_DATAGRAM_BYTES} to 65000 allowed");
        return Err(AgentError::Refused(text));
    }
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).map_err(AgentError::io("bind"))?;
    socket.connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    let mut datagram = vec![0x5a; bytes];
    datagram[..8].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
    let start = Instant::now();
    let mut sent = 0u64;
    while start.elapsed() < time {
        // The clock is read once in 16: it costs as much as a small send.
        for _ in 0..16 {
            match socket.send(&datagram) {
                Ok(_) => sent += 1,
                Err(error)
                    if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(error) => return Err(AgentError::io("send a datagram")(error)),
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    let (received, sink_secs) = ask(&socket)?;
    let rate = if sink_secs > 0.0 { received as f64 / sink_secs } else { 0.0 };
    Ok(json!({
        "op": "udp_small", "bytes": bytes, "sent": sent, "received": received,
        "lost": sent.saturating_sub(received), "secs": took, "sent_rate": sent as f64 / took,
        "rate": rate,
    }))
}

/// Sends a number of datagrams, 1 to 100,000,000, that nobody answers, and tells what one takes:
/// the median over chunks, so that what interrupts a few of them does not show.
///
/// # Errors
/// The socket fails.
pub fn send(to: SocketAddr, count: u32, bytes: usize) -> Result<Value, AgentError> {
    let allowed = (1..=100_000_000).contains(&count) && (1..=65_000).contains(&bytes);
    if !allowed {
        let text =
            format!("{count} datagrams of {bytes} bytes; 1 to 100000000 of 1 to 65000 allowed");
        return Err(AgentError::Refused(text));
    }
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).map_err(AgentError::io("bind"))?;
    socket.connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    let datagram = vec![0x5a; bytes];
    let (start, mut left, mut chunks) = (Instant::now(), count, Vec::new());
    while left > 0 {
        let now = left.min(CHUNK);
        let begun = Instant::now();
        for _ in 0..now {
            socket.send(&datagram).map_err(AgentError::io("send a datagram"))?;
        }
        chunks.push(begun.elapsed().as_nanos() as f64 / f64::from(now));
        left -= now;
    }
    let secs = start.elapsed().as_secs_f64();
    chunks.sort_unstable_by(f64::total_cmp);
    let (least, median) = (chunks[0], chunks[chunks.len() / 2]);
    Ok(json!({
        "op": "udp_send", "bytes": bytes, "count": count, "secs": secs,
        "ns_mean": secs * 1e9 / f64::from(count), "ns_p50": median, "ns_least": least,
    }))
}

/// The sink's count and the seconds between its first and last datagram.
fn ask(socket: &UdpSocket) -> Result<(u64, f64), AgentError> {
    socket.set_read_timeout(Some(ASK_WAIT)).map_err(AgentError::io("read time-out"))?;
    let mut answer = [0; 16];
    for _ in 0..ASK_TRIES {
        socket.send(&ASK).map_err(AgentError::io("ask the sink"))?;
        match socket.recv(&mut answer) {
            Ok(16) => {
                let word = |at: usize| {
                    let mut word = [0; 8];
                    word.copy_from_slice(&answer[at..at + 8]);
                    u64::from_le_bytes(word)
                };
                return Ok((word(0), word(8) as f64 / 1e9));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(AgentError::io("receive the sink's count")(error)),
        }
    }
    Err(AgentError::Refused(format!("the sink did not answer {ASK_TRIES} times")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sink_counts_what_arrived() {
        let port = sink(0).unwrap().port();
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let got = tcp(to, Duration::from_millis(5), 10_000).unwrap();
        assert!(got["total"].as_u64().unwrap() >= 10_000, "{got}");
        assert_eq!(got["total"].as_u64().unwrap() % 10_000, 0, "{got}");
        let got = udp(to, Duration::from_millis(5), 16).unwrap();
        let (sent, received) = (got["sent"].as_u64().unwrap(), got["received"].as_u64().unwrap());
        assert!(received > 0 && received <= sent, "{got}");
        assert!(udp(to, Duration::ZERO, 8).is_err());
        let got = send(to, 1_500, 64).unwrap();
        assert_eq!(got["count"], 1_500);
        assert!(got["ns_p50"].as_f64() >= got["ns_least"].as_f64(), "{got}");
        assert!(got["ns_least"].as_f64().unwrap() > 0.0, "{got}");
        assert!(send(to, 0, 64).is_err());
    }
}
