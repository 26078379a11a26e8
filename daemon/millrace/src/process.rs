//! Setup of the process before it serves: limits, its control thread and signals.

use anyhow::Context;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Raises the number of open files to what is allowed: a port has about 20 descriptors, a vsock
/// connection one. Notes a low limit on locked memory, which io_uring counts on older kernels.
pub fn raise_limits() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if current != maximum
        && let Err(e) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!("raising the limit of open files: {e}");
    }
    let locked = getrlimit(Resource::Memlock).current;
    if locked.is_some_and(|bytes| bytes < 8 << 20) {
        tracing::info!(
            "RLIMIT_MEMLOCK is below 8 MiB: kernels before 5.12 may refuse io_uring; set \
             LimitMEMLOCK= in the unit"
        );
    }
}

/// One thread for the control API and signals. Sidecores and sessions have their own.
pub fn control_thread() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the control thread")
}

/// Takes over a signal; on the control thread.
pub fn take_over(kind: SignalKind) -> anyhow::Result<Signal> {
    signal(kind).context("taking over a signal")
}

/// The signals that end us. Made before the first socket, so that none kills us while we start.
pub struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    /// Takes them over; on the control thread.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: take_over(SignalKind::terminate())?,
            interrupt: take_over(SignalKind::interrupt())?,
        })
    }

    /// Waits for one: its name.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// An error with its causes on one line. Many errors of the rooms tell their cause themselves; a
/// cause whose text was said already is left out.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Prints to the standard output; a reader that went away (`| head`) is no error.
pub fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("writing to the standard output"),
    }
}

/// [`print()`] with a line feed.
pub fn print_line(text: &str) -> anyhow::Result<()> {
    print(&format!("{text}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let disk = anyhow::anyhow!("no such file");
        let told = disk.context("cannot open /x: no such file").context("disk root");
        assert_eq!(describe(&told), "disk root: cannot open /x: no such file");
        assert_eq!(describe(&anyhow::anyhow!("b").context("a")), "a: b");
    }
}
