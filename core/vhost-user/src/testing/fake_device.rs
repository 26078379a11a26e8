//! Device of the tests, which writes down what it is asked.

use std::sync::{Arc, Condvar, Mutex};

use queue::{Batch, Completion, GuestMemory, Vring};

use crate::codec::feature;
use crate::{ConfigNotifier, Device, DeviceError, DeviceKind};

use super::{LIMIT, VERSION_1};

/// A call of the session to the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Activate(u64),
    Start(u16),
    Stop(u16),
    Memory(usize),
    Notifier(bool),
    Mtu(u16),
    Announce([u8; 6]),
    WriteConfig(u32, Vec<u8>),
    KeepWritingThrough,
    Reset,
    Connected(bool),
}

#[derive(Default)]
struct Inner {
    calls: Vec<Call>,
    vrings: Vec<Vring>,
    notifier: Option<Arc<dyn ConfigNotifier>>,
    write_through: bool,
}

pub struct FakeDevice {
    kind: DeviceKind,
    queues: u16,
    inner: Mutex<Inner>,
    changed: Condvar,
}

pub const CONFIG_LEN: u32 = 60;
/// Features that a whole network device offers besides.
pub const WHOLE_DEVICE: u64 = 1 << 19;
pub const MTU_LIMIT: u16 = 9000;

/// The device panics when it is asked to announce this address.
pub const PANICS: [u8; 6] = [0xdd; 6];

impl FakeDevice {
    pub fn new(kind: DeviceKind, queues: u16) -> Arc<Self> {
        Arc::new(Self { kind, queues, inner: Mutex::default(), changed: Condvar::new() })
    }

    fn note(&self, call: Call) {
        self.inner.lock().unwrap().calls.push(call);
        self.changed.notify_all();
    }

    pub fn calls(&self) -> Vec<Call> {
        self.inner.lock().unwrap().calls.clone()
    }

    pub fn forget_calls(&self) {
        self.inner.lock().unwrap().calls.clear();
    }

    /// Waits until `call` was made.
    pub fn wait_for(&self, call: &Call) {
        let inner = self.inner.lock().unwrap();
        let seen = |inner: &mut Inner| !inner.calls.contains(call);
        let (inner, timeout) = self.changed.wait_timeout_while(inner, LIMIT, seen).unwrap();
        assert!(!timeout.timed_out(), "no {call:?} in {:?}", inner.calls);
    }

    pub fn running(&self) -> Vec<u16> {
        let mut all: Vec<u16> =
            self.inner.lock().unwrap().vrings.iter().map(|v| v.parts.index).collect();
        all.sort_unstable();
        all
    }

    pub fn with_vring<R>(&self, index: u16, f: impl FnOnce(&mut Vring) -> R) -> R {
        let mut inner = self.inner.lock().unwrap();
        let vring = inner.vrings.iter_mut().find(|v| v.parts.index == index).expect("not running");
        f(vring)
    }

    /// Does what [`FakeDevice::with_vring`] does, unless the queue does not run.
    pub fn try_with_vring(&self, index: u16, f: impl FnOnce(&mut Vring)) {
        let mut inner = self.inner.lock().unwrap();
        if let Some(vring) = inner.vrings.iter_mut().find(|v| v.parts.index == index) {
            f(vring);
        }
    }

    /// Takes up to `max` chains of a queue and completes them, as if it had filled them wholly.
    pub fn serve(&self, index: u16, max: usize) -> usize {
        self.with_vring(index, |vring| {
            let mut batch = Batch::new(64, 256);
            vring.pop(&mut batch, max.min(64));
            let done: Vec<Completion> = (0..batch.len())
                .map(|i| batch.get(i))
                .map(|c| Completion { id: c.id, ndesc: c.ndesc, written: c.writable_len })
                .collect();
            vring.push(&done);
            vring.notify();
            done.len()
        })
    }

