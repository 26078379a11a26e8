//! The switch's worker: polls every transmit queue and the uplink, round robin. A VM's frames are
//! sent in [`crate::transmit`], a hook's in [`crate::hook_turn`], the uplink's in
//! [`crate::ingress`].

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use base::limits::MAX_PORTS;
use frame::{FrameBuffer, Mac};
use queue::{Coalescing, Vring};
use sidecore::{Arm, Ledger, VmId, Watcher, Worker};

use crate::backlog::Backlogs;
use crate::binding::{Shared, Tables};
use crate::error::NetError;
use crate::fdb::{Ip, Learn, PortId, UPLINK};
use crate::forward::{Fabric, rx_mut};
use crate::head_batch::HeadBatch;
use crate::hook::Hooks;
use crate::kicks::{Kicks, take_queue};
use crate::metrics::SwitchStats;
use crate::outcome::{Held, Sender};
use crate::port::{Place, Port, queue_count};
use crate::uplink::Uplink;
use crate::{control, hook_turn, ingress, transmit};

/// A wire that could not take its receive buffers (no memory) cannot wake anybody either: it is
/// asked again so soon. A tick of the kernel, which may have freed some by then.
const REFILL_AGAIN_NS: u64 = 1_000_000;

/// Coalescing of the end of transmissions, for which nobody waits: drivers free the buffers, and
/// Linux does so whenever it is told of received frames too. A request and its answer then cost
/// each guest one interrupt and not two. 1 ms is what TCP small queues let a sender have in its
/// device.
pub(crate) const TX_TELL: Coalescing = Coalescing { max_pending: 16, max_wait_ns: 1_000_000 };

/// A switch's worker, with all that it works on. Lives on one sidecore.
pub(crate) struct Engine {
    pub fabric: Fabric,
    pub heads: HeadBatch,
    /// Port that is polled first in this round.
    turn: usize,
    /// Queue that a kick belongs to.
    pub kicks: HashMap<RawFd, (PortId, u16)>,
}

impl Engine {
    pub fn new(tables: Tables, hold_ns: u64, max_touched: usize, stats: Arc<SwitchStats>) -> Self {
        let fabric = Fabric {
            ports: Vec::new(),
            uplink: None,
            tables,
            touched: Vec::with_capacity(max_touched),
            buffer: FrameBuffer::new(),
            extra_cost_bytes: 0,
            sender: Sender { hold_ns, ..Sender::default() },
            unpublished_bytes: 0,
            hooks: Hooks::new(MAX_PORTS),
            backlogs: Backlogs::default(),
            stats,
        };
        Self { fabric, heads: HeadBatch::new(), turn: 0, kicks: HashMap::new() }
    }

    fn poll_port(&mut self, port: &mut Port, now_ns: u64, ledger: &mut Ledger) -> usize {
        let Self { fabric, heads, .. } = self;
        let (mut work, count) = (0, port.tx.len());
        port.turn_bytes = 0;
        // Credit that is short goes to the first one: another each time.
        let first = ledger.draw_below(count);
        for k in 0..count {
            let index = if first + k < count { first + k } else { first + k - count };
            if let Some(mut txq) = port.tx[index].take() {
                work += transmit::poll(fabric, heads, port, &mut txq, index, now_ns, ledger);
                txq.vring.notify_coalesced(now_ns, TX_TELL);
                port.tx[index] = Some(txq);
            }
        }
        work += control::poll(port, now_ns, ledger);
        work + hook_turn::poll(fabric, heads, port, now_ns, ledger)
    }
}

/// Ports and the uplink as they come and go, between two rounds.
impl Engine {
    /// Gives a port a number, its configured addresses and those that it shares.
    pub fn add_port(
        &mut self,
        mut port: Box<Port>,
        addresses: &[IpAddr],
        switch: &str,
        now_ns: u64,
    ) -> Result<PortId, NetError> {
        let ports = &mut self.fabric.ports;
        let at = match ports.iter().position(Option::is_none) {
            Some(at) => at,
            None if ports.len() < MAX_PORTS => {
                ports.push(None);
                ports.len() - 1
            }
            None => {
                let switch = switch.to_owned();
                return Err(NetError::TooManyPorts { switch, limit: MAX_PORTS });
            }
        };
        let id = at as PortId;
        port.id = id;
        if let Err(e) = self.bind_addresses(&port, addresses, now_ns) {
            self.forget(id, true);
            return Err(e);
        }
        self.fabric.ports[at] = Some(port);
        self.collect_shared();
        Ok(id)
    }

