//! The receiving half of a connection as a pipe's source: from its takeover to its return.

use std::os::fd::{AsFd, BorrowedFd};

use guest_abi::Reason;
use net::flow::{FlowError, ReceiveStart};

use crate::connection::{Connection, reason_of};
use crate::message::Socket;
use crate::pool::Pool;
use crate::twin::Twin;

/// See the module's text.
pub(crate) struct Receiving {
    from: Connection,
    twin: Option<Twin>,
    /// Bytes that the guest reads itself, in front of the twin's.
    pub own_bytes: u64,
    /// How many bytes the twin is to get.
    pub len_bytes: u64,
    /// How many of them were taken out of it.
    pub taken_bytes: u64,
    is_stopped: bool,
    is_back: bool,
}

impl Receiving {
    /// Takes a connection over for at most `len_bytes`, which begin with what the program has not read.
    pub fn begin(from: Connection, len_bytes: u64, pool: &Pool) -> Result<Self, Reason> {
        let begun = take_over(&from, len_bytes, pool);
        if !matches!(begun, Ok(Some(_))) {
            from.release();
        }
        let (twin, own_bytes, twin_bytes) = match begun? {
            Some((twin, ReceiveStart { own_bytes, twin_bytes })) => {
                let unread = from.socket.end.unread_bytes.get();
                (Some(twin), u64::from(unread) + u64::from(own_bytes), twin_bytes.into())
            }
            None => (None, len_bytes, 0),
        };
        let is_back = twin.is_none();
        let (len_bytes, taken_bytes, is_stopped) = (twin_bytes, 0, false);
        Ok(Self { from, twin, own_bytes, len_bytes, taken_bytes, is_stopped, is_back })
    }

    /// The guest has read its own bytes.
    pub fn own_read(&self) {
        let Connection { port, socket, token } = &self.from;
        // One that was reset is told so.
        let _ = port.net.flow_receive_own(socket.key, *token);
    }

    /// Where bytes are read; none once it is given back.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.twin.as_ref().map(Twin::as_fd)
    }

    /// How many bytes are still to be taken out.
    pub fn left_bytes(&self) -> u64 {
        self.len_bytes - self.taken_bytes
    }

    /// The pipe goes on when there is something to read, or the twin fails.
    pub fn arm(&self, pool: &Pool) -> bool {
        self.fd().is_some_and(|fd| pool.arm_for_input(self.from.token, fd).is_ok())
    }

    /// What has not been acknowledged to the peer stays the guest's.
    pub fn stop(&mut self) -> Result<(), Reason> {
        if self.is_back || std::mem::replace(&mut self.is_stopped, true) {
            return Ok(());
        }
        let Connection { port, socket, token } = &self.from;
        let taken = self.taken_bytes as u32;
        let len = port.net.flow_receive_stop(socket.key, *token, taken).map_err(reason_of)?;
        self.len_bytes = u64::from(len).max(self.taken_bytes);
        Ok(())
    }

    /// Gives the connection back behind what was taken out.
    pub fn finish(&mut self) -> Result<(), Reason> {
        if std::mem::replace(&mut self.is_back, true) {
            return Ok(());
        }
        self.twin = None;
        let Connection { port, socket, token } = &self.from;
        match port.net.flow_receive_finish(socket.key, *token, self.taken_bytes as u32) {
            Err(FlowError::Broken) => Err(Reason::FlowReset),
            _ => Ok(()),
        }
    }

    /// Nothing of it is wanted any more: it goes back as it was, if its peer was told of nothing more. Else
    /// that believes in bytes which nobody will get, and it is reset.
    pub fn refuse(&mut self) {
        if self.stop().is_err() || self.len_bytes > 0 || self.finish().is_err() {
            self.reset();
        }
    }

    /// Bytes of it are lost, or it was reset.
    pub fn reset(&mut self) {
        self.twin = None;
        // Nothing more is to be had of it.
        self.len_bytes = self.taken_bytes;
        if !std::mem::replace(&mut self.is_back, true) {
            self.from.reset();
        }
    }
}

/// The twin, and what it gets; none: all of the bytes are the guest's.
fn take_over(
    from: &Connection,
    len_bytes: u64,
    pool: &Pool,
) -> Result<Option<(Twin, ReceiveStart)>, Reason> {
    let Connection { port, socket: Socket { key, end }, token } = from;
    let (received, unread) = (end.received_bytes.get(), u64::from(end.unread_bytes.get()));
    let wanted = u32::try_from(len_bytes.saturating_sub(unread)).map_err(|_| Reason::Malformed)?;
    if wanted == 0 {
        return Ok(None);
    }
    let taken = port.net.flow_receive_snapshot(*key, received, *token).map_err(reason_of)?;
    let twin = from.twin(&taken, true, pool)?;
    let start = port.net.flow_receive_start(*key, *token, taken, received, wanted);
    let start = start.map_err(reason_of)?;
    Ok((start.twin_bytes > 0).then_some((twin, start)))
}
