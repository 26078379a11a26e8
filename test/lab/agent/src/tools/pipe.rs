//! A program that asks the guest's agent for a pipe as no honest one would, or from a socket that
//! cannot be piped to: what `mrpipe` does not do. It speaks to the agent without the library.
//!
//! One round of `mrpipe`'s: a line is read, then go a header line `MRPIPE 0 <bytes>`, the bytes of
//! the file, and a trailer `END 0`. What is not piped goes by `sendfile(2)`, where that is allowed.

use std::fs::File;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, Request, SOCKET, VERSION, op};
use rustix::fs::{Mode, OFlags};
use rustix::io::IoSlice;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::AgentError;

/// Options of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Use an MPTCP socket.
    mptcp: bool,
    /// Use `tls` on top of TCP, without keys: bytes go as they are.
    tls: bool,
    /// Wait for the peer's end of the stream before asking.
    end: bool,
    /// Wait for the end of this FIFO before asking.
    wait: Option<String>,
    /// How it opens the file.
    flags: OFlags,
}

impl Options {
    /// From words; none: there is no such word.
    #[must_use]
    pub fn parse(words: &[&str]) -> Option<Self> {
        let (mptcp, tls, end, wait) = Default::default();
        let mut options = Self { mptcp, tls, end, wait, flags: OFlags::RDONLY };
        for word in words {
            match *word {
                "mptcp" => options.mptcp = true,
                "tls" => options.tls = true,
                "end" => options.end = true,
                "path-only" => options.flags = OFlags::PATH,
                "write-only" => options.flags = OFlags::WRONLY,
                word => options.wait = Some(word.strip_prefix("wait=")?.to_owned()),
            }
        }
        Some(options)
    }
}

/// Serves one connection and prints `{"piped":…, "sent":…, "reason":…}`, the reason by its name.
///
/// # Errors
/// The file cannot be opened, or the connection fails. That it is not piped is none.
pub fn run(listen: bool, at: SocketAddr, path: &str, options: Options) -> Result<(), AgentError> {
    let file = rustix::fs::open(path, options.flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| AgentError::file("open", path)(error.into()))?;
    let file = File::from(file);
    let len_bytes = file.metadata().map_err(AgentError::file("stat", path))?.len();
    let mut socket = open(listen, at, options.mptcp)?;
    if options.tls {
        set_tls(socket.as_fd())?;
    }
    wait(&mut socket, &options)?;
    let mut say = |line: String| socket.write_all(line.as_bytes());
    say(format!("MRPIPE 0 {len_bytes}\n")).map_err(AgentError::io("send the header"))?;
    let answer = ask(file.as_fd(), socket.as_fd(), len_bytes)?;
    let (piped, reason) = (answer.moved_bytes.get(), Reason::from_number(answer.reason.get()));
    let mut sent = 0;
    if options.flags == OFlags::RDONLY {
        sent = send(&file, &socket, piped, len_bytes)?;
        socket.write_all(b"END 0\n").map_err(AgentError::io("send the trailer"))?;
    }
    println!("{}", json!({"piped": piped, "sent": sent, "reason": reason.key()}));
    // Until the peer has all. One that has gone has no more to say.
    let _ = socket.shutdown(Shutdown::Write);
    while matches!(socket.read(&mut [0; 64]), Ok(1..)) {}
    Ok(())
}

fn open(listen: bool, at: SocketAddr, mptcp: bool) -> Result<Socket, AgentError> {
    let protocol = if mptcp { Protocol::MPTCP } else { Protocol::TCP };
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(protocol))
        .map_err(AgentError::io("make a socket"))?;
    if !listen {
        socket.connect(&at.into()).map_err(AgentError::io(format!("connect to {at}")))?;
        return Ok(socket);
    }
    let what = format!("listen at {at}");
    socket.set_reuse_address(true).map_err(AgentError::io(&what))?;
    socket.bind(&at.into()).map_err(AgentError::io(&what))?;
    socket.listen(1).map_err(AgentError::io(&what))?;
    println!("listening");
    Ok(socket.accept().map_err(AgentError::io(what))?.0)
}

