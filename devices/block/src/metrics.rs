//! Counters of a disk port, one set per queue.

use std::sync::Arc;

use base::counter::{Counter, QueueStats};
use base::histogram::Histogram;

use crate::request::Refusal;

/// Counters of one queue, written by its sidecore. Kept when the queue stops and starts again.
#[derive(Debug, Default)]
pub struct BlockStats {
    /// READ requests completed.
    pub reads: Counter,
    /// WRITE requests completed.
    pub writes: Counter,
    /// FLUSH requests completed.
    pub flushes: Counter,
    /// DISCARD requests completed.
    pub discards: Counter,
    /// WRITE ZEROES requests completed.
    pub write_zeroes: Counter,
    /// GET ID requests completed.
    pub get_ids: Counter,
    /// READ and WRITE requests that were placeholders: a pipe's bytes were read or written for
    /// them.
    pub placeholders: Counter,
    /// Bytes read by the guest.
    pub read_bytes: Counter,
    /// Bytes written by the guest.
    pub written_bytes: Counter,
    /// Requests in flight now.
    pub in_flight: Counter,
    /// Requests whose data went through a bounce buffer.
    pub bounced: Counter,
    /// Operations on guest memory that is registered with the kernel.
    pub registered: Arc<Counter>,
    /// Operations given to the back end (with steps, repeats and write-through flushes).
    pub disk_ops: Counter,
    /// Operations that moved less than asked and went on.
    pub short_ops: Counter,
    /// Requests that failed because the back end did: EIO and the like.
    pub io_errors: Counter,
    /// Requests that failed for lack of space, a part of `io_errors`.
    pub no_space: Counter,
    /// Requests held now, until the storage takes them: see [`crate::OnError`].
    pub held: Counter,
    /// Times that a request was held.
    pub held_total: Counter,
    /// Errno of the request that was held last; 0: none was.
    pub held_errno: Counter,
    /// Requests refused, by [`Refusal`].
    pub refused: [Counter; Refusal::COUNT],
    /// Requests that a stage refused.
    pub stage_refused: Counter,
    /// Nanoseconds from the poll that took a request to the poll after its completion, refused ones
    /// included.
    pub latency_ns: Histogram,
}

/// Counters of one queue, see [`crate::BlockPort::stats`].
#[derive(Debug, Clone)]
pub struct QueueSnapshot {
    /// Index of the queue.
    pub index: u16,
    /// Whether it runs.
    pub running: bool,
    /// Counters of requests.
    pub block: Arc<BlockStats>,
    /// Counters of the ring (of the last time it ran); `None` while it starts for the first time.
    pub ring: Option<Arc<QueueStats>>,
}
