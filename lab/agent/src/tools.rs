//! Network test tools; each prints one JSON object, so that tests and benchmarks read numbers and
//! not prose.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

use crate::AgentError;

pub mod disk;
pub mod fetch;
pub mod file;
pub mod order;
pub mod pipe;
pub mod relay;
pub mod rr;
pub mod service;
pub mod stream;
pub mod xfer;

mod xfer_udp;

/// Port of the echo server ([`rr::server`]), TCP and UDP.
pub const RR_PORT: u16 = 7000;
/// Port of the sink ([`stream::sink`]), TCP and UDP.
pub const SINK_PORT: u16 = 7001;

const USAGE: &str = "\
rr-server [PORT] | rr tcp|udp ADDR[:PORT] SECS [BYTES [PAUSE_MS]] | sink [PORT] | \
tcp-stream ADDR[:PORT] SECS [BYTES] | udp-small ADDR[:PORT] SECS [BYTES] | \
udp-send ADDR[:PORT] COUNT [BYTES] | \
disk-read PATH SECS [BYTES [SEED]] | fill PATH BYTES [SEED] | compare PATH PATH [OFFSET OFFSET] | \
fetch ADDR[:PORT] ROUNDS BYTES | order recv ADDR | order send ADDR STOP_FILE | \
pipe listen|connect ADDR PATH [mptcp] [tls] [end] [path-only|write-only] [wait=FIFO] | \
relay CID:PORT OWN_PORT ADDR | service UNIT [DROP_IN]... [-- PROGRAM [ARGUMENT]...] | \
xfer send|recv tcp|udp|vsock|unix connect|listen ADDR BYTES [SEED]";

/// Runs a tool by its command line; `None` when the name is no tool's.
///
/// # Errors
/// The tool's own error, or its usage.
pub fn main(arguments: &[&str]) -> Option<Result<(), AgentError>> {
    let usage = || AgentError::Usage(USAGE.into());
    Some(match arguments {
        ["rr-server", rest @ ..] => number(rest, 0, RR_PORT).and_then(|port| {
            let server = rr::server(port)?;
            println!("{}", serde_json::json!({"listening": server.port()}));
            server.wait()
        }),
        ["rr", kind @ ("tcp" | "udp"), addr, secs, rest @ ..] => {
            let run = || {
                let (to, secs) = (address(addr, RR_PORT)?, seconds(secs)?);
                let bytes = number(rest, 0, 1)?;
                let pause = std::time::Duration::from_millis(number(rest, 1, 0)?);
                print(&if *kind == "tcp" {
                    rr::tcp(to, secs, bytes, pause)?
                } else {
                    rr::udp(to, secs, bytes, pause)?
                });
                Ok(())
            };
            run()
        }
        ["sink", rest @ ..] => number(rest, 0, SINK_PORT).and_then(|port| {
            let sink = stream::sink(port)?;
            println!("{}", serde_json::json!({"listening": sink.port()}));
            sink.wait()
        }),
        ["tcp-stream", addr, secs, rest @ ..] => {
            let run = || {
                let (to, secs) = (address(addr, SINK_PORT)?, seconds(secs)?);
                print(&stream::tcp(to, secs, number(rest, 0, 128 * 1024)?)?);
                Ok(())
            };
            run()
        }
        ["udp-small", addr, secs, rest @ ..] => {
            let run = || {
                let (to, secs) = (address(addr, SINK_PORT)?, seconds(secs)?);
                print(&stream::udp(to, secs, number(rest, 0, 16)?)?);
                Ok(())
            };
            run()
        }
        ["udp-send", addr, count, rest @ ..] => {
            let run = || {
                let count = count.parse().map_err(|_| usage())?;
                print(&stream::send(address(addr, SINK_PORT)?, count, number(rest, 0, 64)?)?);
                Ok(())
            };
            run()
        }
        ["disk-read", path, secs, rest @ ..] => {
            let run = || {
                let (bytes, seed) = (number(rest, 0, 4096)?, number(rest, 1, 1)?);
                print(&disk::read(path.as_ref(), seconds(secs)?, bytes, seed)?);
                Ok(())
            };
            run()
        }
        ["fill", path, bytes, rest @ ..] => {
            let run = || {
                let bytes = bytes.parse().map_err(|_| usage())?;
                file::fill(path.as_ref(), bytes, number(rest, 0, 1)?)
            };
            run()
        }
        ["compare", one, other, rest @ ..] => {
            let run = || {
                let (at, other_at) = (number(rest, 0, 0)?, number(rest, 1, 0)?);
                file::compare((one.as_ref(), at), (other.as_ref(), other_at))
            };
            run()
        }
        ["fetch", addr, rounds, bytes] => {
            let run = || {
                let rounds = rounds.parse().map_err(|_| usage())?;
                let bytes = bytes.parse().map_err(|_| usage())?;
                print(&fetch::run(address(addr, RR_PORT)?, rounds, bytes)?);
                Ok(())
            };
            run()
        }
        ["order", "recv", addr] => {
            let run = || {
                let socket = xfer_udp::bind(address(addr, xfer::XFER_PORT)?)?;
                println!("{}", serde_json::json!({"listening": addr}));
                print(&order::receive(&socket)?);
                Ok(())
            };
            run()
        }
        ["order", "send", addr, stop_file] => {
            let run = || {
                let is_over = || Path::new(stop_file).exists();
                print(&order::send(address(addr, xfer::XFER_PORT)?, is_over)?);
                Ok(())
            };
            run()
        }
        ["pipe", role @ ("listen" | "connect"), addr, path, words @ ..] => {
            let run = || {
                let options = pipe::Options::parse(words).ok_or_else(usage)?;
                pipe::run(*role == "listen", address(addr, RR_PORT)?, path, options)
            };
            run()
        }
        ["relay", host, own_port, addr] => {
            let run = || {
                let own_port = own_port.parse().map_err(|_| usage())?;
                relay::run(vsock_address(host)?, own_port, address(addr, RR_PORT)?)
            };
            run()
        }
        ["service", words @ ..] if !words.is_empty() => {
            let at = words.iter().position(|word| *word == "--").unwrap_or(words.len());
            service::run(&words[..at], words.get(at + 1..).unwrap_or_default())
        }
        ["xfer", side, kind, role, addr, bytes, rest @ ..] => {
            let run = || {
                let bytes = bytes.parse().map_err(|_| usage())?;
                let seed = number(rest, 0, 1)?;
                let report = xfer::run(side, kind, role, addr, xfer::Content { bytes, seed })?;
                print(&report.json());
                Ok(())
            };
            run()
        }
        [
            "rr" | "tcp-stream" | "udp-small" | "udp-send" | "disk-read" | "compare" | "fetch"
            | "fill" | "order" | "pipe" | "relay" | "service" | "xfer",
            ..,
        ] => Err(usage()),
        _ => return None,
    })
}

