//! Polling time without work before a sleep. It has no clock of its own, so a simulation can drive
//! it.

/// First polling time after none: about what a sleep and a wake-up cost.
const FIRST_NS: u64 = 10_000;

/// The polling time of one sidecore, between 0 and a maximum, as KVM adapts its halt polling
/// (`grow_halt_poll_ns` and `shrink_halt_poll_ns` in virt/kvm/kvm_main.c): work that came soon
/// after a sleep began doubles it, since a little more polling would have caught it; a sleep longer
/// than the maximum halves it, since no polling would have.
#[derive(Debug, Clone)]
pub struct Spin {
    max_ns: u64,
    adapts: bool,
    limit_ns: u64,
}

impl Spin {
    /// Polls for `max_ns` at first, and for ever when it does not adapt.
    pub fn new(max_ns: u64, adapts: bool) -> Self {
        Self { max_ns, adapts, limit_ns: max_ns }
    }

    /// Polling time before a sleep now.
    pub fn limit_ns(&self) -> u64 {
        self.limit_ns
    }

    /// Adapts to work that came after a sleep, `idle_ns` after the last work was done.
    pub fn woke_to_work(&mut self, idle_ns: u64) {
        if !self.adapts || idle_ns <= self.limit_ns {
            // Slept though polling would have caught it: the thread was late, not the limit.
            return;
        }
        if idle_ns <= self.max_ns {
            self.limit_ns = (self.limit_ns * 2).max(FIRST_NS).min(self.max_ns);
        } else {
            self.limit_ns /= 2;
            if self.limit_ns < FIRST_NS {
                self.limit_ns = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const US: u64 = 1000;

    fn after(spin: &mut Spin, idle_us: &[u64]) -> u64 {
        idle_us.iter().for_each(|&idle| spin.woke_to_work(idle * US));
        spin.limit_ns() / US
    }

    #[test]
    fn it_grows_while_work_comes_soon_and_shrinks_when_it_does_not() {
        let mut spin = Spin::new(100 * US, true);
        assert_eq!(spin.limit_ns(), 100 * US);
        assert_eq!(after(&mut spin, &[5000, 5000]), 25);
        assert_eq!(after(&mut spin, &[5000, 5000]), 0, "less than a wake-up costs is not worth it");
        assert_eq!(after(&mut spin, &[30]), 10);
        assert_eq!(after(&mut spin, &[30]), 20);
        assert_eq!(after(&mut spin, &[30]), 40);
        assert_eq!(after(&mut spin, &[30, 30]), 40, "long enough to catch it");
        assert_eq!(after(&mut spin, &[90, 90, 90]), 100);
    }

    #[test]
    fn a_fixed_one_stays_and_none_stays_none() {
        let mut spin = Spin::new(100 * US, false);
        assert_eq!(after(&mut spin, &[5000, 30, 101]), 100);
        let mut spin = Spin::new(0, true);
        assert_eq!(after(&mut spin, &[0, 1, 5, 5000]), 0);
        let mut spin = Spin::new(5 * US, true);
        assert_eq!(after(&mut spin, &[5000]), 0);
        assert_eq!(after(&mut spin, &[4]), 5, "never above the maximum");
    }

    proptest! {
        #[test]
        fn it_stays_within_its_bounds(
            max in 0..u64::MAX / 4,
            idle in prop::collection::vec(any::<u64>(), 0..50),
        ) {
            let mut spin = Spin::new(max, true);
            for idle_ns in idle {
                spin.woke_to_work(idle_ns);
                prop_assert!(spin.limit_ns() <= max);
            }
        }
    }
}
