//! Connections with twins and shifts, through the whole switch.
#![allow(clippy::unwrap_used)]

mod abuse;
mod icmp;
mod receive;
mod steer;

use std::sync::{Arc, Mutex};

use base::alloc_count::Counting;
use base::counter::QueueStats;
use flow::testing::{Build, Read, key, mirror, read, timestamps};
use flow::{
    BareSegment, FlowError, FlowEvent, FlowKey, FlowSnapshot, FlowWatch, ReceiveStart, Snapshot,
    Tracker,
};
use net::testing::{Lab, Model, Spec, frame, mac, model_wire, no_offload};

use super::PipeHook;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A frame as a wire has it: no offload in front.
pub fn wired(bytes: &[u8]) -> Vec<u8> {
    [&no_offload()[..], bytes].concat()
}

/// Events that pipes were told.
#[derive(Default)]
pub struct Told(Mutex<Vec<(u64, FlowEvent)>>);

impl Told {
    pub fn take(&self) -> Vec<(u64, FlowEvent)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl FlowWatch for Told {
    fn flow_event(&self, token: u64, event: FlowEvent) {
        self.0.lock().unwrap().push((token, event));
    }
}

/// Pipes on ports of a switch that is driven by hand.
pub trait PipeLab {
    /// Gives a guest pipes: the TAP of its twins, and what pipes are told.
    fn set_pipes(&mut self, guest: usize) -> (Arc<Mutex<Model>>, Arc<Told>);

    /// The connections of a guest.
    fn flows(&mut self, guest: usize) -> Flows<'_>;
}

impl PipeLab for Lab {
    fn set_pipes(&mut self, guest: usize) -> (Arc<Mutex<Model>>, Arc<Told>) {
        let (wire, model) = model_wire();
        let told = Arc::new(Told::default());
        let stats = Arc::new(QueueStats::default());
        self.set_hook(guest, Box::new(PipeHook::new(told.clone(), wire, stats, None)));
        (model, told)
    }

    fn flows(&mut self, guest: usize) -> Flows<'_> {
        Flows { lab: self, guest }
    }
}

/// Requests of pipes from other threads ([`crate::PortFlows`]); their token is 1 unless it is said.
pub struct Flows<'a> {
    lab: &'a mut Lab,
    guest: usize,
}

impl Flows<'_> {
    fn ask<R>(&mut self, f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> R) -> R {
        self.lab.with_hook(self.guest, |hook: &mut PipeHook, outbox| hook.with_tracker(outbox, f))
    }

    pub fn stats(&mut self) -> Arc<QueueStats> {
        self.lab.with_hook(self.guest, |hook: &mut PipeHook, _| Arc::clone(hook.twins.stats()))
    }

    pub fn snapshot(&mut self, key: &FlowKey, sent_bytes: u64) -> Result<Snapshot, FlowError> {
        self.ask(|tracker, _| tracker.snapshot(key, sent_bytes, 1))
    }

    pub fn start(&mut self, key: &FlowKey, sent_bytes: u64, len: u32) -> FlowSnapshot {
        let Ok(Snapshot::Ready(taken)) = self.snapshot(key, sent_bytes) else {
            panic!("not ready")
        };
        self.ask(|tracker, _| tracker.start(key, 1, &taken, len)).unwrap();
        taken
    }

    pub fn finish(&mut self, key: &FlowKey, len: u32) -> Result<(), FlowError> {
        self.ask(|tracker, _| tracker.finish(key, 1, len))
    }

    pub fn receive_snapshot(
        &mut self,
        key: &FlowKey,
        received_bytes: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.ask(|tracker, _| tracker.receive_snapshot(key, received_bytes, 1))
    }

    pub fn start_receiving(
        &mut self,
        key: &FlowKey,
        token: u64,
        taken: &FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        let counts = (received_bytes, wanted_bytes);
        self.ask(|tracker, notices| tracker.receive_start(key, token, taken, counts, notices))
    }

    pub fn stop_receiving(
        &mut self,
        key: &FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Result<u32, FlowError> {
        self.ask(|tracker, notices| tracker.receive_stop(key, token, taken_bytes, notices))
    }

    pub fn finish_receiving(
        &mut self,
        key: &FlowKey,
        token: u64,
        len: u32,
    ) -> Result<(), FlowError> {
        self.ask(|tracker, notices| tracker.receive_finish(key, token, len, notices))
    }

    pub fn reset(&mut self, key: &FlowKey, token: u64) -> Result<(), FlowError> {
        self.ask(|tracker, notices| tracker.reset(key, token, notices))
    }

    /// Notes that the peer has been heard, as if it had answered.
    pub fn hear(&mut self, key: &FlowKey) {
        self.ask(|tracker, _| tracker.pretend_heard(key));
    }

    pub fn is_shifted(&mut self, key: &FlowKey) -> Option<bool> {
        self.ask(|tracker, _| tracker.is_shifted(key))
    }
}

pub const OUTSIDE: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
/// First numbers of guest and peer; their first bytes have the next ones.
pub const ISS: u32 = 0xffff_ff00;
pub const IRS: u32 = 0x9000_0000;

/// A number of the guest's on the wire, counted from its first byte.
pub fn ours(n: u32) -> u32 {
    ISS.wrapping_add(1).wrapping_add(n)
}

pub fn theirs(n: u32) -> u32 {
    IRS.wrapping_add(1).wrapping_add(n)
}

/// Guest 0 has pipes and serves a peer, which is behind the uplink or guest 1.
pub struct Rig {
    pub lab: Lab,
    pub uplink: Arc<Mutex<Model>>,
    pub tap: Arc<Mutex<Model>>,
    pub told: Arc<Told>,
    pub key: FlowKey,
    pub peer: [u8; 6],
}

