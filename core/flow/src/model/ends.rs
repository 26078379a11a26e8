//! The ends: one small TCP for all.

use crate::FlowKey;
use crate::segment::{ACK, FIN, PSH, after};
use crate::testing::{Build, Read, sacks, timestamps};

pub const MSS: usize = 300;
/// All windows are scaled by so much.
pub const SCALE: u8 = 2;
const RTO_TICKS: u32 = 60;

/// The byte at that place of a stream.
pub fn content(stream: u8, at: u32) -> u8 {
    (at.wrapping_mul(0x9e37_79b1) >> 21) as u8 ^ stream
}

/// One end of a connection. Places are counted from the first byte of its direction.
#[derive(Debug)]
pub struct End {
    pub name: &'static str,
    pub key: FlowKey,
    pub now: u32,
    pub clock: u32,
    pub has_timestamps: bool,
    pub has_sack: bool,
    /// Number of the first byte that it sends, and receives.
    pub first: u32,
    pub their_first: u32,
    /// Bytes that it has to send; content and place are the same for all but the guest.
    pub written: Vec<u8>,
    /// Whether it closes when all is sent.
    pub closes: bool,
    pub una: u32,
    pub nxt: u32,
    /// End of the window up to which it may send.
    pub edge: u32,
    last_window_at: (i32, u32),
    timer: u32,
    /// Bytes that came; `next` of them in order.
    pub came: Vec<Option<u8>>,
    pub next: u32,
    pub fin_at: Option<u32>,
    unread: u32,
    pub buffer: u32,
    last_window: u32,
    pub recent_ts: Option<u32>,
    ack_due: Option<u32>,
    last_reply: u32,
}

impl End {
    pub fn new(name: &'static str, key: FlowKey, first: u32, their_first: u32, clock: u32) -> Self {
        Self {
            name,
            key,
            now: 0,
            clock,
            has_timestamps: false,
            has_sack: false,
            first,
            their_first,
            written: Vec::new(),
            closes: false,
            una: 0,
            nxt: 0,
            edge: 4000,
            last_window_at: (0, 0),
            timer: 0,
            came: Vec::new(),
            next: 0,
            fin_at: None,
            unread: 0,
            buffer: 4000,
            last_window: 4000,
            recent_ts: None,
            ack_due: None,
            last_reply: 0,
        }
    }

    /// State in one line: written, acknowledged, sent, may send; received, end, not read.
    pub fn brief(&self) -> String {
        let Self { name, una, nxt, edge, next, fin_at, unread, .. } = self;
        format!("{name} {} {una} {nxt} {edge} {next} {fin_at:?} {unread}", self.len())
    }

    fn len(&self) -> u32 {
        self.written.len() as u32
    }

    /// Everything, also the end, was acknowledged.
    pub fn is_all_acked(&self) -> bool {
        self.una == self.len() + u32::from(self.closes)
    }

    pub fn is_all_read(&self) -> bool {
        self.fin_at == Some(self.next.wrapping_sub(1))
    }

    fn window(&self) -> u32 {
        // Never less than was promised.
        let free = self.buffer.saturating_sub(self.unread);
        (free >> SCALE).max((self.last_window.saturating_sub(self.next)) >> SCALE)
    }

    fn segment(&mut self, flags: u8, at: u32, len: usize) -> Vec<u8> {
        let window = self.window();
        self.last_window = self.last_window.max(self.next + (window << SCALE));
        self.ack_due = None;
        let seq = self.first.wrapping_add(at);
        let mut out =
            Build::new(self.key, flags | ACK, seq, self.their_first.wrapping_add(self.next));
        out.window = window as u16;
        if self.has_timestamps {
            let value = self.clock.wrapping_add(self.now);
            out.options = timestamps(value, self.recent_ts.unwrap_or(0));
        }
        if self.has_sack && !self.blocks().is_empty() && len == 0 {
            out.options.extend(sacks(&self.blocks()));
        }
        if len > 0 {
            out.payload = self.written[at as usize..at as usize + len].to_vec();
        }
        out.frame()
    }

