//! Counters of a switch as a whole. Queues and the uplink have [`base::counter::QueueStats`].

base::counter_set! {
    /// Written by the switch's sidecore, read by all.
    pub struct SwitchStats {
        /// Frames sent to every port: broadcast, multicast, unknown destination.
        floods,
        /// Frames from addresses that found no place in the table: answers to them are flooded.
        unlearned,
        /// Addresses that moved from one port to another, the uplink being one.
        mac_moves,
        /// Copies of flooded frames that a receiver had no buffers for.
        flood_drops,
        /// Times a sender was held: its receiver had no buffers, or more than its kernel had taken.
        holds,
        /// Nanoseconds that senders were held, summed over their queues.
        held_ns,
        /// Times a receiver was declared stalled.
        stalls,
        /// Super-packets cut in software for a receiver without the offload.
        software_segmented,
        /// Checksums filled in in software for a receiver without the offload.
        software_checksums,
    }
}
