//! Fake agent that moves the bytes itself, or answers as a test wants: for tests of the calls of
//! programs, in all languages.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, OWN_POSITION, Request, VERSION, op};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::IoSliceMut;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, recvmsg, send, shutdown,
    socket_with,
};
use tempfile::TempDir;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Answer to a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Say {
    /// Moves all bytes.
    Move,
    /// Moves at most this many bytes, and gives this reason for the rest.
    AtMost(u64, Reason),
    /// Moves nothing, with this reason.
    Refuse(Reason),
    /// Dies after it has moved this many bytes.
    Die(u64),
    /// Waits until the program cancels, and answers that.
    Hold,
}

/// Pipe or query that a program asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    pub op: u16,
    pub source: Option<u64>,
    pub sink: Option<u64>,
    pub len_bytes: u64,
    pub timeout_ms: u32,
}

#[derive(Debug, Default)]
struct State {
    says: VecDeque<Say>,
    held_len_bytes: Option<u64>,
    asked: Vec<Asked>,
    min_kib: u32,
    connections: Vec<Arc<OwnedFd>>,
    accepted: usize,
    cancelled: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Fake agent. Ends, with all its connections, when dropped.
#[derive(Debug)]
pub struct FakeAgent {
    pub socket: PathBuf,
    listener: Arc<OwnedFd>,
    shared: Arc<Shared>,
    _folder: TempDir,
}

impl FakeAgent {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent");
        let flags = SocketFlags::CLOEXEC;
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        listen(&listener, 64).unwrap();
        let (listener, shared) = (Arc::new(listener), Arc::new(Shared::default()));
        let (accepting, served) = (listener.clone(), shared.clone());
        thread::spawn(move || {
            // Programs that other tests start meanwhile check their inherited descriptors.
            while let Ok(program) = accept_with(&accepting, SocketFlags::CLOEXEC) {
                let (program, shared) = (Arc::new(program), served.clone());
                let mut state = shared.state.lock().unwrap();
                state.connections.push(program.clone());
                state.accepted += 1;
                drop(state);
                thread::spawn(move || serve(&program, &shared));
            }
        });
        Self { socket, listener, shared, _folder: folder }
    }

    /// Sets the answers to the next pipes; of all others it moves all bytes.
    pub fn say(&self, says: impl IntoIterator<Item = Say>) {
        self.shared.state.lock().unwrap().says.extend(says);
    }

    /// Holds pipes of this length until the program cancels: of several that a program starts
    /// beside itself, the order is not known.
    pub fn hold(&self, len_bytes: u64) {
        self.shared.state.lock().unwrap().held_len_bytes = Some(len_bytes);
    }

    /// Sets the break-even size in answers to queries.
    pub fn set_min_kib(&self, min_kib: u32) {
        self.shared.state.lock().unwrap().min_kib = min_kib;
    }

    /// Returns the requests since the last call, with queries.
    pub fn everything_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.shared.state.lock().unwrap().asked)
    }

    /// Returns the pipes among these.
    pub fn asked(&self) -> Vec<Asked> {
        let mut asked = self.everything_asked();
        asked.retain(|asked| asked.op == op::PIPE);
        asked
    }

    /// Waits until this many held pipes were cancelled since its start.
    pub fn wait_cancelled(&self, count: usize) {
        let state = self.shared.state.lock().unwrap();
        drop(self.shared.changed.wait_while(state, |state| state.cancelled < count).unwrap());
    }

    /// Number of connections that programs have made.
    pub fn accepted(&self) -> usize {
        self.shared.state.lock().unwrap().accepted
    }

    /// Closes all connections, as an agent does with those that are idle for long.
    pub fn close_all(&self) {
        for connection in self.shared.state.lock().unwrap().connections.drain(..) {
            let _ = shutdown(&connection, Shutdown::Both);
        }
    }
}

impl FakeAgent {
    /// Ends the agent.
    pub fn end(&self) {
        let _ = shutdown(&self.listener, Shutdown::Both);
        self.close_all();
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.end();
    }
}

/// Guard that ends a connection, also when its thread panics: the program must not wait for ever.
struct Leave<'a>(&'a Arc<OwnedFd>, &'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let _ = shutdown(self.0, Shutdown::Both);
        if let Ok(mut state) = self.1.state.lock() {
            state.connections.retain(|kept| !Arc::ptr_eq(kept, self.0));
        }
    }
}

