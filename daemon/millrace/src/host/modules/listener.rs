//! The Unix socket at which programs of the host reach a VM's modules, as its guest does over
//! vsock.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::JoinHandle;

use base::socket::{self, SocketError, SocketFile};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Connections that the kernel queues for us.
const BACKLOG: i32 = 128;

/// Pause when a connection cannot be taken: it stays queued, for want of descriptors or memory.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A listening socket with its thread; both go with it.
#[derive(Debug)]
pub struct Listener {
    file: SocketFile,
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `path` for the owner only, and hands over what connects. A socket that nobody
    /// listens on any more is replaced.
    pub fn start(vm: &str, path: &Path, sink: vsock::ServiceSink) -> Result<Self, SocketError> {
        let io = |what| move |source| SocketError::Io { what, source };
        let (socket, file) = socket::listen(path, 0o600, BACKLOG)?;
        let end =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(|e| io("making an eventfd")(e.into()))?;
        let end_copy = end.try_clone().map_err(io("copying an eventfd"))?;
        let thread = std::thread::Builder::new()
            .name(format!("mod-sock-{vm}"))
            .spawn(move || accept_all(&socket, &end_copy, &sink))
            .map_err(io("starting its thread"))?;
        Ok(Self { file, end, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails only when it was signalled 2^64 times.
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of {} panicked", self.file.path().display());
        }
    }
}

fn accept_all(socket: &OwnedFd, end: &OwnedFd, sink: &vsock::ServiceSink) {
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(end, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("waiting for programs that reach modules: {e}");
                return;
            }
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match rustix::net::accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(fd) => sink(fd),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(e) => {
                tracing::warn!("taking a connection to modules: {e}");
                let _ = poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&PAUSE));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn what_connects_is_handed_over_and_the_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (sender, receiver) = sync_channel(2);
        let sink: vsock::ServiceSink = Arc::new(move |fd| sender.send(fd).unwrap());
        let listener = Listener::start("v", &path, Arc::clone(&sink)).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        let streams = [0; 2].map(|_| UnixStream::connect(&path).unwrap());
        let taken = [0; 2].map(|_| receiver.recv().unwrap());
        let again = Listener::start("v", &path, sink).unwrap_err();
        assert!(again.to_string().contains("somebody listens"), "{again}");
        drop((listener, streams, taken));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "mine").unwrap();
        let error = Listener::start("v", &path, Arc::new(drop)).unwrap_err();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
