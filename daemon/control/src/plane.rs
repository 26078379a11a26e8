//! Requests of the control API to the daemon. The binary implements them on top of the engines;
//! this crate knows none of them.

use config::{AttachError, CreditConfig, Problems};
use serde::Serialize;
use serde_json::Value as Json;
use thiserror::Error;

use crate::sample::Metrics;

mod channel;
mod latency;
mod module;
mod pipe;
pub(crate) mod status;

pub use channel::{ChannelLink, ChannelState, ChannelStatus};
pub use latency::LatencyStatus;
pub use module::{CopyWork, ModuleCounts, ModuleState, ModuleStatus, Restored};
pub use pipe::PipeStatus;
pub use status::{
    CreditUsage, DiskStatus, Health, HolderStatus, ImageStatus, IoStatus, MacStatus, NetStatus,
    PlacementStatus, PortKind, PortStatus, SidecoreStatus, Status, SwitchStatus, VmStatus,
    VsockStatus, WorkerStatus,
};

/// The daemon, as the API sees it. Methods may block for as long as a device takes to answer.
pub trait Plane: Send + Sync + 'static {
    /// Status of the daemon, with all VMs and ports.
    fn status(&self) -> Status;

    /// All ports, in the order of the config.
    fn ports(&self) -> Vec<PortStatus>;

    /// Pipes under way, in no particular order.
    fn pipes(&self) -> Vec<PipeStatus>;

    /// VMs that take part in channels or may, in the order of the config.
    fn channels(&self) -> Vec<ChannelStatus>;

    /// Makes a VM a member of its trust domain's channels, and lets it join again without being
    /// asked. A member stays as it is.
    fn join_channel(&self, vm: &str) -> Result<ChannelStatus, PlaneError>;

    /// Ends a VM's membership; it joins again when asked, or when its front end reconnects.
    fn leave_channel(&self, vm: &str) -> Result<(), PlaneError>;

    /// The modules of all VMs, or of one, in the order of the config.
    fn modules(&self, vm: Option<&str>) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Replaces a VM's modules by those of the config's files, which are read again. On error the
    /// old ones stay.
    fn load_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Begins a copy of a module's files, which is taken while it serves. One VM has one at a time.
    fn back_up(&self, vm: &str, module: &str) -> Result<CopyWork, PlaneError>;

    /// Puts a copy in the place of a module's files, once it is checked and durable. The VM's
    /// modules end and begin again for it, unless they are drained. `replace`: existing files may
    /// be replaced.
    fn restore(
        &self,
        vm: &str,
        module: &str,
        replace: bool,
        from: &mut dyn std::io::Read,
    ) -> Result<Restored, PlaneError>;

    /// Ends a VM's modules, durably, until [`Plane::resume_modules`]: also across a restart, and
    /// wherever their folder goes.
    fn drain_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Lets modules that were drained serve again.
    fn resume_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Counters and times of everything.
    fn metrics(&self) -> Metrics;

    /// Log filter of now.
    fn log_filter(&self) -> LogFilter;

    /// Changes the log filter until the daemon ends.
    fn set_log_filter(&self, filter: &str) -> Result<LogFilter, PlaneError>;

    /// Makes a port and serves it. `body` is as in [`config::Config::attach`].
    fn attach(&self, vm: &str, body: &Json) -> Result<PortStatus, PlaneError>;

    /// Starts a port that does not run: one that failed to start, or one of the config file that
    /// was detached. Its settings are those of the config file now, or those it was attached with.
    fn start(&self, vm: &str, port: &str) -> Result<PortStatus, PlaneError>;

    /// Stops a port, and drops it. It waits for requests in its disk for a bounded time only.
    fn detach(&self, vm: &str, port: &str) -> Result<Detached, PlaneError>;

    /// Lets the requests of a disk go on that wait for their storage. Returns their number.
    fn resume(&self, vm: &str, port: &str) -> Result<usize, PlaneError>;

    /// Takes over a disk's new size: that of the file, or `len_bytes` where there is none. Returns
    /// the size in bytes. [`PlaneError::Conflict`]: the disk has the size, but the guest could not
    /// be told.
    fn resize(&self, vm: &str, port: &str, len_bytes: Option<u64>) -> Result<u64, PlaneError>;

    /// Plugs the cable in or out. Returns whether a connected guest can see it as its carrier.
    fn set_link(&self, vm: &str, port: &str, up: bool) -> Result<bool, PlaneError>;

    /// Changes the credit settings of a VM that `body` names. Returns all of them.
    fn set_credit(&self, vm: &str, body: &Json) -> Result<CreditConfig, PlaneError>;

    /// Begins to stop the daemon, and returns. `forget`: sessions in the holder are dropped too.
    fn shutdown(&self, forget: bool);
}

/// Reason why the daemon refused or failed a request.
#[derive(Debug, Error)]
pub enum PlaneError {
    /// No VM or port has this name.
    ///
    /// Remedy: check the name: `millrace ports` lists VMs and ports.
    #[error("there is no {what} {name}")]
    NotFound {
        /// `VM`, `port`, `disk` or `net`.
        what: &'static str,
        /// Name that was asked for.
        name: String,
    },
    /// The port cannot be attached as described.
    ///
    /// Remedy: see `AttachError`.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Settings of a VM are wrong.
    ///
    /// Remedy: mend each setting as its line says.
    #[error(transparent)]
    Settings(#[from] Problems),
    /// A value of the request is wrong.
    ///
    /// Remedy: write a value within the limit that the text names.
    #[error("{field}: {what}")]
    Invalid {
        /// Name of the value.
        field: &'static str,
        /// Description of the fault, with the limit.
        what: String,
        /// The limit.
        limit: Option<String>,
    },
    /// The request does not go with the daemon's state.
    ///
    /// Remedy: do as the text says; `millrace ports` and `millrace status` show the state that it
    /// contradicts.
    #[error("{0}")]
    Conflict(String),
    /// The request is good, but the engine or the operating system cannot do it: no such file, a
    /// lock on the image, a socket in use.
    ///
    /// Remedy: do as the text says; it is one of the errors of the port's kind on this page.
    #[error("{0}")]
    Refused(String),
    /// A part of the daemon is gone.
    ///
    /// Remedy: look into the log for a panic, restart the daemon, and report it.
    #[error("{0}")]
    Failed(String),
}

/// Result of detaching a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Detached {
    /// Requests that its disk has not answered: the image stays locked until they are over. Those
    /// that read may still write to the memory of the VM.
    pub requests_in_disk: usize,
}

/// Log filter: a level, or directives such as `info,net=debug`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LogFilter {
    /// Filter of now.
    pub filter: String,
    /// Filter of the config file at the start, which holds again after a restart.
    pub configured: String,
}
