//! Delivery: from one frame to its receivers.

use std::any::Any;
use std::sync::Arc;

use base::counter::DropReason;
use frame::{Frame, FrameBuffer, GSO_UDP_L4, HEAD_LEN, HeadBytes, Mac, SegmentPlan, VNET_LEN};
use sidecore::VmId;

use crate::backlog::Backlogs;
use crate::binding::{BindMode, Tables};
use crate::delivery::Delivery;
use crate::fdb::{Dest, PortId, UPLINK};
use crate::hook::{HookSlot, Hooks, Outbox, OutboxTo, PortHook, ToGuest};
use crate::metrics::SwitchStats;
use crate::moves::Move;
use crate::outcome::{Awaited, Held, Outcome, Sender, WhenFull};
use crate::port::{MIN_CHARGE_BYTES, Place, Port};
use crate::rxq::RxQueue;
use crate::uplink::Uplink;

/// Bytes, as they are charged, that may be moved while frames wait to be published: 2 µs. With
/// less, receivers of small frames from many senders would be notified for a few each.
const UNPUBLISHED_BYTES: u64 = 16 << 10;

/// A turn that takes longer than frames in place should wait for it: 1 µs.
pub(crate) const LONG_TURN_BYTES: u64 = UNPUBLISHED_BYTES / 2;

/// Everything a sender's frames may go to. A sender is taken out of it while its frames are sent,
/// so that no frame can come back to it.
pub(crate) struct Fabric {
    pub ports: Vec<Option<Box<Port>>>,
    pub uplink: Option<Box<Uplink>>,
    pub tables: Tables,
    /// Receive queues with something to publish.
    pub touched: Vec<Awaited>,
    /// Room for a frame that has to be seen or changed as a whole.
    pub buffer: FrameBuffer,
    /// The one whose turn it is.
    pub sender: Sender,
    /// Cost of frames beyond themselves: copies of floods but the first, each with the least that a
    /// frame costs, and receive buffers in many pieces. Whoever sent the frame takes and clears it.
    pub extra_cost_bytes: u64,
    /// Bytes moved since queues were published the last time.
    pub unpublished_bytes: u64,
    pub hooks: Hooks,
    pub backlogs: Backlogs,
    pub stats: Arc<SwitchStats>,
}

impl Fabric {
    /// Looks up where frames from `from` to `dst` go.
    #[inline]
    pub fn lookup(&self, dst: Mac, from: PortId, now_ns: u64) -> Dest {
        if dst.is_group() {
            return if dst.is_link_local_group() { Dest::Nowhere } else { Dest::All };
        }
        match self.tables.macs.owner(dst, now_ns) {
            None => Dest::All,
            // Its own address: a frame never goes back.
            Some(owner) if owner == from => Dest::Nowhere,
            Some(UPLINK) => Dest::Uplink,
            Some(owner) if self.uplink.is_some() && self.is_away(owner) => Dest::Uplink,
            Some(owner) => Dest::Port(owner),
        }
    }

    /// The port at a place, unless another has taken it.
    pub(crate) fn port_mut(&mut self, place: Place) -> Option<&mut Port> {
        let port = self.ports.get_mut(usize::from(place.id))?.as_deref_mut()?;
        (port.serial == place.serial).then_some(port)
    }

    /// Whether nobody receives at this port. Its VM may run elsewhere: it has moved, or will come.
    pub fn is_away(&self, port: PortId) -> bool {
        let port = self.ports.get(usize::from(port)).and_then(Option::as_ref);
        port.is_none_or(|port| port.rx_running.is_empty())
    }

    /// Logs a move. Not inlined: at most once in ten seconds.
    #[cold]
    pub fn tell_of(&self, moved: &Move) {
        let name = |port: PortId| {
            let port = self.ports.get(usize::from(port)).and_then(Option::as_ref);
            port.map_or("the uplink", |port| &port.name)
        };
        let (mac, count) = (moved.mac, moved.count);
        let (from, to) = (name(moved.from), name(moved.to));
        if count == 1 {
            tracing::info!("MAC address {mac} moved from {from} to {to}");
        } else {
            tracing::warn!(
                "{count} moves of MAC addresses since the last line, {mac} from {from} to {to} the \
                 last: ports that are bridged to each other, or one address at two places?"
            );
        }
    }

