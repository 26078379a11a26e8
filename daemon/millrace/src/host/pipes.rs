//! Pipes of the VMs that have them: each with the service its agent connects to.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use base::sync::lock;
use block::BlockPort;
use config::Config;
use control::plane::PipeStatus;
use control::sample::Metrics;
use guest_abi::Reason;
use net::NetPort;
use pipe::{Devices, PipeInfo, PipeStats, PipesConfig, Secret, VmPipes};
use sidecore::{Account, Accounts};
use vsock::HostService;

use super::engine::Engine;
use super::port::Ports;
use super::secret;
use super::shortcuts::Shortcuts;

/// The pipes of all VMs.
pub struct Pipes {
    /// Pipes by the VM's name.
    vms: Mutex<HashMap<String, Arc<VmPipes>>>,
    shortcuts: Arc<Shortcuts>,
    accounts: Arc<Accounts>,
}

/// Running ports of one VM.
struct VmPorts {
    ports: Ports,
    vm: String,
    /// Trust domain of its channels, if it has them.
    domain: Option<String>,
    shortcuts: Arc<Shortcuts>,
    accounts: Arc<Accounts>,
}

impl Devices for VmPorts {
    fn nets(&self) -> Vec<Arc<NetPort>> {
        self.ports.each_live(&self.vm, |_, live| match &live.engine {
            Engine::Net(port, _) => Some(Arc::clone(port)),
            _ => None,
        })
    }

    fn disks(&self) -> Vec<Arc<BlockPort>> {
        self.ports.each_live(&self.vm, |_, live| match &live.engine {
            Engine::Disk(port) => Some(Arc::clone(port)),
            _ => None,
        })
    }

    fn account(&self) -> Option<Arc<Account>> {
        self.accounts.find(&self.vm)
    }

    fn has_way_past(&self, remote: IpAddr, since_ns: u64) -> bool {
        let domain = self.domain.as_ref();
        domain.is_some_and(|domain| self.shortcuts.leads_to(domain, remote, since_ns))
    }
}

impl Pipes {
    /// Makes an empty table. Pipes leave connections alone that channels may take, and are charged
    /// to their VMs' accounts.
    pub fn new(shortcuts: Arc<Shortcuts>, accounts: Arc<Accounts>) -> Self {
        Self { vms: Mutex::default(), shortcuts, accounts }
    }

    /// Pipes of a VM, started with its first port; none when it has no pipes.
    fn of(&self, config: &Config, vm: &str, ports: &Ports) -> anyhow::Result<Option<Arc<VmPipes>>> {
        let Some(entry) = config.vms.iter().find(|v| v.name == vm) else { return Ok(None) };
        let Some(wanted) = &entry.pipes else { return Ok(None) };
        let mut all = lock(&self.vms);
        let pipes = match all.get(vm) {
            Some(pipes) => pipes,
            None => {
                let config = PipesConfig {
                    vm: vm.into(),
                    max_pipes: wanted.max,
                    threads: u16::try_from(wanted.threads)?,
                    run_dir: config.daemon.run_dir.clone(),
                    secret: Secret(wanted.secret.as_deref().map_or(Ok(Vec::new()), secret::read)?),
                };
                let devices = VmPorts {
                    ports: ports.clone(),
                    vm: vm.into(),
                    domain: entry.channel.as_ref().and_then(|_| entry.trust_domain.clone()),
                    shortcuts: Arc::clone(&self.shortcuts),
                    accounts: Arc::clone(&self.accounts),
                };
                let pipes = VmPipes::start(config, Arc::new(devices))?;
                all.entry(vm.into()).or_insert(pipes)
            }
        };
        Ok(Some(Arc::clone(pipes)))
    }

    /// Services of a VM's vsock port: the agent's port, when the VM has pipes.
    pub fn services(
        &self,
        config: &Config,
        vm: &str,
        ports: &Ports,
    ) -> anyhow::Result<Vec<HostService>> {
        let port = guest_abi::pipe::PORT;
        let service = |pipes: Arc<VmPipes>| {
            let sink = pipes.sink();
            HostService { port, privileged: true, sink, on_guest_reset: None }
        };
        Ok(self.of(config, vm, ports)?.map(service).into_iter().collect())
    }

    /// Restores the pipes of a network port that was just made: no packet has passed it yet.
    pub fn restore(
        &self,
        config: &Config,
        vm: &str,
        ports: &Ports,
        net: &Arc<NetPort>,
    ) -> anyhow::Result<()> {
        match self.of(config, vm, ports)? {
            Some(pipes) => pipes.restore(net),
            None => VmPipes::forget_journal(&config.daemon.run_dir, net),
        }
        Ok(())
    }

