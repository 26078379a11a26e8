//! Compaction: values that are still wanted move out of segments that hold mostly others.
//!
//! A segment behind the last checkpoint, less than half of whose values are live, is read record by
//! record. Each value that a version refers to is copied to the log's end, with the version's commit;
//! then the version refers to the copy. Once nothing refers to the segment, the next checkpoint removes
//! it.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::Host;

use crate::deed::{Deed, log_op, op_at, put_op};
use crate::fail::Fail;
use crate::log::Place;
use crate::map::{INLINE_BYTES, Loc, Slot};
use crate::record::{Reader, Stop, kind};
use crate::reserve::Purpose;
use crate::segment::name;
use crate::store::Store;
use crate::tx::Where;

/// After a failure the next try waits.
const PAUSE_MS: u64 = 1000;
/// Copies are appended in pieces of so many bytes, about.
const PIECE_BYTES: usize = 256 << 10;

/// A segment that is emptied.
#[derive(Debug)]
pub struct Compaction {
    /// Which.
    pub segment: u32,
    reader: Reader,
    copies: Vec<Copy>,
    body: Vec<u8>,
}

#[derive(Debug)]
struct Copy {
    place: Where,
    key: Box<[u8]>,
    commit: u64,
    old: Loc,
    at: usize,
}

impl Store {
    /// Finds a segment that is worth it.
    pub(crate) fn begin_compaction(&mut self, host: &mut dyn Host) {
        if self.log.appended < self.compact_at || host.now_ms() < self.compact_after_ms {
            return;
        }
        let old = self.log.books.segments.range(..self.replay_from.segment);
        let sparse = old.filter(|(_, s)| s.pins == 0 && s.live > 0 && s.live * 2 < s.values);
        let worst = sparse.min_by_key(|(_, s)| s.live).map(|(n, _)| *n);
        let Some(segment) = worst else {
            self.compact_at = self.log.appended + self.config.segment_bytes / 16;
            return;
        };
        let file = self.log.books.file(host, segment);
        match file.and_then(|file| Reader::new(host, file, segment, 0)) {
            Ok(reader) => {
                let (copies, body) = (Vec::new(), Vec::new());
                self.compaction = Some(Box::new(Compaction { segment, reader, copies, body }));
            }
            Err(errno) => self.compaction_failed(host, segment, &Fail::storage("it", errno)),
        }
    }

    fn compaction_failed(&mut self, host: &mut dyn Host, segment: u32, fail: &Fail) {
        let segment = name(segment);
        host.log(level::WARN, &format!("{segment} is not compacted: {}", fail.text));
        self.compact_after_ms = host.now_ms() + PAUSE_MS;
        // If part of it was copied, a checkpoint cannot free anything yet.
        self.log.reserve.take_back();
    }

    /// Reads so many bytes of the segment, at least, and copies what is live.
    pub(crate) fn go_on_compaction(&mut self, host: &mut dyn Host, bytes: u64) {
        let Some(mut compaction) = self.compaction.take() else { return };
        let segment = compaction.segment;
        // Files are closed when there are many: it may be another handle now.
        let file = match self.log.books.file(host, segment) {
            Ok(file) => file,
            Err(errno) => {
                return self.compaction_failed(host, segment, &Fail::storage("it", errno));
            }
        };
        compaction.reader.reopened(file);
        let until = compaction.reader.at + bytes;
        let mut over = false;
        while compaction.reader.at < until && compaction.body.len() < PIECE_BYTES {
            match compaction.reader.next(host) {
                Ok((head, at)) => self.find_live(&mut compaction, head.kind, at),
                Err(Stop::End) => {
                    over = true;
                    break;
                }
                Err(stop) => {
                    host.log(level::ERROR, &format!("{}: {stop:?}", name(segment)));
                    // It is left alone from now on.
                    self.log.books.segments.entry(segment).or_default().values = 0;
                    over = true;
                    break;
                }
            }
        }
        if let Err(fail) = self.copy(host, &mut compaction) {
            return self.compaction_failed(host, segment, &fail);
        }
        if over {
            self.want_checkpoint();
        } else {
            self.compaction = Some(compaction);
        }
    }

    fn find_live(&mut self, compaction: &mut Compaction, kind: u32, body_at: u64) {
        let Compaction { segment, reader, copies, body: out } = compaction;
        let body = reader.body();
        let (mut at, skip) = match kind {
            kind::COMMIT | kind::PREPARE => (Deed::read(body).map_or(body.len(), |d| d.1), 0),
            kind::SPILL => (8, 0),
            kind::MOVED => (0, 8),
            _ => return,
        };
        while at < body.len() {
            let Some((op, next)) = op_at(body, at + skip) else { return };
            at = next;
            if op.kind != log_op::PUT || op.value.len() <= INLINE_BYTES {
                continue;
            }
            let offset = (body_at + op.value_at as u64) as u32;
            let old = Loc { segment: *segment, offset, len: op.value.len() as u32 };
            let index = self.catalog.index_mut(op.table, op.index);
            let Some(chain) = index.and_then(|index| index.map.get_mut(op.key)) else { continue };
            for version in chain.versions_mut() {
                if version.slot != Slot::At(old) {
                    continue;
                }
                out.extend_from_slice(&version.commit.to_le_bytes());
                let place = (op.table, op.index);
                let at = put_op(out, log_op::PUT, place, 0, op.key, op.value);
                let (key, commit) = (op.key.into(), version.commit);
                copies.push(Copy { place, key, commit, old, at });
            }
        }
    }

    /// Appends the copies, and refers to them.
    fn copy(&mut self, host: &mut dyn Host, compaction: &mut Compaction) -> Result<(), Fail> {
        let body = core::mem::take(&mut compaction.body);
        let copies = core::mem::take(&mut compaction.copies);
        if copies.is_empty() {
            return Ok(());
        }
        let Place { segment, offset } =
            self.log.write(host, kind::MOVED, Purpose::Move, |out| out.extend_from_slice(&body))?;
        for copy in copies {
            let new = Loc { segment, offset: offset + copy.at as u32, ..copy.old };
            let books = &mut self.log.books;
            books.segments.entry(segment).or_default().values += u64::from(new.len);
            let Some(index) = self.catalog.index_mut(copy.place.0, copy.place.1) else { continue };
            let Some(chain) = index.map.get_mut(&copy.key) else { continue };
            let versions = chain.versions_mut().iter_mut();
            for version in versions.filter(|v| v.commit == copy.commit) {
                books.forget(&version.slot);
                version.slot = Slot::At(new);
                books.keep(&version.slot);
            }
        }
        Ok(())
    }

    /// If another checkpoint would free enough, it is made.
    pub(crate) fn want_checkpoint(&mut self) {
        let segments = self.log.books.segments.values();
        let dead: u64 = segments.filter(|s| s.live == 0 && s.pins == 0).map(|s| s.len).sum();
        self.checkpoint_wanted |= dead >= 2 * self.config.segment_bytes.max(self.checkpoint_len);
    }
}
