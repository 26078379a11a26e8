//! The stream to a VM's agent, and what is said on it.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use guest_abi::Reason;
use guest_abi::frame::Header;
use guest_abi::pipe::{self, NO_DISK, PROBE_BLOCK_BYTES, Probed, kind};
use rustix::fd::AsFd;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use crate::disks::Known;
use crate::limits::{AGENT_TIMEOUT, HEARD_PERIOD, MAX_HEARD, MAX_LEN_BYTES};
use crate::message::{Message, MessageError, Reader};
use crate::page_cache::drop_cached;
use crate::places::Probe;
use crate::takes::Take;
use crate::vm::VmPipes;

/// The answering side of a stream.
#[derive(Debug)]
pub(crate) struct Agent {
    stream: Mutex<UnixStream>,
    /// The same socket, to end it from outside.
    control: UnixStream,
    closed: AtomicBool,
    /// Its hello was right.
    proved: AtomicBool,
}

impl Agent {
    pub fn new(stream: &UnixStream) -> io::Result<Self> {
        Ok(Self {
            stream: Mutex::new(stream.try_clone()?),
            control: stream.try_clone()?,
            closed: AtomicBool::new(false),
            proved: AtomicBool::new(false),
        })
    }

    fn say(&self, kind: u16, id: u64, body: &(impl IntoBytes + Immutable)) {
        self.say_with(kind, id, body.as_bytes(), &[]);
    }

    fn say_with(&self, kind: u16, id: u64, body: &[u8], more: &[u8]) {
        let header = Header::new(kind, id, body.len() + more.len());
        let message = [header.as_bytes(), body, more].concat();
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // One that takes no answers, or half of one, is of no use any more.
        if write_by(&mut stream, &message, Instant::now() + AGENT_TIMEOUT).is_err() {
            self.close();
        }
    }

    /// A pipe's end.
    pub fn done(&self, id: u64, moved_bytes: u64, reason: Reason) {
        let (moved_bytes, reason) = (U64::new(moved_bytes), U16::new(reason as u16));
        self.say(kind::DONE, id, &pipe::Done { moved_bytes, reason, reserved: [0; 6] });
    }

    /// How many bytes of a connection that is read the guest reads itself.
    pub fn begun(&self, id: u64, own_bytes: u64) {
        self.say(kind::BEGUN, id, &pipe::Begun { own_bytes: U64::new(own_bytes) });
    }

    /// Asks for bytes to be written.
    pub fn take(&self, id: u64, take: &Take, bytes: &[u8]) {
        self.say_with(kind::TAKE, id, asked(take).as_bytes(), bytes);
    }

    /// Asks for bytes to be read.
    pub fn give(&self, id: u64, take: &Take) {
        self.say(kind::GIVE, id, &asked(take));
    }

    /// Whether its hello was right.
    pub fn is_proved(&self) -> bool {
        self.proved.load(Ordering::Relaxed)
    }

    /// Its hello was right.
    pub fn prove(&self) {
        self.proved.store(true, Ordering::Relaxed);
    }

    /// Whether nothing more is to be expected of it.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Ends the stream; its reader hears of it.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        // Fails only when it has ended.
        let _ = self.control.shutdown(Shutdown::Both);
    }
}

fn asked(take: &Take) -> pipe::Take {
    pipe::Take {
        at: U64::new(take.range.start),
        len_bytes: U32::new(take.len_bytes() as u32),
        how: take.how,
        reserved: [0; 3],
    }
}

