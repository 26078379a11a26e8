//! A connection scenario by hand, for tests.

use crate::flow::Flow;
use crate::segment::{ACK, PSH, SYN, Segment};
use crate::takeover::Snapshot;
use crate::testing::{Build, Read, key, mirror, read, sacks, timestamps, words};
use crate::verdict::{Checksum, GuestVerdict, Share, Shares};
use crate::{FlowEvent, FlowKey, FlowSnapshot, ReceiveStart};

pub(crate) const ISS: u32 = 0xffff_ff00;
pub(crate) const IRS: u32 = 0x9000_0000;
/// First bytes of both directions.
pub(crate) const OURS: u32 = ISS + 1;
pub(crate) const THEIRS: u32 = IRS + 1;
pub(crate) const TOKEN: u64 = 7;
pub(crate) const GUEST: Shares = Shares::GUEST;
/// A twin that sends gets headers only.
pub(crate) const TWIN: Shares = Shares { guest: Share::Nothing, twin: Share::Bare };
pub(crate) const BOTH: Shares = Shares { guest: Share::Whole, twin: Share::Bare };

pub(crate) struct Scenario {
    pub flow: Flow,
    pub key: FlowKey,
    pub events: Vec<FlowEvent>,
    /// Clocks of guest and peer.
    pub clocks: [u32; 2],
}

