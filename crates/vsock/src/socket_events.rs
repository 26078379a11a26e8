//! Unix sockets of the engine: events, accepting, handshakes, flushing.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use crate::connection::Phase;
use crate::endpoint::{FarEnd, Handshake};
use crate::engine::VsockEngine;
use crate::limits::{ACCEPT_BATCH, HANDSHAKE_TIMEOUT_NS, SCAN_INTERVAL_NS, SOCKET_POLL_EVENTS};
use crate::packet::{SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};
use crate::slab::{EpollTag, SlabId};
use crate::unix_socket::{self, ConnectLine};

impl VsockEngine {
    /// Watches a Unix socket in the engine's own set (edge-triggered).
    pub(crate) fn watch(
        &self,
        fd: BorrowedFd<'_>,
        tag: EpollTag,
        known: bool,
    ) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(tag.to_u64());
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if known {
            // Tells again what is ready already.
            epoll::modify(&self.epoll, fd, data, flags)
        } else {
            epoll::add(&self.epoll, fd, data, flags)
        }
    }

    /// Takes the events of the Unix sockets: one system call. Returns how many there were.
    pub(crate) fn poll_sockets(&mut self) -> usize {
        self.sockets_polled_ns = Some(self.now_ns);
        let mut room = [const { MaybeUninit::uninit() }; SOCKET_POLL_EVENTS];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut room[..], Some(&epoll_now())) else {
            // Interrupted: the events are still there the next time.
            return 0;
        };
        for event in events.iter() {
            let (flags, data) = (event.flags, event.data);
            match EpollTag::from_u64(data.u64()) {
                EpollTag::Listener(id) => {
                    if let Some(p) = self.ports.get_mut(id) {
                        p.accept_ready = true;
                    }
                }
                EpollTag::Handshake(id) => self.on_handshake(id),
                EpollTag::Endpoint(id) => self.on_socket(id, flags),
            }
        }
        let count = events.len();
        if count == SOCKET_POLL_EVENTS {
            self.sockets_polled_ns = None;
        }
        count
    }

    /// Accepts host programs, as far as there is room for their handshakes.
    pub(crate) fn accept_waiting(&mut self, id: SlabId) -> usize {
        for done in 0..ACCEPT_BATCH {
            let now_ns = self.now_ns;
            let Some(p) = self.ports.get_mut(id).filter(|p| p.can_accept(now_ns)) else {
                return done as usize;
            };
            let accepted = p.spec.listener.as_ref().map_or(Err(Errno::AGAIN), |l| l.accept());
            match accepted {
                Ok(fd) if p.is_running() => {
                    p.handshakes += 1;
                    self.begin_handshake(id, fd);
                }
                // Nobody is there to talk to: closed at once, so that the program sees it.
                Ok(_) => p.spec.stats.handshakes_dropped.add(1),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => {
                    p.accept_ready = false;
                    return done as usize;
                }
                Err(e) => {
                    // Out of descriptors or memory: no event will tell when that is over.
                    tracing::warn!(cid = p.spec.cid, "accepting a Unix connection: {e}");
                    p.accept_after_ns = now_ns.saturating_add(SCAN_INTERVAL_NS);
                    let at_ns = p.accept_after_ns;
                    self.note_deadline(at_ns);
                    return done as usize;
                }
            }
        }
        ACCEPT_BATCH as usize
    }

    fn begin_handshake(&mut self, port: SlabId, fd: std::os::fd::OwnedFd) {
        let deadline_ns = self.now_ns.saturating_add(HANDSHAKE_TIMEOUT_NS);
        let id = self.handshakes.insert(Handshake { fd, port, deadline_ns });
        self.note_deadline(deadline_ns);
        let Some(handshake) = self.handshakes.get(id) else { return };
        // The set tells of a line that is there already.
        let fd = std::os::fd::AsFd::as_fd(&handshake.fd);
        if self.watch(fd, EpollTag::Handshake(id), false).is_err() {
            self.end_handshake(id, true);
        }
    }

    /// Ends a handshake; the socket closes unless the caller took it over before.
    pub(crate) fn end_handshake(&mut self, id: SlabId, dropped: bool) -> Option<Handshake> {
        let handshake = self.handshakes.remove(id)?;
        if let Some(p) = self.ports.get_mut(handshake.port) {
            p.handshakes -= 1;
            p.spec.stats.handshakes_dropped.add(u64::from(dropped));
        }
        Some(handshake)
    }

    fn on_handshake(&mut self, id: SlabId) {
        let Some(handshake) = self.handshakes.get(id) else { return };
        match unix_socket::read_line(&handshake.fd) {
            ConnectLine::Partial => {}
            ConnectLine::Bad(why) => {
                tracing::debug!("CONNECT handshake dropped: {why}");
                self.end_handshake(id, true);
            }
            ConnectLine::Port(guest_port) => {
                let Some(h) = self.end_handshake(id, false) else { return };
                let port = h.port;
                if !self.open_from_host(port, h.fd, guest_port)
                    && let Some(p) = self.ports.get(port)
                {
                    p.spec.stats.handshakes_dropped.add(1);
                }
            }
        }
    }

    fn on_socket(&mut self, id: SlabId, flags: EventFlags) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let FarEnd::Host(end) = &mut ep.far else { return };
        let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        let wants_bytes = ep.conn.guest_shut() & SHUT_RECEIVE == 0;
        end.hung_up |= flags.contains(EventFlags::HUP);
        end.ending |= gone || flags.contains(EventFlags::RDHUP);
        if end.ending || flags.contains(EventFlags::IN) {
            end.readable = wants_bytes;
        }
        if end.hung_up && (!wants_bytes || ep.conn.far_shut() & SHUT_SEND != 0) {
            // The end of its bytes will never be read, or has been.
            ep.conn.far_shutdown(SHUT_BOTH);
        }
        if end.awaits_ok && (end.hung_up || flags.contains(EventFlags::ERR)) {
            // It did not wait for the guest's answer.
            return self.reset(id);
        }
        if flags.contains(EventFlags::OUT) {
            end.writable = true;
            self.flush_buffer(id);
        }
        self.enqueue(id);
    }

    /// Sends the bytes in a connection's buffer to its Unix socket.
    fn flush_buffer(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let FarEnd::Host(end) = &mut ep.far else { return };
        let had_bytes = !ep.ring.is_empty();
        while end.writable && !ep.ring.is_empty() {
            let pieces = ep.ring.front(usize::MAX);
            let wanted = pieces.0.len() + pieces.1.len();
            match unix_socket::send_pieces(&end.fd, pieces) {
                Ok(n) => {
                    ep.ring.consume(n);
                    ep.conn.note_forwarded(n as u32);
                    end.writable = n == wanted;
                }
                Err(Errno::AGAIN) => end.writable = false,
                Err(_) => return self.stop_sending_to_host(id),
            }
        }
        if had_bytes && ep.ring.is_empty() {
            if ep.conn.guest_shut() & SHUT_SEND != 0 {
                unix_socket::shut(&end.fd, rustix::net::Shutdown::Write);
            }
            if ep.conn.phase() == Phase::Closing {
                ep.far = FarEnd::Gone;
            }
        }
        self.try_free(id);
    }

    /// Drops all bytes for a program that reads no more, those that wait and those that come.
    pub(crate) fn stop_sending_to_host(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let unheard = ep.conn.guest_shut() & SHUT_RECEIVE != 0;
        ep.conn.far_shutdown(if unheard { SHUT_BOTH } else { SHUT_RECEIVE });
        ep.ring.clear();
        ep.conn.note_forwarded(ep.conn.unread());
        if ep.conn.phase() == Phase::Closing {
            ep.far = FarEnd::Gone;
        }
        self.try_free(id);
        self.enqueue(id);
    }
}

fn epoll_now() -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }
}