    /// Forgets a port that was taken away for good.
    pub fn forget(&self, vm: &str, engine: &Engine) {
        if let (Engine::Net(net, _), Some(pipes)) = (engine, lock(&self.vms).get(vm)) {
            pipes.forget(net);
        }
    }

    /// Ends a VM's pipes with its last port: its next one starts them again.
    pub fn leave(&self, vm: &str) {
        let gone = lock(&self.vms).remove(vm);
        gone.into_iter().for_each(|pipes| pipes.stop());
    }

    /// Tells a VM's pipes that its ports came or went.
    pub fn ports_changed(&self, vm: &str) {
        let pipes = lock(&self.vms).get(vm).cloned();
        pipes.into_iter().for_each(|pipes| pipes.ports_changed());
    }

    /// Ends the pipes of all VMs.
    pub fn stop(&self) {
        let all = std::mem::take(&mut *lock(&self.vms));
        all.values().for_each(|pipes| pipes.stop());
    }

    fn list(&self) -> Vec<(String, Arc<VmPipes>)> {
        lock(&self.vms).iter().map(|(vm, pipes)| (vm.clone(), Arc::clone(pipes))).collect()
    }

    /// Lists the pipes under way.
    pub fn status(&self) -> Vec<PipeStatus> {
        let rows = |(vm, pipes): (String, Arc<VmPipes>)| {
            pipes.list().into_iter().map(move |info| status(&vm, info))
        };
        self.list().into_iter().flat_map(rows).collect()
    }

    /// Adds the pipes' counters.
    pub fn metrics(&self, all: &mut Metrics) {
        for (vm, pipes) in self.list() {
            metrics(&vm, pipes.stats(), pipes.list().len() as u64, all);
        }
    }
}

fn status(vm: &str, info: PipeInfo) -> PipeStatus {
    PipeStatus {
        vm: vm.into(),
        id: info.id,
        source: info.source,
        sink: info.sink,
        len_bytes: info.len_bytes,
        moved_bytes: info.moved_bytes,
        state: info.state.into(),
        age_ms: info.age.as_millis() as u64,
    }
}

fn metrics(vm: &str, stats: &PipeStats, open: u64, all: &mut Metrics) {
    use std::sync::atomic::Ordering::Relaxed;
    let labels = || vec![("vm", vm.to_owned())];
    let values = [
        ("asked_total", stats.asked.load(Relaxed), "Pipes that agents asked for and may have."),
        ("started_total", stats.started.load(Relaxed), "Connections taken over."),
        ("moved_bytes_total", stats.moved_bytes.load(Relaxed), "Bytes that arrived."),
        ("agents_total", stats.agents.load(Relaxed), "Agents that were welcomed."),
        (
            "unproved_total",
            stats.unproved.load(Relaxed),
            "Connections from low ports that were no agent's: no hello, or not the VM's secret.",
        ),
        ("open", open, "Pipes under way."),
        ("reads_total", stats.reads.load(Relaxed), "Reads of disks past their queues."),
        (
            "read_bytes_total",
            stats.read_bytes.load(Relaxed),
            "Bytes that pipes read of disks past their queues.",
        ),
        ("held_total", stats.held.load(Relaxed), "Times a pipe had to wait at the VM's ceiling."),
        ("held", stats.held_now.load(Relaxed), "Pipes that wait at the VM's ceiling."),
    ];
    for (name, value, help) in values {
        all.sample(&format!("millrace_pipe_{name}"), help, labels(), value);
    }
    let of = |reason: Reason| [labels(), vec![("reason", reason.key().to_owned())]].concat();
    for (reason, count) in stats.ended() {
        let help =
            "Pipes that ended, by reason; all but complete ones fell back or were cut short.";
        all.sample("millrace_pipe_ended_total", help, of(reason), count);
    }
    for (reason, count) in stats.refused() {
        let help = "Pipes that the guest's agent refused itself, by reason, as it says.";
        all.sample("millrace_pipe_refused_total", help, of(reason), count);
    }
    let (handover, total) = stats.times();
    let name = "millrace_pipe_handover_nanoseconds";
    let help = "Time from knowing a connection's numbers to steering it to its twin.";
    all.time(name, help, labels(), handover);
    let name = "millrace_pipe_duration_nanoseconds";
    all.time(name, "Time from a request to its answer.", labels(), total);
}
