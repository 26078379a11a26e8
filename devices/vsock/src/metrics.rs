//! Counters of a port, beside those of its two queues.

base::counter_set! {
    /// Written by the sidecore, read by all. Gauges say so.
    pub struct VsockStats {
        /// Connections now (gauge), those being opened and closed included.
        connections,
        /// Connections that wait for an answer now (gauge).
        half_open,
        /// Opened by the guest.
        opened_by_guest,
        /// Opened towards the guest, by the host or by another guest.
        opened_to_guest,
        /// Requests of the guest that were refused (no listener, not allowed, a limit).
        refused,
        /// Requests for a privileged service refused for the guest's port, 1,024 or above.
        unprivileged,
        /// Unix connections dropped before the guest was asked (bad line, time-out, a limit).
        handshakes_dropped,
        /// Payload bytes that the guest sent.
        bytes_from_guest,
        /// Payload bytes that the guest received.
        bytes_to_guest,
        /// Bytes of the guest that went through a connection's buffer: one more copy.
        buffered_bytes,
        /// Resets sent to the guest.
        resets_sent,
        /// Resets received from the guest.
        resets_received,
        /// Resets dropped because the guest gave no receive buffers for 256 of them.
        resets_dropped,
        /// Packets of the guest that made no sense.
        malformed,
        /// Connections reset because the guest broke the protocol (credit, order).
        violations,
        /// Connections ended by a time-out.
        timeouts,
        /// Times that bytes for the guest waited for its credit.
        credit_waits,
        /// Times that packets for the guest waited for its receive buffers.
        buffer_waits,
    }
}
