//! Comparison of Millrace's back end and its peers under the same front end, on the same two CPUs,
//! in turns.
//!
//! # Theory of operation
//! A [`case::Case`] is a load on one kind of ring. A [`trial::Backend`] knows how to start one
//! server for it: a network back end with two vhost-user ports, or one with a disk, pinned to one
//! CPU. The front end ([`front`]) is a program of its own that drives the rings, pinned to another
//! CPU. [`rounds`] starts each back end anew for every case and round, one at a time, in an order
//! that moves on by one each round and turns round after each lap, and kills it afterwards
//! ([`crate::harness::process`]): none of them spins while another is measured. Device-bound loads
//! have their back end on the CPU that the disk interrupts ([`interrupts`]). qcow2 images are made
//! by [`images`]. Beside the front end's figures [`crate::harness::usage`] reads how long the back
//! end's busy thread waited for its CPU. [`rows`] makes rows out of the rounds, [`output`] writes
//! them.
//!
//! Nothing stays behind: processes carry a parent-death signal, network devices live in a namespace
//! of their own, and huge pages and folders are given back by [`crate::harness::cleanup`], whatever
//! ends us.
//!
//! # Limits
//! - Two CPUs at least: two threads that spin on one measure the scheduler.
//! - A front end that has not answered 15 s after its load is killed, and its back end failed. A
//!   back end that failed twice in a case is left out of the rest of it: a peer that hangs must not
//!   cost hours.
//! - A load during which a busy thread waited for its CPU for more than 3 % of the time is called
//!   disturbed, counted, and not repeated: a busy machine would never finish.
//! - One from which a hypervisor took more than 3 % of a CPU ([`crate::harness::steal_time`]) is
//!   run again, twice at most, with at most half as many repeats as loads in a case; then it is
//!   disturbed too.

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;

pub mod backend;
pub mod bed;
pub mod case;
pub(crate) mod command;
pub mod front;
pub mod front_end;
pub mod images;
pub mod interrupts;
pub mod output;
pub mod plot;
pub mod ports;
pub mod reading;
pub mod rounds;
pub mod rows;
pub mod tap;
pub mod trial;
pub mod virtio_user;
pub mod window;

/// Runs the whole comparison: one [`rounds::CaseRuns`] for each case.
pub fn run(
    setup: &bed::Setup,
    progress: &mut Progress,
) -> Result<(Vec<rounds::CaseRuns>, Vec<String>), BenchError> {
    let mut bed = bed::Bed::new(setup, progress)?;
    let all = backend::all();
    let chosen = backend::select(&all, &setup.peers)
        .map_err(|name| BenchError::UnknownPeer { name, known: backend::names(&all) })?;
    let runs = rounds::compare(&setup.cases, &chosen, &mut bed, setup.plan, progress);
    Ok((runs, bed.setup_text()))
}
