//! A file with a lease behind the gate of its disk: a pipe's source. Holes pass no gate, since no
//! disk is read for them.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use guest_abi::pipe::BLOCK_BYTES;

use crate::copy::copy_range;
use crate::disk_gate::DiskGate;
use crate::file_source::FileSource;
use crate::transfer::Transfer;

/// A file that is read through a gate.
pub(crate) struct GatedFile {
    file: FileSource,
    gate: DiskGate,
}

impl GatedFile {
    /// A file of a disk with that gate.
    pub fn new(file: FileSource, gate: DiskGate) -> Self {
        Self { file, gate }
    }

    /// Whether it waits at the VM's ceiling.
    pub fn is_held(&self) -> bool {
        self.gate.is_held()
    }

    /// Waits no more: nothing more is read in order.
    pub fn end_hold(&mut self) {
        self.gate.end_hold();
    }

    /// Moves the next bytes to a socket, at most `max_bytes`.
    pub fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> Transfer {
        let Self { file, gate } = self;
        let sent = match file.next_on_disk() {
            0 => Ok(file.send(sink, max_bytes)),
            left => gate.read(left.min(max_bytes as u64), |most_bytes| {
                let sent = file.send(sink, usize::try_from(most_bytes).unwrap_or(max_bytes));
                (sent.as_ref().map_or(0, |sent| *sent as u64), sent)
            }),
        };
        match sent {
            Ok(Ok(0)) => Transfer::End,
            Ok(Ok(sent)) => Transfer::Bytes(sent),
            Ok(Err(error)) => error.into(),
            Err(at) => Transfer::Held(at),
        }
    }

    /// Puts the next bytes of a range into a file, at most all of it. `is_urgent`: whoever waits
    /// for them is not to wait for the gate.
    pub fn put(
        &mut self,
        (at, len_bytes): (u64, u64),
        (to, to_at): (BorrowedFd<'_>, u64),
        is_urgent: bool,
    ) -> Transfer {
        let Self { file, gate } = self;
        let found = match file.find(at) {
            Ok(Some(found)) => found,
            Ok(None) => return Transfer::Failed(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => return Transfer::Failed(error),
        };
        let left = found.len_bytes.min(len_bytes);
        let copy = |len_bytes| {
            let done = copy_range((found.file, found.offset), (to, to_at), len_bytes);
            (if done.is_ok() { len_bytes } else { 0 }, done.map(|()| len_bytes))
        };
        let put: Result<io::Result<u64>, Instant> = if found.is_hole {
            Ok(copy(left).1)
        } else if is_urgent {
            Ok(gate.read_at_once(|| copy(left)))
        } else {
            gate.read(left, |most_bytes| copy(whole_blocks(most_bytes)))
        };
        match put {
            Ok(Ok(put)) => Transfer::Bytes(usize::try_from(put).unwrap_or(usize::MAX)),
            Ok(Err(error)) => Transfer::Failed(error),
            Err(at) => Transfer::Held(at),
        }
    }

    /// Copies a range; not a long one, and at once.
    pub fn copy(&mut self, at: u64, len_bytes: u64) -> io::Result<Vec<u8>> {
        let Self { file, gate } = self;
        gate.read_at_once(|| {
            let copied = file.copy(at, len_bytes);
            (if copied.is_ok() { len_bytes } else { 0 }, copied)
        })
    }
}

/// Whole blocks that are not more than that, if it is one at least: other pieces cannot be shared
/// with their source.
fn whole_blocks(bytes: u64) -> u64 {
    let block = BLOCK_BYTES as u64;
    if bytes < block { bytes } else { bytes - bytes % block }
}

#[cfg(test)]
mod tests;
