//! Two network ports: floods from one to the other, and ping-pong between them.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::driver::{Asked, Buffers, Driver, RX, TX, VNET_LEN};
use crate::error::FrontendError;
use crate::frame::{MAX_FRAME, MIN_FRAME, STATION_A, STATION_B, check_payload, write_payload};
use crate::port::{Reach, SILENCE_S, sleep_on};
use crate::report::{Meter, Report};
use crate::ring::{RingShape, Used};

/// Frames handled between two looks at the other direction.
const BATCH: usize = 32;
/// Looks at the clock are this many rounds apart.
const ROUNDS_PER_LOOK: u32 = 8;

/// How long a first frame is waited for before it is sent again.
const GREETING: Duration = Duration::from_millis(100);

/// Traffic pattern of a network run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Mode {
    /// Flood: as many frames as go from a to b.
    Flood,
    /// One frame under way: a to b, and back.
    RoundTrip,
}

/// A network run.
#[derive(Debug, Clone, Copy)]
pub struct NetRun {
    /// Traffic pattern.
    pub mode: Mode,
    /// All four queues.
    pub shape: RingShape,
    /// Receive buffers may be smaller than frames.
    pub mergeable: bool,
    /// With Ethernet header, without virtio-net header.
    pub frame_bytes: usize,
    /// Compare every byte.
    pub verify: bool,
    /// Sleep on interrupts instead of polling.
    pub wait: bool,
    /// Guest memory of huge pages.
    pub huge: bool,
}

/// The receiving side: puts mergeable buffers together and checks what came.
#[derive(Debug, Default)]
struct Receiver {
    /// Buffers of the frame that are still to come.
    rest: u16,
    /// Bytes of it so far.
    len: usize,
    frame: Vec<u8>,
    next_seq: u64,
    gaps: u64,
}

impl Receiver {
    /// One used buffer; true when it ends a frame.
    #[inline]
    fn take(&mut self, buf: &mut Buffers, used: Used, run: &NetRun) -> Result<bool, FrontendError> {
        let k = usize::from(used.token);
        let written = used.written.map_or(buf.len, |n| n as usize);
        if written > buf.len {
            let text = format!("{written} bytes written into a buffer of {}", buf.len);
            return Err(FrontendError::Ring(text));
        }
        if self.rest == 0 {
            self.len = 0;
            self.frame.clear();
            self.rest = 1;
            if run.mergeable {
                let head = &buf.bytes(k)[..VNET_LEN];
                self.rest = u16::from_le_bytes([head[10], head[11]]).max(1);
            }
        }
        self.rest -= 1;
        self.len += written;
        if run.verify {
            self.frame.extend_from_slice(&buf.bytes(k)[..written]);
        }
        if self.rest > 0 {
            return Ok(false);
        }
        self.check(run)?;
        Ok(true)
    }

    fn check(&mut self, run: &NetRun) -> Result<(), FrontendError> {
        if self.len != VNET_LEN + run.frame_bytes {
            let text =
                format!("a frame of {} bytes, sent {}", self.len, VNET_LEN + run.frame_bytes);
            return Err(FrontendError::Content(text));
        }
        if run.verify {
            let seq = check_payload(&self.frame[VNET_LEN..]);
            let seq = seq.ok_or_else(|| FrontendError::Content("bytes of a frame".to_owned()))?;
            if seq < self.next_seq {
                let text = format!("frame {seq} after {}", self.next_seq);
                return Err(FrontendError::Content(text));
            }
            self.gaps += seq - self.next_seq;
            self.next_seq = seq + 1;
        }
        Ok(())
    }
}

/// Two stations on one back end.
pub struct NetPair {
    run: NetRun,
    a: Driver,
    b: Driver,
    receiver: Receiver,
    free: Vec<u16>,
    sent: u64,
    received: u64,
}

