//! Connections that have a ring: who gets one, and when it is looked at.
//!
//! # Theory of operation
//! A ring that has been read lately is *awake*: it is looked at in every turn, and its client rings no bell. When
//! nothing comes for as long as [`Spin`] finds worth while, all that are awake are put to sleep, and the thread
//! sleeps with them. Sockets and the daemon are looked at meanwhile, but not in each turn ([`LOOK`]): that is a
//! system call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_abi::module::{failure, kind};
use guest_abi::module_ring::{RingGranted, RingWanted};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::Service;
use crate::conn::{failure as failed, frame, last_words};
use crate::ring::Slots;
use crate::spin::Spin;

/// How long sockets wait while rings are busy.
const LOOK: Duration = Duration::from_micros(50);

/// Looks at rings between two looks at the clock.
const GLANCES: u32 = 16;

/// What is known of the rings of a module.
#[derive(Debug)]
pub(super) struct Rings {
    /// Places of connections whose ring is awake.
    awake: Vec<usize>,
    /// By place: it is one of them.
    is_awake: Vec<bool>,
    spin: Spin,
    /// Something was taken from one, or given to it, since there was last nothing to do.
    busy: bool,
    /// When there was last nothing to do.
    idle_since: Instant,
    /// When sockets were last looked at.
    looked: Instant,
}

/// How the kernel is to be asked for what happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Not at all: there is work.
    No,
    /// Without waiting.
    Now,
    /// Until something happens.
    Wait,
}

impl Rings {
    pub fn new(most: Duration) -> Self {
        let now = Instant::now();
        let (idle_since, looked) = (now, now);
        let (awake, is_awake) = (Vec::new(), Vec::new());
        Self { awake, is_awake, spin: Spin::new(most), busy: false, idle_since, looked }
    }

    /// This one has, or had, something.
    pub fn wake(&mut self, at: usize) {
        self.busy = true;
        if self.is_awake.len() <= at {
            self.is_awake.resize(at + 1, false);
        }
        if !std::mem::replace(&mut self.is_awake[at], true) {
            self.awake.push(at);
        }
    }

    /// There is no such connection any more.
    pub fn forget(&mut self, at: usize) {
        if self.is_awake.get_mut(at).is_some_and(std::mem::take) {
            self.awake.retain(|awake| *awake != at);
        }
    }

    /// A bell rang.
    pub fn rung(&mut self) {
        self.spin.slept(self.idle_since.elapsed());
    }
}

impl Service {
    /// Looks at rings, for a while, before the thread sleeps. Past `until` there is other work.
    pub(super) fn look_at_rings(&mut self, until: Option<Instant>) -> Look {
        // In a pause they stay awake, and are looked at after it.
        if self.rings.awake.is_empty() || self.holds_requests() {
            return Look::Wait;
        }
        let mut now = Instant::now();
        if until.is_some_and(|until| until <= now) {
            self.take_from_rings();
            return self.looks(now);
        }
        if std::mem::take(&mut self.rings.busy) {
            self.rings.idle_since = now;
            self.rings.spin.begin();
        }
        loop {
            for _ in 0..GLANCES {
                if self.take_from_rings() {
                    let look = now >= self.rings.looked + LOOK;
                    return if look { self.looks(now) } else { Look::No };
                }
                std::hint::spin_loop();
            }
            if !self.rings.spin.time().is_zero() {
                let before = Instant::now();
                std::thread::yield_now();
                now = Instant::now();
                self.rings.spin.gave_way(now - before, now - self.rings.idle_since);
            }
            let end = self.rings.idle_since + self.rings.spin.time();
            if now >= end || until.is_some_and(|until| now >= until) {
                return if self.put_to_sleep() { Look::Wait } else { self.looks(now) };
            }
            if now >= self.rings.looked + LOOK {
                return self.looks(now);
            }
        }
    }

    fn looks(&mut self, now: Instant) -> Look {
        self.rings.looked = now;
        Look::Now
    }

    /// Takes what is in rings that are awake. True: there was something.
    fn take_from_rings(&mut self) -> bool {
        let mut some = false;
        for place in (0..self.rings.awake.len()).rev() {
            // One that is read may end others, for want of room.
            let Some(&at) = self.rings.awake.get(place) else { continue };
            let ready = self.conns[at].as_ref().is_some_and(|conn| conn.has_ring_input());
            if ready {
                some = true;
                self.fill(at);
            }
        }
        some
    }

    /// True: none has anything, and each rings from now on.
    fn put_to_sleep(&mut self) -> bool {
        let conns = &self.conns;
        let Rings { awake, is_awake, .. } = &mut self.rings;
        awake.retain(|at| {
            is_awake[*at] = conns[*at].as_ref().is_some_and(|conn| !conn.ring_sleeps());
            is_awake[*at]
        });
        self.rings.awake.is_empty()
    }

    /// A client asks for a ring.
    pub(super) fn grant_ring(&mut self, at: usize, wanted: &[u8]) {
        let Some(conn) = &mut self.conns[at] else { return };
        let wanted = RingWanted::read_from_bytes(wanted).ok();
        let is_ours = |slots: &&Arc<Slots>| wanted.is_some_and(|wanted| slots.is(&wanted.id));
        let ours = self.spec.ring.as_ref().map(|(slots, _)| slots).filter(is_ours);
        let found = match ours {
            None => Err("the memory before you is not that of this module's process"),
            Some(_) if !conn.may_change_over() => {
                Err("a ring is asked for once, and while nothing is on its way")
            }
            Some(slots) => slots.take().ok_or("all rings of this VM are taken"),
        };
        let (slot, ring) = match found {
            Ok(found) => found,
            Err(why) => return conn.push(failed(kind::RING, 0, failure::RING, why)),
        };
        let stamp = U64::new(ring.stamp);
        let granted = RingGranted { slot: U32::new(slot), reserved: U32::ZERO, stamp };
        let answer = frame(kind::RING, 0, 0, &[granted.as_bytes()]);
        // The socket has taken all that was in front of this.
        if last_words(conn.socket(), &answer).is_ok_and(|n| n == answer.len()) {
            conn.change_over(ring);
            self.rings.wake(at);
        } else {
            self.disconnect(at);
        }
    }

    /// A client rings, or its socket has ended.
    pub(super) fn on_bell(&mut self, at: usize) {
        let Some(conn) = &mut self.conns[at] else { return };
        let may_read = conn.may_read();
        conn.hear_bells(&mut self.read);
        self.rings.rung();
        // What was written before the socket's end counts.
        if may_read {
            self.fill(at);
        }
        if self.conns[at].is_some() {
            self.rings.wake(at);
        }
        self.more = true;
    }
}