fn print(value: &serde_json::Value) {
    println!("{value}");
}

fn number<T: std::str::FromStr>(rest: &[&str], at: usize, default: T) -> Result<T, AgentError> {
    match rest.get(at) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| AgentError::Usage(USAGE.into())),
    }
}

fn seconds(text: &str) -> Result<std::time::Duration, AgentError> {
    let secs: f64 = text.parse().map_err(|_| AgentError::Usage(USAGE.into()))?;
    std::time::Duration::try_from_secs_f64(secs).map_err(|_| AgentError::Usage(USAGE.into()))
}

/// `10.0.0.1`, `10.0.0.1:80`, `fd00::1`, `[fd00::1]:80` or `[fe80::1%2]:80`.
pub(crate) fn address(text: &str, port: u16) -> Result<SocketAddr, AgentError> {
    if let Ok(ip) = text.parse::<std::net::IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    text.to_socket_addrs()
        .ok()
        .and_then(|mut all| all.next())
        .ok_or_else(|| AgentError::Usage(format!("{text:?} is no address; {USAGE}")))
}

/// `CID:PORT` of vsock.
pub(crate) fn vsock_address(text: &str) -> Result<(u32, u32), AgentError> {
    text.split_once(':')
        .and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)))
        .ok_or_else(|| AgentError::Usage(format!("{text:?} is not CID:PORT")))
}

/// Mean, 50th and 99th percentile of a list of nanoseconds, in microseconds.
pub(crate) fn percentiles(mut nanos: Vec<u32>) -> (f64, f64, f64) {
    if nanos.is_empty() {
        return (0.0, 0.0, 0.0);
    }
    nanos.sort_unstable();
    let at = |part: f64| f64::from(nanos[(((nanos.len() - 1) as f64) * part) as usize]) / 1e3;
    let mean = nanos.iter().map(|&nanos| f64::from(nanos)).sum::<f64>() / nanos.len() as f64 / 1e3;
    (mean, at(0.5), at(0.99))
}
