//! Messages that bring eventfds: kick, call, err.

use base::doorbell::Doorbell;
use base::peer_fd::PeerFd;

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
        fds: Vec<PeerFd>,
    ) -> Result<(usize, Option<Doorbell>), VhostUserError> {
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
        let bell = fds.into_iter().next().map(Doorbell::from_peer).transpose();
        let bell = bell.map_err(|source| VhostUserError::BadDoorbell {
            message: request.message(),
            port: self.port.name.clone(),
            queue: index,
            source,
        })?;
        Ok((index, bell))
    }

    pub(super) fn set_vring_kick(
        &mut self,
        bytes: &[u8],
        fds: Vec<PeerFd>,
    ) -> Result<Reply, Fault> {
        let request = Request::SetVringKick;
        let (index, bell) = self.doorbell(request, bytes, fds)?;
        if self.memory.is_empty() {
            let why = format!("queue {index} is kicked before there is any memory");
            return Err(Self::misplaced(request, why).into());
        }
        let vring = &mut self.vrings[index];
        vring.kick = bell.map_or(Kick::Polled, Kick::Event);
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    /// Comes while the queue runs whenever the guest masks or unmasks an interrupt.
    pub(super) fn set_vring_call(
        &mut self,
        bytes: &[u8],
        fds: Vec<PeerFd>,
    ) -> Result<Reply, Fault> {
        let (index, bell) = self.doorbell(Request::SetVringCall, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.call = bell;
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    pub(super) fn set_vring_err(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let (index, bell) = self.doorbell(Request::SetVringErr, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.err = bell;
        vring.stale |= vring.running.is_some();
        Ok(Reply::Done)
    }
}