    /// VM whose account is charged for what `to` receives.
    #[inline]
    pub fn vm_of(&self, to: PortId) -> VmId {
        self.ports.get(usize::from(to)).and_then(Option::as_ref).map_or(VmId::NONE, |p| p.vm)
    }

    /// Sends one frame.
    ///
    /// # Safety
    /// The frame's bytes stay valid until [`Fabric::flush_uplink`] and [`Fabric::flush_lent`].
    #[inline]
    pub unsafe fn deliver(
        &mut self,
        dest: Dest,
        lane: usize,
        frame: &Frame<'_>,
        when_full: WhenFull,
        now_ns: u64,
    ) -> Outcome {
        match dest {
            // SAFETY: the caller's promise.
            Dest::Port(to) => unsafe { self.send_to_port(to, lane, frame, when_full, now_ns) },
            // SAFETY: the caller's promise.
            Dest::Uplink => unsafe { self.send_to_uplink(frame) },
            // SAFETY: the caller's promise.
            Dest::All => unsafe { self.flood(lane, frame, now_ns) },
            Dest::Nowhere => Outcome::Dropped(DropReason::NoDestination),
        }
    }

    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn flood(&mut self, lane: usize, frame: &Frame<'_>, now_ns: u64) -> Outcome {
        self.stats.floods.add(1);
        let mut receivers = 0_usize;
        for to in 0..self.ports.len() {
            let to = to as PortId;
            // SAFETY: the caller's promise.
            match unsafe { self.send_to_port(to, lane, frame, WhenFull::Drop, now_ns) } {
                Outcome::Sent | Outcome::Consumed => receivers += 1,
                Outcome::Dropped(DropReason::LinkDown | DropReason::NoDestination) => {}
                Outcome::Dropped(_) | Outcome::Hold(_) => {
                    receivers += 1;
                    self.stats.flood_drops.add(1);
                }
            }
        }
        if self.uplink.is_some() {
            receivers += 1;
            // SAFETY: the caller's promise.
            if let Outcome::Dropped(reason) = unsafe { self.send_to_uplink(frame) } {
                self.count_uplink_drop(reason);
            }
        }
        match receivers {
            0 => Outcome::Dropped(DropReason::NoDestination),
            n => {
                let copies = n as u64 - 1;
                self.extra_cost_bytes += copies * (frame.len() as u64).max(MIN_CHARGE_BYTES);
                Outcome::Sent
            }
        }
    }

    fn count_uplink_drop(&self, reason: DropReason) {
        if let Some(uplink) = &self.uplink {
            uplink.queue.stats.drop_one(reason);
        }
    }

