//! The session of a VM's agent: its messages are read, and passed on or answered.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use base::cpu::thread_time;
use guest_abi::Reason;
use guest_abi::pipe::{self, NO_DISK, PROBE_BLOCK_BYTES, Probed, kind};
use rustix::fd::AsFd;
use zerocopy::little_endian::{U16, U32, U64};

use crate::disks::DiskNumbers;
use crate::limits::{AGENT_TIMEOUT, MAX_LEN_BYTES, MAX_MESSAGES, MESSAGE_PERIOD};
use crate::line::Line;
use crate::message::{Message, MessageError, MessageReader};
use crate::page_cache::drop_cached;
use crate::pipe_set::PipeSet;
use crate::placed_request::Direction;
use crate::self_test::SelfTest;

/// The reading side of an agent's stream; runs on a thread of its own.
pub(crate) struct AgentSession {
    pub line: Arc<Line>,
    reader: MessageReader<UnixStream>,
    disks: DiskNumbers,
    /// Protocol version that was agreed on.
    version: u16,
}

impl AgentSession {
    /// A session on a stream that has just come. Nothing is read yet.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let stream = UnixStream::from(fd);
        stream.set_write_timeout(Some(AGENT_TIMEOUT))?;
        stream.set_read_timeout(Some(AGENT_TIMEOUT))?;
        let line = Line::new(&stream)?;
        let (line, disks) = (Arc::new(line), DiskNumbers::default());
        Ok(Self { line, reader: MessageReader::new(stream), disks, version: 0 })
    }

    /// Serves the agent, whose hello was right, until its stream ends.
    pub fn serve(mut self, pipes: &PipeSet) -> MessageError {
        let ended = self.welcome(pipes).and_then(|()| self.listen(pipes));
        self.line.close();
        pipes.expect_self_test(None);
        match ended {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    /// Reads the first message, which must have the VM's secret, if that has one.
    pub fn read_hello(&mut self, secret: &[u8]) -> Result<(), MessageError> {
        self.version = self.reader.read_hello(secret)?;
        Ok(())
    }

    fn welcome(&mut self, pipes: &PipeSet) -> Result<(), MessageError> {
        self.reader.stream().set_read_timeout(None)?;
        pipes.welcome();
        let welcome = pipe::Welcome {
            magic: U64::new(pipe::MAGIC),
            version: U16::new(self.version),
            reserved: U16::ZERO,
            max_pipes: U32::new(pipes.max_pipes()),
            max_len_bytes: U64::new(MAX_LEN_BYTES),
        };
        self.line.send(kind::WELCOME, 0, &welcome);
        Ok(())
    }

    fn listen(&mut self, pipes: &PipeSet) -> Result<std::convert::Infallible, MessageError> {
        let mut pace = MessagePace::new();
        let mut charged = thread_time();
        loop {
            let (id, message) = self.reader.receive()?;
            pace.wait();
            // Of the messages before this one.
            let now = thread_time();
            pipes.purse().charge_time((now - charged).as_nanos() as u64);
            charged = now;
            match message {
                Message::Probe(probe) => {
                    let probed = self.probe(pipes, &probe);
                    self.line.send(kind::PROBED, id, &probed);
                }
                Message::Pipe(request) => {
                    if let Err(reason) = pipes.begin(&self.line, id, *request, &self.disks) {
                        pipes.refuse(&self.line, id, reason);
                    }
                }
                Message::Refused(reason) => pipes.refuse(&self.line, id, reason),
                Message::Cancel(reason) => pipes.cancel(&self.line, Some(id), reason),
                Message::ProbeWrite(probe) => {
                    self.expect_self_test(
                        pipes,
                        id,
                        SelfTest { direction: Direction::Write, probe },
                    );
                }
                Message::ProbeRead(probe) => {
                    self.expect_self_test(
                        pipes,
                        id,
                        SelfTest { direction: Direction::Read, probe },
                    );
                }
                Message::Answer(answer) => pipes.deliver(&self.line, id, answer)?,
                Message::Refusals(all) => pipes.stats().refuse(&all),
                Message::Ping => self.line.send_parts(kind::PONG, id, &[], &[]),
            }
        }
    }

    /// Looks for a self-test's block on the VM's disks.
    fn probe(&mut self, pipes: &PipeSet, probe: &pipe::Probe) -> Probed {
        let mut reason = Reason::NoDisk;
        for disk in pipes.devices().disks() {
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

    /// Expects a self-test: the next block of placeholders with its tag.
    fn expect_self_test(&mut self, pipes: &PipeSet, id: u64, test: SelfTest) {
        let number = test.probe.disk.get();
        let disk = self.disks.find(pipes.devices(), number).ok_or(Reason::NoDisk);
        let len_bytes = disk.and_then(|disk| {
            pipes.placeholders().serve(&disk)?;
            Ok(disk.len_bytes())
        });
        let probed = match len_bytes {
            Ok(len_bytes) => {
                pipes.expect_self_test(Some(test));
                probed(number, Reason::Complete, len_bytes)
            }
            Err(reason) => probed(NO_DISK, reason, 0),
        };
        self.line.send(kind::PROBED, id, &probed);
    }
}

/// Limit of the messages that are taken from an agent in a time.
struct MessagePace {
    since: Instant,
    /// Messages since then.
    count: u32,
}

impl MessagePace {
    fn new() -> Self {
        Self { since: Instant::now(), count: 0 }
    }

    /// Counts a message; waits first if the agent has sent too many: the next ones wait in its
    /// stream.
    fn wait(&mut self) {
        if self.count >= MAX_MESSAGES {
            thread::sleep(MESSAGE_PERIOD.saturating_sub(self.since.elapsed()));
        }
        if self.since.elapsed() >= MESSAGE_PERIOD {
            (self.since, self.count) = (Instant::now(), 0);
        }
        self.count += 1;
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
        let mut pace = MessagePace { since: begun, count: 0 };
        (0..3 * MAX_MESSAGES).for_each(|_| pace.wait());
        // Not how fast, but how slow: two periods have passed.
        assert!(begun.elapsed() >= 2 * MESSAGE_PERIOD);
    }
}
