//! Headers and payloads of vhost-user messages, and the checks on both.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`, sections "Message specification" and "Front-end
//! message types". All numbers are in native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::VhostUserError;
pub use crate::request::{
    Answer, CONFIG_HEADER_LEN_BYTES, Fds, MAX_CONFIG_LEN_BYTES, MessageName, Needs, Request, Shape,
    Sizes, VRING_NO_FD, feature, protocol,
};

/// Bytes of a message header.
pub const HEADER_LEN_BYTES: usize = 12;
/// Most bytes of a payload: the largest legal one is a table of 64 regions, 2,056 bytes.
pub const MAX_PAYLOAD_LEN_BYTES: usize = 4096;
/// Most file descriptors of a message: one per memory region.
pub const MAX_FDS: usize = base::limits::MAX_MEMORY_REGIONS;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0x3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// `VHOST_VRING_F_LOG`: log writes to the used ring.
pub const VRING_F_LOG: u32 = 1;

/// Header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Message id.
    pub request: u32,
    /// Version, reply and need-reply bits.
    pub flags: u32,
    /// Payload bytes.
    pub size: u32,
}

impl Header {
    /// Makes the header of a request that we send.
    pub fn request(id: u32, size: u32, need_reply: bool) -> Self {
        Self { request: id, flags: VERSION | if need_reply { NEED_REPLY } else { 0 }, size }
    }

    /// Makes the header of a reply.
    pub fn reply(id: u32, size: u32) -> Self {
        Self { request: id, flags: VERSION | REPLY, size }
    }

    /// Name of the message for errors.
    pub fn message(&self) -> MessageName {
        MessageName(self.request)
    }

    /// Whether the front end waits for an acknowledgement.
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Checks id, version, direction and size; the size is below
    /// [`MAX_PAYLOAD_LEN_BYTES`] afterwards.
    pub fn check(&self) -> Result<Request, VhostUserError> {
        let message = self.message();
        if self.flags & VERSION_MASK != VERSION || self.flags & REPLY != 0 {
            return Err(VhostUserError::BadFlags { message, flags: self.flags });
        }
        let request =
            Request::from_id(self.request).ok_or(VhostUserError::Unsupported { message })?;
        let sizes = request.shape().sizes;
        if self.size as usize > MAX_PAYLOAD_LEN_BYTES || !sizes.allows(self.size) {
            return Err(VhostUserError::BadSize { message, got: self.size, want: sizes.rule() });
        }
        Ok(request)
    }
}

/// Checks the number of descriptors that came with a message. `truncated`: the kernel had more
/// than there was room for.
pub fn check_fds(
    request: Request,
    payload: &[u8],
    got: usize,
    truncated: bool,
) -> Result<(), VhostUserError> {
    let first_word = u64_at(payload, 0);
    let (min, max) = match request.shape().fds {
        Fds::Exact(n) => (n, n),
        Fds::Optional => (0, 1),
        Fds::UnlessNoFd if first_word & VRING_NO_FD != 0 => (0, 0),
        Fds::UnlessNoFd => (1, 1),
        Fds::PerRegion => {
            let n = first_word as u32 as usize;
            (n, n)
        }
    };
    if !truncated && (min..=max).contains(&got) {
        return Ok(());
    }
    let got = if truncated { format!("more than {got}") } else { got.to_string() };
    let want = if min == max { min.to_string() } else { format!("{min} to {max}") };
    Err(VhostUserError::BadFds { message: request.message(), got, want })
}

fn u64_at(payload: &[u8], offset: usize) -> u64 {
    let mut word = [0u8; 8];
    if let Some(bytes) = payload.get(offset..offset + 8) {
        word.copy_from_slice(bytes);
    }
    u64::from_ne_bytes(word)
}

/// Copies a payload structure out of the first bytes of `payload`.
pub(crate) fn payload<T: FromBytes>(request: Request, payload: &[u8]) -> Result<T, VhostUserError> {
    T::read_from_prefix(payload).map(|(value, _)| value).map_err(|_| VhostUserError::BadSize {
        message: request.message(),
        got: payload.len() as u32,
        want: format!("at least {}", size_of::<T>()),
    })
}

/// "A vring state description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Queue.
    pub index: u32,
    /// Size, base or enable.
    pub num: u32,
}

/// "A vring address description". Ring addresses are the front end's user addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Queue.
    pub index: u32,
    /// [`VRING_F_LOG`].
    pub flags: u32,
    /// Descriptor table or ring.
    pub desc: u64,
    /// Used ring or device event suppression.
    pub used: u64,
    /// Available ring or driver event suppression.
    pub avail: u64,
    /// Guest address at which writes to the used ring are logged.
    pub log: u64,
}

/// Memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Region {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// First address in the front end.
    pub user_addr: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
}

/// "Single memory region description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Ignored.
    pub padding: u64,
    /// Region.
    pub region: Region,
}

/// "Log description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Log {
    /// Bytes of the bitmap.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// "Virtio device config space", without the content that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// Offset in config space.
    pub offset: u32,
    /// Bytes of content.
    pub size: u32,
    /// 0: written by the driver; 1: live migration.
    pub flags: u32,
}

/// "Inflight description", with the C structure's padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Inflight {
    /// Bytes of the area.
    pub mmap_size: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
    /// Queues.
    pub num_queues: u16,
    /// Descriptors per queue.
    pub queue_size: u16,
    /// Padding of the C structure, which not all front ends send.
    pub padding: u32,
}

#[cfg(test)]
mod tests;