fn set_tls(socket: BorrowedFd<'_>) -> Result<(), AgentError> {
    use std::os::fd::AsRawFd;
    let (level, name, value) = (libc::IPPROTO_TCP, libc::TCP_ULP, b"tls");
    let len = value.len() as libc::socklen_t;
    // SAFETY: the call reads `len` bytes of `value`, which outlives it.
    let set =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), len) };
    if set == 0 {
        return Ok(());
    }
    Err(AgentError::io("TCP_ULP tls")(std::io::Error::last_os_error()))
}

/// For a line, and for whatever else is to come before the request.
fn wait(socket: &mut Socket, options: &Options) -> Result<(), AgentError> {
    let mut read = || {
        let mut byte = [0];
        let len = socket.read(&mut byte).map_err(AgentError::io("wait for the peer"))?;
        Ok::<_, AgentError>((len > 0).then_some(byte[0]))
    };
    while read()?.is_some_and(|byte| byte != b'\n') {}
    if options.end {
        while read()?.is_some() {}
    }
    if let Some(fifo) = &options.wait {
        println!("waiting");
        std::fs::read(fifo).map_err(AgentError::file("read", fifo))?;
    }
    Ok(())
}

fn errno(what: &'static str) -> impl Fn(rustix::io::Errno) -> AgentError {
    move |error| AgentError::io(what)(error.into())
}

/// Asks the agent, and waits for its answer.
fn ask(file: BorrowedFd<'_>, socket: BorrowedFd<'_>, len_bytes: u64) -> Result<Answer, AgentError> {
    let agent = connect()?;
    let mut request = Request::new_zeroed();
    request.magic = U32::new(MAGIC);
    (request.version, request.op) = (U16::new(VERSION), U16::new(op::PIPE));
    request.len_bytes = U64::new(len_bytes);
    let fds = [file, socket];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let bytes = [IoSlice::new(request.as_bytes())];
    rustix::net::sendmsg(&agent, &bytes, &mut control, SendFlags::NOSIGNAL)
        .map_err(errno("ask the agent"))?;
    let mut answer = Answer::new_zeroed();
    let (len, _) = rustix::net::recv(&agent, answer.as_mut_bytes(), RecvFlags::empty())
        .map_err(errno("hear of the agent"))?;
    if len != size_of::<Answer>() || answer.magic.get() != MAGIC {
        return Err(AgentError::Mismatch(format!("an answer of {len} bytes: {answer:?}")));
    }
    Ok(answer)
}

fn connect() -> Result<OwnedFd, AgentError> {
    let what = errno("connect to the agent");
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(&what)?;
    let address = SocketAddrUnix::new(SOCKET).map_err(&what)?;
    rustix::net::connect(&socket, &address).map_err(&what)?;
    Ok(socket)
}

/// Sends the bytes that were not piped. Returns how many.
fn send(file: &File, socket: &Socket, from: u64, to: u64) -> Result<u64, AgentError> {
    let mut at = from;
    while at < to {
        let left = usize::try_from(to - at).unwrap_or(usize::MAX);
        match rustix::fs::sendfile(socket, file, Some(&mut at), left) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => return Err(errno("sendfile")(error)),
        }
    }
    Ok(at - from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_words() {
        let plain = Options::parse(&[]).unwrap();
        assert_eq!((plain.mptcp, plain.tls, plain.end, &plain.wait), (false, false, false, &None));
        let all = Options::parse(&["mptcp", "tls", "end", "path-only", "wait=/f"]).unwrap();
        assert_eq!((all.mptcp, all.tls, all.end, all.flags), (true, true, true, OFlags::PATH));
        assert_eq!(all.wait.as_deref(), Some("/f"));
        assert_eq!(Options::parse(&["mptpc"]), None);
    }
}
