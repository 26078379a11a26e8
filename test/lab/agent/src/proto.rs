//! The framed protocol between the lab (host) and the agent (guest).
//!
//! A frame is `len: u32` (bytes that follow), `id: u32` (chosen by the host, echoed in every
//! answer), `kind: u8`, then the body. All numbers are little-endian. The host speaks first
//! ([`Request::Hello`]); the agent never writes before that, because a virtio-serial port without
//! a host on it drops bytes silently.

use std::io::{Read, Write};

use crate::AgentError;

/// The protocol's version; both sides must agree.
pub const VERSION: u32 = 1;
/// First bytes of both hellos, so that a wrong port is noticed at once.
pub const MAGIC: [u8; 8] = *b"mr-agent";
/// Most bytes in a frame's body.
pub const MAX_BODY_BYTES: usize = 256 * 1024;
/// Bytes of file content or output in one frame.
pub const CHUNK_BYTES: usize = 64 * 1024;
/// `id` and `kind`: the part of `len` that is not body.
const FIXED_BYTES: usize = 5;

/// Request of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// First message; the agent answers [`Reply::Hello`].
    Hello {
        /// The host's [`VERSION`].
        version: u32,
    },
    /// Run `/bin/sh -c script` in its own session.
    Run {
        /// Kill it after this time; 0 means never.
        timeout_ms: u64,
        /// The shell script.
        script: String,
    },
    /// Send a signal to the process group of an earlier [`Request::Run`].
    Signal {
        /// The id of that request.
        target: u32,
        /// The signal's number.
        signal: i32,
    },
    /// Begin a file; content follows in [`Request::PutData`] with the same id.
    PutOpen {
        /// Permission bits.
        mode: u32,
        /// The file's path in the guest.
        path: String,
    },
    /// The next bytes of the file.
    PutData(Vec<u8>),
    /// The file is complete; the agent checks the hash, renames it into place and answers.
    PutEnd {
        /// XXH3-128 of the content.
        hash: u128,
    },
    /// Read a file; answered by [`Reply::Data`] chunks and [`Reply::Done`].
    Get {
        /// The file's path in the guest.
        path: String,
    },
    /// Flush the file systems and end the VM.
    Shutdown,
}

/// Reply of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Answer to [`Request::Hello`].
    Hello {
        /// The agent's [`VERSION`].
        version: u32,
        /// The guest kernel's release.
        kernel: String,
    },
    /// The command runs.
    Started {
        /// Process (and group) id of the command in the guest.
        pid: u32,
    },
    /// Bytes of its standard output.
    Stdout(Vec<u8>),
    /// Bytes of its standard error.
    Stderr(Vec<u8>),
    /// The command ended.
    Exit {
        /// Exit code, or 128 + the signal's number.
        code: i32,
        /// The agent killed it because its time was over.
        timed_out: bool,
    },
    /// Bytes of a file.
    Data(Vec<u8>),
    /// The request is done.
    Done {
        /// Bytes moved.
        len: u64,
        /// XXH3-128 of them.
        hash: u128,
    },
    /// The request failed; the text says what and why.
    Failed(String),
}

/// A message that has a place in a frame.
pub trait Message: Sized {
    /// The kind byte.
    fn kind(&self) -> u8;
    /// Appends the body.
    fn encode(&self, out: &mut Vec<u8>);
    /// Reads a body.
    ///
    /// # Errors
    /// [`AgentError::BadFrame`] for an unknown kind, a short body or text that is not UTF-8.
    fn decode(kind: u8, body: &[u8]) -> Result<Self, AgentError>;
}

impl Message for Request {
    fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Run { .. } => 2,
            Self::Signal { .. } => 3,
            Self::PutOpen { .. } => 4,
            Self::PutData(_) => 5,
            Self::PutEnd { .. } => 6,
            Self::Get { .. } => 7,
            Self::Shutdown => 8,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello { version } => {
                out.extend_from_slice(&MAGIC);
                out.extend_from_slice(&version.to_le_bytes());
            }
            Self::Run { timeout_ms, script } => {
                out.extend_from_slice(&timeout_ms.to_le_bytes());
                out.extend_from_slice(script.as_bytes());
            }
            Self::Signal { target, signal } => {
                out.extend_from_slice(&target.to_le_bytes());
                out.extend_from_slice(&signal.to_le_bytes());
            }
            Self::PutOpen { mode, path } => {
                out.extend_from_slice(&mode.to_le_bytes());
                out.extend_from_slice(path.as_bytes());
            }
            Self::PutData(bytes) => out.extend_from_slice(bytes),
            Self::PutEnd { hash } => out.extend_from_slice(&hash.to_le_bytes()),
            Self::Get { path } => out.extend_from_slice(path.as_bytes()),
            Self::Shutdown => {}
        }
    }

    fn decode(kind: u8, body: &[u8]) -> Result<Self, AgentError> {
        let mut body = Body { kind, rest: body };
        Ok(match kind {
            1 => {
                body.magic()?;
                Self::Hello { version: u32::from_le_bytes(body.take()?) }
            }
            2 => Self::Run { timeout_ms: u64::from_le_bytes(body.take()?), script: body.text()? },
            3 => Self::Signal {
                target: u32::from_le_bytes(body.take()?),
                signal: i32::from_le_bytes(body.take()?),
            },
            4 => Self::PutOpen { mode: u32::from_le_bytes(body.take()?), path: body.text()? },
            5 => Self::PutData(body.rest.to_vec()),
            6 => Self::PutEnd { hash: u128::from_le_bytes(body.take()?) },
            7 => Self::Get { path: body.text()? },
            8 => Self::Shutdown,
            _ => return Err(AgentError::BadFrame { kind, what: "no such request" }),
        })
    }
}

