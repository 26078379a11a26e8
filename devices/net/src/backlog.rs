//! Frames from the uplink that wait for a receiver.
//!
//! Frames from the uplink come one behind the other, for all VMs, so none is left where it is for
//! one of them. But a peer out there sends a window's worth at once, in super-packets that one with
//! few buffers must get in pieces: a boot loader with eight of them would lose most of each burst,
//! and its connection would crawl. So what finds no buffers is copied, cut into what the receiver
//! takes, and put into its ring as it posts buffers, in the order in which it came.
//!
//! The memory is the switch's: a fixed number of buffers, made with the uplink, one for a receiver
//! at a time, and only while it has something in it. A receiver that takes nothing for a second
//! loses all of it, and gets no buffer again before it has taken a frame without. Where no buffer
//! is left, frames are dropped as if there were none.
//!
//! Ports with a hook have none: it looks at a frame once, as it arrives.

use frame::{Body, Frame, HEAD_LEN, SegmentPlan, VNET_LEN, Vnet};

use crate::fdb::PortId;

/// Bytes of one receiver's buffer: two windows of 256 KiB, the largest that boot loaders announce.
const BUFFER_LEN_BYTES: usize = 512 << 10;
/// Receivers of a switch that may have one at a time: 16 MiB, which are touched when they are used.
const MAX_BUFFERS: usize = 32;
/// Buffers of one VM: with more, the ports of one that takes a frame a second could keep those of
/// all others.
pub(crate) const MAX_BUFFERS_PER_VM: usize = MAX_BUFFERS / 4;
/// A receiver that takes nothing for so long is dead: Linux' first retransmission is long over
/// then.
const PATIENCE_NS: u64 = 1_000_000_000;
/// In front of each frame: its length and its lane.
const RECORD_LEN: usize = 8;

/// Frames that wait for one receiver, oldest first.
#[derive(Debug)]
pub(crate) struct Backlog {
    bytes: Box<[u8]>,
    /// Offsets at which the oldest begins, and the newest ends.
    start: usize,
    end: usize,
    /// Frames in it.
    pub count: u64,
    /// When the receiver last took something.
    pub since_ns: u64,
}

impl Backlog {
    fn new() -> Self {
        let bytes = vec![0; BUFFER_LEN_BYTES].into_boxed_slice();
        Self { bytes, start: 0, end: 0, count: 0, since_ns: 0 }
    }

    fn clear(&mut self) {
        (self.start, self.end, self.count) = (0, 0, 0);
    }

    /// Adds a frame with its virtio-net header, in two parts. False: no room.
    fn push(&mut self, lane: usize, wire: &[u8], rest: &[u8]) -> bool {
        let len = wire.len() + rest.len();
        let need = RECORD_LEN + len;
        if self.end + need > self.bytes.len() {
            // Moved only when half of it is free: a byte is moved once for each that goes.
            if self.start < self.bytes.len() / 2 {
                return false;
            }
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut put = |bytes: &[u8]| {
            self.bytes[self.end..self.end + bytes.len()].copy_from_slice(bytes);
            self.end += bytes.len();
        };
        put(&(len as u32).to_ne_bytes());
        put(&(lane as u32).to_ne_bytes());
        put(wire);
        put(rest);
        self.count += 1;
        true
    }

    /// Copies a frame: how many are kept, and how many found no room.
    pub fn push_whole(&mut self, lane: usize, frame: &Frame<'_>) -> (u64, u64) {
        match frame.body {
            Body::Ours(rest) if self.push(lane, frame.head, rest) => (1, 0),
            _ => (0, 1),
        }
    }

    /// Copies a frame as [`Backlog::push_whole`] does, in the pieces that the receiver takes.
    /// `frame` has no virtio-net header.
    pub fn push_segments(&mut self, lane: usize, frame: &[u8], plan: &SegmentPlan) -> (u64, u64) {
        let mut wire = [0; VNET_LEN + HEAD_LEN];
        wire[..VNET_LEN].copy_from_slice(&Vnet::default().to_bytes(1));
        let count = plan.count() as u64;
        for index in 0..plan.count() {
            let n = plan.headers(frame, index, &mut wire[VNET_LEN..]);
            let payload = plan.payload(frame, index);
            if !self.push(lane, &wire[..VNET_LEN + n], payload) {
                return (index as u64, count - index as u64);
            }
        }
        (count, 0)
    }

    /// When what waits is given up.
    pub fn ends_ns(&self) -> u64 {
        self.since_ns.saturating_add(PATIENCE_NS)
    }

    /// The oldest frame: its lane, and its bytes with the virtio-net header.
    pub fn front(&self) -> Option<(usize, &[u8])> {
        let record = &self.bytes[self.start..self.end];
        let (head, rest) = record.split_at_checked(RECORD_LEN)?;
        let word = |at| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        Some((word(4) as usize, &rest[..word(0) as usize]))
    }

    /// Drops the oldest frame.
    pub fn pop(&mut self) {
        let Some((_, bytes)) = self.front() else { return };
        self.start += RECORD_LEN + bytes.len();
        self.count -= 1;
        if self.start == self.end {
            self.clear();
        }
    }
}

/// The switch's buffers, and who has one.
#[derive(Debug, Default)]
pub(crate) struct Backlogs {
    spare: Vec<Backlog>,
    waiting: Vec<PortId>,
}

impl Backlogs {
    /// Makes those of a switch with an uplink. Allocates: not on a sidecore.
    pub fn new() -> Self {
        let spare = std::iter::repeat_with(Backlog::new).take(MAX_BUFFERS).collect();
        Self { spare, waiting: Vec::with_capacity(MAX_BUFFERS) }
    }

