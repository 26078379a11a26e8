//! Messages of an agent, read from its stream: each is copied, checked, and then is a value.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use flow::FlowKey;
use guest_abi::Reason;
use guest_abi::frame::{HEADER_BYTES, Header, MAX_BODY_BYTES};
use guest_abi::pipe::{
    self, FileEnd, MAX_EXTENTS, MAX_REFUSALS, MAX_TAKE_BYTES, PlacesEnd, Probe, ProbePlaces,
    Refusal, SocketEnd, Taken, end, family, kind,
};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Error for which a stream is given up.
///
/// Remedy: use an agent of the daemon's version, with the VM's secret: docs/operate/pipes.md. It
/// connects again by itself.
#[derive(Debug, Error)]
pub enum MessageError {
    /// The stream ended or failed.
    #[error("the stream: {0}")]
    Stream(#[from] io::Error),
    /// A body beyond the limit.
    #[error("a message of {len_bytes} bytes; the limit is {MAX_BODY_BYTES}")]
    TooLong {
        /// Length that was announced.
        len_bytes: u32,
    },
    /// No hello, or none that fits.
    #[error("{0}")]
    Hello(String),
    /// More answers about a pipe than its requests ask for.
    #[error("more answers about a pipe than were asked for; the limit is {limit}")]
    TooMany {
        /// Most answers that wait.
        limit: usize,
    },
    /// A kind that agents do not send, or a body that is too short for it.
    #[error("a message of kind {kind} with {len_bytes} bytes makes no sense")]
    Malformed {
        /// Kind of the message.
        kind: u16,
        /// Length of its body.
        len_bytes: usize,
    },
}

/// A message of an agent.
#[derive(Debug)]
pub enum Message {
    /// Asks on which disk a block is.
    Probe(Probe),
    /// Asks for a pipe.
    Pipe(Box<Request>),
    /// Asks for a pipe that makes no sense: why. The stream goes on.
    Refused(Reason),
    /// Asks for the end of a pipe: why.
    Cancel(Reason),
    /// Announces a self-test: placeholders are about to be written.
    ProbeWrite(ProbePlaces),
    /// Announces a self-test: placeholders are about to be read over.
    ProbeRead(ProbePlaces),
    /// Answers a request of a pipe that is under way.
    Answer(Answer),
    /// Asks for a sign of life.
    Ping,
    /// Counts pipes that the agent has refused itself: why, and how many.
    Refusals(Vec<(Reason, u32)>),
}

/// An agent's answer about a pipe that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The guest has moved its own bytes to the sink; the sink as it is now, if it is a socket.
    Own(Option<SocketEnd>),
    /// The guest has written a range, or could not.
    Written(Taken),
    /// The guest has read a range, or could not; its bytes, as many as it says, or none.
    Read(Taken, Vec<u8>),
}

impl Answer {
    /// Number of the pipe's bytes that came with it.
    pub fn len_bytes(&self) -> usize {
        match self {
            Self::Read(_, bytes) => bytes.len(),
            Self::Own(_) | Self::Written(_) => 0,
        }
    }
}

/// An end of a pipe as the agent describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// A connection.
    Socket(Socket),
    /// A part of a file.
    File {
        /// Number of the disk, of an answer to a probe.
        disk: u32,
        /// Offset on the disk (or [`pipe::HOLE`]) and length of each.
        extents: Vec<(u64, u64)>,
    },
    /// A file that is written, or read without a lease.
    Places(PlacesEnd),
}

/// A connection as the agent describes it; the description is checked when a twin is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket {
    /// Addresses and ports.
    pub key: FlowKey,
    /// The whole description.
    pub end: SocketEnd,
}

/// A pipe that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The end that bytes come from.
    pub source: End,
    /// The end that bytes go to.
    pub sink: End,
    /// Most bytes to be moved.
    pub len_bytes: u64,
    /// Whether the file that is read is in the guest's memory.
    pub is_cached: bool,
}

/// Reader of an agent's messages.
pub struct MessageReader<R> {
    stream: R,
    body: Vec<u8>,
}

