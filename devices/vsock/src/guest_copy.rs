//! Bytes from guest to guest.

use queue::seg::{copy_across, copy_in};

use crate::connection::Phase;
use crate::connection_table::ConnectionTable;
use crate::packet::{HEADER_LEN_BYTES, SHUT_RECEIVE};
use crate::queues::{RxQueue, TxQueue, WaitReason};
use crate::slab::SlabId;

const HEADER: usize = HEADER_LEN_BYTES as usize;

/// Passes a packet of connection `id` to its peer: one copy when the receiver has buffers and gives
/// credit, else through the sender's buffer, which its credit never exceeds.
pub(crate) fn pass_to_guest(
    table: &mut ConnectionTable,
    tx: &TxQueue,
    index: usize,
    (id, peer): (SlabId, SlabId),
    len: u32,
) {
    let other = table.endpoints.get(peer);
    let is_receiving = other
        .is_some_and(|o| o.conn.phase() == Phase::Open && o.conn.guest_shut() & SHUT_RECEIVE == 0);
    let has_backlog = table.endpoints.get(id).is_some_and(|ep| !ep.ring.is_empty());
    let mut done = 0;
    if is_receiving && !has_backlog {
        done = copy_to_guest(table, tx, index, peer, len);
    }
    let Some(ep) = table.endpoints.get_mut(id) else { return };
    if !is_receiving {
        return ep.conn.note_forwarded(len);
    }
    ep.conn.note_forwarded(done);
    if done < len {
        let buffered = ep.ring.push(tx.bytes(index), HEADER + done as usize, (len - done) as usize);
        tx.count_copied(buffered as u64);
        table.count_buffered(id, buffered as u64);
        table.enqueue(peer);
    }
}

/// Copies a packet's payload into the receiver's buffers, as far as there are buffers, credit
/// and something left of the receiver's share of the round. Returns how many bytes went.
fn copy_to_guest(
    table: &mut ConnectionTable,
    tx: &TxQueue,
    index: usize,
    peer: SlabId,
    len: u32,
) -> u32 {
    let Some(other) = table.endpoints.get_mut(peer) else { return 0 };
    let Some(port) = table.ports.get_mut(other.port) else { return 0 };
    // Those who waited longer for buffers come first.
    if port.is_starved {
        return 0;
    }
    let Some(rx) = port.rx.as_mut().filter(|_| port.knows_driver) else { return 0 };
    let (cid, mut done) = (port.spec.cid, 0);
    while done < len {
        let room = other.conn.send_room().min(len - done);
        if room == 0 {
            break;
        }
        if let Err(wait) = rx.ensure_buffer() {
            port.is_starved = wait == WaitReason::Buffers;
            break;
        }
        let Some(chain) = rx.peek(0) else { break };
        let n = room.min(rx.bytes_left()).min(chain.writable_len - HEADER_LEN_BYTES);
        let from = HEADER + done as usize;
        let n = copy_across(tx.bytes(index), from, chain.writable, HEADER, n as usize) as u32;
        if n == 0 {
            break;
        }
        other.send_payload(rx, cid, n);
        rx.count_copied(n);
        port.spec.stats.bytes_to_guest.add(u64::from(n));
        done += n;
    }
    done
}

/// Sends bytes out of the sending guest's buffer to connection `id`, up to `room`; one receive
/// buffer is at hand.
pub(crate) fn send_buffered(
    table: &mut ConnectionTable,
    rx: &mut RxQueue,
    (id, peer): (SlabId, SlabId),
    room: u32,
) -> u32 {
    let Some(cid) = table.cid_of(id) else { return 0 };
    let mut moved = 0;
    while moved < room && rx.ensure_buffer().is_ok() {
        let Some(sender) = table.endpoints.get_mut(peer).filter(|s| !s.ring.is_empty()) else {
            break;
        };
        let Some(chain) = rx.peek(0) else { break };
        let most = (chain.writable_len - HEADER_LEN_BYTES).min(room - moved);
        let (a, b) = sender.ring.front(most as usize);
        let mut n = copy_in(chain.writable, HEADER, a);
        n += copy_in(chain.writable, HEADER + n, b);
        sender.ring.consume(n);
        sender.conn.note_forwarded(n as u32);
        let Some(ep) = table.endpoints.get_mut(id) else { break };
        ep.send_payload(rx, cid, n as u32);
        rx.count_copied(n as u32);
        moved += n as u32;
    }
    table.try_free(peer);
    if table.has_work(peer) {
        table.enqueue(peer);
    }
    moved
}