    /// Sends a frame to one port, past its hook.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn send_to_port(
        &mut self,
        to: PortId,
        lane: usize,
        frame: &Frame<'_>,
        when_full: WhenFull,
        now_ns: u64,
    ) -> Outcome {
        let port = self.ports.get(usize::from(to)).and_then(Option::as_ref);
        match port.is_some_and(|port| port.hook.is_some()) {
            // SAFETY: the caller's promise.
            true => unsafe { self.send_past_hook(to, lane, frame, when_full, now_ns) },
            false => self.send_to_guest(to, lane, frame, when_full, now_ns),
        }
    }

    /// To a port with a hook. Not inlined: its buffer is nothing for all other frames.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    #[inline(never)]
    unsafe fn send_past_hook(
        &mut self,
        to: PortId,
        lane: usize,
        frame: &Frame<'_>,
        when_full: WhenFull,
        now_ns: u64,
    ) -> Outcome {
        let mut head = [0; VNET_LEN + HEAD_LEN];
        // SAFETY: the caller's promise.
        let Some(answer) = (unsafe { self.show(to, frame, &mut head, now_ns) }) else {
            return self.send_to_guest(to, lane, frame, when_full, now_ns);
        };
        let Some((vnet, len)) = answer.guest else { return Outcome::Consumed };
        let changed = frame.shortened(vnet, &head[..frame.head.len()], len);
        // The hook has it: nothing behind it waits for a guest without buffers.
        let when_full = if answer.may_miss { WhenFull::Drop } else { when_full };
        let outcome = self.send_to_guest(to, lane, &changed, when_full, now_ns);
        if outcome == Outcome::Sent && answer.wants_receipt {
            self.tell_delivered(to, frame);
        }
        if answer.may_miss { Outcome::Consumed } else { outcome }
    }

    /// Sends a frame to one port's guest, whatever its hook would say.
    pub(crate) fn send_to_guest(
        &mut self,
        to: PortId,
        lane: usize,
        frame: &Frame<'_>,
        when_full: WhenFull,
        now_ns: u64,
    ) -> Outcome {
        let Self { ports, buffer, touched, sender, extra_cost_bytes, stats, .. } = self;
        let Some(port) = ports.get_mut(usize::from(to)).and_then(Option::as_deref_mut) else {
            return Outcome::Dropped(DropReason::NoDestination);
        };
        let delivery = match Delivery::find(port, lane, frame) {
            Ok(delivery) => delivery,
            Err(reason) => return Outcome::Dropped(reason),
        };
        let sender = Sender { now_ns, ..*sender };
        let outcome = match delivery.room(port, frame, when_full, &sender, stats) {
            Ok(()) => delivery.put(port, frame, buffer, touched, stats),
            Err(outcome) => outcome,
        };
        *extra_cost_bytes += delivery.excess(port, frame);
        outcome
    }

    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn send_to_uplink(&mut self, frame: &Frame<'_>) -> Outcome {
        let Self { uplink, buffer, stats, .. } = self;
        let Some(uplink) = uplink.as_deref_mut() else {
            return Outcome::Dropped(DropReason::NoDestination);
        };
        let cut = frame.vnet.gso_kind() == GSO_UDP_L4 && !uplink.uso;
        let sent = if cut {
            stats.software_segmented.add(1);
            match SegmentPlan::new(frame.eth(), frame.len(), &frame.vnet) {
                Ok(plan) if buffer.load(frame) => uplink.send_segments(buffer.eth(), &plan),
                Ok(_) => Err(DropReason::Malformed),
                Err(reason) => Err(reason),
            }
        } else {
            // SAFETY: the caller's promise.
            unsafe { uplink.send(frame) }
        };
        match sent {
            Ok(()) => Outcome::Sent,
            Err(reason) => Outcome::Dropped(reason),
        }
    }

    /// Has hooks hand on what they have queued in memory of others, whose owners want it back.
    #[inline]
    pub fn flush_lent(&mut self) {
        if !self.hooks.lent.is_empty() {
            self.flush_lenders();
        }
    }

    /// Sends what is queued on the uplink: at most one system call.
    #[inline]
    pub fn flush_uplink(&mut self) {
        if let Some(uplink) = &mut self.uplink {
            uplink.flush();
        }
    }

    /// Publishes once enough was moved that frames which are in place should not wait for the rest
    /// of the round.
    #[inline]
    pub fn publish_in_time(&mut self, now_ns: u64) {
        if self.unpublished_bytes >= UNPUBLISHED_BYTES {
            self.publish(now_ns);
        }
    }

    /// Takes a port out for its turn. If that is going to be a long one, as the last was, what
    /// others sent does not wait for it.
    #[inline]
    pub fn publish_before(&mut self, at: usize, now_ns: u64) -> Option<Box<Port>> {
        if self.ports[at].as_ref()?.turn_bytes >= LONG_TURN_BYTES {
            self.publish(now_ns);
        }
        self.ports[at].take()
    }

    /// Publishes every touched receive queue, with one notification each.
    pub fn publish(&mut self, now_ns: u64) {
        debug_assert!(self.hooks.lent.is_empty(), "a sender has its memory back too early");
        if self.hooks.has_queued() {
            self.flush_hooks();
        }
        let Self { ports, touched, .. } = self;
        self.unpublished_bytes = 0;
        for (port, queue) in touched.drain(..) {
            let Some(port) = ports.get_mut(usize::from(port)).and_then(Option::as_deref_mut) else {
                continue;
            };
            // A router's kernel does all that there is to do: nobody needs a share of its time.
            let may_route = port.binding.mode != BindMode::MacAndIp;
            if let Some(Some(rxq)) = port.rx.get_mut(usize::from(queue)) {
                rxq.publish_at(now_ns, may_route);
            }
            if let Some(Some(txq)) = port.tx.get_mut(usize::from(queue)) {
                txq.vring.postpone_notify(now_ns);
            }
        }
    }

    /// Begins a sender's turn.
    #[inline]
    pub fn begin_turn(&mut self, port: PortId) {
        (self.sender.port, self.sender.is_late) = (port, false);
    }

    /// Whether the sender whose turn it is, and that is held, should go on waiting.
    pub fn still_waits(&mut self, held: Held) -> bool {
        let Self { ports, sender, .. } = self;
        let Some(rxq) = rx_mut(ports, held.on) else { return false };
        let Some(since_ns) = held.window_since_ns else { return rxq.still_full(sender) };
        sender.is_late = sender.now_ns.saturating_sub(since_ns) >= sender.hold_ns;
        !sender.is_late && rxq.wait_for_window(sender)
    }
}