impl<R: Read> MessageReader<R> {
    /// A reader of that stream.
    pub fn new(stream: R) -> Self {
        Self { stream, body: Vec::new() }
    }

    /// The stream.
    pub fn stream(&self) -> &R {
        &self.stream
    }

    fn read(&mut self) -> Result<Header, MessageError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let header: Header = zerocopy::transmute!(header);
        let len =
            header.body_len().ok_or(MessageError::TooLong { len_bytes: header.len_bytes.get() })?;
        self.body.resize(len, 0);
        self.stream.read_exact(&mut self.body)?;
        Ok(header)
    }

    /// Reads the hello, which must have the secret behind it, unless that is empty; returns the
    /// version that is spoken from then on.
    pub fn read_hello(&mut self, secret: &[u8]) -> Result<u16, MessageError> {
        let header = self.read()?;
        let hello = pipe::Hello::read_from_prefix(&self.body);
        let (kind::HELLO, Ok((hello, secret_sent))) = (header.kind.get(), hello) else {
            return Err(MessageError::Hello("the first message is no hello".into()));
        };
        if hello.magic.get() != pipe::MAGIC {
            return Err(MessageError::Hello("the hello has another magic number".into()));
        }
        let (lowest, highest) = (hello.lowest.get(), hello.highest.get());
        if !(lowest..=highest).contains(&pipe::VERSION) {
            let own = pipe::VERSION;
            return Err(MessageError::Hello(format!(
                "the agent speaks versions {lowest} to {highest}, this daemon {own}"
            )));
        }
        match (secret.is_empty() || is_same(secret, secret_sent), secret_sent.is_empty()) {
            (true, _) => Ok(pipe::VERSION),
            (false, true) => Err(MessageError::Hello(
                "the hello has no secret, and the VM's `secret` is set: is it in the guest's \
                 opt/millrace/secret (fw_cfg), or given to the agent by --secret?"
                    .into(),
            )),
            (false, false) => Err(MessageError::Hello("the hello has another secret".into())),
        }
    }

    /// Reads the next message; also its id.
    pub fn receive(&mut self) -> Result<(u64, Message), MessageError> {
        let header = self.read()?;
        let bytes = &self.body[..];
        let message = match header.kind.get() {
            kind::PROBE => Probe::read_from_bytes(bytes).ok().map(Message::Probe),
            kind::CANCEL => pipe::Cancel::read_from_bytes(bytes)
                .ok()
                .map(|cancel| Message::Cancel(cancel_reason(cancel.reason.get()))),
            kind::PIPE => {
                let pipe = |request| Message::Pipe(Box::new(request));
                Some(parse_request(bytes).map_or_else(Message::Refused, pipe))
            }
            kind::PROBE_WRITE => ProbePlaces::read_from_bytes(bytes).ok().map(Message::ProbeWrite),
            kind::PROBE_READ => ProbePlaces::read_from_bytes(bytes).ok().map(Message::ProbeRead),
            kind::OWN => parse_own(bytes).map(|end| Message::Answer(Answer::Own(end))),
            kind::TAKEN => Taken::read_from_bytes(bytes)
                .ok()
                .map(|written| Message::Answer(Answer::Written(written))),
            kind::GIVEN => parse_read(bytes).map(Message::Answer),
            kind::PING => bytes.is_empty().then_some(Message::Ping),
            kind::REFUSALS => parse_refusals(bytes).map(Message::Refusals),
            _ => None,
        };
        let malformed =
            || MessageError::Malformed { kind: header.kind.get(), len_bytes: bytes.len() };
        Ok((header.id.get(), message.ok_or_else(malformed)?))
    }
}

fn parse_refusals(bytes: &[u8]) -> Option<Vec<(Reason, u32)>> {
    let all = <[Refusal]>::ref_from_bytes(bytes).ok()?;
    let read = |one: &Refusal| (Reason::from_number(one.reason.get()), one.count.get());
    (1..=MAX_REFUSALS).contains(&all.len()).then(|| all.iter().map(read).collect())
}

