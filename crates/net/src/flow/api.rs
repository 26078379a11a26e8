//! Pipes' hold on a port: from other threads, between two rounds of the switch.

use std::sync::Arc;

use base::clock::{Clock, MonotonicClock};
use base::counter::QueueStats;
use base::io::Wire;
use vhost_user::DeviceError;

use super::segment::{ACK, Answer, RST};
use super::state::Flow;
use super::{
    FlowError, FlowKey, FlowSnapshot, FlowWatch, Journal, PortFlows, ReceiveStart, Relief,
    Snapshot, turned,
};
use crate::device::NetPort;
use crate::engine::Engine;
use crate::fdb::PortId;

impl NetPort {
    /// Switches pipes on: connections that begin from now on are tracked, and those in the journal are
    /// shifted as they were. `wire` is the TAP of the VM's twins. Fails on a port with stages, and on
    /// one that has pipes.
    pub fn enable_pipes(
        &self,
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Result<(), DeviceError> {
        // Its table is megabytes: not to be made on the sidecore.
        let flows = Box::new(PortFlows::new(watch, wire, stats, journal));
        let (refused, answer) = self.with(move |port, kicks, _| {
            if port.flows.is_some() {
                return (Some(flows), Err("it has pipes already"));
            }
            if !port.stages.is_empty() {
                return (Some(flows), Err("it has stages"));
            }
            if let Some(fd) = flows.event_fd()
                && kicks.watcher.watch(fd).is_err()
            {
                return (Some(flows), Err("its TAP cannot be watched"));
            }
            port.flows = Some(flows);
            (None, Ok(()))
        })?;
        drop(refused);
        answer
            .map_err(|why| DeviceError::Failed(format!("no pipes on port {}: {why}", self.name())))
    }

    fn with_flows<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut PortFlows) -> Result<R, FlowError> + Send + 'static,
    ) -> Result<R, FlowError> {
        let answer = self.with(|port, _, _| f(port.flows.as_deref_mut().ok_or(FlowError::Off)?));
        answer.unwrap_or(Err(FlowError::Off))
    }

    fn with_flow<R: Send + 'static>(
        &self,
        key: FlowKey,
        f: impl FnOnce(&mut Flow) -> Result<R, FlowError> + Send + 'static,
    ) -> Result<R, FlowError> {
        self.with_flows(move |flows| f(flows.table.get(&key).ok_or(FlowError::Unknown)?))
    }

    /// As [`NetPort::with_flow`]; what comes of it is noted before the next segment.
    fn change_flow(
        &self,
        key: FlowKey,
        f: impl FnOnce(&mut Flow) -> Result<(), FlowError> + Send + 'static,
    ) -> Result<(), FlowError> {
        self.with_flows(move |flows| {
            let answer = f(flows.table.get(&key).ok_or(FlowError::Unknown)?);
            flows.table.save(&key);
            answer
        })
    }

    /// Since when segments of the connection could have gone another way than by this port: since it
    /// began, as [`MonotonicClock`] counts. None: it is shifted, so that they could not.
    pub fn flow_free_since_ns(&self, key: FlowKey) -> Result<Option<u64>, FlowError> {
        self.with_flow(key, |flow| Ok((!flow.is_shifted()).then_some(flow.begun_ns)))
    }

    /// Connections whose segments have to pass this port from now on: a pipe has them or is about to,
    /// or they are shifted. None on a port without pipes.
    pub fn flows_bound(&self) -> Vec<FlowKey> {
        let bound = self.with_flows(|flows| Ok(flows.table.bound(MonotonicClock.now_ns())));
        bound.unwrap_or_default()
    }

    /// Connections that lost a twin with the last daemon are to end: the guest is asked to speak, and
    /// what it says is answered with a reset; then its peer is. Returns how many there are.
    pub fn flow_end_broken(&self) -> usize {
        let place = self.place;
        let answer = self.worker.call(move |engine, _| {
            engine.port_mut(place)?;
            engine.prompt_broken(place.id)
        });
        answer.ok().flatten().unwrap_or(0)
    }

    /// Asks for what a twin must know, and reserves the connection for the pipe of that token until
    /// [`NetPort::flow_start`] or [`NetPort::flow_finish`]. `sent_bytes` is what the guest says that it
    /// has sent over the connection, each byte once.
    pub fn flow_snapshot(
        &self,
        key: FlowKey,
        sent_bytes: u64,
        token: u64,
    ) -> Result<Snapshot, FlowError> {
        self.with_flow(key, move |flow| flow.snapshot(sent_bytes, token))
    }

    /// The twin exists: from now on it sends, `len` bytes.
    pub fn flow_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError> {
        self.change_flow(key, move |flow| flow.start(token, &taken, len))
    }

    /// The twin was given only `len` bytes. True: all of them are acknowledged already, no event comes.
    pub fn flow_retarget(&self, key: FlowKey, token: u64, len: u32) -> Result<bool, FlowError> {
        self.with_flow(key, move |flow| Ok(flow.retarget(token, len)))
    }

    /// Asks for what another twin must know that takes the place of the one that sends. Nothing changes
    /// here: both send the same bytes.
    pub fn flow_relief(&self, key: FlowKey, token: u64) -> Result<Relief, FlowError> {
        self.with_flow(key, move |flow| flow.relief(token))
    }

    /// The peer has all `len` bytes of the twin, or none were sent: the guest goes on behind them. If
    /// that is not so ([`FlowError::Broken`]), the connection is reset.
    pub fn flow_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        let answer = self.change_flow(key, move |flow| flow.finish(token, len));
        if answer == Err(FlowError::Broken) {
            // Gone meanwhile: as well.
            let _ = self.flow_reset(key, token);
        }
        answer
    }

    /// Asks for what a receiving twin must know, and reserves the connection for the pipe of that token
    /// until [`NetPort::flow_receive_start`] or [`NetPort::flow_receive_finish`]. `received_bytes` is
    /// what the guest says that it has received over the connection, each byte once. Refuses a
    /// connection whose peer has closed its direction ([`FlowError::Closing`]), and a count that cannot
    /// be ([`FlowError::Changed`]).
    pub fn flow_receive_snapshot(
        &self,
        key: FlowKey,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.with_flow(key, move |flow| flow.receive_snapshot(received_bytes, token))
    }

    /// The twin exists, with the numbers of `taken`. The pipe wants `wanted_bytes` of the peer's stream
    /// behind the first `received_bytes`: of these, what has passed to the guest by now stays the
    /// guest's, and the twin receives the rest, 1 GiB at most. If nothing is left for it, nothing
    /// begins, and the connection is free again.
    pub fn flow_receive_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        let place = self.place;
        self.with_engine(move |engine| {
            engine.port_mut(place)?;
            engine.start_receiving(place.id, &key, token, &taken, received_bytes, wanted_bytes)
        })
    }

    /// The guest has read all of its own bytes, in front of the twin's: the peer hears of the twin's from
    /// now on.
    pub fn flow_receive_own(&self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        let place = self.place;
        self.with_engine(move |engine| {
            engine.port_mut(place)?;
            engine.settle_receiving(place.id, &key, |flow| flow.receive_own(token))
        })
    }

    /// The twin gets no more: of its bytes those stay that were taken from it, which are at least
    /// `taken_bytes`, and those that the peer was told to have arrived. Returns how many that are: all
    /// of them are in the twin, and more may be, which come to the guest. Asked again, it says the same.
    pub fn flow_receive_stop(
        &self,
        key: FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Result<u32, FlowError> {
        let place = self.place;
        self.with_engine(move |engine| {
            engine.port_mut(place)?;
            engine.stop_receiving(place.id, &key, token, taken_bytes)
        })
    }

    /// The twin has gone, and `len` bytes were taken from it: the guest goes on behind them. That may be
    /// less than it was to receive only as [`NetPort::flow_receive_stop`] said: of what has arrived
    /// beyond, nobody can tell whether the peer or the guest counts on it already
    /// ([`FlowError::Broken`]), and the connection is reset.
    pub fn flow_receive_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        let place = self.place;
        let answer = self.with_engine(move |engine| {
            engine.port_mut(place)?;
            engine.finish_receiving(place.id, &key, token, len)
        });
        if answer == Err(FlowError::Broken) {
            // Gone meanwhile: as well.
            let _ = self.flow_reset(key, token);
        }
        answer
    }

    fn with_engine<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Engine) -> Option<Result<R, FlowError>> + Send + 'static,
    ) -> Result<R, FlowError> {
        self.worker.call(move |engine, _| f(engine)).ok().flatten().unwrap_or(Err(FlowError::Off))
    }

    /// Ends the connection with a reset to both sides: bytes of it are lost.
    pub fn flow_reset(&self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        let place = self.place;
        let answer = self.worker.call(move |engine, _| {
            engine.port_mut(place)?;
            engine.reset_flow(place.id, &key, token)
        });
        answer.ok().flatten().ok_or(FlowError::Unknown)
    }
}

