//! The control API's side of the host.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use block::{BlockError, BlockPort};
use config::{CreditConfig, PortConfig};
use control::plane::{
    ChannelStatus, CopyWork, Detached, HolderStatus, LogFilter, ModuleStatus, PipeStatus, Plane,
    PlaneError, PortStatus, Restored, Status,
};
use control::sample::Metrics;
use serde_json::Value;

use super::engine::Engine;
use super::port::{Live, Port, full_name};
use super::{Change, Host, accounts, checks, status};
use crate::log;
use crate::process::describe;

fn refused(e: &anyhow::Error) -> PlaneError {
    PlaneError::Refused(describe(e))
}

/// How long a detach waits for requests in its disk. A disk that works answers in less.
const DETACH_LIMIT: Duration = Duration::from_secs(10);

/// Ends a port's session. What its disk does not answer in time is left there.
fn end_session(live: &Live) -> Detached {
    let Engine::Disk(disk) = &live.engine else {
        live.stop(true);
        return Detached::default();
    };
    disk.give_up_after(DETACH_LIMIT);
    live.stop(true);
    Detached { requests_in_disk: disk.orphaned_operations() }
}

impl Host {
    /// Forgets a port that is not listed any more, and what its VM had for having ports if it was
    /// the last.
    pub(super) fn forget_port(&self, change: &mut Change, vm: &str, port: &str) {
        if !self.list().iter().any(|port| port.vm == vm) {
            self.pipes.leave(vm);
        }
        self.channels.ports_changed(vm);
        self.release_account(vm);
        let Change { config, runtime_changes, .. } = change;
        config.detach(vm, port);
        runtime_changes.record_detach(config, vm, port);
    }

    /// Starts a port that does not run: as the file has it, or as it is listed.
    fn start_again(
        &self,
        vm: &str,
        name: &str,
        in_file: Option<PortConfig>,
    ) -> Result<Arc<Port>, PlaneError> {
        let mut change = self.lock();
        let listed = self.find("port", vm, name);
        let config = match (&listed, in_file) {
            (Ok(port), _) if port.live.is_ok() => {
                return Err(PlaneError::Conflict(format!("{vm}/{name} runs already")));
            }
            (Ok(port), _) if port.check.is_some() => {
                let why = format!("{vm}/{name} starts when its image has been checked");
                return Err(PlaneError::Conflict(why));
            }
            (_, Some(config)) => config,
            (Ok(port), None) => port.config.clone(),
            (Err(_), None) => return listed,
        };
        let before = change.config.clone();
        change.config.put_port(vm, &config)?;
        if let Ok(port) = &listed {
            port.leave_socket();
        }
        let put = |port| match &listed {
            Ok(old) => self.ports.replace(old, port),
            Err(_) => self.ports.push(port),
        };
        let started = if let Some(progress) = checks::needed(&config) {
            let port = put(Port::checking(vm, config, progress));
            drop(change);
            self.start_checked(&port, |_, _| ()).unwrap_or(port)
        } else {
            let live = self.start_port(&mut change, vm, &config).map_err(|e| describe(&e));
            if let (Err(why), Err(_)) = (&live, &listed) {
                change.config = before;
                return Err(PlaneError::Refused(why.clone()));
            }
            let mode = change.config.daemon.socket_mode;
            let port = put(Port::new(vm, config, live).turn_away(&self.turned_away, mode));
            self.announce(&port);
            self.pipes.ports_changed(vm);
            port
        };
        match &started.live {
            Ok(_) => Ok(started),
            Err(why) => Err(PlaneError::Refused(why.clone())),
        }
    }

    /// A disk that was started.
    fn disk(&self, vm: &str, port: &str) -> Result<Arc<BlockPort>, PlaneError> {
        let found = self.find("disk", vm, port)?;
        match found.live.as_ref().map(|l| &l.engine) {
            Ok(Engine::Disk(disk)) => Ok(Arc::clone(disk)),
            Ok(_) => Err(PlaneError::NotFound { what: "disk", name: full_name(vm, port) }),
            Err(why) => Err(PlaneError::Conflict(format!("the disk was not started: {why}"))),
        }
    }
}

