//! Status and metrics of the daemon's sidecores, switches and ports.

use std::collections::BTreeSet;
use std::sync::Arc;

use base::counter::QueueStats;
use base::histogram::Snapshot;
use config::{Config, DiskConfig, NetConfig, PortConfig, VsockConfig, format_mac};
use control::plane::{
    DiskStatus, Health, ImageStatus, IoStatus, LatencyStatus, MacStatus, ModuleStatus, NetStatus,
    PlacementStatus, PortKind, PortStatus, SidecoreStatus, SwitchStatus, VmStatus, VsockStatus,
    WorkerStatus,
};
use control::sample::{Metrics, PortMetrics};

use sidecore::Placer;
use sidecore::placement::Reason;
use vhost_user::QueueStatus;

use super::cores::Core;
use super::engine::Engine;
use super::port::{Live, Port};
use super::switches::SwitchEntry;

fn kind(config: &PortConfig) -> PortKind {
    match config {
        PortConfig::Net(_) => PortKind::Net,
        PortConfig::Disk(_) => PortKind::Disk,
        PortConfig::Vsock(_) => PortKind::Vsock,
    }
}

/// A sidecore's settings and counters.
pub fn sidecore(core: &Core) -> SidecoreStatus {
    let stats = core.handle.stats();
    SidecoreStatus {
        index: core.config.index,
        cpu: core.config.cpu,
        node: core.handle.node(),
        active: core.handle.is_active(),
        spin_us: core.config.spin_us,
        spin_limit_ns: stats.spin_limit_ns.get(),
        workers: stats.workers.get(),
        rounds: stats.rounds.get(),
        busy_rounds: stats.busy_rounds.get(),
        sleeps: stats.sleeps.get(),
        wakeups: stats.wakeups.get(),
        spin_hits: stats.spin_hits.get(),
        busy_ns: stats.busy_ns.get(),
        spin_ns: stats.spin_ns.get(),
        asleep_ns: stats.asleep_ns.get(),
        panics: stats.panics.get(),
        stalls: stats.stalls.get(),
    }
}

/// Workers of a sidecore.
pub fn workers(core: &Core) -> impl Iterator<Item = WorkerStatus> {
    let sidecore = core.config.index;
    core.handle.workers().into_iter().map(move |w| WorkerStatus {
        name: w.name,
        sidecore,
        pinned: w.is_pinned,
        busy_ns: w.busy_ns,
        moves: w.moves,
    })
}

/// Counters of the placer.
pub fn placement(placer: &Placer) -> PlacementStatus {
    let stats = placer.stats();
    PlacementStatus {
        moves: stats.moves.iter().map(base::counter::Counter::get).sum(),
        failed_moves: stats.failed_moves.get(),
        activations: stats.activations.get(),
        parks: stats.parks.get(),
    }
}

/// A switch with its addresses; none of them when its sidecore is gone.
pub fn switch(entry: &SwitchEntry) -> SwitchStatus {
    let macs = entry.switch.macs().unwrap_or_default();
    SwitchStatus {
        name: entry.switch.name().to_owned(),
        sidecore: entry.switch.sidecore(),
        uplink: entry.uplink.as_ref().map(|(name, _)| name.clone()),
        holds: entry.switch.stats().holds.get(),
        held_ns: entry.switch.stats().held_ns.get(),
        macs: macs
            .into_iter()
            .map(|m| MacStatus {
                mac: format_mac(m.mac),
                fixed: m.fixed,
                port: m.port.unwrap_or_else(|| "uplink".into()),
                age_s: m.age_s,
            })
            .collect(),
    }
}

/// A port with its session and its counters.
pub fn port(port: &Port) -> PortStatus {
    let endpoint = port.config.endpoint();
    let live = port.live.as_ref().ok();
    let session = live.and_then(Live::status).unwrap_or_default();
    let reason = match (&port.live, &port.check) {
        (Err(why), Some(check)) => Some(format!("{why}: {} %", check.percent())),
        (Err(why), None) => Some(format!("not started: {why}")),
        (Ok(live), _) => session.broken.clone().or_else(|| storage_trouble(&live.engine)),
    };
    let sum = |get: fn(&base::counter::QueueStats) -> u64| -> u64 {
        live.map_or(0, |l| l.stats.iter().map(|s| get(s)).sum())
    };
    let (net, disk, vsock) = details(&port.config, live);
    PortStatus {
        vm: port.vm.clone(),
        port: port.config.name().to_owned(),
        kind: kind(&port.config),
        socket: endpoint.socket.clone(),
        mode: endpoint.mode,
        connected: session.connected,
        health: match (&reason, &port.check) {
            (None, _) => Health::Ok,
            (Some(_), None) => Health::Broken,
            (Some(_), Some(_)) => Health::Starting,
        },
        reason,
        last_error: session.last_error.clone(),
        held: session.held,
        features: format!("{:#x}", session.features.unwrap_or(0)),
        queues: live.map_or(0, |l| l.stats.len() as u16),
        queues_running: session.queues.iter().filter(|q| q.running).count() as u16,
        memory_regions: session.memory_regions.len(),
        sessions: session.sessions,
        resumed: session.resumed,
        requests: sum(|s| s.requests.get()),
        bytes: sum(|s| s.bytes.get()),
        drops: sum(|s| s.drops.iter().map(base::counter::Counter::get).sum()),
        net,
        disk,
        vsock,
    }
}

