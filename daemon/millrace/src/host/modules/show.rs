//! State of modules, and their counters.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use base::histogram::Snapshot;
use control::plane::{LatencyStatus, ModuleCounts, ModuleState, ModuleStatus};
use control::sample::Metrics;
use modules::{ModuleStats, VmModules};

/// How long counters are waited for, of all VMs together: a process tells those of its modules
/// within half a second, and leaves out who is busy.
pub const STATS_TIMEOUT: Duration = Duration::from_millis(700);

/// Receiver of counters that were asked for.
pub type Answer = Receiver<Vec<ModuleStats>>;

/// State of a VM's modules.
#[derive(Default)]
pub struct ModulesState {
    /// Names, in the order of the config.
    pub names: Vec<String>,
    /// Modules of these names, as they are run.
    pub list: Vec<modules::ModuleConfig>,
    /// True while they are ended until they are resumed.
    pub drained: bool,
    /// Running modules; none when they have not begun, or could not.
    pub modules: Option<Arc<VmModules>>,
    /// Why they could not begin.
    pub failed: Option<String>,
    /// Why programs of the host do not reach them.
    pub no_socket: Option<String>,
    /// Why there is no memory for rings.
    pub no_ring: Option<String>,
    /// Counters of the last answer.
    pub last: Vec<ModuleStats>,
}

/// Waits for counters.
pub fn wait(answer: &Answer, until: Instant) -> Result<Vec<ModuleStats>, RecvTimeoutError> {
    answer.recv_timeout(until.saturating_duration_since(Instant::now()))
}

impl ModulesState {
    /// Asks for counters; none when no modules run.
    pub fn ask(&self) -> Option<Answer> {
        self.modules.as_ref().map(|modules| modules.ask_stats())
    }

    /// State of each module; `answer`: the answer when they were asked for counters.
    pub fn show(
        &mut self,
        vm: &str,
        answer: Option<Result<Vec<ModuleStats>, RecvTimeoutError>>,
    ) -> Vec<ModuleStatus> {
        let trouble = self.modules.as_ref().and_then(|modules| modules.trouble());
        let failed = self.failed.clone().or(trouble);
        let missing = match (&answer, &failed) {
            _ if self.drained => ModuleState::Drained,
            (Some(Ok(_)), _) => ModuleState::Busy,
            (Some(Err(RecvTimeoutError::Timeout)), _) => ModuleState::Silent,
            (Some(Err(RecvTimeoutError::Disconnected)) | None, Some(_)) => ModuleState::Failed,
            (Some(Err(RecvTimeoutError::Disconnected)) | None, None) => ModuleState::Starting,
        };
        let now = match answer {
            Some(Ok(now)) => now,
            _ => Vec::new(),
        };
        let of = |all: &[ModuleStats], name: &str| all.iter().find(|s| s.name == name).cloned();
        let mut last = Vec::new();
        let show = |name: &String| {
            let here = of(&now, name);
            let (state, broken) = here.as_ref().map_or((missing, None), state);
            let stats = here.or_else(|| of(&self.last, name));
            let counts = stats.as_ref().map(counts).unwrap_or_default();
            let latency = stats.as_ref().map(latency);
            last.extend(stats);
            let partly = || self.no_socket.clone().or_else(|| self.no_ring.clone());
            let reason = broken.or_else(|| failed.clone()).or_else(partly);
            ModuleStatus { vm: vm.into(), module: name.clone(), state, reason, counts, latency }
        };
        let shown = self.names.iter().map(show).collect();
        self.last = last;
        shown
    }
}

/// A module's state, and why when it cannot serve.
fn state(stats: &ModuleStats) -> (ModuleState, Option<String>) {
    match stats.state.as_str() {
        "running" => (ModuleState::Running, None),
        "starting" => (ModuleState::Starting, None),
        why => (ModuleState::Failed, Some(why.into())),
    }
}

fn times(stats: &ModuleStats) -> Snapshot {
    Snapshot::from_coarse(&stats.latency, stats.latency_sum_ns)
}

/// Latency of a module. Its buckets are coarse; the percentiles are those that the process computed
/// from fine ones.
fn latency(stats: &ModuleStats) -> LatencyStatus {
    LatencyStatus {
        p50_ns: stats.latency_p50_ns,
        p99_ns: stats.latency_p99_ns,
        ..(&times(stats)).into()
    }
}

