//! Disks whose image is checked before it is served: they start beside everything else, and are
//! shown meanwhile.
//!
//! The check of an image that was not closed reads all of its tables, which takes minutes where
//! they are large and the storage is slow. So it is done without the lock on changes. Until it is
//! over the port has its place in the list and no device. One that is detached is not started; its
//! check ends as it would have.

use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::vec::IntoIter;

use base::sync::lock;
use config::PortConfig;
use control::plane::PlaneError;

use super::checks::MAX_CHECKS;
use super::engine::Engine;
use super::guard::guarded;
use super::port::{Port, full_name};
use super::{Change, Host};
use crate::process::describe;

/// Longest wait of the daemon's start for checks. Most are over sooner, and then whoever waited
/// for the start finds all ports.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ports that no checker has taken yet.
struct Unchecked(Mutex<IntoIter<Arc<Port>>>);

impl Unchecked {
    fn next(&self) -> Option<Arc<Port>> {
        lock(&self.0).next()
    }
}

impl Host {
    /// Starts ports whose image is checked first, and waits for that, but not for long.
    pub(super) fn begin_checks(self: &Arc<Self>, ports: Vec<Arc<Port>>) {
        let count = ports.len();
        self.checks.change(|state| state.left_of_start += count);
        let left = Arc::new(Unchecked(Mutex::new(ports.into_iter())));
        let spawn = |_: &usize| {
            let (host, left) = (Arc::clone(self), Arc::clone(&left));
            let thread = std::thread::Builder::new().name("millrace-check".into());
            let spawned = thread.spawn(move || host.check_all(&left));
            spawned.inspect_err(|e| tracing::error!("no thread for checks of images: {e}")).is_ok()
        };
        if (0..count.min(MAX_CHECKS)).filter(spawn).count() == 0 {
            self.check_all(&left);
        }
        self.checks.wait_for_start_until(PATIENCE);
    }

    fn check_all(&self, left: &Unchecked) {
        while let Some(port) = left.next() {
            self.start_checked(&port, |_, _| ());
            self.checks.change(|state| state.left_of_start -= 1);
        }
    }

    /// Waits until all ports of the start have come, or failed. False at the end of the daemon.
    pub fn wait_for_checks(&self) -> bool {
        self.checks.wait_for_start()
    }

    /// Attaches a listed disk whose image is checked first; if that fails it is as if it had never
    /// been there.
    pub(super) fn attach_checked(&self, port: &Arc<Port>) -> Result<Arc<Port>, PlaneError> {
        let (vm, name) = (&port.vm, port.config.name());
        let settle = |change: &mut Change, started: &Arc<Port>| match &started.live {
            Ok(_) => change.runtime_changes.record_attach(&change.config, vm, &port.config),
            Err(_) => {
                self.ports.remove(started);
                started.leave_socket();
                self.forget_port(change, vm, name);
            }
        };
        let Some(started) = self.start_checked(port, settle) else {
            let why = "it was detached while its image was checked, or the daemon stops";
            return Err(PlaneError::Refused(why.into()));
        };
        match &started.live {
            Ok(_) => Ok(started),
            Err(why) => Err(PlaneError::Refused(why.clone())),
        }
    }

    /// Checks the image of a listed port, and starts it in its place; a failure stands there, too.
    /// Nothing if it is not listed any more. `then` is done under the same lock.
    pub(super) fn start_checked(
        &self,
        port: &Arc<Port>,
        then: impl FnOnce(&mut Change, &Arc<Port>),
    ) -> Option<Arc<Port>> {
        let engine = self.open_checked(port);
        let mut change = self.lock();
        if !self.ports.has(port) {
            return None;
        }
        let started = guarded(|| Ok(self.serve_checked(&mut change, port, engine)));
        let started = started.unwrap_or_else(|e| {
            let failed = Port::new(&port.vm, port.config.clone(), Err(describe(&e)));
            let failed = failed.turn_away(&self.turned_away, change.config.daemon.socket_mode);
            self.ports.replace(port, failed)
        });
        if let Err(why) = &started.live {
            let name = full_name(&port.vm, port.config.name());
            tracing::error!(port = %name, "not started: {why}");
        }
        then(&mut change, &started);
        Some(started)
    }

    /// Opens a listed port's disk, and checks its image. Takes as long as that takes.
    fn open_checked(&self, port: &Arc<Port>) -> anyhow::Result<Engine> {
        let name = full_name(&port.vm, port.config.name());
        let PortConfig::Disk(disk) = &port.config else { anyhow::bail!("{name} is no disk") };
        let _permit = self.checks.permit();
        let account = {
            let change = self.lock();
            anyhow::ensure!(self.ports.has(port), "{name} is not there any more");
            self.accounts.open(&change.config, &port.vm)?
        };
        let progress = port.check.clone().unwrap_or_default();
        guarded(|| self.open_disk(&name, account, disk, progress))
    }

    fn serve_checked(
        &self,
        change: &mut Change,
        port: &Arc<Port>,
        engine: anyhow::Result<Engine>,
    ) -> Arc<Port> {
        let (vm, config) = (&port.vm, &port.config);
        let live = engine.and_then(|engine| self.serve_engine(change, vm, config, engine));
        let live = live.map_err(|e| describe(&e));
        let mode = change.config.daemon.socket_mode;
        let started = Port::new(vm, config.clone(), live).turn_away(&self.turned_away, mode);
        let started = self.ports.replace(port, started);
        if started.live.is_err() {
            self.release_account(vm);
        }
        self.announce(&started);
        self.pipes.ports_changed(vm);
        started
    }
}
