//! The tables: columns, order and texts, for the screen and for plain text alike.

use super::view::{PortView, View, VmView, WorkerView};

/// Tables of the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Page {
    /// VMs.
    #[default]
    Vms,
    /// Ports.
    Ports,
    /// Workers: what sidecores poll.
    Workers,
}

/// Order of a table: numbers from the largest down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sort {
    /// Order in which the daemon lists them.
    #[default]
    Config,
    /// By name.
    Name,
    /// Share of what was charged; of workers: busy share.
    Share,
    /// Bytes per second.
    Bytes,
    /// Frames per second; of ports: of whatever they have.
    Frames,
    /// Requests per second.
    Requests,
    /// Time held back at its own ceiling.
    Capped,
    /// Time held back by its weight, while others had their turn.
    Yielded,
    /// Drops per second.
    Drops,
    /// Latency: the 99th percentile.
    Latency,
    /// Times moved.
    Moves,
}

/// A table's text.
#[derive(Debug, PartialEq, Eq)]
pub struct Table {
    /// Columns.
    pub head: &'static [&'static str],
    /// How many of them, from the left, are text: aligned to the left.
    pub texts: usize,
    /// Lines.
    pub rows: Vec<Vec<String>>,
}

const VM_HEAD: [&str; 12] = [
    "VM", "WEIGHT", "SHARE", "FRAMES/S", "BYTES/S", "REQ/S", "CAPPED", "YIELDED", "DROPS/S", "P50",
    "P99", "PIPES",
];
const PORT_HEAD: [&str; 9] =
    ["VM", "PORT", "KIND", "STATE", "REQ/S", "BYTES/S", "DROPS/S", "P50", "P99"];
const WORKER_HEAD: [&str; 5] = ["WORKER", "SIDECORE", "BUSY", "MOVES", "PINNED"];

impl Page {
    /// The table of this page.
    pub fn table(self, view: &View, sort: Sort) -> Table {
        match self {
            Self::Vms => {
                let rows = ordered(&view.vms, sort, vm_key, |vm| vm.name.clone());
                Table { head: &VM_HEAD, texts: 1, rows: rows.into_iter().map(vm_row).collect() }
            }
            Self::Ports => {
                let name = |port: &PortView| format!("{}/{}", port.vm, port.port);
                let rows = ordered(&view.ports, sort, port_key, name);
                Table { head: &PORT_HEAD, texts: 4, rows: rows.into_iter().map(port_row).collect() }
            }
            Self::Workers => {
                let rows = ordered(&view.workers, sort, worker_key, |w| w.name.clone());
                let rows = rows.into_iter().map(worker_row).collect();
                Table { head: &WORKER_HEAD, texts: 1, rows }
            }
        }
    }
}

/// The rows in the wanted order; equal ones stay as the daemon lists them, so that they do not
/// jump.
fn ordered<T>(
    rows: &[T],
    sort: Sort,
    key: impl Fn(&T, Sort) -> f64,
    name: impl Fn(&T) -> String,
) -> Vec<&T> {
    let mut rows: Vec<&T> = rows.iter().collect();
    match sort {
        Sort::Config => {}
        Sort::Name => rows.sort_by_key(|row| name(row)),
        _ => rows.sort_by(|a, b| key(b, sort).total_cmp(&key(a, sort))),
    }
    rows
}

fn vm_key(vm: &VmView, sort: Sort) -> f64 {
    match sort {
        Sort::Share => vm.share,
        Sort::Bytes => vm.bytes_per_s,
        Sort::Frames => vm.frames_per_s,
        Sort::Requests => vm.requests_per_s,
        Sort::Capped => vm.held_by_ceiling_share,
        Sort::Yielded => vm.held_by_weight_share,
        Sort::Drops => vm.drops_per_s,
        Sort::Latency => vm.disk_p99_ns.unwrap_or(0) as f64,
        Sort::Config | Sort::Name | Sort::Moves => 0.0,
    }
}

fn port_key(port: &PortView, sort: Sort) -> f64 {
    match sort {
        Sort::Bytes | Sort::Share => port.bytes_per_s,
        Sort::Frames | Sort::Requests => port.requests_per_s,
        Sort::Drops => port.drops_per_s,
        Sort::Latency => port.disk_p99_ns.unwrap_or(0) as f64,
        Sort::Config | Sort::Name | Sort::Capped | Sort::Yielded | Sort::Moves => 0.0,
    }
}

