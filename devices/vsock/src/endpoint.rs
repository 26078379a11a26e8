//! Connection in the engine's table: state towards the guest, buffer, far end.

use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::byte_ring::ByteRing;
use crate::connection::{Connection, Phase};
use crate::packet::{Op, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};
use crate::queues::RxQueue;
use crate::slab::{Linked, Links, SlabId};
use crate::unix_socket;

/// Unix socket behind a connection.
#[derive(Debug)]
pub(crate) struct HostEnd {
    pub fd: OwnedFd,
    /// Whether the socket may have bytes, or their end, for us.
    pub readable: bool,
    /// Whether the socket may take bytes.
    pub writable: bool,
    /// Whether the program's bytes end: the rest must be read to its end, since no event will come.
    pub ending: bool,
    /// Whether the program has closed both directions.
    pub hung_up: bool,
    /// Whether the program opened the connection and waits for `OK`.
    pub awaits_ok: bool,
}

impl HostEnd {
    /// Begins with a socket that takes bytes and has none that are known of.
    pub fn new(fd: OwnedFd, awaits_ok: bool) -> Self {
        Self { fd, readable: false, writable: true, ending: false, hung_up: false, awaits_ok }
    }

    /// Notes events of the socket, but for `OUT`.
    pub fn note_events(&mut self, conn: &mut Connection, flags: EventFlags) {
        let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        let wants_bytes = conn.guest_shut() & SHUT_RECEIVE == 0;
        self.hung_up |= flags.contains(EventFlags::HUP);
        self.ending |= gone || flags.contains(EventFlags::RDHUP);
        if self.ending || flags.contains(EventFlags::IN) {
            self.readable = wants_bytes;
        }
        if self.hung_up && (!wants_bytes || conn.far_shut() & SHUT_SEND != 0) {
            // The end of its bytes will never be read, or has been.
            conn.far_shutdown(SHUT_BOTH);
        }
    }
}

/// Far end of a connection, behind the device.
#[derive(Debug)]
pub(crate) enum FarEnd {
    /// Socket of a host program.
    Host(HostEnd),
    /// Connection of another guest.
    Guest(SlabId),
    /// No far end any more.
    Gone,
}

/// One connection towards a guest, its buffer and its far end.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub port: SlabId,
    pub conn: Connection,
    pub far: FarEnd,
    /// Bytes of the guest for the far end.
    pub ring: ByteRing,
    pub links: Links,
    /// Whether the guest has forgotten the connection; only bytes in `ring` may keep it.
    pub is_released: bool,
    pub counted_half_open: bool,
    /// CID of the guest that asked for the connection, on the side of the guest that was asked.
    pub requester_cid: Option<u32>,
    pub opened_ns: u64,
    pub bytes_from_guest: u64,
    pub bytes_to_guest: u64,
}

impl Endpoint {
    /// Completes the guest's next buffer as a data packet of `len` bytes that lie in it already.
    pub fn send_payload(&mut self, rx: &mut RxQueue, cid: u32, len: u32) {
        let header = self.conn.header(Op::Rw, cid, len);
        rx.put(&header, len);
        self.conn.note_sent(len);
        self.bytes_to_guest += u64::from(len);
    }

    /// Sends the bytes in the buffer to the Unix socket. An error: the program takes no more.
    pub fn flush_ring(&mut self) -> Result<(), Errno> {
        let FarEnd::Host(end) = &mut self.far else { return Ok(()) };
        let had_bytes = !self.ring.is_empty();
        while end.writable && !self.ring.is_empty() {
            let pieces = self.ring.front(usize::MAX);
            let wanted = pieces.0.len() + pieces.1.len();
            match unix_socket::send_pieces(&end.fd, pieces) {
                Ok(n) => {
                    self.ring.consume(n);
                    self.conn.note_forwarded(n as u32);
                    end.writable = n == wanted;
                }
                Err(Errno::AGAIN) => end.writable = false,
                Err(e) => return Err(e),
            }
        }
        if had_bytes && self.ring.is_empty() {
            if self.conn.guest_shut() & SHUT_SEND != 0 {
                unix_socket::shut(&end.fd, Shutdown::Write);
            }
            if self.conn.phase() == Phase::Closing {
                self.far = FarEnd::Gone;
            }
        }
        Ok(())
    }

    /// Drops all bytes for a program that reads no more, those that wait and those that come.
    pub fn stop_sending_to_host(&mut self) {
        let unheard = self.conn.guest_shut() & SHUT_RECEIVE != 0;
        self.conn.far_shutdown(if unheard { SHUT_BOTH } else { SHUT_RECEIVE });
        self.ring.clear();
        self.conn.note_forwarded(self.conn.unread());
        if self.conn.phase() == Phase::Closing {
            self.far = FarEnd::Gone;
        }
    }

    /// Shuts directions of the Unix socket that the guest shut.
    pub fn shut_host(&mut self, new: u8) {
        let closing = self.conn.phase() == Phase::Closing;
        let FarEnd::Host(end) = &mut self.far else { return };
        if new & SHUT_RECEIVE != 0 {
            end.readable = false;
            unix_socket::shut(&end.fd, Shutdown::Read);
            if end.hung_up {
                self.conn.far_shutdown(SHUT_BOTH);
            }
        }
        if new & SHUT_SEND != 0 && self.ring.is_empty() {
            unix_socket::shut(&end.fd, Shutdown::Write);
        }
        if closing && self.ring.is_empty() {
            self.far = FarEnd::Gone;
        }
    }
}

impl Linked for Endpoint {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}
