//! Read leases: while one is held, opening the file for writing or truncating it waits (for
//! `/proc/sys/fs/lease-break-time`, 45 s) until the lease is released.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

use guest_abi::Reason;
use signal_hook::SigId;

use crate::sys;
use crate::wake::Wake;
use base::sync::lock;

/// Lease on a file that was opened for it alone. Released when dropped.
#[derive(Debug)]
pub struct Lease(Arc<WatchedLease>);

/// Lease as the signal thread sees it, which hears of breaks. The thread may hold it a moment
/// longer than the lease lasts.
#[derive(Debug)]
struct WatchedLease {
    file: File,
    wake: Arc<Wake>,
    broken: AtomicBool,
}

impl Lease {
    /// The file under the lease.
    pub fn file(&self) -> &File {
        &self.0.file
    }

    /// Whether another process waits for the release.
    pub fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Acquire)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Closing the file would release the lease, but the signal thread may keep it open for a
        // moment, and a program that waits for the pipe's answer opens the file at once. Fails when
        // the kernel has revoked the lease.
        let _ = sys::release_lease(self.0.file.as_fd());
    }
}

impl WatchedLease {
    /// Checks with the kernel whether the lease is to be broken, and wakes its holder then.
    fn check(&self) {
        if !sys::is_lease_unbroken(self.file.as_fd()) && !self.broken.swap(true, Ordering::AcqRel) {
            self.wake.ring();
        }
    }
}

/// Takes leases and wakes their holders at breaks. Signals say only that there is a break; the
/// kernel is asked which lease it is, so that none is missed when signals are merged.
#[derive(Debug)]
pub struct Leases {
    held: Arc<Mutex<Vec<Weak<WatchedLease>>>>,
    signal: SigId,
    /// Ends the thread when dropped.
    sender: UnixStream,
}

impl Leases {
    /// Begins to listen for signals, in a thread of its own.
    ///
    /// # Errors
    /// No descriptor or thread is left.
    pub fn start() -> io::Result<Self> {
        let (mut signalled, sender) = UnixStream::pair()?;
        // The signal that the kernel sends by default; unlike a queued one it is never dropped.
        let signal = signal_hook::low_level::pipe::register(libc::SIGIO, sender.try_clone()?)?;
        let held: Arc<Mutex<Vec<Weak<WatchedLease>>>> = Arc::default();
        let looked = held.clone();
        thread::Builder::new().name("leases".into()).spawn(move || {
            while signalled.read(&mut [0; 64]).is_ok_and(|len| len > 0) {
                let held: Vec<_> = lock(&looked).iter().filter_map(Weak::upgrade).collect();
                held.iter().for_each(|lease| lease.check());
            }
        })?;
        Ok(Self { held, signal, sender })
    }

    /// Takes a lease; `wake` is rung when it is to be broken.
    ///
    /// # Errors
    /// [`Reason::NoLease`]: somebody has the file open for writing, or the file system has none.
    pub fn take(&self, file: File, wake: &Arc<Wake>) -> Result<Lease, Reason> {
        sys::take_lease(file.as_fd()).map_err(|_| Reason::NoLease)?;
        let broken = AtomicBool::new(false);
        let lease = Lease(Arc::new(WatchedLease { file, wake: wake.clone(), broken }));
        let mut held = lock(&self.held);
        held.retain(|lease| lease.strong_count() > 0);
        held.push(Arc::downgrade(&lease.0));
        drop(held);
        // A break before the lease was in the list was reported to no holder.
        lease.0.check();
        Ok(lease)
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        signal_hook::low_level::unregister(self.signal);
        // The signal handler's clone is closed already; closing ours ends the thread.
        let _ = self.sender.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_writer_waits_and_the_holder_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let (leases, wake) = (Leases::start().unwrap(), Arc::new(Wake::new().unwrap()));
        // From a thread that ends: its signals must still come.
        let take = || leases.take(File::open(&path).unwrap(), &wake);
        let lease = thread::scope(|scope| scope.spawn(take).join().unwrap()).unwrap();
        assert!(!lease.is_broken());
        let mut writing = OpenOptions::new();
        writing.write(true).custom_flags(libc::O_NONBLOCK);
        let refused = writing.open(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        poll(&mut [PollFd::new(&wake, PollFlags::IN)], None).unwrap();
        assert!(lease.is_broken());
        drop(lease);
        let writer = writing.open(&path).unwrap();
        assert_eq!(take().unwrap_err(), Reason::NoLease);
        drop(writer);
        take().unwrap();
    }
}
