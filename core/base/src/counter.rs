//! Counters in plain shared memory: one thread writes, everybody reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with a single writer. Adding is a load and a store (no locked instruction), which is
/// right only because one thread writes; readers may see a value that is a moment old.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call this.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Sets the value (a gauge). Only the owning thread may call this.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// The current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Makes a struct of [`Counter`]s whose one-line docs are also their help texts on a metrics page.
#[macro_export]
macro_rules! counter_set {
    (
        $(#[$meta:meta])*
        pub struct $name:ident { $(#[doc = $help:literal] $field:ident,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        pub struct $name {
            $(#[doc = $help] pub $field: $crate::counter::Counter,)+
        }

        impl $name {
            /// Names, values and help texts, for a metrics page.
            pub fn values(&self) -> impl Iterator<Item = (&'static str, u64, &'static str)> {
                let all = [$((stringify!($field), self.$field.get(), $help.trim_ascii())),+];
                all.into_iter()
            }
        }
    };
}

/// Reason why a frame, packet or request was dropped or refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum DropReason {
    /// The source address is not bound to the sending port.
    Spoofed,
    /// The sending port may not send this kind.
    NotAllowed,
    /// The receiver had no buffers for longer than the hold time.
    ReceiverStalled,
    /// No port, no connection or no listener for the destination.
    NoDestination,
    /// Larger than the receiver takes (MTU, buffer, or a limit of ours).
    TooBig,
    /// A header or length is invalid.
    Malformed,
    /// The receiver's link is down or its queue is not running.
    LinkDown,
    /// A table of ours is full (MAC addresses, connections).
    TableFull,
    /// The wire below us refused it.
    WireError,
    /// The receiver has had its share, or is at its ceiling.
    Throttled,
}

impl DropReason {
    /// Number of reasons.
    pub const COUNT: usize = 10;

    /// All reasons, in the order of their counters.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Spoofed,
        Self::NotAllowed,
        Self::ReceiverStalled,
        Self::NoDestination,
        Self::TooBig,
        Self::Malformed,
        Self::LinkDown,
        Self::TableFull,
        Self::WireError,
        Self::Throttled,
    ];

    /// The name used in metrics and listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spoofed => "spoofed",
            Self::NotAllowed => "not_allowed",
            Self::ReceiverStalled => "receiver_stalled",
            Self::NoDestination => "no_destination",
            Self::TooBig => "too_big",
            Self::Malformed => "malformed",
            Self::LinkDown => "link_down",
            Self::TableFull => "table_full",
            Self::WireError => "wire_error",
            Self::Throttled => "throttled",
        }
    }
}

/// The counters of one queue. Written by the sidecore that polls the queue.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Descriptor chains taken and completed: frames, packets or requests.
    pub requests: Counter,
    /// Payload bytes moved (device headers not counted).
    pub bytes: Counter,
    /// Non-empty polls: `requests / batches` is the mean batch.
    pub batches: Counter,
    /// Kicks received from the driver.
    pub kicks: Counter,
    /// Notifications (interrupts) sent to the driver.
    pub notifications_sent: Counter,
    /// Notifications that the driver had asked us to leave out.
    pub notifications_suppressed: Counter,
    /// Payload bytes copied by the CPU: `copied_bytes / bytes` is copies per byte.
    pub copied_bytes: Counter,
    /// Drops by [`DropReason`].
    pub drops: [Counter; DropReason::COUNT],
}

impl QueueStats {
    /// Counts one drop.
    #[inline]
    pub fn drop_one(&self, reason: DropReason) {
        self.drops[reason as usize].add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_and_set() {
        let c = Counter::default();
        c.add(3);
        c.add(4);
        assert_eq!(c.get(), 7);
        c.set(1);
        assert_eq!(c.get(), 1);
    }

    #[test]
    fn reasons_index_their_own_counter() {
        let stats = QueueStats::default();
        for (i, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, i);
            stats.drop_one(reason);
            assert_eq!(stats.drops[i].get(), 1);
        }
    }
}
