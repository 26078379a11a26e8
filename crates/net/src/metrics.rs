//! Counters of a switch as a whole. Queues and the uplink have [`base::counter::QueueStats`].

use base::counter::Counter;

/// Written by the switch's sidecore, read by all.
#[derive(Debug, Default)]
pub struct SwitchStats {
    /// Frames sent to every port: broadcast, multicast, unknown destination.
    pub floods: Counter,
    /// Copies of flooded frames that a receiver had no buffers for.
    pub flood_drops: Counter,
    /// Times a sender was held because its receiver had no buffers.
    pub holds: Counter,
    /// Times a receiver was declared stalled.
    pub stalls: Counter,
    /// Super-packets cut in software for a receiver without the offload.
    pub software_segmented: Counter,
    /// Checksums filled in in software for a receiver without the offload.
    pub software_checksums: Counter,
}
