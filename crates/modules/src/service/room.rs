//! Room for what clients make the process hold.

use guest_abi::module::failure;

use super::Service;
use crate::conn::Conn;
use crate::limits::ROOM_BYTES;

/// What could be let go of.
enum Hold {
    /// Replies that are kept for a client.
    Kept(u32),
    /// A connection with its buffers.
    Conn(usize),
}

impl Service {
    /// Reads a connection, once there is room for what it may send.
    pub(super) fn fill(&mut self, at: usize) {
        let growth = |service: &Self| service.conns[at].as_ref().map_or(0, |c| c.growth_bytes());
        self.make_room(growth(self));
        if self.purse.room_bytes() < growth(self) {
            self.crowded_out(at);
        }
        // It may have been the one that made room.
        let Some(conn) = &mut self.conns[at] else { return };
        match conn.fill(&mut self.read) {
            Ok(()) if conn.has_ring() => self.rings.wake(at),
            Ok(()) => {}
            Err(lost) => self.lost(at, &lost),
        }
        self.more = true;
    }

    /// Sees to it that replies of the next call find room.
    pub(super) fn keep_room(&mut self) {
        self.make_room(ROOM_BYTES);
    }

    /// Whoever holds much lets go of it, until there is room: kept replies are dropped but for the small
    /// ones, connections end.
    fn make_room(&mut self, wanted: usize) {
        while self.purse.room_bytes() < wanted {
            match self.largest() {
                Some(Hold::Kept(number)) => {
                    if let Some(client) = self.clients.get_mut(number) {
                        client.drop_spare();
                    }
                }
                Some(Hold::Conn(at)) => self.crowded_out(at),
                None => return,
            }
        }
    }

    /// Of those that hold much, half of what the largest one does, it is the one that does so for the longest
    /// time: whoever sends a long request, or takes a long reply, without a pause is through by then.
    fn slowest(&self) -> Option<(usize, usize)> {
        let holding = || {
            let holds = |(at, conn): (usize, &Option<Conn>)| Some((at, conn.as_ref()?.holds()?));
            self.conns.iter().enumerate().filter_map(holds)
        };
        let most = holding().map(|(_, (bytes, _))| bytes).max()?;
        let large = holding().filter(|(_, (bytes, _))| *bytes >= most / 2);
        large.min_by_key(|(_, (_, since))| *since).map(|(at, (bytes, _))| (bytes, at))
    }

    fn largest(&mut self) -> Option<Hold> {
        let kept = self.clients.iter_mut().map(|(number, client)| (client.spare_bytes(), number));
        let kept = kept.max().filter(|(bytes, _)| *bytes > 0);
        match (kept, self.slowest()) {
            (Some((bytes, number)), conn) if conn.is_none_or(|(other, _)| other <= bytes) => {
                Some(Hold::Kept(number))
            }
            (_, Some((_, at))) => Some(Hold::Conn(at)),
            _ => None,
        }
    }

    fn crowded_out(&mut self, at: usize) {
        let bytes = self.conns[at].as_ref().map_or(0, |conn| conn.charged_bytes());
        self.meter.told.crowded += 1;
        tracing::debug!(module = %self.spec.name, bytes, "a connection ends for want of room");
        let text = format!(
            "no room: requests and replies of this client take {bytes} bytes of the host, those of all \
             clients of this module {}; connect again and send less at once",
            self.purse.used_bytes()
        );
        self.goodbye(at, failure::LIMIT, &text);
    }
}
