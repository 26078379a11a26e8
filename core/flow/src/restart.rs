//! A connection over a restart of the daemon: its record in the journal, and what is made of that.

use crate::clock::Clock;
use crate::flow::Flow;
use crate::journal::{JournalMark, Record};
use crate::receive::{Passage, ReceiveHalf};
use crate::send::SendHalf;
use crate::types::FlowKey;

/// Distance from which numbers may not be told from later ones: a quarter of what they can be
/// compared over.
const FAR: u32 = 1 << 29;

impl Flow {
    /// Record of the connection, for the next daemon.
    pub fn record(&self, key: FlowKey) -> Record {
        Record {
            key,
            macs: self.macs,
            shift: self.shift,
            has_twin: self.has_twin() || self.is_broken,
            is_over: self.is_over(),
            send_base: self.send.base,
            receive_base: self.receive.base,
            timestamp: self.clock.sent,
            sent_end: self.send.end,
            guest_from: self.send.guest_from,
            guest_ack: self.receive.guest_ack,
            guest_scale: self.receive.scale,
        }
    }

    /// State that the journal has once the record is there.
    pub fn journal_mark(&self) -> JournalMark {
        let (sent_end, guest_ack) = (self.send.end, self.receive.guest_ack);
        JournalMark { sent_end, guest_ack, is_over: self.is_over() }
    }

    /// Whether the record in the journal would mislead the next daemon.
    pub fn is_record_stale(&self) -> bool {
        let is_far = |now: u32, noted: u32| now.wrapping_sub(noted) > FAR;
        self.is_journaled()
            && (self.is_over() != self.mark.is_over
                || is_far(self.send.end, self.mark.sent_end)
                || is_far(self.receive.guest_ack, self.mark.guest_ack))
    }

    /// Makes a connection of its record. What is missing is learned from its next segments; one
    /// that had a twin is broken: nobody knows what of the twin's the peer has.
    pub fn restored(record: &Record, now_ns: u64) -> Self {
        let send = SendHalf {
            base: record.send_base,
            end: record.sent_end,
            acked: record.sent_end,
            guest_from: record.guest_from,
            is_closed: record.is_over,
            ..SendHalf::default()
        };
        let receive = ReceiveHalf {
            base: record.receive_base,
            passage: Passage::Unknown,
            guest_ack: record.guest_ack,
            scale: record.guest_scale,
            guest_edge: record.guest_ack,
            end: record.guest_ack,
            is_closed: record.is_over,
            ..ReceiveHalf::default()
        };
        let mark = JournalMark {
            sent_end: record.sent_end,
            guest_ack: record.guest_ack,
            is_over: record.is_over || record.has_twin,
        };
        Self {
            send,
            receive,
            clock: Clock { sent: record.timestamp, peer: None },
            shift: record.shift,
            is_open: true,
            macs: record.macs,
            reset: record.has_twin,
            is_broken: record.has_twin,
            mark,
            is_heard: true,
            seen_ns: now_ns,
            ..Self::default()
        }
    }
}
