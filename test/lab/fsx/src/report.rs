//! Reports of wrong bytes.

use std::collections::VecDeque;
use std::fmt::Write;
use std::ops::Range;

use crate::model::Content;
use crate::op::{Kind, Op};
use crate::pattern::{BACKING_FILE, Origin, WORD_BYTES};
use crate::target::Target;

/// Most operations of a report's history.
const LAST: usize = 24;
/// Most ranges of wrong bytes that are told of one read.
const RANGES: usize = 8;
/// Bytes shown at the first wrong one.
const SHOWN: usize = 32;

/// Run and operation of a report.
#[derive(Debug)]
pub struct Run {
    /// Number of the worker.
    pub worker: usize,
    /// The run's seed.
    pub seed: u64,
    /// Number of the operation that read.
    pub number: u32,
}

/// Operation that was done.
#[derive(Debug)]
pub struct Record {
    /// Number of the operation, and generation of what it wrote.
    pub number: u32,
    /// Milliseconds from the begin of the run to its own begin.
    pub begin_ms: u64,
    /// The operation.
    pub op: Op,
}

/// The last operations on a range.
#[must_use]
pub fn history(history: &VecDeque<Record>, target: usize, range: &Range<u64>) -> String {
    let touches = |op: &Op| match op.kind {
        Kind::Truncate | Kind::Recreate | Kind::Reopen | Kind::Sync | Kind::DataSync => true,
        _ => op.range.start < range.end && range.start < op.range.end,
    };
    let of_range =
        history.iter().rev().filter(|done| done.op.target == target && touches(&done.op));
    let mut lines: Vec<String> = of_range
        .take(LAST)
        .map(|Record { number, begin_ms, op }| format!("  {number} at {begin_ms} ms: {op}\n"))
        .collect();
    lines.reverse();
    format!("last operations on the range, of {} remembered:\n{}", history.len(), lines.concat())
}

/// Ranges of a buffer in which two differ.
fn wrong_ranges(got: &[u8], want: &[u8]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for at in (0..got.len()).filter(|&at| got[at] != want[at]) {
        match ranges.last_mut() {
            // A byte that is right by chance does not end a range.
            Some(last) if at - last.end < WORD_BYTES as usize => last.end = at + 1,
            _ => ranges.push(at..at + 1),
        }
    }
    ranges
}

/// Nature of wrong bytes: zeroes, words of some write, or neither.
fn nature(got: &[u8], at: u64, target: &Target, number: u32) -> String {
    if got.iter().all(|byte| *byte == 0) {
        return "zeroes".into();
    }
    for skip in 0..WORD_BYTES {
        let Some(word) = got.get(skip as usize..).and_then(<[u8]>::first_chunk) else { break };
        let origin = Origin::of_word(u64::from_le_bytes(*word));
        let is_ours = origin.file != BACKING_FILE
            && origin.generation > 0
            // Others may be ahead by some chapters.
            && origin.generation <= number + 1024
            && origin.at < target.max_len_bytes;
        let is_backing = origin.file == BACKING_FILE && origin.generation == 1;
        let here = origin.file == target.number && origin.at == at + skip;
        match (is_ours, here, is_backing) {
            (true, true, _) => return format!("stale: {origin}"),
            (true, false, _) | (_, _, true) => return format!("foreign: {origin}"),
            _ => (),
        }
    }
    "no word of ours".into()
}

/// Content that a range must hold.
fn expected(target: &Target, range: Range<u64>) -> String {
    let mut text = String::new();
    for (range, content) in target.model.pieces(range).into_iter().take(RANGES) {
        let what = match content {
            Content::Zero => "zeroes".into(),
            Content::Written { file, generation, shift } => {
                let at = range.start.wrapping_add_signed(shift);
                Origin { file, generation, at }.to_string()
            }
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {:#x}..{:#x}: {what}", range.start, range.end);
    }
    text
}

fn hex(bytes: &[u8]) -> String {
    let words = bytes[..bytes.len().min(SHOWN)].chunks(WORD_BYTES as usize);
    let word = |word: &[u8]| word.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    words.map(word).collect::<Vec<String>>().join(" ")
}

/// The report of a read that gave wrong bytes.
#[must_use]
pub fn mismatch(
    run: &Run,
    op: &Op,
    target: &Target,
    got: &[u8],
    want: &[u8],
    done: &VecDeque<Record>,
) -> String {
    let Run { worker, seed, number } = run;
    let ranges = wrong_ranges(got, want);
    let begin = op.range.start;
    let mut text = format!(
        "wrong bytes: seed {seed} worker {worker} operation {number}: {op}\n\
         {} (file {} in patterns, begins at {:#x})\n",
        target.path.display(),
        target.number,
        target.offset(0),
    );
    for range in ranges.iter().take(RANGES) {
        let at = begin + range.start as u64;
        let end = begin + range.end as u64;
        let what = nature(&got[range.clone()], at, target, *number);
        let shown = (hex(&got[range.clone()]), hex(&want[range.clone()]));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{at:#x}..{end:#x}: {what}\n  got      {}\n  expected {}",
            shown.0, shown.1
        );
        text.push_str(&expected(target, at..end));
    }
    if ranges.len() > RANGES {
        let _ = writeln!(text, "and {} ranges more", ranges.len() - RANGES);
    }
    let first = ranges.first().map_or(0, |range| range.start) as u64;
    let last = ranges.last().map_or(0, |range| range.end) as u64;
    text + &history(done, op.target, &(begin + first..begin + last))
}
