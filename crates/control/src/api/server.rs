//! HTTP on a Unix socket.

use std::future::Future;
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use base::socket::{self, SocketError, SocketFile};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
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
    file: SocketFile,
}

impl ApiServer {
    /// Binds `path` for the owner only. A socket that nobody answers on is replaced; one that
    /// somebody answers on is an error, as is any other file.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        let failed = |error| match error {
            SocketError::InUse => ControlError::AlreadyRunning(path.into()),
            SocketError::NotASocket => ControlError::NotASocket(path.into()),
            source => ControlError::Socket { path: path.into(), source },
        };
        let (socket, file) = socket::listen(path, 0o600, BACKLOG).map_err(failed)?;
        Ok(Self { listener: socket.into(), file })
    }

    /// Serves `plane` until `stop` is done, then lets requests in flight finish for 2 s.
    pub async fn serve(
        self,
        plane: Arc<dyn Plane>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), ControlError> {
        let io = |what| ControlError::io(what, self.file.path());
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
