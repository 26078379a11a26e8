//! Reads and writes that their disk does within the call that takes them from the ring.
//!
//! # Theory of operation
//! A memory disk has moved a request's bytes before anybody could look for its completion. Such a
//! request needs no slot, no list of those that wait, and no second look: it goes from the ring to
//! its completion in one go, on the segments of its batch. On the general way (start, issue,
//! collect) the bookkeeping of one takes longer than the copy of its 4 KiB.
//!
//! All else goes the general way, where it is read and checked anew: other kinds of requests, what
//! does not fit into one step, and what the disk did not do in full. There it is done once more,
//! and there is known what an error means.

use std::sync::atomic::Ordering;

use queue::{Chain, Completion};

use super::requests::{Requests, write_status};
use crate::cost;
use crate::limits::MAX_OP_SEGS;
use crate::port_state::PortState;
use crate::request::{self, Range, Ranges, Request, Status};

/// State of a queue for requests that are served at once.
pub(super) struct AtOnce {
    /// Whether the port lets data go past all buffers of ours.
    is_possible: bool,
    /// Whether requests of this batch are served so.
    is_on: bool,
    /// Bytes that were moved since the last [`AtOnce::take_moved_bytes`].
    moved_bytes: u64,
    /// For the parser: reads and writes have none.
    ranges: Ranges,
}

impl AtOnce {
    /// State of a queue of `port`.
    pub fn new(port: &PortState) -> Self {
        Self {
            is_possible: !port.has_stages && port.demands.mem_align <= 1,
            is_on: false,
            moved_bytes: 0,
            ranges: Ranges::default(),
        }
    }
}

impl Requests {
    /// Chooses the way of a batch of `popped` requests.
    #[inline]
    pub(super) fn choose_at_once(&mut self, popped: usize) {
        self.at_once.is_on = self.at_once.is_possible
            && !self.may_have_placeholders
            && self.port.flush_failure().is_none()
            && self.in_flight.disk.runs_within_call(popped);
    }

    /// Bytes that were moved at once since the last call.
    #[inline]
    pub fn take_moved_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.at_once.moved_bytes)
    }

    /// Serves a read or write. Returns its charge; `None`: it goes the general way.
    #[inline]
    pub(super) fn serve_at_once(&mut self, chain: &Chain<'_>, now_ns: u64) -> Option<u64> {
        let is_plain = chain.fault.is_none() && chain.writable_len > 0;
        if !self.at_once.is_on || !is_plain || chain.segs() > MAX_OP_SEGS as u64 {
            return None;
        }
        let request = request::parse(chain, &self.port.geometry(), &mut self.at_once.ranges);
        let (is_read, range) = match request {
            Ok(Request::Read(range)) => (true, range),
            // Through the cache only: after it there would be a flush.
            Ok(Request::Write(range)) if self.port.writeback.load(Ordering::Relaxed) => {
                (false, range)
            }
            _ => return None,
        };
        let len_bytes = u32::try_from(range.len).ok()?;
        if len_bytes == 0 || len_bytes > self.in_flight.step_len_bytes {
            return None;
        }
        if !self.in_flight.run(chain, is_read, range.offset, len_bytes) {
            return None;
        }
        self.complete_at_once(chain, is_read, range, now_ns);
        Some(cost::moved_charge_bytes(range.len))
    }

    #[inline]
    fn complete_at_once(&mut self, chain: &Chain<'_>, is_read: bool, range: Range, now_ns: u64) {
        self.at_once.moved_bytes += range.len;
        self.pace.note_request(range.len);
        self.stats.disk_ops.add(1);
        self.count_moved(is_read, range.len);
        self.latencies.add(now_ns);
        let data_len = if is_read { chain.writable_len - 1 } else { 0 };
        let written = write_status(chain, Status::Ok, data_len);
        self.vring.queue.mark_written(chain.writable, chain.writable_len as usize);
        self.completions.push(Completion { id: chain.id, ndesc: chain.ndesc, written });
    }
}
