//! Packets to the guests, into the buffers of their receive queues.

use std::os::fd::AsFd;

use rustix::io::Errno;
use sidecore::Ledger;

use crate::connection_table::ConnectionTable;
use crate::endpoint::FarEnd;
use crate::guest_copy::send_buffered;
use crate::limits::{QUANTUM_BYTES, READY_BUDGET};
use crate::packet::{HEADER_LEN_BYTES, Op, RawHeader, SHUT_BOTH, SHUT_SEND};
use crate::port::Port;
use crate::queues::{RxQueue, WaitReason};
use crate::slab::SlabId;
use crate::unix_socket::Iovecs;

const HEADER: usize = HEADER_LEN_BYTES as usize;

/// Result of a connection's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionTurn {
    /// The connection has nothing more for now.
    Idle,
    /// The connection has more than its share.
    More,
    /// The guest has posted no receive buffers.
    Starved,
    /// The port has had its share of this round.
    Spent,
}

impl From<WaitReason> for ConnectionTurn {
    fn from(wait: WaitReason) -> Self {
        match wait {
            WaitReason::Buffers => Self::Starved,
            WaitReason::Round => Self::Spent,
        }
    }
}

/// Turn of a guest's receive queue, with the parts of the engine that it changes.
pub(crate) struct RxTurn<'a> {
    pub table: &'a mut ConnectionTable,
    pub iovecs: &'a mut Iovecs,
}

impl RxTurn<'_> {
    /// Serves one round towards a port's guest. Returns how many packets and connections were
    /// served.
    pub fn serve(&mut self, port: SlabId, ledger: &mut Ledger) -> usize {
        let served = self.table.ports.get_mut(port).filter(|p| p.knows_driver);
        let Some(p) = served else { return 0 };
        let Some(mut rx) = p.rx.take() else { return 0 };
        p.is_starved = false;
        // Before those who copy straight into the buffers in the next round: they get what is left,
        // so that a busy neighbour cannot keep the guest's other connections waiting.
        rx.begin_round();
        let mut done = send_stray_resets(p, &mut rx);
        let mut budget = READY_BUDGET;
        while budget > 0 {
            budget -= 1;
            let Some(p) = self.table.ports.get_mut(port) else { break };
            let Some(id) = p.ready.pop_front(&mut self.table.endpoints) else { break };
            match self.serve_connection(&mut rx, id) {
                ConnectionTurn::Idle => {}
                ConnectionTurn::More => self.table.enqueue(id),
                ConnectionTurn::Spent => {
                    self.table.enqueue(id);
                    break;
                }
                ConnectionTurn::Starved => {
                    if let Some(p) = self.table.ports.get_mut(port) {
                        p.ready.push_front(&mut self.table.endpoints, id);
                        p.spec.stats.buffer_waits.add(1);
                        p.is_starved = true;
                    }
                    break;
                }
            }
            done += 1;
        }
        rx.finish();
        if let Some(p) = self.table.ports.get_mut(port) {
            let spent = rx.spent();
            if spent.requests > 0 {
                // Never held back: answers and credit of connections are among it.
                ledger.debit(p.spec.vm, spent, self.table.timer.now_ns());
            }
            p.rx = Some(rx);
        }
        done
    }

    fn serve_connection(&mut self, rx: &mut RxQueue, id: SlabId) -> ConnectionTurn {
        let mut moved = 0;
        loop {
            if let Some(turn) = send_ops(self.table, rx, id) {
                return turn;
            }
            if moved >= QUANTUM_BYTES {
                return ConnectionTurn::More;
            }
            let far_has_bytes = self.table.far_has_bytes(id);
            let Some(ep) = self.table.endpoints.get_mut(id) else { return ConnectionTurn::Idle };
            let readable = matches!(&ep.far, FarEnd::Host(end) if end.readable);
            if !(readable || far_has_bytes) || !ep.conn.may_send() {
                return ConnectionTurn::Idle;
            }
            let room = ep.conn.send_room().min(QUANTUM_BYTES - moved);
            if room == 0 {
                ep.conn.request_credit();
                if ep.conn.next_op(false).is_none() {
                    return ConnectionTurn::Idle;
                }
                if let Some(p) = self.table.ports.get(ep.port) {
                    p.spec.stats.credit_waits.add(1);
                }
                continue;
            }
            if let Err(wait) = rx.ensure_buffer() {
                return wait.into();
            }
            let room = room.min(rx.bytes_left());
            let n = match &ep.far {
                FarEnd::Guest(peer) => {
                    let peer = *peer;
                    send_buffered(self.table, rx, (id, peer), room)
                }
                _ => self.send_from_host(rx, id, room),
            };
            if n == 0 && far_has_bytes {
                return ConnectionTurn::Idle;
            }
            moved += n;
            if let Some(p) = self.table.port_of(id) {
                p.spec.stats.bytes_to_guest.add(u64::from(n));
            }
        }
    }

    /// Receives bytes straight from the Unix socket into the guest's buffers, up to `room`: one
    /// system call for as many buffers as are at hand.
    fn send_from_host(&mut self, rx: &mut RxQueue, id: SlabId, room: u32) -> u32 {
        let Some(cid) = self.table.cid_of(id) else { return 0 };
        let Some(ep) = self.table.endpoints.get_mut(id) else { return 0 };
        let FarEnd::Host(end) = &mut ep.far else { return 0 };
        self.iovecs.clear();
        let mut asked = 0;
        let mut ahead = 0;
        while let Some(chain) = rx.peek(ahead).filter(|_| asked < room) {
            let most = (chain.writable_len - HEADER_LEN_BYTES).min(room - asked);
            let got = self.iovecs.add(chain.writable, HEADER, most as usize) as u32;
            asked += got;
            ahead += 1;
            if got < most {
                break;
            }
        }
        // SAFETY: the buffers are those of `rx`'s batch, which keeps them mapped; guest memory is
        // never referenced, only copied.
        let received = match unsafe { self.iovecs.receive(end.fd.as_fd()) } {
            Ok(0) => {
                end.readable = false;
                ep.conn.far_shutdown(if end.hung_up { SHUT_BOTH } else { SHUT_SEND });
                return 0;
            }
            Ok(n) => n as u32,
            Err(Errno::AGAIN) => {
                end.readable = false;
                return 0;
            }
            Err(_) => {
                self.table.reset(id);
                return 0;
            }
        };
        // Less than asked for: the socket is empty, and more bytes or the end make a new event.
        end.readable = received == asked || end.ending;
        let mut left = received;
        while left > 0 {
            let Some(chain) = rx.peek(0) else { break };
            let n = left.min(chain.writable_len - HEADER_LEN_BYTES);
            ep.send_payload(rx, cid, n);
            left -= n;
        }
        received
    }
}

