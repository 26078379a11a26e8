//! Announcements of a VM that came from another host.
//!
//! Bridges and switches send its frames where it was until it says something, and an idle guest
//! says nothing for seconds. A driver without `VIRTIO_NET_F_GUEST_ANNOUNCE` leaves it to the VMM,
//! which leaves it to us (`VHOST_USER_SEND_RARP`). What goes out is what QEMU sends for its own
//! devices: a broadcast reverse ARP request (RFC 903) that asks for the guest's own address.

use base::counter::DropReason;

use crate::engine::Engine;
use crate::fdb::Dest;
use crate::outcome::{Outcome, WhenFull};
use crate::port::{Place, Port};
use crate::transmit::admit;
use frame::{Allowed, Body, Frame, Mac, VNET_LEN};

/// An Ethernet frame without its check sequence is not shorter (IEEE 802.3).
const MIN_FRAME_LEN: usize = 60;

/// The frame of an announcement, behind an empty virtio-net header.
fn rarp(mac: Mac) -> [u8; VNET_LEN + MIN_FRAME_LEN] {
    let mut bytes = [0; VNET_LEN + MIN_FRAME_LEN];
    let frame = &mut bytes[VNET_LEN..];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac.bytes());
    // RARP, for Ethernet and IPv4: request reverse; hardware address of sender and target.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac.bytes());
    frame[32..38].copy_from_slice(&mac.bytes());
    bytes
}

impl Engine {
    /// Tells everybody on the switch and behind the uplink that `mac` is at this port. The port
    /// must be one that may send from it.
    pub(crate) fn announce(
        &mut self,
        place: Place,
        mac: Mac,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        if self.fabric.port_mut(place).is_none() {
            return Err(DropReason::NoDestination);
        }
        let at = usize::from(place.id);
        // As for a sender's turn: no frame comes back to it.
        let Some(mut port) = self.fabric.ports[at].take() else {
            return Err(DropReason::NoDestination);
        };
        let sent = self.send_announcement(&mut port, mac, now_ns);
        self.fabric.ports[at] = Some(port);
        self.fabric.publish(now_ns);
        sent
    }

    fn send_announcement(
        &mut self,
        port: &mut Port,
        mac: Mac,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let Self { fabric, heads, .. } = self;
        let (bytes, head) = (rarp(mac), heads.lone());
        head.load_slice(&bytes, Allowed::ALL)?;
        admit(port, head, &mut fabric.tables, now_ns)?;
        let start = head.bytes();
        let body = Body::Ours(&bytes[start.len()..]);
        let frame = Frame { vnet: head.vnet(), head: start, body };
        // SAFETY: uplink and hooks are flushed below, before the bytes go.
        let outcome = unsafe { fabric.deliver(Dest::All, 0, &frame, WhenFull::Drop, now_ns) };
        fabric.flush_lent();
        fabric.flush_uplink();
        // Nobody is charged: the VM did not ask for it.
        fabric.extra_cost_bytes = 0;
        match outcome {
            Outcome::Dropped(reason) => Err(reason),
            Outcome::Sent | Outcome::Consumed | Outcome::Hold(_) => Ok(()),
        }
    }
}
