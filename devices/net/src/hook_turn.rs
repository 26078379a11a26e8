//! Turn of a port's hook: the frames that it sends as the guest's.

use frame::{Body, Frame, Head};
use sidecore::{Allowance, Ledger, Spent};

use crate::fdb::{Dest, PortId};
use crate::forward::Fabric;
use crate::head_batch::HeadBatch;
use crate::hook::{HookSlot, Polled, PortHook};
use crate::outcome::{Outcome, WhenFull};
use crate::port::{MIN_CHARGE_BYTES, Port};

/// Frames of a hook's own that are taken in a turn.
const HOOK_BATCH: usize = 64;

/// A port's turn with the frames that its hook sends, if it has one.
#[inline]
pub(crate) fn poll(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    port: &mut Port,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    match port.hook {
        None => 0,
        Some(_) => take_turn(fabric, heads, port, now_ns, ledger),
    }
}

/// The turn itself. Not inlined: most ports have no hook, and every port is polled.
#[inline(never)]
fn take_turn(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    port: &mut Port,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    let Some(mut slot) = port.hook.take() else { return 0 };
    let mut work = 0;
    fabric.begin_turn(port.id);
    if !slot.held.is_some_and(|held| fabric.still_waits(held)) {
        slot.held = None;
        let allowance = ledger.allowance(port.vm, now_ns);
        let mut spent = Spent::default();
        while work < HOOK_BATCH && allowance.has_more(&spent) {
            let head = heads.lone();
            match send_for_hook(fabric, head, port, slot.hook.as_mut(), now_ns, &mut spent) {
                None => break,
                Some(Outcome::Hold(held)) => {
                    slot.held = Some(held);
                    break;
                }
                Some(_) => {
                    fabric.sender.is_late = false;
                    work += 1;
                }
            }
        }
        settle(fabric, port, &mut slot, (allowance, spent), now_ns, ledger);
    }
    port.hook = Some(slot);
    work
}

/// After a turn: pays, and lets the hook have its buffers back.
fn settle(
    fabric: &mut Fabric,
    port: &mut Port,
    slot: &mut HookSlot,
    (allowance, spent): (Allowance, Spent),
    now_ns: u64,
    ledger: &mut Ledger,
) {
    let more = slot.held.is_none() && slot.hook.arm();
    if spent.requests > 0 {
        ledger.charge(port.vm, spent, more, now_ns);
        fabric.unpublished_bytes += spent.bytes;
        port.turn_bytes += spent.bytes;
    } else if more && allowance.is_none() {
        ledger.held_back(port.vm, now_ns);
    }
    slot.unfilled = !slot.hook.refill();
}

/// Sends one frame of the hook's; none: it has none.
fn send_for_hook(
    fabric: &mut Fabric,
    head: &mut Head,
    port: &mut Port,
    hook: &mut dyn PortHook,
    now_ns: u64,
    spent: &mut Spent,
) -> Option<Outcome> {
    let body = match hook.poll(head) {
        Polled::Nothing => return None,
        Polled::Consumed => return Some(Outcome::Consumed),
        Polled::Frame(body) => body,
    };
    let admitted = port.binding.admit(port.id, head, &mut fabric.tables, now_ns);
    let outcome = match admitted {
        Err(reason) => Outcome::Dropped(reason),
        Ok(()) => send_as_guest(fabric, port.id, head, body, now_ns),
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

/// Sends a frame of a hook's; it is not in use any more when this returns.
fn send_as_guest(
    fabric: &mut Fabric,
    from: PortId,
    head: &Head,
    body: &[u8],
    now_ns: u64,
) -> Outcome {
    let dest = fabric.lookup(head.dst(), from, now_ns);
    let lane = frame::flow_hash(head.eth()) as usize;
    let frame = Frame { vnet: head.vnet(), head: head.bytes(), body: Body::Ours(body) };
    // SAFETY: flushed right here.
    let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Hold, now_ns) };
    if matches!(dest, Dest::Uplink | Dest::All) {
        fabric.flush_uplink();
    }
    fabric.flush_lent();
    outcome
}
