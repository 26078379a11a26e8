//! `millrace serve`: start, run, stop.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use config::{Config, HolderConfig};
use control::api::ApiServer;
use control::systemd::Notifier;
use tokio::signal::unix::{Signal, SignalKind};

use crate::cli::Serve;
use crate::host::Host;
use crate::host::runtime_changes::RuntimeChanges;
use crate::process::EndSignals;
use crate::{exit, holder, journal, log, process};

/// Runs the daemon until it is told to stop.
pub fn serve(args: &Serve) -> anyhow::Result<u8> {
    let config = match config::load(&args.file.path()) {
        Ok(config) => config,
        Err(problems) => {
            journal::print_error(&problems.to_string());
            return Ok(exit::FAILED);
        }
    };
    if args.check_only {
        return Ok(exit::OK);
    }
    log::init(&config.daemon.log, args.log_json)?;
    process::raise_limits();
    let runtime = process::control_thread()?;
    let served = runtime.block_on(run(args, config));
    // A request that still waits for a device must not keep the process.
    runtime.shutdown_background();
    served?;
    Ok(exit::OK)
}

/// Waits for a signal that ends the daemon.
async fn told(signals: &mut EndSignals, hangup: &mut Signal) -> &'static str {
    loop {
        tokio::select! {
            why = signals.next() => return why,
            _ = hangup.recv() => tracing::info!(
                "SIGHUP: the config is read at the start only; use attach and detach"
            ),
        }
    }
}

async fn run(args: &Serve, config: Config) -> anyhow::Result<()> {
    let mut signals = EndSignals::new()?;
    let mut hangup = process::take_over(SignalKind::hangup())?;
    let notifier = Notifier::from_env();
    let run_dir = config.daemon.run_dir.clone();
    let own_holder = config.daemon.holder == HolderConfig::Own;
    std::fs::create_dir_all(&run_dir)
        .with_context(|| format!("making daemon.run_dir {}", run_dir.display()))?;
    // Bound first: it is also the lock against a second daemon. Served when all is up.
    let api = ApiServer::bind(&config.daemon.control_socket)?;
    let readers = config.daemon.read_socket.as_ref().map(ApiServer::bind_read_only).transpose()?;
    let holders = holder::open_session_store(&config, args.default_holder.as_deref())?;
    let holder = holders.socket.clone();
    let runtime_changes = RuntimeChanges::load(&run_dir);
    let host = Host::start(
        args.file.path(),
        config,
        runtime_changes,
        holders.session_store,
        holder.clone(),
    )?;
    for socket in holder.iter().chain(&holders.before) {
        holder::forget_others(socket, &host.names());
    }
    tell_ready(&host, &notifier);
    let watched = Arc::clone(&host);
    let watchdog = notifier
        .watchdog_interval()
        .map(|every| tokio::spawn(watchdog(notifier.clone(), every, move || watched.is_stalled())));
    let stop = async {
        let why = tokio::select! {
            signal = told(&mut signals, &mut hangup) => signal,
            () = host.stop_asked() => "the control API",
        };
        tracing::info!("stopping: {why}");
        notifier.stopping();
    };
    let plane = Arc::clone(&host) as Arc<_>;
    let readers =
        readers.map(|socket| tokio::spawn(socket.serve(plane, std::future::pending::<()>())));
    let served = api.serve(Arc::clone(&host) as Arc<_>, stop).await;
    let forget = host.forgets();
    let stopped = tokio::task::spawn_blocking(move || host.stop()).await;
    if let Some(task) = watchdog {
        task.abort();
    }
    if let Some(task) = readers {
        task.abort();
        // Its socket goes with it. That it was cut short is no error.
        let _ = task.await;
    }
    served?;
    stopped.context("stopping the ports")?;
    holder::end_left(&run_dir, &holders.before);
    if let Some(path) = holder.filter(|_| own_holder && forget) {
        holder::end_own(&path);
    }
    tracing::info!("stopped");
    Ok(())
}

/// Tells the manager that all ports are there, as soon as the last image has been checked: VMs that
/// it starts after us find their disks.
fn tell_ready(host: &Arc<Host>, notifier: &Notifier) {
    let (waiting, notifier) = (Arc::clone(host), notifier.clone());
    let tell = move || {
        if waiting.wait_for_checks() {
            let (ports, failed, _) = waiting.counts();
            let summary = match failed {
                0 => format!("{ports} ports"),
                _ => format!("{ports} ports, {failed} of them could not be started"),
            };
            tracing::info!("ready: {summary}");
            notifier.ready(&summary);
        }
    };
    match host.counts() {
        (_, _, 0) => tell(),
        (ports, _, checked) => {
            tracing::info!("serving: {ports} ports, the images of {checked} are being checked");
            tokio::task::spawn_blocking(tell);
        }
    }
}

/// Tells systemd that the control thread lives, for as long as it does and no sidecore hangs. One
/// that no signal gets free is a case for a restart: the holder keeps the sessions.
async fn watchdog(notifier: Notifier, every: Duration, is_stalled: impl Fn() -> bool) {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        if !is_stalled() {
            notifier.alive();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn systemd_hears_nothing_while_a_sidecore_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let stalled = Arc::new(AtomicBool::new(true));
        let seen = Arc::clone(&stalled);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let tick = Duration::from_millis(5);
            let is_stalled = move || seen.load(Ordering::SeqCst);
            let task = tokio::spawn(watchdog(Notifier::to_socket(&path), tick, is_stalled));
            tokio::time::sleep(20 * tick).await;
            let mut text = [0u8; 32];
            assert!(manager.recv(&mut text).is_err(), "the manager is told we live");
            stalled.store(false, Ordering::SeqCst);
            let told = loop {
                tokio::time::sleep(tick).await;
                if let Ok(n) = manager.recv(&mut text) {
                    break n;
                }
            };
            assert_eq!(&text[..told], b"WATCHDOG=1");
            task.abort();
        });
    }
}
