//! Specification of a module, and the reports that it has made.

use std::sync::Arc;
use std::time::Duration;

use wasmtime::{Linker, Module};

use crate::budget::Purse;
use crate::control::DiskUse;
use crate::instance::Limits;
use crate::instance_state::State;
use crate::ring::Slots;

/// Specification of a module, as a process runs it.
pub(crate) struct Spec {
    pub name: String,
    pub module: Module,
    pub linker: Arc<Linker<State>>,
    pub limits: Limits,
    /// Share of a core, in percent.
    pub cpu_percent: u32,
    /// Modules of this VM, as a welcome lists them.
    pub list: Arc<Vec<u8>>,
    /// Budget of what its clients make it hold.
    pub purse: Arc<Purse>,
    /// Memory that clients may use in place of their sockets, and how long to look at it before
    /// sleeping.
    pub ring: Option<(Arc<Slots>, Duration)>,
    /// Whether requests of the guest are taken by rings alone.
    pub needs_ring: bool,
    /// Reports the result of the first start.
    pub report_start: ReportStart,
    /// Reports what it did with its files.
    pub report_disk_use: ReportDiskUse,
}

/// Reports, now and then, what a module did with its files; false: it could not be reported, and is
/// later.
pub(crate) type ReportDiskUse = Box<dyn FnMut(DiskUse) -> bool + Send>;

/// Reports once how the first start of a module went; an error: why it failed.
pub(crate) type ReportStart = Option<Box<dyn FnOnce(Result<(), String>) + Send>>;
