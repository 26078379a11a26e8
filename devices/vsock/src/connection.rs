//! Connection as one guest sees it: states, credit, packets owed to the guest. No I/O and no
//! clock in here, so that random packets can be thrown at it.
//!
//! Towards its guest, the device ends every connection itself: a connection between two guests is
//! two of these back to back. So the credit that a guest sees is always ours, and no guest's
//! numbers reach another.

use crate::limits::CLOSE_TIMEOUT_NS;
use crate::packet::{ConnectionKey, Header, Op, RawHeader, SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND};

/// State of a connection towards its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The connection was requested by us; the guest has not answered.
    Requesting,
    /// The guest requested the connection; the other end has not answered.
    Responding,
    /// Bytes flow.
    Open,
    /// The connection ends for the guest as soon as the reset is sent.
    Closing,
}

/// Effect of a guest's packet for the engine to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Nothing to do.
    Nothing,
    /// The guest accepted our request.
    Accepted,
    /// Payload of this number of bytes is for the other end; they fit in the buffer.
    Data(u32),
    /// The guest shut these directions (the newly shut ones only).
    Shutdown(u8),
    /// The guest ended the connection.
    Reset,
    /// The guest broke a rule: the connection must be reset.
    Violation(&'static str),
}

const PENDING_REQUEST: u8 = 1;
const PENDING_RESPONSE: u8 = 2;
const PENDING_RST: u8 = 4;
const PENDING_CREDIT_UPDATE: u8 = 8;
const PENDING_CREDIT_REQUEST: u8 = 16;

/// No deadline.
pub const NEVER_NS: u64 = u64::MAX;

/// State of one connection towards one guest. All counts are modulo 2^32, as on the wire.
#[derive(Debug)]
pub struct Connection {
    key: ConnectionKey,
    phase: Phase,
    pending: u8,
    /// Size of our buffer, and the bytes that went in and out of it.
    buf_alloc: u32,
    rx_cnt: u32,
    fwd_cnt: u32,
    announced_fwd_cnt: u32,
    /// Size of the guest's buffer, the bytes that the guest took, the bytes that we sent.
    guest_buf_alloc: u32,
    guest_fwd_cnt: u32,
    tx_cnt: u32,
    has_requested_credit: bool,
    /// Directions shut: by the guest, by the far end, and those of the far end that the guest
    /// knows.
    guest_shut: u8,
    far_shut: u8,
    announced_shut: u8,
    deadline_ns: u64,
}

impl Connection {
    fn new(
        key: ConnectionKey,
        phase: Phase,
        pending: u8,
        buf_alloc: u32,
        deadline_ns: u64,
    ) -> Self {
        Self {
            key,
            phase,
            pending,
            buf_alloc,
            rx_cnt: 0,
            fwd_cnt: 0,
            announced_fwd_cnt: 0,
            guest_buf_alloc: 0,
            guest_fwd_cnt: 0,
            tx_cnt: 0,
            has_requested_credit: false,
            guest_shut: 0,
            far_shut: 0,
            announced_shut: 0,
            deadline_ns,
        }
    }

    /// Makes a connection that the guest asked for with `request`.
    pub fn incoming(request: &Header, buf_alloc: u32, deadline_ns: u64) -> Self {
        let mut c = Self::new(request.key, Phase::Responding, 0, buf_alloc, deadline_ns);
        c.take_credit(request);
        c
    }

    /// Makes a connection for which we ask the guest.
    pub fn outgoing(key: ConnectionKey, buf_alloc: u32, deadline_ns: u64) -> Self {
        Self::new(key, Phase::Requesting, PENDING_REQUEST, buf_alloc, deadline_ns)
    }

    /// Key of the connection in its guest.
    pub fn key(&self) -> ConnectionKey {
        self.key
    }

