//! The ends of a pipe that begins: they must be the VM's, and free.

use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::{BLOCK_BYTES, PlacesEnd, option};

use crate::config::Devices;
use crate::connection::Connection;
use crate::disks::PipeDisks;
use crate::gated_file::GatedFile;
use crate::job::Side;
use crate::message::Socket;
use crate::placed_request::Direction;
use crate::placeholders::{PlacedFile, PlaceholderTable};
use crate::socket_sink::SocketSink;
use crate::twin_port::TwinPorts;

/// Opens the ends of one pipe.
pub(crate) struct EndOpener<'a> {
    pub ports: &'a TwinPorts,
    pub devices: &'a dyn Devices,
    pub placeholders: &'a Arc<PlaceholderTable>,
    pub disks: PipeDisks<'a>,
    /// Token of the pipe.
    pub token: u64,
}

impl EndOpener<'_> {
    /// Opens a connection that is written. It is reserved for the pipe from now on.
    pub fn socket_sink(&self, socket: Socket) -> Result<SocketSink, Reason> {
        let token = Side::Sink.token(self.token);
        let (connection, answer) = Connection::reserve_sink(self.ports.list(), socket, token)?;
        let passes_port = connection.passes_port(self.devices);
        let mut sink = SocketSink::new(connection, answer);
        if !passes_port {
            // It is not reserved any more.
            let _ = sink.finish();
            return Err(Reason::OnChannel);
        }
        Ok(sink)
    }

    /// Opens a connection that is read.
    pub fn socket_source(&self, socket: Socket) -> Result<Connection, Reason> {
        let token = Side::Source.token(self.token);
        // A twin does not tell the peer of congestion; bytes in the peer's SYN count where the
        // switch did not.
        if socket.end.options & (option::ECN | option::SYN_DATA) != 0 {
            return Err(Reason::FlowOptions);
        }
        let source = Connection::reserve_source(self.ports.list(), socket, token)?;
        if !source.passes_port(self.devices) {
            source.release_source();
            return Err(Reason::OnChannel);
        }
        Ok(source)
    }

    /// Opens a file that is read by its extents: see [`PipeDisks::open_file`].
    pub fn file_source(
        &mut self,
        disk: u32,
        extents: Vec<(u64, u64)>,
        len_bytes: u64,
        is_cached: bool,
    ) -> Result<GatedFile, Reason> {
        self.disks.open_file(disk, extents, len_bytes, is_cached)
    }

    /// Opens a file that is written, or read, by placeholders.
    pub fn placed_file(
        &mut self,
        end: &PlacesEnd,
        direction: Direction,
    ) -> Result<PlacedFile, Reason> {
        let disk = self.disks.use_disk(end.disk.get())?;
        self.placeholders.serve(&disk)?;
        let skew_bytes = u64::from(end.skew_bytes.get());
        if skew_bytes >= BLOCK_BYTES as u64 {
            return Err(Reason::Malformed);
        }
        let file = PlacedFile::new(self.placeholders, (end.tag, skew_bytes), self.token, direction);
        file.ok_or(Reason::Malformed)
    }
}
