//! Cost of a pause between two empty polls, added to a request's time: the same requests to a
//! sidecore that polls on, with `pause = "auto"` and with `"spin"`, in turns.
//!
//! Requests come one at a time and far enough apart that the sidecore is past the rounds which it
//! polls at full speed. Without WAITPKG both settings are the same, and rows say so: their ratio is
//! noise.

use std::hint::spin_loop;
use std::path::Path;
use std::time::{Duration, Instant};

use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::error::FrontendError;
use frontend::ring::RingShape;

use super::{Setup, row};
use crate::harness::daemon::{self, POLLS_ON_US};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::results::Row;
use crate::harness::stats::{Spread, spread};

/// Each once in a round, first one then the other.
const PAUSES: [&str; 2] = ["auto", "spin"];
/// Rounds that count; one more is thrown away.
const ROUNDS: usize = 5;
/// Requests of a turn: enough for a 99th percentile, 0.5 s or so.
const REQUESTS: usize = 10_000;
/// Between two requests: more than 64 empty rounds of a slow sidecore, less than its 10 ms to a
/// sleep.
const REST: Duration = Duration::from_micros(20);

/// A turn's median and 99th percentile, µs.
type Times = [f64; 2];

/// A row for each percentile; none where the front end has no CPU of its own.
pub fn rows(setup: &Setup, progress: &mut Progress) -> Result<Vec<Row>, BenchError> {
    let cpus = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
    let Some(&front_cpu) = cpus.iter().find(|cpu| **cpu != setup.cpu) else {
        progress.step("pauses are not compared: that takes two CPUs");
        return Ok(Vec::new());
    };
    progress.step(&format!("requests {REST:?} apart, with and without tpause"));
    let mut rounds = Vec::new();
    for round in 0..=ROUNDS {
        let mut both = [Times::default(); 2];
        for turn in 0..PAUSES.len() {
            let which = (round + turn) % PAUSES.len();
            let folder = setup.folder.join(format!("{}{round}", PAUSES[which]));
            both[which] = turn_of(setup, PAUSES[which], &folder, front_cpu)?;
        }
        rounds.push(both);
    }
    Ok(compared(&rounds[1..], base::cpu::has_waitpkg()))
}

fn config_text(setup: &Setup, pause: &str, folder: &Path) -> String {
    daemon::head(folder, setup.cpu, Some(POLLS_ON_US))
        + &format!(
            "spin = \"fixed\"\npause = \"{pause}\"\n[[vm]]\nname = \"v\"\n\
             [[vm.disk]]\nname = \"d\"\nformat = \"null\"\nsize = \"1GiB\"\n"
        )
}

fn turn_of(
    setup: &Setup,
    pause: &str,
    folder: &Path,
    front_cpu: usize,
) -> Result<Times, BenchError> {
    std::fs::create_dir_all(folder).map_err(|e| BenchError::file("make folder", folder, e))?;
    let (config, socket) = (config_text(setup, pause, folder), folder.join("v-d.sock"));
    let mut daemon = daemon::start(&setup.millrace, &config, folder, &[&socket])?;
    // A thread of its own, since it stays on its CPU.
    let drive = || {
        base::cpu::pin_current_thread(front_cpu).map_err(|e| BenchError::lab("pin a thread", e))?;
        times(&socket).map_err(|e| BenchError::lab("requests one at a time", e))
    };
    let times = std::thread::scope(|scope| scope.spawn(drive).join());
    daemon.alive()?;
    times.map_err(|_| BenchError::lab("requests one at a time", "the thread panicked"))?
}

fn times(socket: &Path) -> Result<Times, FrontendError> {
    let (packed, in_order, event_idx, indirect) = (false, false, false, false);
    let shape = RingShape { size: 64, packed, in_order, event_idx, indirect };
    let (op, depth, block_bytes) = (Op::Read, 1, 4096);
    let (verify, wait, huge, seed) = (false, false, false, 7);
    let run = DiskRun { op, shape, block_bytes, depth, verify, wait, huge, seed };
    let mut disk = DiskLoad::start(Reach::Dial(socket), run)?;
    let mut all_us = Vec::with_capacity(REQUESTS);
    for _ in 0..REQUESTS {
        let since = Instant::now();
        while since.elapsed() < REST {
            spin_loop();
        }
        // A run that is over at once is one request.
        all_us.push(disk.run(0)?.max_ns as f64 / 1e3);
    }
    disk.stop()?;
    all_us.sort_by(f64::total_cmp);
    Ok([all_us[REQUESTS / 2], all_us[REQUESTS * 99 / 100]])
}

/// Rows of rounds, each with what [`PAUSES`] took.
fn compared(rounds: &[[Times; 2]], waitpkg: bool) -> Vec<Row> {
    let what = if waitpkg { "auto is tpause" } else { "no WAITPKG: auto is spin, too" };
    let how = format!("disk requests {} µs apart, sidecore polls on; {what}", REST.as_micros());
    let of = |get: &dyn Fn(&[Times; 2]) -> f64| -> Option<Spread> {
        spread(&rounds.iter().map(get).collect::<Vec<_>>())
    };
    let one = |(at, case): (usize, &str)| -> Option<Row> {
        let (auto, spin) = (of(&|r| r[0][at])?, of(&|r| r[1][at])?);
        let ratio = of(&|r| r[1][at] / r[0][at])?;
        let row = row(case, "µs", (auto.median, spin.median), "pause = spin", ratio.median);
        let (ratio_min, ratio_max) = (ratio.min, ratio.max);
        let (rounds, mode) = (rounds.len() as u32, Some(how.clone()));
        Some(Row { ratio_min, ratio_max, rounds, mode, ..row })
    };
    ["pause_p50", "pause_p99"].into_iter().enumerate().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_ratio_is_that_of_each_round_and_the_row_says_what_auto_was() {
        let round = |auto, spin| [[auto, 2.0 * auto], [spin, 2.0 * spin]];
        let rounds = [round(2.0, 1.0), round(4.0, 3.0), round(10.0, 1.0)];
        let rows = compared(&rounds, true);
        let names: Vec<&str> = rows.iter().map(|r| r.case.as_str()).collect();
        assert_eq!(names, ["pause_p50", "pause_p99"]);
        let p50 = &rows[0];
        assert_eq!((p50.ours.value, p50.peer.value, p50.ratio), (4.0, 1.0, 0.5));
        assert_eq!((p50.ratio_min, p50.ratio_max, p50.rounds, p50.target), (0.1, 0.75, 3, None));
        assert!(p50.mode.as_ref().unwrap().ends_with("auto is tpause"));
        let without = compared(&rounds, false).remove(0).mode.unwrap();
        assert!(without.contains("no WAITPKG"), "{without}");
    }

    #[test]
    fn the_daemon_takes_both_configs() {
        let (millrace, front, folder) = (PathBuf::new(), PathBuf::new(), PathBuf::from("/t"));
        let (ports, length, times, cpu) = (2, Duration::ZERO, 0, 0);
        let setup = Setup { ports, length, times, cpu, millrace, front, folder };
        for pause in PAUSES {
            let text = config_text(&setup, pause, &setup.folder);
            config::parse(Path::new("m.toml"), &text).unwrap();
        }
    }
}