/// Makes a frame as long as its share is, and fills in the checksum that was left open.
pub(crate) fn finish(frame: &mut Vec<u8>, segment: &Segment, share: Share) {
    frame.truncate(share.frame_len(segment, frame.len()));
    if let Share::First(_) = share {
        let check = !words(&frame[segment.offset()..]);
        let at = segment.offset() + 16;
        frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
}

/// A number of the guest's direction on the wire, counted from its first byte.
pub(crate) fn ours(n: u32) -> u32 {
    OURS.wrapping_add(n)
}

/// The same of the peer's.
pub(crate) fn theirs(n: u32) -> u32 {
    THEIRS.wrapping_add(n)
}

impl Scenario {
    /// A connection that the guest, or the peer, has opened.
    pub fn open(guest_connects: bool) -> Self {
        let clocks = [0xffff_fff0, 0xa000_0000];
        let key = key(false);
        let syn = |flags, ack, stamps| {
            let options = [timestamps(clocks[0], stamps), vec![1, 3, 3, 2]].concat();
            let frame = Build { options, ..Build::new(key, flags, ISS, ack) }.frame();
            Flow::begin(&frame, &Segment::parse(&frame, frame.len()).unwrap())
        };
        let mut case = if guest_connects {
            let mut case = Self { flow: syn(SYN, 0, 0), key, events: vec![], clocks };
            let options = [timestamps(clocks[1], clocks[0]), vec![1, 3, 3, 2]].concat();
            let new = Build::new(mirror(&key), SYN | ACK, IRS, OURS);
            assert_eq!(case.peer_raw(Build { options, ..new }).0, GUEST);
            case
        } else {
            Self { flow: syn(SYN | ACK, THEIRS, clocks[1]), key, events: vec![], clocks }
        };
        case.guest(0, 0, THEIRS, 0);
        case.peer(0, THEIRS, 0, 0);
        case
    }

    fn tell(events: &mut Vec<FlowEvent>) -> impl FnMut(u64, FlowEvent) {
        |token, event| {
            assert_eq!(token, TOKEN);
            events.push(event);
        }
    }

    pub fn guest_raw(&mut self, build: Build) -> (GuestVerdict, Vec<u8>, Segment) {
        let mut frame = build.frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let mut tell = Self::tell(&mut self.events);
        let to = self.flow.guest_sends(&mut frame, &segment, true, &mut tell);
        if let GuestVerdict::Bare(len) | GuestVerdict::Trimmed(len) = to {
            frame.truncate(len);
        }
        (to, frame, segment)
    }

    /// A segment of the guest's, its place in its own count.
    pub fn guest(&mut self, flags: u8, at: u32, ack: u32, len: usize) -> (GuestVerdict, Read) {
        let new = Build::new(self.key, flags | ACK, ours(at), ack);
        let options = timestamps(self.clocks[0], self.clocks[1]);
        let (to, frame, _) = self.guest_raw(Build { options, payload: vec![1; len], ..new });
        (to, read(&frame))
    }

    pub fn peer_raw(&mut self, build: Build) -> (Shares, Read, Option<Read>) {
        let frame = build.frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let mut tell = Self::tell(&mut self.events);
        let to = self.flow.peer_sends(&frame, &segment, Checksum::Right, &mut tell);
        let (mut guest, mut twin) = (frame.clone(), frame);
        self.flow.edit_for_guest(&mut guest, &segment, true, to.guest);
        if to.guest != Share::Nothing {
            self.flow.note_delivery(&segment);
            finish(&mut guest, &segment, to.guest);
        }
        if to.twin == Share::Nothing {
            return (to, read(&guest), None);
        }
        self.flow.edit_for_twin(&mut twin, &segment, true, to.twin);
        finish(&mut twin, &segment, to.twin);
        (to, read(&guest), Some(read(&twin)))
    }

    /// A segment of the peer's; what it acknowledges is counted on the wire.
    pub fn peer(
        &mut self,
        flags: u8,
        seq: u32,
        acks: u32,
        len: usize,
    ) -> (Shares, Read, Option<Read>) {
        let new = Build::new(mirror(&self.key), flags | ACK, seq, ours(acks));
        let options = timestamps(self.clocks[1], self.clocks[0]);
        self.peer_raw(Build { options, payload: vec![2; len], window: 777, ..new })
    }

    /// A segment of the twin's, as it leaves.
    pub fn twin(&mut self, flags: u8, at: u32, len: usize) -> Option<Read> {
        let new = Build::new(self.key, flags, ours(at), THEIRS);
        let options = timestamps(self.clocks[0].wrapping_add(500), 1);
        let mut frame = Build { options, payload: vec![3; len], ..new }.frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let mut tell = Self::tell(&mut self.events);
        self.flow.edit_from_twin(&mut frame, &segment, true, &mut tell).then(|| read(&frame))
    }

    pub fn snapshot(&mut self, sent_bytes: u64) -> FlowSnapshot {
        match self.flow.snapshot(sent_bytes, TOKEN) {
            Ok(Snapshot::Ready(taken)) => taken,
            other => panic!("{other:?}"),
        }
    }

    /// 100 bytes of the guest's, acknowledged, and a twin behind them.
    pub fn piped(len: u32) -> Self {
        let mut case = Self::open(false);
        case.guest(PSH, 0, THEIRS, 100);
        case.peer(0, THEIRS, 100, 0);
        let taken = case.snapshot(100);
        case.flow.start(TOKEN, &taken, len).unwrap();
        case
    }

    /// The same, with the pipe over.
    pub fn shifted(len: u32) -> Self {
        let mut case = Self::piped(len);
        case.twin(ACK, 100, len as usize).unwrap();
        assert_eq!(case.peer(0, THEIRS, 100 + len, 0).0, TWIN);
        assert_eq!(case.flow.finish(TOKEN, len), Ok(()));
        case.events.clear();
        case
    }

    /// 100 bytes of the peer's, acknowledged by the guest, and a twin that receives behind them.
    pub fn receiving(wanted: u32) -> Self {
        let mut case = Self::open(false);
        case.peer(PSH, THEIRS, 0, 100);
        case.guest(0, 0, theirs(100), 0);
        let taken = case.flow.receive_snapshot(100, TOKEN).unwrap();
        let start = case.flow.receive_start(TOKEN, &taken, 100, wanted);
        assert_eq!(start, Ok(ReceiveStart { own_bytes: 0, twin_bytes: wanted }));
        case
    }

    /// Acknowledgement of the twin's, as it leaves; `ack` is counted on the wire.
    pub fn twin_acks(&mut self, ack: u32, window: u16, blocks: &[(u32, u32)]) -> Option<Read> {
        let receiving = self.flow.receive.twin.unwrap();
        let place = |n: u32| theirs(n).wrapping_sub(receiving.offset);
        let stamps = timestamps(self.clocks[0].wrapping_add(500), self.clocks[1]);
        let blocks: Vec<_> = blocks.iter().map(|(l, r)| (place(*l), place(*r))).collect();
        let options = if blocks.is_empty() { stamps } else { [stamps, sacks(&blocks)].concat() };
        let new = Build::new(self.key, ACK, receiving.send_seq, place(ack));
        self.twin_raw(Build { window, options, ..new })
    }

    pub fn twin_raw(&mut self, build: Build) -> Option<Read> {
        let mut frame = build.frame();
        let segment = Segment::parse(&frame, frame.len()).unwrap();
        let mut tell = Self::tell(&mut self.events);
        self.flow.edit_from_twin(&mut frame, &segment, true, &mut tell).then(|| read(&frame))
    }

    pub fn told(&mut self) -> Vec<FlowEvent> {
        std::mem::take(&mut self.events)
    }
}
