//! Server side of the ivshmem protocol, version 0 (QEMU documentation, `specs/ivshmem-spec`).
//!
//! A message is a number of eight bytes, little-endian, some with a descriptor. A new member is
//! told the version, its id, and the shared memory (-1); then for itself, the host and each peer as
//! many times the id as it has vectors, each with the eventfd that rings it. The peers are told of
//! the new member the same way. Members say nothing.
//!
//! Unlike other servers, ours gives each member a memory of its own: its mailbox. The host is a
//! peer, too, with the id [`HOST_ID`]; all of its vectors ring the same eventfd.
//!
//! No member is told that another has left (an id without a descriptor): QEMU, 7.2 and today's,
//! frees its eventfds then, and once more with the device; and it uses them after that when the id
//! comes back. So the eventfds belong to the id. The next member with the id gets the same ones,
//! and a peer that was told of them is not told again.
//!
//! Connections are socket pairs whose other end goes to QEMU through its monitor, so there is no
//! socket file, and who somebody is comes from the monitor.
//!
//! QEMU makes every descriptor that it receives blocking, and with it ours, which is the same one:
//! all of them are [`Doorbell`]s, which do not mind.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::doorbell::Doorbell;
use base::shm::SharedMemory;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

/// Id of the host.
pub(crate) const HOST_ID: u16 = 0;
/// Version of the protocol.
const PROTOCOL_VERSION: i64 = 0;
/// Number of the message whose descriptor is the shared memory.
const SHARED_MEMORY: i64 = -1;

/// Descriptor that goes with a message.
#[derive(Debug, Clone)]
enum Attachment {
    Memory(Arc<SharedMemory>),
    Bell(Arc<Doorbell>),
}

impl AsFd for Attachment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Memory(memory) => memory.as_fd(),
            Self::Bell(bell) => bell.as_fd(),
        }
    }
}

/// Connection of one member, and the messages that wait for it.
#[derive(Debug)]
struct MemberConnection {
    /// Socket; none when it was given up.
    connection: Option<OwnedFd>,
    /// Whether no more messages go to the member.
    is_silenced: bool,
    /// Ids whose eventfds the member has.
    announced: BTreeSet<u16>,
    /// Messages to be sent: at most once the eventfds of each id.
    queue: VecDeque<(i64, Option<Attachment>)>,
}

/// Doorbell server of one trust domain.
#[derive(Debug)]
pub(crate) struct DoorbellServer {
    vectors: u32,
    host: Arc<Doorbell>,
    /// Doorbells of each id that was used.
    bells: BTreeMap<u16, Vec<Arc<Doorbell>>>,
    seats: BTreeMap<u16, MemberConnection>,
}

impl DoorbellServer {
    /// Makes a server without members; each will have this number of vectors.
    pub fn new(vectors: u32) -> io::Result<Self> {
        let host = Arc::new(Doorbell::new()?);
        Ok(Self { vectors, host, bells: BTreeMap::new(), seats: BTreeMap::new() })
    }

    /// Number of doorbells of each member.
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Adds a member and tells its peers. Returns the other end of its connection, in which all
    /// that it must be told at the beginning is already.
    pub fn add(&mut self, id: u16, mailbox: Arc<SharedMemory>) -> io::Result<OwnedFd> {
        let bells = match self.bells.entry(id) {
            Entry::Occupied(bells) => bells.into_mut(),
            Entry::Vacant(place) => {
                let new = || Doorbell::new().map(Arc::new);
                place.insert((0..self.vectors).map(|_| new()).collect::<io::Result<_>>()?)
            }
        };
        // Calls for the former member with this id are not for the new one.
        for bell in bells.iter() {
            bell.drain();
        }
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let (announced, queue) = Default::default();
        let mut seat =
            MemberConnection { connection: Some(ours), is_silenced: false, announced, queue };
        seat.enqueue(PROTOCOL_VERSION, None);
        seat.enqueue(id.into(), None);
        seat.enqueue(SHARED_MEMORY, Some(Attachment::Memory(mailbox)));
        // Its own first: QEMU goes on to watch the numbers of these descriptors when the device is
        // gone, and the next device's should be the same.
        seat.announce(id, bells);
        for _ in 0..self.vectors {
            seat.enqueue(HOST_ID.into(), Some(Attachment::Bell(self.host.clone())));
        }
        for (other, peer) in &mut self.seats {
            peer.announce(id, bells);
            seat.announced.insert(*other);
        }
        for other in seat.announced.clone().into_iter().filter(|other| *other != id) {
            for bell in self.bells.get(&other).into_iter().flatten() {
                seat.enqueue(other.into(), Some(Attachment::Bell(bell.clone())));
            }
        }
        self.seats.insert(id, seat);
        self.flush();
        Ok(theirs)
    }

