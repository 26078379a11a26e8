//! One connection as one guest sees it: states, credit, what is owed to the guest. No I/O and no
//! clock in here, so that random packets can be thrown at it.
//!
//! Towards its guest, the device ends every connection itself: a connection between two guests is
//! two of these back to back. So the credit that a guest sees is always ours, and no guest's
//! numbers reach another.

use crate::limits::CLOSE_TIMEOUT_NS;
use crate::packet::{Header, Key, Op, RawHeader, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};

/// Where a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// We ask the guest; it has not answered.
    Asking,
    /// The guest asked; the other end has not answered.
    Answering,
    /// Bytes flow.
    Open,
    /// Over for the guest as soon as the reset is sent.
    Closing,
}

/// What a guest's packet means for the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Nothing to do.
    Nothing,
    /// The guest accepted our request.
    Accepted,
    /// So many payload bytes are for the other end; they fit in the buffer.
    Data(u32),
    /// The guest shut these directions (only the new ones).
    Shutdown(u8),
    /// The guest ended the connection.
    Reset,
    /// The guest broke a rule: the connection must be reset.
    Violation(&'static str),
}

const PENDING_REQUEST: u8 = 1;
const PENDING_RESPONSE: u8 = 2;
const PENDING_RST: u8 = 4;
const PENDING_UPDATE: u8 = 8;
const PENDING_ASK: u8 = 16;

/// No deadline.
pub const NEVER_NS: u64 = u64::MAX;

/// See the module's text. All counts are modulo 2^32, as on the wire.
#[derive(Debug)]
pub struct Connection {
    key: Key,
    phase: Phase,
    pending: u8,
    /// Our buffer, and what went in and out of it.
    buf_alloc: u32,
    rx_cnt: u32,
    fwd_cnt: u32,
    told_fwd_cnt: u32,
    /// The guest's buffer, what it took, what we sent.
    guest_buf_alloc: u32,
    guest_fwd_cnt: u32,
    tx_cnt: u32,
    asked_credit: bool,
    /// Directions shut: by the guest, by the far end, and what of the latter the guest knows.
    guest_shut: u8,
    far_shut: u8,
    told_shut: u8,
    deadline_ns: u64,
}

impl Connection {
    fn new(key: Key, phase: Phase, pending: u8, buf_alloc: u32, deadline_ns: u64) -> Self {
        Self {
            key,
            phase,
            pending,
            buf_alloc,
            rx_cnt: 0,
            fwd_cnt: 0,
            told_fwd_cnt: 0,
            guest_buf_alloc: 0,
            guest_fwd_cnt: 0,
            tx_cnt: 0,
            asked_credit: false,
            guest_shut: 0,
            far_shut: 0,
            told_shut: 0,
            deadline_ns,
        }
    }

    /// The guest asked for it with `request`.
    pub fn incoming(request: &Header, buf_alloc: u32, deadline_ns: u64) -> Self {
        let mut c = Self::new(request.key, Phase::Answering, 0, buf_alloc, deadline_ns);
        c.take_credit(request);
        c
    }

    /// We ask the guest for it.
    pub fn outgoing(key: Key, buf_alloc: u32, deadline_ns: u64) -> Self {
        Self::new(key, Phase::Asking, PENDING_REQUEST, buf_alloc, deadline_ns)
    }

