//! Rows inserted by a database in a guest whose table store runs in the host, as in the VAMOS
//! paper's figures 4 and 5.
//!
//! # Theory of operation
//! One guest with one CPU runs Debian's MariaDB, unmodified, with the plugin ([`bed`]). All sides
//! are tables of this one server, and differ in where their bytes go:
//! - [`Side::Module`] and [`Side::ModuleBatched`]: to the table store in the host, over vsock;
//!   [`Side::ModuleRing`]: as the second, by memory that guest and host share, which both look at
//!   for a while before they sleep;
//! - [`Side::Virtio`], [`Side::Ide`], [`Side::Disk`]: to the same store, the same file, run by the
//!   same daemon *inside* the guest, on an ext4 on QEMU's virtio-blk, on QEMU's IDE, on Millrace's
//!   disk. The first is the control to which floors are compared, the second the paper's baseline;
//! - [`Side::Innodb`], [`Side::Aria`], [`Side::Myisam`]: to the server's own engines, on
//!   virtio-blk.
//!
//! What the guest's disks and the host's store write ends in files of one folder of the host,
//! through the host's page cache, and is durable by `fdatasync` of such a file, on all sides.
//!
//! Rows are inserted by a stored procedure ([`load`]): its statements are parsed once and no client
//! takes part, so what is measured is the way from the executor to the disk. It tells its own time.
//! Each load begins with an empty table and ends with a checksum of it, which must be the same on
//! all sides.
//!
//! A round is everything once; who begins changes. In round 0, which is thrown away otherwise,
//! probes in the guest's kernel count exits ([`counts`]): they cost time, so no time is taken with
//! them.
//!
//! # Limits
//! - Row sizes: powers of two from 1 to 128 KiB.
//! - Guests are emulated: what runs in the guest costs several times what it costs under KVM, and
//!   exits cost next to nothing. The first favours us, the second the peers. IDE is emulated in the
//!   thread of the guest's CPU, so its emulation counts as the guest's CPU time.
//! - MyISAM has no durable form; Aria and MyISAM have no transactions of several statements.

pub mod bed;
pub(crate) mod command;
pub mod counts;
pub mod load;
pub mod meter;
pub mod output;
pub mod plot;
pub mod rounds;
pub mod rows;
#[cfg(test)]
mod testing;

use std::path::PathBuf;

use lab::KernelChoice;
use serde::{Deserialize, Serialize};

use crate::harness::repeat::Failure;
use counts::Events;
use meter::Cpu;

/// Larger rows are fewer: so many times this many bytes are written.
const FULL_ROWS_BYTES: u32 = 16 << 10;
/// Fewest rows of a load.
const LEAST_ROWS: u32 = 16;
/// Rows that are not durable cost less, so there are more of them.
const RELAXED_TIMES: u32 = 2;

/// Setup of a run.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Rounds that count.
    pub rounds: u32,
    /// Bytes of a row.
    pub sizes_bytes: Vec<u32>,
    /// Durable rows of a load, of at most 16 KiB each.
    pub rows: u32,
    /// Rows of a statement or transaction, where that is more than one.
    pub batch: u32,
    /// Sides that take part.
    pub sides: Vec<Side>,
    /// Forms of load that are measured.
    pub forms: Vec<Form>,
    /// Kernel of the guest.
    pub kernel: KernelChoice,
    /// Paths of Millrace's daemon, outside and inside.
    pub millrace: PathBuf,
    /// The plugin for MariaDB.
    pub plugin: PathBuf,
    /// The table store.
    pub module: PathBuf,
    /// How long guest and host look at memory that they share before they sleep.
    pub spin_us: u32,
    /// Past the host's page cache, on the guest's disks.
    pub direct: bool,
    /// Folder of the results and, meanwhile, the disks and the store.
    pub out: PathBuf,
}

/// Store that rows go to, and the way there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// The store in the host, a request for each write and each commit.
    Module,
    /// The store in the host, a request for each statement, which also commits.
    ModuleBatched,
    /// The same by memory that both share, which both look at.
    ModuleRing,
    /// The store in the guest, on QEMU's virtio-blk: the control.
    Virtio,
    /// The store in the guest, on QEMU's IDE: the paper's baseline.
    Ide,
    /// The store in the guest, on Millrace's disk.
    Disk,
    /// InnoDB on virtio-blk.
    Innodb,
    /// Aria, transactional, on virtio-blk.
    Aria,
    /// MyISAM on virtio-blk.
    Myisam,
}

/// Form of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Form {
    /// Commits return when they are on the disk.
    pub durable: bool,
    /// How rows are grouped.
    pub shape: Shape,
}

/// How rows are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// Each is a statement and a transaction.
    One,
    /// Several are a statement.
    Rows,
    /// Several statements of a row each are a transaction.
    Tx,
}

impl Side {
    /// All.
    pub const ALL: [Side; 9] = [
        Side::ModuleBatched,
        Side::Virtio,
        Side::Module,
        Side::Ide,
        Side::Disk,
        Side::Innodb,
        Side::Aria,
        Side::Myisam,
        Side::ModuleRing,
    ];

