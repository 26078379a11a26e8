//! The acceptor of a VM's agent: one at a time is the agent, and a new one takes the place of the
//! last.
//!
//! A connection must say its hello first, on a thread of its own: until that is right, the agent
//! that is there goes on. Where the VM has a secret, the hello must have it. So a program of the
//! guest that may use low ports and does not know the secret cannot take the agent's place.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use base::log_limit::LogLimit;
use guest_abi::Reason;

use crate::agent_session::AgentSession;
use crate::line::Line;
use crate::pipe_set::PipeSet;

/// Connections that wait for the acceptor, both new ones and those whose hello was right.
const WAITING_AGENTS: usize = 16;

/// Connections whose hello is read at the same time. One more ends the oldest of them, but for
/// those whose hello was right: agents speak at once.
const MAX_NEWCOMERS: usize = 4;

/// A message to the acceptor's thread.
pub(crate) enum Arrival {
    /// A new connection.
    Stream(OwnedFd),
    /// A connection whose hello is right.
    Proved(Box<AgentSession>),
    /// The end of the acceptor.
    Stop,
}

/// The acceptor of one VM.
pub(crate) struct Acceptor {
    pipes: Arc<PipeSet>,
    arrivals: SyncSender<Arrival>,
}

/// A thread that serves a stream, and the line by which it is ended.
struct ServedLine {
    line: Arc<Line>,
    thread: JoinHandle<()>,
}

impl ServedLine {
    fn end(self) {
        self.line.close();
        // A thread that panicked has logged it.
        let _ = self.thread.join();
    }
}

impl Acceptor {
    /// Starts the acceptor's thread. It ends with [`Acceptor::stop`].
    pub fn start(pipes: &Arc<PipeSet>) -> io::Result<(Arc<Self>, JoinHandle<()>)> {
        let (arrivals, arriving) = sync_channel(WAITING_AGENTS);
        let acceptor = Arc::new(Self { pipes: Arc::clone(pipes), arrivals });
        let own = Arc::downgrade(&acceptor);
        let builder = std::thread::Builder::new().name(format!("agent {}", pipes.vm()));
        let thread = builder.spawn(move || accept_all(&own, arriving))?;
        Ok((acceptor, thread))
    }

    /// A function that takes the agent's connections. It never waits: one connection too many is
    /// closed.
    pub fn sink(&self) -> Arc<dyn Fn(OwnedFd) + Send + Sync> {
        let arrivals = self.arrivals.clone();
        Arc::new(move |fd| _ = arrivals.try_send(Arrival::Stream(fd)))
    }

    /// Tells the thread to end, with the agent's session.
    pub fn stop(&self) {
        // Full only with connections that wait: the acceptor takes them first.
        let _ = self.arrivals.send(Arrival::Stop);
    }

    /// Reads a connection's hello, on a thread of its own.
    fn read_hello(&self, mut session: AgentSession, log: &LogLimit) {
        match session.read_hello(self.pipes.secret()) {
            Ok(()) => {
                session.line.prove();
                // Fails at the end only.
                _ = self.arrivals.send(Arrival::Proved(Box::new(session)));
            }
            Err(error) => {
                // The acceptor has the stream as well.
                session.line.close();
                self.pipes.stats().unproved.fetch_add(1, Ordering::Relaxed);
                if let Some(left_out) = log.admit() {
                    let vm = self.pipes.vm();
                    tracing::warn!(vm, left_out, "a connection is no agent: {error}");
                }
            }
        }
    }

    /// Serves the agent until its stream ends.
    fn serve(&self, session: AgentSession) {
        let line = Arc::clone(&session.line);
        let end = session.serve(&self.pipes);
        tracing::info!(vm = self.pipes.vm(), "the agent has gone: {end}");
        self.pipes.cancel(&line, None, Reason::Cancelled);
    }

    /// A session on a new connection, on a thread of its own; none: it is closed.
    fn start_newcomer(
        &self,
        fd: OwnedFd,
        serve: impl FnOnce(AgentSession) + Send + 'static,
    ) -> Option<ServedLine> {
        match AgentSession::new(fd) {
            Ok(session) => self.spawn(session, serve),
            Err(error) => {
                tracing::warn!(vm = self.pipes.vm(), "setting up an agent's stream: {error}");
                None
            }
        }
    }

    fn spawn(
        &self,
        session: AgentSession,
        serve: impl FnOnce(AgentSession) + Send + 'static,
    ) -> Option<ServedLine> {
        let line = Arc::clone(&session.line);
        match std::thread::Builder::new().name("agent".into()).spawn(move || serve(session)) {
            Ok(thread) => Some(ServedLine { line, thread }),
            Err(error) => {
                tracing::warn!(vm = self.pipes.vm(), "starting a thread for an agent: {error}");
                None
            }
        }
    }
}

/// Takes agents until the end.
fn accept_all(acceptor: &Weak<Acceptor>, arriving: Receiver<Arrival>) {
    let (mut current, mut newcomers) = (None::<ServedLine>, VecDeque::<ServedLine>::new());
    let log = Arc::<LogLimit>::default();
    while let Ok(arrival) = arriving.recv() {
        let Some(acceptor) = acceptor.upgrade() else { break };
        match arrival {
            Arrival::Stop => break,
            Arrival::Stream(fd) => {
                newcomers.retain(|newcomer| !newcomer.thread.is_finished());
                if newcomers.len() == MAX_NEWCOMERS {
                    let oldest = newcomers.iter().position(|n| !n.line.is_proved());
                    // Not joined: it may be handing itself over to this thread.
                    match oldest.and_then(|at| newcomers.remove(at)) {
                        Some(oldest) => oldest.line.close(),
                        None => continue,
                    }
                }
                let (log, own) = (Arc::clone(&log), Arc::clone(&acceptor));
                newcomers.extend(
                    acceptor.start_newcomer(fd, move |session| own.read_hello(session, &log)),
                );
            }
            // It was closed while its hello was read.
            Arrival::Proved(session) if session.line.is_closed() => {}
            Arrival::Proved(session) => {
                if let Some(last) = current.take() {
                    last.end();
                }
                let own = Arc::clone(&acceptor);
                current = acceptor.spawn(*session, move |session| own.serve(session));
            }
        }
    }
    // Nobody waits to be taken any more.
    drop(arriving);
    current.into_iter().chain(newcomers).for_each(ServedLine::end);
}
