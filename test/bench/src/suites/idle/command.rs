//! Command line of `bench idle`.

use std::time::Duration;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::folder::Folder;
use crate::harness::options::{Programs, seconds, short_folder};
use crate::harness::progress::Progress;
use crate::harness::results::Row;
use crate::harness::suite::{Origin, Report, Suite};
use crate::harness::table::Section;
use crate::suites::idle::{self, Setup};

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

impl Suite for IdleArgs {
    type Setup = (Setup, Folder);
    type Measured = Vec<Row>;
    const HAS_GUESTS: bool = false;

    fn setup(&self) -> Result<Self::Setup, BenchError> {
        let (millrace, front) = self.programs.both()?;
        let (guard, folder) = short_folder("idle")?;
        let (ports, times) = (self.ports, self.times);
        let setup =
            Setup { ports, length: self.secs, times, cpu: self.cpu, millrace, front, folder };
        Ok((setup, guard))
    }

    fn measure(
        &self,
        (setup, _): &Self::Setup,
        progress: &mut Progress,
    ) -> Result<Vec<Row>, BenchError> {
        idle::run(setup, progress)
    }

    fn report(
        &self,
        _: &Self::Setup,
        rows: Vec<Row>,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let (results, _) = origin.results(rows, Vec::new(), Vec::new());
        let out = &self.programs.out;
        std::fs::create_dir_all(out).map_err(|e| BenchError::file("make folder", out, e))?;
        let path = out.join("bench-idle.json");
        results.write(&path)?;
        Ok(Report::new(Section::Idle, &results, Vec::new(), vec![path], false))
    }
}
