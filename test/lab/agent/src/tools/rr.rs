//! Request and response: how many round trips a second, over TCP and UDP.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::percentiles::percentiles;
use crate::AgentError;

/// Most bytes of one request over TCP.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Over UDP.
pub const MAX_DATAGRAM_BYTES: usize = 65_000;
/// A UDP answer that takes longer counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(1);

/// A server's threads; they serve until the process ends.
pub struct Server {
    port: u16,
    threads: Vec<JoinHandle<Result<(), AgentError>>>,
}

impl Server {
    /// Binds TCP and UDP to the same port of all addresses (IPv6 and IPv4) and starts one thread
    /// for each.
    pub(crate) fn start(
        port: u16,
        tcp: impl FnOnce(&TcpListener) -> Result<(), AgentError> + Send + 'static,
        udp: impl FnOnce(&UdpSocket) -> Result<(), AgentError> + Send + 'static,
    ) -> Result<Self, AgentError> {
        let (listener, socket) = Self::bind(port)?;
        let port = listener.local_addr().map_err(AgentError::io("own address"))?.port();
        let threads =
            vec![thread::spawn(move || tcp(&listener)), thread::spawn(move || udp(&socket))];
        Ok(Self { port, threads })
    }

    fn bind(port: u16) -> Result<(TcpListener, UdpSocket), AgentError> {
        loop {
            let listener =
                TcpListener::bind(("::", port)).map_err(AgentError::io("bind the TCP server"))?;
            let own = listener.local_addr().map_err(AgentError::io("own address"))?.port();
            match UdpSocket::bind(("::", own)) {
                // Any port will do, and this one is somebody's for UDP.
                Err(error) if port == 0 && error.kind() == ErrorKind::AddrInUse => {}
                socket => {
                    return Ok((listener, socket.map_err(AgentError::io("bind the UDP server"))?));
                }
            }
        }
    }

    /// The port, for a server started on port 0.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Waits until a thread fails.
    ///
    /// # Errors
    /// What that thread failed with.
    pub fn wait(self) -> Result<(), AgentError> {
        for thread in self.threads {
            thread.join().map_err(|_| AgentError::Refused("a server thread panicked".into()))??;
        }
        Ok(())
    }
}

/// Starts the echo server.
///
/// # Errors
/// The port is taken.
pub fn server(port: u16) -> Result<Server, AgentError> {
    Server::start(port, echo_tcp, echo_udp)
}

fn echo_tcp(listener: &TcpListener) -> Result<(), AgentError> {
    loop {
        let (mut stream, _) = listener.accept().map_err(AgentError::io("accept"))?;
        thread::spawn(move || {
            let mut buffer = vec![0; MAX_REQUEST_BYTES];
            // A client that breaks off ends its own thread only.
            let _ = stream.set_nodelay(true);
            while let Ok(len) = stream.read(&mut buffer) {
                if len == 0 || stream.write_all(&buffer[..len]).is_err() {
                    return;
                }
            }
        });
    }
}

fn echo_udp(socket: &UdpSocket) -> Result<(), AgentError> {
    let mut buffer = vec![0; MAX_REQUEST_BYTES];
    loop {
        // An ICMP error about an earlier answer is no reason to stop.
        let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
        let _ = socket.send_to(&buffer[..len], from);
    }
}

fn check_size(bytes: usize, max: usize) -> Result<(), AgentError> {
    if (1..=max).contains(&bytes) {
        return Ok(());
    }
    Err(AgentError::Refused(format!("request of {bytes} bytes; 1 to {max} allowed")))
}

fn report(op: &str, bytes: usize, times: Vec<u32>, lost: u64, took: Duration) -> Value {
    let count = times.len();
    let (mean, p50, p99) = percentiles(times);
    json!({
        "op": op, "bytes": bytes, "count": count, "lost": lost, "secs": took.as_secs_f64(),
        "rate": count as f64 / took.as_secs_f64(), "mean_us": mean, "p50_us": p50, "p99_us": p99,
    })
}

