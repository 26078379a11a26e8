//! Rounds: transfers of the file and the web servers' loads, in turns.

use super::bed::Bed;
use super::{Measured, Setup, files, servers};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;

/// Boots everything and measures.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
    let bed = Bed::boot(setup, progress)?;
    let mut measured = Measured::default();
    let mut files = files::Files::new(&bed, setup)?;
    let servers = servers::start(&bed, setup, &mut measured, progress)?;
    for round in 0..=setup.rounds {
        progress.step(&format!("round {round} of {}", setup.rounds));
        files.round(round, &mut measured, progress)?;
        servers.round(round, &mut measured, progress)?;
    }
    measured.threshold = bed.agents_threshold()?;
    Ok(measured)
}
