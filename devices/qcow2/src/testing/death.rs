//! States of a file after a kill and after a power cut.

use std::collections::HashSet;

use base::random::Random;

use super::bytes::Bytes;
use super::recorder::{Event, apply};

/// Bytes that reach the disk at once.
const SECTOR_LEN_BYTES: u64 = 512;

/// Stands for the file's length among the sectors.
const LENGTH: u64 = u64::MAX;

/// State after a kill: every event is there, since the kernel has it.
pub fn killed_at(before: &Bytes, log: &[Event]) -> Bytes {
    let mut bytes = before.clone();
    log.iter().for_each(|event| apply(&mut bytes, event));
    bytes
}

/// State after a power cut: every event up to the last sync is there. Each sector that was written
/// later has any of its states, and the length any of its own.
pub fn power_cut_at(before: &Bytes, log: &[Event], random: &mut dyn Random) -> Bytes {
    let synced = log.iter().rposition(|e| *e == Event::Sync).map_or(0, |n| n + 1);
    let mut bytes = killed_at(before, &log[..synced]);
    // How eager the disk is: now and then nothing at all, or all, reaches it.
    let share = [0, 10, 50, 90, 100][random.below(5) as usize];
    let mut goes = |stopped: &mut HashSet<u64>, sector: u64| {
        // Once a state is the last one, later ones do not come.
        let is_over = stopped.contains(&sector) || random.below(100) >= share;
        if is_over {
            stopped.insert(sector);
        }
        !is_over
    };
    let mut stopped = HashSet::new();
    let mut len = bytes.len();
    for event in &log[synced..] {
        match event {
            Event::SetLen(new) => {
                if goes(&mut stopped, LENGTH) {
                    len = *new;
                }
                bytes.set_len(*new);
            }
            Event::Write { offset, data } => {
                each_sector(*offset, data.len() as u64, &mut |at, n| {
                    if goes(&mut stopped, at / SECTOR_LEN_BYTES) {
                        bytes.write(&data[(at - offset) as usize..][..n as usize], at);
                        // Writing beyond the end makes the file longer, with or after the data.
                        len = len.max(at + n);
                    }
                })
            }
            Event::Zero { offset, len_bytes } => each_sector(*offset, *len_bytes, &mut |at, n| {
                if goes(&mut stopped, at / SECTOR_LEN_BYTES) {
                    bytes.zero(at, n);
                }
            }),
            Event::Sync => {}
        }
    }
    bytes.set_len(len);
    bytes
}

/// The pieces of a range that are in one sector each.
fn each_sector(offset: u64, len: u64, each: &mut dyn FnMut(u64, u64)) {
    let mut at = offset;
    while at < offset + len {
        let end = ((at / SECTOR_LEN_BYTES + 1) * SECTOR_LEN_BYTES).min(offset + len);
        each(at, end - at);
        at = end;
    }
}
