//! Kicks of a switch: the descriptors that its drivers wake it by.

use std::collections::HashMap;
use std::os::fd::RawFd;

use queue::Vring;
use sidecore::Watcher;
use vhost_user::DeviceError;

use crate::fdb::PortId;
use crate::port::{ControlQueue, Place, Port};

/// The kicks of a switch, and the epoll set behind them.
pub(crate) struct Kicks<'a> {
    pub kicks: &'a mut HashMap<RawFd, (PortId, u16)>,
    pub watcher: &'a Watcher<'a>,
}

impl Kicks<'_> {
    /// Lets the kicks of a queue wake the switch.
    pub fn watch(&mut self, vring: &Vring, place: Place) -> Result<(), DeviceError> {
        if let Some(fd) = vring.kick_fd() {
            self.watcher.watch(fd).map_err(DeviceError::failed)?;
            self.kicks.insert(fd, (place.id, vring.parts.index));
        }
        Ok(())
    }

    /// Takes a queue out of the epoll set.
    pub fn unwatch(&mut self, vring: &Vring) {
        if let Some(fd) = vring.kick_fd() {
            self.watcher.unwatch(fd);
            self.kicks.remove(&fd);
        }
    }
}

/// Takes a queue off the port; on return nothing of it is in flight.
pub(crate) fn take_queue(port: &mut Port, index: u16, kicks: &mut Kicks<'_>) -> Option<Vring> {
    let at = usize::from(index / 2);
    let is_control = |c: &mut Box<ControlQueue>| c.vring.parts.index == index;
    let vring = if let Some(control) = port.control.take_if(is_control) {
        control.vring
    } else if index.is_multiple_of(2) {
        let rxq = port.rx.get_mut(at)?.take();
        port.find_running();
        rxq?.stop()
    } else {
        let mut vring = port.tx.get_mut(at)?.take()?.vring;
        vring.notify();
        vring
    };
    kicks.unwatch(&vring);
    Some(vring)
}
