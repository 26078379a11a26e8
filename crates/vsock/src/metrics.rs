//! Counters of a port, beside those of its two queues.

use base::counter::Counter;

/// Written by the sidecore, read by all. Gauges say so.
#[derive(Debug, Default)]
pub struct VsockStats {
    /// Connections now (gauge), those being opened and closed included.
    pub connections: Counter,
    /// Connections that wait for an answer now (gauge).
    pub half_open: Counter,
    /// Opened by the guest.
    pub opened_by_guest: Counter,
    /// Opened towards the guest, by the host or by another guest.
    pub opened_to_guest: Counter,
    /// Requests of the guest that were refused (no listener, not allowed, a limit).
    pub refused: Counter,
    /// Unix connections dropped before the guest was asked (bad line, time-out, a limit).
    pub handshakes_dropped: Counter,
    /// Payload bytes that the guest sent.
    pub bytes_from_guest: Counter,
    /// Payload bytes that the guest received.
    pub bytes_to_guest: Counter,
    /// Bytes of the guest that went through a connection's buffer: one more copy.
    pub buffered_bytes: Counter,
    /// Resets sent to the guest.
    pub resets_sent: Counter,
    /// Resets received from the guest.
    pub resets_received: Counter,
    /// Resets dropped because the guest gave no receive buffers for 256 of them.
    pub resets_dropped: Counter,
    /// Packets of the guest that made no sense.
    pub malformed: Counter,
    /// Connections reset because the guest broke the protocol (credit, order).
    pub violations: Counter,
    /// Connections ended by a time-out.
    pub timeouts: Counter,
    /// Times that bytes for the guest waited for its credit.
    pub credit_waits: Counter,
    /// Times that packets for the guest waited for its receive buffers.
    pub buffer_waits: Counter,
}

impl VsockStats {
    /// Names, values and what they mean, for a metrics page.
    pub fn values(&self) -> [(&'static str, u64, &'static str); 17] {
        [
            (
                "connections",
                self.connections.get(),
                "Connections now, those being opened and closed included.",
            ),
            ("half_open", self.half_open.get(), "Connections that wait for an answer now."),
            ("opened_by_guest", self.opened_by_guest.get(), "Opened by the guest."),
            (
                "opened_to_guest",
                self.opened_to_guest.get(),
                "Opened towards the guest, by the host or by another guest.",
            ),
            (
                "refused",
                self.refused.get(),
                "Requests of the guest that were refused (no listener, not allowed, a limit).",
            ),
            (
                "handshakes_dropped",
                self.handshakes_dropped.get(),
                "Unix connections dropped before the guest was asked (bad line, time-out, a limit).",
            ),
            ("bytes_from_guest", self.bytes_from_guest.get(), "Payload bytes that the guest sent."),
            ("bytes_to_guest", self.bytes_to_guest.get(), "Payload bytes that the guest received."),
            (
                "buffered_bytes",
                self.buffered_bytes.get(),
                "Bytes of the guest that went through a connection's buffer: one more copy.",
            ),
            ("resets_sent", self.resets_sent.get(), "Resets sent to the guest."),
            ("resets_received", self.resets_received.get(), "Resets received from the guest."),
            (
                "resets_dropped",
                self.resets_dropped.get(),
                "Resets dropped because the guest gave no receive buffers for 256 of them.",
            ),
            ("malformed", self.malformed.get(), "Packets of the guest that made no sense."),
            (
                "violations",
                self.violations.get(),
                "Connections reset because the guest broke the protocol (credit, order).",
            ),
            ("timeouts", self.timeouts.get(), "Connections ended by a time-out."),
            (
                "credit_waits",
                self.credit_waits.get(),
                "Times that bytes for the guest waited for its credit.",
            ),
            (
                "buffer_waits",
                self.buffer_waits.get(),
                "Times that packets for the guest waited for its receive buffers.",
            ),
        ]
    }
}
