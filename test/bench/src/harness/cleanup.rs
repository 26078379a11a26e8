//! Undoes what we changed on the machine, however we end.
//!
//! A shell waits until its input closes, which the kernel does for us even after a SIGKILL, and
//! then runs what it was told. It is in a process group of its own, so that Ctrl-C misses it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::harness::error::BenchError;

/// Number of huge pages of the default size; writing it reserves or gives back.
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Lines come in, are kept, and run when no more can come.
const SCRIPT: &str =
    "todo=; while read -r line; do todo=\"$todo$line\n\"; echo noted; done; eval \"$todo\"";

/// Runs what it was told when dropped, or when this process dies.
pub struct Cleanup {
    shell: Child,
}

impl Cleanup {
    /// Starts the shell.
    pub fn new() -> Result<Cleanup, BenchError> {
        let mut shell = Command::new("bash");
        shell.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped());
        // It may outlive the terminal; nobody needs to read what `rm` says then.
        let shell = shell.stderr(Stdio::null()).process_group(0).spawn();
        let shell = shell.map_err(|e| BenchError::lab("start the cleaning shell", e))?;
        Ok(Cleanup { shell })
    }

    /// Runs this line of bash at the end. Returns when it is sure to.
    pub fn at_end(&mut self, line: &str) -> Result<(), BenchError> {
        let failed = |e| BenchError::lab("tell the cleaning shell", e);
        if let Some(input) = &mut self.shell.stdin {
            writeln!(input, "{line}").map_err(failed)?;
        }
        if let Some(output) = &mut self.shell.stdout {
            BufReader::with_capacity(16, output).read_line(&mut String::new()).map_err(failed)?;
        }
        Ok(())
    }

    /// Removes a folder at the end.
    pub fn remove(&mut self, folder: &Path) -> Result<(), BenchError> {
        self.at_end(&format!("rm -rf -- '{}'", folder.to_string_lossy().replace('\'', "'\\''")))
    }

    /// Reserves so many huge pages until the end, beside those reserved already. Whether the
    /// machine had them.
    pub fn reserve_huge_pages(&mut self, count: u64) -> Result<bool, BenchError> {
        let read =
            || -> Option<u64> { std::fs::read_to_string(HUGE_PAGES).ok()?.trim().parse().ok() };
        let Some(before) = read() else { return Ok(false) };
        self.at_end(&format!("echo {before} > {HUGE_PAGES}"))?;
        // Not allowed is not there.
        let _ = std::fs::write(HUGE_PAGES, (before + count).to_string());
        let enough = read().is_some_and(|now| now >= before + count);
        if !enough {
            let _ = std::fs::write(HUGE_PAGES, before.to_string());
        }
        Ok(enough)
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        // It ends by itself; waiting makes the machine clean before we say that we are done.
        let _ = self.shell.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_was_told_happens_at_the_end_and_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("it's gone");
        std::fs::create_dir(&gone).unwrap();
        let kept = dir.path().join("kept");
        let mut cleanup = Cleanup::new().unwrap();
        cleanup.remove(&gone).unwrap();
        cleanup.at_end(&format!("echo one > {}", kept.display())).unwrap();
        cleanup.at_end(&format!("echo two >> {}", kept.display())).unwrap();
        assert!(gone.exists() && !kept.exists());
        drop(cleanup);
        assert!(!gone.exists());
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn it_happens_as_well_when_its_owner_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let mut cleanup = Cleanup::new().unwrap();
        cleanup.at_end(&format!("echo done > {}", fifo.display())).unwrap();
        // What the kernel does at a SIGKILL: the pipe closes, and nobody waits.
        drop(cleanup.shell.stdin.take());
        assert_eq!(std::fs::read_to_string(&fifo).unwrap(), "done\n");
    }
}
