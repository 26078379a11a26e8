//! One connection whose guest and peer send what they like, while a pipe comes and goes, for the
//! fuzzer.

use crate::flow::Flow;
use crate::segment::Segment;
use crate::takeover::Snapshot;
use crate::verdict::{Checksum, GuestVerdict, Share};
use crate::{FlowEvent, FlowSnapshot};

/// Token of the pipe.
const TOKEN: u64 = 7;

/// A connection, and what the pipe knows of it.
#[derive(Debug)]
pub struct Connection {
    flow: Flow,
    taken: Option<FlowSnapshot>,
}

impl Connection {
    /// Begun by a frame of the guest's; none if that is no TCP segment.
    #[must_use]
    pub fn begin(frame: &[u8]) -> Option<Self> {
        let segment = Segment::parse(frame, frame.len())?;
        Some(Self { flow: Flow::begin(frame, &segment), taken: None })
    }

    /// A frame of the guest's.
    ///
    /// # Panics
    /// It became longer, or its headers were cut.
    pub fn guest_sends(&mut self, frame: &mut [u8]) {
        let Some(segment) = Segment::parse(frame, frame.len()) else { return };
        let to = self.flow.guest_sends(frame, &segment, true, &mut told);
        if let GuestVerdict::Bare(len) | GuestVerdict::Trimmed(len) = to {
            assert!((segment.headers_len()..=frame.len()).contains(&len), "{len} bytes left");
        }
    }

    /// A frame of the peer's.
    ///
    /// # Panics
    /// A share of it is longer than it is, or its headers were cut.
    pub fn peer_sends(&mut self, frame: &[u8], is_right: bool) {
        let Some(segment) = Segment::parse(frame, frame.len()) else { return };
        let sum = if is_right { Checksum::Right } else { Checksum::Wrong };
        let to = self.flow.peer_sends(frame, &segment, sum, &mut told);
        for share in [to.guest, to.twin] {
            if share != Share::Nothing {
                let len = share.frame_len(&segment, frame.len());
                assert!((segment.headers_len()..=frame.len()).contains(&len), "{share:?}: {len}");
            }
        }
        let mut copy = frame.to_vec();
        self.flow.edit_for_guest(&mut copy, &segment, true, to.guest);
        if to.guest != Share::Nothing {
            self.flow.note_delivery(&segment);
        }
        if to.twin != Share::Nothing {
            copy.copy_from_slice(frame);
            self.flow.edit_for_twin(&mut copy, &segment, true, to.twin);
        }
    }

    /// A frame of the twin's.
    pub fn twin_sends(&mut self, frame: &mut [u8]) {
        let Some(segment) = Segment::parse(frame, frame.len()) else { return };
        let _ = self.flow.edit_from_twin(frame, &segment, true, &mut told);
    }

    /// Takes a step of the pipe: `what` says which, `len` how many bytes.
    ///
    /// # Panics
    /// A pipe is begun behind another one.
    pub fn pipe(&mut self, what: u8, len: u32) {
        match what % 8 {
            0 => {
                if let Ok(Snapshot::Ready(taken)) = self.flow.snapshot(len.into(), TOKEN) {
                    self.taken = Some(taken);
                }
            }
            1 => {
                if let Some(taken) = self.taken.take()
                    && self.flow.start(TOKEN, &taken, len).is_ok()
                {
                    assert!(self.flow.has_twin());
                }
            }
            2 => {
                let _ = self.flow.finish(TOKEN, len);
            }
            3 => self.taken = self.flow.receive_snapshot(len.into(), TOKEN).ok(),
            4 => {
                if let Some(taken) = self.taken.take() {
                    let _ = self.flow.receive_start(TOKEN, &taken, len.into(), len);
                }
            }
            5 => {
                let _ = self.flow.receive_stop(TOKEN, len);
            }
            6 => {
                let _ = self.flow.receive_finish(TOKEN, len);
            }
            _ => {
                let _ = (self.flow.send.retarget(TOKEN, len), self.flow.receive_own(TOKEN));
            }
        }
    }
}

fn told(token: u64, event: FlowEvent) {
    assert_eq!(token, TOKEN, "{event:?} for nobody");
}
