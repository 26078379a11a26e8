//! Loads of the guests: two make round trips, two a stream, two read their disks, two are nearly
//! idle.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::harness::error::BenchError;
use crate::harness::fleet::address;

/// Guests of a fleet.
pub const GUESTS: usize = 8;
/// Milliseconds between the round trips of the guests that are nearly idle: 50 a second at most.
const PAUSE_MS: u32 = 20;

/// Class of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// TCP round trips of one byte, one after the other.
    RoundTrip,
    /// One TCP stream.
    Stream,
    /// Random reads of 4 KiB, one after the other.
    Disk,
    /// A round trip now and then.
    Idle,
}

/// A program on a guest.
#[derive(Debug)]
pub struct Load {
    /// The guest that runs it.
    pub guest: usize,
    class: Class,
    /// The guest that answers, where one does.
    peer: usize,
}

/// All loads of a fleet.
pub const LOADS: [Load; 5] = [
    Load { guest: 0, class: Class::RoundTrip, peer: 1 },
    Load { guest: 2, class: Class::Stream, peer: 3 },
    Load { guest: 4, class: Class::Disk, peer: 4 },
    Load { guest: 5, class: Class::Disk, peer: 5 },
    Load { guest: 6, class: Class::Idle, peer: 7 },
];

/// Guests that answer, and with what.
pub const SERVERS: [(usize, &str); 3] =
    [(1, "agent rr-server"), (3, "agent sink"), (7, "agent rr-server")];

/// Guests that have a disk.
pub fn disks() -> [bool; GUESTS] {
    let mut disks = [false; GUESTS];
    for load in LOADS.iter().filter(|l| l.class == Class::Disk) {
        disks[load.guest] = true;
    }
    disks
}

/// Answer of one program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    class: Class,
    /// Requests per second; of a stream Gbit/s.
    rate: f64,
    /// Percentiles of latency, microseconds; a stream has none.
    p50_us: f64,
    p99_us: f64,
}

impl Load {
    /// The command line, for so long.
    pub fn script(&self, length: Duration) -> String {
        let (to, secs) = (address(self.peer), length.as_secs_f64());
        match self.class {
            Class::RoundTrip => format!("agent rr tcp {to} {secs:.2} 1"),
            Class::Stream => format!("agent tcp-stream {to} {secs:.2}"),
            // The guest's number is the seed: the same places in every round and on both sides.
            Class::Disk => format!("agent disk-read /dev/vda {secs:.2} 4096 {}", self.guest),
            Class::Idle => format!("agent rr tcp {to} {secs:.2} 1 {PAUSE_MS}"),
        }
    }

    /// Reads the program's answer.
    pub fn read(&self, answer: &Value) -> Result<Answer, BenchError> {
        let class = self.class;
        let number = |field: &str| answer[field].as_f64().filter(|n| n.is_finite() && *n > 0.0);
        let found = match class {
            Class::Stream => number("mbit_s").map(|mbit_s| Answer {
                class,
                rate: mbit_s / 1e3,
                p50_us: 0.0,
                p99_us: 0.0,
            }),
            _ => (|| {
                let (rate, p50_us) = (number("rate")?, number("p50_us")?);
                Some(Answer { class, rate, p50_us, p99_us: number("p99_us")? })
            })(),
        };
        found.ok_or_else(|| {
            BenchError::lab(format!("{class:?} on guest {}", self.guest), format!("{answer}"))
        })
    }
}

/// The fleet's values by class.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Values {
    /// Round trips per second.
    pub rr_per_s: f64,
    /// Median round trip.
    pub rr_p50_us: f64,
    /// 99th percentile.
    pub rr_p99_us: f64,
    /// The stream.
    pub stream_gbit_s: f64,
    /// Disk reads per second, of both guests.
    pub disk_per_s: f64,
    /// Median read, mean of both guests.
    pub disk_p50_us: f64,
    /// 99th percentile, mean of both guests.
    pub disk_p99_us: f64,
    /// Median round trip of a nearly idle guest.
    pub idle_p50_us: f64,
    /// 99th percentile.
    pub idle_p99_us: f64,
}

impl Values {
    /// From the answers of all programs.
    pub fn of(answers: &[Answer]) -> Values {
        let of = |class| answers.iter().filter(move |a| a.class == class);
        let sum = |class, field: fn(&Answer) -> f64| of(class).map(field).sum::<f64>();
        let mean = |class, field| sum(class, field) / (of(class).count().max(1) as f64);
        Values {
            rr_per_s: sum(Class::RoundTrip, |a| a.rate),
            rr_p50_us: mean(Class::RoundTrip, |a| a.p50_us),
            rr_p99_us: mean(Class::RoundTrip, |a| a.p99_us),
            stream_gbit_s: sum(Class::Stream, |a| a.rate),
            disk_per_s: sum(Class::Disk, |a| a.rate),
            disk_p50_us: mean(Class::Disk, |a| a.p50_us),
            disk_p99_us: mean(Class::Disk, |a| a.p99_us),
            idle_p50_us: mean(Class::Idle, |a| a.p50_us),
            idle_p99_us: mean(Class::Idle, |a| a.p99_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_guest_has_one_part() {
        let servers = SERVERS.iter().map(|(guest, _)| *guest);
        let mut all: Vec<usize> = LOADS.iter().map(|l| l.guest).chain(servers).collect();
        all.sort_unstable();
        assert_eq!(all, (0..GUESTS).collect::<Vec<_>>());
        assert_eq!(disks().iter().filter(|d| **d).count(), 2);
    }

    #[test]
    fn scripts_name_the_peer_and_the_seed() {
        let scripts: Vec<String> = LOADS.iter().map(|l| l.script(Duration::from_secs(3))).collect();
        assert_eq!(
            scripts,
            [
                "agent rr tcp 10.0.0.2 3.00 1",
                "agent tcp-stream 10.0.0.4 3.00",
                "agent disk-read /dev/vda 3.00 4096 4",
                "agent disk-read /dev/vda 3.00 4096 5",
                "agent rr tcp 10.0.0.8 3.00 1 20",
            ]
        );
    }

    #[test]
    fn answers_become_values() {
        let rr = json!({"rate": 100.0, "p50_us": 10.0, "p99_us": 20.0});
        let disk = [
            json!({"rate": 5.0, "p50_us": 1.0, "p99_us": 2.0}),
            json!({"rate": 7.0, "p50_us": 3.0, "p99_us": 6.0}),
        ];
        let stream = json!({"mbit_s": 1500.0});
        let texts = [&rr, &stream, &disk[0], &disk[1], &rr];
        let answers: Vec<Answer> =
            LOADS.iter().zip(texts).map(|(l, t)| l.read(t).unwrap()).collect();
        let v = Values::of(&answers);
        assert_eq!((v.rr_per_s, v.stream_gbit_s, v.disk_per_s), (100.0, 1.5, 12.0));
        assert_eq!((v.disk_p50_us, v.disk_p99_us, v.idle_p99_us), (2.0, 4.0, 20.0));
        for bad in [json!({}), json!({"rate": 0.0, "p50_us": 1.0, "p99_us": 1.0})] {
            assert!(LOADS.iter().all(|l| l.read(&bad).is_err()), "{bad}");
        }
    }
}