impl Message for Reply {
    fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 129,
            Self::Started { .. } => 130,
            Self::Stdout(_) => 131,
            Self::Stderr(_) => 132,
            Self::Exit { .. } => 133,
            Self::Data(_) => 134,
            Self::Done { .. } => 135,
            Self::Failed(_) => 136,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello { version, kernel } => {
                out.extend_from_slice(&MAGIC);
                out.extend_from_slice(&version.to_le_bytes());
                out.extend_from_slice(kernel.as_bytes());
            }
            Self::Started { pid } => out.extend_from_slice(&pid.to_le_bytes()),
            Self::Stdout(bytes) | Self::Stderr(bytes) | Self::Data(bytes) => {
                out.extend_from_slice(bytes);
            }
            Self::Exit { code, timed_out } => {
                out.extend_from_slice(&code.to_le_bytes());
                out.push(u8::from(*timed_out));
            }
            Self::Done { len, hash } => {
                out.extend_from_slice(&len.to_le_bytes());
                out.extend_from_slice(&hash.to_le_bytes());
            }
            Self::Failed(text) => out.extend_from_slice(text.as_bytes()),
        }
    }

    fn decode(kind: u8, body: &[u8]) -> Result<Self, AgentError> {
        let mut body = Body { kind, rest: body };
        Ok(match kind {
            129 => {
                body.magic()?;
                Self::Hello { version: u32::from_le_bytes(body.take()?), kernel: body.text()? }
            }
            130 => Self::Started { pid: u32::from_le_bytes(body.take()?) },
            131 => Self::Stdout(body.rest.to_vec()),
            132 => Self::Stderr(body.rest.to_vec()),
            133 => Self::Exit {
                code: i32::from_le_bytes(body.take()?),
                timed_out: body.take::<1>()? != [0],
            },
            134 => Self::Data(body.rest.to_vec()),
            135 => Self::Done {
                len: u64::from_le_bytes(body.take()?),
                hash: u128::from_le_bytes(body.take()?),
            },
            136 => Self::Failed(body.text()?),
            _ => return Err(AgentError::BadFrame { kind, what: "no such answer" }),
        })
    }
}

/// Rest of a body while it is decoded.
struct Body<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl Body<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], AgentError> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(AgentError::BadFrame { kind: self.kind, what: "body too short" })?;
        self.rest = rest;
        Ok(*head)
    }

    fn magic(&mut self) -> Result<(), AgentError> {
        if self.take::<8>()? == MAGIC {
            Ok(())
        } else {
            Err(AgentError::BadFrame { kind: self.kind, what: "hello without the magic bytes" })
        }
    }

    fn text(&self) -> Result<String, AgentError> {
        std::str::from_utf8(self.rest)
            .map(str::to_owned)
            .map_err(|_| AgentError::BadFrame { kind: self.kind, what: "text is not UTF-8" })
    }
}

/// Writes one frame with one `write` call, so that frames of several threads never mix as long as
/// they share a lock around this.
///
/// # Errors
/// [`AgentError::FrameTooLong`] when the body is above [`MAX_BODY_BYTES`]; I/O errors.
pub fn write_frame<M: Message>(
    to: &mut impl Write,
    id: u32,
    message: &M,
) -> Result<(), AgentError> {
    let mut frame = vec![0; 4];
    frame.extend_from_slice(&id.to_le_bytes());
    frame.push(message.kind());
    message.encode(&mut frame);
    let len = frame.len() - 4;
    let limit = MAX_BODY_BYTES + FIXED_BYTES;
    let field = u32::try_from(len).ok().filter(|_| len <= limit);
    let field = field.ok_or(AgentError::FrameTooLong { got: len, limit })?;
    frame[..4].copy_from_slice(&field.to_le_bytes());
    to.write_all(&frame).map_err(AgentError::io("write a frame"))
}

/// Reads one frame. The length is checked before anything is allocated.
///
/// # Errors
/// [`AgentError::Closed`] at end of file; [`AgentError::FrameTooLong`], [`AgentError::BadFrame`]
/// for what does not decode; I/O errors.
pub fn read_frame<M: Message>(from: &mut impl Read) -> Result<(u32, M), AgentError> {
    let mut len = [0; 4];
    fill(from, &mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    let limit = MAX_BODY_BYTES + FIXED_BYTES;
    if len > limit {
        return Err(AgentError::FrameTooLong { got: len, limit });
    }
    if len < FIXED_BYTES {
        return Err(AgentError::BadFrame { kind: 0, what: "shorter than its fixed fields" });
    }
    let mut frame = vec![0; len];
    fill(from, &mut frame)?;
    let id = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]);
    Ok((id, M::decode(frame[4], &frame[FIXED_BYTES..])?))
}

fn fill(from: &mut impl Read, into: &mut [u8]) -> Result<(), AgentError> {
    from.read_exact(into).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => {
            AgentError::Closed { what: "agent port" }
        }
        _ => AgentError::Io { what: "read a frame".into(), source: error },
    })
}

#[cfg(test)]
mod tests;