/// Adds the memory that the front ends of each VM share, and its limit.
pub fn memory_metrics(ports: &[Arc<Port>], all: &mut Metrics) {
    let mut shown = BTreeSet::new();
    for port in ports {
        let Ok(live) = &port.live else { continue };
        if !shown.insert(&port.vm) {
            continue;
        }
        let share = &live.share.memory;
        let values = [
            ("mapped_bytes", "Memory that its front ends share.", share.used_bytes()),
            ("mapped_limit_bytes", "Most of it.", share.limit_bytes()),
            ("mappings", "Parts of files that they are.", share.used_mappings()),
            ("huge_bytes", "Memory of those that is in huge pages.", share.huge_bytes()),
        ];
        for (name, help, value) in values {
            let labels = vec![("vm", port.vm.clone())];
            all.sample(&format!("millrace_vm_{name}"), help, labels, value);
        }
    }
}

/// Trouble of a disk with its storage, if there is any.
fn storage_trouble(engine: &Engine) -> Option<String> {
    let Engine::Disk(disk) = engine else { return None };
    if let Some(error) = disk.flush_failure() {
        return Some(format!(
            "a flush failed ({error}): what was written before may be lost, and flushes fail until the \
             port is detached and attached again"
        ));
    }
    if disk.image_state().is_some_and(|image| image.is_damaged) {
        return Some(
            "the tables of the image contradict each other: nothing is written to it any more; detach \
             the port, save what can be read, and see `qemu-img check`"
                .into(),
        );
    }
    let (requests, error) = disk.held()?;
    Some(format!(
        "the storage failed ({error}): {requests} requests wait, and go on when it takes them, or by \
         `millrace resume`"
    ))
}

fn io_status(disk: &block::BlockPort) -> (IoStatus, u64) {
    let (held, error) = disk.held().unzip();
    let is_full =
        |e: &std::io::Error| matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
    let status = match (disk.flush_failure(), error) {
        (None, None) => IoStatus::Ok,
        (None, Some(error)) if is_full(&error) => IoStatus::Nospace,
        _ => IoStatus::Failed,
    };
    (status, held.unwrap_or(0))
}

type Details = (Option<NetStatus>, Option<DiskStatus>, Option<VsockStatus>);

fn details(config: &PortConfig, live: Option<&Live>) -> Details {
    let engine = live.map(|l| &l.engine);
    match config {
        PortConfig::Net(net) => (Some(net_status(net, engine)), None, None),
        PortConfig::Disk(disk) => (None, Some(disk_status(disk, engine)), None),
        PortConfig::Vsock(vsock) => (None, None, Some(vsock_status(vsock, engine))),
    }
}

fn net_status(config: &NetConfig, engine: Option<&Engine>) -> NetStatus {
    let Some(Engine::Net(port, _)) = engine else {
        let mac = config.mac.map(format_mac);
        return NetStatus {
            switch: config.switch.clone(),
            mac,
            addresses: Vec::new(),
            link: false,
        };
    };
    let (mac, addresses) = port.addresses().unwrap_or_default();
    NetStatus {
        switch: config.switch.clone(),
        mac: mac.or(config.mac).map(format_mac),
        addresses,
        link: port.link_up(),
    }
}

fn disk_status(config: &DiskConfig, engine: Option<&Engine>) -> DiskStatus {
    let port = match engine {
        Some(Engine::Disk(port)) => Some(port),
        _ => None,
    };
    let (io_status, held_requests) = port.map_or((IoStatus::Ok, 0), |port| io_status(port));
    DiskStatus {
        format: config.format.name().into(),
        path: config.format.path().cloned(),
        len_bytes: port.map_or(0, |port| port.len_bytes()),
        block_size: port.map_or(0, |port| port.block_size()),
        read_only: config.read_only,
        io_status,
        held_requests,
        image: port.and_then(|port| port.image_state()).map(image_status),
        latency: port.map(|port| latency(port)),
    }
}