fn serve(program: &Arc<OwnedFd>, shared: &Shared) {
    let _leave = Leave(program, shared);
    while let Some((request, fds)) = receive(program) {
        let (say, min_kib) = {
            let mut state = shared.state.lock().unwrap();
            state.asked.push(asked(&request));
            let is_pipe = request.op.get() == op::PIPE;
            let say = match is_pipe {
                true if state.held_len_bytes == Some(request.len_bytes.get()) => Some(Say::Hold),
                true => state.says.pop_front(),
                false => None,
            };
            (say.unwrap_or(Say::Move), state.min_kib)
        };
        let (moved, reason, min_kib) = match request.op.get() {
            op::QUERY => (0, Reason::Complete, min_kib),
            _ => match pipe(&request, fds, say, program) {
                Some((moved, reason)) => (moved, reason, 0),
                None => break,
            },
        };
        let errno = if moved > 0 { 0 } else { reason.errno() };
        let answer = Answer {
            magic: U32::new(MAGIC),
            version: U16::new(VERSION),
            reason: U16::new(reason as u16),
            errno: U32::new(errno),
            min_bytes_kib: U32::new(min_kib),
            moved_bytes: U64::new(moved),
        };
        let _ = send(program, answer.as_bytes(), SendFlags::NOSIGNAL);
        if say == Say::Hold {
            shared.state.lock().unwrap().cancelled += 1;
            shared.changed.notify_all();
        }
    }
}

fn asked(request: &Request) -> Asked {
    let place = |at: U64| (at.get() != OWN_POSITION).then(|| at.get());
    Asked {
        op: request.op.get(),
        source: place(request.source_offset),
        sink: place(request.sink_offset),
        len_bytes: request.len_bytes.get(),
        timeout_ms: request.timeout_ms.get(),
    }
}

fn receive(program: &OwnedFd) -> Option<(Request, Vec<OwnedFd>)> {
    let mut bytes = [0; size_of::<Request>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(program, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    (got.bytes == bytes.len()).then(|| (Request::read_from_bytes(&bytes).unwrap(), fds))
}

/// Moves the bytes. Returns their number and the reason for the rest; none: the agent dies.
fn pipe(
    request: &Request,
    fds: Vec<OwnedFd>,
    say: Say,
    program: &OwnedFd,
) -> Option<(u64, Reason)> {
    let [source, sink] = <[OwnedFd; 2]>::try_from(fds).unwrap();
    let mut from = End::new(source, request.source_offset.get());
    let mut to = End::new(sink, request.sink_offset.get());
    let len = request.len_bytes.get();
    Some(match say {
        Say::Refuse(reason) => (0, reason),
        Say::Move => match carry(&mut from, &mut to, len) {
            moved if moved == len => (moved, Reason::Complete),
            moved => (moved, Reason::EndOfFile),
        },
        Say::AtMost(most, reason) => (carry(&mut from, &mut to, len.min(most)), reason),
        Say::Die(moved) => {
            carry(&mut from, &mut to, len.min(moved));
            return None;
        }
        Say::Hold => {
            drop((from, to));
            // Until it has shut it down or closed it.
            assert!(receive(program).is_none());
            (0, Reason::Cancelled)
        }
    })
}

/// End of a pipe, with its position in a file.
struct End {
    file: File,
    at: Option<u64>,
    own_position: bool,
}

impl End {
    fn new(fd: OwnedFd, offset: u64) -> Self {
        let kind = FileType::from_raw_mode(fstat(&fd).unwrap().st_mode);
        let own_position = kind == FileType::RegularFile && offset == OWN_POSITION;
        let at = match kind {
            FileType::RegularFile if own_position => Some(seek(&fd, SeekFrom::Current(0)).unwrap()),
            FileType::RegularFile => Some(offset),
            _ => None,
        };
        Self { file: fd.into(), at, own_position }
    }

    fn read(&mut self, into: &mut [u8]) -> usize {
        match self.at {
            Some(at) => self.file.read_at(into, at).unwrap(),
            None => rustix::io::read(self.file.as_fd(), into).unwrap(),
        }
    }

    fn write(&mut self, mut bytes: &[u8]) {
        match self.at {
            Some(at) => self.file.write_all_at(bytes, at).unwrap(),
            None => {
                while !bytes.is_empty() {
                    bytes = &bytes[rustix::io::write(self.file.as_fd(), bytes).unwrap()..];
                }
            }
        }
    }

    fn go_on(&mut self, by: usize) {
        if let Some(at) = &mut self.at {
            *at += by as u64;
            if self.own_position {
                seek(&self.file, SeekFrom::Start(*at)).unwrap();
            }
        }
    }
}

fn carry(from: &mut End, to: &mut End, len: u64) -> u64 {
    let (mut moved, mut buffer) = (0, vec![0; 64 << 10]);
    while moved < len {
        let part = buffer.len().min((len - moved) as usize);
        let got = from.read(&mut buffer[..part]);
        if got == 0 {
            break;
        }
        to.write(&buffer[..got]);
        from.go_on(got);
        to.go_on(got);
        moved += got as u64;
    }
    moved
}
