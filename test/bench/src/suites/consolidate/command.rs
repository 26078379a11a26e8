//! The command line of `bench consolidate`.

use std::time::Duration;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds, sidecore};
use crate::harness::progress::Progress;
use crate::harness::runner::{Plan, vhost_text};
use crate::harness::suite::{Origin, Report, Suite};
use crate::harness::table::Section;
use crate::suites::consolidate::{self, Round, Setup, output};

#[derive(Args)]
pub struct ConsolidateArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "4", value_parser = seconds)]
    secs: Duration,
    /// Microseconds that the sidecore polls before it sleeps; the daemon's default when left out.
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    spin_us: Option<u32>,
    /// Two rounds of 1 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

impl Suite for ConsolidateArgs {
    type Setup = Setup;
    type Measured = Vec<Round>;
    const HAS_GUESTS: bool = true;

    fn setup(&self) -> Result<Setup, BenchError> {
        let wanted = Plan::fixed(self.rounds, self.secs);
        let plan = if self.quick { Plan::fixed(2, Duration::from_secs(1)) } else { wanted };
        let (vms, sidecore) = (self.vms.setup()?, sidecore(self.spin_us));
        Ok(Setup { plan, vms, sidecore, vhost: lab::vhost_net() })
    }

    fn measure(&self, setup: &Setup, progress: &mut Progress) -> Result<Vec<Round>, BenchError> {
        consolidate::run(setup, progress)
    }

    fn report(&self, setup: &Setup, all: Vec<Round>, origin: Origin) -> Result<Report, BenchError> {
        let (results, context) = origin.results(output::rows(&all)?, Vec::new(), text(setup));
        let written = output::write_all(&setup.vms.out, &results, &all, &context)?;
        let losses = output::disturbed(&all);
        Ok(Report::new(Section::Consolidate, &results, losses, written, false))
    }
}

fn text(setup: &Setup) -> Vec<String> {
    let spin = if setup.sidecore.is_empty() { "spin_us by default" } else { &setup.sidecore };
    vec![
        "Eight VMs a side run at once; only one side is loaded at a time. Each: \
         1 vCPU, 128 MB. Two make round trips, two a stream, two read their disks, two are nearly \
         idle, all at the same time."
            .into(),
        format!("Millrace: one daemon with one sidecore ({spin}), raw disks with O_DIRECT."),
        "Peer: virtio-net on TAP and bridge in each QEMU’s main loop, virtio-blk with a thread of \
         its own (cache=none, aio=io_uring)."
            .into(),
        vhost_text(output::VHOST, &setup.vhost),
        format!(
            "{} rounds of {:.1} s, after one thrown away.",
            setup.plan.rounds,
            setup.plan.length.as_secs_f64()
        ),
    ]
}