impl Plane for Host {
    fn status(&self) -> Status {
        let (ports, modules) = (self.ports(), self.modules.status(None));
        let change = self.change.try_lock();
        // A change that waits for a disk must not hold up `status`: then the VMs' own settings are
        // those of the ports' names alone.
        let mut vms = match &change {
            Ok(change) => status::vms(&change.config, ports),
            Err(_) => status::vms_by_name(ports),
        };
        for vm in &mut vms {
            vm.usage = self.accounts.find(&vm.name).map(|a| accounts::usage(&a));
        }
        status::modules(&mut vms, modules);
        // Switches are asked on their sidecores: nobody else waits for that.
        drop(change);
        let placement = self.placer().as_ref().map(status::placement).unwrap_or_default();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            config: Some(self.config_path.clone()),
            holder: HolderStatus { enabled: self.holder.is_some(), socket: self.holder.clone() },
            sidecores: self.cores.iter().map(status::sidecore).collect(),
            workers: self.cores.iter().flat_map(status::workers).collect(),
            placement,
            switches: self.switches.list().iter().map(|s| status::switch(s)).collect(),
            vms,
        }
    }

    fn ports(&self) -> Vec<PortStatus> {
        self.list().iter().map(|p| status::port(p)).collect()
    }

    fn pipes(&self) -> Vec<PipeStatus> {
        self.pipes.status()
    }

    fn channels(&self) -> Vec<ChannelStatus> {
        self.channels.status()
    }

    fn join_channel(&self, vm: &str) -> Result<ChannelStatus, PlaneError> {
        self.known(vm)?;
        self.channels.join(vm)
    }

    fn leave_channel(&self, vm: &str) -> Result<(), PlaneError> {
        self.known(vm)?;
        self.channels.leave(vm)
    }

    fn modules(&self, vm: Option<&str>) -> Result<Vec<ModuleStatus>, PlaneError> {
        let list = self.modules.status(vm);
        if let (Some(vm), true) = (vm, list.is_empty()) {
            self.known(vm)?;
        }
        Ok(list)
    }

    fn load_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        self.known(vm)?;
        let config = config::load(&self.config_path)?;
        self.modules.load(vm, &config)?;
        Ok(self.modules.status(Some(vm)))
    }

    fn back_up(&self, vm: &str, module: &str) -> Result<CopyWork, PlaneError> {
        self.known(vm)?;
        self.modules.back_up(vm, module)
    }

    fn restore(
        &self,
        vm: &str,
        module: &str,
        replace: bool,
        from: &mut dyn Read,
    ) -> Result<Restored, PlaneError> {
        self.known(vm)?;
        self.modules.restore(vm, module, replace, from)
    }

    fn drain_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        self.known(vm)?;
        self.modules.drain(vm)?;
        Ok(self.modules.status(Some(vm)))
    }

    fn resume_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        self.known(vm)?;
        self.modules.resume(vm)?;
        Ok(self.modules.status(Some(vm)))
    }

    fn metrics(&self) -> Metrics {
        let mut all = Metrics {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.started.elapsed().as_secs(),
            sidecores: self.cores.iter().map(status::sidecore).collect(),
            workers: self.cores.iter().flat_map(status::workers).collect(),
            ..Metrics::default()
        };
        if let Some(placer) = &*self.placer() {
            status::placer_metrics(placer, &mut all);
        }
        self.switches.list().iter().for_each(|s| status::switch_metrics(s, &mut all));
        self.renewals.metrics(&mut all);
        let ports = self.list();
        ports.iter().for_each(|p| status::port_metrics(p, &mut all));
        status::memory_metrics(&ports, &mut all);
        status::left_in_disks(&mut all);
        self.accounts.list().iter().for_each(|a| accounts::metrics(a, &mut all));
        self.pipes.metrics(&mut all);
        self.channels.metrics(&mut all);
        self.modules.metrics(&mut all);
        all
    }

    fn log_filter(&self) -> LogFilter {
        log::filter()
    }

    fn set_log_filter(&self, filter: &str) -> Result<LogFilter, PlaneError> {
        config::check_log_filter(filter).map_err(|what| PlaneError::Invalid {
            field: "filter",
            what,
            limit: None,
        })?;
        let set = log::set_filter(filter).map_err(|e| PlaneError::Failed(describe(&e)))?;
        tracing::info!(filter, "what is logged was changed");
        Ok(set)
    }

    fn attach(&self, vm: &str, body: &Value) -> Result<PortStatus, PlaneError> {
        let mut change = self.lock();
        // A failed attach leaves the config as it was, VMs without ports included.
        let before = change.config.clone();
        let config = change.config.attach(vm, body)?;
        if let Some(progress) = checks::needed(&config) {
            let port = self.ports.push(Port::checking(vm, config, progress));
            drop(change);
            let port = self.attach_checked(&port)?;
            tracing::info!(port = %full_name(vm, port.config.name()), "attached");
            return Ok(status::port(&port));
        }
        let live = match self.start_port(&mut change, vm, &config) {
            Ok(live) => live,
            Err(e) => {
                change.config = before;
                return Err(refused(&e));
            }
        };
        let Change { config: all, runtime_changes, .. } = &mut *change;
        runtime_changes.record_attach(all, vm, &config);
        tracing::info!(port = %full_name(vm, config.name()), "attached");
        let port = self.add(Port::new(vm, config, Ok(live)));
        self.pipes.ports_changed(vm);
        Ok(status::port(&port))
    }

    fn start(&self, vm: &str, port: &str) -> Result<PortStatus, PlaneError> {
        let file = config::load(&self.config_path)?;
        let mut in_file = file.vms.iter().filter(|v| v.name == vm).flat_map(|v| v.ports());
        let in_file = in_file.find(|p| p.name() == port);
        let started = self.start_again(vm, port, in_file)?;
        tracing::info!(port = %full_name(vm, port), "started");
        Ok(status::port(&started))
    }

    fn detach(&self, vm: &str, port: &str) -> Result<Detached, PlaneError> {
        let found = {
            let _change = self.lock();
            let found = self.find("port", vm, port)?;
            // Nobody else finds it from here on; its name is taken until the end.
            self.ports.remove(&found);
            found.leave_socket();
            self.pipes.ports_changed(vm);
            found
        };
        // Without the lock, which every other change waits for: its disk may take long.
        let detached = found.live.as_ref().map_or_else(|_| Detached::default(), end_session);
        let mut change = self.lock();
        if let Ok(live) = &found.live {
            self.forget_memory(&found);
            self.drop_engine(&mut change, vm, &live.engine);
            self.pipes.forget(vm, &live.engine);
        } else {
            self.forget_session(&found);
        }
        self.forget_port(&mut change, vm, port);
        let requests_in_disk = detached.requests_in_disk;
        tracing::info!(port = %full_name(vm, port), requests_in_disk, "detached");
        Ok(detached)
    }

    fn resume(&self, vm: &str, port: &str) -> Result<usize, PlaneError> {
        let resumed = self.disk(vm, port)?.resume();
        tracing::info!(port = %full_name(vm, port), requests = resumed, "resumed");
        Ok(resumed)
    }

    fn resize(&self, vm: &str, port: &str, len_bytes: Option<u64>) -> Result<u64, PlaneError> {
        let disk = self.disk(vm, port)?;
        disk.resize(len_bytes).map_err(|e| match e {
            BlockError::GuestNotTold { .. } => PlaneError::Conflict(e.to_string()),
            _ => PlaneError::Refused(e.to_string()),
        })
    }

    fn set_link(&self, vm: &str, port: &str, up: bool) -> Result<bool, PlaneError> {
        let found = self.find("net", vm, port)?;
        match found.live.as_ref().map(|l| &l.engine) {
            Ok(Engine::Net(net, _)) => {
                net.set_link(up).map_err(|e| PlaneError::Failed(e.to_string()))
            }
            Ok(_) => Err(PlaneError::NotFound { what: "net", name: full_name(vm, port) }),
            Err(why) => Err(PlaneError::Conflict(format!("the port was not started: {why}"))),
        }
    }

    fn set_credit(&self, vm: &str, body: &Value) -> Result<CreditConfig, PlaneError> {
        let mut change = self.lock();
        let was = change.config.vms.iter().find(|v| v.name == vm).map(|v| v.credit);
        let (Some(was), Some(credit)) = (was, change.config.set_credit(vm, body)?) else {
            return Err(PlaneError::NotFound { what: "VM", name: vm.into() });
        };
        self.accounts.grant(vm, &credit).map_err(|e| PlaneError::Failed(describe(&e)))?;
        self.channels.grant(vm, &credit);
        change.runtime_changes.record_grant(vm, was, credit);
        tracing::info!(%vm, ?credit, "granted");
        Ok(credit)
    }

    fn shutdown(&self, forget: bool) {
        self.forget.store(forget, Ordering::Relaxed);
        self.stop.notify_one();
    }
}
