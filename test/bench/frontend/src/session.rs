//! The front end's side of a vhost-user session: the handshake, as QEMU does it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use base::event::Event;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use vhost_user::codec::{self, Header, Request, VringAddr, VringState, feature, protocol};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::FrontendError;
use crate::memory::{GUEST_BASE, Memory};
use crate::ring::{Ring, RingShape};

/// Longer than any back end takes for a message; DPDK's reads its memory tables slowly.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// `VHOST_VRING` base of a packed ring that starts: index 0, wrap counter 1, for both sides.
const PACKED_START: u32 = 0x8000_8000;

/// A connected session.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    /// Virtio features in use.
    pub features: u64,
    protocol: u64,
}

/// The doorbells of one queue.
#[derive(Debug)]
pub struct Doorbells {
    /// Driver to device.
    pub kick: Event,
    /// Device to driver.
    pub call: Event,
}

impl Session {
    /// Connects to a back end that listens.
    pub fn dial(path: &Path) -> Result<Self, FrontendError> {
        let bad = |what| {
            move |e: rustix::io::Errno| FrontendError::Socket {
                what,
                path: path.to_owned(),
                source: e.into(),
            }
        };
        let socket = unix_socket()?;
        let addr = SocketAddrUnix::new(path).map_err(bad("the socket's name"))?;
        rustix::net::connect(&socket, &addr).map_err(bad("connecting to"))?;
        Self::on(socket)
    }

    /// Waits for a back end that dials.
    pub fn accept(listener: &OwnedFd) -> Result<Self, FrontendError> {
        let socket = rustix::net::accept(listener)
            .map_err(FrontendError::io("accepting the back end's connection"))?;
        Self::on(socket)
    }

