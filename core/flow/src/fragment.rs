//! Segments of a peer's that come in fragments: its path takes no long packets, and it does not
//! look for that (RFC 1191). They are not put together here, so a pipe cannot know what has come.
//!
//! The first fragment has the TCP header. On a connection with a shift its numbers are made the
//! guest's, and the checksum, which is over all fragments, stays as right as it was; the others
//! need nothing. Beside a twin it is dropped: the guest could take the twin's bytes for its own, or
//! miss how much is acknowledged. Without it the others are nothing, and the segment comes again.
//! Such a connection has no twin from then on.

use crate::flow::Flow;
use crate::segment::Segment;
use crate::table::FlowTable;
use crate::verdict::Share;

impl FlowTable {
    /// Takes a frame for the guest that is no whole segment, perhaps the beginning of one; changed
    /// in place. False: it is not for the guest.
    pub fn fragment_comes(&mut self, eth: &mut [u8], frame_len: usize) -> bool {
        let Some(segment) = Segment::parse_first(eth, frame_len) else { return true };
        let flow = self.get(&segment.key_of_receiver(eth));
        flow.is_none_or(|flow| flow.fragment_comes(eth, &segment))
    }
}

impl Flow {
    fn fragment_comes(&mut self, eth: &mut [u8], segment: &Segment) -> bool {
        self.is_fragmented = true;
        let is_guests = !self.has_twin() && !self.is_broken;
        if is_guests {
            self.edit_for_guest(eth, segment, true, Share::Whole);
        }
        is_guests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FlowError;
    use crate::scenario::{Scenario, THEIRS, TOKEN, ours};
    use crate::segment::{ACK, PSH};
    use crate::testing::{Build, mirror, read, timestamps};

    /// A segment as it was sent, and its first fragment.
    fn fragment(case: &Scenario) -> (Vec<u8>, Vec<u8>) {
        let new = Build::new(mirror(&case.key), ACK | PSH, THEIRS, ours(5));
        let whole = Build { options: timestamps(7, 8), payload: vec![3; 1200], ..new }.frame();
        let mut first = whole[..14 + 20 + 32 + 512].to_vec();
        let len = first.len() as u16 - 14;
        first[16..18].copy_from_slice(&len.to_be_bytes());
        // More of them follow, and it is at the beginning.
        first[20..22].copy_from_slice(&0x2000_u16.to_be_bytes());
        (whole, first)
    }

    fn comes(case: &mut Scenario, frame: &mut [u8]) -> bool {
        let len = frame.len();
        assert!(Segment::parse(frame, len).is_none());
        let segment = Segment::parse_first(frame, len).unwrap();
        case.flow.fragment_comes(frame, &segment)
    }

    #[test]
    fn a_first_fragment_gets_the_guests_numbers_and_ends_pipes() {
        let mut case = Scenario::shifted(5);
        let (mut whole, mut first) = fragment(&case);
        assert!(comes(&mut case, &mut first));
        // With the header that it has now the whole would be right.
        whole[34..66].copy_from_slice(&first[34..66]);
        let read = read(&whole);
        assert_eq!((read.seq, read.ack, read.off_by), (THEIRS, ours(0), 0));
        assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Unknown));
        assert_eq!(case.flow.receive_snapshot(0, TOKEN), Err(FlowError::Unknown));
    }

    #[test]
    fn beside_a_twin_it_is_dropped() {
        for mut case in [Scenario::piped(5), Scenario::receiving(5)] {
            let (_, mut first) = fragment(&case);
            let before = first.clone();
            assert!(!comes(&mut case, &mut first));
            assert_eq!(first, before);
        }
    }

    #[test]
    fn what_is_not_a_first_fragment_passes() {
        let mut table = FlowTable::new(1);
        let (whole, first) = fragment(&Scenario::open(false));
        for place in [0x2001_u16, 0x0040, 0x2000] {
            let mut frame = first.clone();
            frame[20..22].copy_from_slice(&place.to_be_bytes());
            let before = frame.clone();
            let len = frame.len();
            assert!(table.fragment_comes(&mut frame, len) && frame == before);
        }
        assert!(Segment::parse_first(&whole, whole.len()).is_none());
    }

    /// Else acknowledgements would go to the guest, that knows nothing of the bytes, and not to the
    /// twin.
    #[test]
    fn a_peer_that_is_heard_elsewhere_only_has_no_twin() {
        let mut case = Scenario::open(true);
        assert!(case.flow.snapshot(0, TOKEN).is_ok());
        case.flow.is_heard = false;
        (case.flow.reservation, case.flow.send.twin) = (None, None);
        assert_eq!(case.flow.snapshot(0, TOKEN), Err(FlowError::Unknown));
        assert_eq!(case.flow.receive_snapshot(0, TOKEN), Err(FlowError::Unknown));
        case.peer(0, THEIRS, 0, 0);
        assert!(case.flow.snapshot(0, TOKEN).is_ok());
    }
}
