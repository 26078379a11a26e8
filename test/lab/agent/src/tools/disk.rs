//! Random reads from a disk, one at a time, past the guest's page cache: how many a second and how
//! long each takes. It needs none of fio's 90 MB of libraries.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, SeekFrom, seek};
use serde_json::{Value, json};

use super::percentiles::percentiles;
use crate::AgentError;
use crate::stream::Stream;

/// Alignment of addresses that `O_DIRECT` asks for on every disk.
const ALIGN_BYTES: usize = 4096;
/// Most bytes of one read.
const MAX_READ_BYTES: usize = 1 << 20;

/// Reads `bytes` at random multiples of `bytes` for a while; the same seed reads the same places.
///
/// # Errors
/// `bytes` is no multiple of 512 up to 1 MiB; the disk is smaller than one read, or fails.
pub fn read(path: &Path, time: Duration, bytes: usize, seed: u64) -> Result<Value, AgentError> {
    if bytes == 0 || !bytes.is_multiple_of(512) || bytes > MAX_READ_BYTES {
        let text =
            format!("read of {bytes} bytes; multiples of 512 up to {MAX_READ_BYTES} allowed");
        return Err(AgentError::Refused(text));
    }
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(direct).open(path);
    run(&file.map_err(AgentError::file("open", path))?, path, time, bytes, seed)
}

fn run(
    file: &File,
    path: &Path,
    time: Duration,
    bytes: usize,
    seed: u64,
) -> Result<Value, AgentError> {
    // A disk's metadata says 0; its end does not.
    let len = seek(file, SeekFrom::End(0))
        .map_err(|error| AgentError::file("find the end of", path)(error.into()))?;
    let places = len / bytes as u64;
    if places == 0 {
        let text = format!("{} holds {len} bytes, less than one read", path.display());
        return Err(AgentError::Refused(text));
    }
    let mut memory = vec![0u8; bytes + ALIGN_BYTES];
    let skip = memory.as_ptr().align_offset(ALIGN_BYTES);
    let buffer = &mut memory[skip..skip + bytes];
    let mut random = Stream::new(seed);
    let mut times = Vec::with_capacity(1 << 16);
    let start = Instant::now();
    while start.elapsed() < time {
        let mut word = [0; 8];
        random.fill(&mut word);
        let at = u64::from_le_bytes(word) % places * bytes as u64;
        let asked = Instant::now();
        file.read_exact_at(buffer, at).map_err(AgentError::file("read", path))?;
        times.push(u32::try_from(asked.elapsed().as_nanos()).unwrap_or(u32::MAX));
    }
    let (took, count) = (start.elapsed().as_secs_f64(), times.len());
    let (mean, p50, p99) = percentiles(times);
    Ok(json!({
        "op": "disk_read", "bytes": bytes, "count": count, "secs": took,
        "rate": count as f64 / took, "mean_us": mean, "p50_us": p50, "p99_us": p99,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_counted_and_stay_inside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        // Not a multiple: the part at the end is never asked for.
        std::fs::write(&path, vec![1; 3 * 4096 + 100]).unwrap();
        let file = File::open(&path).unwrap();
        let got = run(&file, &path, Duration::from_millis(5), 4096, 7).unwrap();
        assert!(got["count"].as_u64().unwrap() > 0, "{got}");
        assert!(got["p99_us"].as_f64().unwrap() >= got["p50_us"].as_f64().unwrap(), "{got}");
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [0, 100, 2 << 20] {
            assert!(read(file.path(), Duration::ZERO, bytes, 1).is_err());
        }
        let error = run(file.as_file(), file.path(), Duration::ZERO, 512, 1).unwrap_err();
        assert!(error.to_string().contains("holds 0 bytes"), "{error}");
    }
}
