//! Checking an image that was not closed, and mending what a kill or a power cut can leave.
//!
//! Counts are rebuilt from the tables: every reference is counted, and what the refcounts say is
//! made equal to that. Too few are raised, leaks are freed, marks of sole ownership are set right.
//! Entries that make no sense are not mended: no order of ours leaves such, and to drop them is to
//! lose data. Then nothing is changed at all.

mod count;
mod mend;

use std::sync::Arc;

use crate::error::Error;
use crate::format::header::Header;
use crate::map::tables::Tables;
use crate::store::Store;

pub use count::Counts;
pub use mend::Outcome;

/// Checks and mends an image that nobody else uses.
pub(crate) fn mend(
    store: &Arc<dyn Store>,
    header: &Header,
    tables: &Tables,
    progress: &mut dyn FnMut(f64),
) -> Result<Outcome, Error> {
    let counts = Counts::of(&**store, header, tables, progress)?;
    mend::mend(&**store, header, tables, counts)
}
