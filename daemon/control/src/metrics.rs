//! The Prometheus text format (version 0.0.4).

use std::fmt::{self, Write};

use base::counter::{DropReason, QueueStats};
use base::histogram::Snapshot;

use crate::plane::{SidecoreStatus, WorkerStatus};
use crate::sample::{Family, Metrics, PortMetrics};

/// The content type of [`render`]'s text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A queue's counter: its name, help text, and where it is read.
type QueueMetric = (&'static str, &'static str, fn(&QueueStats) -> u64);

/// A sidecore's value: name, type, help text, and where it is read.
type SidecoreMetric = (&'static str, &'static str, &'static str, fn(&SidecoreStatus) -> u64);

/// A port's value: name, type, help text, and where it is read.
type PortMetric = (&'static str, &'static str, &'static str, fn(&PortMetrics) -> u64);

const QUEUE_METRICS: [QueueMetric; 7] = [
    ("requests", "Descriptor chains completed: frames, packets or requests.", |q| q.requests.get()),
    ("bytes", "Payload bytes moved, device headers not counted.", |q| q.bytes.get()),
    ("batches", "Polls that found work; requests over batches is the mean batch.", |q| {
        q.batches.get()
    }),
    ("kicks", "Kicks received from the driver.", |q| q.kicks.get()),
    ("notifications_sent", "Interrupts sent to the driver.", |q| q.notifications_sent.get()),
    ("notifications_suppressed", "Interrupts the driver had asked to leave out.", |q| {
        q.notifications_suppressed.get()
    }),
    ("copied_bytes", "Payload bytes copied by the CPU; over bytes: copies per byte.", |q| {
        q.copied_bytes.get()
    }),
];

const SIDECORE_METRICS: [SidecoreMetric; 13] = [
    ("rounds_total", "counter", "Rounds over all workers.", |s| s.rounds),
    ("busy_rounds_total", "counter", "Rounds in which something was done.", |s| s.busy_rounds),
    ("sleeps_total", "counter", "Times the thread went to sleep.", |s| s.sleeps),
    ("wakeups_total", "counter", "Times that a kick or a call woke it.", |s| s.wakeups),
    ("spin_hits_total", "counter", "Times that polling on found work.", |s| s.spin_hits),
    ("busy_nanoseconds_total", "counter", "Time spent in busy rounds.", |s| s.busy_ns),
    ("spin_nanoseconds_total", "counter", "Time spent in rounds without work.", |s| s.spin_ns),
    ("asleep_nanoseconds_total", "counter", "Time spent asleep.", |s| s.asleep_ns),
    ("spin_limit_nanoseconds", "gauge", "How long it polls before a sleep.", |s| s.spin_limit_ns),
    ("active", "gauge", "1 while it takes workers, 0 while parked.", |s| u64::from(s.active)),
    ("panics_total", "counter", "Workers lost to a panic.", |s| s.panics),
    ("stalls_total", "counter", "Times it neither slept nor finished a round for a second.", |s| {
        s.stalls
    }),
    ("workers", "gauge", "Workers on the sidecore.", |s| s.workers),
];

/// A worker's counter: name, help text, and where it is read.
type WorkerMetric = (&'static str, &'static str, fn(&WorkerStatus) -> u64);

const WORKER_METRICS: [WorkerMetric; 2] = [
    ("busy_nanoseconds_total", "Time spent in polls that did something, sampled.", |w| w.busy_ns),
    ("moves_total", "Times it was moved to another sidecore.", |w| w.moves),
];

/// Upper bounds of the buckets of histograms, in nanoseconds: from the time of a disk in memory to
/// the time after which guests reset theirs.
const TIME_BOUNDS_NS: [u64; 22] = {
    let mut bounds = [0; 22];
    let (mut i, mut decade) = (0, 1000);
    while i < bounds.len() {
        bounds[i] = decade * [1, 2, 5][i % 3];
        decade *= if i % 3 == 2 { 10 } else { 1 };
        i += 1;
    }
    bounds
};

/// A label value with `\`, `"` and line feeds escaped.
struct Label<'a>(&'a str);

impl fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// The whole text.
pub fn render(metrics: &Metrics) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = write_all(&mut text, metrics);
    text
}

fn write_all(out: &mut String, m: &Metrics) -> fmt::Result {
    head(out, "millrace_build_info", "gauge", "Always 1; the version is a label.")?;
    writeln!(out, "millrace_build_info{{version=\"{}\"}} 1", Label(&m.version))?;
    head(out, "millrace_uptime_seconds", "gauge", "Seconds since the daemon started.")?;
    writeln!(out, "millrace_uptime_seconds {}", m.uptime_s)?;
    for (name, kind, help, get) in SIDECORE_METRICS {
        head(out, &format!("millrace_sidecore_{name}"), kind, help)?;
        for s in &m.sidecores {
            writeln!(out, "millrace_sidecore_{name}{{sidecore=\"{}\"}} {}", s.index, get(s))?;
        }
    }
    write_nodes(out, m)?;
    for (name, help, get) in WORKER_METRICS {
        let name = format!("millrace_worker_{name}");
        head(out, &name, "counter", help)?;
        for w in &m.workers {
            let (worker, sidecore) = (Label(&w.name), w.sidecore);
            let value = get(w);
            writeln!(out, "{name}{{worker=\"{worker}\",sidecore=\"{sidecore}\"}} {value}")?;
        }
    }
    write_ports(out, m)?;
    write_queues(out, m)?;
    write_uplinks(out, m)?;
    m.families.iter().try_for_each(|family| write_family(out, family))?;
    m.times.iter().try_for_each(|family| write_times(out, family))
}

