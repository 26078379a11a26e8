//! The engine's dealings with Unix sockets: events, accepting, handshakes, flushing.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use crate::connection::Phase;
use crate::engine::{Engine, Far, Handshake, Port};
use crate::host::{self, Line};
use crate::limits::{
    ACCEPT_BATCH, HANDSHAKE_TIMEOUT_NS, LOOK_EVENTS, MAX_HANDSHAKES, SCAN_INTERVAL_NS,
};
use crate::packet::{SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};
use crate::table::{Id, Tag};

impl Port {
    pub(crate) fn can_accept(&self, now_ns: u64) -> bool {
        self.accept_ready && self.handshakes < MAX_HANDSHAKES && now_ns >= self.accept_after_ns
    }
}

impl Engine {
    /// Watches a Unix socket in the engine's own set (edge-triggered).
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, tag: Tag, known: bool) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(tag.to_u64());
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if known {
            // Tells again what is ready already.
            epoll::modify(&self.epoll, fd, data, flags)
        } else {
            epoll::add(&self.epoll, fd, data, flags)
        }
    }

    /// Takes what happened on the Unix sockets: one system call. Returns how many events.
    pub(crate) fn look(&mut self) -> usize {
        self.looked_ns = Some(self.now_ns);
        let mut room = [const { MaybeUninit::uninit() }; LOOK_EVENTS];
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut room[..], Some(&epoll_now())) else {
            // Interrupted: the events are still there the next time.
            return 0;
        };
        for event in events.iter() {
            let (flags, data) = (event.flags, event.data);
            match Tag::from_u64(data.u64()) {
                Tag::Listener(id) => {
                    if let Some(p) = self.ports.get_mut(id) {
                        p.accept_ready = true;
                    }
                }
                Tag::Handshake(id) => self.on_handshake(id),
                Tag::Endpoint(id) => self.on_socket(id, flags),
            }
        }
        let count = events.len();
        if count == LOOK_EVENTS {
            self.looked_ns = None;
        }
        count
    }

    /// Accepts host programs, as far as there is room for their handshakes.
    pub(crate) fn accept_waiting(&mut self, id: Id) -> usize {
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

    fn begin_handshake(&mut self, port: Id, fd: std::os::fd::OwnedFd) {
        let deadline_ns = self.now_ns.saturating_add(HANDSHAKE_TIMEOUT_NS);
        let id = self.handshakes.insert(Handshake { fd, port, deadline_ns });
        self.note_deadline(deadline_ns);
        let Some(handshake) = self.handshakes.get(id) else { return };
        // The set tells of a line that is there already.
        let fd = std::os::fd::AsFd::as_fd(&handshake.fd);
        if self.watch(fd, Tag::Handshake(id), false).is_err() {
            self.end_handshake(id, true);
        }
    }

    /// Ends a handshake; the socket closes unless the caller took it over before.
    pub(crate) fn end_handshake(&mut self, id: Id, dropped: bool) -> Option<Handshake> {
        let handshake = self.handshakes.remove(id)?;
        if let Some(p) = self.ports.get_mut(handshake.port) {
            p.handshakes -= 1;
            p.spec.stats.handshakes_dropped.add(u64::from(dropped));
        }
        Some(handshake)
    }

    fn on_handshake(&mut self, id: Id) {
        let Some(handshake) = self.handshakes.get(id) else { return };
        match host::read_line(&handshake.fd) {
            Line::Partial => {}
            Line::Bad(why) => {
                tracing::debug!("CONNECT handshake dropped: {why}");
                self.end_handshake(id, true);
            }
            Line::Port(guest_port) => {
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

    fn on_socket(&mut self, id: Id, flags: EventFlags) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let Far::Host(end) = &mut ep.far else { return };
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

    /// Sends what waits in a connection's buffer to its Unix socket.
    fn flush_buffer(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let Far::Host(end) = &mut ep.far else { return };
        let had_bytes = !ep.ring.is_empty();
        while end.writable && !ep.ring.is_empty() {
            let pieces = ep.ring.front(usize::MAX);
            let wanted = pieces.0.len() + pieces.1.len();
            match host::send_pieces(&end.fd, pieces) {
                Ok(n) => {
                    ep.ring.consume(n);
                    ep.conn.passed_on(n as u32);
                    end.writable = n == wanted;
                }
                Err(Errno::AGAIN) => end.writable = false,
                Err(_) => return self.host_takes_no_more(id),
            }
        }
        if had_bytes && ep.ring.is_empty() {
            if ep.conn.guest_shut() & SHUT_SEND != 0 {
                host::shut(&end.fd, rustix::net::Shutdown::Write);
            }
            if ep.conn.phase() == Phase::Closing {
                ep.far = Far::Gone;
            }
        }
        self.try_free(id);
    }

    /// The program reads no more: what waits for it, and what comes, is for nobody.
    pub(crate) fn host_takes_no_more(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let unheard = ep.conn.guest_shut() & SHUT_RECEIVE != 0;
        ep.conn.far_shutdown(if unheard { SHUT_BOTH } else { SHUT_RECEIVE });
        ep.ring.clear();
        ep.conn.passed_on(ep.conn.unread());
        if ep.conn.phase() == Phase::Closing {
            ep.far = Far::Gone;
        }
        self.try_free(id);
        self.enqueue(id);
    }
}

fn epoll_now() -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }
}
