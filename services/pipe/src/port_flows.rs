//! Pipes' requests to the connections of a port: from other threads, between two frames of the
//! switch.

use std::sync::Arc;

use base::counter::QueueStats;
use base::io::Wire;
use flow::{
    BareSegment, FlowError, FlowKey, FlowSnapshot, FlowWatch, Journal, ReceiveStart, Relief,
    Snapshot, Tracker,
};
use net::NetPort;
use vhost_user::DeviceError;

use crate::hook::PipeHook;

/// Connections of a network port, as pipes ask for them. On a port without pipes all requests fail
/// with [`FlowError::Off`].
#[derive(Clone, Copy)]
pub struct PortFlows<'a>(&'a NetPort);

impl std::fmt::Debug for PortFlows<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PortFlows").field(self.0).finish()
    }
}

impl<'a> PortFlows<'a> {
    /// Connections of this port.
    pub fn new(net: &'a NetPort) -> Self {
        Self(net)
    }

    /// Switches pipes on: see [`PipeHook::new`]. Fails on a port that has a hook.
    pub fn enable(
        self,
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Result<(), DeviceError> {
        // Its table is megabytes: not to be made on the sidecore.
        self.0.set_hook(Box::new(PipeHook::new(watch, wire, stats, journal)))
    }

    /// Asks since when the connection could go another way: [`Tracker::free_since_ns`].
    pub fn free_since_ns(self, key: FlowKey) -> Result<Option<u64>, FlowError> {
        self.ask(move |tracker, _| tracker.free_since_ns(&key))
    }

    /// Lists connections that are bound to this port: [`Tracker::bound`]. None on a port without
    /// pipes.
    pub fn bound(self) -> Vec<FlowKey> {
        self.with_tracker(|tracker, _| tracker.bound()).unwrap_or_default()
    }

    /// Ends connections that lost a twin: [`Tracker::end_broken`].
    pub fn end_broken(self) -> usize {
        self.with_tracker(|tracker, notices| tracker.end_broken(notices)).unwrap_or(0)
    }

    /// Asks for the numbers of a sending twin: [`Tracker::snapshot`].
    pub fn snapshot(
        self,
        key: FlowKey,
        sent_bytes: u64,
        token: u64,
    ) -> Result<Snapshot, FlowError> {
        self.ask(move |tracker, _| tracker.snapshot(&key, sent_bytes, token))
    }

    /// Begins a sending twin: [`Tracker::start`].
    pub fn start(
        self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError> {
        self.ask(move |tracker, _| tracker.start(&key, token, &taken, len))
    }

    /// Gives a sending twin another length: [`Tracker::retarget`].
    pub fn retarget(self, key: FlowKey, token: u64, len: u32) -> Result<bool, FlowError> {
        self.ask(move |tracker, _| tracker.retarget(&key, token, len))
    }

    /// Asks for the numbers of a twin in place of another: [`Tracker::relief`].
    pub fn relief(self, key: FlowKey, token: u64) -> Result<Relief, FlowError> {
        self.ask(move |tracker, _| tracker.relief(&key, token))
    }

    /// Ends a sending twin: [`Tracker::finish`]. A connection that is [`FlowError::Broken`] is
    /// reset.
    pub fn finish(self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        self.end(key, token, move |tracker, _| tracker.finish(&key, token, len))
    }

    /// Asks for the numbers of a receiving twin: [`Tracker::receive_snapshot`].
    pub fn receive_snapshot(
        self,
        key: FlowKey,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.ask(move |tracker, _| tracker.receive_snapshot(&key, received_bytes, token))
    }

    /// Begins a receiving twin: [`Tracker::receive_start`].
    pub fn receive_start(
        self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        let counts = (received_bytes, wanted_bytes);
        self.ask(move |tracker, notices| {
            tracker.receive_start(&key, token, &taken, counts, notices)
        })
    }

    /// Notes that the guest has read its own bytes: [`Tracker::receive_own`].
    pub fn receive_own(self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        self.ask(move |tracker, notices| tracker.receive_own(&key, token, notices))
    }

    /// Stops a receiving twin: [`Tracker::receive_stop`].
    pub fn receive_stop(
        self,
        key: FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Result<u32, FlowError> {
        self.ask(move |tracker, notices| tracker.receive_stop(&key, token, taken_bytes, notices))
    }

    /// Ends a receiving twin: [`Tracker::receive_finish`]. A connection that is
    /// [`FlowError::Broken`] is reset.
    pub fn receive_finish(self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        self.end(key, token, move |tracker, notices| {
            tracker.receive_finish(&key, token, len, notices)
        })
    }

    /// Resets a connection that lost bytes of a twin: [`Tracker::reset`].
    pub fn reset(self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        self.ask(move |tracker, notices| tracker.reset(&key, token, notices))
    }

    /// Runs `f` with the port's connections, and has the switch send the segments that it leaves.
    fn with_tracker<R: Send + 'static>(
        self,
        f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> R + Send + 'static,
    ) -> Option<R> {
        self.0.with_hook(move |hook: &mut PipeHook, outbox| hook.with_tracker(outbox, f))
    }

    /// Runs `f` with the port's connections; an error where it has no pipes.
    fn ask<R, F>(self, f: F) -> Result<R, FlowError>
    where
        R: Send + 'static,
        F: FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> Result<R, FlowError> + Send + 'static,
    {
        self.with_tracker(f).unwrap_or(Err(FlowError::Off))
    }

    /// Asks the tracker to end a twin; a connection that has lost bytes is reset.
    fn end<F>(self, key: FlowKey, token: u64, f: F) -> Result<(), FlowError>
    where
        F: FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> Result<(), FlowError> + Send + 'static,
    {
        let answer = self.ask(f);
        if answer == Err(FlowError::Broken) {
            // A connection that is gone by now needs no reset.
            let _ = self.reset(key, token);
        }
        answer
    }
}
