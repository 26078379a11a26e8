//! A writer for cpio archives in the "newc" format, the one the kernel unpacks as initramfs
//! (kernel documentation, `driver-api/early-userspace/buffer-format`).

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// Writes entries to an archive; [`finish`](Self::finish) ends it. Times are 0 and owners root, so
/// that the same content gives the same bytes.
pub struct Archive<W: Write> {
    out: W,
    inode: u32,
    written: u64,
}

/// Header of one entry, besides its name.
#[derive(Default)]
struct Entry {
    mode: u32,
    links: u32,
    len: u32,
    device: (u32, u32),
}

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0, written: 0 }
    }

    /// A folder. The kernel needs every folder before what is in it.
    ///
    /// # Errors
    /// The writer's.
    pub fn directory(&mut self, path: &str, permissions: u32) -> io::Result<()> {
        let mode = DIRECTORY | permissions;
        self.entry(path, &Entry { mode, links: 2, ..Entry::default() }, &[])
    }

    /// A file with its content.
    ///
    /// # Errors
    /// The writer's; content of 4 GiB or more does not fit the format.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> io::Result<()> {
        let len = u32::try_from(content.len()).map_err(|_| {
            io::Error::other(format!("{path}: {} bytes; a cpio entry holds 4 GiB", content.len()))
        })?;
        let mode = REGULAR | permissions;
        self.entry(path, &Entry { mode, links: 1, len, ..Entry::default() }, content)
    }

    /// A symbolic link.
    ///
    /// # Errors
    /// The writer's.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        let len = u32::try_from(target.len()).map_err(io::Error::other)?;
        let entry = Entry { mode: SYMLINK | 0o777, links: 1, len, ..Entry::default() };
        self.entry(path, &entry, target.as_bytes())
    }

    /// A character device.
    ///
    /// # Errors
    /// The writer's.
    pub fn character_device(
        &mut self,
        path: &str,
        permissions: u32,
        major: u32,
        minor: u32,
    ) -> io::Result<()> {
        let mode = CHARACTER | permissions;
        let entry = Entry { mode, links: 1, device: (major, minor), ..Entry::default() };
        self.entry(path, &entry, &[])
    }

    /// Writes the end mark and returns the writer.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry("TRAILER!!!", &Entry { links: 1, ..Entry::default() }, &[])?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, entry: &Entry, content: &[u8]) -> io::Result<()> {
        // Names are relative to the root that the kernel unpacks into.
        let name = path.trim_start_matches('/');
        self.inode += 1;
        let fields = [
            self.inode,
            entry.mode,
            0, // owner
            0, // group
            entry.links,
            0, // time
            entry.len,
            0, // the archive's own device
            0,
            entry.device.0,
            entry.device.1,
            u32::try_from(name.len() + 1).map_err(io::Error::other)?,
            0, // checksum, unused in this variant
        ];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.put(header.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)?;
        self.put(content)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        while !self.written.is_multiple_of(to) {
            self.put(&[0])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.directory("/dev", 0o755).unwrap();
        archive.character_device("/dev/console", 0o600, 5, 1).unwrap();
        archive.directory("a", 0o750).unwrap();
        for len in 0..6 {
            archive.file(&format!("a/{len}"), 0o640, &vec![b'x'; len]).unwrap();
        }
        archive.symlink("a/link", "../somewhere/else").unwrap();
        archive.finish().unwrap()
    }

    fn cpio(arguments: &[&str], folder: &std::path::Path, archive: &[u8]) -> String {
        let mut child = Command::new("cpio")
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(archive).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn the_cpio_program_lists_and_unpacks_it() {
        let folder = tempfile::tempdir().unwrap();
        let list = cpio(&["-t", "--quiet"], folder.path(), &sample());
        let names: Vec<&str> = list.lines().collect();
        assert_eq!(
            names,
            ["dev", "dev/console", "a", "a/0", "a/1", "a/2", "a/3", "a/4", "a/5", "a/link"]
        );
        cpio(&["-id", "--quiet"], folder.path(), &sample());
        for len in 0..6 {
            let path = folder.path().join(format!("a/{len}"));
            assert_eq!(fs::read(&path).unwrap(), vec![b'x'; len]);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        }
        let target = fs::read_link(folder.path().join("a/link")).unwrap();
        assert_eq!(target.to_str(), Some("../somewhere/else"));
        let console = fs::metadata(folder.path().join("dev/console")).unwrap();
        assert!(console.file_type().is_char_device());
        assert_eq!(console.rdev(), 0x501);
    }

    #[test]
    fn the_same_content_gives_the_same_bytes() {
        assert!(sample() == sample());
        assert_eq!(sample().len() % 512, 0);
    }
}
