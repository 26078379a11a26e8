//! The receiving half of a connection as a pipe's source: from its takeover to its return.

use std::os::fd::{AsFd, BorrowedFd};

use guest_abi::Reason;

use crate::connection::{Connection, ReceiveStart};
use crate::epoll_set::EpollSet;
use crate::twin::Twin;

/// A connection that is read. Its twin receives in the guest's place.
pub(crate) struct SocketSource {
    connection: Connection,
    twin: Option<Twin>,
    /// Bytes that the guest reads itself, in front of the twin's.
    pub own_bytes: u64,
    /// Bytes that the twin is to get.
    pub len_bytes: u64,
    /// Bytes that were taken out of the twin.
    pub taken_bytes: u64,
    is_stopped: bool,
    is_handed_back: bool,
}

impl SocketSource {
    /// Takes a connection over for at most `len_bytes`, which begin with what the program has not
    /// read.
    pub fn start(connection: Connection, len_bytes: u64, epoll: &EpollSet) -> Result<Self, Reason> {
        let started = take_over(&connection, len_bytes, epoll);
        if !matches!(started, Ok(Some(_))) {
            connection.release_source();
        }
        let (twin, own_bytes, twin_bytes) = match started? {
            Some((twin, ReceiveStart { own_bytes, twin_bytes })) => {
                let unread = connection.socket.end.unread_bytes.get();
                (Some(twin), u64::from(unread) + u64::from(own_bytes), twin_bytes.into())
            }
            None => (None, len_bytes, 0),
        };
        let is_handed_back = twin.is_none();
        let (len_bytes, taken_bytes, is_stopped) = (twin_bytes, 0, false);
        Ok(Self { connection, twin, own_bytes, len_bytes, taken_bytes, is_stopped, is_handed_back })
    }

    /// Tells the switch that the guest has read its own bytes.
    pub fn report_own_bytes_read(&self) {
        self.connection.report_own_bytes_read();
    }

    /// Descriptor from which bytes are read; none once the connection is handed back.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.twin.as_ref().map(Twin::as_fd)
    }

    /// Bytes that are still to be taken out.
    pub fn left_bytes(&self) -> u64 {
        self.len_bytes - self.taken_bytes
    }

    /// Wakes the pipe when there is something to read, or the twin fails. False: it does not.
    pub fn arm(&self, epoll: &EpollSet) -> bool {
        self.fd().is_some_and(|fd| epoll.arm_for_input(self.connection.token, fd).is_ok())
    }

    /// Receives no more: what has not been acknowledged to the peer stays the guest's.
    pub fn stop(&mut self) -> Result<(), Reason> {
        if self.is_handed_back || std::mem::replace(&mut self.is_stopped, true) {
            return Ok(());
        }
        let len_bytes = self.connection.stop_source(self.taken_bytes)?;
        self.len_bytes = len_bytes.max(self.taken_bytes);
        Ok(())
    }

    /// Hands the connection back behind what was taken out.
    pub fn finish(&mut self) -> Result<(), Reason> {
        if std::mem::replace(&mut self.is_handed_back, true) {
            return Ok(());
        }
        self.twin = None;
        self.connection.finish_source(self.taken_bytes)
    }

    /// Ends it without a byte moved. The connection goes back as it was, if its peer was told of
    /// nothing more. Else the peer believes in bytes that nobody will get, and the connection is
    /// reset.
    pub fn refuse(&mut self) {
        if self.stop().is_err() || self.len_bytes > 0 || self.finish().is_err() {
            self.reset();
        }
    }

    /// Resets the connection: bytes of it are lost, or it was reset already.
    pub fn reset(&mut self) {
        self.twin = None;
        // Nothing more is to be had of it.
        self.len_bytes = self.taken_bytes;
        if !std::mem::replace(&mut self.is_handed_back, true) {
            self.connection.reset();
        }
    }
}

/// Makes the twin and steers the connection to it; also which bytes it gets. None: all of the bytes
/// are the guest's.
fn take_over(
    connection: &Connection,
    len_bytes: u64,
    epoll: &EpollSet,
) -> Result<Option<(Twin, ReceiveStart)>, Reason> {
    let unread = u64::from(connection.socket.end.unread_bytes.get());
    let wanted = u32::try_from(len_bytes.saturating_sub(unread)).map_err(|_| Reason::Malformed)?;
    if wanted == 0 {
        return Ok(None);
    }
    let snapshot = connection.source_snapshot()?;
    let twin = connection.make_twin(&snapshot, true, epoll)?;
    let start = connection.start_source(snapshot, wanted)?;
    Ok((start.twin_bytes > 0).then_some((twin, start)))
}