    /// Up to three pieces that came too early.
    fn blocks(&self) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        let mut at = self.next as usize;
        while at < self.came.len() && out.len() < 3 {
            let Some(from) = (at..self.came.len()).find(|&k| self.came[k].is_some()) else { break };
            let end = (from..self.came.len()).find(|&k| self.came[k].is_none());
            let end = end.unwrap_or(self.came.len());
            let number = |k: usize| self.their_first.wrapping_add(k as u32);
            out.push((number(from), number(end)));
            at = end;
        }
        out
    }

    /// An acknowledgement.
    pub fn ack(&mut self) -> Vec<u8> {
        self.segment(0, self.nxt, 0)
    }

    /// A probe of an idle connection, or of a closed window.
    pub fn probe(&mut self) -> Vec<u8> {
        let (una, first) = (self.una, self.first);
        self.first = first.wrapping_sub(1);
        let out = self.segment(0, una, 0);
        self.first = first;
        out
    }

    /// Sends what it may now. `stretch`: how long a resend may be.
    pub fn tick(&mut self, stretch: usize) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        let sendable = self.len();
        if self.una < self.nxt && self.now.wrapping_sub(self.timer) > RTO_TICKS {
            self.timer = self.now;
            let len = (self.nxt.min(sendable).saturating_sub(self.una) as usize).min(stretch);
            let is_last = self.closes && self.una + len as u32 == sendable && self.nxt > sendable;
            out.push(self.segment(if is_last { FIN } else { PSH }, self.una, len));
        }
        while self.nxt < sendable && self.nxt < self.edge {
            let len = (sendable.min(self.edge) - self.nxt).min(MSS as u32);
            if self.una == self.nxt {
                self.timer = self.now;
            }
            out.push(self.segment(PSH, self.nxt, len as usize));
            self.nxt += len;
        }
        if self.nxt == sendable && self.closes {
            if self.una == self.nxt {
                self.timer = self.now;
            }
            out.push(self.segment(FIN, self.nxt, 0));
            self.nxt += 1;
        }
        let is_stuck = self.una == self.nxt && self.nxt < sendable;
        if is_stuck && self.now.wrapping_sub(self.timer) > RTO_TICKS {
            self.timer = self.now;
            out.push(self.probe());
        }
        let opened = self.window() << SCALE;
        let is_news = opened > 0 && self.next + opened >= self.last_window + 2 * MSS as u32;
        if is_news || self.ack_due.is_some_and(|due| due <= self.now) {
            out.push(self.ack());
        }
        out
    }

    /// How much of it the program has taken.
    pub fn taken(&self) -> u32 {
        self.next - self.unread
    }

    /// The window with which it begins, in bytes.
    pub fn open(&mut self, window: u32) {
        self.last_window = window;
    }

    /// The program takes what came.
    pub fn read(&mut self, most: u32) {
        self.unread = self.unread.saturating_sub(most);
    }

    fn reply(&mut self, is_data: bool) -> Option<Vec<u8>> {
        // As Linux limits answers to what is out of place.
        if !is_data && self.now.wrapping_sub(self.last_reply) < 10 {
            return None;
        }
        self.last_reply = self.now;
        Some(self.ack())
    }

    /// A segment came, undamaged. Returns what it says to it at once.
    pub fn take(&mut self, read: &Read, delay_acks: bool) -> Option<Vec<u8>> {
        let at = read.seq.wrapping_sub(self.their_first) as i32;
        let len = read.payload.len() as i32;
        let end = at + len + i32::from(read.flags & FIN != 0);
        if let (Some((value, _)), Some(recent)) = (read.timestamps, self.recent_ts)
            && after(recent, value)
        {
            return self.reply(end > at);
        }
        if end < self.next as i32 || at > self.last_window as i32 {
            return self.reply(end > at);
        }
        if let Some((value, _)) = read.timestamps
            && at <= self.next as i32
        {
            self.recent_ts = Some(value);
        }
        self.take_ack(read, at);
        if end == at {
            return None;
        }
        let before = self.next;
        for (k, byte) in read.payload.iter().enumerate() {
            let place = at + k as i32;
            if place < self.next as i32 || place >= self.last_window as i32 {
                continue;
            }
            if self.came.len() <= place as usize {
                self.came.resize(place as usize + 1, None);
            }
            let slot = &mut self.came[place as usize];
            assert!(slot.is_none_or(|was| was == *byte), "{}: two contents of {place}", self.name);
            *slot = Some(*byte);
        }
        if read.flags & FIN != 0 {
            let place = (at + len) as u32;
            assert!(self.fin_at.is_none_or(|was| was == place), "{}: two ends", self.name);
            self.fin_at = Some(place);
        }
        while self.came.get(self.next as usize).is_some_and(Option::is_some) {
            self.next += 1;
        }
        self.unread += self.next - before;
        if self.fin_at == Some(self.next) {
            self.next += 1;
        }
        if self.next == before || !delay_acks || read.flags & FIN != 0 {
            return self.reply(true);
        }
        self.ack_due = self.ack_due.or(Some(self.now + 40));
        None
    }

    fn take_ack(&mut self, read: &Read, at: i32) {
        let ack = read.ack.wrapping_sub(self.first);
        let ahead = ack.wrapping_sub(self.nxt) as i32;
        assert!(ahead <= 0, "{}: {ahead} beyond what was sent are acknowledged", self.name);
        for (left, right) in &read.sacks {
            let (left, right) = (left.wrapping_sub(self.first), right.wrapping_sub(self.first));
            assert!(left < right && right <= self.nxt, "{}: block {left}..{right}", self.name);
        }
        let gained = ack.wrapping_sub(self.una) as i32;
        if gained < 0 {
            return;
        }
        if gained > 0 {
            self.una = ack;
            self.timer = self.now;
        }
        if (at, ack) >= self.last_window_at {
            self.last_window_at = (at, ack);
            self.edge = ack + (u32::from(read.window) << SCALE);
        }
    }
}
