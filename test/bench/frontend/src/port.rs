//! A started device: session, memory, rings, doorbells, and the counting of both.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use base::event::Event;
use rustix::event::{PollFd, PollFlags, Timespec};
use vhost_user::codec::feature;

use crate::error::FrontendError;
use crate::memory::Memory;
use crate::ring::{Ring, RingShape};
use crate::session::{Doorbells, Session};

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;

/// Nothing for so long: the back end is gone, or has lost a notification.
pub const SILENCE_S: u64 = 5;

/// Feature bits of a ring's shape.
pub fn features_of(shape: RingShape) -> u64 {
    let when = |on: bool, bit: u64| if on { bit } else { 0 };
    VERSION_1
        | when(shape.packed, feature::RING_PACKED)
        | when(shape.in_order, feature::IN_ORDER)
        | when(shape.event_idx, feature::EVENT_IDX)
        | when(shape.indirect, feature::INDIRECT_DESC)
}

/// How a back end is reached.
pub enum Reach<'a> {
    /// Dials a back end that listens there.
    Dial(&'a Path),
    /// Accepts a back end that dials this socket of ours.
    Accept(OwnedFd),
}

impl Reach<'_> {
    /// Connects.
    pub fn session(self) -> Result<Session, FrontendError> {
        match self {
            Self::Dial(path) => Session::dial(path),
            Self::Accept(listener) => Session::accept(&listener),
        }
    }
}

/// One queue with its doorbells.
#[derive(Debug)]
pub struct Queue {
    /// The ring.
    pub ring: Ring,
    bells: Doorbells,
    /// Kicks so far.
    pub kicks: u64,
    /// Interrupts so far.
    pub interrupts: u64,
}

impl Queue {
    /// Makes what was posted visible, and kicks when that is wanted.
    #[inline]
    pub fn publish(&mut self) -> Result<(), FrontendError> {
        if self.ring.publish() { self.kick() } else { Ok(()) }
    }

    /// Rings the doorbell, whether that is wanted or not.
    pub fn kick(&mut self) -> Result<(), FrontendError> {
        self.kicks += 1;
        self.bells.kick.signal().map_err(FrontendError::io("kicking"))
    }

    /// Takes the interrupts that came.
    pub fn count_interrupts(&mut self) {
        let mut value = [0u8; 8];
        if let Ok(8) = rustix::io::read(self.call(), &mut value) {
            self.interrupts += u64::from_ne_bytes(value);
        }
    }

    fn call(&self) -> &Event {
        &self.bells.call
    }
}

/// A device in use. Field order is drop order: the session ends before the memory goes.
#[derive(Debug)]
pub struct Port {
    session: Session,
    /// Queues of the port.
    pub queues: Vec<Queue>,
    /// Memory of the port.
    pub memory: Memory,
}

impl Port {
    /// Shares `memory` and starts `count` queues of `shape`.
    pub fn start(
        session: Session,
        mut memory: Memory,
        shape: RingShape,
        count: u32,
    ) -> Result<Self, FrontendError> {
        let rings: Result<Vec<_>, _> = (0..count).map(|_| Ring::new(&mut memory, shape)).collect();
        session.share(&memory)?;
        let mut queues = Vec::new();
        for (index, ring) in rings?.into_iter().enumerate() {
            let bells = session.start(index as u32, &ring)?;
            let mut queue = Queue { ring, bells, kicks: 0, interrupts: 0 };
            // A back end may begin with a ring at its first kick only (vhost-user, "Ring states"):
            // VPP does.
            queue.kick()?;
            queues.push(queue);
        }
        Ok(Self { session, queues, memory })
    }

    /// Stops all queues: from then on the back end does not touch the memory.
    pub fn stop(&mut self) -> Result<(), FrontendError> {
        (0..self.queues.len() as u32).try_for_each(|index| self.session.stop(index))
    }
}

/// Sleeps until one of the queues interrupts.
pub fn sleep_on(queues: &mut [&mut Queue], what: &'static str) -> Result<(), FrontendError> {
    let mut ready = false;
    for queue in queues.iter_mut() {
        ready |= queue.ring.set_interrupts(true);
    }
    if !ready {
        let mut fds: Vec<_> = queues
            .iter()
            .map(|q| PollFd::from_borrowed_fd(q.call().as_fd(), PollFlags::IN))
            .collect();
        let limit = Timespec { tv_sec: SILENCE_S as i64, tv_nsec: 0 };
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(0) => return Err(FrontendError::Silent { secs: SILENCE_S, what }),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(FrontendError::io("waiting for an interrupt")(e)),
        }
    }
    for queue in queues {
        queue.count_interrupts();
        queue.ring.set_interrupts(false);
    }
    Ok(())
}
