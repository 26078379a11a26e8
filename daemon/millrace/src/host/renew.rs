//! Workers that panicked are made anew, with all ports that they served.
//!
//! A panic is a bug of ours. Its worker is gone: a switch with all its ports, a vsock domain, a
//! disk's queue. Each port goes the way that it goes over a restart of the daemon: its session is
//! put down and taken up again, from the holder if there is one; without one its VMM sees a
//! disconnect, and connects again. What panics again and again is left after [`MAX_RENEWALS`] times
//! in a minute: its ports are shown as broken then, until somebody starts them.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};

use anyhow::Context;
use config::{Config, PortConfig};

use super::domains::Key;
use super::engine::Engine;
use super::port::{Port, full_name};
use super::renewals::{MAX_RENEWALS, PERIOD};
use super::switches::SwitchEntry;
use super::{Change, Host, has_memory, switches};
use crate::process::describe;

fn run(host: &Weak<Host>, panics: &Receiver<String>) {
    while let Ok(worker) = panics.recv() {
        let Some(wait) = host.upgrade().map(|host| host.renewals.panicked(&worker)) else { return };
        std::thread::sleep(wait.unwrap_or_default());
        let Some(host) = host.upgrade() else { return };
        host.renew(&worker, wait.is_some());
    }
}

/// Ports that a worker served.
enum Served {
    Switch(String),
    Domain(Key),
    Disk(String),
}

impl Served {
    fn is_port(&self, change: &Change, port: &Port) -> bool {
        match (self, &port.config) {
            (Self::Switch(name), PortConfig::Net(net)) => net.switch == *name,
            (Self::Domain(key), PortConfig::Vsock(_)) => Key::of(&change.config, &port.vm) == *key,
            (Self::Disk(name), PortConfig::Disk(disk)) => full_name(&port.vm, &disk.name) == *name,
            _ => false,
        }
    }
}

impl Host {
    /// Renews workers whose names come by `panics`, until the sidecores have ended.
    pub(super) fn watch_workers(self: &Arc<Self>, panics: Receiver<String>) -> anyhow::Result<()> {
        let host = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("millrace-renew".into());
        thread
            .spawn(move || run(&host, &panics))
            .context("starting a thread for workers that panic")?;
        Ok(())
    }

    /// Makes a worker anew, or shows its ports as broken.
    fn renew(&self, worker: &str, again: bool) {
        let mut change = self.lock();
        let Some(served) = self.served(&mut change, worker) else {
            tracing::error!(worker, "a worker that panicked is not made anew: it is unknown");
            return;
        };
        let ports = self.list();
        let ports: Vec<_> = ports
            .into_iter()
            .filter(|port| port.live.is_ok() && served.is_port(&change, port))
            .collect();
        // A session that is slow does not add its time to that of the others.
        ports.iter().filter_map(|port| port.live.as_ref().ok()).for_each(|l| l.begin_stop(false));
        // All of them first: none may find what is gone.
        let ports: Vec<_> =
            ports.into_iter().map(|port| self.put_down(&mut change, port)).collect();
        let many =
            format!("its worker panicked {MAX_RENEWALS} times within {} s", PERIOD.as_secs());
        let renewed = match (&served, again) {
            (_, false) => Err(anyhow::anyhow!("{many}; `millrace start` tries again")),
            (Served::Switch(name), true) => self.renew_switch(&change.config, name),
            _ => Ok(()),
        };
        let why = renewed.as_ref().err().map(describe);
        let count = ports.len();
        for (port, engine) in ports {
            self.take_up(&mut change, &port, engine, why.clone());
        }
        self.renewals.count(worker, why.is_none());
        match why {
            None => tracing::warn!(worker, ports = count, "made anew after a panic"),
            Some(why) => tracing::error!(worker, ports = count, "given up: {why}"),
        }
    }

    /// Ports that the worker of this name serves; a domain is dropped.
    fn served(&self, change: &mut Change, worker: &str) -> Option<Served> {
        if let Some(name) = worker.strip_prefix("switch ") {
            return self.switches.find(name).map(|_| Served::Switch(name.into()));
        }
        if let Some(name) = worker.strip_prefix("vsock ") {
            return change.domains.drop_named(name).map(Served::Domain);
        }
        let (disk, _) = worker.strip_prefix("disk ")?.rsplit_once(" queue ")?;
        Some(Served::Disk(disk.into()))
    }

    /// The switch of this name, made anew where its worker had been given up.
    pub(super) fn living_switch(
        &self,
        config: &Config,
        name: &str,
    ) -> anyhow::Result<Arc<SwitchEntry>> {
        let entry = self.switches.find(name);
        let entry = entry.with_context(|| format!("switch {name} does not run"))?;
        if entry.switch.is_alive() {
            return Ok(entry);
        }
        self.renew_switch(config, name)?;
        self.switches.find(name).with_context(|| format!("switch {name} does not run"))
    }

    fn renew_switch(&self, config: &Config, name: &str) -> anyhow::Result<()> {
        let wanted = config.switches.iter().find(|s| s.name == name);
        let wanted = wanted.with_context(|| format!("the config has no switch {name}"))?;
        let entry = switches::start(config, wanted, &self.cores_in_turn()[0], &self.clock)?;
        self.switches.replace(entry);
        Ok(())
    }

    /// Ends the session of a port whose worker is gone; the holder keeps it for the next one.
    /// Returns the port that is listed meanwhile, and the device where that has what cannot be
    /// opened again: the memory of a disk.
    fn put_down(&self, change: &mut Change, port: Arc<Port>) -> (Arc<Port>, Option<Engine>) {
        let (vm, config) = (&port.vm, &port.config);
        let mut kept = None;
        if let Ok(live) = &port.live {
            live.stop(false);
            self.pipes.forget(vm, &live.engine);
            // A switch and a domain have gone with their worker.
            if let Engine::Disk(_) = &live.engine {
                self.drop_engine(change, vm, &live.engine);
                kept = has_memory(config).then(|| live.engine.clone());
            }
        }
        let why = "its worker panicked, and is made anew".into();
        // The old one, which has its image locked, ends with this function.
        (self.ports.replace(&port, Port::new(vm, config.clone(), Err(why))), kept)
    }

    /// Starts a port in the place of its old one, or shows why not.
    fn take_up(
        &self,
        change: &mut Change,
        port: &Arc<Port>,
        engine: Option<Engine>,
        why: Option<String>,
    ) {
        let (vm, config) = (&port.vm, &port.config);
        let live = match (why, engine) {
            (Some(why), _) => Err(why),
            (None, Some(engine)) => {
                self.serve_engine(change, vm, config, engine).map_err(|e| describe(&e))
            }
            (None, None) => self.start_port(change, vm, config).map_err(|e| describe(&e)),
        };
        if let Err(why) = &live {
            let name = full_name(vm, config.name());
            tracing::error!(port = %name, "not started: {why}");
        }
        let mode = change.config.daemon.socket_mode;
        let started = Port::new(vm, config.clone(), live).turn_away(&self.turned_away, mode);
        let started = self.ports.replace(port, started);
        self.announce(&started);
        self.pipes.ports_changed(vm);
    }
}