fn parse_own(bytes: &[u8]) -> Option<Option<SocketEnd>> {
    let (_, rest) = pipe::Own::read_from_prefix(bytes).ok()?;
    match rest {
        [] => Some(None),
        rest => SocketEnd::read_from_bytes(rest).ok().map(Some),
    }
}

fn parse_read(bytes: &[u8]) -> Option<Answer> {
    let (read, bytes) = Taken::read_from_prefix(bytes).ok()?;
    let is_whole = bytes.len() == read.len_bytes.get() as usize && bytes.len() <= MAX_TAKE_BYTES;
    (bytes.is_empty() || is_whole).then(|| Answer::Read(read, bytes.to_vec()))
}

/// Splits a value off the front.
fn split_off<T>(bytes: &mut &[u8]) -> Result<T, Reason>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let (value, rest) = T::read_from_prefix(bytes).map_err(|_| Reason::Malformed)?;
    *bytes = rest;
    Ok(value)
}

/// The reason for which an agent ends a pipe: not one that only the daemon can find out.
fn cancel_reason(number: u16) -> Reason {
    match Reason::from_number(number) {
        reason @ (Reason::TimedOut | Reason::LeaseBroken | Reason::SinkFailed | Reason::Unsent) => {
            reason
        }
        _ => Reason::Cancelled,
    }
}

fn parse_request(mut bytes: &[u8]) -> Result<Request, Reason> {
    let head: pipe::Pipe = split_off(&mut bytes)?;
    let mut extents_left = MAX_EXTENTS;
    let source = parse_end(head.source, &mut bytes, &mut extents_left)?;
    let sink = parse_end(head.sink, &mut bytes, &mut extents_left)?;
    let len_bytes = head.len_bytes.get();
    if !bytes.is_empty() || len_bytes == 0 {
        return Err(Reason::Malformed);
    }
    let is_cached = head.flags & pipe::flag::CACHED != 0;
    Ok(Request { source, sink, len_bytes, is_cached })
}

fn parse_end(kind: u8, bytes: &mut &[u8], extents_left: &mut u32) -> Result<End, Reason> {
    match kind {
        end::SOCKET => Ok(End::Socket(parse_socket(split_off(bytes)?)?)),
        end::FILE => {
            let FileEnd { disk, extents } = split_off(bytes)?;
            *extents_left = extents_left.checked_sub(extents.get()).ok_or(Reason::Malformed)?;
            let extents = (0..extents.get()).map(|_| {
                let extent: pipe::Extent = split_off(bytes)?;
                Ok((extent.offset.get(), extent.len_bytes.get()))
            });
            Ok(End::File { disk: disk.get(), extents: extents.collect::<Result<_, Reason>>()? })
        }
        end::PLACES => Ok(End::Places(split_off(bytes)?)),
        _ => Err(Reason::PairUnsupported),
    }
}

/// Checks the description of a connection.
pub(crate) fn parse_socket(end: SocketEnd) -> Result<Socket, Reason> {
    let address = |bytes: [u8; 16]| match end.family {
        family::V4 => {
            let [a, b, c, d, rest @ ..] = bytes;
            let v4 = IpAddr::V4(Ipv4Addr::new(a, b, c, d));
            (rest == [0; 12]).then_some(v4).ok_or(Reason::Malformed)
        }
        family::V6 => Ok(IpAddr::V6(Ipv6Addr::from(bytes))),
        _ => Err(Reason::Malformed),
    };
    let key = FlowKey {
        local: address(end.local)?,
        remote: address(end.remote)?,
        local_port: end.local_port.get(),
        remote_port: end.remote_port.get(),
    };
    Ok(Socket { key, end })
}

/// Whether two secrets are the same; found out in a time that does not tell how much of them is.
fn is_same(secret: &[u8], sent: &[u8]) -> bool {
    let differences = secret.iter().zip(sent).fold(0, |all, (a, b)| all | (a ^ b));
    secret.len() == sent.len() && differences == 0
}

#[cfg(test)]
mod tests;