/// No line for a sidecore whose node is unknown: there is no number for it.
fn write_nodes(out: &mut String, m: &Metrics) -> fmt::Result {
    let name = "millrace_sidecore_node";
    head(out, name, "gauge", "NUMA node of the CPUs that it may run on, where that is one.")?;
    let known = m.sidecores.iter().filter_map(|s| Some((s.index, s.node?)));
    known
        .into_iter()
        .try_for_each(|(sidecore, node)| writeln!(out, "{name}{{sidecore=\"{sidecore}\"}} {node}"))
}

fn write_times(out: &mut String, family: &Family<Snapshot>) -> fmt::Result {
    let (name, help) = (&family.name, family.help);
    head(out, name, "histogram", help)?;
    for (labels, times) in &family.samples {
        let text: Vec<String> =
            labels.iter().map(|(key, text)| format!("{key}=\"{}\"", Label(text))).collect();
        let labels = text.join(",");
        for bound_ns in TIME_BOUNDS_NS {
            let count = times.count_up_to(bound_ns);
            writeln!(out, "{name}_bucket{{{labels},le=\"{bound_ns}\"}} {count}")?;
        }
        let count = times.count();
        writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}")?;
        writeln!(out, "{name}_sum{{{labels}}} {}", times.sum())?;
        writeln!(out, "{name}_count{{{labels}}} {count}")?;
    }
    Ok(())
}

fn write_family(out: &mut String, family: &Family) -> fmt::Result {
    let name = &family.name;
    head(out, name, if name.ends_with("_total") { "counter" } else { "gauge" }, family.help)?;
    for (labels, value) in &family.samples {
        out.push_str(name);
        for (i, (key, text)) in labels.iter().enumerate() {
            let open = if i == 0 { '{' } else { ',' };
            write!(out, "{open}{key}=\"{}\"", Label(text))?;
        }
        let close = if labels.is_empty() { "" } else { "}" };
        writeln!(out, "{close} {value}")?;
    }
    Ok(())
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {help}")?;
    writeln!(out, "# TYPE {name} {kind}")
}

fn write_ports(out: &mut String, m: &Metrics) -> fmt::Result {
    let gauges: [PortMetric; 3] = [
        ("connected", "gauge", "1 while a VMM is connected.", |p| u64::from(p.connected)),
        ("healthy", "gauge", "0 when the guest or VMM broke a rule.", |p| u64::from(p.healthy)),
        ("connections_total", "counter", "Connections of VMMs.", |p| p.connections),
    ];
    for (name, kind, help, get) in gauges {
        head(out, &format!("millrace_port_{name}"), kind, help)?;
        for p in &m.ports {
            let (vm, port, kind) = (Label(&p.vm), Label(&p.port), p.kind.name());
            let value = get(p);
            writeln!(
                out,
                "millrace_port_{name}{{vm=\"{vm}\",port=\"{port}\",kind=\"{kind}\"}} {value}"
            )?;
        }
    }
    Ok(())
}

/// The labels and counters of every queue.
fn queues(m: &Metrics) -> impl Iterator<Item = (String, &QueueStats)> {
    m.ports.iter().flat_map(|p| {
        let (vm, port, kind) = (Label(&p.vm), Label(&p.port), p.kind.name());
        let labels = format!("vm=\"{vm}\",port=\"{port}\",kind=\"{kind}\"");
        p.queues
            .iter()
            .enumerate()
            .map(move |(i, stats)| (format!("{labels},queue=\"{i}\""), &**stats))
    })
}

fn write_queues(out: &mut String, m: &Metrics) -> fmt::Result {
    for (name, help, get) in QUEUE_METRICS {
        let name = format!("millrace_queue_{name}_total");
        head(out, &name, "counter", help)?;
        for (labels, stats) in queues(m) {
            writeln!(out, "{name}{{{labels}}} {}", get(stats))?;
        }
    }
    let name = "millrace_queue_drops_total";
    head(out, name, "counter", "Frames, packets or requests dropped or refused, by reason.")?;
    for (labels, stats) in queues(m) {
        write_drops(out, name, &labels, stats)?;
    }
    Ok(())
}

fn write_drops(out: &mut String, name: &str, labels: &str, stats: &QueueStats) -> fmt::Result {
    for reason in DropReason::ALL {
        let count = stats.drops[reason as usize].get();
        writeln!(out, "{name}{{{labels},reason=\"{}\"}} {count}", reason.name())?;
    }
    Ok(())
}

fn write_uplinks(out: &mut String, m: &Metrics) -> fmt::Result {
    let shown = QUEUE_METRICS.iter().filter(|(name, ..)| matches!(*name, "requests" | "bytes"));
    for (name, help, get) in shown {
        let name = format!("millrace_uplink_{name}_total");
        head(out, &name, "counter", help)?;
        for (switch, stats) in &m.uplinks {
            writeln!(out, "{name}{{switch=\"{}\"}} {}", Label(switch), get(stats))?;
        }
    }
    let name = "millrace_uplink_drops_total";
    head(out, name, "counter", "Frames of the uplink that were dropped, by reason.")?;
    for (switch, stats) in &m.uplinks {
        write_drops(out, name, &format!("switch=\"{}\"", Label(switch)), stats)?;
    }
    Ok(())
}