    /// Binds the configured addresses of a port to it.
    fn bind_addresses(
        &mut self,
        port: &Port,
        addresses: &[IpAddr],
        now_ns: u64,
    ) -> Result<(), NetError> {
        self.check_shared(port, addresses)?;
        let why = |answer| match answer {
            Learn::Known | Learn::New => None,
            Learn::Taken => Some("bound to another port"),
            _ => Some("one more than the table holds"),
        };
        let name = || port.name.to_string();
        let tables = &mut self.fabric.tables;
        if let Some(mac) = port.binding.mac
            && let Some(why) = why(tables.macs.fix(mac, port.id, now_ns))
        {
            return Err(NetError::BadMac { port: name(), mac: mac.to_string(), why });
        }
        for address in addresses {
            let answer = tables.ips.fix(Ip::from(*address), port.id, now_ns);
            if let Some(why) = why(answer) {
                return Err(NetError::BadAddress { port: name(), address: *address, why });
            }
        }
        Ok(())
    }

    /// Checks that shared addresses are bound to nobody, and bound ones are not shared.
    fn check_shared(&self, port: &Port, addresses: &[IpAddr]) -> Result<(), NetError> {
        let why = "bound to another port, or shared by others";
        let name = || port.name.to_string();
        let (tables, own) = (&self.fabric.tables, &port.binding.shared);
        let is_shared = |mac: &&Mac| tables.shared.macs.contains(mac) || own.macs.contains(mac);
        let mut bound =
            own.macs.iter().filter(|mac| tables.macs.is_fixed_elsewhere(**mac, port.id));
        if let Some(mac) = bound.next().or(port.binding.mac.as_ref().filter(is_shared)) {
            return Err(NetError::BadMac { port: name(), mac: mac.to_string(), why });
        }
        let is_shared = |ip: &Ip| tables.shared.ips.contains(ip) || own.ips.contains(ip);
        let mut bound = own.ips.iter().filter(|ip| tables.ips.is_fixed_elsewhere(**ip, port.id));
        let mut addressed = addresses.iter().map(|ip| Ip::from(*ip)).filter(is_shared);
        match bound.next().copied().or(addressed.next()) {
            Some(ip) => Err(NetError::BadAddress { port: name(), address: ip.into(), why }),
            None => Ok(()),
        }
    }

    /// Collects the shared addresses of all ports.
    fn collect_shared(&mut self) {
        let Fabric { ports, tables, .. } = &mut self.fabric;
        tables.shared = Shared::default();
        let Shared { macs, ips } = &mut tables.shared;
        for port in ports.iter().flatten() {
            let own = &port.binding.shared;
            // Each once: frames are compared with all of them.
            own.macs.iter().for_each(|mac| {
                if !macs.contains(mac) {
                    macs.push(*mac)
                }
            });
            own.ips.iter().for_each(|ip| {
                if !ips.contains(ip) {
                    ips.push(*ip)
                }
            });
        }
    }

    /// Forgets a port's addresses: all, or those that are not from the configuration.
    fn forget(&mut self, id: PortId, all: bool) {
        let port = self.fabric.ports.get(usize::from(id)).and_then(Option::as_ref);
        let keep = port.and_then(|p| p.binding.mac.filter(|_| p.binding.mac_configured && !all));
        self.fabric.tables.macs.forget(id, |mac, _| Some(mac) != keep);
        self.fabric.tables.ips.forget(id, |_, fixed| all || !fixed);
    }

    fn stop_queues(&mut self, place: Place, watcher: &Watcher<'_>) -> Vec<Vring> {
        let Self { fabric, kicks, .. } = self;
        let Some(Some(port)) = fabric.ports.get_mut(usize::from(place.id)) else {
            return Vec::new();
        };
        let mut kicks = Kicks { kicks, watcher };
        let count = queue_count(port.pairs());
        (0..count).filter_map(|index| take_queue(port, index, &mut kicks)).collect()
    }

    /// All queues stopped, features forgotten. Addresses stay: see [`Engine::forget_learned`].
    pub fn reset_port(&mut self, place: Place, watcher: &Watcher<'_>) -> Vec<Vring> {
        if self.fabric.port_mut(place).is_none() {
            return Vec::new();
        }
        let stopped = self.stop_queues(place, watcher);
        if let Some(port) = self.fabric.port_mut(place) {
            port.set_features(0);
        }
        stopped
    }