impl NetPair {
    /// Connects and starts both ports.
    pub fn start(a: Reach<'_>, b: Reach<'_>, run: NetRun) -> Result<Self, FrontendError> {
        let len = run.frame_bytes;
        if !(MIN_FRAME..=MAX_FRAME).contains(&len) {
            let text = format!("frame of {len} bytes: {MIN_FRAME} to {MAX_FRAME} allowed");
            return Err(FrontendError::Usage(text));
        }
        let asked = Asked {
            shape: run.shape,
            mergeable: run.mergeable,
            frame_bytes: run.frame_bytes,
            huge: run.huge,
        };
        let mut a = Driver::new(a, asked, STATION_A, STATION_B)?;
        let mut b = Driver::new(b, asked, STATION_B, STATION_A)?;
        a.post_all()?;
        b.post_all()?;
        let free = (0..a.tx.count as u16).rev().collect();
        let receiver = Receiver::default();
        let mut pair = Self { run, a, b, receiver, free, sent: 0, received: 0 };
        pair.introduce()?;
        Ok(pair)
    }

    /// A frame from b to a, then one from a to b: a learning back end knows both then.
    fn introduce(&mut self) -> Result<(), FrontendError> {
        greet(&mut self.b, &mut self.a)?;
        greet(&mut self.a, &mut self.b)
    }

    /// Runs for `run_ns`.
    pub fn run(&mut self, run_ns: u64) -> Result<Report, FrontendError> {
        let (sent, received) = (self.sent, self.received);
        let before = self.counts();
        let mut meter = Meter::start(run_ns)?;
        match self.run.mode {
            Mode::Flood => self.flood(&mut meter)?,
            Mode::RoundTrip => self.round_trips(&mut meter)?,
        }
        let mut report = meter.report(self.run.frame_bytes as u64)?;
        let after = self.counts();
        (report.kicks, report.interrupts) = (after.0 - before.0, after.1 - before.1);
        if self.run.mode == Mode::Flood {
            // What is under way now is not lost: a ring's worth.
            let under_way = u64::from(self.run.shape.size);
            let missing = (self.sent - sent).saturating_sub(self.received - received);
            report.lost = missing.saturating_sub(under_way).max(self.receiver.gaps);
        }
        report.verified = self.run.verify;
        Ok(report)
    }

    fn counts(&mut self) -> (u64, u64) {
        let (mut kicks, mut interrupts) = (0, 0);
        for queue in self.a.port.queues.iter_mut().chain(&mut self.b.port.queues) {
            queue.count_interrupts();
            kicks += queue.kicks;
            interrupts += queue.interrupts;
        }
        (kicks, interrupts)
    }

    fn flood(&mut self, meter: &mut Meter) -> Result<(), FrontendError> {
        let (mut rounds, mut silent_since_ns) = (0u32, 0);
        loop {
            let received = self.receive()?;
            meter.ops += received as u64;
            let sent = self.send()?;
            rounds = rounds.wrapping_add(1);
            let idle = received + sent == 0;
            if rounds.is_multiple_of(ROUNDS_PER_LOOK) {
                let now_ns = meter.now_ns();
                if !meter.goes_on(now_ns) {
                    return Ok(());
                }
                if received > 0 {
                    silent_since_ns = now_ns;
                } else if now_ns - silent_since_ns > SILENCE_S * 1_000_000_000 {
                    return Err(FrontendError::Silent { secs: SILENCE_S, what: "a frame" });
                }
            }
            if idle && self.run.wait {
                let (a, b) = (&mut self.a.port.queues, &mut self.b.port.queues);
                sleep_on(&mut [&mut a[TX], &mut b[RX]], "a frame or room for one")?;
            }
        }
    }

    /// Takes what has arrived at b and posts its buffers again; the number of frames.
    #[inline]
    fn receive(&mut self) -> Result<usize, FrontendError> {
        let Driver { port, rx, .. } = &mut self.b;
        let queue = &mut port.queues[RX];
        let (mut frames, mut buffers) = (0, 0);
        while buffers < 2 * BATCH {
            let Some(used) = queue.ring.used()? else { break };
            frames += usize::from(self.receiver.take(rx, used, &self.run)?);
            rx.post(usize::from(used.token), queue);
            buffers += 1;
        }
        if buffers > 0 {
            queue.publish()?;
        }
        self.received += frames as u64;
        Ok(frames)
    }

