//! The command line of `bench events`.

use std::time::Duration;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds};
use crate::harness::progress::Progress;
use crate::harness::runner::Plan;
use crate::harness::suite::{Origin, Report, Suite};
use crate::suites::events::output::{Results, write_all};
use crate::suites::events::{self, Sample, Setup};

#[derive(Args)]
pub struct EventsArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "2", value_parser = seconds)]
    secs: Duration,
    /// One round of 0.5 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

impl Suite for EventsArgs {
    type Setup = Setup;
    type Measured = Vec<Sample>;
    const HAS_GUESTS: bool = true;

    fn setup(&self) -> Result<Setup, BenchError> {
        let wanted = Plan::fixed(self.rounds, self.secs);
        let plan = if self.quick { Plan::fixed(1, Duration::from_millis(500)) } else { wanted };
        Ok(Setup { plan, vms: self.vms.setup()? })
    }

    fn measure(&self, setup: &Setup, progress: &mut Progress) -> Result<Vec<Sample>, BenchError> {
        events::run(setup, progress)
    }

    fn report(
        &self,
        setup: &Setup,
        all: Vec<Sample>,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let results = Results::new(origin.machine, origin.commit, &all);
        let written = write_all(&setup.vms.out, &results, &all)?;
        let table = results.markdown().trim_end().to_owned();
        Ok(Report { table, losses: Vec::new(), written, summary: String::new(), code: 0 })
    }
}
