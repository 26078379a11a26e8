//! The Unix socket at which programs of the host reach a VM's modules, as its guest does over vsock.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that the kernel queues for us.
const BACKLOG: i32 = 128;

/// Pause when a connection cannot be taken: it stays queued, for want of descriptors or memory.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A listening socket with its thread; both go with it.
#[derive(Debug)]
pub struct Listener {
    path: PathBuf,
    /// Device and inode of the socket file, so that only our own is removed.
    identity: (u64, u64),
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `path` for the owner only, and hands over what connects. A socket that nobody listens
    /// on any more is replaced.
    pub fn start(vm: &str, path: &Path, sink: vsock::Sink) -> io::Result<Self> {
        remove_stale(path)?;
        let socket = listen(path)?;
        let meta = path.symlink_metadata()?;
        let end = eventfd(0, EventfdFlags::CLOEXEC)?;
        let told = end.try_clone()?;
        let thread = std::thread::Builder::new()
            .name(format!("mod-sock-{vm}"))
            .spawn(move || accept_all(&socket, &told, &sink))?;
        let identity = (meta.dev(), meta.ino());
        Ok(Self { path: path.into(), identity, end, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails only when it was told so 2^64 times.
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of {} panicked", self.path.display());
        }
        let meta = self.path.symlink_metadata();
        if meta.is_ok_and(|meta| (meta.dev(), meta.ino()) == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn accept_all(socket: &OwnedFd, end: &OwnedFd, sink: &vsock::Sink) {
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

/// Its mode is 0600 from the first moment: the file takes that of the socket.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Removes a socket that a killed daemon left.
fn remove_stale(path: &Path) -> io::Result<()> {
    let meta = match path.symlink_metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::other("the file there is not a socket"));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        _ => Err(io::Error::other("somebody listens there")),
    }
}

#[cfg(test)]
mod tests {
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
        let sink: vsock::Sink = Arc::new(move |fd| sender.send(fd).unwrap());
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
