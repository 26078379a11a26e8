//! Summary for the README: a line and a bar for each way, read from the tables of the document of
//! results.
//!
//! The tables are the only source. So README, plot and tables cannot disagree, and nothing has to
//! be measured again to write the summary anew.

use std::path::Path;

use crate::harness::error::BenchError;
use crate::harness::guests;
use crate::harness::svg::{Canvas, WIDTH};
use crate::harness::table::{self, Section};

/// First marker line of the summary.
pub const BEGIN: &str = "<!-- bench:summary -->";
/// Second marker line of the summary.
pub const END: &str = "<!-- /bench:summary -->";

const LEFT: f64 = 280.0;
const RIGHT: f64 = 70.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 28.0;
const ROW_HEIGHT: f64 = 58.0;

/// One comparison of the summary: where it stands in the tables, and how people call it.
#[derive(Debug)]
struct Pick {
    way: &'static str,
    load: &'static str,
    against: &'static str,
    section: Section,
    case: &'static str,
    /// Name before our value, where several of ours take part; else empty.
    ours: &'static str,
    peer: &'static str,
}

const PICKS: [Pick; 5] = [
    Pick {
        way: "Sidecores, network",
        load: "frames of 64 bytes, one core",
        against: "Open vSwitch on DPDK",
        section: Section::Peers,
        case: "flood64_split",
        ours: "",
        peer: "ovs-normal",
    },
    Pick {
        way: "Sidecores, disk",
        load: "random reads of 4 KiB, depth 32",
        against: "qemu-storage-daemon, io_uring",
        section: Section::Peers,
        case: "disk_d32",
        ours: "",
        peer: "qsd-uring",
    },
    Pick {
        way: "Pipes",
        load: "nginx in a VM, files of 64 MiB",
        against: "the same nginx with sendfile",
        section: Section::Pipes,
        case: "nginx_64m_0",
        ours: "",
        peer: "sendfile",
    },
    Pick {
        way: "Channels",
        load: "TCP round trips of 64 bytes, VM to VM",
        against: "virtio-net, TAP and bridge",
        section: Section::Channels,
        case: "tcp_rr_64",
        ours: "channel-poll",
        peer: "tap-bridge",
    },
    Pick {
        way: "Modules",
        load: "MariaDB, a durable row of 1 KiB",
        against: "the same store in the VM, virtio-blk",
        section: Section::Modules,
        case: "insert_1k_durable",
        ours: "module-ring",
        peer: "guest-virtio-blk",
    },
];

/// A comparison with its values.
#[derive(Debug)]
struct Line {
    pick: &'static Pick,
    ours: String,
    peer: String,
    ratio: f64,
}

/// Rewrites summary and plot from the tables in `results`.
pub fn write(results: &Path, readme: &Path, plot: &Path) -> Result<(), BenchError> {
    let text =
        std::fs::read_to_string(results).map_err(|e| BenchError::file("read", results, e))?;
    let lines = read(&text, results)?;
    table::rewrite_between(readme, BEGIN, END, &markdown(&lines))?;
    std::fs::write(plot, svg(&lines)).map_err(|e| BenchError::file("write", plot, e))
}

fn read(document: &str, path: &Path) -> Result<Vec<Line>, BenchError> {
    guests::check_alike(document, path)?;
    let line = |pick: &'static Pick| {
        find(document, pick).ok_or_else(|| BenchError::NoTableRow {
            path: path.to_owned(),
            section: pick.section.begin(),
            case: pick.case,
            peer: pick.peer,
        })
    };
    PICKS.iter().map(line).collect()
}

/// The comparison in the form that [`table::by_case`] writes.
fn find(document: &str, pick: &'static Pick) -> Option<Line> {
    let (_, section) = document.split_once(pick.section.begin())?;
    let (section, _) = section.split_once(pick.section.end())?;
    let case = format!("| {} | ", pick.case);
    let prefix = if pick.ours.is_empty() { String::new() } else { format!("{}: ", pick.ours) };
    let rest =
        section.lines().find_map(|l| l.strip_prefix(&case)?.strip_prefix(prefix.as_str()))?;
    let (ours, peers) = rest.split_once(" | ")?;
    let name = format!("{} **", pick.peer);
    let peer = peers.split(" | ").next()?.split(", ").find_map(|p| p.strip_prefix(&name))?;
    let (ratio, value) = peer.split_once("×** (")?;
    let (ratio, value) = (ratio.parse().ok()?, value.strip_suffix(')')?);
    Some(Line { pick, ours: ours.into(), peer: value.into(), ratio })
}