    /// Forgets the addresses of a port that are not from the configuration.
    pub fn forget_learned(&mut self, place: Place) {
        if self.fabric.port_mut(place).is_none() {
            return;
        }
        self.forget(place.id, false);
        if let Some(port) = self.fabric.port_mut(place)
            && !port.binding.mac_configured
        {
            port.binding.mac = None;
        }
    }

    /// Takes a port out, with its queues stopped; its addresses are free.
    pub fn remove_port(
        &mut self,
        place: Place,
        watcher: &Watcher<'_>,
    ) -> Option<(Box<Port>, Vec<Vring>)> {
        self.fabric.port_mut(place)?;
        let stopped = self.stop_queues(place, watcher);
        self.forget(place.id, true);
        let mut port = self.fabric.ports.get_mut(usize::from(place.id))?.take()?;
        self.fabric.backlogs.reclaim(port.id, port.backlog.take());
        self.collect_shared();
        if let Some(fd) = port.hook.as_ref().and_then(|slot| slot.hook.event_fd()) {
            watcher.unwatch(fd);
        }
        Some((port, stopped))
    }

    /// Sets the uplink, returns the old one, and whether the new one can wake the switch.
    pub fn replace_uplink(
        &mut self,
        uplink: Option<Box<Uplink>>,
        watcher: &Watcher<'_>,
    ) -> (Option<Box<Uplink>>, std::io::Result<()>) {
        let old = std::mem::replace(&mut self.fabric.uplink, uplink);
        if let Some(fd) = old.as_ref().and_then(|u| u.queue.wire.event_fd()) {
            watcher.unwatch(fd);
        }
        self.fabric.tables.macs.forget(UPLINK, |_, _| true);
        let fd = self.fabric.uplink.as_ref().and_then(|u| u.queue.wire.event_fd());
        (old, fd.map_or(Ok(()), |fd| watcher.watch(fd)))
    }
}

/// Wake-up of a switch that arms its queues to sleep. Its methods return whether there is work to
/// do at once.
struct WakeUp {
    now_ns: u64,
    /// Time that a sender may wait for a receiver.
    hold_ns: u64,
    /// Time at which the switch wakes up by itself; `u64::MAX`: never.
    at_ns: u64,
}

impl WakeUp {
    fn at_the_latest(&mut self, at_ns: u64) {
        self.at_ns = self.at_ns.min(at_ns);
    }

    /// Arms the receive queue that a sender waits for, until the end of its hold, or until it is
    /// time to look at its window.
    fn arm_awaited(&mut self, ports: &mut [Option<Box<Port>>], held: Held) -> bool {
        let Some(rxq) = rx_mut(ports, held.on) else { return true };
        let until_ns = match held.window_since_ns {
            // Nobody tells of a window that opens.
            Some(since_ns) => rxq.look_ns().map(|at_ns| at_ns.min(since_ns + self.hold_ns)),
            None => rxq.hold_ends_ns(self.hold_ns),
        };
        match until_ns {
            Some(at_ns) if at_ns > self.now_ns => self.at_the_latest(at_ns),
            _ => return true,
        }
        held.window_since_ns.is_none() && rxq.vring.arm()
    }

    /// Arms the hook of a port, whose VM has to wait until `ceiling_ns`.
    fn arm_hook(
        &mut self,
        ports: &mut [Option<Box<Port>>],
        at: usize,
        ceiling_ns: Option<u64>,
    ) -> bool {
        let hook = ports[at].as_mut().and_then(|p| p.hook.as_mut());
        let Some((is_ready, held, unfilled)) = hook.map(|slot| slot.waiting()) else {
            return false;
        };
        let is_busy = match (ceiling_ns, held) {
            (Some(ceiling_ns), _) => {
                self.at_the_latest(ceiling_ns);
                false
            }
            (None, Some(held)) => self.arm_awaited(ports, held),
            (None, None) => is_ready,
        };
        if unfilled && !is_busy {
            self.at_the_latest(self.now_ns + REFILL_AGAIN_NS);
        }
        is_busy
    }

