//! Rig of an agent, a file system on a loop device, and a daemon that reads the agent's extents
//! from the image.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use agent::host::Unix;
use agent::line::Heartbeat;
use agent::{Agent, Config};
use guest_abi::Reason;
use guest_abi::frame::Header;
use guest_abi::pipe::*;
use guest_abi::program::{self, Answer, Request, op};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use tempfile::TempDir;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

pub use disk::Disk;

mod disk;
pub mod sink_rig;

const MIB: u64 = 1 << 20;
/// Time longer than any wait of a test that passes.
pub const LONG: Duration = Duration::from_secs(30);

pub fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-e", "-c", script]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {told}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// File system on a loop device. Unmounted when dropped.
pub struct Mounted {
    pub image: PathBuf,
    /// The loop device, and the device that is mounted.
    whole: String,
    device: String,
    folder: TempDir,
    disk: Option<Arc<Disk>>,
}

impl Mounted {
    /// Makes a file system with a `make` command and mounts it with options, on a partition that
    /// begins at that offset, or on the whole disk.
    pub fn new(make: &str, options: &str, partition: Option<u32>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(512 * MIB).unwrap();
        let whole = sh(&format!("losetup -f --show {}", image.display()));
        Self::on(folder, image, whole, (make, options, partition), None)
    }

    /// Mounts a file system on a disk that replaces placeholders.
    pub fn served(make: &str) -> (Self, Arc<Disk>) {
        let folder = tempfile::tempdir().unwrap();
        let (image, served) = (folder.path().join("image"), folder.path().join("served"));
        File::create(&image).unwrap().set_len(512 * MIB).unwrap();
        File::create(&served).unwrap();
        let disk = Disk::serve(&image, &served);
        let whole = sh(&format!("losetup -f --show {}", served.display()));
        (Self::on(folder, image, whole, (make, "rw", None), Some(disk.clone())), disk)
    }

    fn on(
        folder: TempDir,
        image: PathBuf,
        whole: String,
        (make, options, partition): (&str, &str, Option<u32>),
        disk: Option<Arc<Disk>>,
    ) -> Self {
        // Said to the kernel: not every kernel reads tables.
        let device = match partition {
            Some(first_sector) => {
                sh(&format!("addpart {whole} 1 {first_sector} 900000; echo {whole}p1"))
            }
            None => whole.clone(),
        };
        let mounted = Self { image, whole, device, folder, disk };
        let point = mounted.path("");
        sh(&format!("{make} {0}; mkdir {1}", mounted.device, point.display()));
        mounted.mount(options);
        mounted
    }

    fn mount(&self, options: &str) {
        sh(&format!("mount -o {options} {} {}", self.device, self.path("").display()));
    }

    /// Runs a command of debugfs while the file system is not mounted.
    pub fn debugfs(&self, command: &str) {
        sh(&format!(
            "umount {}; debugfs -w -R '{command}' {}",
            self.path("").display(),
            self.device
        ));
        self.mount("rw");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("mnt").join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let point = self.path("");
        // A test that failed may have left less than all of it.
        let mut script = format!("umount -l {}; losetup -d {}", point.display(), self.whole);
        if self.device != self.whole {
            script.insert_str(
                script.find("losetup").unwrap(),
                &format!("delpart {} 1; ", self.whole),
            );
        }
        if self.disk.is_some() {
            script
                .push_str(&format!("; umount -l {}", self.folder.path().join("served").display()));
        }
        let _ = Command::new("sh").args(["-c", &script]).status();
    }
}

/// Pipe that the daemon was asked for.
#[derive(Debug, Clone)]
pub struct Asked {
    pub id: u64,
    pub len_bytes: u64,
    /// Whether the guest has the source in memory.
    pub is_cached: bool,
    /// Sink, if it is a socket.
    pub socket: SocketEnd,
    /// Source, if it is a socket.
    pub from: SocketEnd,
    pub places: PlacesEnd,
    pub extents: Vec<Extent>,
    /// Content of a file.
    pub bytes: Vec<u8>,
}

/// Message of the agent that is no new pipe.
#[derive(Debug)]
pub enum Seen {
    Probe,
    ProbePlaces,
    Pipe(Box<Asked>),
    Cancel(Reason),
    /// Number of own bytes, and the state of the sink.
    Own(u64, Option<Box<SocketEnd>>),
    /// Offset, length, and the errno.
    Taken(u64, u32, u32),
    Ping(u64),
}

