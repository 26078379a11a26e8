//! `millrace serve`: start, run, stop.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use control::api::ApiServer;
use control::attached::AttachedList;
use control::config::{self, Config, HolderConfig};
use control::systemd::Notifier;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::Serve;
use crate::host::Host;
use crate::{exit, holder, process};

/// Runs the daemon until it is told to stop.
pub fn serve(args: &Serve) -> anyhow::Result<u8> {
    let config = match config::load(&args.file.config) {
        Ok(config) => config,
        Err(problems) => {
            eprintln!("{problems}");
            return Ok(exit::FAILED);
        }
    };
    if args.check_only {
        return Ok(exit::OK);
    }
    process::init_logging(&config.daemon.log, args.log_json)?;
    process::raise_limits();
    // One thread: it serves the control API and signals. Sidecores and sessions have their own.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the control thread")?;
    let served = runtime.block_on(run(&args.file.config, config));
    // A request that still waits for a device must not keep the process.
    runtime.shutdown_background();
    served?;
    Ok(exit::OK)
}

/// The signals we take. Made before the first socket, so that none is lost while we start.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let new = |kind| signal(kind).context("taking over a signal");
        Ok(Self {
            terminate: new(SignalKind::terminate())?,
            interrupt: new(SignalKind::interrupt())?,
            hangup: new(SignalKind::hangup())?,
        })
    }

    /// Waits for one that ends the daemon.
    async fn end(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => tracing::info!(
                    "SIGHUP: the config is read at the start only; use attach and detach"
                ),
            }
        }
    }
}

async fn run(path: &Path, config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let notifier = Notifier::from_env();
    let run_dir = config.daemon.run_dir.clone();
    let own_holder = config.daemon.holder == HolderConfig::Own;
    std::fs::create_dir_all(&run_dir)
        .with_context(|| format!("making daemon.run_dir {}", run_dir.display()))?;
    // Bound first: it is also the lock against a second daemon. Served when all is up.
    let api = ApiServer::bind(&config.daemon.control_socket)?;
    let (keeper, holder) = holder::keeper(&config)?;
    let attached = attached(&run_dir);
    let host = Host::start(path.into(), config, attached, keeper, holder.clone())?;
    if let Some(holder) = &holder {
        holder::forget_others(holder, &host.names());
    }
    let (ports, failed) = host.counts();
    let summary = match failed {
        0 => format!("{ports} ports"),
        _ => format!("{ports} ports, {failed} of them could not be started"),
    };
    tracing::info!("ready: {summary}");
    notifier.ready(&summary);
    let watchdog = tokio::spawn(watchdog(notifier.clone()));
    let stop = async {
        let why = tokio::select! {
            signal = signals.end() => signal,
            () = host.stop_asked() => "the control API",
        };
        tracing::info!("stopping: {why}");
        notifier.stopping();
    };
    let served = api.serve(Arc::clone(&host) as Arc<_>, stop).await;
    let forget = host.forgets();
    let stopped = tokio::task::spawn_blocking(move || host.stop()).await;
    watchdog.abort();
    served?;
    stopped.context("stopping the ports")?;
    if let Some(path) = holder.filter(|_| own_holder && forget) {
        holder::end_own(&path);
    }
    tracing::info!("stopped");
    Ok(())
}

/// The ports attached to an earlier daemon. A list that cannot be read is put aside.
fn attached(run_dir: &Path) -> AttachedList {
    AttachedList::load(run_dir).unwrap_or_else(|e| {
        let list = run_dir.join("attached.json");
        let aside = run_dir.join("attached.json.bad");
        let moved = std::fs::rename(&list, &aside);
        tracing::error!(?moved, "{e}; the file is put aside as {}", aside.display());
        AttachedList::empty(run_dir)
    })
}

/// Tells systemd that the control thread lives, for as long as it does.
async fn watchdog(notifier: Notifier) {
    let Some(interval) = notifier.watchdog_interval() else {
        return;
    };
    let mut ticks = tokio::time::interval(interval);
    loop {
        ticks.tick().await;
        notifier.alive();
    }
}
