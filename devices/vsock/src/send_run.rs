//! Packets of one batch for one Unix socket, which leave in one system call.

use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::connection_table::ConnectionTable;
use crate::endpoint::FarEnd;
use crate::limits::BATCH;
use crate::packet::HEADER_LEN_BYTES;
use crate::queues::TxQueue;
use crate::slab::SlabId;
use crate::unix_socket::Iovecs;

const HEADER: usize = HEADER_LEN_BYTES as usize;

/// Run of packets for one Unix socket.
#[derive(Debug)]
pub(crate) struct SendRun {
    endpoint: Option<SlabId>,
    /// Index in the batch and payload bytes of each packet.
    pieces: Vec<(usize, u32)>,
}

impl SendRun {
    pub fn new() -> Self {
        Self { endpoint: None, pieces: Vec::with_capacity(BATCH) }
    }

    /// Connection whose packets it has.
    pub fn endpoint(&self) -> Option<SlabId> {
        self.endpoint
    }

    /// Begins anew with packets of a connection.
    pub fn begin(&mut self, id: SlabId) {
        self.endpoint = Some(id);
        self.pieces.clear();
    }

    /// Adds a packet with `len` bytes of payload.
    pub fn push(&mut self, index: usize, len: u32) {
        self.pieces.push((index, len));
    }

    /// Sends the packets gathered for one Unix socket: one system call, unless they have more
    /// pieces than it takes. What does not fit goes to the connection's buffer.
    pub fn flush(&mut self, table: &mut ConnectionTable, iovecs: &mut Iovecs, tx: &TxQueue) {
        let Some(id) = self.endpoint.take() else { return };
        let total: u32 = self.pieces.iter().map(|(_, len)| len).sum();
        let Some(ep) = table.endpoints.get_mut(id) else { return };
        let mut sent = 0;
        let mut broken = false;
        if let FarEnd::Host(end) = &mut ep.far {
            while ep.ring.is_empty() && end.writable && sent < total {
                iovecs.clear();
                let wanted = gather(&self.pieces, sent, |i, offset, len| {
                    iovecs.add(tx.bytes(i), offset, len)
                });
                // SAFETY: the buffers are those of `tx`'s batch, which keeps them mapped.
                match unsafe { iovecs.send(end.fd.as_fd()) } {
                    Ok(n) => {
                        sent += n as u32;
                        end.writable = n == wanted && n > 0;
                    }
                    Err(Errno::AGAIN) => end.writable = false,
                    Err(_) => {
                        broken = true;
                        break;
                    }
                }
            }
        }
        ep.conn.note_forwarded(sent);
        if broken {
            return table.stop_sending_to_host(id);
        }
        if sent < total {
            let ring = &mut ep.ring;
            let buffered =
                gather(&self.pieces, sent, |i, offset, len| ring.push(tx.bytes(i), offset, len));
            tx.count_copied(buffered as u64);
            table.count_buffered(id, buffered as u64);
        }
    }
}

/// Walks the payload of a run's pieces behind the first `skip` bytes; `f` gets batch index, offset
/// and length, and says how much it took. Stops when it takes less. Returns the sum.
fn gather(
    pieces: &[(usize, u32)],
    skip: u32,
    mut f: impl FnMut(usize, usize, usize) -> usize,
) -> usize {
    let mut skip = skip as usize;
    let mut sum = 0;
    for &(index, len) in pieces {
        let len = len as usize;
        if skip >= len {
            skip -= len;
            continue;
        }
        let took = f(index, HEADER + skip, len - skip);
        sum += took;
        if took < len - skip {
            break;
        }
        skip = 0;
    }
    sum
}
