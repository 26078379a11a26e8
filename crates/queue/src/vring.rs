//! A virtqueue with its doorbells, counters and saved position: what device engines hold.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use base::counter::QueueStats;
use base::event::Event;

use crate::batch::Batch;
use crate::error::RingError;
use crate::inflight::InflightRegion;
use crate::ring::{Completion, Queue};
use crate::slot::PositionSlot;

/// Whether a port still works; shared by all its queues and its session. A broken ring breaks the
/// port, and only the port.
#[derive(Debug)]
pub struct PortHealth {
    name: Arc<str>,
    broken: AtomicBool,
    reason: Mutex<Option<String>>,
}

impl PortHealth {
    /// A healthy port.
    pub fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            broken: AtomicBool::new(false),
            reason: Mutex::new(None),
        })
    }

    /// The port's name (`vm/port`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True while nothing has failed. One relaxed load.
    #[inline]
    pub fn is_live(&self) -> bool {
        !self.broken.load(Ordering::Relaxed)
    }

    /// Declares the port broken; the first reason is kept and logged.
    pub fn fail(&self, queue: Option<u16>, reason: &dyn std::fmt::Display) {
        let text = match queue {
            Some(q) => format!("queue {q}: {reason}"),
            None => reason.to_string(),
        };
        if !self.broken.swap(true, Ordering::SeqCst) {
            tracing::error!(port = %self.name, "port stopped: {text}");
            *self.reason.lock().unwrap_or_else(|e| e.into_inner()) = Some(text);
        }
    }

    /// Why the port is broken.
    pub fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// A new session starts with a clean slate.
    pub fn reset(&self) {
        *self.reason.lock().unwrap_or_else(|e| e.into_inner()) = None;
        self.broken.store(false, Ordering::SeqCst);
    }
}

/// What a [`Vring`] is made of besides its queue.
#[derive(Debug)]
pub struct VringParts {
    /// Index in the device.
    pub index: u16,
    /// Driver → device doorbell; none when the front end wants us to poll.
    pub kick: Option<Event>,
    /// Device → driver doorbell; none when the driver polls.
    pub call: Option<Event>,
    /// Where a broken ring is reported to the VMM.
    pub err: Option<Event>,
    /// Counters.
    pub stats: Arc<QueueStats>,
    /// Port state.
    pub health: Arc<PortHealth>,
    /// Where the position is saved for the next daemon.
    pub slot: Option<PositionSlot>,
    /// Inflight tracking, when negotiated.
    pub inflight: Option<Arc<InflightRegion>>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Vring {
    /// The queue.
    pub queue: Queue,
    /// The rest.
    pub parts: VringParts,
}

impl Vring {
    /// Puts the two together. With an inflight region: re-reads it, so that the first pops return
    /// the requests that an earlier back end took and did not complete (in their order), and
    /// finishes a half-done completion.
    pub fn new(queue: Queue, parts: VringParts) -> Result<Self, RingError> {
        Ok(Self { queue, parts })
    }

    /// As [`Queue::pop`]; counts batches and requests, records inflight. A broken ring breaks the
    /// port (see [`PortHealth`]), is reported on the err event, and yields 0 from then on.
    pub fn pop(&mut self, batch: &mut Batch, max: usize) -> usize {
        let _ = (batch, max);
        unimplemented!("owner of crate queue")
    }

    /// As [`Queue::unpop`].
    pub fn unpop(&mut self, batch: &mut Batch, n: usize) {
        let _ = (batch, n);
        unimplemented!("owner of crate queue")
    }

    /// As [`Queue::push`], then saves the position and clears inflight.
    pub fn push(&mut self, done: &[Completion]) {
        let _ = done;
        unimplemented!("owner of crate queue")
    }

    /// Notifies the driver if it wants it (counted either way). Call once per batch, after pushes.
    pub fn notify(&mut self) {
        unimplemented!("owner of crate queue")
    }

    /// Before sleeping: asks for kicks. True when work is there already.
    pub fn arm(&mut self) -> bool {
        unimplemented!("owner of crate queue")
    }

    /// After waking: kicks are not needed.
    pub fn disarm(&mut self) {
        unimplemented!("owner of crate queue")
    }

    /// The descriptor to watch for kicks.
    pub fn kick_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsRawFd;
        self.parts.kick.as_ref().map(|k| k.as_raw_fd())
    }

    /// Breaks the port for a reason found by a device engine.
    pub fn fail(&mut self, error: &RingError) {
        let _ = error;
        unimplemented!("owner of crate queue")
    }
}