    /// State of the connection.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether one end has not answered yet.
    pub fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Requesting | Phase::Responding)
    }

    /// Time at which the connection expires ([`NEVER_NS`]: never).
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Sets the time at which the connection expires.
    pub fn set_deadline_ns(&mut self, at_ns: u64) {
        self.deadline_ns = at_ns;
    }

    /// Number of the guest's bytes that the other end has not taken: those in the buffer.
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

    /// Applies a packet of the guest. Returns what the engine must do about it.
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
            (Phase::Requesting, Op::Response) => {
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
                self.pending |= PENDING_CREDIT_UPDATE;
                Event::Nothing
            }
            (Phase::Requesting | Phase::Responding, _) => {
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

    /// Applies the credit in a header. Packets can overtake each other inside a guest, so a count
    /// that goes back is an old one; a count of bytes we never sent is a lie. Neither ever raises
    /// the credit.
    fn take_credit(&mut self, h: &Header) {
        self.guest_buf_alloc = h.buf_alloc;
        if self.tx_cnt.wrapping_sub(h.fwd_cnt) <= self.in_flight() {
            self.guest_fwd_cnt = h.fwd_cnt;
        }
        if self.credit() > 0 {
            self.has_requested_credit = false;
        }
    }

    fn in_flight(&self) -> u32 {
        self.tx_cnt.wrapping_sub(self.guest_fwd_cnt)
    }

    fn credit(&self) -> u32 {
        self.guest_buf_alloc.saturating_sub(self.in_flight())
    }

    /// Notes that the other end accepted the guest's request.
    pub fn accept(&mut self) {
        if self.phase == Phase::Responding {
            self.phase = Phase::Open;
            self.pending |= PENDING_RESPONSE;
            self.deadline_ns = NEVER_NS;
        }
    }

    /// Ends the connection: the guest gets a reset, or nothing when it was never asked.
    pub fn abort(&mut self) {
        let unknown_to_guest = self.pending & PENDING_REQUEST != 0;
        self.phase = Phase::Closing;
        self.pending = if unknown_to_guest { 0 } else { PENDING_RST };
        self.deadline_ns = NEVER_NS;
        self.fwd_cnt = self.rx_cnt;
    }

    /// Notes that the far end shut these directions.
    pub fn far_shutdown(&mut self, flags: u8) {
        self.far_shut |= flags;
    }

    /// Whether bytes may go to the guest, credit aside.
    pub fn may_send(&self) -> bool {
        self.phase == Phase::Open
            && self.pending & PENDING_RESPONSE == 0
            && self.guest_shut & SHUT_RECEIVE == 0
            && self.announced_shut & SHUT_SEND == 0
    }

    /// Number of bytes that the guest takes now.
    pub fn send_room(&self) -> u32 {
        if self.may_send() { self.credit() } else { 0 }
    }

    /// Asks the guest for credit, once, because bytes wait for it.
    pub fn request_credit(&mut self) {
        if self.may_send() && !self.has_requested_credit {
            self.has_requested_credit = true;
            self.pending |= PENDING_CREDIT_REQUEST;
        }
    }

    /// Notes that `len` bytes (at most [`Connection::send_room`]) went to the guest.
    pub fn note_sent(&mut self, len: u32) {
        debug_assert!(len <= self.send_room());
        self.tx_cnt = self.tx_cnt.wrapping_add(len);
    }

    /// Notes that `len` bytes (at most [`Connection::unread`]) went to the other end.
    pub fn note_forwarded(&mut self, len: u32) {
        debug_assert!(len <= self.unread());
        self.fwd_cnt = self.fwd_cnt.wrapping_add(len);
        let unannounced = self.fwd_cnt.wrapping_sub(self.announced_fwd_cnt);
        let sends = self.phase == Phase::Open && self.guest_shut & SHUT_SEND == 0;
        if sends && unannounced >= self.buf_alloc / 2 {
            self.pending |= PENDING_CREDIT_UPDATE;
        }
    }

    fn unannounced_shut(&self, far_empty: bool) -> u8 {
        let new = self.far_shut & !self.announced_shut;
        // The end of the bytes is told after the bytes, unless the guest wants none.
        if far_empty || self.guest_shut & SHUT_RECEIVE != 0 { new } else { new & SHUT_RECEIVE }
    }

    /// Packet without payload that the guest must get next, if any. `far_empty`: no bytes for
    /// the guest wait at the far end.
    pub fn next_op(&self, far_empty: bool) -> Option<Op> {
        let first = [
            (PENDING_RST, Op::Rst),
            (PENDING_REQUEST, Op::Request),
            (PENDING_RESPONSE, Op::Response),
            (PENDING_CREDIT_REQUEST, Op::CreditRequest),
            (PENDING_CREDIT_UPDATE, Op::CreditUpdate),
        ];
        if let Some((_, op)) = first.into_iter().find(|(bit, _)| self.pending & bit != 0) {
            return Some(op);
        }
        (self.phase == Phase::Open && self.unannounced_shut(far_empty) != 0).then_some(Op::Shutdown)
    }

    /// Takes the packet of [`Connection::next_op`], with its header for the guest `cid`; it counts
    /// as sent.
    pub fn take_op(&mut self, far_empty: bool, cid: u32, now_ns: u64) -> Option<(Op, RawHeader)> {
        let op = self.next_op(far_empty)?;
        let mut flags = 0;
        match op {
            Op::Rst => self.pending = 0,
            Op::Request => self.pending &= !PENDING_REQUEST,
            Op::Response => self.pending &= !PENDING_RESPONSE,
            Op::CreditRequest => self.pending &= !PENDING_CREDIT_REQUEST,
            Op::CreditUpdate | Op::Rw => {}
            Op::Shutdown => {
                flags = self.unannounced_shut(far_empty);
                self.announced_shut |= flags;
                if self.announced_shut == SHUT_BOTH {
                    self.deadline_ns = now_ns.saturating_add(CLOSE_TIMEOUT_NS);
                }
            }
        }
        let mut header = self.header(op, cid, 0);
        header.flags = u32::from(flags).into();
        Some((op, header))
    }

    /// Makes the header of a packet to the guest `cid`, with our credit, as every packet has it.
    pub fn header(&mut self, op: Op, cid: u32, len: u32) -> RawHeader {
        self.pending &= !PENDING_CREDIT_UPDATE;
        self.announced_fwd_cnt = self.fwd_cnt;
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
