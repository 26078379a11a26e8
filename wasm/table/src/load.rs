//! Checkpoints, read at the start.

use alloc::format;

use sdk::Host;

use crate::checkpoint::{VERSION, name};
use crate::entry;
use crate::fail::StartError;
use crate::log::Place;
use crate::map::{Version, Write};
use crate::record::{Reader, Stop, kind, u32_at, u64_at};
use crate::record_body::{Change, TxHead};
use crate::remembered::DoneRequests;
use crate::restored::Restored;

/// Reads a checkpoint.
pub fn load(restored: &mut Restored, host: &mut dyn Host, number: u64) -> Result<(), StartError> {
    let file = host.open(&name(number), 0)?;
    let mut reader = Reader::new(host, file, number as u32, 0)?;
    let wrong =
        |at: u64, why: &str| StartError::damaged(format!("{}, byte {at}: {why}", name(number)));
    let (mut count, mut whole) = (0, false);
    loop {
        let at = reader.at;
        let head = match reader.next(host) {
            Ok((head, _)) => head,
            Err(Stop::End) if whole => break,
            Err(Stop::End | Stop::Torn) => return Err(wrong(at, "its end is missing")),
            Err(Stop::Damaged(text)) => {
                return Err(StartError::damaged(format!("checkpoint: {text}")));
            }
            Err(Stop::Failed(errno)) => return Err(errno.into()),
        };
        if head.number != count || whole {
            return Err(wrong(at, "a record that does not belong there"));
        }
        restored.check_memory()?;
        count += 1;
        whole = head.kind == kind::END;
        load_record(restored, head.kind, reader.body())
            .ok_or_else(|| wrong(at, "a record is wrong"))?;
    }
    host.close(file);
    restored.checkpoints.number = number;
    restored.checkpoints.len = reader.file_len();
    Ok(())
}

fn load_record(restored: &mut Restored, kind: u32, body: &[u8]) -> Option<()> {
    match kind {
        kind::CHECKPOINT => load_head(restored, body)?,
        kind::SEGMENTS => {
            (0..body.len() / 12).for_each(|i| load_segment(restored, body, i * 12));
        }
        kind::CLIENTS => load_clients(restored, body),
        kind::PREPARED => load_prepared(restored, body)?,
        kind::TABLE => {
            let change = Change::read(body)?;
            restored.db.catalog.apply(&change);
            let table = restored.db.catalog.tables.get_mut(&change.table)?;
            (table.next_auto, table.logged_auto) = (change.auto, change.auto);
        }
        kind::ENTRIES => load_entries(restored, body)?,
        kind::END => {}
        _ => return None,
    }
    Some(())
}

fn load_head(restored: &mut Restored, body: &[u8]) -> Option<()> {
    let place = |at| Place { segment: u32_at(body, at), offset: u32_at(body, at + 4) };
    if body.len() != 48 || u32_at(body, 0) != VERSION {
        return None;
    }
    restored.checkpoints.replay_from = place(4);
    restored.captured = place(12);
    restored.db.catalog.next = u32_at(body, 20);
    restored.db.versions.last_commit = u64_at(body, 24);
    restored.db.txs.last = u64_at(body, 32);
    restored.captured_number = u64_at(body, 40);
    Some(())
}

fn load_segment(restored: &mut Restored, body: &[u8], at: usize) {
    let number = u32_at(body, at);
    let segment = restored.db.log.usage.segments.entry(number).or_default();
    segment.values = u64_at(body, at + 4);
}

fn load_clients(restored: &mut Restored, body: &[u8]) {
    for known in body.chunks_exact(40) {
        let mut client = [0; 16];
        client.copy_from_slice(&known[..16]);
        let (highest, mask, stamp) = (u64_at(known, 16), u64_at(known, 24), u64_at(known, 32));
        restored.db.remembered.put(client, DoneRequests { highest, mask, stamp });
    }
}

fn load_prepared(restored: &mut Restored, body: &[u8]) -> Option<()> {
    let (head, mut at) = TxHead::read(body)?;
    restored.put_prepared(head.tx, head.name);
    while at < body.len() {
        let index = (u32_at(body, at), *body.get(at + 4)?);
        let (entry, next) = entry::read(body, at + 5)?;
        let write = Write { slot: entry.slot, locked: entry.locked };
        restored.put_prepared_write((head.tx, head.name), index, entry.key.into(), write);
        at = next;
    }
    Some(())
}

fn load_entries(restored: &mut Restored, body: &[u8]) -> Option<()> {
    let index = (u32_at(body, 0), *body.get(4)?);
    let mut at = 5;
    while at < body.len() {
        let (entry, next) = entry::read(body, at)?;
        let version = Version { commit: entry.commit, slot: entry.slot };
        restored.put(index, entry.key.into(), version);
        at = next;
    }
    Some(())
}
