//! All pipes of one VM: the pipes under way, the threads that move their bytes, and the acceptor of
//! the VM's agent.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use base::sync::lock;
use guest_abi::Reason;
use net::NetPort;

use crate::acceptor::Acceptor;
use crate::config::{Devices, PipesConfig};
use crate::error::PipeError;
use crate::limits::STOP_TIMEOUT;
use crate::metrics::PipeStats;
use crate::namespace::Namespace;
use crate::pipe_info::PipeInfo;
use crate::pipe_set::PipeSet;
use crate::pool::Pool;
use crate::twin_port::forget_journal;

/// The pipes of one VM, from [`VmPipes::start`] to [`VmPipes::stop`].
pub struct VmPipes {
    pipes: Arc<PipeSet>,
    pool: Arc<Pool>,
    acceptor: Arc<Acceptor>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for VmPipes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmPipes").field("vm", &self.pipes.vm()).finish_non_exhaustive()
    }
}

impl VmPipes {
    /// Starts the threads; agents come through [`VmPipes::sink`].
    pub fn start(config: PipesConfig, devices: Arc<dyn Devices>) -> Result<Arc<Self>, PipeError> {
        Namespace::report_missing_rights(&config.vm);
        let failed = |what| {
            let vm = config.vm.clone();
            move |source| PipeError::Io { vm, what, source }
        };
        let no_pool = failed("starting its threads");
        let no_acceptor = failed("starting the thread for its agents");
        let (pool, mut threads) = Pool::start(&config.vm, config.threads).map_err(no_pool)?;
        let pipes = Arc::new(PipeSet::new(config, devices, Arc::clone(&pool)));
        match Acceptor::start(&pipes) {
            Ok((acceptor, thread)) => {
                threads.push(thread);
                Ok(Arc::new(Self { pipes, pool, acceptor, threads: Mutex::new(threads) }))
            }
            Err(error) => {
                pool.stop();
                join_all(threads);
                Err(no_acceptor(error))
            }
        }
    }

    /// A function that takes the agent's connections. It never waits: one connection too many is
    /// closed.
    pub fn sink(&self) -> Arc<dyn Fn(OwnedFd) + Send + Sync> {
        self.acceptor.sink()
    }

    /// Counters.
    pub fn stats(&self) -> &PipeStats {
        self.pipes.stats()
    }

    /// Most pipes at a time.
    pub fn max_pipes(&self) -> u32 {
        self.pipes.max_pipes()
    }

    /// The pipes under way.
    pub fn list(&self) -> Vec<PipeInfo> {
        self.pipes.list()
    }

    /// Follows a change of the VM's ports.
    pub fn ports_changed(&self) {
        self.pipes.ports_changed();
    }

    /// Restores the connections of a port that has just been made, before its first packet: those
    /// that were shifted under the last daemon stay so.
    pub fn restore(&self, net: &Arc<NetPort>) {
        self.pipes.ports().restore(net);
    }

    /// Removes the journal of a port of a VM without pipes: what another daemon knew of its
    /// connections will not be true any more, should the VM have pipes again.
    pub fn forget_journal(run_dir: &Path, net: &NetPort) {
        forget_journal(run_dir, net);
    }

    /// Forgets a port that will not come back, and its connections.
    pub fn forget(&self, net: &NetPort) {
        self.pipes.ports().forget(net);
    }

    /// Ends everything: pipes hand their connections back where they are, and those that cannot in
    /// time lose them. Connections that are shifted stay so under the next daemon.
    pub fn stop(&self) {
        self.pool.drain(Reason::HostGone, STOP_TIMEOUT);
        self.acceptor.stop();
        self.pool.stop();
        join_all(std::mem::take(&mut *lock(&self.threads)));
        self.pool.clear();
        // The switch goes on shifting until the ports' sessions have ended.
        self.pipes.ports().clear();
    }
}

fn join_all(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        // A thread that panicked has logged it.
        let _ = thread.join();
    }
}
