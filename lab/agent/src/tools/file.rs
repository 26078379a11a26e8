//! Files whose content both ends know: made from a seed, so that whoever gets them can compare.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::AgentError;
use crate::stream::Stream;

/// Bytes written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Makes a file of `bytes` from a seed and waits until the disk has it.
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
    file.sync_all().map_err(AgentError::file("sync", path))
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
}
