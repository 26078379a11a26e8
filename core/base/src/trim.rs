//! Return of freed memory to the operating system.
//!
//! The allocator keeps freed pages: after thousands of ended sessions it held 130 MB of unused
//! pages for good. Giving them back costs some milliseconds and a lock of the allocator's, so it is
//! done on a thread of its own, some time after sessions have ended, and never on a sidecore.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// Pause after a session's end: sessions that end together are trimmed for once.
const PAUSE: Duration = Duration::from_secs(10);

static NOTES: OnceLock<SyncSender<()>> = OnceLock::new();

/// Starts the thread. A second call does nothing.
///
/// # Errors
/// The thread cannot be started.
pub fn start() -> io::Result<()> {
    let (notes, noted) = sync_channel(1);
    let run = move || {
        while noted.recv().is_ok() {
            std::thread::sleep(PAUSE);
            now();
        }
    };
    if NOTES.get().is_none() {
        std::thread::Builder::new().name("millrace-trim".into()).spawn(run)?;
        // Of two at the same time one thread ends at once: its sender is dropped.
        let _ = NOTES.set(notes);
    }
    Ok(())
}

/// Notes that much may have been freed. Never waits.
pub fn note() {
    if let Some(notes) = NOTES.get() {
        // Full: a note waits already.
        let _ = notes.try_send(());
    }
}

/// Gives free pages of all arenas back.
fn now() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number and touches the allocator's own memory alone, under its locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    /// Resident bytes of memory that belongs to no file.
    fn resident_bytes() -> u64 {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn abuse_V16_what_was_freed_goes_back() {
        let blocks: Vec<_> = (0..4096).map(|_| vec![1u8; 16 << 10]).collect();
        // Above all of them, so that the allocator cannot give them back by itself.
        let pin = vec![1u8; 16 << 10];
        drop(blocks);
        let before = resident_bytes();
        now();
        let after = resident_bytes();
        assert!(before - after > 48 << 20, "of 64 MiB: {before} before, {after} after");
        drop(pin);
    }
}
