//! Cases: loads, the values read from them, and the floors they must reach.

use crate::harness::paired::{Goal, NONE};
use crate::harness::stats::Better;

use super::reading::Reading;

/// Ring format that the front end negotiates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Ring {
    /// Split.
    Split,
    /// Split, and completed in order.
    InOrder,
    /// Packed.
    Packed,
}

impl Ring {
    /// Name of the ring, as the front end's `--ring` and in case names.
    pub fn name(self) -> &'static str {
        match self {
            Ring::Split => "split",
            Ring::InOrder => "in-order",
            Ring::Packed => "packed",
        }
    }
}

/// Medium that a disk stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Nothing: requests are answered, data is nobody's.
    Null,
    /// A file in memory, through the page cache.
    Tmpfs,
    /// A file on the machine's disk, past the page cache.
    Disk,
}

/// Content of a qcow2 image when a load begins; it is on tmpfs, and goes through the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// Data in every cluster.
    Mapped,
    /// Nothing: each write is to a cluster that is not there.
    Empty,
    /// Nothing of its own; a raw backing file has data for every cluster.
    Backed,
}

/// Kind of a disk's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// Load of the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Frames of so many bytes from one port to the other, as many as go.
    Flood {
        /// Length from the Ethernet header to the last byte.
        frame_bytes: u32,
    },
    /// One frame there and back, over and over.
    RoundTrip {
        /// Length from the Ethernet header to the last byte.
        frame_bytes: u32,
    },
    /// Random reads of 4 KiB.
    Read {
        /// Medium of the disk.
        medium: Medium,
        /// Requests under way.
        depth: u32,
    },
    /// Reads or writes of an image: 1 MiB at a time from its beginning to its end, less at random.
    Qcow2 {
        /// Content of the image.
        image: Image,
        /// Reads or writes.
        op: Op,
        /// Bytes of a request.
        block_bytes: u32,
        /// Requests under way.
        depth: u32,
    },
}

/// One load on one kind of ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The load; with `ring` it makes the name.
    pub group: &'static str,
    /// Ring format.
    pub ring: Ring,
    /// Load of the case.
    pub load: Load,
}

/// Bytes of a qcow2 cluster, qemu-img's default.
pub const CLUSTER_BYTES: u32 = 64 << 10;
/// Bytes of the largest frame: 64 KiB, as segmentation offload makes them.
pub const LARGE_FRAME_BYTES: u32 = 65_536;

const fn case(group: &'static str, ring: Ring, load: Load) -> Case {
    Case { group, ring, load }
}

const fn flood(group: &'static str, ring: Ring, frame_bytes: u32) -> Case {
    case(group, ring, Load::Flood { frame_bytes })
}

const fn read(group: &'static str, medium: Medium, depth: u32) -> Case {
    // qemu-storage-daemon knows no other ring.
    case(group, Ring::Split, Load::Read { medium, depth })
}

const fn qcow2(group: &'static str, image: Image, op: Op, block_bytes: u32, depth: u32) -> Case {
    case(group, Ring::Split, Load::Qcow2 { image, op, block_bytes, depth })
}

const K4: u32 = 4 << 10;
const K64: u32 = 64 << 10;
/// Bytes of a sequential request.
const M1: u32 = 1 << 20;
/// Sequential requests under way, as in the demo.
const SEQUENTIAL_DEPTH: u32 = 8;

