//! Write cache of a port, as the config and the driver want it.
//!
//! A cache that a driver switched off stays off over resets and reconnects. QEMU keeps a copy of
//! the config space that it changes on writes of the driver only, over resets of the device too:
//! the next driver reads "off" there and never flushes.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::config::feature;

/// Choices of the config and of the drivers about a port's write cache.
pub(super) struct WriteCache {
    /// Whether the config switches it on.
    is_configured: bool,
    /// Whether a driver switched it off, and none has switched it on since.
    is_switched_off: AtomicBool,
}

impl WriteCache {
    /// A cache that no driver has switched.
    pub fn new(is_configured: bool) -> Self {
        Self { is_configured, is_switched_off: AtomicBool::new(false) }
    }

    /// Notes a driver's choice.
    pub fn switch(&self, on: bool) {
        self.is_switched_off.store(!on, Ordering::SeqCst);
    }

    /// Whether a driver switched it off, and none has switched it on since.
    pub fn is_switched_off(&self) -> bool {
        self.is_switched_off.load(Ordering::SeqCst)
    }

    /// Whether it is on while there is no driver.
    pub fn is_on_without_driver(&self) -> bool {
        self.is_configured && !self.is_switched_off()
    }

    /// Whether it is on for a driver with these features, until it says otherwise. A driver that
    /// cannot flush gets write-through (virtio 1.2, 5.2.6.2).
    pub fn is_on_for(&self, features: u64) -> bool {
        self.is_on_without_driver() && features & feature::FLUSH != 0
    }
}
