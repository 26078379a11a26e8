//! Messages that bring eventfds: kick, call, err.

use std::os::fd::OwnedFd;

use base::event::Event;

use super::vring::Kick;
use super::{Fault, Reply, Session};
use crate::codec::{Request, VRING_NO_FD, payload};
use crate::error::VhostUserError;

/// Bits 0–7: the queue.
const INDEX_MASK: u64 = 0xff;

impl Session {
    fn doorbell(
        &self,
        request: Request,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(usize, Option<Event>), VhostUserError> {
        let word: u64 = payload(request, bytes)?;
        if word & !(INDEX_MASK | VRING_NO_FD) != 0 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "queue and flags",
                value: word,
                rule: format!("bits outside {:#x} are reserved", INDEX_MASK | VRING_NO_FD),
            });
        }
        let index = self.index(request, word & INDEX_MASK)?;
        let event = fds.into_iter().next().map(Event::from_fd).transpose();
        let event = event.map_err(|source| VhostUserError::BadDoorbell {
            message: request.message(),
            port: self.port.name.clone(),
            queue: index,
            source,
        })?;
        Ok((index, event))
    }

    pub(super) fn set_vring_kick(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, Fault> {
        let request = Request::SetVringKick;
        let (index, event) = self.doorbell(request, bytes, fds)?;
        if self.memory.is_empty() {
            let why = format!("queue {index} is kicked before there is any memory");
            return Err(Self::misplaced(request, why).into());
        }
        let vring = &mut self.vrings[index];
        vring.kick = event.map_or(Kick::Polled, Kick::Event);
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    /// Comes while the queue runs whenever the guest masks or unmasks an interrupt.
    pub(super) fn set_vring_call(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, Fault> {
        let (index, event) = self.doorbell(Request::SetVringCall, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.call = event;
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    pub(super) fn set_vring_err(
        &mut self,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, Fault> {
        let (index, event) = self.doorbell(Request::SetVringErr, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.err = event;
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }
}
