//! Counters of the guests' modules and network stacks, to see which way packets went.

use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;

/// Prints all of them. Modules that are not loaded have no files.
pub const SCRIPT: &str = "cat /sys/kernel/debug/millrace_net /sys/kernel/debug/millrace/channel \
     /proc/net/netstat 2> /dev/null || true";

/// Counters of one guest, or the sum of both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Packets that the channel took.
    pub taken: u64,
    /// Packets to members that were left alone because no destination was confirmed, or taking was
    /// turned off.
    pub not_confirmed: u64,
    /// Messages whose pages were passed by reference.
    pub referred: u64,
    /// Microseconds that idle CPUs polled the rings.
    pub polled_us: u64,
    /// Packets that sockets found by polling.
    pub busy_packets: u64,
}

impl Counters {
    /// Reads the output of [`SCRIPT`]. Modules that are not loaded have counted nothing.
    pub fn parse(text: &str) -> Counters {
        Counters {
            taken: sum(text, "taken", "taken"),
            not_confirmed: sum(text, "not_confirmed", "not_confirmed"),
            referred: sum(text, "queue", "referred"),
            polled_us: sum(text, "vector", "polled_us"),
            busy_packets: netstat(text, "BusyPollRxPackets").unwrap_or(0),
        }
    }

    /// Growth since `earlier`.
    pub fn since(&self, earlier: &Counters) -> Counters {
        let grown = |get: fn(&Counters) -> u64| get(self).saturating_sub(get(earlier));
        Counters {
            taken: grown(|c| c.taken),
            not_confirmed: grown(|c| c.not_confirmed),
            referred: grown(|c| c.referred),
            polled_us: grown(|c| c.polled_us),
            busy_packets: grown(|c| c.busy_packets),
        }
    }

    /// Two guests together.
    pub fn and(&self, other: &Counters) -> Counters {
        Counters {
            taken: self.taken + other.taken,
            not_confirmed: self.not_confirmed + other.not_confirmed,
            referred: self.referred + other.referred,
            polled_us: self.polled_us + other.polled_us,
            busy_packets: self.busy_packets + other.busy_packets,
        }
    }
}

/// The number after a word, summed over all lines that begin with another.
pub fn sum(text: &str, line: &str, word: &str) -> u64 {
    let lines = text.lines().filter(|l| l.split_whitespace().next() == Some(line));
    let number = |l: &str| {
        let mut words = l.split_whitespace();
        words.find(|w| *w == word)?;
        words.next()?.parse::<u64>().ok()
    };
    lines.filter_map(number).sum()
}

/// A counter of `/proc/net/netstat`: a line of names and one of numbers for each protocol.
fn netstat(text: &str, name: &str) -> Option<u64> {
    let lines: Vec<&str> = text.lines().filter(|l| l.starts_with("TcpExt:")).collect();
    let [names, numbers] = lines[..] else { return None };
    let at = names.split_whitespace().position(|n| n == name)?;
    numbers.split_whitespace().nth(at)?.parse().ok()
}

/// Whether packets went as they should: at least nine in ten of those `expected` onto the channel,
/// or none at all.
pub fn check(counted: &Counters, is_channel: bool, expected: u64) -> Result<(), BenchError> {
    let wrong = |why: String| Err(BenchError::lab("the load went the wrong way", why));
    match is_channel {
        true if counted.taken == 0 || counted.taken * 10 < expected * 9 => {
            wrong(format!("the channel took {} packets of at least {expected}", counted.taken))
        }
        false if counted.taken > 0 => wrong(format!("the channel took {} packets", counted.taken)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "taken 120\nheld 3\nnot_confirmed 7\n\
        destination ::ffff:10.0.1.2 member 2 way channel failures 0 held 0\n\
        vector 0 interrupts 5 polls 9 poll_hits 1 poll_misses 2 polled_us 40\n\
        vector 1 interrupts 5 polls 9 poll_hits 1 poll_misses 2 polled_us 2\n\
        queue 0 peer 2 sent 100 sent_bytes 9 referred 4 referred_bytes 8 received 1\n\
        queue 1 peer 2 sent 20 sent_bytes 9 referred 6 referred_bytes 8 received 1\n\
        TcpExt: SyncookiesSent BusyPollRxPackets\nTcpExt: 0 11\nIpExt: InNoRoutes\nIpExt: 0\n";

    #[test]
    fn lines_are_summed_and_words_are_told_apart() {
        let c = Counters::parse(TEXT);
        let all = (c.taken, c.not_confirmed, c.referred, c.polled_us, c.busy_packets);
        assert_eq!(all, (120, 7, 10, 42, 11));
        assert_eq!(Counters::parse(""), Counters::default());
        let more = c.and(&c);
        assert_eq!(more.since(&c), c);
        // A module that was loaded anew begins at 0.
        assert_eq!(Counters::default().since(&c), Counters::default());
    }

    #[test]
    fn a_load_that_went_the_wrong_way_is_an_error() {
        let taken = |taken| Counters { taken, ..Counters::default() };
        assert!(check(&taken(900), true, 1000).is_ok());
        let text = check(&taken(899), true, 1000).unwrap_err().to_string();
        assert!(text.ends_with("took 899 packets of at least 1000"), "{text}");
        assert!(check(&taken(0), true, 0).is_err());
        assert!(check(&taken(0), false, 1000).is_ok());
        assert!(check(&taken(1), false, 1000).is_err());
    }
}