    /// Arms the transmit queues of a port, whose VM has to wait until `ceiling_ns`.
    fn arm_tx(
        &mut self,
        ports: &mut [Option<Box<Port>>],
        at: usize,
        ceiling_ns: Option<u64>,
    ) -> bool {
        for index in 0..ports[at].as_ref().map_or(0, |p| p.tx.len()) {
            let Some(txq) = ports[at].as_mut().and_then(|p| p.tx[index].as_mut()) else {
                continue;
            };
            self.at_the_latest(txq.vring.notify_due_ns(TX_TELL).unwrap_or(u64::MAX));
            let is_busy = match (ceiling_ns, txq.held) {
                (Some(ceiling_ns), _) => {
                    self.at_the_latest(ceiling_ns);
                    false
                }
                (None, Some(held)) => self.arm_awaited(ports, held),
                (None, None) => txq.vring.arm(),
            };
            if is_busy {
                return true;
            }
        }
        false
    }

    /// Arms the receive queues that backlogs wait for.
    fn arm_backlogs(&mut self, ports: &mut [Option<Box<Port>>], backlogs: &Backlogs) -> bool {
        for &id in backlogs.waiting() {
            let Some(port) = ports[usize::from(id)].as_deref_mut() else { return true };
            self.at_the_latest(port.backlog_ends_ns().unwrap_or(self.now_ns));
            let queue = port.backlog_queue().and_then(|q| port.rx[usize::from(q)].as_deref_mut());
            if queue.is_none_or(|rxq| rxq.vring.arm()) {
                return true;
            }
        }
        false
    }

    fn arm_uplink(&mut self, uplink: &mut Uplink) -> bool {
        let is_busy = uplink.queue.wire.receive().is_some();
        if uplink.unfilled && !is_busy {
            self.at_the_latest(self.now_ns + REFILL_AGAIN_NS);
        }
        is_busy
    }
}

/// Arms the control queue of a port. True: it has requests.
fn arm_control(ports: &mut [Option<Box<Port>>], at: usize) -> bool {
    let control = ports[at].as_mut().and_then(|p| p.control.as_mut());
    control.is_some_and(|control| control.vring.arm())
}

impl Worker for Engine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let count = self.fabric.ports.len();
        let mut work = 0;
        self.fabric.sender.round += 1;
        self.fabric.sender.now_ns = now_ns;
        self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
        for k in 0..count {
            let at = if self.turn + k < count { self.turn + k } else { self.turn + k - count };
            if let Some(mut port) = self.fabric.publish_before(at, now_ns) {
                work += self.poll_port(&mut port, now_ns, ledger);
                self.fabric.ports[at] = Some(port);
                self.fabric.publish_in_time(now_ns);
            }
        }
        // What came before goes first.
        work += ingress::drain_backlogs(&mut self.fabric, &mut self.heads, now_ns);
        work += ingress::poll(&mut self.fabric, &mut self.heads, now_ns, ledger);
        self.fabric.publish(now_ns);
        if let Some(moved) = self.fabric.tables.moves.due(now_ns) {
            self.fabric.tell_of(&moved);
        }
        work
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        let Fabric { ports, uplink, sender, backlogs, .. } = &mut self.fabric;
        let mut wake = WakeUp { now_ns, hold_ns: sender.hold_ns, at_ns: u64::MAX };
        for at in 0..ports.len() {
            let vm = ports[at].as_ref().map_or(VmId::NONE, |p| p.vm);
            let ceiling_ns = ledger.until_ns(vm, now_ns);
            let is_busy = wake.arm_hook(ports, at, ceiling_ns)
                || arm_control(ports, at)
                || wake.arm_tx(ports, at, ceiling_ns);
            if is_busy {
                return Arm::Busy;
            }
        }
        if wake.arm_backlogs(ports, backlogs) {
            return Arm::Busy;
        }
        if let Some(uplink) = uplink
            && wake.arm_uplink(uplink)
        {
            return Arm::Busy;
        }
        match wake.at_ns {
            u64::MAX => Arm::Idle,
            at_ns => Arm::Until(at_ns),
        }
    }

    fn disarm(&mut self) {
        for port in self.fabric.ports.iter_mut().flatten() {
            for txq in port.tx.iter_mut().flatten() {
                txq.vring.disarm();
            }
            for rxq in port.rx.iter_mut().flatten() {
                rxq.vring.disarm();
            }
            if let Some(control) = &mut port.control {
                control.vring.disarm();
            }
        }
    }

    fn fired(&mut self, fd: RawFd) {
        let Some(&(port, queue)) = self.kicks.get(&fd) else { return };
        let Some(Some(port)) = self.fabric.ports.get_mut(usize::from(port)) else { return };
        if let Some(vring) = port.vring(queue) {
            vring.parts.stats.kicks.add(1);
        }
    }
}
