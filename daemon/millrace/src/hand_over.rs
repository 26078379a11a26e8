//! From the holder that the config named before to the one that it names now, or to none: sessions
//! are taken up once more, so that VMMs see no device that never answers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::peer_fd::PeerFd;
use control::holders::HolderList;
use vhost_user::holder::HolderStore;
use vhost_user::session_store::{SavedSession, file_key};
use vhost_user::{SessionStore, VhostUserError};

/// Session store that also looks in the holder of the earlier configuration, once for each port.
struct HandOver {
    now: Arc<dyn SessionStore>,
    before: HolderStore,
}

impl SessionStore for HandOver {
    fn is_persistent(&self) -> bool {
        self.now.is_persistent()
    }

    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        self.now.save(port, state, fds)
    }

    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        if let Some(found) = self.now.load(port)? {
            return Ok(Some(found));
        }
        let Some((state, fds)) = self.before.load(port)? else { return Ok(None) };
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.moved(port, self.now.save(port, &state, &borrowed));
        Ok(Some((state, fds)))
    }

    fn forget(&self, port: &str) -> Result<(), VhostUserError> {
        self.forget_before(port);
        self.now.forget(port)
    }

    fn save_file(&self, port: &str, file: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        self.now.save_file(port, file)
    }

    fn load_file(&self, port: &str) -> Result<Option<OwnedFd>, VhostUserError> {
        if let Some(found) = self.now.load_file(port)? {
            return Ok(Some(found));
        }
        let Some(file) = self.before.load_file(port)? else { return Ok(None) };
        self.moved(&file_key(port), self.now.save_file(port, file.as_fd()));
        Ok(Some(file))
    }
}

impl HandOver {
    /// Has the earlier holder forget an entry once the current one has it. When that failed the
    /// entry is used all the same, and stays with the earlier holder.
    fn moved(&self, key: &str, saved: Result<(), VhostUserError>) {
        match saved {
            Ok(()) => self.forget_before(key),
            Err(error) => tracing::warn!(key, "left with the holder of before: {error}"),
        }
    }

    /// Has the earlier holder forget an entry. A holder that does not answer is most likely gone
    /// with its entries, which is no error.
    fn forget_before(&self, key: &str) {
        if let Err(error) = self.before.forget(key) {
            tracing::debug!(key, "the holder of before: {error}");
        }
    }
}

/// Makes a session store that also looks in the holders that earlier daemons used, and those of
/// them that have something: for the next daemon they are noted in `run_dir`. `own` is where a
/// daemon starts its own.
pub fn with_earlier_holders(
    run_dir: &Path,
    own: &Path,
    mut session_store: Arc<dyn SessionStore>,
    now: Option<&Path>,
) -> (Arc<dyn SessionStore>, Vec<PathBuf>) {
    let mut list = HolderList::load(run_dir).unwrap_or_else(|e| {
        tracing::error!("{e}");
        HolderList::empty(run_dir)
    });
    let mut used: Vec<PathBuf> = list.entries().iter().map(|used| used.socket.clone()).collect();
    // One of before the list.
    used.push(own.into());
    used.sort();
    used.dedup();
    used.retain(|path| Some(path.as_path()) != now);
    let mut before = Vec::new();
    for path in used {
        let holder = HolderStore::new(path.clone());
        let kept = holder.list().unwrap_or_default().len();
        if kept == 0 {
            continue;
        }
        let holds =
            if now.is_some() { "kept by the new one" } else { "kept by nobody from now on" };
        tracing::warn!(
            kept,
            "daemon.holder was {} and is not any more: what it has is taken up once more, and {holds}",
            path.display()
        );
        session_store = Arc::new(HandOver { now: session_store, before: holder });
        before.push(path);
    }
    let noted = list.set(now.map(Into::into).into_iter().chain(before.iter().cloned()).collect());
    if let Err(e) = noted {
        tracing::error!("{e}; should daemon.holder change, sessions will be left where they are");
    }
    (session_store, before)
}
