//! Seam of a port: a hook between its guest and the switch.
//!
//! A port may have one [`PortHook`]. It sees every frame of the guest's before the switch looks for
//! the destination, and every frame for the guest before it is delivered; it may change, answer or
//! end them, and send frames of its own in the guest's place. The switch knows nothing of what it
//! does.
//!
//! It runs on the switch's sidecore, between two frames: it must not wait, allocate or lock. What
//! it queues is flushed at the end of a round, or, where it refers to memory of others, before the
//! sender's turn ends. Ports without a hook pay for a comparison with null.

use std::any::Any;
use std::os::fd::RawFd;

use base::counter::DropReason;
use frame::{Frame, FrameBuffer, Head, HeadBytes, Vnet};

use crate::fdb::PortId;
use crate::outcome::Held;

/// Frames that a hook may leave in an [`Outbox`] at the end of a round.
pub const MAX_OUTBOX: usize = 64;

/// Outcome for a frame of the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromGuest {
    /// The frame goes on as it is now.
    Pass,
    /// The frame ends here.
    Consume,
    /// The buffer's first bytes, this many, are an answer to the guest, and the frame ends here.
    Reply(usize),
    /// The buffer's first bytes, this many, are an answer to the guest, and the frame goes on as it
    /// is now.
    ReplyAndPass(usize),
}

/// Outcome for a frame for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToGuest {
    /// Header and length of the frame that the guest gets, with the beginning that is in the buffer
    /// now; none: the frame ends here.
    pub guest: Option<(Vnet, usize)>,
    /// [`PortHook::delivered`] is called once the guest has it.
    pub wants_receipt: bool,
    /// The guest can do without, and nobody waits until it has buffers.
    pub may_miss: bool,
    /// Frames that the hook has queued by now.
    pub queued: Queued,
}

/// Frames that a hook has queued, and so when it has to be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Queued {
    /// Nothing.
    Nothing,
    /// Frames in memory of its own: at the end of the round.
    Own,
    /// Frames that lie in memory of others: before the sender's turn ends.
    Lent,
}

/// A frame that a hook sends as the guest's.
#[derive(Debug)]
pub enum Polled<'a> {
    /// No frame.
    Nothing,
    /// A frame that ends here.
    Consumed,
    /// A frame: its beginning is in the head, and this is the rest. It stays where it is until
    /// [`PortHook::polled`].
    Frame(&'a [u8]),
}

/// Program of another crate between a port's guest and the switch.
// `from_guest` is a direction here, not a conversion.
#[allow(clippy::wrong_self_convention)]
pub trait PortHook: Any + Send {
    /// A frame that the guest sends, after its source was checked: `head` may be changed in place.
    /// An answer to the guest is written to `reply`.
    fn from_guest(&mut self, head: &mut Head, reply: &mut HeadBytes, now_ns: u64) -> FromGuest;

    /// A frame for the guest; `head` is a copy of its beginning that may be changed. `buffer` is
    /// room for a whole frame.
    ///
    /// # Safety
    /// The frame's body stays valid until [`PortHook::flush`] when [`Queued::Lent`] is answered,
    /// and else until the call returns.
    unsafe fn to_guest(
        &mut self,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        buffer: &mut FrameBuffer,
        now_ns: u64,
    ) -> ToGuest;

    /// The guest has got this frame, as it was before [`PortHook::to_guest`] changed it.
    fn delivered(&mut self, frame: &Frame<'_>);

    /// The next frame of its own. Its source is checked as the guest's is.
    fn poll(&mut self, head: &mut Head) -> Polled<'_>;

    /// Tells what became of that frame, of `len_bytes`. Not called when its receiver has no
    /// buffers: then the same frame is asked for again.
    fn polled(&mut self, sent: Result<(), DropReason>, len_bytes: usize);

    /// The turn is over: buffers of frames of its own are free again. False: they cannot be used
    /// yet, and it wants to be asked again in a millisecond.
    fn refill(&mut self) -> bool;

    /// Before the switch sleeps: whether frames of its own wait.
    fn arm(&mut self) -> bool;

    /// Hands on what is queued. Memory of others is not used any more afterwards.
    fn flush(&mut self);

    /// Leaves frames that are to be sent at the end of the round, [`MAX_OUTBOX`] at most.
    fn notices(&mut self, outbox: &mut Outbox);

    /// A descriptor that is readable when frames of its own come: it wakes the switch.
    fn event_fd(&self) -> Option<RawFd>;
}

/// Receiver of a frame in an [`Outbox`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutboxTo {
    /// The owner of its destination address, past the hook of that port.
    Addressee,
    /// The hook's own guest, past the hook.
    Guest,
}