    /// Silences a member: no more messages and calls, since its device is about to go, and QEMU
    /// uses freed memory when a message comes then.
    pub fn silence(&mut self, id: u16) {
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.is_silenced = true;
            seat.queue.clear();
        }
    }

    /// Removes a member's connection.
    pub fn remove(&mut self, id: u16) {
        self.seats.remove(&id);
    }

    /// Rings a doorbell of a member.
    pub fn ring(&self, id: u16, vector: usize) {
        if self.seats.get(&id).is_none_or(|seat| seat.is_silenced) {
            return;
        }
        let bell = self.bells.get(&id).and_then(|bells| bells.get(vector));
        if let Some(Err(error)) = bell.map(|bell| bell.ring()) {
            tracing::warn!(id, vector, "cannot ring a member: {error}");
        }
    }

    /// Doorbell of the host, to wait for.
    pub fn host(&self) -> &Doorbell {
        &self.host
    }

    /// Takes the calls for the host; false when there was none.
    pub fn take_calls(&self) -> bool {
        self.host.drain()
    }

    /// Connections that could not take all messages yet.
    pub fn waiting(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let waits = |seat: &&MemberConnection| !seat.queue.is_empty();
        self.seats.values().filter(waits).filter_map(|seat| Some(seat.connection.as_ref()?.as_fd()))
    }

    /// Sends the messages that connections take now.
    pub fn flush(&mut self) {
        for (id, seat) in &mut self.seats {
            if let Err(error) = seat.flush() {
                tracing::warn!(
                    id,
                    "a member's QEMU takes nothing on its doorbell connection, new peers cannot \
                     be rung by it: {error}"
                );
                seat.connection = None;
                seat.queue.clear();
            }
        }
    }
}

impl MemberConnection {
    fn enqueue(&mut self, value: i64, attached: Option<Attachment>) {
        self.queue.push_back((value, attached));
    }

    /// Announces an id's eventfds, unless that was done before.
    fn announce(&mut self, id: u16, bells: &[Arc<Doorbell>]) {
        if !self.is_silenced && self.announced.insert(id) {
            for bell in bells {
                self.enqueue(id.into(), Some(Attachment::Bell(bell.clone())));
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let Some(connection) = &self.connection else {
            self.queue.clear();
            return Ok(());
        };
        while let Some((value, attached)) = self.queue.front() {
            match send(connection, *value, attached.as_ref()) {
                Ok(()) => {
                    self.queue.pop_front();
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Sends a message whole or not at all: one of eight bytes is never cut.
fn send(connection: &OwnedFd, value: i64, attached: Option<&Attachment>) -> Result<(), Errno> {
    let bytes = value.to_le_bytes();
    let fds = attached.map(|attached| [attached.as_fd()]);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fds) = &fds {
        // There is room for one.
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match sendmsg(connection, &[IoSlice::new(&bytes)], &mut control, flags)? {
        8 => Ok(()),
        _ => Err(Errno::MSGSIZE),
    }
}

/// Other end of a connection, QEMU's, for tests.
#[cfg(test)]
pub(crate) mod testing {
    use std::io::IoSliceMut;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::*;

    /// Receives the next message, as QEMU reads it; none when there is none.
    pub(crate) fn receive(connection: BorrowedFd<'_>) -> Option<(i64, Option<OwnedFd>)> {
        let mut bytes = [0; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(connection, &mut into, &mut control, flags).ok()?.bytes;
        if got == 0 {
            return None;
        }
        assert_eq!(got, 8);
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        assert!(fds.len() <= 1);
        Some((i64::from_le_bytes(bytes), fds.pop()))
    }

    /// Receives all messages that are there.
    pub(crate) fn receive_all(connection: BorrowedFd<'_>) -> Vec<(i64, Option<OwnedFd>)> {
        std::iter::from_fn(|| receive(connection)).collect()
    }
}

#[cfg(test)]
mod tests;
