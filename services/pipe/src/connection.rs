//! A guest's TCP connection as an end of a pipe. All that a pipe asks of the switch about a
//! connection is asked here, and its twins are made here.

use std::os::fd::AsFd;
use std::sync::Arc;

use flow::FlowError;
pub(crate) use flow::{FlowKey, FlowSnapshot, ReceiveStart, Relief, Snapshot};
use guest_abi::Reason;
use guest_abi::pipe::SocketEnd;

use crate::config::Devices;
use crate::epoll_set::EpollSet;
use crate::message::Socket;
use crate::twin::{Twin, TwinState};
use crate::twin_port::TwinPort;

/// A connection that is reserved for a pipe.
pub(crate) struct Connection {
    port: Arc<TwinPort>,
    pub socket: Socket,
    /// Name of this end of the pipe in events.
    pub token: u64,
}

/// Reserving and making twins: for both halves.
impl Connection {
    /// Reserves a connection that is written; also the switch's answer, which need not be asked for
    /// twice.
    pub fn reserve_sink(
        ports: Vec<Arc<TwinPort>>,
        socket: Socket,
        token: u64,
    ) -> Result<(Self, Snapshot), Reason> {
        let sent_bytes = socket.end.sent_bytes.get();
        find(ports, |port| port.flows().snapshot(socket.key, sent_bytes, token))
            .map(|(port, snapshot)| (Self { port, socket, token }, snapshot))
    }

    /// Reserves a connection that is read.
    pub fn reserve_source(
        ports: Vec<Arc<TwinPort>>,
        socket: Socket,
        token: u64,
    ) -> Result<Self, Reason> {
        let received_bytes = socket.end.received_bytes.get();
        find(ports, |port| port.flows().receive_snapshot(socket.key, received_bytes, token))
            .map(|(port, _)| Self { port, socket, token })
    }

    /// Whether all of the connection has passed its port, and will. To be asked once it is
    /// reserved: who opens another way for it looks afterwards for those that are reserved
    /// ([`PortFlows::bound`](crate::PortFlows::bound)).
    pub fn passes_port(&self, devices: &dyn Devices) -> bool {
        let key = self.socket.key;
        match self.port.flows().free_since_ns(key) {
            Ok(Some(since_ns)) => !devices.has_way_past(key.remote, since_ns),
            // A shifted one is kept here, and one that is gone begins no pipe.
            Ok(None) | Err(_) => true,
        }
    }

    /// Makes the twin, and adds it to the pool's epoll set.
    pub fn make_twin(
        &self,
        snapshot: &FlowSnapshot,
        reads: bool,
        epoll: &EpollSet,
    ) -> Result<Twin, Reason> {
        self.new_twin(&twin_state(&self.socket, snapshot, reads)?, (&[], &[]), epoll)
    }

    /// Makes a twin in the place of another that has gone, with copies of the bytes that the other
    /// was given: those that it had sent, then those that it had not.
    pub fn make_relief_twin(
        &self,
        snapshot: &FlowSnapshot,
        given: (&[u8], &[u8]),
        epoll: &EpollSet,
    ) -> Result<Twin, Reason> {
        let twin = self.new_twin(&twin_state(&self.socket, snapshot, false)?, given, epoll)?;
        // A twin that is relieved has a slow peer. On failure this one waits less, and gives up
        // earlier.
        let _ = twin.wait_as_usual();
        Ok(twin)
    }

    fn new_twin(
        &self,
        state: &TwinState,
        (sent, unsent): (&[u8], &[u8]),
        epoll: &EpollSet,
    ) -> Result<Twin, Reason> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            let port = self.port.net.name();
            tracing::warn!(port, "taking a connection over: {what}: {error}");
            Reason::TwinFailed
        };
        let twin = self.port.make_twin(state, sent);
        let twin = twin.map_err(|e| failed("making its twin", &e))?;
        if !unsent.is_empty() {
            let room = twin.make_room(sent.len() + unsent.len());
            let given = room.and_then(|()| twin.give_all(unsent));
            given.map_err(|e| failed("filling its twin", &e))?;
        }
        epoll.add(self.token, twin.as_fd()).map_err(|e| failed("watching its twin", &e))?;
        Ok(twin)
    }

    /// Resets the connection for both sides: bytes of it are lost.
    pub fn reset(&self) {
        // Fails when it is reset already.
        let _ = self.port.flows().reset(self.socket.key, self.token);
    }
}

/// The half that the guest sends: a pipe's sink.
impl Connection {
    /// Asks how the connection stands, once the switch has seen all that the guest has sent.
    pub fn sink_snapshot(&self) -> Result<Snapshot, Reason> {
        let sent_bytes = self.socket.end.sent_bytes.get();
        let answer = self.port.flows().snapshot(self.socket.key, sent_bytes, self.token);
        answer.map_err(reason_of)
    }

    /// Steers the connection to its twin, for `len_bytes`.
    pub fn start_sink(&self, snapshot: FlowSnapshot, len_bytes: u32) -> Result<(), Reason> {
        let started = self.port.flows().start(self.socket.key, self.token, snapshot, len_bytes);
        started.map_err(reason_of)
    }

