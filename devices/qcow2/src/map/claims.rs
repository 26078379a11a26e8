//! Claims on entries that are about to change, and the reserve of clusters that are ready to be
//! used.
//!
//! Both are behind one lock that is held for a few list operations, never while anything is read,
//! written or waited for: a sidecore may take it.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use base::sync::{lock, wait};

/// Callback of a queue, for the end of a claim that it waits for.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Claims and reserve of an image.
#[derive(Default)]
pub struct Claims {
    state: Mutex<State>,
    free: Condvar,
    /// Whether upkeep of the map is due: the reserve runs low, or clusters can be freed.
    has_work: AtomicBool,
    reserved: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Guest clusters whose entries are about to change.
    claimed: HashSet<u64>,
    /// Clusters of the file that are counted as used, within the file, and durably zero.
    reserve: VecDeque<Range<u64>>,
    /// Number of clusters in the reserve.
    reserved: u64,
    /// Number of clusters at which the reserve is low.
    low: u64,
    /// Clusters that were taken from the reserve and not used, and may not be zero any more.
    soiled: Vec<Range<u64>>,
    /// Number of threads that wait for a claim.
    waiting: usize,
    wakers: Vec<Waker>,
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claims").field("reserved", &self.reserved).finish_non_exhaustive()
    }
}

/// Outcome of a try to claim clusters and take as many of the reserve.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken {
    /// The claim is made, and these clusters of the file, as many, are the caller's.
    Clusters(Range<u64>),
    /// The first one is claimed already; the waker is rung when that claim ends.
    Busy,
    /// The reserve is empty.
    Empty,
}

impl Claims {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Claims clusters from the first of `wanted` on, as many as are free and the reserve has in a
    /// row. Never waits.
    pub fn try_take(&self, wanted: Range<u64>, waker: &Waker) -> Taken {
        let mut state = self.lock();
        let free = wanted.clone().take_while(|c| !state.claimed.contains(c)).count() as u64;
        if free == 0 {
            state.wait_by(waker);
            return Taken::Busy;
        }
        let Some(taken) = state.take(free) else {
            self.poke();
            return Taken::Empty;
        };
        let count = taken.end - taken.start;
        state.claimed.extend(wanted.start..wanted.start + count);
        self.note_reserve(&state);
        Taken::Clusters(taken)
    }

    /// Claims `cluster`, and those behind it up to `end` that are free; waits for the first.
    pub fn claim(&self, cluster: u64, end: u64) -> Claim<'_> {
        let mut state = self.lock();
        while state.claimed.contains(&cluster) {
            state.waiting += 1;
            state = wait(&self.free, state);
            state.waiting -= 1;
        }
        let mut upto = cluster;
        while upto < end && state.claimed.insert(upto) {
            upto += 1;
        }
        Claim { claims: self, clusters: cluster..upto }
    }

    /// Gives claims back.
    pub fn release(&self, clusters: Range<u64>) {
        let mut state = self.lock();
        for cluster in clusters {
            state.claimed.remove(&cluster);
        }
        let wakers = std::mem::take(&mut state.wakers);
        let is_waited_for = state.waiting > 0;
        drop(state);
        if is_waited_for {
            self.free.notify_all();
        }
        wakers.iter().for_each(|wake| wake());
    }

    /// Takes up to `max` clusters in a row of the reserve.
    pub fn take(&self, max: u64) -> Option<Range<u64>> {
        let mut state = self.lock();
        let taken = state.take(max);
        self.note_reserve(&state);
        taken
    }

    /// Adds to the reserve. It is low again when `low` clusters are left.
    pub fn add(&self, clusters: Range<u64>, low: u64) {
        let count = clusters.end - clusters.start;
        let mut state = self.lock();
        match state.reserve.back_mut() {
            Some(last) if last.end == clusters.start => last.end = clusters.end,
            _ => state.reserve.push_back(clusters),
        }
        state.low = low;
        state.reserved += count;
        self.note_reserve(&state);
        self.has_work.store(self.reserved() < low, Ordering::Relaxed);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.iter().for_each(|wake| wake());
    }

    /// Clusters in the reserve.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    fn note_reserve(&self, state: &State) {
        self.reserved.store(state.reserved, Ordering::Relaxed);
        if state.reserved < state.low {
            self.poke();
        }
    }

    /// Asks for [`super::image::Image::maintain`].
    pub fn poke(&self) {
        self.has_work.store(true, Ordering::Relaxed);
    }

    /// Whether somebody shall look after the map; asked once, answered once.
    #[inline]
    pub fn take_work(&self) -> bool {
        self.has_work.load(Ordering::Relaxed) && self.has_work.swap(false, Ordering::Relaxed)
    }

    /// Clusters that were taken and not used.
    pub fn soil(&self, clusters: Range<u64>) {
        self.lock().soiled.push(clusters);
        self.poke();
    }

    /// Takes those.
    pub fn take_soiled(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.lock().soiled)
    }
}

