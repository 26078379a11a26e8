//! Points at which a test can kill the daemon: before every store into memory that outlives it.
//! None of them is in a product build.

/// Marks that a store into guest memory, a position slot or an inflight region comes next.
#[inline(always)]
pub(crate) fn point() {
    #[cfg(test)]
    injected::point();
}

#[cfg(test)]
pub(crate) mod injected {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local! {
        static STORES_LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    struct Killed;

    pub fn point() {
        STORES_LEFT.with(|left| match left.get() {
            u64::MAX => {}
            0 => resume_unwind(Box::new(Killed)),
            n => left.set(n - 1),
        });
    }

    /// Runs `daemon` and kills it before its store number `stores`. None: it was killed.
    pub fn run<R>(stores: u64, daemon: impl FnOnce() -> R) -> Option<R> {
        STORES_LEFT.with(|left| left.set(stores));
        let result = catch_unwind(AssertUnwindSafe(daemon));
        STORES_LEFT.with(|left| left.set(u64::MAX));
        match result {
            Ok(value) => Some(value),
            Err(payload) if payload.is::<Killed>() => None,
            Err(payload) => resume_unwind(payload),
        }
    }
}