    /// Takes up to `max` chains and leaves them unfinished; their ids.
    pub fn take(&self, index: u16, max: usize) -> Vec<u16> {
        self.with_vring(index, |vring| {
            let mut batch = Batch::new(64, 256);
            vring.pop(&mut batch, max);
            (0..batch.len()).map(|i| batch.get(i).id).collect()
        })
    }

    /// Loses everything, as a killed process does.
    pub fn vanish(&self) {
        self.inner.lock().unwrap().vrings.clear();
    }

    pub fn notifier(&self) -> Option<Arc<dyn ConfigNotifier>> {
        self.inner.lock().unwrap().notifier.clone()
    }
}

impl Device for FakeDevice {
    fn kind(&self) -> DeviceKind {
        self.kind
    }

    fn features(&self) -> u64 {
        let in_order = if self.wants_inflight() { 0 } else { feature::IN_ORDER };
        VERSION_1 | feature::INDIRECT_DESC | feature::EVENT_IDX | feature::RING_PACKED | in_order
    }

    fn queue_count(&self) -> u16 {
        self.queues
    }

    fn wants_inflight(&self) -> bool {
        self.kind == DeviceKind::Block
    }

    fn whole_device_features(&self) -> u64 {
        if self.kind == DeviceKind::Net { WHOLE_DEVICE } else { 0 }
    }

    fn has_config(&self) -> bool {
        true
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        if mtu > MTU_LIMIT {
            let (value, limit) = (u64::from(mtu), u64::from(MTU_LIMIT));
            return Err(DeviceError::OutOfRange { what: "MTU", value, limit });
        }
        self.note(Call::Mtu(mtu));
        Ok(())
    }

    fn announce(&self, mac: [u8; 6]) {
        assert_ne!(mac, PANICS, "a fault for tests");
        self.note(Call::Announce(mac));
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        let end = offset + out.len() as u32;
        if end > CONFIG_LEN {
            let (value, limit) = (u64::from(end), u64::from(CONFIG_LEN));
            return Err(DeviceError::OutOfRange { what: "config space", value, limit });
        }
        for (at, byte) in (offset..).zip(out) {
            *byte = at as u8;
        }
        Ok(())
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        if offset != 32 {
            return Err(DeviceError::Unsupported("writing there"));
        }
        self.inner.lock().unwrap().write_through = data == [0];
        self.note(Call::WriteConfig(offset, data.to_vec()));
        Ok(())
    }

    fn writes_through(&self) -> bool {
        self.inner.lock().unwrap().write_through
    }

    fn keep_writing_through(&self) {
        self.inner.lock().unwrap().write_through = true;
        self.note(Call::KeepWritingThrough);
    }

    fn activate(&self, features: u64) -> Result<(), DeviceError> {
        self.note(Call::Activate(features));
        Ok(())
    }

    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        let index = vring.parts.index;
        assert!(!self.running().contains(&index), "queue {index} started twice");
        self.inner.lock().unwrap().vrings.push(vring);
        self.note(Call::Start(index));
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        self.note(Call::Stop(index));
        let mut inner = self.inner.lock().unwrap();
        let at = inner.vrings.iter().position(|v| v.parts.index == index);
        Ok(at.map(|at| inner.vrings.remove(at)))
    }

    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        self.note(Call::Memory(memory.regions().len()));
        for vring in &mut self.inner.lock().unwrap().vrings {
            let moved = vring.queue.set_memory(memory.clone());
            moved.map_err(DeviceError::failed)?;
        }
        Ok(())
    }

    fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>) {
        let some = notifier.is_some();
        self.inner.lock().unwrap().notifier = notifier;
        self.note(Call::Notifier(some));
    }

    fn reset(&self) {
        self.inner.lock().unwrap().vrings.clear();
        self.note(Call::Reset);
    }

    fn connected(&self, up: bool) {
        self.note(Call::Connected(up));
    }
}
