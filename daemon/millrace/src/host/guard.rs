//! A start that panics fails for itself only.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a step of starting a port. An image is a file of a guest's owner, and what reads its format
/// is not all ours: a panic is an error of this port, and the other ports start all the same.
pub fn guarded<T>(step: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        Err(anyhow::anyhow!("panicked, which is a bug: {}", base::panic::message(&*panic)))
    })
}
