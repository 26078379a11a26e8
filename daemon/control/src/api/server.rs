//! HTTP on a Unix socket.

use std::future::Future;
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use base::socket::{self, SocketError, SocketFile};
use config::ReadSocketConfig;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::routes::{read_only_router, router};
use crate::error::ControlError;
use crate::plane::Plane;

/// Most connections at once; more wait in the socket's backlog. A scraper, a few people and a
/// fleet manager use fewer than ten.
pub const MAX_CONNECTIONS: usize = 64;

/// Most connections at once to the socket for reading: they take no places of the control socket.
pub const MAX_READERS: usize = 16;

/// Longest time for a request line and its headers, idle time of a kept connection included.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// File with the numbers of groups.
const GROUPS: &str = "/etc/group";

/// Connections the kernel queues for us.
const BACKLOG: i32 = 128;

/// Longest time for requests in flight once the daemon stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The bound control socket, or the one for reading; removed when dropped.
#[derive(Debug)]
pub struct ApiServer {
    listener: StdListener,
    file: SocketFile,
    rights: Rights,
}

/// Requests that a socket takes.
#[derive(Debug, Clone, Copy)]
enum Rights {
    All,
    Read,
}

impl ApiServer {
    /// Binds `path` for the owner only. A socket that nobody answers on is replaced; one that
    /// somebody answers on is an error, as is any other file.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        Self::bind_with(path, 0o600, Rights::All)
    }

    /// Binds a socket for listings and metrics, for the owner and a group.
    pub fn bind_read_only(config: &ReadSocketConfig) -> Result<Self, ControlError> {
        let path = config.path.as_path();
        let group = group_id(&config.group, Path::new(GROUPS))?;
        let this = Self::bind_with(path, 0o660, Rights::Read)?;
        let failed = |source| ControlError::Socket { path: path.into(), source };
        this.file.give_to_group(group).map_err(failed)?;
        Ok(this)
    }

    fn bind_with(path: &Path, mode: u32, rights: Rights) -> Result<Self, ControlError> {
        let failed = |error| match error {
            SocketError::InUse => ControlError::AlreadyRunning(path.into()),
            SocketError::NotASocket => ControlError::NotASocket(path.into()),
            source => ControlError::Socket { path: path.into(), source },
        };
        let (socket, file) = socket::listen(path, mode, BACKLOG).map_err(failed)?;
        Ok(Self { listener: socket.into(), file, rights })
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
        let (router, most) = match self.rights {
            Rights::All => (router(plane), MAX_CONNECTIONS),
            Rights::Read => (read_only_router(plane), MAX_READERS),
        };
        let places = Arc::new(Semaphore::new(most));
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
        let all = places.acquire_many(most as u32);
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, all).await;
        Ok(())
    }
}

/// The number of a group, from its text or from the file `groups` (`group(5)`).
fn group_id(group: &str, groups: &Path) -> Result<u32, ControlError> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let list = std::fs::read_to_string(groups).map_err(ControlError::io("reading", groups))?;
    let number = |line: &str| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    };
    list.lines().find_map(number).ok_or_else(|| ControlError::NoGroup(group.into()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name_and_number() {
        let dir = tempfile::tempdir().unwrap();
        let groups = dir.path().join("group");
        std::fs::write(&groups, "root:x:0:\nnobody\nmonitor:x:991:prometheus,a\n").unwrap();
        assert_eq!(group_id("monitor", &groups).unwrap(), 991);
        assert_eq!(group_id("17", &groups).unwrap(), 17);
        for bad in ["moni", "nobody", ""] {
            let error = group_id(bad, &groups).unwrap_err().to_string();
            assert!(error.contains("neither a group of /etc/group nor a number"), "{error}");
        }
    }
}