    /// Tells the switch that the twin gets no more than these bytes. Whether it has seen all of
    /// them acknowledged.
    pub fn retarget_sink(&self, given_bytes: u64) -> bool {
        self.port.flows().retarget(self.socket.key, self.token, given_bytes as u32) == Ok(true)
    }

    /// Asks what a twin must know that takes the place of the one that sends.
    pub fn sink_relief(&self) -> Result<Relief, Reason> {
        self.port.flows().relief(self.socket.key, self.token).map_err(reason_of)
    }

    /// Hands the connection back behind the bytes that the twin was given, which the peer has.
    pub fn finish_sink(&self, given_bytes: u64) -> Result<(), Reason> {
        match self.port.flows().finish(self.socket.key, self.token, given_bytes as u32) {
            // It was reset with that.
            Err(FlowError::Broken) => Err(Reason::FlowReset),
            _ => Ok(()),
        }
    }
}

/// The half that the guest receives: a pipe's source.
impl Connection {
    /// Asks how the connection stands, for [`Connection::start_source`].
    pub fn source_snapshot(&self) -> Result<FlowSnapshot, Reason> {
        let received_bytes = self.socket.end.received_bytes.get();
        let answer =
            self.port.flows().receive_snapshot(self.socket.key, received_bytes, self.token);
        answer.map_err(reason_of)
    }

    /// Steers at most `wanted_bytes` of the peer's to the twin; which they are.
    pub fn start_source(
        &self,
        snapshot: FlowSnapshot,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, Reason> {
        let (key, received_bytes) = (self.socket.key, self.socket.end.received_bytes.get());
        let flows = self.port.flows();
        let start = flows.receive_start(key, self.token, snapshot, received_bytes, wanted_bytes);
        start.map_err(reason_of)
    }

    /// Tells the switch that the guest has read the bytes in front of the twin's.
    pub fn report_own_bytes_read(&self) {
        // Fails when it was reset: an event tells that.
        let _ = self.port.flows().receive_own(self.socket.key, self.token);
    }

    /// Gives the twin no more than what the peer was told to have arrived; how many bytes that is.
    pub fn stop_source(&self, taken_bytes: u64) -> Result<u64, Reason> {
        let (key, taken_bytes) = (self.socket.key, taken_bytes as u32);
        let len_bytes = self.port.flows().receive_stop(key, self.token, taken_bytes);
        Ok(u64::from(len_bytes.map_err(reason_of)?))
    }

    /// Hands the connection back behind the bytes that were taken out of the twin.
    pub fn finish_source(&self, taken_bytes: u64) -> Result<(), Reason> {
        match self.port.flows().receive_finish(self.socket.key, self.token, taken_bytes as u32) {
            // It was reset with that.
            Err(FlowError::Broken) => Err(Reason::FlowReset),
            _ => Ok(()),
        }
    }

    /// Ends the reservation of a source that is not needed.
    pub fn release_source(&self) {
        // One that is reset has no reservation.
        let _ = self.port.flows().receive_finish(self.socket.key, self.token, 0);
    }
}

/// The port that knows a connection, and its answer.
fn find<T>(
    ports: Vec<Arc<TwinPort>>,
    ask: impl Fn(&TwinPort) -> Result<T, FlowError>,
) -> Result<(Arc<TwinPort>, T), Reason> {
    for port in ports {
        match ask(&port) {
            Ok(answer) => return Ok((port, answer)),
            Err(FlowError::Unknown | FlowError::Off) => {}
            Err(error) => return Err(reason_of(error)),
        }
    }
    Err(Reason::NoFlow)
}

/// The reason for the agent, by the switch's error.
fn reason_of(error: FlowError) -> Reason {
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

/// State of a new twin, from the agent's description (checked) and the switch's snapshot.
fn twin_state(socket: &Socket, snapshot: &FlowSnapshot, reads: bool) -> Result<TwinState, Reason> {
    let Socket { key, end } = socket;
    let &SocketEnd { options, send_scale, receive_scale, mss, congestion, .. } = end;
    if send_scale > MAX_SCALE || receive_scale > MAX_SCALE || mss.get() < 64 {
        return Err(Reason::FlowOptions);
    }
    Ok(TwinState {
        local: (key.local, key.local_port).into(),
        remote: (key.remote, key.remote_port).into(),
        options,
        send_scale,
        receive_scale,
        mss: mss.get(),
        send_seq: snapshot.send_seq,
        receive_seq: snapshot.receive_seq,
        // The peer's window begins behind what it has acknowledged.
        send_window_bytes: (u32::from(snapshot.send_window) << send_scale)
            .saturating_sub(snapshot.send_seq.wrapping_sub(snapshot.acked_seq)),
        receive_window_bytes: u32::from(snapshot.receive_window) << receive_scale,
        timestamp: snapshot.timestamp,
        congestion,
        cwnd: end.cwnd.get(),
        rtt_us: end.rtt_us.get(),
        reads,
    })
}
