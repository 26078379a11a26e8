//! The sending half of a connection as a pipe's sink: from its takeover to its return.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::SocketEnd;
use net::flow::{FlowError, FlowSnapshot, Relief, Snapshot};

use crate::connection::{Connection, reason_of};
use crate::limits::{RECHECK, RECHECK_SOON, SETTLE_TIMEOUT, SILENCE_TIMEOUT};
use crate::message::{self, Socket};
use crate::pool::Pool;
use crate::twin::Twin;

/// See the module's text.
pub(crate) struct Sending {
    to: Connection,
    /// Of the reservation, so that it need not be asked for twice.
    taken: Option<FlowSnapshot>,
    since: Instant,
    /// How long the takeover took, from knowing its numbers to steering it.
    pub handover: Duration,
    twin: Option<Twin>,
    /// Bytes given to the twin.
    pub given_bytes: u64,
    /// What the switch waits for.
    target_bytes: u64,
    /// Its source is not needed any more.
    pub is_detached: bool,
    /// The twin has measured a round trip.
    has_measured: bool,
}

/// How far the peer is.
pub(crate) enum Drained {
    /// It has acknowledged everything.
    Yes,
    /// Not yet: look again then.
    Not(Instant),
    /// It never will.
    Failed,
}

impl Sending {
    /// Of a connection that was reserved with this answer.
    pub fn new(to: Connection, answer: Snapshot) -> Self {
        let taken = match answer {
            Snapshot::Ready(taken) => Some(taken),
            Snapshot::Waiting => None,
        };
        Self {
            to,
            taken,
            since: Instant::now(),
            handover: Duration::ZERO,
            twin: None,
            given_bytes: 0,
            target_bytes: 0,
            is_detached: false,
            has_measured: false,
        }
    }

    /// The guest has sent more since it was reserved. False: it is another connection.
    pub fn renew(&mut self, end: SocketEnd) -> bool {
        let same = message::socket(end).is_ok_and(|socket| socket.key == self.to.socket.key);
        if same {
            self.to.socket.end = end;
            (self.taken, self.since) = (None, Instant::now());
        }
        same
    }

    /// The connection.
    pub fn socket(&self) -> &Socket {
        &self.to.socket
    }

    /// Waits until the switch has seen all that the guest has sent, then takes over, for `len_bytes`.
    /// `Some`: not yet, look again then.
    pub fn settle(&mut self, len_bytes: u64, pool: &Pool) -> Result<Option<Instant>, Reason> {
        let Connection { port, socket, token } = &self.to;
        let taken = match self.taken.take() {
            Some(taken) => taken,
            None => {
                let sent_bytes = socket.end.sent_bytes.get();
                match port.net.flow_snapshot(socket.key, sent_bytes, *token).map_err(reason_of)? {
                    Snapshot::Ready(taken) => taken,
                    Snapshot::Waiting if self.since.elapsed() < SETTLE_TIMEOUT => {
                        return Ok(Some(self.since + SETTLE_TIMEOUT));
                    }
                    Snapshot::Waiting => return Err(Reason::NotSettled),
                }
            }
        };
        let begun = Instant::now();
        let twin = self.to.twin(&taken, false, pool)?;
        let len = u32::try_from(len_bytes).map_err(|_| Reason::Malformed)?;
        port.net.flow_start(socket.key, *token, taken, len).map_err(reason_of)?;
        (self.twin, self.target_bytes) = (Some(twin), len_bytes);
        self.handover = begun.elapsed();
        Ok(None)
    }

    /// Where bytes are given; none before it has settled.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.twin.as_ref().map(Twin::as_fd)
    }

    /// Whether the twin can still send.
    pub fn is_well(&self) -> bool {
        self.twin.as_ref().is_some_and(|twin| twin.info().is_ok_and(|info| info.is_established()))
    }

    /// Whether the peer is still there. Asked whenever the twin is waited for.
    pub fn is_heard(&mut self) -> bool {
        let Some(Ok(info)) = self.twin.as_ref().map(Twin::info) else { return true };
        if info.rtt_us > 0 && !std::mem::replace(&mut self.has_measured, true) {
            // Else it waits less before it sends again, and gives up earlier.
            let _ = self.twin.as_ref().map(Twin::wait_as_usual);
        }
        u128::from(info.silent_ms) < SILENCE_TIMEOUT.as_millis()
    }

    /// The pipe goes on when the twin takes bytes, or fails.
    pub fn arm(&self, pool: &Pool) -> bool {
        self.fd().is_some_and(|fd| pool.arm_for_output(self.to.token, fd).is_ok())
    }

    /// The twin gets no more: the switch must not wait for what will never come.
    pub fn stop(&mut self) {
        if self.given_bytes != self.target_bytes {
            self.target_bytes = self.given_bytes;
            self.retarget();
        }
    }

    /// Whether the switch has seen everything acknowledged.
    fn retarget(&self) -> bool {
        let Connection { port, socket, token } = &self.to;
        port.net.flow_retarget(socket.key, *token, self.given_bytes as u32) == Ok(true)
    }

    /// Looks whether the peer has acknowledged everything.
    pub fn drain(&mut self, pool: &Pool) -> Drained {
        let is_heard = self.is_heard();
        let Some(twin) = &self.twin else { return Drained::Yes };
        match (twin.unacked_bytes(), twin.info()) {
            (Ok(0), _) => Drained::Yes,
            (Ok(_), Ok(info)) if info.is_established() && is_heard => {
                // The switch tells when the last acknowledgement comes, the twin when it fails.
                let soon = if self.retarget() { RECHECK_SOON } else { RECHECK };
                let _ = pool.arm_for_failure(self.to.token, twin.as_fd());
                Drained::Not(Instant::now() + soon)
            }
            _ => Drained::Failed,
        }
    }

    /// Lets go of the source: what the peer has not acknowledged is copied (by `copy`: offset in the pipe,
    /// and length) into another twin, which takes the place of this one. `Err`: the connection is lost.
    pub fn detach(
        &mut self,
        copy: impl FnOnce(u64, u64) -> io::Result<Vec<u8>>,
        pool: &Pool,
    ) -> Result<(), Reason> {
        let Connection { port, socket, token } = &self.to;
        let Relief { state, acked_bytes, sent_bytes } =
            port.net.flow_relief(socket.key, *token).map_err(reason_of)?;
        let left = self.given_bytes.saturating_sub(acked_bytes.into());
        let bytes = copy(acked_bytes.into(), left).map_err(|error| {
            tracing::warn!("copying for a twin: {error}");
            Reason::DiskFailed
        })?;
        let (sent, unsent) =
            bytes.split_at_checked(sent_bytes as usize).ok_or(Reason::TwinFailed)?;
        // One connection has one twin. What comes meanwhile comes again.
        self.twin = None;
        self.twin = Some(self.to.relief(&state, (sent, unsent), pool)?);
        self.is_detached = true;
        Ok(())
    }

    /// Hands the connection back behind what was given, which the peer has.
    pub fn finish(&mut self) -> Result<(), Reason> {
        self.twin = None;
        let Connection { port, socket, token } = &self.to;
        match port.net.flow_finish(socket.key, *token, self.given_bytes as u32) {
            // It was reset with that.
            Err(FlowError::Broken) => Err(Reason::FlowReset),
            _ => Ok(()),
        }
    }

    /// Bytes of it are lost, or it was reset.
    pub fn reset(&mut self) {
        self.twin = None;
        self.to.reset();
    }
}
