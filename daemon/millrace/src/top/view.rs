//! View: the rates and shares between two samples. `--json` prints it; its shape is published in
//! `schema/top.json`.

use serde::Serialize;

use super::sample::{Port, Sample, Sidecore, Status, Times, Vm, Worker};

/// Content of one screen.
#[derive(Debug, Clone, Default, Serialize)]
pub struct View {
    /// Version of the daemon.
    pub version: String,
    /// Process of the daemon.
    pub pid: u32,
    /// Seconds since its start.
    pub uptime_s: u64,
    /// Time between the samples.
    pub interval_ms: u64,
    /// Rounds of all sidecores per second.
    pub rounds_per_s: f64,
    /// Times per second that a sidecore was woken.
    pub wakeups_per_s: f64,
    /// Workers moved since the daemon's start.
    pub moves: u64,
    /// Workers moved in this interval.
    pub new_moves: u64,
    /// Times per second that a frame had to wait for its receiver.
    pub holds_per_s: f64,
    /// Seconds per second that senders' queues waited for a receiver.
    pub held_share: f64,
    /// Polling threads.
    pub sidecores: Vec<SidecoreView>,
    /// VMs.
    pub vms: Vec<VmView>,
    /// Ports of all VMs.
    pub ports: Vec<PortView>,
    /// Workers of all sidecores.
    pub workers: Vec<WorkerView>,
}

/// A polling thread. Shares are of the interval, 0 to 1.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SidecoreView {
    /// Number.
    pub index: usize,
    /// CPU it is pinned to.
    pub cpu: Option<usize>,
    /// NUMA node of the CPUs that it may run on.
    pub node: Option<u32>,
    /// False while it is parked.
    pub active: bool,
    /// Time in rounds that did something.
    pub busy_share: f64,
    /// Time in rounds that found nothing.
    pub spin_share: f64,
    /// Time asleep.
    pub asleep_share: f64,
    /// Rounds per second.
    pub rounds_per_s: f64,
    /// Times per second that it was woken.
    pub wakeups_per_s: f64,
    /// Workers on it.
    pub workers: u64,
}

/// A VM.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VmView {
    /// Name.
    pub name: String,
    /// Share under contention.
    pub weight: Option<u64>,
    /// Part of all bytes charged in the interval, 0 to 1.
    pub share: f64,
    /// Bytes charged per second: each request counts with its minimum.
    pub charged_bytes_per_s: f64,
    /// Frames per second of its network ports, both directions.
    pub frames_per_s: f64,
    /// Payload bytes per second of all its ports.
    pub bytes_per_s: f64,
    /// Requests per second of its disks.
    pub requests_per_s: f64,
    /// Time it was held back by its weight, as a part of the interval; of several sidecores
    /// together it can be more than 1.
    pub held_by_weight_share: f64,
    /// Time it was held back at its ceiling, as a part of the interval.
    pub held_by_ceiling_share: f64,
    /// CPU time of its pipes' threads, as a part of the interval; of several threads together it
    /// can be more than 1.
    pub pipe_cpu_share: f64,
    /// Drops and refusals per second.
    pub drops_per_s: f64,
    /// Median latency of its disks' requests; none without requests.
    pub disk_p50_ns: Option<u64>,
    /// 99th percentile of that latency.
    pub disk_p99_ns: Option<u64>,
}

/// A port.
#[derive(Debug, Clone, Default, Serialize)]
pub struct PortView {
    /// VM.
    pub vm: String,
    /// Name.
    pub port: String,
    /// `net`, `disk` or `vsock`.
    pub kind: String,
    /// `up`, `down` (no VMM is connected) or `broken`.
    pub state: &'static str,
    /// Frames, packets or requests per second.
    pub requests_per_s: f64,
    /// Payload bytes per second.
    pub bytes_per_s: f64,
    /// Drops and refusals per second.
    pub drops_per_s: f64,
    /// Median latency of a disk's requests; none for other ports.
    pub disk_p50_ns: Option<u64>,
    /// 99th percentile of that latency.
    pub disk_p99_ns: Option<u64>,
}

/// A switch, a disk queue, a vsock domain.
#[derive(Debug, Clone, Default, Serialize)]
pub struct WorkerView {
    /// Name.
    pub name: String,
    /// Sidecore it is on.
    pub sidecore: usize,
    /// Part of that sidecore's time, 0 to 1; from samples.
    pub busy_share: f64,
    /// Times it was moved since it began.
    pub moves: u64,
    /// Whether it stays where it is.
    pub pinned: bool,
}

/// Interval between two samples; makes rates of differences.
#[derive(Clone, Copy)]
struct Interval {
    s: f64,
}

impl Interval {
    /// Rate per second; a counter that went back began anew.
    fn rate(self, earlier: u64, later: u64) -> f64 {
        later.saturating_sub(earlier) as f64 / self.s
    }

    /// Nanoseconds as a part of the interval.
    fn share(self, earlier_ns: u64, later_ns: u64) -> f64 {
        self.rate(earlier_ns, later_ns) / 1e9
    }
}