/// Claimed clusters, until it is dropped: by a panic, too, nobody waits for them for ever.
#[derive(Debug)]
pub struct Claim<'a> {
    claims: &'a Claims,
    clusters: Range<u64>,
}

impl Claim<'_> {
    /// The claimed clusters.
    pub fn clusters(&self) -> Range<u64> {
        self.clusters.clone()
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.claims.release(self.clusters());
    }
}

impl State {
    fn take(&mut self, max: u64) -> Option<Range<u64>> {
        let first = self.reserve.front_mut()?;
        let taken = first.start..first.end.min(first.start.saturating_add(max));
        first.start = taken.end;
        if first.is_empty() {
            self.reserve.pop_front();
        }
        self.reserved -= taken.end - taken.start;
        Some(taken)
    }

    fn wait_by(&mut self, waker: &Waker) {
        if !self.wakers.iter().any(|w| Arc::ptr_eq(w, waker)) {
            self.wakers.push(Arc::clone(waker));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_cluster_has_one_claim_and_whoever_waits_is_told() {
        let claims = Claims::default();
        let rung = Arc::new(AtomicUsize::new(0));
        let waker: Waker = {
            let rung = Arc::clone(&rung);
            Arc::new(move || {
                rung.fetch_add(1, Ordering::SeqCst);
            })
        };
        assert_eq!(claims.try_take(0..4, &waker), Taken::Empty);
        assert!(claims.take_work() && !claims.take_work());
        claims.add(100..110, 4);
        claims.add(110..112, 4);
        assert_eq!(claims.reserved(), 12);
        assert_eq!(claims.try_take(2..4, &waker), Taken::Clusters(100..102));
        assert_eq!(claims.try_take(0..4, &waker), Taken::Clusters(102..104));
        assert_eq!(claims.try_take(3..9, &waker), Taken::Busy);
        assert_eq!(rung.load(Ordering::SeqCst), 0);
        claims.release(2..4);
        assert_eq!(rung.load(Ordering::SeqCst), 1);
        assert!(!claims.take_work());
        assert_eq!(claims.try_take(3..9, &waker), Taken::Clusters(104..110));
        assert!(claims.take_work());
        let last = claims.claim(9, 12);
        assert_eq!(last.clusters(), 9..12);
        assert_eq!(claims.claim(2, 12).clusters(), 2..3);
        drop(last);
        assert_eq!(claims.claim(9, 10).clusters(), 9..10);
    }

    #[test]
    fn a_claim_does_not_outlive_a_panic() {
        let claims = Claims::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _claim = claims.claim(7, 9);
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(panicked.is_err());
        assert_eq!(claims.claim(7, 9).clusters(), 7..9);
    }

    #[test]
    fn a_thread_waits_for_a_claim() {
        let claims = Claims::default();
        let first = claims.claim(7, 8);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| claims.claim(7, 9).clusters());
            while claims.lock().waiting == 0 {
                std::thread::yield_now();
            }
            drop(first);
            assert_eq!(waiter.join().unwrap(), 7..9);
        });
    }
}
