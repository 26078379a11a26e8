//! The command lines of `bench shares` and `bench idle`.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use clap::Args;

use super::peers::two_cpus;
use super::{EXIT_MISSED, seconds};
use crate::daemon::beside_us;
use crate::demo::disk::Folder;
use crate::error::BenchError;
use crate::progress::Progress;
use crate::report::Context;
use crate::results::Results;
use crate::shares::case::{self, Case};
use crate::shares::world::World;
use crate::shares::{self, output, rows};
use crate::{idle, machine, table};

#[derive(Args)]
pub struct SharesArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Only these cases, each by name or the start of it (weights, victim_net).
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// CPUs of the sidecore and of the front end.
    #[arg(long, value_delimiter = ',', num_args = 1.., default_values_t = [0, 1])]
    cpus: Vec<usize>,
    #[command(flatten)]
    programs: Programs,
}

#[derive(Args)]
pub struct IdleArgs {
    /// Ports, half of them network ports, half disks.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=1024))]
    ports: u32,
    /// Seconds over which CPU time is counted (0.2 to 60).
    #[arg(long, default_value = "5", value_parser = seconds)]
    secs: Duration,
    /// How often ports are attached and detached.
    #[arg(long, default_value_t = 1000)]
    times: u32,
    /// CPU of the sidecore.
    #[arg(long, default_value_t = 0)]
    cpu: usize,
    #[command(flatten)]
    programs: Programs,
}

#[derive(Args)]
struct Programs {
    /// Folder for results, plots and the report.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
    /// The front end; beside this program when left out.
    #[arg(long)]
    front: Option<PathBuf>,
}

impl Programs {
    fn both(&self) -> Result<(PathBuf, PathBuf), BenchError> {
        let find = |given: &Option<PathBuf>, name| {
            let path = given.clone().map_or_else(|| beside_us(name), Ok)?;
            let path =
                std::path::absolute(&path).map_err(|e| BenchError::file("find", &path, e))?;
            match path.is_file() {
                true => Ok(path),
                false => Err(BenchError::lab(
                    "find what is measured",
                    format!("there is no {}; build it, or name it", path.display()),
                )),
            }
        };
        Ok((find(&self.millrace, "millrace")?, find(&self.front, "frontend")?))
    }
}

/// A folder with a short name: Unix socket paths hold 107 bytes.
fn short_folder(what: &str) -> Result<(Folder, PathBuf), BenchError> {
    let path = std::env::temp_dir().join(format!("millrace-{what}-{}", std::process::id()));
    Ok((Folder::new(&path)?, path))
}

/// Cases by name or the start of it; all when none is named.
fn select(wanted: &[String]) -> Result<Vec<Case>, BenchError> {
    let all = case::all();
    let names: Vec<String> = all.iter().map(Case::name).collect();
    if let Some(name) = wanted.iter().find(|w| !names.iter().any(|n| n.starts_with(*w))) {
        return Err(BenchError::UnknownCase { name: name.clone(), known: names.join(", ") });
    }
    let chosen = |c: &Case| wanted.is_empty() || wanted.iter().any(|w| c.name().starts_with(w));
    Ok(all.into_iter().filter(chosen).collect())
}

/// Runs `bench shares`; returns the exit code.
pub fn run(args: &SharesArgs) -> Result<u8, BenchError> {
    let cases = select(&args.cases)?;
    let cpus = two_cpus(&args.cpus)?;
    let (millrace, front) = args.programs.both()?;
    let commit = machine::commit(Path::new("."));
    let mut progress = Progress::stderr();
    let (guard, folder) = short_folder("shares")?;
    let world = World { cpus, millrace, front, folder, next: AtomicU32::new(0) };
    let (rounds, failed) = shares::run(&world, &cases, args.rounds, &mut progress);
    drop(guard);
    let rows = rows::rows(&cases, &rounds);
    let results = Results { machine: machine::machine(), commit, rows, missing: Vec::new() };
    let setup = vec![
        format!(
            "One sidecore on CPU {} that does not sleep; one thread on CPU {} drives all ports over \
             vhost-user. {} rounds of all cases, after one thrown away.",
            cpus.0, cpus.1, args.rounds
        ),
        "Each VM has two network ports on one switch, MAC and IP addresses bound, and a disk in the \
         daemon’s memory; queues of 256; frames of 1,500 bytes, reads of 4 KiB."
            .into(),
        "Bytes are counted by the front end and as they are charged: with the virtio-net header."
            .into(),
    ];
    let context = Context { setup, took_s: progress.elapsed().as_secs_f64() };
    let out = &args.programs.out;
    let written = output::write_all(out, &results, &rounds, &failed, &context)?;
    println!("\n{}", table::terminal(table::Section::Shares, &results));
    for line in output::losses(&results, &rounds, &failed) {
        progress.step(&line);
    }
    for path in written {
        progress.step(&format!("wrote {}", path.display()));
    }
    let missed = results.rows.iter().any(|r| r.missed());
    Ok(if !failed.is_empty() {
        1
    } else if missed {
        EXIT_MISSED
    } else {
        0
    })
}

/// Runs `bench idle`; returns the exit code.
pub fn idle(args: &IdleArgs) -> Result<u8, BenchError> {
    let (millrace, front) = args.programs.both()?;
    let commit = machine::commit(Path::new("."));
    let mut progress = Progress::stderr();
    let (guard, folder) = short_folder("idle")?;
    let setup = idle::Setup {
        ports: args.ports,
        length: args.secs,
        times: args.times,
        cpu: args.cpu,
        millrace,
        front,
        folder,
    };
    let rows = idle::run(&setup, &mut progress);
    drop(guard);
    let results = Results { machine: machine::machine(), commit, rows: rows?, missing: Vec::new() };
    let out = &args.programs.out;
    std::fs::create_dir_all(out).map_err(|e| BenchError::file("make folder", out, e))?;
    results.write(&idle::path(out))?;
    println!("\n{}", table::terminal(table::Section::Idle, &results));
    progress.step(&format!("wrote {}", idle::path(out).display()));
    let missed = results.rows.iter().any(|r| r.missed());
    Ok(if missed { EXIT_MISSED } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_chosen_by_the_start_of_their_name() {
        let chosen = |list: &[&str]| {
            let wanted: Vec<String> = list.iter().map(|w| w.to_string()).collect();
            Ok::<_, BenchError>(select(&wanted)?.iter().map(Case::name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&[]).unwrap().len(), case::all().len());
        assert_eq!(chosen(&["weights_n", "floor"]).unwrap(), ["weights_net", "floor"]);
        assert!(chosen(&["wieghts"]).unwrap_err().to_string().contains("named wieghts"));
    }
}
