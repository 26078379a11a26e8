//! Loads that attack sessions: a thread for each socket, beside the one that plays all others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crate::error::FrontendError;
use crate::hostile;

use super::plan::{Behaviour, Plan};

/// Theirs is the time that the playing thread leaves: it is to be the back end that others' attacks slow
/// down, and not the front end of the good ones.
const NICE: i32 = 19;

/// One socket's.
struct Attacker {
    load: usize,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<std::io::Result<()>>,
}

/// See the module's text.
pub struct Attackers {
    ended: Arc<AtomicBool>,
    all: Vec<Attacker>,
}

impl Attackers {
    /// Begins at once.
    pub fn start(plan: &Plan) -> Result<Self, FrontendError> {
        let ended = Arc::<AtomicBool>::default();
        let mut all = Vec::new();
        let loads = plan.loads.iter().enumerate();
        for (load, entry) in loads.filter(|l| l.1.behaviour == Behaviour::HostileSession) {
            for socket in entry.sockets() {
                let (socket, rounds) = (socket.clone(), Arc::<AtomicU64>::default());
                let (ended, counted) = (Arc::clone(&ended), Arc::clone(&rounds));
                let run = move || {
                    rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE)?;
                    hostile::attack(&socket, &ended, &counted)
                };
                let thread = std::thread::Builder::new().spawn(run);
                let thread = thread.map_err(FrontendError::io("starting a thread"))?;
                all.push(Attacker { load, rounds, thread });
            }
        }
        Ok(Self { ended, all })
    }

    /// Ends them. Load and rounds of each.
    pub fn stop(self) -> Result<Vec<(usize, u64)>, FrontendError> {
        self.ended.store(true, Ordering::Relaxed);
        let stop = |attacker: Attacker| {
            let ended = attacker.thread.join().unwrap_or(Ok(()));
            ended.map_err(FrontendError::io("attacking"))?;
            Ok((attacker.load, attacker.rounds.load(Ordering::Relaxed)))
        };
        self.all.into_iter().map(stop).collect()
    }
}