impl Rig {
    pub fn new(v6: bool, peer: [u8; 6], specs: Vec<Spec>) -> Self {
        let mut lab = Lab::new(specs);
        lab.introduce();
        let uplink = lab.set_wire();
        let (tap, told) = lab.set_pipes(0);
        uplink.lock().unwrap().incoming.push_back(wired(&frame([0xff; 6], OUTSIDE, 60)));
        lab.poll();
        let mut rig = Self { lab, uplink, tap, told, key: key(v6), peer };
        rig.lab.guests[0].post(0, 60, 1600, 1);
        rig.lab.guests[1].post(0, 60, 1600, 1);
        rig.guest(SYN | ACK, ISS, theirs(0), 0);
        rig.peer(ACK, theirs(0), ours(0), 0);
        rig.arrived();
        rig
    }

    pub fn outside() -> Self {
        Self::new(false, OUTSIDE, vec![Spec::default(), Spec::default()])
    }

    /// With a twin behind 100 acknowledged bytes.
    pub fn piped(mut self, len: u32) -> Self {
        self.guest(ACK | PSH, ours(0), theirs(0), 100);
        self.peer(ACK, theirs(0), ours(100), 0);
        let taken = self.lab.flows(0).start(&key(self.key.local.is_ipv6()), 100, len);
        assert_eq!((taken.send_seq, taken.receive_seq), (ours(100), theirs(0)));
        self.arrived();
        self
    }

    /// With the twin gone again.
    pub fn shifted(self, len: u32) -> Self {
        let mut rig = self.piped(len);
        rig.twin(ACK, ours(100), len as usize);
        rig.peer(ACK, theirs(0), ours(100 + len), 0);
        assert_eq!(rig.told.take(), [(1, FlowEvent::Acknowledged)]);
        assert_eq!(rig.lab.flows(0).finish(&rig.key.clone(), len), Ok(()));
        rig.arrived();
        rig
    }

    pub fn of_guest(&self, flags: u8, seq: u32, ack: u32, len: usize) -> Build {
        let payload = (0..len).map(|at| at as u8).collect();
        let new = Build::new(self.key, flags, seq, ack);
        Build { macs: [self.peer, mac(0)], payload, options: timestamps(50, 60), ..new }
    }

    pub fn of_peer(&self, flags: u8, seq: u32, ack: u32, len: usize) -> Build {
        let payload = (0..len).map(|at| !at as u8).collect();
        let new = Build::new(mirror(&self.key), flags, seq, ack);
        Build { macs: [mac(0), self.peer], payload, options: timestamps(60, 50), ..new }
    }

    /// A segment of the guest's, its numbers its own.
    pub fn guest(&mut self, flags: u8, seq: u32, ack: u32, len: usize) {
        let frame = self.of_guest(flags, seq, ack, len).frame();
        self.guest_frame(0, &no_offload(), &frame);
    }

    pub fn guest_frame(&mut self, guest: usize, vnet: &[u8], bytes: &[u8]) {
        self.lab.guests[guest].send(0, vnet, bytes, 1);
        self.lab.poll();
        while self.lab.guests[guest].tx[0].used().is_some() {}
    }

    /// A segment of the peer's, its numbers the wire's.
    pub fn peer(&mut self, flags: u8, seq: u32, ack: u32, len: usize) {
        let frame = self.of_peer(flags, seq, ack, len).frame();
        self.peer_frame(&no_offload(), &frame);
    }

    pub fn peer_frame(&mut self, vnet: &[u8], bytes: &[u8]) {
        if self.peer != OUTSIDE {
            return self.guest_frame(1, vnet, bytes);
        }
        self.uplink.lock().unwrap().incoming.push_back([vnet, bytes].concat());
        self.lab.poll();
    }

    pub fn of_twin(&self, flags: u8, seq: u32, len: usize) -> Build {
        Build { macs: [[1; 6], [3; 6]], ..self.of_guest(flags, seq, theirs(0), len) }
    }

    pub fn twin(&mut self, flags: u8, seq: u32, len: usize) {
        let frame = self.of_twin(flags, seq, len).frame();
        self.twin_frame(&no_offload(), &frame);
    }

    pub fn twin_frame(&mut self, vnet: &[u8], bytes: &[u8]) {
        self.tap.lock().unwrap().incoming.push_back([vnet, bytes].concat());
        self.lab.poll();
    }

    /// Frames that came since the last time: to the guest, to the peer, to the twin.
    pub fn arrived(&mut self) -> [Vec<Vec<u8>>; 3] {
        let sent = |model: &Arc<Mutex<Model>>| {
            let sent = std::mem::take(&mut model.lock().unwrap().sent);
            sent.into_iter().map(|whole| whole[12..].to_vec()).collect()
        };
        let to_peer = match self.peer {
            OUTSIDE => sent(&self.uplink),
            _ => self.lab.guests[1].recv_all(0),
        };
        let to_guest = self.lab.guests[0].recv_all(0);
        self.lab.guests[0].post_up_to(0, 60, 1600, 1);
        self.lab.guests[1].post_up_to(0, 60, 1600, 1);
        [to_guest, to_peer, sent(&self.tap)]
    }

    /// The only frame that came, which was to be one for `who` of [`Rig::arrived`].
    pub fn only(&mut self, who: usize) -> Read {
        let mut all = self.arrived();
        let frames = std::mem::take(&mut all[who]);
        assert!(all.iter().all(Vec::is_empty) && frames.len() == 1, "{frames:?} {all:?}");
        read(&frames[0])
    }
}

pub const NOTHING: [Vec<Vec<u8>>; 3] = [const { Vec::new() }; 3];
pub const GUEST: usize = 0;
pub const PEER: usize = 1;
pub const TWIN: usize = 2;
