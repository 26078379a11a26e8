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

use crate::hook::{PipeHook, push};

/// Requests of pipes to a network port. On a port without pipes all of them fail with
/// [`FlowError::Off`].
pub trait NetFlows {
    /// Switches pipes on: see [`PipeHook::new`]. Fails on a port that has a hook.
    fn enable_pipes(
        &self,
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Result<(), DeviceError>;

    /// Asks since when the connection could go another way: [`Tracker::free_since_ns`].
    fn flow_free_since_ns(&self, key: FlowKey) -> Result<Option<u64>, FlowError>;

    /// Lists connections that are bound to this port: [`Tracker::bound`]. None on a port without
    /// pipes.
    fn flows_bound(&self) -> Vec<FlowKey>;

    /// Ends connections that lost a twin: [`Tracker::end_broken`].
    fn flow_end_broken(&self) -> usize;

    /// Asks for the numbers of a sending twin: [`Tracker::snapshot`].
    fn flow_snapshot(
        &self,
        key: FlowKey,
        sent_bytes: u64,
        token: u64,
    ) -> Result<Snapshot, FlowError>;

    /// Begins a sending twin: [`Tracker::start`].
    fn flow_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError>;

    /// Gives a sending twin another length: [`Tracker::retarget`].
    fn flow_retarget(&self, key: FlowKey, token: u64, len: u32) -> Result<bool, FlowError>;

    /// Asks for the numbers of a twin in place of another: [`Tracker::relief`].
    fn flow_relief(&self, key: FlowKey, token: u64) -> Result<Relief, FlowError>;

    /// Ends a sending twin: [`Tracker::finish`]. A connection that is [`FlowError::Broken`] is
    /// reset.
    fn flow_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError>;

    /// Asks for the numbers of a receiving twin: [`Tracker::receive_snapshot`].
    fn flow_receive_snapshot(
        &self,
        key: FlowKey,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError>;

    /// Begins a receiving twin: [`Tracker::receive_start`].
    fn flow_receive_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError>;

    /// Notes that the guest has read its own bytes: [`Tracker::receive_own`].
    fn flow_receive_own(&self, key: FlowKey, token: u64) -> Result<(), FlowError>;

    /// Stops a receiving twin: [`Tracker::receive_stop`].
    fn flow_receive_stop(
        &self,
        key: FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Result<u32, FlowError>;

    /// Ends a receiving twin: [`Tracker::receive_finish`]. A connection that is
    /// [`FlowError::Broken`] is reset.
    fn flow_receive_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError>;

    /// Resets a connection that lost bytes of a twin: [`Tracker::reset`].
    fn flow_reset(&self, key: FlowKey, token: u64) -> Result<(), FlowError>;
}

/// Runs `f` with the port's connections, and has the switch send the segments that it leaves.
fn with_tracker<R: Send + 'static>(
    net: &NetPort,
    f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> R + Send + 'static,
) -> Option<R> {
    net.with_hook(move |hook: &mut PipeHook, outbox| {
        let mut notices = Vec::new();
        let answer = f(&mut hook.tracker, &mut notices);
        notices.iter().for_each(|notice| push(outbox, notice));
        answer
    })
}

/// Runs `f` with the port's connections; an error where it has no pipes.
fn ask<R: Send + 'static>(
    net: &NetPort,
    f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> Result<R, FlowError> + Send + 'static,
) -> Result<R, FlowError> {
    with_tracker(net, f).unwrap_or(Err(FlowError::Off))
}

/// Asks the tracker to end a twin; a connection that has lost bytes is reset.
fn finish(
    net: &NetPort,
    key: FlowKey,
    token: u64,
    f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> Result<(), FlowError> + Send + 'static,
) -> Result<(), FlowError> {
    let answer = ask(net, f);
    if answer == Err(FlowError::Broken) {
        // A connection that is gone by now needs no reset.
        let _ = net.flow_reset(key, token);
    }
    answer
}

impl NetFlows for NetPort {
    fn enable_pipes(
        &self,
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Result<(), DeviceError> {
        // Its table is megabytes: not to be made on the sidecore.
        self.set_hook(Box::new(PipeHook::new(watch, wire, stats, journal)))
    }

    fn flow_free_since_ns(&self, key: FlowKey) -> Result<Option<u64>, FlowError> {
        ask(self, move |tracker, _| tracker.free_since_ns(&key))
    }

    fn flows_bound(&self) -> Vec<FlowKey> {
        with_tracker(self, |tracker, _| tracker.bound()).unwrap_or_default()
    }

    fn flow_end_broken(&self) -> usize {
        with_tracker(self, |tracker, notices| tracker.end_broken(notices)).unwrap_or(0)
    }

    fn flow_snapshot(
        &self,
        key: FlowKey,
        sent_bytes: u64,
        token: u64,
    ) -> Result<Snapshot, FlowError> {
        ask(self, move |tracker, _| tracker.snapshot(&key, sent_bytes, token))
    }

    fn flow_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError> {
        ask(self, move |tracker, _| tracker.start(&key, token, &taken, len))
    }

    fn flow_retarget(&self, key: FlowKey, token: u64, len: u32) -> Result<bool, FlowError> {
        ask(self, move |tracker, _| tracker.retarget(&key, token, len))
    }

    fn flow_relief(&self, key: FlowKey, token: u64) -> Result<Relief, FlowError> {
        ask(self, move |tracker, _| tracker.relief(&key, token))
    }

    fn flow_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        finish(self, key, token, move |tracker, _| tracker.finish(&key, token, len))
    }

    fn flow_receive_snapshot(
        &self,
        key: FlowKey,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        ask(self, move |tracker, _| tracker.receive_snapshot(&key, received_bytes, token))
    }

    fn flow_receive_start(
        &self,
        key: FlowKey,
        token: u64,
        taken: FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        let counts = (received_bytes, wanted_bytes);
        ask(self, move |tracker, notices| {
            tracker.receive_start(&key, token, &taken, counts, notices)
        })
    }

    fn flow_receive_own(&self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        ask(self, move |tracker, notices| tracker.receive_own(&key, token, notices))
    }

    fn flow_receive_stop(
        &self,
        key: FlowKey,
        token: u64,
        taken_bytes: u32,
    ) -> Result<u32, FlowError> {
        ask(self, move |tracker, notices| tracker.receive_stop(&key, token, taken_bytes, notices))
    }

    fn flow_receive_finish(&self, key: FlowKey, token: u64, len: u32) -> Result<(), FlowError> {
        finish(self, key, token, move |tracker, notices| {
            tracker.receive_finish(&key, token, len, notices)
        })
    }

    fn flow_reset(&self, key: FlowKey, token: u64) -> Result<(), FlowError> {
        ask(self, move |tracker, notices| tracker.reset(&key, token, notices))
    }
}