/// Writes all of it; the stream's own time-out is only one call's.
fn write_by(stream: &mut UnixStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if !bytes.is_empty() && Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// The reading side of a stream; runs on a thread of its own.
pub(crate) struct Session {
    pub agent: Arc<Agent>,
    reader: Reader<UnixStream>,
    disks: Known,
    /// What was agreed on.
    version: u16,
}

impl Session {
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let stream = UnixStream::from(fd);
        stream.set_write_timeout(Some(AGENT_TIMEOUT))?;
        stream.set_read_timeout(Some(AGENT_TIMEOUT))?;
        let agent = Agent::new(&stream)?;
        let (agent, disks) = (Arc::new(agent), Known::default());
        Ok(Self { agent, reader: Reader::new(stream), disks, version: 0 })
    }

    /// Serves the agent, whose hello was right, until its stream ends.
    pub fn serve(mut self, vm: &VmPipes) -> MessageError {
        let ended = self.welcome(vm).and_then(|()| self.listen(vm));
        self.agent.close();
        vm.expect(None);
        match ended {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    /// The first message, which must have the VM's secret, if that has one.
    pub fn hear_hello(&mut self, secret: &[u8]) -> Result<(), MessageError> {
        self.version = self.reader.hello(secret)?;
        Ok(())
    }

    fn welcome(&mut self, vm: &VmPipes) -> Result<(), MessageError> {
        self.reader.stream().set_read_timeout(None)?;
        vm.welcome();
        let welcome = pipe::Welcome {
            magic: U64::new(pipe::MAGIC),
            version: U16::new(self.version),
            reserved: U16::ZERO,
            max_pipes: U32::new(vm.max_pipes()),
            max_len_bytes: U64::new(MAX_LEN_BYTES),
        };
        self.agent.say(kind::WELCOME, 0, &welcome);
        Ok(())
    }

    fn listen(&mut self, vm: &VmPipes) -> Result<std::convert::Infallible, MessageError> {
        let mut pace = Pace { since: Instant::now(), heard: 0 };
        loop {
            let (id, message) = self.reader.receive()?;
            pace.keep();
            match message {
                Message::Probe(probe) => {
                    let probed = self.probe(vm, &probe);
                    self.agent.say(kind::PROBED, id, &probed);
                }
                Message::Pipe(request) => {
                    if let Err(reason) = vm.begin(&self.agent, id, *request, &self.disks) {
                        vm.refuse(&self.agent, id, reason);
                    }
                }
                Message::Refused(reason) => vm.refuse(&self.agent, id, reason),
                Message::Cancel(reason) => vm.cancel(&self.agent, Some(id), reason),
                Message::ProbeWrite(asked) => self.expect(vm, id, Probe { reads: false, asked }),
                Message::ProbeRead(asked) => self.expect(vm, id, Probe { reads: true, asked }),
                Message::Said(said) => vm.hear(&self.agent, id, said)?,
                Message::Refusals(all) => vm.stats().refuse(&all),
                Message::Ping => self.agent.say_with(kind::PONG, id, &[], &[]),
            }
        }
    }

    /// Looks for the block on the VM's disks.
    fn probe(&mut self, vm: &VmPipes, probe: &pipe::Probe) -> Probed {
        let mut reason = Reason::NoDisk;
        for disk in vm.disks() {
            let image = match disk.image() {
                Ok(image) => image,
                Err(_) => {
                    reason = Reason::DiskFormat;
                    continue;
                }
            };
            if image.may_lag {
                drop_cached(image.file.as_fd(), probe.offset.get(), PROBE_BLOCK_BYTES as u64);
            }
            if has_block(image.file.as_fd(), probe)
                && let Some(number) = self.disks.number(&disk)
            {
                return probed(number, Reason::Complete, image.len_bytes);
            }
        }
        probed(NO_DISK, reason, 0)
    }

    /// The next block with that tag is the self-test's.
    fn expect(&mut self, vm: &VmPipes, id: u64, probe: Probe) {
        let number = probe.asked.disk.get();
        let disk = self.disks.get(vm, number).ok_or(Reason::NoDisk);
        let served = disk.and_then(|disk| vm.serve_places(&disk).map(|()| disk.len_bytes()));
        let probed = match served {
            Ok(len_bytes) => {
                vm.expect(Some(probe));
                probed(number, Reason::Complete, len_bytes)
            }
            Err(reason) => probed(NO_DISK, reason, 0),
        };
        self.agent.say(kind::PROBED, id, &probed);
    }
}

/// How much an agent has said lately.
struct Pace {
    since: Instant,
    heard: u32,
}

impl Pace {
    /// Waits until it may be heard again: its messages wait in its stream.
    fn keep(&mut self) {
        if self.heard >= MAX_HEARD {
            thread::sleep(HEARD_PERIOD.saturating_sub(self.since.elapsed()));
        }
        if self.since.elapsed() >= HEARD_PERIOD {
            (self.since, self.heard) = (Instant::now(), 0);
        }
        self.heard += 1;
    }
}

fn probed(disk: u32, reason: Reason, len_bytes: u64) -> Probed {
    let reason = U16::new(reason as u16);
    Probed { disk: U32::new(disk), reason, reserved: U16::ZERO, len_bytes: U64::new(len_bytes) }
}

fn has_block(file: impl AsFd, probe: &pipe::Probe) -> bool {
    let mut block = [0; PROBE_BLOCK_BYTES];
    let read = rustix::io::pread(file, &mut block, probe.offset.get());
    read == Ok(block.len()) && block.chunks(probe.secret.len()).all(|part| part == probe.secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(non_snake_case)]
    fn abuse_R10_an_agent_that_talks_without_end_is_heard_so_often_and_no_more() {
        let begun = Instant::now();
        let mut pace = Pace { since: begun, heard: 0 };
        (0..3 * MAX_HEARD).for_each(|_| pace.keep());
        // Not how fast, but how slow: two periods have passed.
        assert!(begun.elapsed() >= 2 * HEARD_PERIOD);
    }

    #[test]
    fn half_an_answer_is_the_end() {
        let (mut stream, other) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let answer = vec![0; 64 << 20];
        assert!(write_by(&mut stream, &answer, Instant::now()).is_err());
        drop(other);
        assert!(write_by(&mut stream, &[0; 8], Instant::now()).is_err());
    }
}