/// Sends resets for packets of no connection, as far as there are buffers.
fn send_stray_resets(port: &mut Port, rx: &mut RxQueue) -> usize {
    let mut done = 0;
    while let Some(&(key, kind)) = port.stray_resets.front() {
        if let Err(wait) = rx.ensure_buffer() {
            port.is_starved = wait == WaitReason::Buffers;
            break;
        }
        rx.put(&RawHeader::reset(key, port.spec.cid, kind), 0);
        port.spec.stats.resets_sent.add(1);
        port.stray_resets.pop_front();
        done += 1;
    }
    done
}

/// Sends the packets without payload that are due. Some: the turn is over.
fn send_ops(table: &mut ConnectionTable, rx: &mut RxQueue, id: SlabId) -> Option<ConnectionTurn> {
    loop {
        let far_empty = !table.far_has_bytes(id);
        let Some(ep) = table.endpoints.get_mut(id) else { return Some(ConnectionTurn::Idle) };
        ep.conn.next_op(far_empty)?;
        if let Err(wait) = rx.ensure_buffer() {
            return Some(wait.into());
        }
        let Some(p) = table.ports.get(ep.port) else { return Some(ConnectionTurn::Idle) };
        let (op, header) = ep.conn.take_op(far_empty, p.spec.cid, table.timer.now_ns())?;
        rx.put(&header, 0);
        if op == Op::Rst {
            p.spec.stats.resets_sent.add(1);
            table.release(id);
            return Some(ConnectionTurn::Idle);
        }
        let deadline_ns = ep.conn.deadline_ns();
        table.timer.note(deadline_ns);
    }
}
