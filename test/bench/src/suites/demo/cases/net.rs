//! Round trips, a TCP stream and small datagrams between two guests. The programs are the agent's.

use serde_json::Value;

use super::program::{Modes, Parse, Script, spec};
use crate::harness::runner::{Rate, Spec, Window};

/// Bytes of a small datagram's payload.
const SMALL_BYTES: u32 = 16;
/// Bytes of one write of the TCP stream.
const WRITE_BYTES: u32 = 128 * 1024;

/// A network case by name.
pub(super) fn program(name: &str, modes: &Modes) -> Option<(Spec, Script, Parse)> {
    let trip = |name| Spec { latency: true, ..spec(name, "1/s", "round trip of 1 byte") };
    let (mut spec, parse): (Spec, Parse) = match name {
        "tcp_rr" => (trip("tcp_rr"), round_trips),
        "udp_rr" => (trip("udp_rr"), round_trips),
        "tcp_stream" => (spec("tcp_stream", "Gbit/s", "MB received"), stream),
        "udp_small" => (spec("udp_small", "1/s", "datagram received"), datagrams),
        _ => return None,
    };
    let (target, aim) = match name {
        "tcp_rr" | "udp_rr" => (Some(1.0), Some(1.3)),
        "tcp_stream" => (Some(1.2), Some(1.5)),
        _ => (None, None),
    };
    let tool = match name {
        "tcp_rr" => ("rr tcp", 1),
        "udp_rr" => ("rr udp", 1),
        "tcp_stream" => ("tcp-stream", WRITE_BYTES),
        _ => ("udp-small", SMALL_BYTES),
    };
    spec.mode = match name {
        "tcp_stream" => format!("{}, {} KiB writes", modes.net, WRITE_BYTES / 1024),
        "udp_small" => format!("{}, {SMALL_BYTES} B payload", modes.net),
        _ => format!("{}, 1 B", modes.net),
    };
    let server = modes.server;
    let script = move |window: Window| {
        let secs = (window.settle + window.length).as_secs_f64();
        format!("exec agent {} {server} {secs:.2} {}", tool.0, tool.1)
    };
    let (ours, peer, vhost) = ("switch", "tap-bridge", modes.vhost);
    let spec = Spec { target, aim, ours, peer, vhost, ..spec };
    Some((spec, Box::new(script), parse))
}

fn number(answer: &Value, field: &str) -> Option<f64> {
    answer.get(field)?.as_f64()
}

fn round_trips(answer: &Value) -> Option<Rate> {
    let rate = number(answer, "rate")?;
    let (count, lost) = (number(answer, "count")?, number(answer, "lost")?);
    Some(Rate { value: rate, ops_per_s: rate, lost: share(lost, count + lost) })
}

fn stream(answer: &Value) -> Option<Rate> {
    let mbit_s = number(answer, "mbit_s")?;
    Some(Rate { value: mbit_s / 1e3, ops_per_s: mbit_s / 8.0, lost: None })
}

fn datagrams(answer: &Value) -> Option<Rate> {
    let rate = number(answer, "rate")?;
    let (sent, lost) = (number(answer, "sent")?, number(answer, "lost")?);
    Some(Rate { value: rate, ops_per_s: rate, lost: share(lost, sent) })
}

fn share(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use super::super::make;
    use super::super::program::read;
    use super::super::tests::{Canned, modes, window};
    use super::*;
    use crate::harness::runner::Side;

    #[test]
    fn scripts_name_tool_address_and_time() {
        for (name, script) in [
            ("tcp_rr", "ours: exec agent rr tcp 10.0.0.2 2.50 1"),
            ("udp_rr", "ours: exec agent rr udp 10.0.0.2 2.50 1"),
            ("tcp_stream", "ours: exec agent tcp-stream 10.0.0.2 2.50 131072"),
            ("udp_small", "ours: exec agent udp-small 10.0.0.2 2.50 16"),
        ] {
            let shell = Canned::new("{}");
            // The canned answer is no rate; only the script matters here.
            let _ = make(name, &shell, &modes()).unwrap().run(Side::Ours, window());
            assert_eq!(shell.seen.borrow()[0], script);
        }
    }

    #[test]
    fn answers_become_rates() {
        let r = read(r#"{"op":"tcp_rr","count":3000,"lost":0,"rate":1500.5}"#, round_trips);
        let r = r.unwrap();
        assert_eq!((r.value, r.ops_per_s, r.lost), (1500.5, 1500.5, Some(0.0)));
        let r = read(r#"{"op":"tcp_stream","total":1,"mbit_s":1600.0}"#, stream).unwrap();
        assert_eq!((r.value, r.ops_per_s, r.lost), (1.6, 200.0, None));
        let r = read(r#"{"sent":1000,"received":750,"lost":250,"rate":375.0}"#, datagrams);
        let r = r.unwrap();
        assert_eq!((r.value, r.lost), (375.0, Some(0.25)));
    }

    #[test]
    fn vhost_net_takes_part_where_it_is_and_in_no_disk_case() {
        let modes = Modes { vhost: true, ..modes() };
        let shell = Canned::new("{}");
        for name in super::super::NAMES {
            let spec = make(name, &shell, &modes).unwrap().spec().clone();
            assert_eq!(spec.vhost, !name.starts_with("disk_"), "{name}");
        }
    }

    #[test]
    fn only_round_trips_keep_the_cpus_awake() {
        let latency = |name| program(name, &modes()).unwrap().0.latency;
        assert!(latency("tcp_rr") && latency("udp_rr"));
        assert!(!latency("tcp_stream") && !latency("udp_small"));
    }
}
