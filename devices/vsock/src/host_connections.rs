//! Opening of connections between a guest and programs or services of the host.

use std::os::fd::{AsFd, OwnedFd};

use crate::connection::{Connection, NEVER_NS};
use crate::connection_table::ConnectionTable;
use crate::endpoint::FarEnd;
use crate::limits::CONNECT_TIMEOUT_NS;
use crate::packet::Header;
use crate::port::HostSocket;
use crate::slab::{EpollTag, SlabId};
use crate::socket_set::SocketSet;

/// Opens a connection of a guest to the host; none when refused.
pub(crate) fn open_to_host(
    table: &mut ConnectionTable,
    sockets: &SocketSet,
    port: SlabId,
    request: &Header,
) -> Option<SlabId> {
    let p = table.ports.get(port)?;
    if !p.has_room(false) {
        return None;
    }
    let HostSocket { fd, handover } = p.spec.open(request.key)?;
    let id = connect_host(table, sockets, port, request, fd)?;
    if let Some((sink, other)) = handover {
        sink(other);
    }
    Some(id)
}

/// Opens a connection of the guest to the socket `fd`, established from the start.
fn connect_host(
    table: &mut ConnectionTable,
    sockets: &SocketSet,
    port: SlabId,
    request: &Header,
    fd: OwnedFd,
) -> Option<SlabId> {
    let p = table.ports.get(port)?;
    let conn = Connection::incoming(request, p.spec.buffer_bytes, NEVER_NS);
    let id = table.insert(port, conn, FarEnd::Gone)?;
    if sockets.watch(fd.as_fd(), EpollTag::Endpoint(id), false).is_err() {
        table.remove(id);
        return None;
    }
    table.attach_host(id, fd, false);
    table.endpoints.get_mut(id)?.conn.accept();
    table.settle_half_open(id);
    table.enqueue(id);
    Some(id)
}

/// Opens a connection of a host program to `guest_port`. False when refused: the socket is
/// closed.
pub(crate) fn open_from_host(
    table: &mut ConnectionTable,
    sockets: &SocketSet,
    port: SlabId,
    fd: OwnedFd,
    guest_port: u32,
) -> bool {
    let Some(p) = table.ports.get_mut(port).filter(|p| p.has_room(true) && p.is_running()) else {
        return false;
    };
    let key = p.free_host_port(guest_port);
    let deadline_ns = table.timer.after_ns(CONNECT_TIMEOUT_NS);
    let conn = Connection::outgoing(key, p.spec.buffer_bytes, deadline_ns);
    p.spec.stats.opened_to_guest.add(1);
    let Some(id) = table.insert(port, conn, FarEnd::Gone) else { return false };
    if sockets.watch(fd.as_fd(), EpollTag::Endpoint(id), true).is_err() {
        table.remove(id);
        return false;
    }
    table.attach_host(id, fd, true);
    table.timer.note(deadline_ns);
    table.enqueue(id);
    true
}
