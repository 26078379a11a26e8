//! The paper's figures 3, 4 and 5.

use super::Server;
use super::meter::{Cpu, PARTS};
use super::{Cache, FileLoad, Measured, Mode, Setup};
use crate::harness::stats::spread;
use crate::harness::svg::{Canvas, WIDTH};
use crate::harness::table::number;
use crate::harness::table::size_text;

const TOP: f64 = 76.0;
const LEFT: f64 = 100.0;
const RIGHT: f64 = 40.0;
const HEAD: f64 = 26.0;
/// Height of a panel of upright bars.
const PANEL: f64 = 150.0;
const GAP: f64 = 46.0;
/// A lying bar with its distance to the next.
const LINE: f64 = 26.0;
const MODES: [Mode; 3] = [Mode::ReadWrite, Mode::Sendfile, Mode::Pipe];

/// A group of upright bars: its name, their heights, and a text above them.
struct Group {
    name: String,
    bars: Vec<Option<f64>>,
    note: String,
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    Some(spread(&values.collect::<Vec<_>>())?.median)
}

/// Median of some value of part one over the rounds that count.
fn of(
    measured: &Measured,
    (busy, cache, mode): (usize, Cache, Mode),
    value: impl Fn(&FileLoad) -> f64,
) -> Option<f64> {
    let wanted = |l: &&FileLoad| l.round > 0 && (l.busy, l.cache, l.mode) == (busy, cache, mode);
    median(measured.files.iter().filter(wanted).map(value))
}

/// Medians of CPU time by component.
pub fn cpu_of(measured: &Measured, busy: usize, cache: Cache, mode: Mode) -> Option<Cpu> {
    let part = |get: fn(&Cpu) -> f64| of(measured, (busy, cache, mode), |l| get(&l.sample.cpu));
    Some(Cpu {
        vcpu: part(|c| c.vcpu)?,
        qemu: part(|c| c.qemu)?,
        sidecore: part(|c| c.sidecore)?,
        pool: part(|c| c.pool)?,
        daemon: part(|c| c.daemon)?,
        kernel: part(|c| c.kernel)?,
        client: part(|c| c.client)?,
        machine: part(|c| c.machine)?,
    })
}

/// Figure 3: throughput against the number of busy neighbours.
pub fn throughput(setup: &Setup, measured: &Measured) -> String {
    let panels: Vec<_> = Cache::ALL
        .iter()
        .map(|&cache| {
            let group = |&busy: &usize| {
                let bars: Vec<_> = MODES
                    .iter()
                    .map(|&mode| of(measured, (busy, cache, mode), |l| l.sample.mb_per_s))
                    .collect();
                Group { name: format!("{busy} busy"), note: times(bars[2], bars[1]), bars }
            };
            let head = format!("guest’s cache {}, MB/s", cache.name());
            (head, setup.busy.iter().map(group).collect())
        })
        .collect();
    let note = format!(
        "{} MiB to one client; the VM shares its CPU with busy ones; above: pipe against sendfile",
        setup.file_bytes >> 20
    );
    let title = "Throughput of a file transfer (figure 3)";
    upright(title, &note, &MODES.map(Mode::name), &panels)
}

/// Figure 5: throughput of web servers against file size.
pub fn servers(setup: &Setup, measured: &Measured) -> String {
    let mut panels = Vec::new();
    for &server in &setup.servers {
        for &busy in &setup.servers_busy {
            let group = |&size_bytes: &u64| {
                let bar = |shim| server_mb(measured, (server, busy, size_bytes, shim));
                let bars = vec![bar(false), bar(true)];
                Group { name: size_text(size_bytes), note: times(bars[1], bars[0]), bars }
            };
            let head = format!("{}, {busy} busy neighbours, MB/s", server.name());
            panels.push((head, setup.sizes_bytes.iter().map(group).collect()));
        }
    }
    let note = format!(
        "{} keep-alive connections; above: with the shim against without",
        setup.connections
    );
    upright("Throughput of web servers (figure 5)", &note, &["sendfile", "pipe"], &panels)
}

fn server_mb(
    measured: &Measured,
    (server, busy, size_bytes, shim): (Server, usize, u64, bool),
) -> Option<f64> {
    let all = measured.servers.iter().filter(|l| l.round > 0 && l.busy == busy);
    let all = all.filter(|l| (l.server, l.size_bytes, l.shim) == (server, size_bytes, shim));
    median(all.map(|l| l.sample.mb_per_s))
}

fn times(ours: Option<f64>, peer: Option<f64>) -> String {
    match (ours, peer) {
        (Some(ours), Some(peer)) if peer > 0.0 => format!("{:.2}×", ours / peer),
        _ => String::new(),
    }
}

/// Panels of groups of upright bars; each panel has a scale of its own.
fn upright(title: &str, note: &str, series: &[&str], panels: &[(String, Vec<Group>)]) -> String {
    let height = TOP + panels.len() as f64 * (HEAD + PANEL + GAP);
    let mut canvas = start(title, note, series);
    for (i, (head, groups)) in panels.iter().enumerate() {
        let top = TOP + i as f64 * (HEAD + PANEL + GAP);
        canvas.text(16.0, top + 12.0, "mr-text mr-strong", head);
        let (begin, bottom) = (top + HEAD, top + HEAD + PANEL);
        let most = groups.iter().flat_map(|g| g.bars.iter().flatten()).copied().fold(0.0, f64::max);
        // Room for the notes above.
        let scale = (PANEL - 16.0) / most.max(f64::MIN_POSITIVE);
        canvas.line((LEFT, bottom), (WIDTH - RIGHT, bottom), "mr-grid");
        canvas.line((LEFT, begin + 16.0), (WIDTH - RIGHT, begin + 16.0), "mr-grid");
        canvas.text(LEFT - 8.0, begin + 20.0, "mr-small mr-end", &number(most));
        let width = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
        for (k, group) in groups.iter().enumerate() {
            let x = LEFT + k as f64 * width;
            draw_group(&mut canvas, group, (x, bottom), width, scale);
        }
    }
    canvas.finish(height, title)
}

