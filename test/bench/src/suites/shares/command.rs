//! Command line of `bench shares`.

use std::sync::atomic::AtomicU32;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::{Programs, short_folder, two_cpus};
use crate::harness::progress::Progress;
use crate::harness::suite::{Origin, Report, Suite};
use crate::harness::table::Section;
use crate::suites::shares::bed::Bed;
use crate::suites::shares::case::{self, Case};
use crate::suites::shares::{self, Round, output, rows};

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

/// Settings of a run.
pub struct Setup {
    cases: Vec<Case>,
    cpus: (usize, usize),
    programs: (std::path::PathBuf, std::path::PathBuf),
}

impl Suite for SharesArgs {
    type Setup = Setup;
    /// Rounds, and the cases that failed.
    type Measured = (Vec<Round>, Vec<String>);
    const HAS_GUESTS: bool = false;

    fn setup(&self) -> Result<Setup, BenchError> {
        let cases = select(&self.cases)?;
        Ok(Setup { cases, cpus: two_cpus(&self.cpus)?, programs: self.programs.both()? })
    }

    fn measure(
        &self,
        setup: &Setup,
        progress: &mut Progress,
    ) -> Result<Self::Measured, BenchError> {
        // Removed when it has measured.
        let (_guard, folder) = short_folder("shares")?;
        let (millrace, front) = setup.programs.clone();
        let next = AtomicU32::new(0);
        let bed = Bed { cpus: setup.cpus, millrace, front, folder, next };
        Ok(shares::run(&bed, &setup.cases, self.rounds, progress))
    }

    fn report(
        &self,
        setup: &Setup,
        (rounds, failed): Self::Measured,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let rows = rows::rows(&setup.cases, &rounds);
        let (results, context) = origin.results(rows, Vec::new(), text(setup.cpus, self.rounds));
        let out = &self.programs.out;
        let written = output::write_all(out, &results, &rounds, &failed, &context)?;
        let losses = output::losses(&results, &rounds, &failed);
        Ok(Report::new(Section::Shares, &results, losses, written, !failed.is_empty()))
    }
}

fn text(cpus: (usize, usize), rounds: u32) -> Vec<String> {
    vec![
        format!(
            "One sidecore on CPU {} that does not sleep; one thread on CPU {} drives all ports over \
             vhost-user. {rounds} rounds of all cases, after one thrown away.",
            cpus.0, cpus.1
        ),
        "Each VM has two network ports on one switch, MAC and IP addresses bound, and a disk in the \
         daemon’s memory; queues of 256; frames of 1,500 bytes, reads of 4 KiB."
            .into(),
        "Bytes are counted by the front end and as they are charged: with the virtio-net header."
            .into(),
    ]
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