    /// Its name in the guest.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// True while one end has not answered.
    pub fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Asking | Phase::Answering)
    }

    /// When it must be looked at ([`NEVER_NS`]: never).
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Sets when it must be looked at.
    pub fn set_deadline_ns(&mut self, at_ns: u64) {
        self.deadline_ns = at_ns;
    }

    /// Bytes of the guest that the other end has not taken: what the buffer holds.
    pub fn unread(&self) -> u32 {
        self.rx_cnt.wrapping_sub(self.fwd_cnt)
    }

    /// Directions that the guest shut.
    pub fn guest_shut(&self) -> u8 {
        self.guest_shut
    }

    /// Directions that the far end shut.
    pub fn far_shut(&self) -> u8 {
        self.far_shut
    }

    /// Takes in a packet of the guest.
    pub fn on_packet(&mut self, h: &Header) -> Event {
        if h.op == Op::Rst {
            return Event::Reset;
        }
        if self.phase == Phase::Closing {
            return Event::Nothing;
        }
        self.take_credit(h);
        match (self.phase, h.op) {
            (_, Op::CreditUpdate) => Event::Nothing,
            (Phase::Asking, Op::Response) => {
                if self.pending & PENDING_REQUEST != 0 {
                    return Event::Violation("response before the request was sent");
                }
                self.phase = Phase::Open;
                self.deadline_ns = NEVER_NS;
                Event::Accepted
            }
            (Phase::Open, Op::Rw) => self.on_data(h.len),
            (Phase::Open, Op::Shutdown) => self.on_shutdown(h.flags),
            (Phase::Open, Op::CreditRequest) => {
                self.pending |= PENDING_UPDATE;
                Event::Nothing
            }
            (Phase::Asking | Phase::Answering, _) => {
                Event::Violation("only an answer is expected while connecting")
            }
            (_, Op::Request | Op::Response) => Event::Violation("already connected"),
            (Phase::Closing, _) | (_, Op::Rst) => Event::Nothing,
        }
    }

    fn on_data(&mut self, len: u32) -> Event {
        if self.guest_shut & SHUT_SEND != 0 {
            return Event::Violation("data after the guest shut that direction");
        }
        if len > self.buf_alloc.saturating_sub(self.unread()) {
            return Event::Violation("more data than our credit allows");
        }
        if len == 0 {
            return Event::Nothing;
        }
        self.rx_cnt = self.rx_cnt.wrapping_add(len);
        Event::Data(len)
    }

    fn on_shutdown(&mut self, flags: u32) -> Event {
        let new = (flags as u8 & SHUT_BOTH) & !self.guest_shut;
        if new == 0 {
            return Event::Nothing;
        }
        self.guest_shut |= new;
        if self.guest_shut == SHUT_BOTH {
            // The guest waits for this before it forgets the connection (5.10.6.5).
            self.phase = Phase::Closing;
            self.pending = PENDING_RST;
            self.deadline_ns = NEVER_NS;
        }
        Event::Shutdown(new)
    }

    /// Packets can overtake each other inside a guest, so a count that goes back is an old one;
    /// a count of bytes we never sent is a lie. Neither ever raises the credit.
    fn take_credit(&mut self, h: &Header) {
        self.guest_buf_alloc = h.buf_alloc;
        if self.tx_cnt.wrapping_sub(h.fwd_cnt) <= self.in_flight() {
            self.guest_fwd_cnt = h.fwd_cnt;
        }
        if self.credit() > 0 {
            self.asked_credit = false;
        }
    }

    fn in_flight(&self) -> u32 {
        self.tx_cnt.wrapping_sub(self.guest_fwd_cnt)
    }

    fn credit(&self) -> u32 {
        self.guest_buf_alloc.saturating_sub(self.in_flight())
    }

    /// The other end accepted the guest's request.
    pub fn accept(&mut self) {
        if self.phase == Phase::Answering {
            self.phase = Phase::Open;
            self.pending |= PENDING_RESPONSE;
            self.deadline_ns = NEVER_NS;
        }
    }

    /// Ends it: the guest gets a reset, or nothing when it was never asked.
    pub fn abort(&mut self) {
        let unknown_to_guest = self.pending & PENDING_REQUEST != 0;
        self.phase = Phase::Closing;
        self.pending = if unknown_to_guest { 0 } else { PENDING_RST };
        self.deadline_ns = NEVER_NS;
        self.fwd_cnt = self.rx_cnt;
    }

    /// The far end shut these directions.
    pub fn far_shutdown(&mut self, flags: u8) {
        self.far_shut |= flags;
    }

    /// True when bytes may go to the guest, credit aside.
    pub fn may_send(&self) -> bool {
        self.phase == Phase::Open
            && self.pending & PENDING_RESPONSE == 0
            && self.guest_shut & SHUT_RECEIVE == 0
            && self.told_shut & SHUT_SEND == 0
    }

    /// Bytes that the guest takes now.
    pub fn send_room(&self) -> u32 {
        if self.may_send() { self.credit() } else { 0 }
    }

    /// Bytes wait for the guest's credit: asks for it, once.
    pub fn want_credit(&mut self) {
        if self.may_send() && !self.asked_credit {
            self.asked_credit = true;
            self.pending |= PENDING_ASK;
        }
    }

    /// `len` bytes (at most [`Connection::send_room`]) went to the guest.
    pub fn sent(&mut self, len: u32) {
        debug_assert!(len <= self.send_room());
        self.tx_cnt = self.tx_cnt.wrapping_add(len);
    }

    /// `len` bytes (at most [`Connection::unread`]) went to the other end.
    pub fn passed_on(&mut self, len: u32) {
        debug_assert!(len <= self.unread());
        self.fwd_cnt = self.fwd_cnt.wrapping_add(len);
        let untold = self.fwd_cnt.wrapping_sub(self.told_fwd_cnt);
        let sends = self.phase == Phase::Open && self.guest_shut & SHUT_SEND == 0;
        if sends && untold >= self.buf_alloc / 2 {
            self.pending |= PENDING_UPDATE;
        }
    }

    fn untold_shut(&self, far_empty: bool) -> u8 {
        let new = self.far_shut & !self.told_shut;
        // The end of the bytes is told after the bytes, unless the guest wants none.
        if far_empty || self.guest_shut & SHUT_RECEIVE != 0 { new } else { new & SHUT_RECEIVE }
    }

    /// The packet without payload that the guest must get next, if any. `far_empty`: no bytes for
    /// the guest wait at the far end.
    pub fn next_op(&self, far_empty: bool) -> Option<Op> {
        let first = [
            (PENDING_RST, Op::Rst),
            (PENDING_REQUEST, Op::Request),
            (PENDING_RESPONSE, Op::Response),
            (PENDING_ASK, Op::CreditRequest),
            (PENDING_UPDATE, Op::CreditUpdate),
        ];
        if let Some((_, op)) = first.into_iter().find(|(bit, _)| self.pending & bit != 0) {
            return Some(op);
        }
        (self.phase == Phase::Open && self.untold_shut(far_empty) != 0).then_some(Op::Shutdown)
    }

    /// As [`Connection::next_op`]; the packet's header, for the guest `cid`, counts as sent.
    pub fn take_op(&mut self, far_empty: bool, cid: u32, now_ns: u64) -> Option<(Op, RawHeader)> {
        let op = self.next_op(far_empty)?;
        let mut flags = 0;
        match op {
            Op::Rst => self.pending = 0,
            Op::Request => self.pending &= !PENDING_REQUEST,
            Op::Response => self.pending &= !PENDING_RESPONSE,
            Op::CreditRequest => self.pending &= !PENDING_ASK,
            Op::CreditUpdate | Op::Rw => {}
            Op::Shutdown => {
                flags = self.untold_shut(far_empty);
                self.told_shut |= flags;
                if self.told_shut == SHUT_BOTH {
                    self.deadline_ns = now_ns.saturating_add(CLOSE_TIMEOUT_NS);
                }
            }
        }
        let mut header = self.header(op, cid, 0);
        header.flags = u32::from(flags).into();
        Some((op, header))
    }

    /// The header of a packet to the guest `cid`; tells it our credit as every packet does.
    pub fn header(&mut self, op: Op, cid: u32, len: u32) -> RawHeader {
        self.pending &= !PENDING_UPDATE;
        self.told_fwd_cnt = self.fwd_cnt;
        RawHeader {
            len: len.into(),
            buf_alloc: self.buf_alloc.into(),
            fwd_cnt: self.fwd_cnt.into(),
            ..RawHeader::to_guest(self.key, cid, op)
        }
    }
}

#[cfg(test)]
mod tests;
