//! A guest's console, kept in a file by QEMU.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Lines shown in errors.
pub const TAIL_LINES: usize = 40;
/// Bytes at the end of a file that are looked at.
const TAIL_BYTES: u64 = 64 * 1024;
/// Messages of the kernel or the lab's init when the guest cannot go on.
const FATAL: [&str; 6] = [
    "Kernel panic",
    "BUG: ",
    "Oops: ",
    "general protection fault",
    "lab-init: ",
    "Out of memory: Killed process",
];

/// The last lines of a file, without carriage returns; empty when it cannot be read.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let read = || {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    };
    let text = String::from_utf8_lossy(&read().unwrap_or_default()).replace('\r', "");
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The first line that tells of a crash, with its time stamp cut off.
pub(crate) fn fatal_line(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| FATAL.iter().any(|word| line.contains(word)))?;
    let at = FATAL.iter().filter_map(|word| line.find(word)).min()?;
    Some(&line[at..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_end_and_a_crash_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let text: String = (0..100).map(|n| format!("line {n}\r\n")).collect();
        std::fs::write(&path, text).unwrap();
        let got = tail(&path, 2);
        assert_eq!(got, "line 98\nline 99");
        assert_eq!(tail(&folder.path().join("none"), 2), "");
        let text = "ok\n[    1.5] Kernel panic - not syncing: sysrq\n[    1.6] more";
        assert_eq!(fatal_line(text), Some("Kernel panic - not syncing: sysrq"));
        assert_eq!(fatal_line("all is well"), None);
    }
}
