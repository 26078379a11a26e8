//! Mutations of an image: single fields of its tables, and its length.

use base::random::{Random, Seeded};
use qcow2::testing::Bytes;

use super::sample::{OFFSET, at, get_u32, get_u64, put_u64, set_dirty};

/// Places of an image's tables, as far as they can be found. Nothing is believed: what is outside
/// the file, or too long, is left out.
#[derive(Debug, Default)]
pub struct Tables {
    pub cluster_bits: u32,
    /// Begin and length.
    pub l1: (u64, u64),
    pub refcount_table: (u64, u64),
    pub blocks: Vec<u64>,
    pub snapshots: (u64, u64),
    /// L1 tables of snapshots.
    pub snapshot_l1s: Vec<(u64, u64)>,
    pub l2: Vec<u64>,
    /// Extensions, from the end of the header on.
    pub extensions: (u64, u64),
    /// Bitmap directory.
    pub bitmaps: (u64, u64),
}

impl Tables {
    pub fn of(bytes: &Bytes) -> Self {
        let cluster_bits = get_u32(bytes, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Self::default();
        }
        let len = |len: u64| len.min(1 << 20);
        let is_v3 = get_u32(bytes, 4) == 3;
        let mut this = Self {
            cluster_bits,
            l1: (get_u64(bytes, at::L1_OFFSET), len(u64::from(get_u32(bytes, 36)) * 8)),
            refcount_table: (
                get_u64(bytes, at::REFCOUNT_TABLE),
                len(u64::from(get_u32(bytes, 56)) << cluster_bits),
            ),
            extensions: (if is_v3 { 104 } else { 72 }, 256),
            ..Self::default()
        };
        this.blocks = words(bytes, this.refcount_table, !0x1ff);
        this.l2 = words(bytes, this.l1, OFFSET);
        this.find_snapshots(bytes);
        this.find_bitmaps(bytes);
        this
    }

    fn find_snapshots(&mut self, bytes: &Bytes) {
        let begin = get_u64(bytes, 64);
        let mut at = begin;
        for _ in 0..get_u32(bytes, 60).min(16) {
            let l1 = (get_u64(bytes, at), (u64::from(get_u32(bytes, at + 8)) * 8).min(1 << 20));
            self.l2.extend(words(bytes, l1, OFFSET));
            self.snapshot_l1s.push(l1);
            let lens = get_u32(bytes, at + 12);
            let extra = u64::from(get_u32(bytes, at + 36)).min(4096);
            at += (40 + extra + u64::from(lens >> 16) + u64::from(lens & 0xffff)).div_ceil(8) * 8;
        }
        self.snapshots = (begin, at - begin);
    }

    fn find_bitmaps(&mut self, bytes: &Bytes) {
        let (begin, len) = self.extensions;
        let found = (begin..begin + len)
            .step_by(8)
            .find(|&at| get_u64(bytes, at) == 0x2385_2875_0000_0018 && get_u64(bytes, 88) & 1 != 0);
        if let Some(at) = found {
            self.bitmaps = (get_u64(bytes, at + 24), get_u64(bytes, at + 16).min(4096));
        }
    }

    /// All clusters that tables are in, as far as they are in the file.
    pub fn clusters(&self, bytes: &Bytes) -> Vec<u64> {
        if self.cluster_bits == 0 {
            return vec![];
        }
        let len = 1u64 << self.cluster_bits;
        let whole = |&begin: &u64| (begin, len);
        let ranges = [(0, len), self.l1, self.refcount_table, self.snapshots, self.bitmaps];
        let ranges = ranges.into_iter().chain(self.snapshot_l1s.iter().copied());
        let ranges = ranges.chain(self.blocks.iter().map(whole)).chain(self.l2.iter().map(whole));
        let mut all: Vec<u64> = ranges
            .filter(|&(begin, n)| n > 0 && begin % len == 0 && begin < bytes.len())
            .flat_map(|(begin, n)| (begin >> self.cluster_bits)..(begin + n).div_ceil(len))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// The offsets in a table, of tables that are in the file.
fn words(bytes: &Bytes, (begin, len): (u64, u64), mask: u64) -> Vec<u64> {
    if begin >= bytes.len() {
        return Vec::new();
    }
    let all = (begin..begin + len).step_by(8).map(|at| get_u64(bytes, at) & mask);
    all.filter(|&offset| offset != 0 && offset < bytes.len()).collect()
}

/// Changes an image at one to three places. Returns what was changed, for messages.
pub fn mutate(bytes: &mut Bytes, random: &mut Seeded) -> String {
    let tables = Tables::of(bytes);
    let mut what = Vec::new();
    for _ in 0..1 + random.below(3) {
        what.push(one(bytes, &tables, random));
    }
    if random.below(4) == 0 && get_u32(bytes, 4) == 3 {
        set_dirty(bytes);
        what.push("dirty".into());
    }
    what.join(", ")
}

fn one(bytes: &mut Bytes, tables: &Tables, random: &mut Seeded) -> String {
    let pick = |all: &[u64], random: &mut Seeded| -> (u64, u64) {
        match all.len() {
            0 => (0, 0),
            n => (all[random.below(n as u32) as usize], 1 << tables.cluster_bits),
        }
    };
    let (name, (begin, len)) = match random.below(12) {
        0 => ("header", (0, 112)),
        1 => ("extensions", tables.extensions),
        2 => ("L1 table", tables.l1),
        3..6 => ("L2 table", pick(&tables.l2, random)),
        6 => ("refcount table", (tables.refcount_table.0, tables.refcount_table.1.min(64))),
        7 => ("refcount block", pick(&tables.blocks, random)),
        8 => ("snapshot table", tables.snapshots),
        9 => ("bitmap directory", tables.bitmaps),
        10 => ("data", (0, bytes.len())),
        _ => return cut(bytes, random),
    };
    if len < 8 || begin >= bytes.len() {
        return cut(bytes, random);
    }
    // Most tables are used at their begin.
    let len = if random.below(2) == 0 { len.min(256) } else { len };
    let unit = if name == "header" { 4 } else { 8 };
    let place = begin + u64::from(random.below((len / unit) as u32)) * unit;
    let old = get_u64(bytes, place);
    let new = value(bytes, tables, old, random);
    match unit {
        4 => bytes.write(&(new as u32).to_be_bytes(), place),
        _ => put_u64(bytes, place, new),
    }
    format!("{name} at {place:#x}: {old:#x} is {new:#x}")
}

fn cut(bytes: &mut Bytes, random: &mut Seeded) -> String {
    let len = random.next_u64() % bytes.len().max(1);
    bytes.set_len(len);
    format!("cut at {len:#x}")
}

fn value(bytes: &Bytes, tables: &Tables, old: u64, random: &mut Seeded) -> u64 {
    let flags = old & !OFFSET;
    let block = |all: &[u64]| all.first().copied().unwrap_or(0);
    match random.below(12) {
        0 => 0,
        1 => u64::MAX,
        2 => random.next_u64(),
        3..5 => old ^ 1 << random.below(64),
        5 => flags | tables.l1.0,
        6 => flags | tables.refcount_table.0,
        7 => flags | block(&tables.blocks),
        8 => flags | block(&tables.l2),
        9 => flags | (random.next_u64() % bytes.len().max(1)) & OFFSET & !0xffff,
        10 => {
            flags | bytes.len().next_multiple_of(1 << tables.cluster_bits.max(9)) << random.below(8)
        }
        _ => u64::from(random.below(300)),
    }
}