/// All cases in the order in which they run.
pub const ALL: [Case; 35] = [
    flood("flood64", Ring::Split, 64),
    flood("flood64", Ring::InOrder, 64),
    flood("flood64", Ring::Packed, 64),
    flood("flood1500", Ring::Split, 1500),
    flood("flood1500", Ring::InOrder, 1500),
    flood("flood1500", Ring::Packed, 1500),
    flood("flood64k", Ring::Split, LARGE_FRAME_BYTES),
    flood("flood64k", Ring::Packed, LARGE_FRAME_BYTES),
    case("rr64", Ring::Split, Load::RoundTrip { frame_bytes: 64 }),
    case("rr64", Ring::Packed, Load::RoundTrip { frame_bytes: 64 }),
    read("null", Medium::Null, 1),
    read("null", Medium::Null, 32),
    read("tmpfs", Medium::Tmpfs, 1),
    read("tmpfs", Medium::Tmpfs, 32),
    read("disk", Medium::Disk, 1),
    read("disk", Medium::Disk, 32),
    qcow2("qcow2_read_4k", Image::Mapped, Op::Read, K4, 1),
    qcow2("qcow2_read_4k", Image::Mapped, Op::Read, K4, 32),
    qcow2("qcow2_read_64k", Image::Mapped, Op::Read, K64, 1),
    qcow2("qcow2_read_64k", Image::Mapped, Op::Read, K64, 32),
    qcow2("qcow2_read_1m", Image::Mapped, Op::Read, M1, SEQUENTIAL_DEPTH),
    qcow2("qcow2_write_4k", Image::Mapped, Op::Write, K4, 1),
    qcow2("qcow2_write_4k", Image::Mapped, Op::Write, K4, 32),
    qcow2("qcow2_write_64k", Image::Mapped, Op::Write, K64, 1),
    qcow2("qcow2_write_64k", Image::Mapped, Op::Write, K64, 32),
    qcow2("qcow2_write_1m", Image::Mapped, Op::Write, M1, SEQUENTIAL_DEPTH),
    qcow2("qcow2_alloc_4k", Image::Empty, Op::Write, K4, 1),
    qcow2("qcow2_alloc_4k", Image::Empty, Op::Write, K4, 32),
    qcow2("qcow2_alloc_64k", Image::Empty, Op::Write, K64, 1),
    qcow2("qcow2_alloc_64k", Image::Empty, Op::Write, K64, 32),
    qcow2("qcow2_alloc_1m", Image::Empty, Op::Write, M1, SEQUENTIAL_DEPTH),
    qcow2("qcow2_backed_4k", Image::Backed, Op::Write, K4, 1),
    qcow2("qcow2_backed_4k", Image::Backed, Op::Write, K4, 32),
    qcow2("qcow2_backed_64k", Image::Backed, Op::Write, K64, 1),
    qcow2("qcow2_backed_64k", Image::Backed, Op::Write, K64, 32),
];

/// One value of a case: a row for each peer.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Added to the case's name; empty for its first value.
    pub suffix: &'static str,
    /// Unit of the value.
    pub unit: &'static str,
    /// Direction in which values are good.
    pub better: Better,
    /// Takes it from what the front end said.
    pub of: fn(&Reading) -> Option<f64>,
}

const P50: Metric = Metric {
    suffix: "_p50",
    unit: "µs",
    better: Better::Lower,
    of: |r| r.p50_ns.map(|ns| ns / 1e3),
};
const P99: Metric = Metric {
    suffix: "_p99",
    unit: "µs",
    better: Better::Lower,
    of: |r| r.p99_ns.map(|ns| ns / 1e3),
};
const MPPS: Metric =
    Metric { suffix: "", unit: "Mpps", better: Better::Higher, of: |r| Some(r.ops_per_s / 1e6) };
const GBITS: Metric = Metric {
    suffix: "",
    unit: "Gbit/s",
    better: Better::Higher,
    of: |r| Some(r.bytes_per_s * 8.0 / 1e9),
};
const MBYTES: Metric =
    Metric { suffix: "", unit: "MB/s", better: Better::Higher, of: |r| Some(r.bytes_per_s / 1e6) };
const IOPS: Metric =
    Metric { suffix: "", unit: "1/s", better: Better::Higher, of: |r| Some(r.ops_per_s) };

impl Case {
    /// For example `flood64_split`, `tmpfs_d32`, `qcow2_read_4k_d1`.
    pub fn name(&self) -> String {
        match self.load {
            Load::Read { depth, .. } | Load::Qcow2 { depth, .. } => {
                format!("{}_d{depth}", self.group)
            }
            _ => format!("{}_{}", self.group, self.ring.name()),
        }
    }

