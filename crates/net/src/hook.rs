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
use frame::{Body, Frame, FrameBuffer, Head, HeadBytes, Mac, Vnet};
use sidecore::{Allowance, Ledger, Spent};

use crate::device::Place;
use crate::engine::Engine;
use crate::fdb::PortId;
use crate::forward::{Dest, Fabric, Outcome, WhenFull};
use crate::port::{Awaited, MIN_CHARGE_BYTES, Port};

/// Frames of a hook's own that are taken in a turn.
const HOOK_BATCH: usize = 64;

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
    held_on: Option<Awaited>,
    /// The hook could not get its buffers back at the last try.
    unfilled: bool,
    /// The port is listed in [`Hooks::queued`].
    is_queued: bool,
    /// The port is listed in [`Hooks::lent`].
    is_lent: bool,
}

impl HookSlot {
    pub fn new(hook: Box<dyn PortHook>) -> Self {
        Self { hook, held_on: None, unfilled: false, is_queued: false, is_lent: false }
    }

    /// Whether it has sent something that can go on now; else the receiver that it waits for. Then
    /// whether it wants to be asked again soon.
    pub fn waiting(&mut self) -> (bool, Option<Awaited>, bool) {
        (self.hook.arm(), self.held_on, self.unfilled)
    }
}

/// Hooks of a switch that have to be flushed.
pub(crate) struct Hooks {
    /// Ports whose hooks have queued something.
    queued: Vec<PortId>,
    /// Ports whose hooks have queued something in memory of others.
    pub lent: Vec<PortId>,
    outbox: Outbox,
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
}

impl Fabric {
    fn hook_of(&mut self, port: PortId) -> Option<&mut HookSlot> {
        self.ports.get_mut(usize::from(port))?.as_deref_mut()?.hook.as_mut()
    }

    /// Shows a frame for a port to its hook. `head` gets the beginning that the guest is to have.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    pub(crate) unsafe fn show(
        &mut self,
        to: PortId,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        now_ns: u64,
    ) -> Option<ToGuest> {
        let Self { ports, buffer, hooks, .. } = self;
        let slot = ports.get_mut(usize::from(to))?.as_deref_mut()?.hook.as_mut()?;
        head[..frame.head.len()].copy_from_slice(frame.head);
        // SAFETY: the caller's promise.
        let answer = unsafe { slot.hook.to_guest(frame, head, buffer, now_ns) };
        if answer.queued > Queued::Nothing && !std::mem::replace(&mut slot.is_queued, true) {
            hooks.queued.push(to);
        }
        if answer.queued == Queued::Lent && !std::mem::replace(&mut slot.is_lent, true) {
            hooks.lent.push(to);
        }
        Some(answer)
    }

    /// The guest has got a frame that a hook wants to hear of.
    pub(crate) fn tell_delivered(&mut self, to: PortId, frame: &Frame<'_>) {
        if let Some(slot) = self.hook_of(to) {
            slot.hook.delivered(frame);
        }
    }

    /// Has hooks hand on what lies in memory of others.
    #[cold]
    pub(crate) fn flush_lenders(&mut self) {
        while let Some(to) = self.hooks.lent.pop() {
            if let Some(slot) = self.hook_of(to) {
                slot.is_lent = false;
                slot.hook.flush();
            }
        }
    }

    /// Has hooks hand on everything, and sends what they leave.
    pub(crate) fn flush_hooks(&mut self) {
        while let Some(to) = self.hooks.queued.pop() {
            let mut outbox =
                std::mem::replace(&mut self.hooks.outbox, Outbox { frames: Vec::new() });
            if let Some(slot) = self.hook_of(to) {
                slot.is_queued = false;
                slot.hook.flush();
                slot.hook.notices(&mut outbox);
            }
            self.send_outbox(to, &mut outbox);
            self.hooks.outbox = outbox;
        }
    }

    /// Sends what the hook of a port has left.
    pub(crate) fn send_outbox(&mut self, from: PortId, outbox: &mut Outbox) {
        for (bytes, len, to) in outbox.frames.drain(..) {
            let frame = Frame::short(&bytes[..len]);
            match to {
                OutboxTo::Addressee => self.send_short(from, &frame),
                OutboxTo::Guest => {
                    self.send_to_guest(from, 0, &frame, WhenFull::Drop, 0);
                }
            }
        }
    }

    /// Sends a frame of a hook's; it is not in use any more when this returns.
    fn send_as_guest(&mut self, from: PortId, head: &Head, body: &[u8], now_ns: u64) -> Outcome {
        let dest = self.lookup(head.dst(), from, now_ns);
        let lane = frame::flow_hash(head.eth()) as usize;
        let frame = Frame { vnet: head.vnet(), head: head.bytes(), body: Body::Ours(body) };
        // SAFETY: flushed right here.
        let outcome = unsafe { self.deliver(dest, lane, &frame, WhenFull::Hold, now_ns) };
        if matches!(dest, Dest::Uplink | Dest::All) {
            self.flush_uplink();
        }
        self.flush_lent();
        outcome
    }

    fn send_short(&mut self, from: PortId, frame: &Frame<'_>) {
        // To the guest itself it comes as if from nowhere.
        let dest = match self.lookup(Mac::read(frame.eth()), from, 0) {
            Dest::Nowhere => Dest::Port(from),
            dest => dest,
        };
        // SAFETY: flushed before the frame goes.
        unsafe { self.deliver(dest, 0, frame, WhenFull::Drop, 0) };
        self.flush_uplink();
        self.flush_lent();
    }
}