/// Short frames that a hook has the switch send, in order.
#[derive(Debug)]
pub struct Outbox {
    frames: Vec<(HeadBytes, usize, OutboxTo)>,
}

impl Outbox {
    /// With room for as many frames as one round may have.
    pub(crate) fn new() -> Self {
        Self { frames: Vec::with_capacity(MAX_OUTBOX) }
    }

    /// Without room: what is added allocates.
    pub(crate) fn without_room() -> Self {
        Self { frames: Vec::new() }
    }

    /// Whether no frame is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Takes all frames out.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (HeadBytes, usize, OutboxTo)> + '_ {
        self.frames.drain(..)
    }

    /// Adds a frame, virtio-net header first. One that is longer than [`HeadBytes`] is cut.
    pub fn push(&mut self, bytes: &[u8], to: OutboxTo) {
        let mut head = [0; size_of::<HeadBytes>()];
        let len = bytes.len().min(head.len());
        head[..len].copy_from_slice(&bytes[..len]);
        self.frames.push((head, len, to));
    }
}

/// A port's hook with what the switch keeps beside it.
pub(crate) struct HookSlot {
    pub hook: Box<dyn PortHook>,
    /// A frame of its own waits for a receiver without buffers.
    pub held: Option<Held>,
    /// The hook could not get its buffers back at the last try.
    pub unfilled: bool,
    /// The port is listed in [`Hooks::queued`].
    pub is_queued: bool,
    /// The port is listed in [`Hooks::lent`].
    pub is_lent: bool,
}

impl HookSlot {
    pub fn new(hook: Box<dyn PortHook>) -> Self {
        Self { hook, held: None, unfilled: false, is_queued: false, is_lent: false }
    }

    /// Whether it has sent something that can go on now; else the receiver that it waits for. Then
    /// whether it wants to be asked again soon.
    pub fn waiting(&mut self) -> (bool, Option<Held>, bool) {
        (self.hook.arm(), self.held, self.unfilled)
    }
}

/// Hooks of a switch that have to be flushed.
pub(crate) struct Hooks {
    /// Ports whose hooks have queued something.
    pub queued: Vec<PortId>,
    /// Ports whose hooks have queued something in memory of others.
    pub lent: Vec<PortId>,
    pub outbox: Outbox,
}

impl Hooks {
    pub fn new(max_ports: usize) -> Self {
        let list = || Vec::with_capacity(max_ports);
        Self { queued: list(), lent: list(), outbox: Outbox::new() }
    }

    /// Whether any hook has queued something.
    #[inline]
    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Shows a frame for a port to its hook. `head` gets the beginning that the guest is to have.
    ///
    /// # Safety
    /// The frame's bytes stay valid until every hook in [`Hooks::lent`] is flushed.
    pub unsafe fn show(
        &mut self,
        (to, slot): (PortId, &mut HookSlot),
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        buffer: &mut FrameBuffer,
        now_ns: u64,
    ) -> ToGuest {
        head[..frame.head.len()].copy_from_slice(frame.head);
        // SAFETY: the caller's promise.
        let answer = unsafe { slot.hook.to_guest(frame, head, buffer, now_ns) };
        if answer.queued > Queued::Nothing && !std::mem::replace(&mut slot.is_queued, true) {
            self.queued.push(to);
        }
        if answer.queued == Queued::Lent && !std::mem::replace(&mut slot.is_lent, true) {
            self.lent.push(to);
        }
        answer
    }
}