fn image_status(image: block::ImageState) -> ImageStatus {
    ImageStatus {
        was_checked: image.was_checked,
        mended_counts: image.mended_counts,
        freed_leaks: image.freed_leaks,
        is_damaged: image.is_damaged,
        map_len_bytes: image.map_len_bytes,
    }
}

/// The times of all queues of a disk.
fn latency(disk: &block::BlockPort) -> LatencyStatus {
    let mut times = Snapshot::default();
    disk.stats().iter().for_each(|queue| times.add(&queue.block.latency_ns.snapshot()));
    LatencyStatus::from(&times)
}

fn vsock_status(config: &VsockConfig, engine: Option<&Engine>) -> VsockStatus {
    let open_connections = match engine {
        Some(Engine::Vsock(port)) => port.stats().connections.get(),
        _ => 0,
    };
    VsockStatus { cid: config.cid, path: config.path.clone(), open_connections }
}

/// The counters of a disk's queues up to the last one that runs, or ran: disks offer more queues
/// than most VMMs set up.
fn shown_queues(all: &[Arc<QueueStats>], states: &[QueueStatus]) -> Vec<Arc<QueueStats>> {
    let is_used = |index: usize| {
        let stats = &all[index];
        states.get(index).is_some_and(|queue| queue.running)
            || stats.batches.get() + stats.kicks.get() > 0
    };
    let count = (0..all.len()).rfind(|&index| is_used(index)).map_or(1, |last| last + 1);
    all.iter().take(count).cloned().collect()
}

/// A port's counters, with those that only its engine has.
pub fn port_metrics(port: &Port, all: &mut Metrics) {
    let live = port.live.as_ref().ok();
    let session = live.and_then(Live::status).unwrap_or_default();
    all.ports.push(PortMetrics {
        vm: port.vm.clone(),
        port: port.config.name().to_owned(),
        kind: kind(&port.config),
        connected: session.connected,
        healthy: live
            .is_some_and(|l| session.broken.is_none() && storage_trouble(&l.engine).is_none()),
        connections: session.sessions,
        queues: live
            .map(|l| match l.engine {
                Engine::Disk(_) => shown_queues(&l.stats, &session.queues),
                _ => l.stats.clone(),
            })
            .unwrap_or_default(),
    });
    let labels = || vec![("vm", port.vm.clone()), ("port", port.config.name().to_owned())];
    let values = [
        ("session_panics_total", "Sessions that panicked, a fault of Millrace.", session.panics),
        (
            "log_lines_left_out_total",
            "Log lines that the front end caused and that were left out.",
            session.log_lines_left_out,
        ),
        ("refused_total", "Connections sent away because a front end was there.", session.refused),
        (
            "slowed_total",
            "Times that a front end was made to wait for having too much done.",
            session.slowed,
        ),
    ];
    for (name, help, value) in values {
        all.sample(&format!("millrace_port_{name}"), help, labels(), value);
    }
    match live.map(|l| &l.engine) {
        Some(Engine::Disk(disk)) => disk_metrics(disk, &labels, all),
        Some(Engine::Vsock(vsock)) => {
            for (name, value, help) in vsock.stats().values() {
                let gauge = matches!(name, "connections" | "half_open");
                let total = if gauge { "" } else { "_total" };
                let name = format!("millrace_vsock_{name}{total}");
                all.sample(&name, help, labels(), value);
            }
        }
        Some(Engine::Net(..)) | None => {}
    }
}

