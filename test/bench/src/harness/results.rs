//! The published result format: one file per run, one row per case.
//!
//! Source: the design, section 8. Two runs, or two peers, can be compared by a program, so fields
//! are only ever added, never renamed. `test/bench/schema/results.schema.json` says the same in
//! JSON Schema.

use std::path::Path;

use lab::Accelerator;
use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::stats::Better;

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Machine that it ran on.
    pub machine: Machine,
    /// Commit that was measured, with `-dirty` when the tree had changes.
    pub commit: String,
    /// One row per case.
    pub rows: Vec<Row>,
    /// Comparisons without a row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
}

/// A comparison that could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Case name.
    pub case: String,
    /// Name of the implementation that was not measured.
    pub name: String,
    /// Why: `not installed`, or what it said.
    pub why: String,
}

/// The machine of a run. Absolute values are only comparable on the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model.
    pub cpu: String,
    /// CPUs that the run could use.
    pub cores: u32,
    /// Kernel release.
    pub kernel: String,
    /// Accelerator of the guests; left out where there were none, and by runs from before it was
    /// told, whose guests were emulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guests: Option<Accelerator>,
}

impl Machine {
    /// One line on it, for people: CPU, cores, kernel, and how the guests ran.
    pub fn line(&self) -> String {
        let guests = self.guests.map_or(String::new(), |by| format!(", {}", by.phrase()));
        format!("{}, {} cores, Linux {}{guests}", self.cpu, self.cores, self.kernel)
    }
}

/// One case, both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Case name, for example `tcp_rr`.
    pub case: String,
    /// Millrace.
    pub ours: Measured,
    /// Measured value of the peer that it is compared with.
    pub peer: Measured,
    /// Direction of `value`.
    pub better: Better,
    /// Median of the rounds' own ratios, turned so that above 1 is better for us.
    pub ratio: f64,
    /// Smallest ratio of a round.
    pub ratio_min: f64,
    /// Largest ratio of a round.
    pub ratio_max: f64,
    /// Bounds within which the median lies with 95 %, by the rounds' ratios; left out where that
    /// was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_interval: Option<(f64, f64)>,
    /// Rounds counted (the first, thrown away, is not among them).
    pub rounds: u32,
    /// Host CPU per operation; left out when it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cpu_us_per_op: Option<CpuPerOp>,
    /// Floor that `ratio` must reach; left out where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
    /// Ratio that is aimed at; left out where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<f64>,
    /// Front end that loaded both sides, where it is not the comparison's own: `virtio-user`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front: Option<String>,
    /// How both sides were set up, for example cache mode and queue depth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
}

/// A side's median.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Name of the implementation: `switch`, `tap-bridge`, `qemu-virtio-blk`, …
    pub name: String,
    /// Median over the rounds.
    pub value: f64,
    /// Unit of `value`, for example `1/s`.
    pub unit: String,
}

/// Host CPU time per operation in microseconds, medians over the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CpuPerOp {
    /// Millrace's side: its QEMU processes and the daemon.
    pub ours: f64,
    /// The peer's side.
    pub peer: f64,
}

/// Stand of a case against its peer, by the interval of its ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    /// The whole interval is above 1.
    Ahead,
    /// The interval holds 1: these rounds show no difference.
    Level,
    /// The whole interval is below 1.
    Behind,
}

impl Stand {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Stand::Ahead => "ahead",
            Stand::Level => "level",
            Stand::Behind => "behind",
        }
    }
}

impl Row {
    /// Whether the floor was missed: where there is an interval, by the whole of it. A row without
    /// a floor cannot miss it.
    pub fn missed(&self) -> bool {
        let most = self.ratio_interval.map_or(self.ratio, |(_, high)| high);
        self.target.is_some_and(|t| most < t)
    }

    /// Stand against the peer; none without an interval.
    pub fn stand(&self) -> Option<Stand> {
        self.ratio_interval.map(|(low, high)| match (low > 1.0, high < 1.0) {
            (true, _) => Stand::Ahead,
            (_, true) => Stand::Behind,
            _ => Stand::Level,
        })
    }

    /// Whether it is shown as bad: below its floor, or behind a peer that it is to be ahead of, or
    /// near, as its aim says. A row with a floor and no aim has nobody to be ahead of, such as one
    /// whose ratio is at most 1: there the floor alone decides. Where there is an interval, that
    /// says who is behind.
    pub fn is_behind(&self) -> bool {
        if let Some(stand) = self.stand() {
            return self.missed() || stand == Stand::Behind;
        }
        let ahead_of_peer = self.aim.is_some() || self.target.is_none();
        self.missed() || ahead_of_peer && self.ratio < self.aim.unwrap_or(1.0).min(1.0)
    }

    /// The case, and in brackets the front end where it is not the comparison's own.
    pub fn title(&self) -> String {
        match &self.front {
            Some(front) => format!("{} ({front})", self.case),
            None => self.case.clone(),
        }
    }

    /// Peer's CPU per operation over ours: above 1, we need less.
    pub fn cpu_ratio(&self) -> Option<f64> {
        self.host_cpu_us_per_op.filter(|c| c.ours > 0.0).map(|c| c.peer / c.ours)
    }
}

impl Results {
    /// Number of floors that were reached, and of all floors.
    pub fn floors(&self) -> (usize, usize) {
        let floors = self.rows.iter().filter(|r| r.target.is_some()).count();
        let missed = self.rows.iter().filter(|r| r.missed()).count();
        (floors - missed, floors)
    }

    /// Whether some row has the interval of its ratio.
    pub fn has_intervals(&self) -> bool {
        self.rows.iter().any(|r| r.ratio_interval.is_some())
    }

    /// Number of rows with this stand against their peers.
    pub fn count(&self, stand: Stand) -> usize {
        self.rows.iter().filter(|r| r.stand() == Some(stand)).count()
    }

    /// Reads a result file.
    pub fn read(path: &Path) -> Result<Results, BenchError> {
        let text = std::fs::read(path).map_err(|e| BenchError::file("read", path, e))?;
        serde_json::from_slice(&text)
            .map_err(|source| BenchError::Format { path: path.to_owned(), source })
    }

    /// Writes a result file, one field per line, so that it can be compared with `diff`.
    pub fn write(&self, path: &Path) -> Result<(), BenchError> {
        write_json(self, path)
    }
}

/// Writes any value as indented JSON with a newline at the end.
pub fn write_json<T: Serialize>(value: &T, path: &Path) -> Result<(), BenchError> {
    let mut text = serde_json::to_vec_pretty(value)
        .map_err(|source| BenchError::Format { path: path.to_owned(), source })?;
    text.push(b'\n');
    std::fs::write(path, text).map_err(|e| BenchError::file("write", path, e))
}

#[cfg(test)]
mod tests;
