//! The sending half of a connection as a pipe's sink: from its takeover to its return.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::SocketEnd;

use crate::connection::{Connection, FlowKey, FlowSnapshot, Relief, Snapshot};
use crate::epoll_set::EpollSet;
use crate::limits::{RECHECK_PERIOD, RECHECK_SOON, SETTLE_TIMEOUT, SILENCE_TIMEOUT};
use crate::message;
use crate::twin::Twin;

/// A connection that is written. Its twin sends in the guest's place.
pub(crate) struct SocketSink {
    connection: Connection,
    /// The switch's answer to the reservation, so that it need not be asked for twice.
    snapshot: Option<FlowSnapshot>,
    /// Since when the switch waits for what the guest has sent.
    settling_since: Instant,
    /// Duration of the takeover, from knowing the connection's numbers to steering it.
    pub handover: Duration,
    twin: Option<Twin>,
    /// Bytes given to the twin.
    pub given_bytes: u64,
    /// Bytes whose acknowledgement the switch waits for.
    target_bytes: u64,
    /// The twin has copies: the source is not needed any more.
    pub is_detached: bool,
    /// The twin has measured a round trip.
    has_measured: bool,
}

/// Progress of the peer with the bytes that the twin was given.
pub(crate) enum DrainState {
    /// The peer has acknowledged everything.
    Done,
    /// The peer has not acknowledged everything: look again then.
    Pending(Instant),
    /// The peer never will.
    Failed,
}

impl SocketSink {
    /// A connection that was reserved with this answer of the switch.
    pub fn new(connection: Connection, answer: Snapshot) -> Self {
        let snapshot = match answer {
            Snapshot::Ready(snapshot) => Some(snapshot),
            Snapshot::Waiting => None,
        };
        Self {
            connection,
            snapshot,
            settling_since: Instant::now(),
            handover: Duration::ZERO,
            twin: None,
            given_bytes: 0,
            target_bytes: 0,
            is_detached: false,
            has_measured: false,
        }
    }

    /// Takes a newer description of the connection: the guest has sent more since it was reserved.
    /// False: it describes another connection.
    pub fn update(&mut self, end: SocketEnd) -> bool {
        let same = message::parse_socket(end).is_ok_and(|socket| socket.key == self.key());
        if same {
            self.connection.socket.end = end;
            (self.snapshot, self.settling_since) = (None, Instant::now());
        }
        same
    }

    /// Addresses and ports of the connection.
    pub fn key(&self) -> FlowKey {
        self.connection.socket.key
    }

    /// Waits until the switch has seen all that the guest has sent, then takes over, for
    /// `len_bytes`. `Some`: not yet, look again then.
    pub fn settle(&mut self, len_bytes: u64, epoll: &EpollSet) -> Result<Option<Instant>, Reason> {
        let snapshot = match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => match self.connection.sink_snapshot()? {
                Snapshot::Ready(snapshot) => snapshot,
                Snapshot::Waiting if self.settling_since.elapsed() < SETTLE_TIMEOUT => {
                    return Ok(Some(self.settling_since + SETTLE_TIMEOUT));
                }
                Snapshot::Waiting => return Err(Reason::NotSettled),
            },
        };
        let begun = Instant::now();
        let twin = self.connection.make_twin(&snapshot, false, epoll)?;
        let len = u32::try_from(len_bytes).map_err(|_| Reason::Malformed)?;
        self.connection.start_sink(snapshot, len)?;
        (self.twin, self.target_bytes) = (Some(twin), len_bytes);
        self.handover = begun.elapsed();
        Ok(None)
    }

    /// Descriptor that takes bytes; none before it has settled.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.twin.as_ref().map(Twin::as_fd)
    }

    /// Whether the twin can still send.
    pub fn is_established(&self) -> bool {
        self.twin.as_ref().is_some_and(|twin| twin.info().is_ok_and(|info| info.is_established()))
    }

    /// Whether the peer is still there. Asked whenever the twin is waited for.
    pub fn is_peer_alive(&mut self) -> bool {
        let Some(Ok(info)) = self.twin.as_ref().map(Twin::info) else { return true };
        if info.rtt_us > 0 && !std::mem::replace(&mut self.has_measured, true) {
            // On failure it waits less before it sends again, and gives up earlier.
            let _ = self.twin.as_ref().map(Twin::wait_as_usual);
        }
        u128::from(info.silent_ms) < SILENCE_TIMEOUT.as_millis()
    }

    /// Wakes the pipe when the twin takes bytes, or fails. False: it does not.
    pub fn arm(&self, epoll: &EpollSet) -> bool {
        self.fd().is_some_and(|fd| epoll.arm_for_output(self.connection.token, fd).is_ok())
    }

    /// Gives the twin no more: the switch must not wait for what will never come.
    pub fn stop(&mut self) {
        if self.given_bytes != self.target_bytes {
            self.target_bytes = self.given_bytes;
            self.connection.retarget_sink(self.given_bytes);
        }
    }

    /// Looks whether the peer has acknowledged everything.
    pub fn drain(&mut self, epoll: &EpollSet) -> DrainState {
        let is_peer_alive = self.is_peer_alive();
        let Some(twin) = &self.twin else { return DrainState::Done };
        match (twin.unacked_bytes(), twin.info()) {
            (Ok(0), _) => DrainState::Done,
            (Ok(_), Ok(info)) if info.is_established() && is_peer_alive => {
                // The switch tells when the last acknowledgement comes, the twin when it fails.
                let all_acked = self.connection.retarget_sink(self.given_bytes);
                let soon = if all_acked { RECHECK_SOON } else { RECHECK_PERIOD };
                let _ = epoll.arm_for_failure(self.connection.token, twin.as_fd());
                DrainState::Pending(Instant::now() + soon)
            }
            _ => DrainState::Failed,
        }
    }

    /// Lets go of the source: what the peer has not acknowledged is copied (by `copy`: offset in
    /// the pipe, and length) into another twin, which takes the place of this one. `Err`: the
    /// connection is lost.
    pub fn detach(
        &mut self,
        copy: impl FnOnce(u64, u64) -> io::Result<Vec<u8>>,
        epoll: &EpollSet,
    ) -> Result<(), Reason> {
        let Relief { state, acked_bytes, sent_bytes } = self.connection.sink_relief()?;
        let left = self.given_bytes.saturating_sub(acked_bytes.into());
        let bytes = copy(acked_bytes.into(), left).map_err(|error| {
            tracing::warn!("copying a file's unacknowledged bytes for a twin: {error}");
            Reason::DiskFailed
        })?;
        let (sent, unsent) =
            bytes.split_at_checked(sent_bytes as usize).ok_or(Reason::TwinFailed)?;
        // One connection has one twin. What comes meanwhile comes again.
        self.twin = None;
        self.twin = Some(self.connection.make_relief_twin(&state, (sent, unsent), epoll)?);
        self.is_detached = true;
        Ok(())
    }

    /// Hands the connection back behind what was given, which the peer has.
    pub fn finish(&mut self) -> Result<(), Reason> {
        self.twin = None;
        self.connection.finish_sink(self.given_bytes)
    }

    /// Resets the connection: bytes of it are lost, or it was reset already.
    pub fn reset(&mut self) {
        self.twin = None;
        self.connection.reset();
    }
}