/// Frames between hooks and the rest.
impl Fabric {
    fn hook_of(&mut self, port: PortId) -> Option<&mut HookSlot> {
        self.ports.get_mut(usize::from(port))?.as_deref_mut()?.hook.as_mut()
    }

    /// Shows a frame for a port to its hook. `head` gets the beginning that the guest is to have.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn show(
        &mut self,
        to: PortId,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        now_ns: u64,
    ) -> Option<ToGuest> {
        let Self { ports, buffer, hooks, .. } = self;
        let slot = ports.get_mut(usize::from(to))?.as_deref_mut()?.hook.as_mut()?;
        // SAFETY: the caller's promise.
        Some(unsafe { hooks.show((to, slot), frame, head, buffer, now_ns) })
    }

    /// The guest has got a frame that a hook wants to hear of.
    fn tell_delivered(&mut self, to: PortId, frame: &Frame<'_>) {
        if let Some(slot) = self.hook_of(to) {
            slot.hook.delivered(frame);
        }
    }

    /// Has hooks hand on what lies in memory of others.
    #[cold]
    fn flush_lenders(&mut self) {
        while let Some(to) = self.hooks.lent.pop() {
            if let Some(slot) = self.hook_of(to) {
                slot.is_lent = false;
                slot.hook.flush();
            }
        }
    }

    /// Has hooks hand on everything, and sends what they leave.
    fn flush_hooks(&mut self) {
        while let Some(to) = self.hooks.queued.pop() {
            let mut outbox = std::mem::replace(&mut self.hooks.outbox, Outbox::without_room());
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
    fn send_outbox(&mut self, from: PortId, outbox: &mut Outbox) {
        for (bytes, len, to) in outbox.drain() {
            let frame = Frame::short(&bytes[..len]);
            match to {
                OutboxTo::Addressee => self.send_short(from, &frame),
                OutboxTo::Guest => {
                    self.send_to_guest(from, 0, &frame, WhenFull::Drop, 0);
                }
            }
        }
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

    /// Runs `f` with the hook of a port, as [`crate::NetPort::with_hook`] does.
    pub(crate) fn with_hook<H: PortHook, R>(
        &mut self,
        place: Place,
        f: impl FnOnce(&mut H, &mut Outbox) -> R,
    ) -> Option<R> {
        let hook: &mut dyn Any = self.port_mut(place)?.hook.as_mut()?.hook.as_mut();
        let mut outbox = Outbox::without_room();
        let answer = f(hook.downcast_mut()?, &mut outbox);
        if !outbox.is_empty() {
            self.send_outbox(place.id, &mut outbox);
            self.publish(0);
        }
        Some(answer)
    }
}

/// The receive queue a sender waits for, if it still runs.
pub(crate) fn rx_mut(ports: &mut [Option<Box<Port>>], at: Awaited) -> Option<&mut RxQueue> {
    let port = ports.get_mut(usize::from(at.0))?.as_deref_mut()?;
    port.rx.get_mut(usize::from(at.1))?.as_deref_mut()
}