fn markdown(lines: &[Line]) -> String {
    let mut out =
        String::from("| Way | Load | Millrace | Without it | Ratio |\n|---|---|---|---|---|\n");
    for Line { pick, ours, peer, ratio } in lines {
        out.push_str(&format!(
            "| {} | {} | {ours} | {peer}: {} | {ratio:.2}× |\n",
            pick.way, pick.load, pick.against
        ));
    }
    out
}

/// Bars of the ratios; a line marks 1: equal to the peer.
fn svg(lines: &[Line]) -> String {
    let most = lines.iter().map(|l| l.ratio).fold(1.0, f64::max) * 1.05;
    let scale = (WIDTH - LEFT - RIGHT) / most;
    let height = TOP + BOTTOM + lines.len() as f64 * ROW_HEIGHT;
    let bottom = height - BOTTOM;
    let mut c = Canvas { body: String::new() };
    c.text(16.0, 26.0, "mr-text mr-title", "Millrace against a host without it");
    c.text(16.0, 44.0, "mr-small", "median of the rounds' own ratios; right is better; 1 is equal");
    c.ratio_grid(LEFT, (TOP - 6.0, bottom), scale, most);
    for (i, line) in lines.iter().enumerate() {
        let top = TOP + i as f64 * ROW_HEIGHT;
        let mid = top + 26.0;
        let pick = line.pick;
        c.text(LEFT - 12.0, mid - 10.0, "mr-text mr-end", pick.way);
        c.text(LEFT - 12.0, mid + 5.0, "mr-small mr-end", pick.load);
        let against = format!("against {}", pick.against);
        c.text(LEFT - 12.0, mid + 19.0, "mr-small mr-end", &against);
        let class = if line.ratio < 1.0 { "mr-bad" } else { "mr-good" };
        c.bar((LEFT, mid - 13.0), (line.ratio * scale, 26.0), class);
        c.text(
            LEFT + line.ratio * scale + 8.0,
            mid + 5.0,
            "mr-text mr-strong",
            &format!("{:.2}×", line.ratio),
        );
    }
    c.finish(height, "Ratio of Millrace to a host without it, for each way")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn top(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
    }

    #[test]
    fn readme_and_plot_are_those_of_the_tables() {
        let path = top("docs/results.md");
        let lines = read(&std::fs::read_to_string(&path).unwrap(), &path).unwrap();
        let readme = std::fs::read_to_string(top("README.md")).unwrap();
        let new = table::replace_between(&readme, BEGIN, END, &markdown(&lines)).unwrap();
        assert_eq!(new, readme, "run `bench summary`");
        let plot = std::fs::read_to_string(top("docs/results.svg")).unwrap();
        assert_eq!(plot, svg(&lines), "run `bench summary`");
    }

    #[test]
    fn values_are_read_from_the_right_row_and_peer() {
        let pick = &PICKS[3];
        let document = "\
<!-- bench:peers -->
| tcp_rr_64 | channel-poll: 1/s | tap-bridge **9.99×** (2/s) |  |
<!-- /bench:peers -->
<!-- bench:channels -->
| tcp_rr_64 | channel-busy: 3/s | tap-bridge **1.00×** (4/s) |  |
| tcp_rr_64 | channel-poll: 8,487/s | tap-bridge-busy **1.50×** (5/s), tap-bridge **4.69×** (1,810/s) | tap-bridge 2.0× reached |
<!-- /bench:channels -->
";
        let line = find(document, pick).unwrap();
        assert_eq!(
            (line.ours.as_str(), line.peer.as_str(), line.ratio),
            ("8,487/s", "1,810/s", 4.69)
        );
        let error = read(document, Path::new("r.md")).unwrap_err().to_string();
        assert!(error.contains("r.md") && error.contains("flood64_split"), "{error}");
    }
}