    /// Name of the side in results.
    pub fn name(self) -> &'static str {
        match self {
            Side::Module => "module",
            Side::ModuleBatched => "module-batched",
            Side::ModuleRing => "module-ring",
            Side::Virtio => "guest-virtio-blk",
            Side::Ide => "guest-ide",
            Side::Disk => "guest-millrace-disk",
            Side::Innodb => "innodb",
            Side::Aria => "aria",
            Side::Myisam => "myisam",
        }
    }

    /// Whether the store has its rows, wherever it runs.
    pub fn is_stored(self) -> bool {
        !matches!(self, Side::Innodb | Side::Aria | Side::Myisam)
    }

    /// Whether it can do that at all.
    pub fn can(self, form: Form) -> bool {
        match self {
            Side::Myisam => !form.durable && form.shape != Shape::Tx,
            Side::Aria => form.shape != Shape::Tx,
            _ => true,
        }
    }
}

impl Form {
    /// All of some shapes.
    pub fn all(shapes: &[Shape]) -> Vec<Form> {
        let both = |&shape: &Shape| [true, false].map(|durable| Form { durable, shape });
        shapes.iter().flat_map(both).collect()
    }

    /// Name of the form in the names of cases.
    pub fn name(self, batch: u32) -> String {
        let durable = if self.durable { "durable" } else { "relaxed" };
        match self.shape {
            Shape::One => durable.into(),
            Shape::Rows => format!("{durable}_rows{batch}"),
            Shape::Tx => format!("{durable}_tx{batch}"),
        }
    }

    /// For people.
    pub fn text(self, batch: u32) -> String {
        let durable = if self.durable { "durable" } else { "not durable" };
        match self.shape {
            Shape::One => format!("{durable}, a row a statement, autocommit"),
            Shape::Rows => format!("{durable}, {batch} rows a statement, autocommit"),
            Shape::Tx => format!("{durable}, {batch} statements a transaction"),
        }
    }
}

/// One kind of load, which all sides get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cell {
    /// Bytes of a row.
    pub size_bytes: u32,
    /// Form of the load.
    pub form: Form,
}

impl Cell {
    /// `1k_durable`.
    pub fn name(self, setup: &Setup) -> String {
        format!("{}_{}", size_text(self.size_bytes), self.form.name(setup.batch))
    }

    /// How many rows are inserted: whole groups.
    pub fn rows(self, setup: &Setup) -> u32 {
        let full = u64::from(setup.rows) * u64::from(FULL_ROWS_BYTES);
        let rows = (full / u64::from(self.size_bytes)) as u32;
        let rows = rows.min(setup.rows).max(LEAST_ROWS.min(setup.rows));
        let rows = if self.form.durable { rows } else { rows * RELAXED_TIMES };
        match self.form.shape {
            Shape::One => rows,
            _ => rows.next_multiple_of(setup.batch),
        }
    }
}

/// `1k`.
pub fn size_text(bytes: u32) -> String {
    format!("{}k", bytes >> 10)
}

impl Setup {
    /// All that a round measures.
    pub fn cells(&self) -> Vec<Cell> {
        let of = |&form: &Form| {
            self.sizes_bytes.iter().map(move |&size_bytes| Cell { size_bytes, form })
        };
        self.forms.iter().flat_map(of).collect()
    }
}

/// Sample that a load gave, for one row.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Run time.
    pub us: f64,
    /// CPU time by component.
    pub cpu: Cpu,
    /// System calls of QEMU's threads but the guest's CPU, of the daemon and the module's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_calls: Option<f64>,
    /// Part of the machine that strangers used; the kernel's threads are among them.
    pub foreign: f64,
}

/// A load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// Cell that was measured.
    pub cell: Cell,
    /// Side that rows went to.
    pub side: Side,
    /// Sample that the load gave.
    pub sample: Sample,
}

/// Events that round 0 counted in the guest, for one row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Cell that was measured.
    pub cell: Cell,
    /// Side that rows went to.
    pub side: Side,
    /// The counts.
    pub events: Events,
}

/// Everything that was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Loads of all rounds.
    pub loads: Vec<Load>,
    /// Exits and interrupts.
    pub counted: Vec<Counted>,
    /// Loads that failed, and why; those put on again with success are marked so.
    pub failed: Vec<Failure>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_rows_are_fewer_and_groups_whole() {
        let setup = Setup { rows: 160, batch: 16, ..testing::setup() };
        let rows = |kib: u32, durable, shape| {
            Cell { size_bytes: kib << 10, form: Form { durable, shape } }.rows(&setup)
        };
        let durable: Vec<u32> = [1, 16, 64, 128].map(|kib| rows(kib, true, Shape::One)).into();
        assert_eq!(durable, [160, 160, 40, 20]);
        assert_eq!((rows(128, true, Shape::Tx), rows(128, false, Shape::One)), (32, 40));
        let form = Form { durable: true, shape: Shape::One };
        let few = Setup { rows: 4, ..setup };
        assert_eq!(Cell { size_bytes: 128 << 10, form }.rows(&few), 4);
    }

    #[test]
    fn names_are_as_in_results() {
        let setup = testing::setup();
        let forms = Form::all(&[Shape::One, Shape::Rows, Shape::Tx]);
        let name = |&form: &Form| Cell { size_bytes: 1024, form }.name(&setup);
        let names: Vec<_> = forms.iter().map(name).collect();
        assert_eq!(names[..3], ["1k_durable", "1k_relaxed", "1k_durable_rows16"]);
        assert_eq!(names[3..], ["1k_relaxed_rows16", "1k_durable_tx16", "1k_relaxed_tx16"]);
        let can = |side: Side| forms.iter().filter(|f| side.can(**f)).count();
        assert_eq!((can(Side::Aria), can(Side::Myisam), can(Side::Innodb)), (4, 2, 6));
    }
}
