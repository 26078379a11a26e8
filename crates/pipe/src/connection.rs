//! A connection as the end of a pipe: what both its halves have in common.

use std::os::fd::AsFd;
use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::SocketEnd;
use net::flow::{FlowError, FlowKey, FlowSnapshot};

use crate::message::Socket;
use crate::pool::Pool;
use crate::twin::{Twin, TwinState};
use crate::vm::TwinPort;

/// A connection that is reserved for a pipe.
pub(crate) struct Connection {
    pub port: Arc<TwinPort>,
    pub socket: Socket,
    /// Names the pipe, and this end of it, in events.
    pub token: u64,
}

impl Connection {
    /// Who talks to whom.
    pub fn key(&self) -> FlowKey {
        self.socket.key
    }

    /// Its twin, which the pool knows.
    pub fn twin(&self, taken: &FlowSnapshot, reads: bool, pool: &Pool) -> Result<Twin, Reason> {
        self.new_twin(&twin_state(&self.socket, taken, reads)?, (&[], &[]), pool)
    }

    /// A twin in the place of another that has gone, with copies of what that was given: first what it
    /// had sent.
    pub fn relief(
        &self,
        taken: &FlowSnapshot,
        given: (&[u8], &[u8]),
        pool: &Pool,
    ) -> Result<Twin, Reason> {
        let twin = self.new_twin(&twin_state(&self.socket, taken, false)?, given, pool)?;
        // Who is relieved has a slow peer. Else it waits not so long, and gives up earlier.
        let _ = twin.wait_as_usual();
        Ok(twin)
    }

    fn new_twin(
        &self,
        state: &TwinState,
        (sent, unsent): (&[u8], &[u8]),
        pool: &Pool,
    ) -> Result<Twin, Reason> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            let port = self.port.net.name();
            tracing::warn!(port, "taking a connection over: {what}: {error}");
            Reason::TwinFailed
        };
        let twin = self.port.namespace.twin(state, sent);
        let twin = twin.map_err(|e| failed("making its twin", &e))?;
        if !unsent.is_empty() {
            let room = twin.make_room(sent.len() + unsent.len());
            let given = room.and_then(|()| twin.give_all(unsent));
            given.map_err(|e| failed("filling its twin", &e))?;
        }
        pool.watch(self.token, twin.as_fd()).map_err(|e| failed("watching its twin", &e))?;
        Ok(twin)
    }

    /// It was reserved to be read, and is not needed.
    pub fn release(&self) {
        // One that is reset has no reservation.
        let _ = self.port.net.flow_receive_finish(self.key(), self.token, 0);
    }

    /// Ends it for both sides: bytes of it are lost.
    pub fn reset(&self) {
        // One that is reset already has nothing to be told.
        let _ = self.port.net.flow_reset(self.key(), self.token);
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
fn twin_state(socket: &Socket, taken: &FlowSnapshot, reads: bool) -> Result<TwinState, Reason> {
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
        send_seq: taken.send_seq,
        receive_seq: taken.receive_seq,
        // The peer's window begins behind what it has acknowledged.
        send_window_bytes: (u32::from(taken.send_window) << send_scale)
            .saturating_sub(taken.send_seq.wrapping_sub(taken.acked_seq)),
        receive_window_bytes: u32::from(taken.receive_window) << receive_scale,
        timestamp: taken.timestamp,
        congestion,
        cwnd: end.cwnd.get(),
        rtt_us: end.rtt_us.get(),
        reads,
    })
}