    /// Metrics that are read from each load.
    pub fn metrics(&self) -> &'static [Metric] {
        match self.load {
            Load::Flood { frame_bytes: LARGE_FRAME_BYTES } => &[GBITS],
            Load::Flood { .. } => &[MPPS],
            Load::RoundTrip { .. } => &[P50, P99],
            Load::Read { .. } => &[IOPS, P50, P99],
            Load::Qcow2 { block_bytes: M1, .. } => &[MBYTES],
            Load::Qcow2 { .. } => &[IOPS, P99],
        }
    }

    /// Whether two network ports are needed, or one disk.
    pub fn is_net(&self) -> bool {
        !matches!(self.load, Load::Read { .. } | Load::Qcow2 { .. })
    }

    /// Medium of its raw disk; none for the network, and for images.
    pub fn medium(&self) -> Option<Medium> {
        match self.load {
            Load::Read { medium, .. } => Some(medium),
            _ => None,
        }
    }

    /// Content of its qcow2 image; none where there is no image.
    pub fn image(&self) -> Option<Image> {
        match self.load {
            Load::Qcow2 { image, .. } => Some(image),
            _ => None,
        }
    }

    /// Whether its requests go from the disk's beginning to its end.
    pub fn is_sequential(&self) -> bool {
        matches!(self.load, Load::Qcow2 { block_bytes: M1, .. })
    }

    /// Whether its requests change the disk.
    pub fn writes(&self) -> bool {
        matches!(self.load, Load::Qcow2 { op: Op::Write, .. })
    }

    /// Bytes of a stretch of the disk that may be asked for once, and then never again: where a
    /// cluster that is written is another case's from then on. Such a load ends by itself.
    pub fn once_per_bytes(&self) -> Option<u32> {
        match self.load {
            Load::Qcow2 { image: Image::Empty | Image::Backed, block_bytes, .. } => {
                Some(block_bytes.max(CLUSTER_BYTES))
            }
            _ => None,
        }
    }

    /// How it is set up, for readers of the table.
    pub fn mode(&self) -> String {
        let ring = self.ring.name();
        match self.load {
            Load::Flood { frame_bytes: LARGE_FRAME_BYTES } => {
                format!("{ring} ring, 64 KiB frames in mergeable buffers, one direction")
            }
            Load::Flood { frame_bytes } => {
                format!("{ring} ring, {frame_bytes} B frames, one direction")
            }
            Load::RoundTrip { frame_bytes } => {
                format!("{ring} ring, {frame_bytes} B, one at a time")
            }
            Load::Read { depth, medium } => {
                let on = match medium {
                    Medium::Null => "no storage",
                    Medium::Tmpfs => "file on tmpfs",
                    Medium::Disk => "file on the disk, O_DIRECT",
                };
                format!("{ring} ring, 4 KiB random reads, depth {depth}, {on}")
            }
            Load::Qcow2 { image, op, block_bytes, depth } => {
                let op = if op == Op::Read { "reads" } else { "writes" };
                let how = match block_bytes {
                    M1 => format!("1 MiB sequential {op}"),
                    _ => format!("{} KiB random {op}", block_bytes >> 10),
                };
                let on = match image {
                    Image::Mapped => "mapped clusters",
                    Image::Empty => "each to clusters that are not there",
                    Image::Backed => "each to a cluster that only a raw backing file has",
                };
                format!("{ring} ring, {how}, depth {depth}, image on tmpfs, {on}")
            }
        }
    }
}

/// Name of Millrace's daemon with a raw disk: the peer that tells what the format costs.
pub const OURS_RAW: &str = "ours-raw";

