//! One pipe from a file to a socket: from the agent's words to the answer. Its steps run on the pool's
//! threads, one at a time.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use net::flow::{FlowError, FlowEvent, FlowKey, FlowSnapshot, Snapshot};

use crate::agent::Agent;
use crate::file::Source;
use crate::limits::{DRAIN_TIMEOUT, QUANTUM_BYTES, RECHECK, RECHECK_SOON, SETTLE_TIMEOUT};
use crate::message::Socket;
use crate::metrics::PipeStats;
use crate::pool::Pool;
use crate::twin::{Twin, TwinState};
use crate::vm::TwinPort;

/// What a step asks for.
pub(crate) enum Next {
    /// The next step, after those of others.
    Again,
    /// Something will happen; then at the latest.
    Wait(Instant),
    /// The answer can be given.
    Over,
}

/// Events that wait for the next step.
mod mark {
    pub const RESET: u32 = 1;
    pub const CANCELLED: u32 = 2;
}

/// Where a pipe is.
enum State {
    /// The guest's last bytes may still be on their way.
    Settling,
    /// The twin is fed.
    Moving(Twin),
    /// The twin has all that it will get, and the peer has not acknowledged all of that.
    Draining(Twin),
    Over,
}

/// The changing part of a pipe.
struct Work {
    state: State,
    source: Source,
    /// Bytes given to the twin.
    given_bytes: u64,
    /// Why it ends.
    reason: Reason,
    /// Since when nobody wants it any more.
    given_up: Option<Instant>,
}

/// See the module's text.
pub(crate) struct Job {
    /// Unique in this daemon.
    pub token: u64,
    /// What the agent calls it.
    id: u64,
    agent: Arc<Agent>,
    port: Arc<TwinPort>,
    socket: Socket,
    pub len_bytes: u64,
    begun: Instant,
    pub moved_bytes: AtomicU64,
    marks: AtomicU32,
    cancelled_for: AtomicU32,
    work: Mutex<Work>,
    timer: Mutex<Option<Instant>>,
    stats: Arc<PipeStats>,
}

impl Work {
    fn is_overdue(&self) -> bool {
        self.given_up.is_some_and(|since| since.elapsed() > DRAIN_TIMEOUT)
    }
}

impl Job {
    /// A pipe that has not begun. The connection is one of `port`.
    pub fn new(
        token: u64,
        (id, agent): (u64, Arc<Agent>),
        port: Arc<TwinPort>,
        socket: Socket,
        source: Source,
        len_bytes: u64,
        stats: Arc<PipeStats>,
    ) -> Self {
        let reason = Reason::Complete;
        let work = Work { state: State::Settling, source, given_bytes: 0, reason, given_up: None };
        Self {
            token,
            id,
            agent,
            port,
            socket,
            len_bytes,
            begun: Instant::now(),
            moved_bytes: AtomicU64::default(),
            marks: AtomicU32::default(),
            cancelled_for: AtomicU32::default(),
            work: Mutex::new(work),
            timer: Mutex::default(),
            stats,
        }
    }

    /// Whose it is, and what that one calls it.
    pub fn is_of(&self, agent: &Agent, id: Option<u64>) -> bool {
        std::ptr::eq(&*self.agent, agent) && id.is_none_or(|id| id == self.id)
    }

    /// The connection.
    pub fn key(&self) -> &FlowKey {
        &self.socket.key
    }