impl View {
    /// Makes the view from `earlier` to `later`; all rates are 0 when another daemon answered.
    pub fn between(earlier: &Sample, later: &Sample) -> Self {
        let elapsed = later.at.saturating_duration_since(earlier.at);
        // Two samples of one moment differ in nothing; only the division must not fail.
        let over = Interval { s: elapsed.as_secs_f64().max(1e-6) };
        let same_daemon = earlier.status.pid == later.status.pid;
        let new = &later.status;
        let old = if same_daemon { &earlier.status } else { new };
        let sum = |of: &Status, get: fn(&Sidecore) -> u64| of.sidecores.iter().map(get).sum();
        let held = |of: &Status| -> (u64, u64) {
            let each = of.switches.iter().map(|s| (s.holds, s.held_ns));
            each.fold((0, 0), |(holds, ns), one| (holds + one.0, ns + one.1))
        };
        let ((old_holds, old_held_ns), (holds, held_ns)) = (held(old), held(new));
        let mut view = Self {
            version: new.version.clone(),
            pid: new.pid,
            uptime_s: new.uptime_s,
            interval_ms: elapsed.as_millis() as u64,
            rounds_per_s: over.rate(sum(old, |s| s.rounds), sum(new, |s| s.rounds)),
            wakeups_per_s: over.rate(sum(old, |s| s.wakeups), sum(new, |s| s.wakeups)),
            moves: new.placement.moves,
            new_moves: new.placement.moves.saturating_sub(old.placement.moves),
            holds_per_s: over.rate(old_holds, holds),
            held_share: over.share(old_held_ns, held_ns),
            sidecores: new.sidecores.iter().map(|s| sidecore(old, s, over)).collect(),
            vms: Vec::with_capacity(new.vms.len()),
            ports: Vec::new(),
            workers: new.workers.iter().map(|w| worker(old, w, over)).collect(),
        };
        let nothing = Vm::default();
        for vm in &new.vms {
            let before = old.vms.iter().find(|v| v.name == vm.name).unwrap_or(&nothing);
            view.add_vm(before, vm, over);
        }
        let total: f64 = view.vms.iter().map(|vm| vm.charged_bytes_per_s).sum();
        for vm in view.vms.iter_mut().filter(|_| total > 0.0) {
            vm.share = vm.charged_bytes_per_s / total;
        }
        view
    }

    /// Sidecores that take workers.
    pub fn active(&self) -> usize {
        self.sidecores.iter().filter(|s| s.active).count()
    }

    fn add_vm(&mut self, old: &Vm, new: &Vm, over: Interval) {
        let (was, is) = (&old.usage, &new.usage);
        let mut vm = VmView {
            name: new.name.clone(),
            weight: new.weight,
            charged_bytes_per_s: over.rate(was.charged_bytes, is.charged_bytes),
            held_by_weight_share: over.share(was.held_by_weight_ns, is.held_by_weight_ns),
            held_by_ceiling_share: over.share(was.held_by_ceiling_ns, is.held_by_ceiling_ns),
            pipe_cpu_share: over.share(was.thread_ns, is.thread_ns),
            ..VmView::default()
        };
        let mut all = Times::default();
        let nothing = Port::default();
        for port in &new.ports {
            let before = old.ports.iter().find(|p| p.port == port.port).unwrap_or(&nothing);
            let shown = self::port(&new.name, before, port, over, &mut all);
            match shown.kind.as_str() {
                "net" => vm.frames_per_s += shown.requests_per_s,
                "disk" => vm.requests_per_s += shown.requests_per_s,
                _ => {}
            }
            vm.bytes_per_s += shown.bytes_per_s;
            vm.drops_per_s += shown.drops_per_s;
            self.ports.push(shown);
        }
        vm.disk_p50_ns = all.quantile_ns(0.5);
        vm.disk_p99_ns = all.quantile_ns(0.99);
        self.vms.push(vm);
    }
}

fn sidecore(old: &Status, new: &Sidecore, over: Interval) -> SidecoreView {
    let nothing = Sidecore::default();
    let was = old.sidecores.iter().find(|s| s.index == new.index).unwrap_or(&nothing);
    // The counters are read one after the other while the thread goes on.
    let share = |was_ns, is_ns| over.share(was_ns, is_ns).min(1.0);
    SidecoreView {
        index: new.index,
        cpu: new.cpu,
        node: new.node,
        active: new.active,
        busy_share: share(was.busy_ns, new.busy_ns),
        spin_share: share(was.spin_ns, new.spin_ns),
        // A sleep is counted when it ends: what nothing else has was slept.
        asleep_share: 1.0 - share(was.busy_ns + was.spin_ns, new.busy_ns + new.spin_ns),
        rounds_per_s: over.rate(was.rounds, new.rounds),
        wakeups_per_s: over.rate(was.wakeups, new.wakeups),
        workers: new.workers,
    }
}

fn worker(old: &Status, new: &Worker, over: Interval) -> WorkerView {
    let was = old.workers.iter().find(|w| w.name == new.name).map_or(0, |w| w.busy_ns);
    WorkerView {
        name: new.name.clone(),
        sidecore: new.sidecore,
        busy_share: over.share(was, new.busy_ns).min(1.0),
        moves: new.moves,
        pinned: new.pinned,
    }
}

/// A port's rates; its requests' times are added to `all`.
fn port(vm: &str, old: &Port, new: &Port, over: Interval, all: &mut Times) -> PortView {
    let latency = |port: &Port| port.disk.as_ref().and_then(|d| d.latency.clone());
    let mut times = Times::default();
    if let Some(now) = latency(new) {
        let before = latency(old);
        times.add(before.as_ref(), &now);
        all.add(before.as_ref(), &now);
    }
    let state = match (new.health.as_str(), new.connected) {
        ("broken", _) => "broken",
        (_, true) => "up",
        (_, false) => "down",
    };
    PortView {
        vm: vm.into(),
        port: new.port.clone(),
        kind: new.kind.clone(),
        state,
        requests_per_s: over.rate(old.requests, new.requests),
        bytes_per_s: over.rate(old.bytes, new.bytes),
        drops_per_s: over.rate(old.drops, new.drops),
        disk_p50_ns: times.quantile_ns(0.5),
        disk_p99_ns: times.quantile_ns(0.99),
    }
}