/// The goal of a case's value against one peer. The back ends that are measured without vhost-user
/// are there for orientation, and have none, but one: a disk is held against fio on the bare file.
pub(crate) fn goal(case: &Case, metric: &Metric, peer: &str, reference: bool) -> Goal {
    use Load::{Flood, Read, RoundTrip};
    use Medium::{Disk, Null, Tmpfs};
    let first = metric.suffix.is_empty();
    if let Load::Qcow2 { image, .. } = case.load {
        return if first { image_goal(image, peer) } else { NONE };
    }
    let qsd = peer.starts_with("qsd");
    let floor = match (case.load, case.ring) {
        (Flood { frame_bytes: 64 }, Ring::Split) if peer == "ovs-normal" => Some(1.0),
        (Flood { frame_bytes: 64 }, Ring::InOrder | Ring::Packed) if peer == "testpmd-io" => {
            Some(0.9)
        }
        (Flood { frame_bytes: 1500 }, _) if peer == "testpmd-io" => Some(1.3),
        // Not below the best: so below none.
        (Flood { frame_bytes: LARGE_FRAME_BYTES }, _) if !reference => Some(1.0),
        (RoundTrip { .. }, _) if !reference && metric.suffix == "_p50" => Some(1.0),
        // Within 20 %.
        (RoundTrip { .. }, _) if !reference && metric.suffix == "_p99" => Some(1.0 / 1.2),
        (Read { medium: Null, .. }, _) if qsd && first => Some(2.0),
        (Read { medium: Tmpfs, depth: 1 }, _) if qsd && first => Some(2.0),
        (Read { medium: Tmpfs, .. }, _) if qsd && first => Some(1.5),
        (Read { medium: Null | Tmpfs, .. }, _) if qsd && metric.suffix == "_p99" => Some(1.0),
        (Read { medium: Disk, .. }, _) if peer == "fio" && first => Some(0.9),
        _ => None,
    };
    Goal { target: floor, aim: (!reference).then(|| floor.unwrap_or(1.0).max(1.0)) }
}

/// Goal of an image's rate. Backing files are there to be known, not judged.
fn image_goal(image: Image, peer: &str) -> Goal {
    let qsd = peer.starts_with("qsd");
    let (floor, aim) = match image {
        Image::Mapped if peer == OURS_RAW => (0.9, 0.97),
        Image::Mapped if qsd => (1.3, 2.0),
        Image::Empty if qsd => (1.0, 1.5),
        _ => return NONE,
    };
    Goal { target: Some(floor), aim: Some(aim) }
}