    /// Whether there are none: the switch has had no uplink yet.
    pub fn is_none(&self) -> bool {
        self.spare.is_empty() && self.waiting.is_empty()
    }

    /// Ports whose frames wait.
    pub fn waiting(&self) -> &[PortId] {
        &self.waiting
    }

    /// Lends a buffer to a port, none when all are lent, and lists the port as waiting.
    pub fn lend(&mut self, to: PortId, now_ns: u64) -> Option<Backlog> {
        let mut backlog = self.spare.pop()?;
        backlog.since_ns = now_ns;
        self.waiting.push(to);
        Some(backlog)
    }

    /// Takes a buffer back. Its port stays listed: see [`Backlogs::unlist`].
    pub fn give_back(&mut self, mut backlog: Backlog) {
        backlog.clear();
        self.spare.push(backlog);
    }

    /// Removes the port at this position of [`Backlogs::waiting`]; the last one takes its place.
    pub fn unlist(&mut self, at: usize) {
        self.waiting.swap_remove(at);
    }

    /// Takes back the buffer of a port that goes.
    pub fn reclaim(&mut self, port: PortId, backlog: Option<Backlog>) {
        if let Some(backlog) = backlog {
            self.give_back(backlog);
            self.waiting.retain(|id| *id != port);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Frames come out whole and in order, whatever their lengths, and none is taken without
        /// room.
        #[test]
        fn a_backlog_is_a_queue_of_bytes(
            steps in proptest::collection::vec(
                (any::<bool>(), 14usize..66_000, 0usize..200),
                1..200,
            ),
        ) {
            let mut backlog = Backlog::new();
            let mut model: VecDeque<(usize, Vec<u8>)> = VecDeque::new();
            for (n, (push, len, split)) in steps.into_iter().enumerate() {
                if push {
                    let bytes = vec![n as u8; len];
                    let (wire, rest) = bytes.split_at(split.min(len));
                    let used: usize = model.iter().map(|(_, bytes)| RECORD_LEN + bytes.len()).sum();
                    let need = RECORD_LEN + len;
                    let took = backlog.push(n, wire, rest);
                    prop_assert!(took || used + need > BUFFER_LEN_BYTES / 2);
                    if took {
                        model.push_back((n, bytes));
                    }
                } else {
                    backlog.pop();
                    model.pop_front();
                }
                let front = model.front().map(|(lane, bytes)| (*lane, &bytes[..]));
                prop_assert_eq!(backlog.front(), front);
                prop_assert_eq!(backlog.count, model.len() as u64);
            }
        }
    }
}