fn disk_metrics(
    disk: &block::BlockPort,
    labels: &dyn Fn() -> Vec<(&'static str, String)>,
    all: &mut Metrics,
) {
    let name = "millrace_disk_size_bytes";
    all.sample(name, "Size of the disk.", labels(), disk.len_bytes());
    let name = "millrace_disk_flush_failed";
    let help = "1 when a flush failed: what was written before may be lost, and flushes fail.";
    all.sample(name, help, labels(), disk.flush_failure().is_some().into());
    if let Some(image) = disk.image_state() {
        let values = [
            ("damaged", "1 when its tables contradict each other.", image.is_damaged.into()),
            ("checked", "1 when it was not closed before it was opened.", image.was_checked.into()),
            ("mended_counts", "Reference counts that were too low then.", image.mended_counts),
            ("freed_leaks", "Clusters freed then, or whose count was lowered.", image.freed_leaks),
            ("map_bytes", "Memory that its map takes.", image.map_len_bytes),
        ];
        for (name, help, value) in values {
            all.sample(&format!("millrace_disk_image_{name}"), help, labels(), value);
        }
    }
    for queue in disk.stats() {
        let b = &queue.block;
        let mut labels_of_queue = labels();
        labels_of_queue.push(("queue", queue.index.to_string()));
        let name = "millrace_disk_latency_nanoseconds";
        let help = "Time of requests, from the poll that took them to the poll after completion.";
        all.time(name, help, labels_of_queue.clone(), b.latency_ns.snapshot());
        let values = [
            ("reads_total", "Reads completed.", b.reads.get()),
            ("writes_total", "Writes completed.", b.writes.get()),
            ("placed_total", "Of both, in whose place a pipe read or wrote.", b.placeholders.get()),
            ("flushes_total", "Flushes completed.", b.flushes.get()),
            ("discards_total", "Discards completed.", b.discards.get()),
            ("write_zeroes_total", "Write-zeroes requests completed.", b.write_zeroes.get()),
            ("read_bytes_total", "Bytes read by the guest.", b.read_bytes.get()),
            ("written_bytes_total", "Bytes written by the guest.", b.written_bytes.get()),
            ("bounced_total", "Requests copied because of direct I/O.", b.bounced.get()),
            (
                "registered_total",
                "Operations on guest memory that is registered with the kernel.",
                b.registered.get(),
            ),
            ("io_errors_total", "Requests failed by the back end.", b.io_errors.get()),
            ("no_space_total", "Of those, for lack of space.", b.no_space.get()),
            ("held", "Requests that wait for the storage.", b.held.get()),
            ("held_total", "Times that a request had to wait so.", b.held_total.get()),
            ("in_flight", "Requests in flight.", b.in_flight.get()),
        ];
        for (name, help, value) in values {
            all.sample(&format!("millrace_disk_{name}"), help, labels_of_queue.clone(), value);
        }
    }
}

/// Adds the count of requests that detached disks have not answered.
pub fn left_in_disks(all: &mut Metrics) {
    let help = "Requests of detached disks that the storage has not answered.";
    all.sample("millrace_disk_left_in_disk", help, Vec::new(), block::orphaned_operations());
}

/// Adds the counters of the placer's decisions.
pub fn placer_metrics(placer: &Placer, all: &mut Metrics) {
    let stats = placer.stats();
    for reason in Reason::ALL {
        let labels = vec![("reason", reason.name().to_owned())];
        let help = "Workers moved to another sidecore, by reason.";
        let count = stats.moves[reason as usize].get();
        all.sample("millrace_sidecore_moves_total", help, labels, count);
    }
    let values = [
        ("failed_moves_total", "Moves that failed; the worker stayed.", &stats.failed_moves),
        ("activations_total", "Parked sidecores activated.", &stats.activations),
        ("parks_total", "Sidecores parked.", &stats.parks),
        ("active_count", "Active sidecores.", &stats.active),
    ];
    for (name, help, value) in values {
        all.sample(&format!("millrace_sidecore_{name}"), help, Vec::new(), value.get());
    }
}

/// A switch's counters.
pub fn switch_metrics(entry: &SwitchEntry, all: &mut Metrics) {
    let name = entry.switch.name().to_owned();
    if let Some((_, stats)) = &entry.uplink {
        all.uplinks.push((name.clone(), stats.clone()));
    }
    for (key, value, help) in entry.switch.stats().values() {
        let labels = vec![("switch", name.clone())];
        all.sample(&format!("millrace_switch_{key}_total"), help, labels, value);
    }
}

/// The VMs of the config with their ports.
pub fn vms(config: &Config, ports: Vec<PortStatus>) -> Vec<VmStatus> {
    let mut vms: Vec<VmStatus> = config
        .vms
        .iter()
        .map(|vm| VmStatus {
            name: vm.name.clone(),
            credit: Some(vm.credit),
            usage: None,
            trust_domain: vm.trust_domain.clone(),
            ports: Vec::new(),
            modules: Vec::new(),
        })
        .collect();
    sort_in(&mut vms, ports);
    vms
}

/// The VMs that have ports, without what only the config knows.
pub fn vms_by_name(ports: Vec<PortStatus>) -> Vec<VmStatus> {
    let mut vms = Vec::new();
    sort_in(&mut vms, ports);
    vms
}

/// Gives each VM its modules.
pub fn modules(vms: &mut Vec<VmStatus>, modules: Vec<ModuleStatus>) {
    for module in modules {
        named(vms, &module.vm).modules.push(module);
    }
}

/// The VM of this name, which is made when it is not there.
fn named<'a>(vms: &'a mut Vec<VmStatus>, name: &str) -> &'a mut VmStatus {
    let at = vms.iter().position(|vm| vm.name == name).unwrap_or_else(|| {
        vms.push(VmStatus {
            name: name.into(),
            credit: None,
            usage: None,
            trust_domain: None,
            ports: Vec::new(),
            modules: Vec::new(),
        });
        vms.len() - 1
    });
    &mut vms[at]
}

fn sort_in(vms: &mut Vec<VmStatus>, ports: Vec<PortStatus>) {
    for port in ports {
        named(vms, &port.vm).ports.push(port);
    }
}