/// The cases that fit one of `wanted`, each a name or whole words of its beginning (flood64, qcow2,
/// qcow2_alloc); all when none is wanted. An entry that fits none is the error.
pub fn select(wanted: &[String]) -> Result<Vec<Case>, String> {
    let fits = |case: &Case, w: &String| {
        let name = case.name();
        name.strip_prefix(w.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    if let Some(w) = wanted.iter().find(|w| !ALL.iter().any(|c| fits(c, w))) {
        return Err(w.clone());
    }
    let chosen = |c: &Case| wanted.is_empty() || wanted.iter().any(|w| fits(c, w));
    Ok(ALL.into_iter().filter(chosen).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floors(name: &str, peer: &str, reference: bool) -> Vec<Option<f64>> {
        let case = ALL.into_iter().find(|c| c.name() == name).unwrap();
        case.metrics().iter().map(|m| goal(&case, m, peer, reference).target).collect()
    }

    #[test]
    fn names_differ_and_say_what_runs() {
        let mut names: Vec<String> = ALL.iter().map(Case::name).collect();
        assert_eq!(names[1], "flood64_in-order");
        assert_eq!(names[15], "disk_d32");
        assert_eq!(names[16], "qcow2_read_4k_d1");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn floors_are_as_agreed() {
        for (name, peer, want) in [
            ("flood64_split", "ovs-normal", vec![Some(1.0)]),
            ("flood64_split", "ovs-flow", vec![None]),
            ("flood64_split", "testpmd-io", vec![None]),
            ("flood64_in-order", "testpmd-io", vec![Some(0.9)]),
            ("flood64_packed", "testpmd-io", vec![Some(0.9)]),
            ("flood64_packed", "ovs-normal", vec![None]),
            ("flood1500_split", "testpmd-io", vec![Some(1.3)]),
            ("flood64k_packed", "vpp", vec![Some(1.0)]),
            ("rr64_split", "testpmd-io", vec![Some(1.0), Some(1.0 / 1.2)]),
            ("null_d32", "qsd", vec![Some(2.0), None, Some(1.0)]),
            ("tmpfs_d1", "qsd-uring", vec![Some(2.0), None, Some(1.0)]),
            ("tmpfs_d32", "qsd-threads", vec![Some(1.5), None, Some(1.0)]),
            ("tmpfs_d32", "spdk", vec![None, None, None]),
            ("disk_d1", "qsd-uring", vec![None, None, None]),
            ("qcow2_read_4k_d1", "ours-raw", vec![Some(0.9), None]),
            ("qcow2_read_4k_d32", "qsd-uring", vec![Some(1.3), None]),
            ("qcow2_write_1m_d8", "qsd-threads", vec![Some(1.3)]),
            ("qcow2_alloc_64k_d1", "qsd-uring", vec![Some(1.0), None]),
            ("qcow2_backed_4k_d1", "qsd-uring", vec![None, None]),
        ] {
            assert_eq!(floors(name, peer, false), want, "{name} {peer}");
        }
        assert_eq!(floors("disk_d32", "fio", true), [Some(0.9), None, None]);
        assert_eq!(floors("flood64k_split", "tap-bridge", true), [None]);
        assert_eq!(floors("rr64_split", "tap-bridge", true), [None, None]);
    }

    #[test]
    fn the_aim_is_ahead_of_every_peer_and_never_below_the_floor() {
        let case = ALL[0];
        let aim = |peer, reference| goal(&case, &MPPS, peer, reference).aim;
        assert_eq!(aim("vpp", false), Some(1.0));
        assert_eq!(aim("tap-bridge", true), None);
        assert_eq!(goal(&ALL[3], &MPPS, "testpmd-io", false).aim, Some(1.3));
        let of_image = |image, peer| image_goal(image, peer).aim;
        assert_eq!(of_image(Image::Mapped, OURS_RAW), Some(0.97), "no format costs nothing");
        assert_eq!(of_image(Image::Mapped, "qsd-uring"), Some(2.0));
        assert_eq!(of_image(Image::Empty, "qsd-threads"), Some(1.5));
        assert_eq!(of_image(Image::Backed, "qsd-uring"), None);
    }

    #[test]
    fn cases_are_chosen_by_name_and_by_the_words_it_begins_with() {
        let names = |wanted: &[&str]| -> Result<Vec<String>, String> {
            let wanted: Vec<String> = wanted.iter().map(|w| w.to_string()).collect();
            Ok(select(&wanted)?.iter().map(Case::name).collect())
        };
        assert_eq!(
            names(&["null", "rr64_packed"]).unwrap(),
            ["rr64_packed", "null_d1", "null_d32"]
        );
        assert_eq!(names(&[]).unwrap().len(), ALL.len());
        assert_eq!(names(&["flood64", "flod"]).unwrap_err(), "flod");
        assert_eq!(names(&["flood64"]).unwrap().len(), 3, "not flood64k");
        assert_eq!(names(&["qcow2"]).unwrap().len(), 19);
        assert_eq!(names(&["qcow2_alloc", "qcow2_read_4"]).unwrap_err(), "qcow2_read_4");
        assert_eq!(names(&["qcow2_alloc_1m"]).unwrap(), ["qcow2_alloc_1m_d8"]);
    }

    #[test]
    fn what_can_be_written_once_only_is() {
        let once = |name: &str| {
            let case = ALL.into_iter().find(|c| c.name() == name).unwrap();
            (case.once_per_bytes(), case.writes())
        };
        assert_eq!(once("qcow2_alloc_4k_d1"), (Some(65_536), true));
        assert_eq!(once("qcow2_backed_64k_d32"), (Some(65_536), true));
        assert_eq!(once("qcow2_alloc_1m_d8"), (Some(1 << 20), true));
        assert_eq!(once("qcow2_write_4k_d1"), (None, true));
        assert_eq!(once("qcow2_read_1m_d8"), (None, false));
        assert_eq!(once("tmpfs_d1"), (None, false));
    }
}
