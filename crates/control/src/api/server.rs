//! HTTP on a Unix socket.

use std::future::Future;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::routes::router;
use crate::error::ControlError;
use crate::plane::Plane;

/// Most connections at once; more wait in the socket's backlog. A scraper, a few people and a
/// fleet manager use fewer than ten.
pub const MAX_CONNECTIONS: usize = 64;

/// How long a request line and its headers may take, idle time of a kept connection included.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections the kernel queues for us.
const BACKLOG: i32 = 128;

/// How long requests in flight may take once the daemon stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The bound control socket, removed when dropped.
#[derive(Debug)]
pub struct ApiServer {
    listener: StdListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that only our own is removed.
    identity: (u64, u64),
}

impl ApiServer {
    /// Binds `path` for the owner only. A socket that nobody answers on is replaced; one that
    /// somebody answers on is an error, as is any other file.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        remove_stale(path)?;
        let listener = listen(path).map_err(ControlError::io("listening on", path))?;
        let meta = path.symlink_metadata().map_err(ControlError::io("looking at", path))?;
        let identity = (meta.dev(), meta.ino());
        Ok(Self { listener, path: path.into(), identity })
    }

    /// Serves `plane` until `stop` is done, then lets requests in flight finish for 2 s.
    pub async fn serve(
        self,
        plane: Arc<dyn Plane>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), ControlError> {
        let io = |what| ControlError::io(what, &self.path);
        let listener = self.listener.try_clone().map_err(io("copying"))?;
        let listener = UnixListener::from_std(listener).map_err(io("serving"))?;
        let router = router(plane);
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = accept(&listener, &places) => accepted,
            };
            if let Some((stream, place)) = accepted {
                let router = router.clone();
                tokio::spawn(async move {
                    serve_connection(stream, router).await;
                    drop(place);
                });
            }
        }
        // Kept-alive connections without a request end by their own time-out; nobody waits there.
        let all = places.acquire_many(MAX_CONNECTIONS as u32);
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, all).await;
        Ok(())
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        let ours = self
            .path
            .symlink_metadata()
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.identity);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

async fn accept(
    listener: &UnixListener,
    places: &Arc<Semaphore>,
) -> Option<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    // The semaphore is never closed.
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, place)),
        Err(e) => {
            // Out of descriptors or memory: the connection stays queued, so wait before the retry.
            tracing::warn!("control socket: accept: {e}");
            tokio::time::sleep(Duration::from_millis(100)).await;
            None
        }
    }
}

async fn serve_connection(stream: UnixStream, router: Router) {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(64 << 10);
    let service = TowerToHyperService::new(router);
    if let Err(e) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!("control connection: {e}");
    }
}

/// Removes a socket left over by a daemon that was killed.
fn remove_stale(path: &Path) -> Result<(), ControlError> {
    let meta = match path.symlink_metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(ControlError::io("looking at", path)(e)),
    };
    if !meta.file_type().is_socket() {
        return Err(ControlError::NotASocket(path.into()));
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(ControlError::AlreadyRunning(path.into()));
    }
    std::fs::remove_file(path).map_err(ControlError::io("removing the stale socket", path))
}

/// A listening socket with mode 0600 from its first moment: the file takes the mode that the
/// socket has when it is bound.
fn listen(path: &Path) -> std::io::Result<StdListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok(fd.into())
}
