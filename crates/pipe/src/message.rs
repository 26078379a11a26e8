//! What an agent says, taken from its stream: each message is copied, checked, and then is a value.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use guest_abi::Reason;
use guest_abi::frame::{HEADER_BYTES, Header, MAX_BODY_BYTES};
use guest_abi::pipe::{
    self, FileEnd, MAX_EXTENTS, MAX_REFUSALS, MAX_TAKE_BYTES, PlacesEnd, Probe, ProbePlaces,
    Refusal, SocketEnd, Taken, end, family, kind,
};
use net::flow::FlowKey;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Why a stream is given up.
#[derive(Debug, Error)]
pub enum MessageError {
    /// The stream ended or failed.
    #[error("the stream: {0}")]
    Stream(#[from] io::Error),
    /// A body beyond the limit.
    #[error("a message of {len_bytes} bytes; the limit is {MAX_BODY_BYTES}")]
    TooLong {
        /// As announced.
        len_bytes: u32,
    },
    /// Not a hello of a version that we speak.
    #[error("{0}")]
    Hello(String),
    /// More said of a pipe than was asked.
    #[error("more was said of a pipe than was asked for; the limit is {limit}")]
    TooMany {
        /// Most messages that wait.
        limit: usize,
    },
    /// A kind that agents do not send, or a body that is too short for it.
    #[error("a message of kind {kind} with {len_bytes} bytes makes no sense")]
    Malformed {
        /// Its kind.
        kind: u16,
        /// Its body's length.
        len_bytes: usize,
    },
}

/// One message.
#[derive(Debug)]
pub enum Message {
    /// Where is this block?
    Probe(Probe),
    /// Move bytes.
    Pipe(Box<Request>),
    /// A pipe that makes no sense; the stream goes on.
    Refused(Reason),
    /// End that pipe.
    Cancel(Reason),
    /// A placeholder is about to be written.
    ProbeWrite(ProbePlaces),
    /// A placeholder is about to be read over.
    ProbeRead(ProbePlaces),
    /// Of a pipe that is under way.
    Said(Said),
    /// Are you there?
    Ping,
    /// Pipes that the agent refused itself: why, and how many.
    Refusals(Vec<(Reason, u32)>),
}

/// What an agent says of a pipe that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// The guest's own bytes are where they belong; how the sink stands now, if it is a socket.
    Own(Option<SocketEnd>),
    /// Bytes are written.
    Taken(Taken),
    /// Bytes are read; those that came with it, which are as many as it says or none.
    Given(Taken, Vec<u8>),
}

impl Said {
    /// Bytes of the pipe that came with it.
    pub fn len_bytes(&self) -> usize {
        match self {
            Self::Given(_, bytes) => bytes.len(),
            Self::Own(_) | Self::Taken(_) => 0,
        }
    }
}

/// One end of a pipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// A connection.
    Socket(Socket),
    /// A part of a file.
    File {
        /// As in `Probed`.
        disk: u32,
        /// Offset on the disk (or a hole) and length.
        extents: Vec<(u64, u64)>,
    },
    /// A file that is written, or read without a lease.
    Places(PlacesEnd),
}

/// A connection as the agent describes it; its words are checked when a twin is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Socket {
    /// Who talks to whom.
    pub key: FlowKey,
    /// The rest.
    pub end: SocketEnd,
}

/// A pipe that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Where bytes come from.
    pub source: End,
    /// Where they go.
    pub sink: End,
    /// How many.
    pub len_bytes: u64,
    /// The file that is read is in the guest's memory.
    pub is_cached: bool,
}

/// Reads messages.
pub struct Reader<R> {
    stream: R,
    body: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// From a stream.
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

