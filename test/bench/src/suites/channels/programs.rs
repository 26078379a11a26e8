//! Real programs, as Debian has them, between the guests: the server's in one, the client's in the
//! other. They know nothing of channels; only the address differs, or what the modules are told.

use std::time::Duration;

use lab::Guest;

use super::bed::{Bed, failed_script, sh};
use super::route::Route;
use super::{Measured, ProgramLoad, Setup, counters, with_repeat};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::runner::GRACE;
use crate::harness::runner::{Window, metered};

pub mod jobs;

pub use jobs::{Answer, Job, Program};

/// Ways that programs are measured over: the channel as it is shipped, without polling, and the
/// peer; by the loopback, with the client in the server's guest, they cost what they cost without
/// any way between guests.
pub const WAYS: [Route; 4] =
    [Route::ChannelPoll, Route::TapBridge, Route::Channel, Route::Loopback];
/// From the start of a client until CPU time counts.
const SETTLE: Duration = Duration::from_millis(300);
/// Time for a server to listen: an emulated guest reads its libraries first.
const LISTEN: Duration = Duration::from_secs(60);
/// Packets of the shortest load.
const LEAST_PACKETS: u64 = 100;

/// Everything once.
pub fn round(
    bed: &Bed,
    setup: &Setup,
    (round, ways): (u32, &[Route]),
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<(), BenchError> {
    for program in &setup.programs {
        if round == 0 {
            start(bed, *program, measured, progress);
        }
        if measured.failed.iter().any(|f| !f.repeated && f.name == program.name()) {
            continue;
        }
        for job in program.jobs() {
            let mut told = Vec::new();
            for way in order_for_round(ways, round) {
                let load = || run(bed, job, way, setup.length);
                let name = (job.case, way.name());
                let done = with_repeat(name, round, measured, progress, load);
                let Some((answer, cpu_us_per_op, foreign)) = done else { continue };
                told.push(format!("{} {:.0}", way.name(), answer.value));
                let (case, value, latency_us) =
                    (job.case.to_owned(), answer.value, answer.latency_us);
                let load =
                    ProgramLoad { round, case, way, value, latency_us, cpu_us_per_op, foreign };
                measured.programs.push(load);
            }
            progress.step(&format!("{} ({}): {}", job.case, job.unit, told.join(", ")));
        }
    }
    Ok(())
}

/// Starts the server. One that does not start is noted under the program's name.
fn start(bed: &Bed, program: Program, measured: &mut Measured, progress: &mut Progress) {
    progress.step(&format!("starting {}", program.name()));
    let [client, server] = bed.guests();
    let begin = || -> Result<(), BenchError> {
        let plan = jobs::plan(program);
        sh(server, plan.server)?;
        if let Some((daemon, says)) = plan.daemon {
            spawn(server, daemon, says)?;
        }
        sh(client, plan.client)?;
        sh(server, plan.client).map(|_| ())
    };
    let case = program.jobs().first().map_or(program.name(), |job| job.case);
    with_repeat((case, program.name()), 0, measured, progress, begin);
}

/// Starts a command that goes on, and waits until it says something.
fn spawn(guest: &Guest, script: &str, says: &str) -> Result<(), BenchError> {
    let failed = |e| BenchError::lab(format!("{script} on {}", guest.name()), e);
    let mut running = guest.spawn(script).map_err(failed)?;
    // Dropping it afterwards leaves the command running.
    running.wait_line(says, LISTEN).map_err(failed)?;
    Ok(())
}

fn run(
    bed: &Bed,
    job: &Job,
    way: Route,
    length: Duration,
) -> Result<(Answer, f64, f64), BenchError> {
    let before = bed.take(way)?;
    let script = (job.script)(way.server(), (SETTLE + length).as_secs_f64());
    let [client, server] = bed.guests();
    let (client, accounts) = match way {
        Route::Loopback => (server, bed.accounts(Route::TapBridge)),
        _ => (client, bed.accounts(way)),
    };
    let load = || {
        let done = client.run_for(&script, SETTLE + length * 4 + GRACE);
        done.and_then(lab::Output::ok).map_err(|e| failed_script(&script, client, &e))
    };
    let (text, usage) = metered(Window { settle: SETTLE, length }, &accounts, load)?;
    let after = bed.counters()?;
    for (after, before) in after.iter().zip(&before) {
        counters::check(&after.since(before), way.is_channel(), LEAST_PACKETS)?;
    }
    let answer = (job.read)(&text).filter(|answer| answer.value > 0.0);
    let answer = answer.ok_or_else(|| BenchError::lab(&script, format!("it answered {text}")))?;
    Ok((answer, usage.side * 1e6 / answer.value, usage.foreign))
}
