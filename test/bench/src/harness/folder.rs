//! Folder of disk images of equal content.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use base::random::{Random, Seeded};

use crate::harness::error::BenchError;

const BLOCK_BYTES: usize = 1 << 20;

/// A folder of images, removed with them when dropped.
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes the folder empty: an earlier run may have been killed.
    pub fn new(path: &Path) -> Result<Folder, BenchError> {
        match std::fs::remove_dir_all(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(BenchError::file("empty folder", path, e));
            }
            _ => {}
        }
        std::fs::create_dir_all(path).map_err(|e| BenchError::file("make folder", path, e))?;
        let path = path.canonicalize().map_err(|e| BenchError::file("find folder", path, e))?;
        Ok(Folder { path })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes an image: every block on the disk before anyone measures, so that no write of the
    /// load allocates, and no two blocks alike, so that no storage below can fold them.
    pub fn image(&self, name: &str, len_bytes: u64) -> Result<PathBuf, BenchError> {
        let path = self.path.join(name);
        let fail = |e| BenchError::file("write", &path, e);
        let mut file = File::create(&path).map_err(fail)?;
        let mut block = vec![0u8; BLOCK_BYTES];
        let (mut random, mut left) = (Seeded::new(0), len_bytes as usize);
        while left > 0 {
            let now = left.min(BLOCK_BYTES);
            for word in block.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next_u64().to_le_bytes());
            }
            file.write_all(&block[..now]).map_err(fail)?;
            left -= now;
        }
        // Otherwise it would be written back in the middle of the first rounds.
        file.sync_all().map_err(fail)?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left-overs are removed by the next run.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_equal_allocated_and_gone_at_the_end() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disks");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("old"), "left by a killed run").unwrap();
        let folder = Folder::new(&path).unwrap();
        assert!(!path.join("old").exists());
        let len = (BLOCK_BYTES + 4096) as u64;
        let (a, b) = (folder.image("a", len).unwrap(), folder.image("b", len).unwrap());
        let content = std::fs::read(&a).unwrap();
        assert_eq!(content.len() as u64, len);
        assert_eq!(content, std::fs::read(&b).unwrap());
        assert_ne!(content[..4096], content[BLOCK_BYTES..], "blocks differ");
        assert!(std::fs::metadata(&a).unwrap().blocks() * 512 >= len);
        drop(folder);
        assert!(!path.exists());
    }
}
