//! The table of events: rows out of rounds, JSON, Markdown.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BACK_ENDS, BackEnd, Counts, LOADS, Load, Sample};
use crate::harness::error::BenchError;
use crate::harness::results::{Machine, write_json};
use crate::harness::stats::{significant, spread};
use crate::harness::table::number;

/// Significant digits of published values.
const DIGITS: i32 = 4;

/// A run: `bench-events.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Machine that it ran on.
    pub machine: Machine,
    /// Commit that was measured.
    pub commit: String,
    /// One row for each load and back end.
    pub rows: Vec<Row>,
}

/// Medians of one load on one back end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The load.
    pub load: Load,
    /// The devices.
    pub back_end: BackEnd,
    /// Rounds that count.
    pub rounds: u32,
    /// Events per request.
    #[serde(flatten)]
    pub counts: Counts,
}

impl Row {
    /// Exits, guest interrupts and wake-ups: what a request costs besides the work itself.
    pub fn sum(&self) -> f64 {
        self.counts.exits + self.counts.guest_interrupts + self.counts.io_wakeups
    }
}

impl Results {
    /// Medians over the rounds; round 0 does not count.
    pub fn new(machine: Machine, commit: String, samples: &[Sample]) -> Results {
        let pairs = LOADS.iter().flat_map(|l| BACK_ENDS.iter().map(|b| (*l, *b)));
        let rows = pairs.filter_map(|(load, back_end)| {
            let of = samples.iter().filter(|s| s.load == load && s.back_end == back_end);
            let counts: Vec<Counts> = of.filter(|s| s.round > 0).map(|s| s.counts).collect();
            let rounds = counts.len() as u32;
            Some(Row { load, back_end, rounds, counts: medians(&counts)? })
        });
        let rows = rows.collect();
        Results { machine, commit, rows }
    }

    /// Reads a result file.
    pub fn read(path: &Path) -> Result<Results, BenchError> {
        let text = std::fs::read(path).map_err(|e| BenchError::file("read", path, e))?;
        serde_json::from_slice(&text)
            .map_err(|source| BenchError::Format { path: path.to_owned(), source })
    }

    /// The table as Markdown, one for each load.
    pub fn markdown(&self) -> String {
        let mut out = String::from(
            "| Per request | Exits | Guest interrupts | Wake-ups of I/O threads | Sum \
             | System calls of I/O threads (and yields) | Copies | Host interrupts \
             | Only under emulation: exits, wake-ups | Requests/s |\n",
        );
        out.push_str(&format!("|{}\n", "---|".repeat(10)));
        for row in &self.rows {
            let c = &row.counts;
            out.push_str(&format!(
                "| {}, {} | {} | {} | {} | **{}** | {} ({}) | {} | {} | {}, {} | {} |\n",
                load_text(row.load),
                back_end_text(row),
                number(c.exits),
                number(c.guest_interrupts),
                number(c.io_wakeups),
                number(row.sum()),
                number(c.io_system_calls),
                number(c.io_yields),
                c.copies,
                number(c.host_interrupts),
                number(c.emulation_exits),
                number(c.emulation_wakeups),
                number(c.requests_per_s),
            ));
        }
        let m = &self.machine;
        out.push_str(&format!(
            "\nMeasured on {}, commit {}; medians of {} rounds.\n",
            m.line(),
            self.commit,
            self.rows.first().map_or(0, |r| r.rounds)
        ));
        out
    }
}

fn load_text(load: Load) -> &'static str {
    match load {
        Load::RoundTrip => "TCP round trip of 1 byte",
        Load::DiskRead => "disk read of 4 KiB",
    }
}

fn back_end_text(row: &Row) -> &'static str {
    match (row.back_end, row.load) {
        (BackEnd::Qemu, Load::RoundTrip) => "QEMU’s virtio-net, TAP, bridge",
        (BackEnd::Qemu, Load::DiskRead) => "QEMU’s virtio-blk, I/O thread",
        (BackEnd::MillraceSleeping, _) => "Millrace, sidecore sleeps",
        (BackEnd::MillraceSpinning, _) => "Millrace, sidecore polls",
    }
}

