//! The file of the secret that a VM's agent must know.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, ensure};
use rustix::fs::OFlags;

/// Reads the secret, without the end of its line.
pub fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    read_file(path).with_context(|| format!("the secret of its agent, {}", path.display()))
}

fn read_file(path: &Path) -> anyhow::Result<Vec<u8>> {
    const OTHERS_READ_OR_WRITE: u32 = 0o006;
    let limits = guest_abi::pipe::SECRET_BYTES;
    // A pipe's other end would be waited for, and all changes of all VMs with it.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    ensure!(meta.is_file(), "it is no file");
    let is_ours = meta.mode() & OTHERS_READ_OR_WRITE == 0;
    ensure!(is_ours, "anybody may read or write it; take that away with chmod o-rw");
    let mut bytes = Vec::new();
    // An end of line, and one byte that says that there is more.
    file.take(*limits.end() as u64 + 2).read_to_end(&mut bytes)?;
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    let (least, most) = (limits.start(), limits.end());
    ensure!(limits.contains(&bytes.len()), "its length is not {least} to {most} bytes");
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V8_a_secret_is_a_file_that_not_all_may_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let of = |bytes: &[u8], mode| {
            write(&path, bytes).unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            read(&path).map_err(|error| format!("{error:#}"))
        };
        let refused = |result: Result<_, String>, why: &str| {
            let error = result.expect_err(why);
            assert!(error.contains("/s: ") && error.contains(why), "{error}");
        };
        assert_eq!(of(b"0123456789abcdef\n", 0o640).unwrap(), b"0123456789abcdef");
        assert_eq!(of(&[b'x'; 64], 0o600).unwrap(), [b'x'; 64]);
        refused(of(b"0123456789abcdef", 0o644), "anybody may read or write it");
        refused(of(b"0123456789abcdef", 0o602), "anybody may read or write it");
        refused(of(&[b'x'; 15], 0o600), "16 to 64");
        refused(of(&[b'x'; 65], 0o600), "16 to 64");
        std::fs::remove_file(&path).unwrap();
        let error = |result: anyhow::Result<_>| result.map_err(|error| format!("{error:#}"));
        refused(error(read(&path)), "No such file");
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        refused(error(read(&path)), "no file");
    }
}
