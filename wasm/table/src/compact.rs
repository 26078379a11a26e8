//! Compaction: values that are still in use move out of segments that hold mostly others.
//!
//! A segment behind the last checkpoint, less than half of whose values are live, is read record by
//! record. Each value that a version refers to is copied to the log's end, with the version's
//! commit; then the version refers to the copy. Once nothing refers to the segment, the next
//! checkpoint removes it.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::Host;

use crate::catalog::Catalog;
use crate::database::Database;
use crate::fail::Fail;
use crate::log::Place;
use crate::map::IndexId;
use crate::record::{Reader, Stop, kind};
use crate::record_body::{TxHead, log_op, op_at, put_op};
use crate::reserve::Purpose;
use crate::segment::name;
use crate::slot::{INLINE_BYTES, Loc, Slot};

/// Wait for the next try after a failure.
const PAUSE_MS: u64 = 1000;
/// Bytes of a piece of copies that is appended, about.
const PIECE_BYTES: usize = 256 << 10;

/// Segment that is being emptied.
#[derive(Debug)]
pub struct Compaction {
    segment: u32,
    reader: Reader,
    /// Values that are to be copied.
    copies: Vec<MovedValue>,
    /// Body of the record that copies them.
    body: Vec<u8>,
}

/// Value that moves.
#[derive(Debug)]
struct MovedValue {
    index: IndexId,
    key: Box<[u8]>,
    commit: u64,
    old: Loc,
    /// Offset of the value in the record's body.
    at: usize,
}

/// Compaction: the segment that is being emptied, and when another one is looked for.
#[derive(Debug, Default)]
pub struct Compactor {
    /// Segment that is being emptied.
    pub current: Option<Box<Compaction>>,
    /// Bytes appended to the log from which on another one is looked for.
    look_at: u64,
    /// Time before which none is looked for, since the last try failed.
    after_ms: u64,
}

impl Compactor {
    /// Number of the segment that is being emptied.
    pub fn segment(&self) -> Option<u32> {
        self.current.as_ref().map(|compaction| compaction.segment)
    }

    /// Looks for another segment at the next occasion.
    pub fn look_again(&mut self) {
        self.look_at = 0;
    }

    /// Finds a segment before `replay_from` that is worth it, and begins with it.
    pub fn begin(&mut self, host: &mut dyn Host, db: &mut Database, replay_from: Place) {
        let log = &mut db.log;
        if log.appended < self.look_at || host.now_ms() < self.after_ms {
            return;
        }
        let old = log.usage.segments.range(..replay_from.segment);
        let sparse = old.filter(|(_, s)| s.pins == 0 && s.live > 0 && s.live * 2 < s.values);
        let worst = sparse.min_by_key(|(_, s)| s.live).map(|(n, _)| *n);
        let Some(segment) = worst else {
            self.look_at = log.appended + db.config.segment_bytes / 16;
            return;
        };
        let file = log.usage.file(host, segment);
        match file.and_then(|file| Reader::new(host, file, segment, 0)) {
            Ok(reader) => {
                let (copies, body) = (Vec::new(), Vec::new());
                self.current = Some(Box::new(Compaction { segment, reader, copies, body }));
            }
            Err(errno) => self.fail(host, db, segment, &Fail::storage("it", errno)),
        }
    }

    fn fail(&mut self, host: &mut dyn Host, db: &mut Database, segment: u32, fail: &Fail) {
        let segment = name(segment);
        host.log(level::WARN, &format!("{segment} is not compacted: {}", fail.text));
        self.after_ms = host.now_ms() + PAUSE_MS;
        // If part of it was copied, a checkpoint cannot free anything yet.
        db.log.reserve.take_back();
    }

    /// Reads so many bytes of the segment, at least, and copies what is live. True: nothing is left
    /// in it.
    pub fn go_on(&mut self, host: &mut dyn Host, db: &mut Database, bytes: u64) -> bool {
        let Some(mut compaction) = self.current.take() else { return false };
        let segment = compaction.segment;
        // Files are closed when there are many: it may be another handle now.
        let file = match db.log.usage.file(host, segment) {
            Ok(file) => file,
            Err(errno) => {
                self.fail(host, db, segment, &Fail::storage("it", errno));
                return false;
            }
        };
        compaction.reader.set_file(file);
        let until = compaction.reader.at + bytes;
        let mut over = false;
        while compaction.reader.at < until && compaction.body.len() < PIECE_BYTES {
            match compaction.reader.next(host) {
                Ok((head, at)) => compaction.find_live(&mut db.catalog, head.kind, at),
                Err(Stop::End) => {
                    over = true;
                    break;
                }
                Err(stop) => {
                    host.log(level::ERROR, &format!("{}: {stop:?}", name(segment)));
                    // It is left alone from now on.
                    db.log.usage.segments.entry(segment).or_default().values = 0;
                    over = true;
                    break;
                }
            }
        }
        if let Err(fail) = compaction.move_values(host, db) {
            self.fail(host, db, segment, &fail);
            return false;
        }
        if !over {
            self.current = Some(compaction);
        }
        over
    }
}

impl Compaction {
    /// Collects the values of a record that a version refers to.
    fn find_live(&mut self, catalog: &mut Catalog, kind: u32, body_at: u64) {
        let Self { segment, reader, copies, body: out } = self;
        let body = reader.body();
        let (mut at, skip) = match kind {
            kind::COMMIT | kind::PREPARE => (TxHead::read(body).map_or(body.len(), |d| d.1), 0),
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
            let index = catalog.index_mut(op.table, op.index);
            let Some(chain) = index.and_then(|index| index.map.get_mut(op.key)) else { continue };
            for version in chain.versions_mut() {
                if version.slot != Slot::At(old) {
                    continue;
                }
                out.extend_from_slice(&version.commit.to_le_bytes());
                let index = (op.table, op.index);
                let at = put_op(out, log_op::PUT, index, 0, op.key, op.value);
                let (key, commit) = (op.key.into(), version.commit);
                copies.push(MovedValue { index, key, commit, old, at });
            }
        }
    }

    /// Appends the copies to the log, and makes versions refer to them.
    fn move_values(&mut self, host: &mut dyn Host, db: &mut Database) -> Result<(), Fail> {
        let body = core::mem::take(&mut self.body);
        let copies = core::mem::take(&mut self.copies);
        if copies.is_empty() {
            return Ok(());
        }
        let Place { segment, offset } =
            db.log.write(host, kind::MOVED, Purpose::Move, |out| out.extend_from_slice(&body))?;
        for copy in copies {
            let new = Loc { segment, offset: offset + copy.at as u32, ..copy.old };
            let usage = &mut db.log.usage;
            usage.segments.entry(segment).or_default().values += u64::from(new.len);
            let Some(index) = db.catalog.index_mut(copy.index.0, copy.index.1) else { continue };
            let Some(chain) = index.map.get_mut(&copy.key) else { continue };
            let versions = chain.versions_mut().iter_mut();
            for version in versions.filter(|v| v.commit == copy.commit) {
                usage.forget(&version.slot);
                version.slot = Slot::At(new);
                usage.keep(&version.slot);
            }
        }
        Ok(())
    }
}