fn counts(stats: &ModuleStats) -> ModuleCounts {
    ModuleCounts {
        clients: stats.clients,
        rings: stats.rings,
        bells: stats.bells,
        requests: stats.requests,
        again: stats.again,
        failed: stats.failed,
        calls: stats.calls,
        rested_ns: stats.rested_ns,
        stopped: stats.stopped,
        bad: stats.bad,
        crowded: stats.crowded,
        failed_starts: stats.failed_starts,
        received_bytes: stats.received_bytes,
        sent_bytes: stats.sent_bytes,
        memory_bytes: stats.memory_bytes,
        stored_bytes: stats.stored_bytes,
        written_bytes: stats.files.written_bytes,
        read_bytes: stats.files.read_bytes,
        syncs: stats.files.syncs,
        latency_p50_ns: stats.latency_p50_ns,
        latency_p99_ns: stats.latency_p99_ns,
    }
}

/// A module's metrics.
pub fn metrics(module: &ModuleStatus, all: &mut Metrics) {
    let labels = || vec![("vm", module.vm.clone()), ("module", module.module.clone())];
    let c = &module.counts;
    let running = u64::from(matches!(module.state, ModuleState::Running | ModuleState::Busy));
    let values = [
        ("running", running, "1 while it serves."),
        ("clients", c.clients, "Clients, connected or not."),
        ("rings", c.rings, "Of their connections, those that go by a ring."),
        ("bells_total", c.bells, "Bells for clients that slept."),
        ("requests_total", c.requests, "Requests that it got."),
        ("again_total", c.again, "Requests sent again, and answered without it."),
        ("failed_total", c.failed, "Replies that failed in the host."),
        ("calls_total", c.calls, "Calls; requests over calls is the mean batch."),
        ("rested_nanoseconds_total", c.rested_ns, "Time that it had to rest: cpu_percent."),
        ("stopped_total", c.stopped, "Instances that were stopped: deadline, trap, memory."),
        ("bad_connections_total", c.bad, "Connections ended for what they sent."),
        ("crowded_total", c.crowded, "Connections ended, and replies refused, for want of room."),
        ("failed_starts", c.failed_starts, "Starts that failed since one succeeded."),
        ("received_bytes_total", c.received_bytes, "Bytes of requests, with their headers."),
        ("sent_bytes_total", c.sent_bytes, "Bytes of replies."),
        ("memory_bytes", c.memory_bytes, "Its memory."),
        ("stored_bytes", c.stored_bytes, "Its files."),
        ("written_bytes_total", c.written_bytes, "Bytes written to its files."),
        ("read_bytes_total", c.read_bytes, "Bytes read of its files."),
        ("syncs_total", c.syncs, "Times that its files were made durable."),
    ];
    for (name, value, help) in values {
        all.sample(&format!("millrace_module_{name}"), help, labels(), value);
    }
    if let Some(latency) = &module.latency {
        let buckets: Vec<(u64, u64)> = latency.buckets.iter().map(|(low, n)| (*low, *n)).collect();
        let times = Snapshot::from_coarse(&buckets, latency.sum_ns);
        let help = "From a request's being read to its reply, since the process began.";
        all.time("millrace_module_latency_nanoseconds", help, labels(), times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(name: &str, state: &str, requests: u64) -> ModuleStats {
        ModuleStats { name: name.into(), state: state.into(), requests, ..Default::default() }
    }

    #[test]
    fn who_does_not_answer_is_shown_with_what_it_said_last() {
        let mut state =
            ModulesState { names: vec!["a".into(), "b".into()], ..ModulesState::default() };
        let mut shown = |answer| {
            let shown = state.show("v", answer);
            shown.iter().map(|m| (m.state.name(), m.counts.requests)).collect::<Vec<_>>()
        };
        assert_eq!(shown(None), [("starting", 0), ("starting", 0)]);
        let both = vec![stats("b", "running", 7), stats("a", "starting", 2), stats("x", "?", 1)];
        assert_eq!(shown(Some(Ok(both))), [("starting", 2), ("running", 7)]);
        let one = vec![stats("a", "running", 3)];
        assert_eq!(shown(Some(Ok(one))), [("running", 3), ("busy", 7)]);
        let silent = Some(Err(RecvTimeoutError::Timeout));
        assert_eq!(shown(silent), [("silent", 3), ("silent", 7)]);
        let gone = Some(Err(RecvTimeoutError::Disconnected));
        assert_eq!(shown(gone), [("starting", 3), ("starting", 7)]);
    }

    #[test]
    fn what_failed_says_why() {
        let mut state = ModulesState { names: vec!["a".into()], ..ModulesState::default() };
        state.failed = Some("no such file".into());
        let shown = &state.show("v", None)[0];
        assert_eq!(
            (shown.state, shown.reason.as_deref()),
            (ModuleState::Failed, Some("no such file"))
        );
        let answer = Some(Ok(vec![stats("a", "it returned -5", 0)]));
        let shown = &state.show("v", answer)[0];
        assert_eq!(shown.reason.as_deref(), Some("it returned -5"));
    }
}
