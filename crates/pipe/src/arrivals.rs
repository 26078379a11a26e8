//! Who is the VM's agent: one at a time, and a new one takes the place of the last.
//!
//! A connection is heard out first, on a thread of its own: until its hello is right, the agent that is
//! there goes on. Where the VM has a secret, the hello must have it. So a program of the guest that may
//! use low ports and does not know the secret cannot take the agent's place.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use base::log_limit::LogLimit;
use guest_abi::Reason;

use crate::agent::{Agent, Session};
use crate::vm::VmPipes;

/// Connections that are heard out at the same time. One more ends the oldest of them, but for those
/// whose hello was right: agents speak at once.
const MAX_NEWCOMERS: usize = 4;

/// What the acceptor is told.
pub(crate) enum Arrival {
    /// Somebody has connected.
    Stream(OwnedFd),
    /// Its hello is right.
    Proved(Box<Session>),
    /// The end.
    Stop,
}

/// A thread that serves a stream, and how to end it.
struct Served {
    agent: Arc<Agent>,
    thread: JoinHandle<()>,
}

impl Served {
    fn end(self) {
        self.agent.close();
        // One that panicked has told so.
        let _ = self.thread.join();
    }
}

/// Takes agents until the end.
pub(crate) fn accept(pipes: &Weak<VmPipes>, arriving: Receiver<Arrival>) {
    let (mut current, mut newcomers) = (None::<Served>, VecDeque::<Served>::new());
    let log = Arc::<LogLimit>::default();
    while let Ok(arrival) = arriving.recv() {
        let Some(pipes) = pipes.upgrade() else { break };
        match arrival {
            Arrival::Stop => break,
            Arrival::Stream(fd) => {
                newcomers.retain(|newcomer| !newcomer.thread.is_finished());
                if newcomers.len() == MAX_NEWCOMERS {
                    let oldest = newcomers.iter().position(|n| !n.agent.is_proved());
                    // Joined by nobody: it may be handing itself over to this thread.
                    match oldest.and_then(|at| newcomers.remove(at)) {
                        Some(oldest) => oldest.agent.close(),
                        None => continue,
                    }
                }
                let log = Arc::clone(&log);
                newcomers.extend(start(&pipes.clone(), fd, move |session| {
                    hear_out(session, &pipes, &log);
                }));
            }
            // It was heard out as it was closed.
            Arrival::Proved(session) if session.agent.is_closed() => {}
            Arrival::Proved(session) => {
                if let Some(last) = current.take() {
                    last.end();
                }
                current = spawn(&pipes.clone(), *session, move |session| {
                    let agent = Arc::clone(&session.agent);
                    let end = session.serve(&pipes);
                    tracing::info!(vm = pipes.vm(), "the agent has gone: {end}");
                    pipes.cancel(&agent, None, Reason::Cancelled);
                });
            }
        }
    }
    // Nobody waits to be taken any more.
    drop(arriving);
    current.into_iter().chain(newcomers).for_each(Served::end);
}

/// The hello, on a thread of its own.
fn hear_out(mut session: Session, pipes: &VmPipes, log: &LogLimit) {
    match session.hear_hello(pipes.secret()) {
        // Fails at the end only.
        Ok(()) => {
            session.agent.prove();
            _ = pipes.arrivals().send(Arrival::Proved(Box::new(session)));
        }
        Err(error) => {
            // The acceptor has the stream as well.
            session.agent.close();
            pipes.stats().unproved.fetch_add(1, Ordering::Relaxed);
            if let Some(left_out) = log.admit() {
                tracing::warn!(vm = pipes.vm(), left_out, "no agent: {error}");
            }
        }
    }
}

fn start(
    pipes: &VmPipes,
    fd: OwnedFd,
    serve: impl FnOnce(Session) + Send + 'static,
) -> Option<Served> {
    match Session::new(fd) {
        Ok(session) => spawn(pipes, session, serve),
        Err(error) => {
            tracing::warn!(vm = pipes.vm(), "the agent's stream: {error}");
            None
        }
    }
}

fn spawn(
    pipes: &VmPipes,
    session: Session,
    serve: impl FnOnce(Session) + Send + 'static,
) -> Option<Served> {
    let agent = Arc::clone(&session.agent);
    match std::thread::Builder::new().name("agent".into()).spawn(move || serve(session)) {
        Ok(thread) => Some(Served { agent, thread }),
        Err(error) => {
            tracing::warn!(vm = pipes.vm(), "a thread for the agent: {error}");
            None
        }
    }
}