/// Sleeping for no time is a system call all the same.
fn wait(pause: Duration) {
    if !pause.is_zero() {
        thread::sleep(pause);
    }
}

fn nanos(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_nanos()).unwrap_or(u32::MAX)
}

/// One request at a time over one TCP connection for a while, each `pause` after the last answer:
/// with a pause, a guest that is nearly idle.
///
/// # Errors
/// The connection fails, or an answer differs from its request.
pub fn tcp(
    to: SocketAddr,
    time: Duration,
    bytes: usize,
    pause: Duration,
) -> Result<Value, AgentError> {
    check_size(bytes, MAX_REQUEST_BYTES)?;
    let mut stream = TcpStream::connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    stream.set_nodelay(true).map_err(AgentError::io("TCP_NODELAY"))?;
    let (mut request, mut answer) = (vec![0u8; bytes], vec![0u8; bytes]);
    let mut times = Vec::with_capacity(1 << 16);
    let start = Instant::now();
    while start.elapsed() < time {
        let sent = Instant::now();
        request[0] = request[0].wrapping_add(1);
        stream.write_all(&request).map_err(AgentError::io("send a request"))?;
        stream.read_exact(&mut answer).map_err(AgentError::io("receive an answer"))?;
        if answer != request {
            return Err(AgentError::Mismatch("answer differs from the request".into()));
        }
        times.push(nanos(sent));
        wait(pause);
    }
    Ok(report("tcp_rr", bytes, times, 0, start.elapsed()))
}

/// One datagram at a time, each `pause` after the last; an answer that does not come within a
/// second is counted as lost.
///
/// # Errors
/// The socket fails.
pub fn udp(
    to: SocketAddr,
    time: Duration,
    bytes: usize,
    pause: Duration,
) -> Result<Value, AgentError> {
    check_size(bytes, MAX_DATAGRAM_BYTES)?;
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).map_err(AgentError::io("bind"))?;
    socket.connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    socket.set_read_timeout(Some(LOST_AFTER)).map_err(AgentError::io("read time-out"))?;
    let (mut request, mut answer) = (vec![0u8; bytes], vec![0u8; bytes]);
    let mut times = Vec::with_capacity(1 << 16);
    let mut lost = 0u64;
    let start = Instant::now();
    while start.elapsed() < time {
        let sent = Instant::now();
        request[0] = request[0].wrapping_add(1);
        socket.send(&request).map_err(AgentError::io("send a request"))?;
        loop {
            match socket.recv(&mut answer) {
                // An answer to an earlier request came late: go on waiting for ours.
                Ok(_) if answer != request => {}
                Ok(_) => {
                    times.push(nanos(sent));
                    break;
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock) => {
                    lost += 1;
                    break;
                }
                Err(error) => return Err(AgentError::io("receive an answer")(error)),
            }
        }
        wait(pause);
    }
    Ok(report("udp_rr", bytes, times, lost, start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_protocols_make_round_trips() {
        let port = server(0).unwrap().port();
        for to in [SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::from(([0; 8], port))] {
            for bytes in [1, 3000, MAX_DATAGRAM_BYTES] {
                let got = tcp(to, Duration::from_millis(5), bytes, Duration::ZERO).unwrap();
                assert!(got["count"].as_u64().unwrap() > 0, "{got}");
                let got = udp(to, Duration::from_millis(5), bytes, Duration::ZERO).unwrap();
                assert!(got["count"].as_u64().unwrap() > 0, "{got}");
            }
        }
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        assert!(tcp(to, Duration::ZERO, 0, Duration::ZERO).is_err());
        assert!(udp(to, Duration::ZERO, MAX_DATAGRAM_BYTES + 1, Duration::ZERO).is_err());
        let got = tcp(to, Duration::from_millis(5), MAX_REQUEST_BYTES, Duration::ZERO).unwrap();
        assert!(got["count"].as_u64().unwrap() > 0, "{got}");
    }
}