    /// Takes back what a has sent and sends more; the number of frames.
    #[inline]
    fn send(&mut self) -> Result<usize, FrontendError> {
        let Driver { port, tx, .. } = &mut self.a;
        let queue = &mut port.queues[TX];
        let mut taken = 0;
        while taken < 2 * BATCH {
            let Some(used) = queue.ring.used()? else { break };
            self.free.push(used.token);
            taken += 1;
        }
        self.sent += taken as u64;
        let chain_len = tx.chain_len();
        let mut posted = 0;
        while posted < BATCH && queue.ring.has_room(chain_len) {
            let Some(k) = self.free.pop() else { break };
            let k = usize::from(k);
            if self.run.verify {
                let seq = self.sent + (tx.count - self.free.len() - 1) as u64;
                write_payload(&mut tx.bytes(k)[VNET_LEN..], seq);
            }
            tx.post(k, queue);
            posted += 1;
        }
        if posted > 0 {
            queue.publish()?;
        }
        Ok(posted + taken)
    }

    fn round_trips(&mut self, meter: &mut Meter) -> Result<(), FrontendError> {
        let mut start_ns = meter.now_ns();
        let mut seq = self.receiver.next_seq;
        loop {
            let wait = self.run.wait;
            pass(&mut self.a, &mut self.b, &mut self.receiver, &self.run, seq, wait)?;
            seq += 1;
            pass(&mut self.b, &mut self.a, &mut self.receiver, &self.run, seq, wait)?;
            seq += 1;
            let now_ns = meter.now_ns();
            meter.latency.record(now_ns - start_ns);
            meter.ops += 1;
            if !meter.goes_on(now_ns) {
                return Ok(());
            }
            start_ns = now_ns;
        }
    }

    /// Stops all queues.
    pub fn stop(mut self) -> Result<(), FrontendError> {
        self.a.port.stop()?;
        self.b.port.stop()
    }
}

/// Sends one frame and waits until it has arrived.
#[inline]
fn pass(
    from: &mut Driver,
    to: &mut Driver,
    receiver: &mut Receiver,
    run: &NetRun,
    seq: u64,
    wait: bool,
) -> Result<(), FrontendError> {
    // The one before was used long ago, since it was answered; some back ends say so late.
    let k = (seq / 2) as usize % from.tx.count;
    let tx = &mut from.port.queues[TX];
    while tx.ring.used()?.is_some() {}
    while !tx.ring.has_room(from.tx.chain_len()) {
        while tx.ring.used()?.is_some() {}
    }
    if run.verify {
        write_payload(&mut from.tx.bytes(k)[VNET_LEN..], seq);
    }
    from.tx.post(k, tx);
    tx.publish()?;
    let rx = &mut to.port.queues[RX];
    let (mut arrived, mut spins) = (false, 0u32);
    let mut silent_since = None::<Instant>;
    while !arrived {
        match rx.ring.used()? {
            Some(used) => {
                arrived = receiver.take(&mut to.rx, used, run)?;
                to.rx.post(usize::from(used.token), rx);
            }
            None if wait => sleep_on(&mut [rx], "a frame")?,
            None => {
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(1 << 20) {
                    let since = *silent_since.get_or_insert_with(Instant::now);
                    if since.elapsed().as_secs() >= SILENCE_S {
                        return Err(FrontendError::Silent { secs: SILENCE_S, what: "a frame" });
                    }
                }
            }
        }
    }
    rx.publish()
}

/// Sends a frame, again and again until it arrives: a back end may not be ready at first.
pub(crate) fn greet(from: &mut Driver, to: &mut Driver) -> Result<(), FrontendError> {
    let start = Instant::now();
    let (mut arrived, mut out, mut sent_at) = (false, 0, None::<Instant>);
    while !arrived || out > 0 {
        if start.elapsed().as_secs() >= 2 * SILENCE_S {
            return Err(FrontendError::Silent { secs: 2 * SILENCE_S, what: "the first frame" });
        }
        if !arrived && out == 0 && sent_at.is_none_or(|t| t.elapsed() > GREETING) {
            from.tx.post(0, &mut from.port.queues[TX]);
            from.port.queues[TX].publish()?;
            (sent_at, out) = (Some(Instant::now()), 1);
        }
        out -= usize::from(from.port.queues[TX].ring.used()?.is_some());
        arrived |= drain_all(to)? > 0;
    }
    Ok(())
}

/// Takes whatever has arrived; the number of buffers.
fn drain_all(station: &mut Driver) -> Result<usize, FrontendError> {
    let queue = &mut station.port.queues[RX];
    let mut count = 0;
    while let Some(used) = queue.ring.used()? {
        station.rx.post(usize::from(used.token), queue);
        count += 1;
    }
    queue.publish()?;
    Ok(count)
}
