//! Rows in the published format: medians over the rounds.

use super::servers;
use super::{Cache, FileLoad, Measured, Mode, Server, ServerLoad, Setup};
use crate::harness::output::RowSource;
use crate::harness::paired::{About, Goal, NONE, row};
use crate::harness::repeat::Failure;
use crate::harness::results::Row;
use crate::harness::stats::Better;
use crate::harness::table::size_text;

/// Floor and aim where three neighbours are busy.
const SHARED: Goal = Goal { target: Some(3.0), aim: Some(4.0) };
/// Floor where the VM has its CPU for itself: no slower.
const ALONE: Goal = Goal { target: Some(1.0), aim: None };
/// The same of a server. Below the shim's threshold both do the same, and rounds of the same server
/// differ by a few hundredths: within 5 % is no slower.
const SERVER_ALONE: Goal = Goal { target: Some(0.95), aim: Some(1.0) };
/// Aim of the comparison with the reference: within 10 % of it.
const REFERENCE: Goal = Goal { target: None, aim: Some(0.9) };
/// CPU time: 40 % less, better half.
const CPU: Goal = Goal { target: Some(1.6667), aim: Some(2.0) };
/// Neighbours of the paper's figures from which the floors come.
const SHARED_BUSY: usize = 3;
/// From this size on nothing may be slower than before.
const NO_SLOWER_BYTES: u64 = 64 << 10;
/// The largest file of the paper's figure 5, whose improvement the floor is.
const LARGEST_BYTES: u64 = 64 << 20;

impl RowSource<Setup> for Measured {
    fn rows(&self, setup: &Setup) -> Vec<Row> {
        let mut rows = Vec::new();
        for cpu in [false, true] {
            for cache in Cache::ALL {
                for &busy in &setup.busy {
                    for peer in [Mode::Sendfile, Mode::ReadWrite, Mode::HostSendfile] {
                        // The reference has no guest, and so no CPU time to save.
                        if !(cpu && peer == Mode::HostSendfile) {
                            rows.extend(file_row(setup, self, (cpu, cache, busy), peer));
                        }
                    }
                }
            }
        }
        for &server in &setup.servers {
            for &busy in &setup.servers_busy {
                for &size_bytes in &setup.sizes_bytes {
                    rows.extend(server_row(setup, self, (server, size_bytes, busy)));
                }
            }
        }
        rows
    }

    fn failed(&self) -> &[Failure] {
        &self.failed
    }
}

fn file_row(
    setup: &Setup,
    measured: &Measured,
    (cpu, cache, busy): (bool, Cache, usize),
    peer: Mode,
) -> Option<Row> {
    let find = |round, mode| {
        let wanted =
            |l: &&FileLoad| (l.round, l.busy, l.cache, l.mode) == (round, busy, cache, mode);
        let sample = measured.files.iter().find(wanted)?.sample;
        let total = sample.cpu.total();
        // A row of CPU time is its own CPU time per operation.
        Some(if cpu { (total, None) } else { (sample.mb_per_s, Some(total)) })
    };
    let goal = match (cpu, peer, cache, busy) {
        (_, Mode::HostSendfile, ..) => REFERENCE,
        (true, Mode::Sendfile, Cache::Cold, 0 | SHARED_BUSY) => CPU,
        (false, Mode::Sendfile, Cache::Cold, 0) => ALONE,
        (false, Mode::Sendfile, Cache::Cold, SHARED_BUSY) => SHARED,
        _ => NONE,
    };
    let kind = if cpu { "cpu" } else { "file" };
    let (unit, better) = if cpu { ("µs/MB", Better::Lower) } else { ("MB/s", Better::Higher) };
    let what = if cpu { "CPU time of QEMU, daemon and kernel threads; " } else { "" };
    let about = About {
        case: format!("{kind}_{}_{busy}", cache.name()),
        ours: Mode::Pipe.name(),
        peer: peer.name(),
        unit,
        better,
        goal,
        mode: format!(
            "{what}{} MiB, guest’s cache {}, {}",
            setup.file_bytes >> 20,
            cache.name(),
            neighbours(busy)
        ),
    };
    row(about, setup.rounds, |round| Some((find(round, Mode::Pipe)?, find(round, peer)?)))
}

fn server_row(
    setup: &Setup,
    measured: &Measured,
    (server, size_bytes, busy): (Server, u64, usize),
) -> Option<Row> {
    let find = |round, shim| {
        let wanted = |l: &&ServerLoad| {
            (l.round, l.busy, l.server) == (round, busy, server)
                && (l.size_bytes, l.shim) == (size_bytes, shim)
        };
        let load = measured.servers.iter().find(wanted)?;
        let cpu = load.sample.cpu.total() * size_bytes as f64 / 1e6;
        Some((load.requests_per_s, Some(cpu)))
    };
    let goal = match busy {
        0 if size_bytes >= NO_SLOWER_BYTES => SERVER_ALONE,
        SHARED_BUSY if size_bytes >= LARGEST_BYTES => SHARED,
        _ => NONE,
    };
    let about = About {
        case: servers::case(server, size_bytes, busy),
        ours: Mode::Pipe.name(),
        peer: servers::side(false),
        unit: "1/s",
        better: Better::Higher,
        goal,
        mode: format!(
            "{} a file, {} connections, {}",
            size_text(size_bytes),
            setup.connections,
            neighbours(busy)
        ),
    };
    row(about, setup.rounds, |round| Some((find(round, true)?, find(round, false)?)))
}

fn neighbours(busy: usize) -> String {
    match busy {
        1 => "1 busy neighbour".into(),
        n => format!("{n} busy neighbours"),
    }
}

#[cfg(test)]
mod tests;
