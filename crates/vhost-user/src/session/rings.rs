//! Messages about queues: size, addresses, base, enable.

use base::limits::MAX_QUEUE_SIZE;

use super::vring::layout;
use super::{Fault, Reply, Session};
use crate::codec::{Request, VRING_F_LOG, VringAddr, VringState as StateMessage, payload};
use crate::device::DeviceKind;
use crate::error::VhostUserError;

/// The error of a queue size that cannot be.
fn bad_size(num: u32, rule: String) -> Fault {
    let (message, value) = (Request::SetVringNum.message(), u64::from(num));
    VhostUserError::BadField { message, field: "size", value, rule }.into()
}

impl Session {
    /// A queue index from the wire, checked before it is narrowed.
    pub(super) fn index(&self, request: Request, index: u64) -> Result<usize, VhostUserError> {
        match usize::try_from(index) {
            Ok(index) if index < self.vrings.len() => Ok(index),
            _ => Err(VhostUserError::BadField {
                message: request.message(),
                field: "queue",
                value: index,
                rule: self.queue_rule(index),
            }),
        }
    }

    /// What a queue index may be, for who asked for `index`: of a network device in the unit that
    /// its configuration has.
    fn queue_rule(&self, index: u64) -> String {
        let rings = self.vrings.len();
        match self.port.device.kind() {
            DeviceKind::Net => format!(
                "the front end has {} queue pairs or more, this port has {} (queue_pairs)",
                index / 2 + 1,
                rings / 2,
            ),
            _ => format!("this port has {rings}"),
        }
    }

    fn state_message(
        &self,
        request: Request,
        bytes: &[u8],
    ) -> Result<(usize, u32), VhostUserError> {
        let state: StateMessage = payload(request, bytes)?;
        Ok((self.index(request, u64::from(state.index))?, state.num))
    }

    fn still(&self, request: Request, index: usize) -> Result<(), VhostUserError> {
        if self.vrings[index].running.is_some() {
            return Err(Self::misplaced(request, format!("queue {index} is running")));
        }
        Ok(())
    }

    pub(super) fn set_vring_num(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetVringNum;
        let (index, num) = self.state_message(request, bytes)?;
        let size = match u16::try_from(num) {
            Ok(size) if (1..=MAX_QUEUE_SIZE).contains(&size) => size,
            _ => return Err(bad_size(num, format!("1 to {MAX_QUEUE_SIZE}"))),
        };
        // Before the features are known, the start of the queue finds it.
        let is_split = self.features.is_some_and(|bits| layout(bits) == queue::Layout::Split);
        if is_split && !size.is_power_of_two() {
            let rule = format!("a power of two for a split ring, 1 to {MAX_QUEUE_SIZE}");
            return Err(bad_size(num, rule));
        }
        if self.vrings[index].size != Some(size) {
            self.still(request, index)?;
            self.vrings[index].size = Some(size);
        }
        Ok(Reply::Done)
    }

    /// The same addresses with another log flag are fine while the queue runs (a migration begins
    /// or ends); other addresses are not.
    pub(super) fn set_vring_addr(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetVringAddr;
        let addr: VringAddr = payload(request, bytes)?;
        let index = self.index(request, u64::from(addr.index))?;
        if addr.flags & !VRING_F_LOG != 0 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "flags",
                value: u64::from(addr.flags),
                rule: format!("only {VRING_F_LOG:#x} (log) is known"),
            }
            .into());
        }
        let vring = &self.vrings[index];
        let same =
            |old: VringAddr| (old.desc, old.used, old.avail) == (addr.desc, addr.used, addr.avail);
        if !vring.addrs.is_some_and(same) {
            self.still(request, index)?;
            let size = vring.size.unwrap_or(1);
            let layout = layout(self.features.unwrap_or(0));
            self.memory.resolve(&addr, size, layout).map_err(|part| {
                let why = format!("the {part} of queue {index} is not in the VM's memory");
                Self::misplaced(request, why)
            })?;
        }
        let vring = &mut self.vrings[index];
        vring.addrs = Some(addr);
        vring.stale |= vring.running.is_some_and(|r| r.log_used_addr != vring.log_used_addr());
        Ok(Reply::Done)
    }

    pub(super) fn set_vring_base(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetVringBase;
        let (index, base) = self.state_message(request, bytes)?;
        self.still(request, index)?;
        self.vrings[index].base = Some(base);
        Ok(Reply::Done)
    }

    /// Stops the ring; it stays stopped until the next kick descriptor.
    pub(super) fn get_vring_base(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::GetVringBase;
        let (index, _) = self.state_message(request, bytes)?;
        self.stop(index);
        let vring = &mut self.vrings[index];
        vring.kick = Default::default();
        let state = StateMessage { index: index as u32, num: vring.base.unwrap_or(0) };
        if !self.is_any_running() {
            self.rings_were_reset();
        }
        Ok(Reply::Body(zerocopy::IntoBytes::as_bytes(&state).to_vec()))
    }

    /// Comes before `SET_FEATURES` from QEMU's network device.
    pub(super) fn set_vring_enable(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetVringEnable;
        let (index, num) = self.state_message(request, bytes)?;
        if num > 1 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "enable",
                value: u64::from(num),
                rule: "0 or 1".to_owned(),
            }
            .into());
        }
        self.vrings[index].enabled = Some(num == 1);
        if num == 0 {
            self.stop(index);
        }
        Ok(Reply::Done)
    }
}