    /// One word about where it is; none while a step runs.
    pub fn state(&self) -> Option<&'static str> {
        Some(match self.work.try_lock().ok()?.state {
            State::Settling => "settling",
            State::Moving(_) => "moving",
            State::Draining(_) => "draining",
            State::Over => "over",
        })
    }

    pub fn timer(&self) -> MutexGuard<'_, Option<Instant>> {
        self.timer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event of the switch.
    pub fn note(&self, event: FlowEvent) {
        if event == FlowEvent::Reset {
            self.marks.fetch_or(mark::RESET, Ordering::Release);
        }
    }

    /// It shall end soon.
    pub fn cancel(&self, reason: Reason) {
        self.cancelled_for.store(reason as u32, Ordering::Relaxed);
        self.marks.fetch_or(mark::CANCELLED, Ordering::Release);
    }

    fn has(&self, mark: u32) -> bool {
        self.marks.load(Ordering::Acquire) & mark != 0
    }

    /// One step.
    pub fn advance(&self, pool: &Pool) -> Next {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let state = std::mem::replace(&mut work.state, State::Over);
        if self.has(mark::RESET) && !matches!(state, State::Over) {
            return self.give_up(&mut work, Reason::FlowReset);
        }
        let is_cancelled = self.has(mark::CANCELLED);
        if is_cancelled {
            work.given_up.get_or_insert_with(Instant::now);
        }
        match state {
            State::Settling if is_cancelled => self.end(&mut work, self.cancel_reason(), 0),
            State::Settling => self.settle(&mut work, pool),
            State::Moving(twin) if is_cancelled => self.stop(&mut work, twin, self.cancel_reason()),
            State::Moving(twin) => self.give(&mut work, twin, pool),
            State::Draining(twin) => self.drain(&mut work, twin, pool),
            State::Over => Next::Over,
        }
    }

    fn cancel_reason(&self) -> Reason {
        Reason::from_number(self.cancelled_for.load(Ordering::Relaxed) as u16)
    }

    /// Waits until the switch has seen all that the guest has sent, then takes over.
    fn settle(&self, work: &mut Work, pool: &Pool) -> Next {
        let sent_bytes = self.socket.end.sent_bytes.get();
        match self.port.net.flow_snapshot(self.socket.key, sent_bytes, self.token) {
            Ok(Snapshot::Ready(taken)) => match self.take_over(&taken, pool) {
                Ok(twin) => {
                    work.state = State::Moving(twin);
                    Next::Again
                }
                Err(reason) => self.end(work, reason, 0),
            },
            Ok(Snapshot::Waiting) if self.begun.elapsed() < SETTLE_TIMEOUT => {
                work.state = State::Settling;
                Next::Wait(self.begun + SETTLE_TIMEOUT)
            }
            Ok(Snapshot::Waiting) => self.end(work, Reason::NotSettled, 0),
            Err(error) => self.end(work, reason_of(error), 0),
        }
    }

    fn take_over(&self, taken: &FlowSnapshot, pool: &Pool) -> Result<Twin, Reason> {
        let begun = Instant::now();
        let Socket { key, end } = &self.socket;
        let state = twin_state(key, end, taken)?;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            tracing::warn!(
                port = self.port.net.name(),
                "taking a connection over: {what}: {error}"
            );
            Reason::TwinFailed
        };
        let twin = self.port.namespace.twin(&state).map_err(|e| failed("making its twin", &e))?;
        pool.watch(self.token, twin.as_fd()).map_err(|e| failed("watching its twin", &e))?;
        let len = u32::try_from(self.len_bytes).map_err(|_| Reason::Malformed)?;
        self.port.net.flow_start(self.socket.key, self.token, *taken, len).map_err(reason_of)?;
        self.stats.hand_over(begun.elapsed());
        Ok(twin)
    }

    /// Gives the twin bytes until it takes no more, or others are to have their turn.
    fn give(&self, work: &mut Work, twin: Twin, pool: &Pool) -> Next {
        let mut given = 0;
        while given < QUANTUM_BYTES {
            match work.source.send(twin.as_fd(), QUANTUM_BYTES - given) {
                Ok(0) => {
                    let is_whole = work.given_bytes == self.len_bytes;
                    let reason = if is_whole { Reason::Complete } else { Reason::DiskFailed };
                    return self.stop(work, twin, reason);
                }
                Ok(n) => {
                    given += n;
                    work.given_bytes += n as u64;
                    self.moved_bytes.store(work.given_bytes, Ordering::Relaxed);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // It may take bytes again already: then the pool hears at once.
                    let armed = pool.arm(self.token, twin.as_fd());
                    work.state = State::Moving(twin);
                    return match armed {
                        Ok(()) => Next::Wait(Instant::now() + RECHECK),
                        Err(_) => Next::Again,
                    };
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return self.give_failed(work, twin, &e),
            }
        }
        work.state = State::Moving(twin);
        Next::Again
    }

    fn give_failed(&self, work: &mut Work, twin: Twin, error: &io::Error) -> Next {
        if twin.info().is_ok_and(|info| info.is_established()) {
            tracing::warn!(port = self.port.net.name(), "reading for a pipe: {error}");
            return self.stop(work, twin, Reason::DiskFailed);
        }
        drop(twin);
        self.give_up(work, Reason::PeerSilent)
    }

    /// The twin gets no more.
    fn stop(&self, work: &mut Work, twin: Twin, reason: Reason) -> Next {
        work.reason = reason;
        work.state = State::Draining(twin);
        if work.given_bytes == self.len_bytes {
            return Next::Again;
        }
        // The switch must not wait for what will never come.
        let len = work.given_bytes as u32;
        match self.port.net.flow_retarget(self.socket.key, self.token, len) {
            Ok(_) => Next::Again,
            Err(_) => self.give_up(work, Reason::FlowReset),
        }
    }

    /// Waits until the peer has acknowledged everything.
    fn drain(&self, work: &mut Work, twin: Twin, pool: &Pool) -> Next {
        match (twin.unacked_bytes(), twin.info()) {
            (Ok(0), _) => {
                let len = work.given_bytes;
                drop(twin);
                self.end(work, work.reason, len)
            }
            (Ok(_), Ok(info)) if info.is_established() && !work.is_overdue() => {
                // The switch tells when the last acknowledgement comes, the twin when it fails.
                let len = work.given_bytes as u32;
                let passed = self.port.net.flow_retarget(self.socket.key, self.token, len);
                let soon = if passed == Ok(true) { RECHECK_SOON } else { RECHECK };
                let _ = pool.arm_for_failure(self.token, twin.as_fd());
                work.state = State::Draining(twin);
                Next::Wait(Instant::now() + soon)
            }
            _ => {
                drop(twin);
                self.give_up(work, Reason::PeerSilent)
            }
        }
    }

    /// Hands the connection back.
    fn end(&self, work: &mut Work, reason: Reason, len_bytes: u64) -> Next {
        let finished = self.port.net.flow_finish(self.socket.key, self.token, len_bytes as u32);
        if finished == Err(FlowError::Broken) {
            // It was reset with that.
            return self.lose(work, Reason::FlowReset);
        }
        self.moved_bytes.store(len_bytes, Ordering::Relaxed);
        work.reason = reason;
        Next::Over
    }

    /// The connection is lost, or was reset.
    fn give_up(&self, work: &mut Work, reason: Reason) -> Next {
        // One that is reset already has nothing to be told.
        let _ = self.port.net.flow_reset(self.socket.key, self.token);
        self.lose(work, reason)
    }

    /// Nobody knows what of the bytes arrived.
    fn lose(&self, work: &mut Work, reason: Reason) -> Next {
        self.moved_bytes.store(0, Ordering::Relaxed);
        work.reason = reason;
        Next::Over
    }

    /// Tells the agent; once, when it is over.
    pub fn answer(&self) {
        let reason = self.work.lock().unwrap_or_else(PoisonError::into_inner).reason;
        let moved_bytes = self.moved_bytes.load(Ordering::Relaxed);
        self.stats.end(reason, moved_bytes, self.begun.elapsed());
        self.agent.done(self.id, moved_bytes, reason);
    }

    /// How long it has been there.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }
}

