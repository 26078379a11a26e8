//! The control queue (virtio 1.2, 5.1.6.5), for front ends that leave it to us: receive modes,
//! address and VLAN filters, the number of queue pairs, receive offloads, that the guest has
//! announced itself.
//!
//! A request is copied out once, checked, and changes what the switch delivers to the port from the
//! next frame on. What makes no sense, or was not negotiated, is answered with an error and changes
//! nothing. Its state is the driver's to set again after it has loaded anew; another daemon that
//! takes a session over does not know it, and delivers what any driver can take: see [`start`].

use queue::seg::{copy_in, copy_out};
use queue::{Chain, Completion, Position, RingError, Seg, Vring};
use sidecore::{Ledger, Spent};

use crate::binding::BindMode;
use crate::features;
use crate::filter::{Filter, MAX_FILTER_MACS, MacList};
use crate::port::{ALL_PAIRS, CONTROL_BATCH, ControlQueue, MIN_CHARGE_BYTES, Port};
use frame::Mac;

const OK: u8 = 0;
const ERR: u8 = 1;

/// Classes of requests.
const CLASS_RX: u8 = 0;
const CLASS_MAC: u8 = 1;
const CLASS_VLAN: u8 = 2;
const CLASS_ANNOUNCE: u8 = 3;
const CLASS_MQ: u8 = 4;
const CLASS_GUEST_OFFLOADS: u8 = 5;

/// The index of the control queue of a port with so many pairs (virtio 1.2, 5.1.2).
pub(crate) fn index(features: u64, pairs: u16) -> Option<u16> {
    let has_queue = features & features::CTRL_VQ != 0;
    let used_pairs = if features & features::MQ != 0 { pairs } else { 1 };
    has_queue.then_some(2 * used_pairs)
}

/// Puts a port into the state that its driver expects of a control queue which starts at `vring`.
pub(crate) fn start(port: &mut Port, vring: &Vring) {
    let has = |bit| port.features & bit != 0;
    let filters_vlans = has(features::CTRL_VLAN);
    let is_used = vring.queue.position() != Position::fresh();
    if !is_used {
        port.filter = Some(Box::new(Filter::new(port.binding.mac, filters_vlans)));
        port.rx_features = port.features;
        port.set_pairs(if has(features::MQ) { 1 } else { ALL_PAIRS });
        port.ask_to_announce(false);
    } else if port.filter.is_none() {
        // An earlier daemon knew. All frames pass, as at first, and come as any driver takes them.
        port.filter = Some(Box::new(Filter::new(port.binding.mac, filters_vlans)));
        if has(features::CTRL_GUEST_OFFLOADS) {
            port.rx_features = port.features & !features::GUEST_OFFLOADS;
        }
        // It came from somewhere else, or the switch is a new one: who talks to it has to find it.
        port.ask_to_announce(has(features::GUEST_ANNOUNCE));
        port.set_pairs(ALL_PAIRS);
    }
}

/// Serves requests of the control queue, if the port has one.
#[inline]
pub(crate) fn poll(port: &mut Port, now_ns: u64, ledger: &mut Ledger) -> usize {
    match port.control.take() {
        None => 0,
        Some(control) => serve(port, control, now_ns, ledger),
    }
}

/// Serves the control queue. Not inlined: most ports have no such queue, and where there is one it
/// is idle.
#[inline(never)]
fn serve(
    port: &mut Port,
    mut control: Box<ControlQueue>,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    let ControlQueue { vring, batch } = &mut *control;
    let popped = vring.pop(batch, CONTROL_BATCH);
    let mut spent = Spent::default();
    for at in 0..popped {
        let chain = batch.get(at);
        spent.add(chain.readable_len.into(), MIN_CHARGE_BYTES);
        if chain.writable_len == 0 {
            let what = "control request without room for an answer";
            vring.fail(&RingError::BadRequest { head: chain.id, what });
            break;
        }
        let answer = if chain.fault.is_none() && obey(port, &chain) { OK } else { ERR };
        copy_in(chain.writable, 0, &[answer]);
        vring.queue.mark_written(chain.writable, 1);
        vring.push(&[Completion { id: chain.id, ndesc: chain.ndesc, written: 1 }]);
    }
    if popped > 0 {
        ledger.debit(port.vm, spent, now_ns);
        vring.notify();
        batch.release();
    }
    port.control = Some(control);
    popped
}

/// A copy of a request's bytes at `offset`; none when it does not have so many.
fn read<const N: usize>(segs: &[Seg], offset: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    (copy_out(segs, offset, &mut bytes) == N).then_some(bytes)
}