/// Daemon's end of one stream.
pub struct Daemon {
    stream: UnixStream,
    image: PathBuf,
    disk: Option<Arc<Disk>>,
    /// Refusals that the agent has reported.
    pub refused: Vec<(Reason, u32)>,
}

impl Daemon {
    pub fn say(&mut self, kind: u16, id: u64, body: &[u8]) {
        let header = Header::new(kind, id, body.len());
        self.stream.write_all(&[header.as_bytes(), body].concat()).unwrap();
    }

    pub fn done(&mut self, id: u64, moved_bytes: u64, reason: Reason) {
        let (moved_bytes, reason) = (U64::new(moved_bytes), U16::new(reason as u16));
        let done = Done { moved_bytes, reason, reserved: [0; 6] };
        self.say(kind::DONE, id, done.as_bytes());
    }

    pub fn begun(&mut self, id: u64, own_bytes: u64) {
        let begun = Begun { own_bytes: U64::new(own_bytes) };
        self.say(kind::BEGUN, id, begun.as_bytes());
    }

    pub fn take(&mut self, id: u64, at: u64, len_bytes: u32, how: u8, bytes: &[u8]) {
        let (at, len_bytes) = (U64::new(at), U32::new(len_bytes));
        let take = Take { at, len_bytes, how, reserved: [0; 3] };
        self.say(kind::TAKE, id, &[take.as_bytes(), bytes].concat());
    }

    pub fn take_places(&mut self, id: u64, at: u64, len_bytes: u32) {
        self.take(id, at, len_bytes, take::PLACES, &[]);
    }

    pub fn take_bytes(&mut self, id: u64, at: u64, bytes: &[u8]) {
        self.take(id, at, bytes.len() as u32, take::BYTES, bytes);
    }