impl Engine {
    /// Runs `f` with the hook of a port, as [`crate::NetPort::with_hook`] does.
    pub(crate) fn with_hook<H: PortHook, R>(
        &mut self,
        place: Place,
        f: impl FnOnce(&mut H, &mut Outbox) -> R,
    ) -> Option<R> {
        let hook: &mut dyn Any = self.port_mut(place)?.hook.as_mut()?.hook.as_mut();
        let mut outbox = Outbox { frames: Vec::new() };
        let answer = f(hook.downcast_mut()?, &mut outbox);
        if !outbox.frames.is_empty() {
            self.fabric.send_outbox(place.id, &mut outbox);
            self.fabric.publish(0);
        }
        Some(answer)
    }

    /// A port's turn with the frames that its hook sends.
    pub(crate) fn poll_hook(&mut self, port: &mut Port, now_ns: u64, ledger: &mut Ledger) -> usize {
        let Some(mut slot) = port.hook.take() else { return 0 };
        let mut work = 0;
        if !slot.held_on.is_some_and(|at| self.fabric.still_full(at, now_ns)) {
            slot.held_on = None;
            let allowance = ledger.allowance(port.vm, now_ns);
            let mut spent = Spent::default();
            while work < HOOK_BATCH && spent.bytes < allowance.bytes {
                match self.send_for_hook(port, slot.hook.as_mut(), now_ns, &mut spent) {
                    None => break,
                    Some(Outcome::Hold(awaited)) => {
                        slot.held_on = Some(awaited);
                        break;
                    }
                    Some(_) => work += 1,
                }
            }
            self.settle_hook(port, &mut slot, (allowance, spent), now_ns, ledger);
        }
        port.hook = Some(slot);
        work
    }

    /// After a turn: pays, and lets the hook have its buffers back.
    fn settle_hook(
        &mut self,
        port: &mut Port,
        slot: &mut HookSlot,
        (allowance, spent): (Allowance, Spent),
        now_ns: u64,
        ledger: &mut Ledger,
    ) {
        let more = slot.held_on.is_none() && slot.hook.arm();
        if spent.requests > 0 {
            ledger.charge(port.vm, spent, more, now_ns);
            self.fabric.unpublished_bytes += spent.bytes;
            port.turn_bytes += spent.bytes;
        } else if more && allowance.is_none() {
            ledger.held_back(port.vm, now_ns);
        }
        slot.unfilled = !slot.hook.refill();
    }

    /// Sends one frame of the hook's; none: it has none.
    fn send_for_hook(
        &mut self,
        port: &mut Port,
        hook: &mut dyn PortHook,
        now_ns: u64,
        spent: &mut Spent,
    ) -> Option<Outcome> {
        let Self { fabric, heads, .. } = self;
        let head = &mut heads[0];
        let body = match hook.poll(head) {
            Polled::Nothing => return None,
            Polled::Consumed => return Some(Outcome::Consumed),
            Polled::Frame(body) => body,
        };
        let admitted = port.binding.admit(port.id, head, &mut fabric.tables, now_ns);
        let outcome = match admitted {
            Err(reason) => Outcome::Dropped(reason),
            Ok(()) => fabric.send_as_guest(port.id, head, body, now_ns),
        };
        let len = head.frame_len();
        match outcome {
            Outcome::Hold(_) => return Some(outcome),
            Outcome::Dropped(reason) => hook.polled(Err(reason), len),
            Outcome::Sent | Outcome::Consumed => hook.polled(Ok(()), len),
        }
        if admitted.is_ok() {
            let more = std::mem::take(&mut fabric.extra_cost_bytes);
            spent.add(len as u64 + more, MIN_CHARGE_BYTES);
        }
        Some(outcome)
    }
}
