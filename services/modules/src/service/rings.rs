//! Rings of connections: which are looked at, and for how long.
//!
//! # Theory of operation
//! A ring that has been read lately is *awake*: it is looked at in every turn, and its client rings
//! no bell. When nothing comes for as long as [`Spin`] finds worth while, all that are awake are
//! put to sleep, and the thread sleeps with them. Sockets and the daemon are looked at meanwhile,
//! but not in each turn ([`LOOK`]): that is a system call.

use std::time::{Duration, Instant};

use crate::conn::Conn;
use crate::spin::Spin;

/// Time between two looks at sockets while rings are busy.
pub(super) const LOOK: Duration = Duration::from_micros(50);

/// Looks at rings between two looks at the clock.
pub(super) const GLANCES: u32 = 16;

/// State of the rings of a module's connections.
#[derive(Debug)]
pub(super) struct Rings {
    /// Places of connections whose ring is awake.
    pub awake: Vec<usize>,
    /// Whether the ring of a connection is awake, by its place.
    is_awake: Vec<bool>,
    pub spin: Spin,
    /// Whether a ring was read or written since there was last nothing to do.
    pub busy: bool,
    /// Time when there was last nothing to do.
    pub idle_since: Instant,
    /// Time when sockets were last looked at.
    pub looked: Instant,
}

/// Way to ask the kernel for what happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Do not ask: there is work.
    No,
    /// Ask without waiting.
    Now,
    /// Wait until something happens.
    Wait,
}

impl Rings {
    pub fn new(most: Duration) -> Self {
        let now = Instant::now();
        let (idle_since, looked) = (now, now);
        let (awake, is_awake) = (Vec::new(), Vec::new());
        Self { awake, is_awake, spin: Spin::new(most), busy: false, idle_since, looked }
    }

    /// Wakes the ring of a connection that has, or had, something.
    pub fn wake(&mut self, at: usize) {
        self.busy = true;
        if self.is_awake.len() <= at {
            self.is_awake.resize(at + 1, false);
        }
        if !std::mem::replace(&mut self.is_awake[at], true) {
            self.awake.push(at);
        }
    }

    /// Forgets a connection that is gone.
    pub fn forget(&mut self, at: usize) {
        if self.is_awake.get_mut(at).is_some_and(std::mem::take) {
            self.awake.retain(|awake| *awake != at);
        }
    }

    /// Notes that a bell rang.
    pub fn note_bell(&mut self) {
        self.spin.slept(self.idle_since.elapsed());
    }

    /// Whether no ring is awake.
    pub fn is_asleep(&self) -> bool {
        self.awake.is_empty()
    }

    /// Puts rings to sleep that have nothing: their clients ring from now on. True: all sleep.
    pub fn put_to_sleep(&mut self, conns: &[Option<Conn>]) -> bool {
        let Self { awake, is_awake, .. } = self;
        awake.retain(|at| {
            is_awake[*at] = conns[*at].as_ref().is_some_and(|conn| !conn.ring_sleeps());
            is_awake[*at]
        });
        self.awake.is_empty()
    }
}