/// What a flow's error is to an agent.
pub(crate) fn reason_of(error: FlowError) -> Reason {
    match error {
        FlowError::Unknown | FlowError::Off => Reason::NoFlow,
        FlowError::Closing => Reason::FlowClosed,
        FlowError::Busy => Reason::FlowBusy,
        FlowError::Changed => Reason::NotSettled,
        FlowError::Broken => Reason::FlowReset,
    }
}

/// Largest window scale (RFC 7323, 2.3).
const MAX_SCALE: u8 = 14;

/// The twin's state, from what the agent says (checked) and what the switch saw.
fn twin_state(
    key: &FlowKey,
    end: &guest_abi::pipe::SocketEnd,
    taken: &FlowSnapshot,
) -> Result<TwinState, Reason> {
    if end.send_scale > MAX_SCALE || end.receive_scale > MAX_SCALE || end.mss.get() < 64 {
        return Err(Reason::FlowOptions);
    }
    Ok(TwinState {
        local: (key.local, key.local_port).into(),
        remote: (key.remote, key.remote_port).into(),
        options: end.options,
        send_scale: end.send_scale,
        receive_scale: end.receive_scale,
        mss: end.mss.get(),
        send_seq: taken.send_seq,
        receive_seq: taken.receive_seq,
        // The peer's window begins behind what it has acknowledged.
        send_window_bytes: (u32::from(taken.send_window) << end.send_scale)
            .saturating_sub(taken.send_seq.wrapping_sub(taken.acked_seq)),
        receive_window_bytes: u32::from(taken.receive_window) << end.receive_scale,
        timestamp: taken.timestamp,
        congestion: end.congestion,
        cwnd: end.cwnd.get(),
        rtt_us: end.rtt_us.get(),
    })
}
