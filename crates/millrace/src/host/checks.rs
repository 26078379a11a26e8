//! Disks whose image is checked before it is served: they start beside everything else, and are shown
//! meanwhile.
//!
//! The check of an image that was not closed reads all of its tables, which takes minutes where they
//! are large and the storage is slow. So it is done without the lock on changes. Until it is over the
//! port has its place in the list and no device, and cannot be detached.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::vec::IntoIter;

use block::CheckProgress;
use control::config::{DiskFormat, PortConfig};
use control::plane::PlaneError;

use super::engine::Engine;
use super::guard::guarded;
use super::port::{Port, full_name};
use super::{Change, Host};
use crate::process::describe;

/// How long the start of the daemon waits for checks. Most are over sooner, and then whoever waited for
/// the start finds all ports.
const PATIENCE: Duration = Duration::from_secs(5);

/// Checks at a time when the daemon starts: more of them would only share the storage.
const MAX_CHECKERS: usize = 4;

/// The progress of the check that a port's image needs; none if it needs none.
pub(super) fn needed(config: &PortConfig) -> Option<CheckProgress> {
    let PortConfig::Disk(disk) = config else { return None };
    let DiskFormat::Qcow2 { path, .. } = &disk.format else { return None };
    let needs_check = !disk.read_only && block::qcow2::needs_check(path);
    needs_check.then(CheckProgress::default)
}

/// Ports that no checker has taken yet.
struct Left(Mutex<IntoIter<Arc<Port>>>);

impl Left {
    fn next(&self) -> Option<Arc<Port>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).next()
    }
}

impl Host {
    /// Starts ports whose image is checked first, and waits for that, but not for long.
    pub(super) fn begin_checks(self: &Arc<Self>, ports: Vec<Arc<Port>>) {
        let checkers = ports.len().min(MAX_CHECKERS);
        let left = Arc::new(Left(Mutex::new(ports.into_iter())));
        let (works, all_done) = mpsc::channel::<()>();
        let spawn = |_: &usize| {
            let (host, left, works) = (Arc::clone(self), Arc::clone(&left), works.clone());
            let thread = std::thread::Builder::new().name("millrace-check".into());
            let check = move || {
                host.check_all(&left);
                drop(works);
            };
            thread.spawn(check).inspect_err(|e| tracing::error!("checking images: {e}")).is_ok()
        };
        if (0..checkers).filter(spawn).count() == 0 {
            self.check_all(&left);
        }
        drop(works);
        // Nothing is sent: it ends with the last checker.
        let _ = all_done.recv_timeout(PATIENCE);
    }

    fn check_all(&self, left: &Left) {
        while let Some(port) = left.next() {
            let engine = self.open_checked(&port);
            let started = self.end_check(&mut self.lock(), &port, engine);
            if let Err(why) = &started.live {
                let name = full_name(&port.vm, port.config.name());
                tracing::error!(port = %name, "not started: {why}");
            }
        }
    }

    /// Attaches a disk whose image is checked first: listed meanwhile, and if that fails as if it had never
    /// been there.
    pub(super) fn attach_checked(&self, port: &Arc<Port>) -> Result<Arc<Port>, PlaneError> {
        let engine = self.open_checked(port);
        let mut change = self.lock();
        let started = self.end_check(&mut change, port, engine);
        let Change { config, kept, .. } = &mut *change;
        match &started.live {
            Ok(_) => kept.attached(config, &port.vm, &port.config),
            Err(why) => {
                self.ports.remove(&started);
                config.detach(&port.vm, port.config.name());
                return Err(PlaneError::Refused(why.clone()));
            }
        }
        Ok(started)
    }

    /// Opens a listed port's disk, and checks its image. Takes as long as that takes.
    fn open_checked(&self, port: &Port) -> anyhow::Result<Engine> {
        let name = full_name(&port.vm, port.config.name());
        let PortConfig::Disk(disk) = &port.config else { anyhow::bail!("{name} is no disk") };
        let account = self.account(&self.lock().config, &port.vm)?;
        let progress = port.check.clone().unwrap_or_default();
        guarded(|| self.open_disk(&name, account, disk, progress))
    }

    /// Serves what was opened, in the place of the listed port; an error stands there, too.
    fn end_check(
        &self,
        change: &mut Change,
        port: &Arc<Port>,
        engine: anyhow::Result<Engine>,
    ) -> Arc<Port> {
        let (vm, config) = (&port.vm, &port.config);
        let live = match engine {
            _ if !self.ports.has(port) => Err("the daemon stops".into()),
            Ok(engine) => self.serve_engine(change, vm, config, engine).map_err(|e| describe(&e)),
            Err(e) => Err(describe(&e)),
        };
        let started = self.ports.replace(port, Port::new(vm, config.clone(), live));
        if started.live.is_err() {
            self.release_account(vm);
        }
        self.announce(&started);
        self.pipes.ports_changed(vm);
        started
    }
}