    /// The hello, with the secret behind it where there is one; returns the version that is spoken from
    /// then on.
    pub fn hello(&mut self, secret: &[u8]) -> Result<u16, MessageError> {
        let header = self.read()?;
        let hello = pipe::Hello::read_from_prefix(&self.body);
        let (kind::HELLO, Ok((hello, told))) = (header.kind.get(), hello) else {
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
        match (secret.is_empty() || is_same(secret, told), told.is_empty()) {
            (true, _) => Ok(pipe::VERSION),
            (false, true) => Err(MessageError::Hello(
                "the hello has no secret, and the VM's `secret` is set: is it in the guest's \
                 opt/millrace/secret (fw_cfg), or given to the agent by --secret?"
                    .into(),
            )),
            (false, false) => Err(MessageError::Hello("the hello has another secret".into())),
        }
    }

    /// The next message, with its id.
    pub fn receive(&mut self) -> Result<(u64, Message), MessageError> {
        let header = self.read()?;
        let bytes = &self.body[..];
        let message = match header.kind.get() {
            kind::PROBE => Probe::read_from_bytes(bytes).ok().map(Message::Probe),
            kind::CANCEL => pipe::Cancel::read_from_bytes(bytes)
                .ok()
                .map(|c| Message::Cancel(cancel_reason(c.reason.get()))),
            kind::PIPE => {
                Some(request(bytes).map_or_else(Message::Refused, |r| Message::Pipe(Box::new(r))))
            }
            kind::PROBE_WRITE => ProbePlaces::read_from_bytes(bytes).ok().map(Message::ProbeWrite),
            kind::PROBE_READ => ProbePlaces::read_from_bytes(bytes).ok().map(Message::ProbeRead),
            kind::OWN => own(bytes).map(|end| Message::Said(Said::Own(end))),
            kind::TAKEN => {
                Taken::read_from_bytes(bytes).ok().map(|taken| Message::Said(Said::Taken(taken)))
            }
            kind::GIVEN => given(bytes).map(Message::Said),
            kind::PING => bytes.is_empty().then_some(Message::Ping),
            kind::REFUSALS => refusals(bytes).map(Message::Refusals),
            _ => None,
        };
        let malformed =
            || MessageError::Malformed { kind: header.kind.get(), len_bytes: bytes.len() };
        Ok((header.id.get(), message.ok_or_else(malformed)?))
    }
}

fn refusals(bytes: &[u8]) -> Option<Vec<(Reason, u32)>> {
    let all = <[Refusal]>::ref_from_bytes(bytes).ok()?;
    let read = |one: &Refusal| (Reason::from_number(one.reason.get()), one.count.get());
    (1..=MAX_REFUSALS).contains(&all.len()).then(|| all.iter().map(read).collect())
}

fn own(bytes: &[u8]) -> Option<Option<SocketEnd>> {
    let (_, rest) = pipe::Own::read_from_prefix(bytes).ok()?;
    match rest {
        [] => Some(None),
        rest => SocketEnd::read_from_bytes(rest).ok().map(Some),
    }
}

fn given(bytes: &[u8]) -> Option<Said> {
    let (given, bytes) = Taken::read_from_prefix(bytes).ok()?;
    let is_whole = bytes.len() == given.len_bytes.get() as usize && bytes.len() <= MAX_TAKE_BYTES;
    (bytes.is_empty() || is_whole).then(|| Said::Given(given, bytes.to_vec()))
}

fn take<T>(bytes: &mut &[u8]) -> Result<T, Reason>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned,
{
    let (value, rest) = T::read_from_prefix(bytes).map_err(|_| Reason::Malformed)?;
    *bytes = rest;
    Ok(value)
}

/// Why an agent ends a pipe: what only the daemon can find out about a connection is none of its reasons.
fn cancel_reason(number: u16) -> Reason {
    match Reason::from_number(number) {
        reason @ (Reason::TimedOut | Reason::LeaseBroken | Reason::SinkFailed | Reason::Unsent) => {
            reason
        }
        _ => Reason::Cancelled,
    }
}

fn request(mut bytes: &[u8]) -> Result<Request, Reason> {
    let head: pipe::Pipe = take(&mut bytes)?;
    let mut extents_left = MAX_EXTENTS;
    let source = take_end(head.source, &mut bytes, &mut extents_left)?;
    let sink = take_end(head.sink, &mut bytes, &mut extents_left)?;
    let len_bytes = head.len_bytes.get();
    if !bytes.is_empty() || len_bytes == 0 {
        return Err(Reason::Malformed);
    }
    let is_cached = head.flags & pipe::flag::CACHED != 0;
    Ok(Request { source, sink, len_bytes, is_cached })
}

fn take_end(kind: u8, bytes: &mut &[u8], extents_left: &mut u32) -> Result<End, Reason> {
    match kind {
        end::SOCKET => Ok(End::Socket(socket(take(bytes)?)?)),
        end::FILE => {
            let FileEnd { disk, extents } = take(bytes)?;
            *extents_left = extents_left.checked_sub(extents.get()).ok_or(Reason::Malformed)?;
            let extents = (0..extents.get()).map(|_| {
                let extent: pipe::Extent = take(bytes)?;
                Ok((extent.offset.get(), extent.len_bytes.get()))
            });
            Ok(End::File { disk: disk.get(), extents: extents.collect::<Result<_, Reason>>()? })
        }
        end::PLACES => Ok(End::Places(take(bytes)?)),
        _ => Err(Reason::PairUnsupported),
    }
}

/// Checks how a connection is described.
pub(crate) fn socket(end: SocketEnd) -> Result<Socket, Reason> {
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

/// In a time that does not tell how much of it is right.
fn is_same(secret: &[u8], told: &[u8]) -> bool {
    let differences = secret.iter().zip(told).fold(0, |all, (a, b)| all | (a ^ b));
    secret.len() == told.len() && differences == 0
}

#[cfg(test)]
mod tests;