impl Engine {
    pub(crate) fn reset_flow(&mut self, id: PortId, key: &FlowKey, token: u64) -> Option<()> {
        let port = self.fabric.ports.get_mut(usize::from(id))?.as_deref_mut()?;
        let flow = port.flows.as_deref_mut()?.table.get(key)?;
        let (to_peer, to_guest) = flow.give_up(token)?;
        let macs = flow.macs;
        port.flows.as_deref_mut()?.table.save(key);
        let reset = |numbers| Answer::plain(RST | ACK, numbers);
        self.fabric.send_bare(id, key, &macs, &reset(to_peer));
        self.fabric.send_bare(id, &key.mirror(), &turned(&macs), &reset(to_guest));
        self.fabric.publish(0);
        Some(())
    }

    /// Lets a twin receive. The guest may have bytes that it has not acknowledged, and waits with that
    /// for company, which will not come: it is asked to speak.
    pub(crate) fn start_receiving(
        &mut self,
        id: PortId,
        key: &FlowKey,
        token: u64,
        taken: &FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Option<Result<ReceiveStart, FlowError>> {
        let port = self.fabric.ports.get_mut(usize::from(id))?.as_deref_mut()?;
        let table = &mut port.flows.as_deref_mut()?.table;
        let Some(flow) = table.get(key) else { return Some(Err(FlowError::Unknown)) };
        let answer = flow.receive_start(token, taken, received_bytes, wanted_bytes);
        let prompt = (flow.split().is_some() && !flow.twin_speaks()).then(|| flow.prompt());
        let macs = flow.macs;
        table.save(key);
        if let Some(numbers) = prompt {
            self.fabric.prompt_guest(id, key, &macs, numbers);
            self.fabric.publish(0);
        }
        Some(answer)
    }

    /// See [`NetPort::flow_receive_stop`].
    pub(crate) fn stop_receiving(
        &mut self,
        id: PortId,
        key: &FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Option<Result<u32, FlowError>> {
        self.settle_receiving(id, key, |flow| flow.receive_stop(token, taken_bytes))
    }

    /// See [`NetPort::flow_receive_finish`].
    pub(crate) fn finish_receiving(
        &mut self,
        id: PortId,
        key: &FlowKey,
        token: u64,
        len: u32,
    ) -> Option<Result<(), FlowError>> {
        self.settle_receiving(id, key, |flow| flow.receive_finish(token, len))
    }

    /// The end of a twin that receives: peer and guest are told what they would else hear only when
    /// they ask, the one the guest's window, the other that its stream has ended.
    fn settle_receiving<R>(
        &mut self,
        id: PortId,
        key: &FlowKey,
        settle: impl FnOnce(&mut Flow) -> Result<R, FlowError>,
    ) -> Option<Result<R, FlowError>> {
        let port = self.fabric.ports.get_mut(usize::from(id))?.as_deref_mut()?;
        let table = &mut port.flows.as_deref_mut()?.table;
        let Some(flow) = table.get(key) else { return Some(Err(FlowError::Unknown)) };
        let fin = flow.receiving.and_then(|receiving| receiving.fin);
        let was_there = flow.receiving.is_some();
        let answer = settle(flow);
        let (macs, to_peer) = (flow.macs, flow.to_peer());
        let to_guest = if was_there { flow.fin_to_guest(fin) } else { None };
        let is_over = flow.reset;
        table.save(key);
        if was_there && answer.is_ok() && !is_over {
            self.fabric.send_bare(id, key, &macs, &to_peer);
            if let Some(says) = to_guest {
                self.fabric.send_bare(id, &key.mirror(), &turned(&macs), &says);
            }
            self.fabric.publish(0);
        }
        Some(answer)
    }

    fn prompt_broken(&mut self, id: PortId) -> Option<usize> {
        let port = self.fabric.ports.get_mut(usize::from(id))?.as_deref_mut()?;
        let flows = port.flows.as_deref_mut()?;
        let broken: Vec<_> =
            flows.table.broken().map(|(key, flow)| (*key, flow.macs, flow.prompt())).collect();
        // The guest alone: the peer is asked once the guest has spoken ([`Flow::edit_prompt`]). It
        // answers such a segment only twice a second, and the guest must be past its reset by then.
        for (key, macs, to_guest) in &broken {
            self.fabric.prompt_guest(id, key, macs, *to_guest);
        }
        self.fabric.publish(0);
        Some(broken.len())
    }
}