fn worker_key(worker: &WorkerView, sort: Sort) -> f64 {
    match sort {
        Sort::Share => worker.busy_share,
        Sort::Moves => worker.moves as f64,
        _ => 0.0,
    }
}

fn vm_row(vm: &VmView) -> Vec<String> {
    vec![
        vm.name.clone(),
        vm.weight.map_or("-".into(), |weight| weight.to_string()),
        percent(vm.share),
        count(vm.frames_per_s),
        bytes(vm.bytes_per_s),
        count(vm.requests_per_s),
        percent(vm.held_by_ceiling_share),
        percent(vm.held_by_weight_share),
        count(vm.drops_per_s),
        time(vm.disk_p50_ns),
        time(vm.disk_p99_ns),
        percent(vm.pipe_cpu_share),
    ]
}

fn port_row(port: &PortView) -> Vec<String> {
    vec![
        port.vm.clone(),
        port.port.clone(),
        port.kind.clone(),
        port.state.into(),
        count(port.requests_per_s),
        bytes(port.bytes_per_s),
        count(port.drops_per_s),
        time(port.disk_p50_ns),
        time(port.disk_p99_ns),
    ]
}

fn worker_row(worker: &WorkerView) -> Vec<String> {
    vec![
        worker.name.clone(),
        worker.sidecore.to_string(),
        percent(worker.busy_share),
        worker.moves.to_string(),
        if worker.pinned { "yes" } else { "-" }.into(),
    ]
}

/// `12.5%`.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// Three digits or so with a unit of 1000s; whole numbers below.
pub fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T"])
}

/// Formats bytes as [`count`] does, by 1024s.
pub fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &["", "Ki", "Mi", "Gi", "Ti"])
}

/// A time with the unit that fits; a dash for none.
pub fn time(ns: Option<u64>) -> String {
    match ns {
        None => "-".into(),
        Some(ns) if ns < 1000 => format!("{ns}ns"),
        Some(ns) => scaled(ns as f64 / 1000.0, 1000.0, &["us", "ms", "s"]),
    }
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // What would be shown as the whole step belongs to the next unit.
    while value >= step - 0.5 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let whole = unit == 0 && units[0].is_empty() || value >= 99.95;
    if whole { format!("{value:.0}{}", units[unit]) } else { format!("{value:.1}{}", units[unit]) }
}

/// `3d 4h`, `4h 12m`, `12m 7s`, `7s`.
pub fn uptime(s: u64) -> String {
    match (s / 86_400, s / 3600 % 24, s / 60 % 60, s % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m {s}s"),
        (0, h, m, _) => format!("{h}h {m}m"),
        (d, h, ..) => format!("{d}d {h}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_a_unit() {
        let counts = [0.0, 0.4, 7.0, 999.4, 999.6, 12_345.0, 123_456.0, 1.5e9];
        let expected = ["0", "0", "7", "999", "1.0k", "12.3k", "123k", "1.5G"];
        assert_eq!(counts.map(count), expected);
        assert_eq!([512.0, 1024.0, 1.5 * 1048576.0].map(bytes), ["512", "1.0Ki", "1.5Mi"]);
        let times = [None, Some(250), Some(1500), Some(123_456), Some(2_000_000), Some(3 << 30)];
        assert_eq!(times.map(time), ["-", "250ns", "1.5us", "123us", "2.0ms", "3.2s"]);
        assert_eq!(time(Some(20_000_000_000_000)), "20000s");
        assert_eq!([7, 427, 15_120, 273_600].map(uptime), ["7s", "7m 7s", "4h 12m", "3d 4h"]);
    }

    #[test]
    fn numbers_sort_from_the_largest_and_equal_ones_stay() {
        let vm = |name: &str, bytes_per_s| VmView {
            name: name.into(),
            bytes_per_s,
            ..VmView::default()
        };
        let vms = vec![vm("c", 1.0), vm("a", 5.0), vm("b", 1.0)];
        let view = View { vms, ..View::default() };
        let names = |sort| -> Vec<String> {
            let rows = Page::Vms.table(&view, sort).rows;
            rows.into_iter().map(|row| row[0].clone()).collect()
        };
        assert_eq!(names(Sort::Config), ["c", "a", "b"]);
        assert_eq!(names(Sort::Name), ["a", "b", "c"]);
        assert_eq!(names(Sort::Bytes), ["a", "c", "b"]);
        assert_eq!(names(Sort::Drops), ["c", "a", "b"]);
    }
}
