//! A device behind a vhost-user session that does nothing.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use queue::{GuestMemory, Vring};
use vhost_user::{ConfigNotifier, Device, DeviceError, DeviceKind, Endpoint, PortConfig, VmShare};

/// Queues of the device.
pub const QUEUES: u16 = 2;

/// Takes queues and gives them back.
#[derive(Debug)]
pub struct Sink {
    block: bool,
    vrings: Mutex<Vec<Vring>>,
}

impl Sink {
    /// A disk, or a network device.
    pub fn new(block: bool) -> Self {
        Self { block, vrings: Mutex::default() }
    }

    /// True when no queue runs.
    pub fn is_idle(&self) -> bool {
        self.vrings().is_empty()
    }

    fn vrings(&self) -> MutexGuard<'_, Vec<Vring>> {
        self.vrings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Sink {
    fn kind(&self) -> DeviceKind {
        if self.block { DeviceKind::Block } else { DeviceKind::Net }
    }
    fn features(&self) -> u64 {
        1 << 28 | 1 << 29 | 1 << 32 | 1 << 34
    }
    fn queue_count(&self) -> u16 {
        QUEUES
    }
    fn wants_inflight(&self) -> bool {
        self.block
    }
    fn has_config(&self) -> bool {
        self.block
    }
    fn read_config(&self, _offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        out.fill(1);
        Ok(())
    }
    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn activate(&self, _features: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        self.vrings().push(vring);
        Ok(())
    }
    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        let mut vrings = self.vrings();
        let at = vrings.iter().position(|v| v.parts.index == index);
        Ok(at.map(|at| vrings.remove(at)))
    }
    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        for vring in self.vrings().iter_mut() {
            vring.queue.set_memory(memory.clone()).expect("rings without memory run");
        }
        Ok(())
    }
    fn set_notifier(&self, _notifier: Option<Arc<dyn ConfigNotifier>>) {}
    fn reset(&self) {
        self.vrings().clear();
    }
}

/// A port on a socket that is connected.
pub fn port_config(socket: OwnedFd) -> PortConfig {
    PortConfig {
        name: "fuzz".to_owned(),
        endpoint: Endpoint::Fd(socket),
        socket_mode: 0,
        share: VmShare::new(),
    }
}
