//! A file of a disk that loses what was not synced.

use std::vec::Vec;

use super::Rng;

/// A change of a file.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Write(u64, Vec<u8>),
    Len(u64),
}

impl Change {
    pub(super) fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Write(at, data) => {
                let (at, end) = (*at as usize, *at as usize + data.len());
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[at..end].copy_from_slice(data);
            }
            Self::Len(len) => bytes.resize(*len as usize, 0),
        }
    }

    /// A part of it.
    pub(super) fn torn(&self, rng: &mut Rng) -> Self {
        match self {
            Self::Write(at, data) => {
                let kept = rng.below(data.len() as u64 + 1) as usize;
                Self::Write(*at, data[..kept].to_vec())
            }
            Self::Len(len) => Self::Len(*len),
        }
    }
}

/// A file's bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Inode {
    pub(super) synced: Vec<u8>,
    pub(super) now: Vec<u8>,
    pub(super) changes: Vec<Change>,
}

impl Inode {
    pub(super) fn change(&mut self, change: Change) {
        change.apply(&mut self.now);
        self.changes.push(change);
    }

    pub(super) fn sync(&mut self) {
        let changes = std::mem::take(&mut self.changes);
        changes.iter().for_each(|c| c.apply(&mut self.synced));
    }

    pub(super) fn crash(&mut self, rng: &mut Rng) {
        let changes = std::mem::take(&mut self.changes);
        let mode = rng.below(4);
        let first = rng.below(changes.len() as u64 + 1) as usize;
        for (i, change) in changes.iter().enumerate() {
            let fate = match mode {
                0 => 2,
                1 => 0,
                2 if i < first => 2,
                2 if i == first => 1,
                2 => 0,
                _ => rng.below(3),
            };
            match fate {
                0 => {}
                1 => change.torn(rng).apply(&mut self.synced),
                _ => change.apply(&mut self.synced),
            }
        }
        self.now = self.synced.clone();
    }
}
