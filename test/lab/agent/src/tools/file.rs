//! Files whose content both ends know: made from a seed, so that whoever gets them can compare.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::AgentError;
use crate::stream::Stream;

/// Bytes written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Makes a file of `bytes` from a seed and waits until the disk has it. Memory does not keep it:
/// what is in the guest's and not in the host's is not piped, and when the host needs its memory is
/// not the guest's to know.
///
/// # Errors
/// The file cannot be made or written.
pub fn fill(path: &Path, bytes: u64, seed: u64) -> Result<(), AgentError> {
    let mut file = File::create(path).map_err(AgentError::file("create", path))?;
    let (mut stream, mut left) = (Stream::new(seed), bytes);
    let mut chunk = vec![0; CHUNK_BYTES];
    while left > 0 {
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        stream.fill(&mut chunk[..n]);
        file.write_all(&chunk[..n]).map_err(AgentError::file("write", path))?;
        left -= n as u64;
    }
    file.sync_all().map_err(AgentError::file("sync", path))?;
    let dropped = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    dropped.map_err(|errno| AgentError::file("drop the pages of", path)(errno.into()))
}

/// Compares two files, each from an offset on and to its end. `cmp` takes a byte at a time: on an
/// emulated CPU minutes for a GiB.
///
/// # Errors
/// They cannot be read; [`AgentError::Mismatch`] with the place of the first difference.
pub fn compare(one: (&Path, u64), other: (&Path, u64)) -> Result<(), AgentError> {
    let [mut a, mut b] = [Side::open(one)?, Side::open(other)?];
    let mut at = 0;
    loop {
        let (one, other) = (a.next()?, b.next()?);
        if one != other {
            let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
            let told =
                |bytes: &[u8]| bytes.get(same).map_or("the end".into(), |b| format!("{b:#04x}"));
            let place = at + same as u64;
            let (one, other) = (told(one), told(other));
            return Err(AgentError::Mismatch(format!("byte {place} is {one} and {other}")));
        }
        if one.is_empty() {
            return Ok(());
        }
        at += one.len() as u64;
    }
}

/// A file that is compared.
struct Side<'a> {
    path: &'a Path,
    file: File,
    chunk: Vec<u8>,
}

impl<'a> Side<'a> {
    fn open((path, at): (&'a Path, u64)) -> Result<Self, AgentError> {
        let mut file = File::open(path).map_err(AgentError::file("open", path))?;
        file.seek(SeekFrom::Start(at)).map_err(AgentError::file("seek in", path))?;
        Ok(Self { path, file, chunk: Vec::with_capacity(CHUNK_BYTES) })
    }

    /// A whole chunk, or what is left.
    fn next(&mut self) -> Result<&[u8], AgentError> {
        self.chunk.clear();
        let part = (&mut self.file).take(CHUNK_BYTES as u64).read_to_end(&mut self.chunk);
        part.map_err(AgentError::file("read", self.path))?;
        Ok(&self.chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Check;

    #[test]
    fn a_file_has_the_bytes_of_its_seed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = CHUNK_BYTES as u64 + 12_345;
        fill(file.path(), bytes, 9).unwrap();
        let mut check = Check::new(9);
        check.take(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(check.received(), bytes);
    }

    #[test]
    fn files_are_compared_to_their_ends() {
        let file = |bytes: &[u8]| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            file
        };
        let bytes = vec![7; CHUNK_BYTES + 100];
        let (one, other) = (file(&bytes), file(&[&[9, 9], &bytes[..]].concat()));
        compare((one.path(), 0), (other.path(), 2)).unwrap();
        let told = |one, other| compare(one, other).unwrap_err().to_string();
        let longer = told((one.path(), 0), (other.path(), 1));
        assert!(longer.contains("byte 0 is 0x07 and 0x09"), "{longer}");
        let shorter = told((one.path(), 1), (other.path(), 2));
        let place = format!("byte {} is the end and 0x07", CHUNK_BYTES + 99);
        assert!(shorter.contains(&place), "{shorter}");
        assert!(compare((Path::new("/none"), 0), (one.path(), 0)).is_err());
    }
}