    /// Checks that the agent has written a range. Returns the errno.
    pub fn taken(&mut self, at: u64, len_bytes: u32) -> u32 {
        match self.next().unwrap() {
            Seen::Taken(got, len, errno) if (got, len) == (at, len_bytes) => errno,
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut header = Header::new_zeroed();
        self.stream.read_exact(header.as_mut_bytes()).ok()?;
        let mut body = vec![0; header.body_len().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        Some((header, body))
    }

    /// Returns the next message; answers probes as a daemon does. None at the end.
    pub fn next(&mut self) -> Option<Seen> {
        let (header, body) = loop {
            match self.read()? {
                (header, body) if header.kind.get() == kind::REFUSALS => self.hear_refusals(&body),
                message => break message,
            }
        };
        Some(match header.kind.get() {
            kind::PROBE => {
                self.probed(header.id.get(), &Probe::read_from_bytes(&body).unwrap());
                Seen::Probe
            }
            kind::PIPE => Seen::Pipe(Box::new(self.asked(header.id.get(), &body))),
            // Nobody sees what is read here.
            kind::PROBE_WRITE | kind::PROBE_READ => {
                self.expect(header.id.get(), &ProbePlaces::read_from_bytes(&body).unwrap());
                Seen::ProbePlaces
            }
            kind::OWN => {
                let (own, rest) = Own::read_from_prefix(&body).unwrap();
                let end = |bytes| Box::new(SocketEnd::read_from_bytes(bytes).unwrap());
                Seen::Own(own.own_bytes.get(), Some(rest).filter(|rest| !rest.is_empty()).map(end))
            }
            kind::TAKEN => {
                let taken = Taken::read_from_bytes(&body).unwrap();
                Seen::Taken(taken.at.get(), taken.len_bytes.get(), taken.errno.get())
            }
            kind::PING => {
                assert!(body.is_empty());
                Seen::Ping(header.id.get())
            }
            kind::CANCEL => {
                let cancel = Cancel::read_from_bytes(&body).unwrap();
                Seen::Cancel(Reason::from_number(cancel.reason.get()))
            }
            other => panic!("message of kind {other}"),
        })
    }

    fn hear_refusals(&mut self, body: &[u8]) {
        let all = <[Refusal]>::ref_from_bytes(body).unwrap();
        assert!(!all.is_empty());
        let read = |one: &Refusal| (Reason::from_number(one.reason.get()), one.count.get());
        self.refused.extend(all.iter().map(read));
    }

    /// Waits until this many refusals were reported.
    pub fn wait_refused(&mut self, count: u32) {
        while self.refused.iter().map(|(_, count)| count).sum::<u32>() < count {
            let (header, body) = self.read().unwrap();
            assert_eq!(header.kind.get(), kind::REFUSALS);
            self.hear_refusals(&body);
        }
    }

    /// Returns the next pipe, after any probes.
    pub fn pipe(&mut self) -> Asked {
        loop {
            match self.next().unwrap() {
                Seen::Probe | Seen::ProbePlaces => {}
                Seen::Pipe(asked) => return *asked,
                other => panic!("{other:?}"),
            }
        }
    }

    fn probed(&mut self, id: u64, probe: &Probe) {
        let mut block = vec![0; PROBE_BLOCK_BYTES];
        let image = File::open(&self.image).unwrap();
        let read = image.read_exact_at(&mut block, probe.offset.get()).is_ok();
        let found = read && block == probe.secret.repeat(PROBE_BLOCK_BYTES / 32);
        let mut probed = Probed::new_zeroed();
        probed.disk = U32::new(if found { 3 } else { NO_DISK });
        probed.reason = U16::new(if found { 0 } else { Reason::NoDisk as u16 });
        self.say(kind::PROBED, id, probed.as_bytes());
    }

    /// Expects a probe. A disk that replaces nothing fails the self-test.
    fn expect(&mut self, id: u64, probe: &ProbePlaces) {
        assert_eq!(probe.disk.get(), 3);
        if let Some(disk) = &self.disk {
            disk.know(probe.tag, probe.secret.repeat(PROBE_BLOCK_BYTES / 32));
        }
        let mut probed = Probed::new_zeroed();
        probed.disk = probe.disk;
        self.say(kind::PROBED, id, probed.as_bytes());
    }

    fn asked(&self, id: u64, body: &[u8]) -> Asked {
        let (pipe, mut rest) = Pipe::read_from_prefix(body).unwrap();
        assert_eq!((pipe.flags & !flag::CACHED, pipe.reserved), (0, [0; 5]));
        let is_cached = pipe.flags != 0;
        let len_bytes = pipe.len_bytes.get();
        let (extents, bytes) = Default::default();
        let [socket, from] = [SocketEnd::new_zeroed(); 2];
        let places = PlacesEnd::new_zeroed();
        let mut asked = Asked { id, len_bytes, is_cached, socket, from, places, extents, bytes };
        match pipe.source {
            end::SOCKET => (asked.from, rest) = SocketEnd::read_from_prefix(rest).unwrap(),
            end::FILE => {
                let (file, more) = FileEnd::read_from_prefix(rest).unwrap();
                assert_eq!(file.disk.get(), 3);
                let (list, more) = more.split_at(file.extents.get() as usize * size_of::<Extent>());
                let read = |bytes| Extent::read_from_bytes(bytes).unwrap();
                asked.extents = list.chunks(size_of::<Extent>()).map(read).collect();
                rest = more;
                self.read_extents(&mut asked);
            }
            other => panic!("a source of kind {other}"),
        }
        match pipe.sink {
            end::SOCKET => asked.socket = SocketEnd::read_from_bytes(rest).unwrap(),
            end::PLACES => asked.places = PlacesEnd::read_from_bytes(rest).unwrap(),
            other => panic!("a sink of kind {other}"),
        }
        asked
    }

    fn read_extents(&self, asked: &mut Asked) {
        let image = File::open(&self.image).unwrap();
        for extent in &asked.extents {
            let mut part = vec![0; extent.len_bytes.get() as usize];
            if extent.offset.get() != HOLE {
                image.read_exact_at(&mut part, extent.offset.get()).unwrap();
            }
            asked.bytes.extend(part);
        }
        assert_eq!(asked.bytes.len() as u64, asked.len_bytes);
    }
}

/// Agent, and the address at which its daemon listens.
pub struct World {
    pub agent: Option<Agent>,
    pub socket: PathBuf,
    image: PathBuf,
    disk: Option<Arc<Disk>>,
    daemons: UnixListener,
    _folder: TempDir,
}

impl World {
    /// Starts an agent that accepts loop devices, or, as in a guest, does not.
    pub fn new(image: &Path, any_device: bool) -> Self {
        Self::with(image, any_device, Heartbeat::default(), None)
    }

    /// Starts an agent on a disk that replaces placeholders.
    pub fn served((mounted, disk): &(Mounted, Arc<Disk>)) -> Self {
        Self::with(&mounted.image, true, Heartbeat::default(), Some(disk.clone()))
    }

    pub fn with(
        image: &Path,
        any_device: bool,
        heartbeat: Heartbeat,
        disk: Option<Arc<Disk>>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (socket, host) = (folder.path().join("run/agent"), folder.path().join("host"));
        let daemons = UnixListener::bind(&host).unwrap();
        let config = Config {
            socket: socket.clone(),
            dial: Unix(host),
            any_device,
            heartbeat,
            secret: Vec::new(),
        };
        let agent = Some(Agent::start(config).unwrap());
        Self { agent, socket, image: image.to_owned(), disk, daemons, _folder: folder }
    }

    /// Answers the agent's next stream, and returns when programs see it.
    pub fn daemon(&self) -> Daemon {
        let stream = self.daemons.accept().unwrap().0;
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (image, disk) = (self.image.clone(), self.disk.clone());
        let mut daemon = Daemon { stream, image, disk, refused: Vec::new() };
        let (header, body) = daemon.read().unwrap();
        assert_eq!((header.kind.get(), body.len()), (kind::HELLO, size_of::<Hello>()));
        let welcome = Welcome {
            magic: U64::new(MAGIC),
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            max_pipes: U32::new(16),
            max_len_bytes: U64::new(1 << 40),
        };
        daemon.say(kind::WELCOME, 0, welcome.as_bytes());
        let program = self.program();
        while ask(&program, &request(op::QUERY, 0, 0), &[]).reason.get() != 0 {
            thread::yield_now();
        }
        daemon
    }

    /// Starts a daemon, in a thread, that answers that all bytes of each pipe were moved. Returns
    /// its pipes.
    pub fn obliging_daemon(&self) -> Receiver<Asked> {
        let (mut daemon, (sender, receiver)) = (self.daemon(), channel());
        thread::spawn(move || oblige(&mut daemon, &sender));
        receiver
    }

    /// Connects a program.
    pub fn program(&self) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let program = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&program, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        program
    }
}

fn oblige(daemon: &mut Daemon, sender: &Sender<Asked>) {
    while let Some(seen) = daemon.next() {
        if let Seen::Pipe(asked) = seen {
            // The test may have seen enough. What it looks for is there before the program goes on.
            let _ = sender.send((*asked).clone());
            daemon.done(asked.id, asked.len_bytes, Reason::Complete);
        }
    }
}

pub fn request(op: u16, source_offset: u64, len_bytes: u64) -> Request {
    Request {
        magic: U32::new(program::MAGIC),
        version: U16::new(program::VERSION),
        op: U16::new(op),
        flags: U32::ZERO,
        timeout_ms: U32::ZERO,
        source_offset: U64::new(source_offset),
        sink_offset: U64::new(program::OWN_POSITION),
        len_bytes: U64::new(len_bytes),
    }
}

pub fn send(program: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    match sendmsg(program, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
        // The agent has refused the connection and said so.
        Err(rustix::io::Errno::PIPE) => {}
        other => assert_eq!(other.unwrap(), bytes.len()),
    }
}

pub fn answer(program: &OwnedFd) -> Answer {
    let mut bytes = [0; size_of::<Answer>() + 1];
    let (len, _) = recv(program, &mut bytes, RecvFlags::empty()).unwrap();
    Answer::read_from_bytes(&bytes[..len]).unwrap()
}

pub fn ask(program: &OwnedFd, request: &Request, fds: &[BorrowedFd<'_>]) -> Answer {
    send(program, request.as_bytes(), fds);
    answer(program)
}

/// Returns the reason against a pipe from a file to a socket.
pub fn refusal(program: &OwnedFd, source: impl AsFd, sink: impl AsFd) -> Reason {
    let request = request(op::PIPE, 0, 1 << 20);
    let answer = ask(program, &request, &[source.as_fd(), sink.as_fd()]);
    assert_eq!(answer.moved_bytes.get(), 0);
    Reason::from_number(answer.reason.get())
}

/// Makes a connection: the server's end and the client's.
pub fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, client)
}
