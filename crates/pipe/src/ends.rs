//! The ends of a pipe that begins: what is asked for must be the VM's, and free.

use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::{BLOCK_BYTES, PlacesEnd, option};
use net::flow::FlowError;

use crate::connection::{Connection, reason_of};
use crate::disks::Disks;
use crate::job::Side;
use crate::message::Socket;
use crate::places::{PlacedFile, Places, Tag};
use crate::sending::Sending;
use crate::vm::{TwinPort, VmPipes};

impl VmPipes {
    /// The connection that is written, reserved for the pipe from now on.
    pub(crate) fn sending(&self, socket: Socket, token: u64) -> Result<Sending, Reason> {
        let token = Side::Sink.token(token);
        for port in self.ports().clone() {
            match port.net.flow_snapshot(socket.key, socket.end.sent_bytes.get(), token) {
                Ok(answer) => {
                    let passes = self.passes(&port, &socket);
                    let mut sink = Sending::new(Connection { port, socket, token }, answer);
                    if !passes {
                        // It is not reserved any more.
                        let _ = sink.finish();
                        return Err(Reason::OnChannel);
                    }
                    return Ok(sink);
                }
                Err(FlowError::Unknown | FlowError::Off) => {}
                Err(error) => return Err(reason_of(error)),
            }
        }
        Err(Reason::NoFlow)
    }

    /// The connection that is read.
    pub(crate) fn connection(&self, socket: Socket, token: u64) -> Result<Connection, Reason> {
        let token = Side::Source.token(token);
        // A twin does not tell the peer of congestion; bytes in the peer's SYN count where the switch did
        // not.
        if socket.end.options & (option::ECN | option::SYN_DATA) != 0 {
            return Err(Reason::FlowOptions);
        }
        let received = socket.end.received_bytes.get();
        for port in self.ports().clone() {
            match port.net.flow_receive_snapshot(socket.key, received, token) {
                Ok(_) => {
                    let passes = self.passes(&port, &socket);
                    let source = Connection { port, socket, token };
                    if !passes {
                        source.release();
                        return Err(Reason::OnChannel);
                    }
                    return Ok(source);
                }
                Err(FlowError::Unknown | FlowError::Off) => {}
                Err(error) => return Err(reason_of(error)),
            }
        }
        Err(Reason::NoFlow)
    }

    /// Whether all of a connection has passed the port, and will. Asked once it is reserved: who opens
    /// another way for it looks afterwards for those that are ([`net::NetPort::flows_bound`]).
    fn passes(&self, port: &TwinPort, socket: &Socket) -> bool {
        match port.net.flow_free_since_ns(socket.key) {
            Ok(Some(since_ns)) => !self.devices.has_way_past(socket.key.remote, since_ns),
            // A shifted one is kept here, and one that is gone begins no pipe.
            Ok(None) | Err(_) => true,
        }
    }

    /// A file that is written, or read, by placeholders.
    pub(crate) fn placed(
        &self,
        end: &PlacesEnd,
        disks: &mut Disks<'_>,
        token: u64,
        new: fn(&Arc<Places>, Tag, u64, u64) -> Option<PlacedFile>,
    ) -> Result<PlacedFile, Reason> {
        let disk = disks.take(end.disk.get())?;
        self.serve_places(&disk)?;
        let skew_bytes = u64::from(end.skew_bytes.get());
        if skew_bytes >= BLOCK_BYTES as u64 {
            return Err(Reason::Malformed);
        }
        new(&self.places, end.tag, skew_bytes, token).ok_or(Reason::Malformed)
    }
}
