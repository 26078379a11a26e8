//! Bytes of a sparse file in memory; a copy shares the chunks that are the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are kept together.
const CHUNK: u64 = 4096;

/// Bytes of a sparse file, in shared chunks.
#[derive(Debug, Clone, Default)]
pub struct Bytes {
    chunks: BTreeMap<u64, Arc<[u8]>>,
    len: u64,
}

impl Bytes {
    /// Loads the bytes of a file.
    pub fn load(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut this = Self { chunks: BTreeMap::new(), len: file.metadata()?.len() };
        let mut chunk = vec![0; CHUNK as usize];
        for n in 0..this.len.div_ceil(CHUNK) {
            chunk.fill(0);
            let mut at = 0;
            loop {
                match file.read_at(&mut chunk[at..], n * CHUNK + at as u64)? {
                    0 => break,
                    got => at += got,
                }
            }
            if chunk.iter().any(|&b| b != 0) {
                this.chunks.insert(n, chunk.clone().into());
            }
        }
        Ok(this)
    }

    /// Makes a file of them.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.len)?;
        for (n, chunk) in &self.chunks {
            let end = CHUNK.min(self.len - n * CHUNK) as usize;
            file.write_all_at(&chunk[..end], n * CHUNK)?;
        }
        Ok(())
    }

    /// Length.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads; less than asked at the end.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let n = (buf.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        pieces(offset, n as u64, &mut |chunk, from, at, len| {
            let out = &mut buf[at..at + len];
            match self.chunks.get(&chunk) {
                Some(chunk) => out.copy_from_slice(&chunk[from..from + len]),
                None => out.fill(0),
            }
        });
        n
    }

    /// Writes, and extends where need be.
    pub fn write(&mut self, data: &[u8], offset: u64) {
        self.len = self.len.max(offset + data.len() as u64);
        pieces(offset, data.len() as u64, &mut |chunk, from, at, len| {
            let chunk = self.chunks.entry(chunk).or_insert_with(|| vec![0; CHUNK as usize].into());
            let mut new = chunk.to_vec();
            new[from..from + len].copy_from_slice(&data[at..at + len]);
            *chunk = new.into();
        });
    }

    /// Zeroes what there is of a range.
    pub fn zero(&mut self, offset: u64, len: u64) {
        let end = (offset + len).min(self.len);
        if end <= offset {
            return;
        }
        let within: Vec<u64> =
            self.chunks.range(offset / CHUNK..=(end - 1) / CHUNK).map(|c| *c.0).collect();
        for chunk in within {
            let (first, last) = (chunk * CHUNK, (chunk + 1) * CHUNK);
            if offset <= first && end >= last {
                self.chunks.remove(&chunk);
            } else {
                let (from, to) = (offset.max(first), end.min(last));
                self.write(&vec![0; (to - from) as usize], from);
            }
        }
    }

    /// Cuts or extends.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            let before = self.len;
            self.zero(len, before - len);
            self.chunks.split_off(&len.div_ceil(CHUNK));
        }
        self.len = len;
    }
}

/// The pieces of a range: chunk, offset in it, offset in the range, length.
fn pieces(offset: u64, len: u64, each: &mut dyn FnMut(u64, usize, usize, usize)) {
    let mut at = 0;
    while at < len {
        let here = offset + at;
        let from = here % CHUNK;
        let n = (CHUNK - from).min(len - at);
        each(here / CHUNK, from as usize, at as usize, n as usize);
        at += n;
    }
}
