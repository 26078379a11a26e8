//! What every comparison with VMs can be told.

use std::path::PathBuf;

use clap::Args;
use lab::KernelChoice;

use crate::daemon;
use crate::error::BenchError;

#[derive(Args)]
pub struct VmArgs {
    /// Folder for the results and all that shows them.
    #[arg(long, default_value = "out")]
    pub out: PathBuf,
    /// Guest kernel: 6.1 or 6.12.
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
}

impl VmArgs {
    /// The kernel of all guests.
    pub fn kernel(&self) -> Result<KernelChoice, BenchError> {
        self.kernel.parse().map_err(|e| BenchError::lab("--kernel", e))
    }

    /// Our daemon.
    pub fn millrace(&self) -> Result<PathBuf, BenchError> {
        daemon::program(self.millrace.as_deref())
    }
}
