//! Loads between the guests: round trips and streams of some message size.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::route::{BUSY_RR_PORT, Route, Sample};
use crate::harness::table::size_text;

/// From the start of the guest's program until CPU time counts: it starts, connects, and the
/// adaptive polling finds its length.
pub(super) const SETTLE: Duration = Duration::from_millis(150);
/// Most bytes of a datagram that fragments can carry with room for headers.
const MAX_DATAGRAM_BYTES: u32 = 60_000;
/// Most bytes of a packet that is cut later: a stream has at least so many.
const MAX_PACKET_BYTES: f64 = 65_536.0;

/// Message sizes.
pub const SIZES: [u32; 5] = [64, 1 << 10, 4 << 10, 16 << 10, 64 << 10];

/// Kind of load between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Test {
    /// A message there and back over one TCP connection, one at a time.
    TcpRr,
    /// The same in datagrams.
    UdpRr,
    /// Messages written into one TCP connection.
    TcpStream,
    /// Datagrams, as fast as the socket takes them; what arrives counts.
    UdpStream,
}

impl Test {
    /// All.
    pub const ALL: [Test; 4] = [Test::TcpRr, Test::UdpRr, Test::TcpStream, Test::UdpStream];

    /// Name of the test in results.
    pub fn name(self) -> &'static str {
        match self {
            Test::TcpRr => "tcp_rr",
            Test::UdpRr => "udp_rr",
            Test::TcpStream => "tcp_stream",
            Test::UdpStream => "udp_stream",
        }
    }

    /// Unit of the test's value.
    pub fn unit(self) -> &'static str {
        if self.is_rr() { "1/s" } else { "MB/s" }
    }

    /// Whether it makes round trips.
    pub fn is_rr(self) -> bool {
        matches!(self, Test::TcpRr | Test::UdpRr)
    }
}

/// A test with a message size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// The test.
    pub test: Test,
    /// Length of a message.
    pub bytes: u32,
}

impl Case {
    /// With the size cut to what the protocol carries.
    pub fn new(test: Test, bytes: u32) -> Case {
        let udp = matches!(test, Test::UdpRr | Test::UdpStream);
        Case { test, bytes: if udp { bytes.min(MAX_DATAGRAM_BYTES) } else { bytes } }
    }

    /// Name of the case in results.
    pub fn name(&self) -> String {
        format!("{}_{}", self.test.name(), size_text(self.bytes.into()))
    }

    /// Sockets that poll are for those who wait for an answer.
    pub fn runs_over(&self, way: Route) -> bool {
        self.test.is_rr() || !way.is_busy()
    }

    pub(super) fn script(&self, way: Route, length: Duration) -> String {
        let (to, secs, bytes) = (way.server(), length.as_secs_f64(), self.bytes);
        // A socket takes the sysctl's value when it is made, so there is a server for each.
        let port = if way.is_busy() { format!(":{BUSY_RR_PORT}") } else { String::new() };
        match self.test {
            Test::TcpRr => format!("exec agent rr tcp {to}{port} {secs:.2} {bytes}"),
            Test::UdpRr => format!("exec agent rr udp {to}{port} {secs:.2} {bytes}"),
            Test::TcpStream => format!("exec agent tcp-stream {to} {secs:.2} {bytes}"),
            Test::UdpStream => format!("exec agent udp-small {to} {secs:.2} {bytes}"),
        }
    }

    /// Reads a program's answer: the sample without CPU time, operations per second, and how many
    /// packets each side must have sent at least.
    pub(super) fn read(&self, answer: &Value) -> Option<(Sample, f64, u64)> {
        let number = |field: &str| answer.get(field)?.as_f64();
        let share = |lost: f64, of: f64| (of > 0.0).then(|| lost / of);
        let mut sample = Sample::default();
        let packets = match self.test {
            Test::TcpRr | Test::UdpRr => {
                let (count, lost) = (number("count")?, number("lost")?);
                sample.value = number("rate")?;
                sample.lost = share(lost, count + lost);
                sample.mean_us = number("mean_us");
                sample.p50_us = number("p50_us");
                sample.p99_us = number("p99_us");
                count
            }
            Test::TcpStream => {
                sample.value = number("mbit_s")? / 8.0;
                number("total")? / MAX_PACKET_BYTES
            }
            Test::UdpStream => {
                sample.value = number("rate")? * f64::from(self.bytes) / 1e6;
                sample.lost = share(number("lost")?, number("sent")?);
                number("received")?
            }
        };
        let ops_per_s = sample.value;
        (ops_per_s > 0.0).then_some((sample, ops_per_s, packets as u64))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_and_scripts_tell_test_size_and_place() {
        let script = |test, bytes, way| {
            let case = Case::new(test, bytes);
            (case.name(), case.script(way, Duration::from_millis(750)))
        };
        for (got, name, text) in [
            (script(Test::TcpRr, 64, Route::TapBridge), "tcp_rr_64", "rr tcp 10.0.0.2 0.75 64"),
            (
                script(Test::TcpRr, 64 << 10, Route::ChannelBusy),
                "tcp_rr_64k",
                "rr tcp 10.0.1.2:7100 0.75 65536",
            ),
            (
                script(Test::UdpRr, 64 << 10, Route::OvsNormal),
                "udp_rr_60000",
                "rr udp 10.0.2.2 0.75 60000",
            ),
            (
                script(Test::UdpStream, 1024, Route::Loopback),
                "udp_stream_1k",
                "udp-small 127.0.0.1 0.75 1024",
            ),
        ] {
            assert_eq!((got.0.as_str(), got.1), (name, format!("exec agent {text}")));
        }
        assert!(!Case::new(Test::TcpStream, 64).runs_over(Route::ChannelBusy));
        assert!(Case::new(Test::UdpRr, 64).runs_over(Route::TapBridgeBusy));
    }

    #[test]
    fn answers_become_samples() {
        let rr = json!({"count": 900, "lost": 100, "rate": 1500.0, "mean_us": 660.0,
                        "p50_us": 650.0, "p99_us": 900.0});
        let (sample, ops, packets) = Case::new(Test::UdpRr, 64).read(&rr).unwrap();
        assert_eq!((sample.value, ops, packets, sample.lost), (1500.0, 1500.0, 900, Some(0.1)));
        assert_eq!((sample.p50_us, sample.p99_us), (Some(650.0), Some(900.0)));
        let tcp = json!({"total": 6_553_600, "mbit_s": 800.0});
        let (sample, ops, packets) = Case::new(Test::TcpStream, 64).read(&tcp).unwrap();
        assert_eq!((sample.value, ops, packets, sample.p50_us), (100.0, 100.0, 100, None));
        let udp = json!({"rate": 2000.0, "sent": 4000, "received": 3000, "lost": 1000});
        let (sample, _, packets) = Case::new(Test::UdpStream, 1000).read(&udp).unwrap();
        assert_eq!((sample.value, packets, sample.lost), (2.0, 3000, Some(0.25)));
        // Nothing arrived: there is no rate.
        let none = json!({"rate": 0.0, "sent": 4000, "received": 0, "lost": 4000});
        assert!(Case::new(Test::UdpStream, 1000).read(&none).is_none());
        assert!(Case::new(Test::TcpRr, 64).read(&json!({})).is_none());
    }
}
