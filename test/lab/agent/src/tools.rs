//! Network test tools; each prints one JSON object, so that tests and benchmarks read numbers and
//! not prose.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use self::arguments::{address, number, seconds, usage, vsock_address};
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

mod arguments;
mod percentiles;
mod xfer_udp;

/// Port of the echo server ([`rr::server`]), TCP and UDP.
pub const RR_PORT: u16 = 7000;
/// Port of the sink ([`stream::sink`]), TCP and UDP.
pub const SINK_PORT: u16 = 7001;

/// A tool's function; it takes the words after the tool's name.
type Tool = fn(&[&str]) -> Result<(), AgentError>;

/// Runs a tool by its command line; `None` when the name is no tool's.
///
/// # Errors
/// The tool's own error, or its usage.
pub fn main(arguments: &[&str]) -> Option<Result<(), AgentError>> {
    let (name, words) = arguments.split_first()?;
    let tool: Tool = match *name {
        "rr-server" => rr_server,
        "rr" => rr,
        "sink" => sink,
        "tcp-stream" => tcp_stream,
        "udp-small" => udp_small,
        "udp-send" => udp_send,
        "disk-read" => disk_read,
        "fill" => fill,
        "compare" => compare,
        "fetch" => fetch,
        "order" => order,
        "pipe" => pipe,
        "relay" => relay,
        "service" => service,
        "xfer" => xfer,
        _ => return None,
    };
    Some(tool(words))
}

fn rr_server(words: &[&str]) -> Result<(), AgentError> {
    let server = rr::server(number(words, 0, RR_PORT)?)?;
    print(&json!({"listening": server.port()}));
    server.wait()
}

fn rr(words: &[&str]) -> Result<(), AgentError> {
    let [kind @ ("tcp" | "udp"), addr, secs, rest @ ..] = words else { return Err(usage()) };
    let (to, secs) = (address(addr, RR_PORT)?, seconds(secs)?);
    let bytes = number(rest, 0, 1)?;
    let pause = Duration::from_millis(number(rest, 1, 0)?);
    print(&if *kind == "tcp" {
        rr::tcp(to, secs, bytes, pause)?
    } else {
        rr::udp(to, secs, bytes, pause)?
    });
    Ok(())
}

fn sink(words: &[&str]) -> Result<(), AgentError> {
    let sink = stream::sink(number(words, 0, SINK_PORT)?)?;
    print(&json!({"listening": sink.port()}));
    sink.wait()
}

fn tcp_stream(words: &[&str]) -> Result<(), AgentError> {
    let [addr, secs, rest @ ..] = words else { return Err(usage()) };
    let (to, secs) = (address(addr, SINK_PORT)?, seconds(secs)?);
    print(&stream::tcp(to, secs, number(rest, 0, 128 * 1024)?)?);
    Ok(())
}

fn udp_small(words: &[&str]) -> Result<(), AgentError> {
    let [addr, secs, rest @ ..] = words else { return Err(usage()) };
    let (to, secs) = (address(addr, SINK_PORT)?, seconds(secs)?);
    print(&stream::udp(to, secs, number(rest, 0, 16)?)?);
    Ok(())
}

fn udp_send(words: &[&str]) -> Result<(), AgentError> {
    let [addr, count, rest @ ..] = words else { return Err(usage()) };
    let count = count.parse().map_err(|_| usage())?;
    print(&stream::send(address(addr, SINK_PORT)?, count, number(rest, 0, 64)?)?);
    Ok(())
}

fn disk_read(words: &[&str]) -> Result<(), AgentError> {
    let [path, secs, rest @ ..] = words else { return Err(usage()) };
    let (bytes, seed) = (number(rest, 0, 4096)?, number(rest, 1, 1)?);
    print(&disk::read(path.as_ref(), seconds(secs)?, bytes, seed)?);
    Ok(())
}

fn fill(words: &[&str]) -> Result<(), AgentError> {
    let [path, bytes, rest @ ..] = words else { return Err(usage()) };
    let bytes = bytes.parse().map_err(|_| usage())?;
    file::fill(path.as_ref(), bytes, number(rest, 0, 1)?)
}

fn compare(words: &[&str]) -> Result<(), AgentError> {
    let [one, other, rest @ ..] = words else { return Err(usage()) };
    let (at, other_at) = (number(rest, 0, 0)?, number(rest, 1, 0)?);
    file::compare((one.as_ref(), at), (other.as_ref(), other_at))
}

fn fetch(words: &[&str]) -> Result<(), AgentError> {
    let [addr, rounds, bytes] = words else { return Err(usage()) };
    let rounds = rounds.parse().map_err(|_| usage())?;
    let bytes = bytes.parse().map_err(|_| usage())?;
    print(&fetch::run(address(addr, RR_PORT)?, rounds, bytes)?);
    Ok(())
}

fn order(words: &[&str]) -> Result<(), AgentError> {
    match words {
        ["recv", addr] => {
            let socket = xfer_udp::bind(address(addr, xfer::XFER_PORT)?)?;
            print(&json!({"listening": addr}));
            print(&order::receive(&socket)?);
        }
        ["send", addr, stop_file] => {
            let is_over = || Path::new(stop_file).exists();
            print(&order::send(address(addr, xfer::XFER_PORT)?, is_over)?);
        }
        _ => return Err(usage()),
    }
    Ok(())
}

fn pipe(words: &[&str]) -> Result<(), AgentError> {
    let [role @ ("listen" | "connect"), addr, path, words @ ..] = words else {
        return Err(usage());
    };
    let options = pipe::Options::parse(words).ok_or_else(usage)?;
    pipe::run(*role == "listen", address(addr, RR_PORT)?, path, options)
}

fn relay(words: &[&str]) -> Result<(), AgentError> {
    let [host, own_port, addr] = words else { return Err(usage()) };
    let own_port = own_port.parse().map_err(|_| usage())?;
    relay::run(vsock_address(host)?, own_port, address(addr, RR_PORT)?)
}

fn service(words: &[&str]) -> Result<(), AgentError> {
    if words.is_empty() {
        return Err(usage());
    }
    let at = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    service::run(&words[..at], words.get(at + 1..).unwrap_or_default())
}

fn xfer(words: &[&str]) -> Result<(), AgentError> {
    let [side, kind, role, addr, bytes, rest @ ..] = words else { return Err(usage()) };
    let bytes = bytes.parse().map_err(|_| usage())?;
    let seed = number(rest, 0, 1)?;
    let report = xfer::run(side, kind, role, addr, xfer::Content { bytes, seed })?;
    print(&report.json());
    Ok(())
}

fn print(value: &serde_json::Value) {
    println!("{value}");
}
