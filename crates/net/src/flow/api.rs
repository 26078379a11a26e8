//! Pipes' hold on a port: from other threads, between two rounds of the switch.

use std::sync::Arc;

use base::counter::QueueStats;
use base::io::Wire;
use vhost_user::DeviceError;

use super::segment::{ACK, RST};
use super::state::Flow;
use super::{FlowError, FlowKey, FlowSnapshot, FlowWatch, Journal, PortFlows, Snapshot, turned};
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
        self.fabric.send_bare(id, key, &macs, RST | ACK, to_peer);
        self.fabric.send_bare(id, &key.mirror(), &turned(&macs), RST | ACK, to_guest);
        self.fabric.publish(0);
        Some(())
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