fn draw_group(canvas: &mut Canvas, group: &Group, (x, bottom): (f64, f64), width: f64, scale: f64) {
    let bar = width * 0.8 / group.bars.len().max(1) as f64;
    let mut highest = 0f64;
    for (i, value) in group.bars.iter().enumerate() {
        let Some(value) = value else { continue };
        let tall = value * scale;
        highest = highest.max(tall);
        let at = (x + width * 0.1 + i as f64 * bar, bottom - tall);
        canvas.bar(at, (bar - 2.0, tall), fill(i, group.bars.len()));
    }
    let middle = x + width / 2.0;
    canvas.text(middle, bottom - highest - 4.0, "mr-small mr-mid", &group.note);
    canvas.text(middle, bottom + 15.0, "mr-small mr-mid", &group.name);
}

/// The last series is ours.
fn fill(series: usize, of: usize) -> &'static str {
    match of - series {
        1 => "mr-good",
        2 => "mr-peer",
        _ => "mr-f2",
    }
}

fn start(title: &str, note: &str, series: &[&str]) -> Canvas {
    let mut canvas = Canvas::titled(title, note);
    let classes: Vec<_> = (0..series.len()).map(|i| fill(i, series.len())).collect();
    legend(&mut canvas, series, &classes, 56.0);
    canvas
}

fn legend(canvas: &mut Canvas, series: &[&str], classes: &[&str], y: f64) {
    let mut x = 16.0;
    for (name, class) in series.iter().zip(classes) {
        canvas.bar((x, y), (10.0, 10.0), class);
        canvas.text(x + 14.0, y + 9.0, "mr-small", name);
        x += 34.0 + 6.2 * name.chars().count() as f64;
    }
}

/// Figure 4: CPU time per MB, (a) of VM and host, (b) of the host by component.
pub fn cpu(measured: &Measured, busy: usize) -> String {
    let title = format!("CPU time per MB by component, {busy} busy neighbours (figure 4)");
    let mut canvas =
        Canvas::titled(&title, "microseconds of host CPU per MB; the client’s is not in it");
    let classes = ["mr-f0", "mr-f1", "mr-f2", "mr-f3", "mr-f4", "mr-f5"];
    legend(&mut canvas, &PARTS, &classes, 56.0);
    let mut top = TOP;
    for cache in Cache::ALL {
        let found: Vec<_> =
            MODES.iter().filter_map(|&m| Some((m, cpu_of(measured, busy, cache, m)?))).collect();
        // The first two parts are the VM's.
        for (letter, what, from) in [("a", "all", 0), ("b", "the host’s part", 2)] {
            let head = format!("({letter}) {what}, guest’s cache {}", cache.name());
            canvas.text(16.0, top + 12.0, "mr-text mr-strong", &head);
            top += HEAD;
            let sum = |cpu: &Cpu| cpu.parts()[from..].iter().sum::<f64>();
            let most = found.iter().map(|(_, cpu)| sum(cpu)).fold(f64::MIN_POSITIVE, f64::max);
            for (mode, cpu) in &found {
                stack(&mut canvas, (*mode, &cpu.parts()[from..], &classes[from..]), top, most);
                top += LINE;
            }
            top += GAP / 2.0;
        }
    }
    canvas.finish(top, &title)
}

fn stack(
    canvas: &mut Canvas,
    (mode, parts, classes): (Mode, &[f64], &[&str]),
    top: f64,
    most: f64,
) {
    let scale = (WIDTH - LEFT - RIGHT - 60.0) / most;
    canvas.text(LEFT - 8.0, top + 13.0, "mr-text mr-end", mode.name());
    let mut x = LEFT;
    for (part, class) in parts.iter().zip(classes) {
        canvas.bar((x, top), (part * scale, LINE - 8.0), class);
        x += part * scale;
    }
    canvas.text(x + 8.0, top + 13.0, "mr-small", &number(parts.iter().sum()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::pipes::testing::{measured, setup};

    #[test]
    fn bars_have_their_heights() {
        let svg = throughput(&setup(), &measured());
        // 134 points for 800 MB/s; three busy neighbours leave sendfile a quarter of it.
        assert_eq!(svg.matches("height=\"134.0\"").count(), 2 * (3 + 1), "{svg}");
        assert_eq!(svg.matches("height=\"33.5\" rx=\"2\" class=\"mr-peer\"").count(), 2);
        assert!(svg.contains(">4.00×</text>") && svg.contains(">read-write</text>"), "{svg}");
        let svg = servers(&setup(), &measured());
        assert!(svg.contains("nginx, 3 busy neighbours") && svg.contains(">64m</text>"), "{svg}");
    }

    #[test]
    fn parts_stand_side_by_side() {
        let svg = cpu(&measured(), 0);
        // 660 points for read-write's 6 × 800 µs.
        let bar = "<rect x=\"210.0\" y=\"102.0\" width=\"110.0\" height=\"18.0\" rx=\"2\" \
                   class=\"mr-f1\"/>";
        assert!(svg.contains(bar), "{svg}");
        assert!(svg.contains(">4,800</text>") && svg.contains(">600</text>"), "{svg}");
    }

    #[test]
    fn nothing_measured_still_draws() {
        let nothing = Measured::default();
        for svg in [throughput(&setup(), &nothing), servers(&setup(), &nothing), cpu(&nothing, 0)] {
            assert!(
                svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"),
                "{svg}"
            );
        }
    }
}