/// Whether a request was obeyed.
fn obey(port: &mut Port, chain: &Chain<'_>) -> bool {
    let segs = chain.readable;
    let Some([class, command]) = read(segs, 0) else { return false };
    let data_len = chain.readable_len as usize - 2;
    let done = match (class, command) {
        (CLASS_RX, _) if data_len == 1 => set_mode(port, command, segs),
        (CLASS_MAC, 0) => set_table(port, segs, data_len),
        (CLASS_MAC, 1) if data_len == 6 => set_mac(port, segs),
        (CLASS_VLAN, 0 | 1) if data_len == 2 => set_vlan(port, segs, command == 0),
        (CLASS_ANNOUNCE, 0) if data_len == 0 => port.was_announced(),
        (CLASS_MQ, 0) if data_len == 2 => set_pairs(port, segs),
        (CLASS_GUEST_OFFLOADS, 0) if data_len == 8 => set_offloads(port, segs),
        _ => None,
    };
    done.is_some()
}

/// The filter, if the driver negotiated `needs`.
fn filter_with(port: &mut Port, needs: u64) -> Option<&mut Filter> {
    let may = port.features & needs != 0;
    port.filter.as_deref_mut().filter(|_| may)
}

fn set_mode(port: &mut Port, command: u8, segs: &[Seg]) -> Option<()> {
    let needs = if command < 2 { features::CTRL_RX } else { features::CTRL_RX_EXTRA };
    let modes = &mut filter_with(port, needs)?.modes;
    let [on] = read(segs, 2)?;
    let mode = match command {
        0 => &mut modes.promisc,
        1 => &mut modes.all_multicast,
        2 => &mut modes.all_unicast,
        3 => &mut modes.no_multicast,
        4 => &mut modes.no_unicast,
        5 => &mut modes.no_broadcast,
        _ => return None,
    };
    *mode = on != 0;
    Some(())
}

/// Two tables, unicasts and multicasts, each with its length in front.
fn set_table(port: &mut Port, segs: &[Seg], data_len: usize) -> Option<()> {
    let filter = filter_with(port, features::CTRL_RX)?;
    let (unicast, unicast_len) = read_table(segs, 2)?;
    let (multicast, multicast_len) = read_table(segs, 2 + unicast_len)?;
    if unicast_len + multicast_len != data_len {
        return None;
    }
    (filter.unicast, filter.multicast) = (unicast, multicast);
    Some(())
}

/// The table at `offset`, and its bytes. Of one that is longer than ours no address is read.
fn read_table(segs: &[Seg], offset: usize) -> Option<(MacList, usize)> {
    let count = u32::from_le_bytes(read(segs, offset)?) as usize;
    let len_bytes = 4 + 6 * count;
    if count > MAX_FILTER_MACS {
        return Some((MacList::overflowing(), len_bytes));
    }
    let mut list = MacList::empty();
    for at in 0..count {
        list.add(Mac::new(read(segs, offset + 4 + 6 * at)?));
    }
    Some((list, len_bytes))
}

/// The driver's new address. Not one that the port's binding would keep it from using.
fn set_mac(port: &mut Port, segs: &[Seg]) -> Option<()> {
    let bound = port.binding.mac.filter(|_| port.binding.mode != BindMode::Off);
    let mac = Mac::new(read(segs, 2)?);
    let is_shared = port.binding.shared.macs.contains(&mac);
    let filter = filter_with(port, features::CTRL_MAC_ADDR)?;
    let is_foreign = !is_shared && bound.is_some_and(|bound| bound != mac);
    if mac.is_group() || mac.is_zero() || is_foreign {
        return None;
    }
    filter.mac = Some(mac);
    Some(())
}

fn set_vlan(port: &mut Port, segs: &[Seg], passes: bool) -> Option<()> {
    let filter = filter_with(port, features::CTRL_VLAN)?;
    filter.set_vlan(u16::from_le_bytes(read(segs, 2)?), passes).then_some(())
}

fn set_pairs(port: &mut Port, segs: &[Seg]) -> Option<()> {
    let pairs = u16::from_le_bytes(read(segs, 2)?);
    let is_legal = port.features & features::MQ != 0 && (1..=port.pairs()).contains(&pairs);
    is_legal.then(|| port.set_pairs(pairs))
}

fn set_offloads(port: &mut Port, segs: &[Seg]) -> Option<()> {
    let wanted = u64::from_le_bytes(read(segs, 2)?);
    let may = port.features & features::GUEST_OFFLOADS;
    if port.features & features::CTRL_GUEST_OFFLOADS == 0 || wanted & !may != 0 {
        return None;
    }
    port.rx_features = port.features & !features::GUEST_OFFLOADS | wanted;
    Some(())
}
