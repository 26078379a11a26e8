//! Frames of clients, and what they lead to.

use std::time::Instant;

use guest_abi::module::{FRAME_BYTES, Frame, MAX_PING_BYTES, failure, flag, kind};
use guest_abi::module_call::{event, event_flag};

use super::{Service, push_event};
use crate::clients::Verdict;
use crate::conn::{Bad, Bytes, Conn, Lost, failure as failed, frame, is_clients};
use crate::limits::CALL_BYTES;

/// Why a connection without a ring ends.
const RING_ONLY: &str = "this VM's modules take requests by shared memory alone, and this program has none: \
     it may not open the device, or does not use it, or all rings are taken";
const NO_RINGS: &str =
    "this VM's modules take requests by shared memory alone, and the host could not make it";

/// What a frame leads to.
enum Done {
    Nothing,
    Say(Bytes),
    Bad(Bad),
    /// It asks for a ring: what it says of it.
    Ring(Vec<u8>),
    /// It must have a ring first.
    RingOnly,
    Close,
}

impl Service {
    /// Takes frames of all connections, up to what a call may have.
    pub(super) fn collect(&mut self) {
        if self.holds_requests() || !std::mem::take(&mut self.more) {
            return;
        }
        let now = Instant::now();
        // Each is the first one in turn: what a call may have is not for the first few alone.
        let count = self.conns.len();
        self.first = (self.first + 1) % count.max(1);
        for at in (self.first..count).chain(0..self.first) {
            self.collect_of(at, now);
        }
    }

    fn collect_of(&mut self, at: usize, now: Instant) {
        loop {
            if self.events.len() >= CALL_BYTES {
                self.more = true;
                return;
            }
            // Taken out while it is looked at: what it says may be about any client.
            let Some(mut conn) = self.conns[at].take() else { return };
            let next = if conn.asks_too_early() {
                Some((0, Done::RingOnly))
            } else {
                match conn.next() {
                    Ok(Some((head, body))) => {
                        let done = self.on_frame(&conn, &head, body, now);
                        Some((body.len(), done))
                    }
                    Ok(None) => None,
                    Err(bad) => Some((0, Done::Bad(bad))),
                }
            };
            let Some((len, done)) = next else {
                let over = conn.ended;
                self.conns[at] = Some(conn);
                if over {
                    self.disconnect(at);
                }
                return;
            };
            conn.advance(len);
            self.meter.told.received_bytes += (FRAME_BYTES + len) as u64;
            let number = conn.client;
            if let Done::Say(bytes) = &done {
                conn.push(Bytes::clone(bytes));
            }
            self.conns[at] = Some(conn);
            match done {
                Done::Nothing | Done::Say(_) => {}
                Done::Bad(Bad(text)) => self.bad(at, &text),
                Done::Ring(wanted) => self.grant_ring(at, &wanted),
                Done::RingOnly => {
                    self.meter.told.bad += 1;
                    let why = if self.spec.ring.is_some() { RING_ONLY } else { NO_RINGS };
                    self.goodbye(at, failure::RING_ONLY, why);
                }
                Done::Close => {
                    self.disconnect(at);
                    self.close_client(number);
                }
            }
        }
    }

    fn on_frame(&mut self, conn: &Conn, head: &Frame, body: &[u8], now: Instant) -> Done {
        let (kind, seq, number) = (head.kind.get(), head.seq.get(), conn.client);
        if !is_clients(kind) {
            return Done::Bad(Bad(format!("a frame of kind {kind}, which clients do not send")));
        }
        match kind {
            kind::REQUEST => self.on_request(number, seq, head.flags.get(), body, now),
            kind::CANCEL => {
                let waits = self.clients.get_mut(number).is_some_and(|c| c.waits_for(seq));
                if waits {
                    self.tell(event::CANCEL, number, seq, &[]);
                }
                Done::Nothing
            }
            kind::PING if body.len() <= MAX_PING_BYTES => {
                Done::Say(frame(kind::PONG, 0, seq, &[body]))
            }
            kind::PING => Done::Bad(Bad(format!("a ping of {} bytes", body.len()))),
            kind::RING => Done::Ring(body.to_vec()),
            _ => Done::Close,
        }
    }

    fn on_request(&mut self, number: u32, seq: u64, flags: u16, body: &[u8], now: Instant) -> Done {
        let Some(client) = self.clients.get_mut(number) else { return Done::Nothing };
        self.meter.told.requests += 1;
        match client.accept(seq, flags, now) {
            Verdict::Execute => {
                let mut told = 0;
                if flags & flag::AGAIN != 0 {
                    told |= event_flag::AGAIN;
                }
                if flags & flag::REPEATABLE != 0 {
                    told |= event_flag::REPEATABLE;
                }
                push_event(&mut self.events, event::REQUEST, told, number, seq, body);
                Done::Nothing
            }
            Verdict::Resend(bytes) => {
                self.meter.told.again += 1;
                Done::Say(bytes)
            }
            Verdict::Wait => {
                self.meter.told.again += 1;
                Done::Nothing
            }
            Verdict::Refuse(code, text) => Done::Say(failed(kind::REPLY, seq, code, &text)),
            Verdict::Bad(text) => Done::Bad(Bad(text)),
        }
    }

    /// What a connection sent is no frame, or not one that may be sent.
    fn bad(&mut self, at: usize, text: &str) {
        self.meter.told.bad += 1;
        let by_ring = self.conns.get(at).and_then(Option::as_ref).is_some_and(Conn::has_ring);
        // Another program of the guest may have written there.
        self.goodbye(at, if by_ring { failure::RING } else { failure::BAD_FRAME }, text);
    }

    pub(super) fn lost(&mut self, at: usize, lost: &Lost) {
        match lost {
            Lost::Gone => self.disconnect(at),
            Lost::Damaged(damaged) => self.bad(at, &damaged.to_string()),
        }
    }
}