    /// A listening socket for [`Session::accept`].
    pub fn listen(path: &Path) -> Result<OwnedFd, FrontendError> {
        let bad = |e: rustix::io::Errno| FrontendError::Socket {
            what: "listening on",
            path: path.to_owned(),
            source: e.into(),
        };
        let _ = std::fs::remove_file(path);
        let socket = unix_socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).map_err(bad)?).map_err(bad)?;
        rustix::net::listen(&socket, 1).map_err(bad)?;
        Ok(socket)
    }

    fn on(socket: OwnedFd) -> Result<Self, FrontendError> {
        for way in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, way, Some(REPLY_LIMIT))
                .map_err(FrontendError::io("setting the socket's time limit"))?;
        }
        Ok(Self { socket, features: 0, protocol: 0 })
    }

    /// Agrees on features: all of `wanted`, which must be offered.
    pub fn negotiate(&mut self, wanted: u64) -> Result<(), FrontendError> {
        let offered = self.ask_u64(Request::GetFeatures)?;
        let wanted = wanted | offered & feature::PROTOCOL_FEATURES;
        if wanted & !offered != 0 {
            let missing = wanted & !offered;
            return Err(FrontendError::Features { missing, asked: wanted, offered });
        }
        if wanted & feature::PROTOCOL_FEATURES != 0 {
            let ours = protocol::REPLY_ACK | protocol::CONFIG | protocol::MQ;
            self.protocol = self.ask_u64(Request::GetProtocolFeatures)? & ours;
            self.send(Request::SetProtocolFeatures, &self.protocol.to_ne_bytes())?;
        }
        self.tell(Request::SetOwner, &[], &[])?;
        self.tell(Request::SetFeatures, &wanted.to_ne_bytes(), &[])?;
        self.features = wanted;
        Ok(())
    }

    /// Shares the memory.
    pub fn share(&self, memory: &Memory) -> Result<(), FrontendError> {
        let region = codec::Region {
            guest_addr: GUEST_BASE,
            len_bytes: memory.len_bytes() as u64,
            user_addr: memory.user_base(),
            mmap_offset: 0,
        };
        // Count and padding, then the regions.
        let mut body = 1u64.to_ne_bytes().to_vec();
        body.extend_from_slice(region.as_bytes());
        self.tell(Request::SetMemTable, &body, &[memory.fd()])
    }

    /// Starts queue `index` on `ring`.
    pub fn start(&self, index: u32, ring: &Ring) -> Result<Doorbells, FrontendError> {
        let event = || Event::new().map_err(FrontendError::io("making a doorbell"));
        let bells = Doorbells { kick: event()?, call: event()? };
        let RingShape { size, packed, .. } = ring.shape();
        let base = if packed { PACKED_START } else { 0 };
        self.state(Request::SetVringNum, index, u32::from(size))?;
        self.state(Request::SetVringBase, index, base)?;
        let [desc, avail, used] = ring.parts().map(|p| p as u64);
        let addr = VringAddr { index, flags: 0, desc, used, avail, log: 0 };
        self.tell(Request::SetVringAddr, addr.as_bytes(), &[])?;
        let word = u64::from(index).to_ne_bytes();
        self.tell(Request::SetVringCall, &word, &[bells.call.as_fd()])?;
        self.tell(Request::SetVringKick, &word, &[bells.kick.as_fd()])?;
        if self.features & feature::PROTOCOL_FEATURES != 0 {
            self.state(Request::SetVringEnable, index, 1)?;
        }
        Ok(bells)
    }

    /// Stops queue `index`; the back end does not touch it from then on.
    pub fn stop(&self, index: u32) -> Result<(), FrontendError> {
        let body = VringState { index, num: 0 };
        self.ask(Request::GetVringBase, body.as_bytes()).map(drop)
    }

    /// `len` bytes of config space from its beginning (at most 256).
    pub fn config(&self, len: usize) -> Result<Vec<u8>, FrontendError> {
        let header = codec::ConfigHeader { offset: 0, size: len as u32, flags: 0 };
        let mut body = header.as_bytes().to_vec();
        let at = body.len();
        body.resize(at + len, 0);
        let reply = self.ask(Request::GetConfig, &body)?;
        reply.get(at..at + len).map(<[u8]>::to_vec).ok_or_else(|| FrontendError::BadReply {
            message: Request::GetConfig.name(),
            what: format!("{} bytes", reply.len()),
        })
    }

    fn state(&self, request: Request, index: u32, num: u32) -> Result<(), FrontendError> {
        self.tell(request, VringState { index, num }.as_bytes(), &[])
    }

    /// Sends, and waits for the acknowledgement where the back end can give one.
    fn tell(
        &self,
        request: Request,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let ack = self.protocol & protocol::REPLY_ACK != 0;
        self.send_flagged(request, body, fds, ack)?;
        if !ack {
            return Ok(());
        }
        match word(request, &self.reply(request)?)? {
            0 => Ok(()),
            answer => Err(FrontendError::Refused { message: request.name(), answer }),
        }
    }

    fn ask(&self, request: Request, body: &[u8]) -> Result<Vec<u8>, FrontendError> {
        self.send(request, body)?;
        self.reply(request)
    }

    fn ask_u64(&self, request: Request) -> Result<u64, FrontendError> {
        word(request, &self.ask(request, &[])?)
    }

    fn send(&self, request: Request, body: &[u8]) -> Result<(), FrontendError> {
        self.send_flagged(request, body, &[], false)
    }

    fn send_flagged(
        &self,
        request: Request,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
        need_reply: bool,
    ) -> Result<(), FrontendError> {
        let header = Header::request(request as u32, body.len() as u32, need_reply);
        let bytes = [header.as_bytes(), body].concat();
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let parts = [IoSlice::new(&bytes)];
        rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL)
            .map(drop)
            .map_err(FrontendError::io("writing to the back end"))
    }

    fn reply(&self, request: Request) -> Result<Vec<u8>, FrontendError> {
        let mut head = [0u8; codec::HEADER_LEN_BYTES];
        self.fill(&mut head)?;
        let bad = |what: String| FrontendError::BadReply { message: request.name(), what };
        let (header, _) =
            Header::read_from_prefix(&head).map_err(|_| bad("no header".to_owned()))?;
        if header.request != request as u32 || header.size as usize > codec::MAX_PAYLOAD_LEN_BYTES {
            return Err(bad(format!("message {} of {} bytes", header.request, header.size)));
        }
        let mut body = vec![0; header.size as usize];
        self.fill(&mut body)?;
        Ok(body)
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<(), FrontendError> {
        let mut at = 0;
        while at < bytes.len() {
            let mut control = RecvAncillaryBuffer::new(&mut []);
            let mut parts = [IoSliceMut::new(&mut bytes[at..])];
            let got =
                rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::empty())
                    .map_err(FrontendError::io("reading the back end's reply"))?;
            if got.bytes == 0 {
                let closed = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
                return Err(FrontendError::io("reading the back end's reply")(closed));
            }
            at += got.bytes;
        }
        Ok(())
    }
}

fn unix_socket() -> Result<OwnedFd, FrontendError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(FrontendError::io("making a socket"))
}

fn word(request: Request, body: &[u8]) -> Result<u64, FrontendError> {
    let bad = || FrontendError::BadReply {
        message: request.name(),
        what: format!("{} bytes instead of 8", body.len()),
    };
    body.try_into().map(u64::from_ne_bytes).map_err(|_| bad())
}