fn medians(all: &[Counts]) -> Option<Counts> {
    let middle = |of: &dyn Fn(&Counts) -> f64| {
        let median = spread(&all.iter().map(of).collect::<Vec<f64>>())?.median;
        Some(significant(median, DIGITS))
    };
    // One that some round lacks is in none.
    let maybe = |of: &dyn Fn(&Counts) -> Option<f64>| middle(&|c| of(c).unwrap_or(f64::NAN));
    Some(Counts {
        requests_per_s: middle(&|c| c.requests_per_s)?,
        exits: middle(&|c| c.exits)?,
        guest_interrupts: middle(&|c| c.guest_interrupts)?,
        io_wakeups: middle(&|c| c.io_wakeups)?,
        io_system_calls: middle(&|c| c.io_system_calls)?,
        io_yields: middle(&|c| c.io_yields)?,
        host_interrupts: middle(&|c| c.host_interrupts)?,
        copies: middle(&|c| c.copies)?,
        emulation_exits: middle(&|c| c.emulation_exits)?,
        emulation_wakeups: middle(&|c| c.emulation_wakeups)?,
        daemon_kicks: maybe(&|c| c.daemon_kicks),
        daemon_notifications: maybe(&|c| c.daemon_notifications),
    })
}

/// Writes `bench-events.json` and `bench-events-rounds.json` into `folder`, making it if needed.
/// Returns what was written.
pub fn write_all(
    folder: &Path,
    results: &Results,
    samples: &[Sample],
) -> Result<Vec<PathBuf>, BenchError> {
    std::fs::create_dir_all(folder).map_err(|e| BenchError::file("make folder", folder, e))?;
    let (all, rounds) = (folder.join("bench-events.json"), folder.join("bench-events-rounds.json"));
    write_json(results, &all)?;
    write_json(&samples, &rounds)?;
    Ok(vec![all, rounds])
}

#[cfg(test)]
mod tests {
    use lab::Accelerator;

    use super::*;

    fn sample(round: u32, load: Load, back_end: BackEnd, exits: f64) -> Sample {
        let counts = Counts {
            requests_per_s: 1500.0,
            exits,
            guest_interrupts: 2.0,
            io_wakeups: 3.0,
            io_system_calls: 8.0,
            io_yields: 7.0,
            host_interrupts: 5.0,
            copies: load.copies(back_end),
            emulation_exits: 0.0,
            emulation_wakeups: 1.0,
            daemon_kicks: (back_end != BackEnd::Qemu).then_some(exits),
            daemon_notifications: None,
        };
        Sample { round, load, back_end, counts }
    }

    fn results() -> (Results, Vec<Sample>) {
        let machine = Machine {
            cpu: "c".into(),
            cores: 2,
            kernel: "k".into(),
            guests: Some(Accelerator::Kvm),
        };
        let mut samples = Vec::new();
        for (round, exits) in [(0, 99.0), (1, 4.0), (2, 2.0), (3, 3.0)] {
            samples.push(sample(round, Load::RoundTrip, BackEnd::Qemu, exits));
            samples.push(sample(round, Load::RoundTrip, BackEnd::MillraceSpinning, 0.0));
        }
        (Results::new(machine, "0123".into(), &samples), samples)
    }

    #[test]
    fn rows_are_medians_without_the_first_round() {
        let (results, _) = results();
        assert_eq!(results.rows.len(), 2);
        let row = &results.rows[0];
        assert_eq!((row.rounds, row.counts.exits, row.sum()), (3, 3.0, 8.0));
        assert_eq!(row.counts.daemon_kicks, None);
        assert_eq!(results.rows[1].counts.daemon_kicks, Some(0.0));
    }

    #[test]
    fn the_table_has_a_line_for_each_row() {
        let text = results().0.markdown();
        let line = "| TCP round trip of 1 byte, QEMU’s virtio-net, TAP, bridge | 3.00 | 2.00 \
                    | 3.00 | **8.00** | 8.00 (7.00) | 6 | 5.00 | 0.00, 1.00 | 1,500 |\n";
        assert!(text.contains(line), "{text}");
        let columns: Vec<usize> = text
            .lines()
            .take_while(|l| l.starts_with('|'))
            .map(|l| l.matches('|').count())
            .collect();
        assert_eq!(columns, [11, 11, 11, 11]);
    }

    #[test]
    fn what_was_written_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let (results, samples) = results();
        let written = write_all(&dir.path().join("deep"), &results, &samples).unwrap();
        assert_eq!(Results::read(&written[0]).unwrap(), results);
        let rounds: Vec<Sample> =
            serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
        assert_eq!(rounds, samples);
    }
}
