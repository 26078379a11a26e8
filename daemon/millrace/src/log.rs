//! The process's log: where it goes, and what is in it, which may change while it runs.

use std::io::IsTerminal;
use std::sync::{Mutex, OnceLock};

use anyhow::Context;
use base::sync::lock;
use control::plane::LogFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use crate::journal::{self, Journal};

/// Log of this process; set once, when it begins.
static LOG: OnceLock<Log> = OnceLock::new();

struct Log {
    handle: reload::Handle<EnvFilter, Registry>,
    filter: Mutex<LogFilter>,
}

fn parse(directives: &str) -> anyhow::Result<EnvFilter> {
    EnvFilter::try_new(directives).with_context(|| format!("{directives:?} is no log filter"))
}

/// Logs to systemd's journal where the standard error goes there, else to the standard error.
pub fn init(directives: &str, json: bool) -> anyhow::Result<()> {
    let (filter, handle) = reload::Layer::new(parse(directives).context("daemon.log")?);
    let base = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // Else a line that cannot be written is told with `eprintln!`, which panics then.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    let lines = if json {
        base.json().boxed()
    } else if journal::is_stderr() {
        journal::log_panics();
        Journal::of_host().boxed()
    } else {
        base.boxed()
    };
    let started = tracing_subscriber::registry().with(lines.with_filter(filter)).try_init();
    started.map_err(|e| anyhow::anyhow!("starting the log: {e}"))?;
    let text = directives.to_owned();
    let filter = Mutex::new(LogFilter { filter: text.clone(), configured: text });
    // The subscriber is this process's first, so this is, too.
    let _ = LOG.set(Log { handle, filter });
    Ok(())
}

/// Current filter of the log; `off` before the log begins.
pub fn filter() -> LogFilter {
    let off = || LogFilter { filter: "off".into(), configured: "off".into() };
    LOG.get().map_or_else(off, |log| lock(&log.filter).clone())
}

/// Changes what is logged until the process ends.
pub fn set_filter(directives: &str) -> anyhow::Result<LogFilter> {
    let log = LOG.get().context("the log has not begun")?;
    // Changes of two people at once: the text is that of the later one.
    let mut shown = lock(&log.filter);
    log.handle.reload(parse(directives)?).context("changing what is logged")?;
    shown.filter = directives.into();
    Ok(shown.clone())
}
