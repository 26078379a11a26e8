//! Actors of one thread: in turn they send, receive, answer, ask a disk. No turn waits.

use std::time::Instant;

use crate::disk::DiskLoad;
use crate::driver::{Driver, RX, TX, VNET_LEN};
use crate::error::FrontendError;
use crate::frame::{read_seq, sender, write_seq};

use super::tally::Tally;

/// Frames posted in a turn: with more, who waits for an answer waits for this turn.
const BATCH: usize = 32;
/// Frames of a hostile sender in a turn: as many as it takes to be a nuisance, and few enough that
/// the victim's latency is not our own delay.
const HOSTILE_BATCH: usize = 4;
/// A frame that is not answered for so long is lost. Longer than a switch holds frames back.
const LOST_NS: u64 = 50_000_000;

/// State that all actors share: clock, ports and tallies.
pub struct Stage {
    /// The run's clock.
    pub start: Instant,
    /// Network ports.
    pub ports: Vec<NetPort>,
    /// One for each load.
    pub tallies: Vec<Tally>,
}

impl Stage {
    /// Nanoseconds since the start.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// A network port and the frames that are ours to send.
pub struct NetPort {
    /// Driver of the port's queues.
    pub driver: Driver,
    /// Number of the port's station.
    pub station: u16,
    free: Vec<u16>,
}

impl NetPort {
    /// A port whose driver has nothing under way.
    pub fn new(driver: Driver, station: u16) -> Self {
        let free = (0..driver.tx.count as u16).rev().collect();
        Self { driver, station, free }
    }

    /// Takes back at most `most` frames that were sent; how many.
    #[inline]
    fn take_back(&mut self, most: usize) -> Result<usize, FrontendError> {
        let ring = &mut self.driver.port.queues[TX].ring;
        let mut taken = 0;
        while taken < most {
            let Some(used) = ring.used()? else { break };
            self.free.push(used.token);
            taken += 1;
        }
        Ok(taken)
    }

    /// Posts a frame; none when all are under way. Not yet published.
    #[inline]
    fn post(&mut self, seq: Option<u64>) -> bool {
        let Driver { port, tx, .. } = &mut self.driver;
        if !port.queues[TX].ring.has_room(tx.chain_len()) {
            return false;
        }
        let Some(k) = self.free.pop() else { return false };
        let k = usize::from(k);
        if let Some(seq) = seq {
            write_seq(&mut tx.bytes(k)[VNET_LEN..], seq);
        }
        tx.post(k, &mut port.queues[TX]);
        true
    }

    /// Whether the back end has nothing left to take from here.
    #[inline]
    fn is_dry(&self) -> bool {
        self.free.len() == self.driver.tx.count
    }

    /// Takes at most `most` frames that came, shows each to `seen` with its length, and posts its
    /// buffer again.
    #[inline]
    fn receive(
        &mut self,
        most: usize,
        mut seen: impl FnMut(&[u8], u64),
        look: bool,
    ) -> Result<(), FrontendError> {
        let Driver { port, rx, .. } = &mut self.driver;
        let queue = &mut port.queues[RX];
        let mut count = 0;
        while count < most {
            let Some(used) = queue.ring.used()? else { break };
            let (k, written) = (usize::from(used.token), used.written.map_or(0, |n| n as usize));
            if written > rx.len {
                let text = format!("{written} bytes written into a buffer of {}", rx.len);
                return Err(FrontendError::Ring(text));
            }
            let len = written.saturating_sub(VNET_LEN);
            let frame = if look { &rx.bytes(k)[VNET_LEN..VNET_LEN + len] } else { &[] };
            seen(frame, len as u64);
            rx.post(k, queue);
            count += 1;
        }
        if count > 0 { queue.publish() } else { Ok(()) }
    }
}

/// One thing to do in turn.
pub enum Actor {
    /// Keeps a port's transmit ring full.
    Sender(Sender),
    /// Takes what arrives.
    Sink(Sink),
    /// One frame to and fro.
    RoundTrip(RoundTrip),
    /// A disk.
    Disk(Box<Disk>),
}

impl Actor {
    /// Does what there is to do; `on`: the load's time has come and is not over. A sink takes what
    /// arrives in any case.
    #[inline]
    pub fn turn(&mut self, stage: &mut Stage, now_ns: u64) -> Result<(), FrontendError> {
        match self {
            Self::Sender(a) => a.turn(stage, now_ns),
            Self::Sink(a) => a.turn(stage),
            Self::RoundTrip(a) => a.turn(stage, now_ns),
            Self::Disk(a) => a.turn(stage, now_ns),
        }
    }
}

/// State of [`Actor::Sender`].
pub struct Sender {
    /// Index of the sender's load.
    pub load: usize,
    /// Index of the port that it sends on.
    pub port: usize,
    /// When it sends, nanoseconds.
    pub span_ns: std::ops::Range<u64>,
    /// Kicks in every turn, and counts what was taken: nothing of it arrives anywhere.
    pub hostile: bool,
    /// Counts what was taken: nobody takes what arrives.
    pub unheard: bool,
}

impl Sender {
    fn turn(&mut self, stage: &mut Stage, now_ns: u64) -> Result<(), FrontendError> {
        let port = &mut stage.ports[self.port];
        let tally = &mut stage.tallies[self.load];
        let taken = port.take_back(2 * BATCH)?;
        tally.taken += taken as u64;
        if self.hostile || self.unheard {
            let bytes = port.driver.tx.len - VNET_LEN;
            tally.add(now_ns, taken as u64, (taken * bytes) as u64);
        }
        if !self.span_ns.contains(&now_ns) {
            return Ok(());
        }
        tally.turns += 1;
        tally.dry += u64::from(port.is_dry());
        let most = if self.hostile { HOSTILE_BATCH } else { BATCH };
        let mut posted = 0;
        while posted < most && port.post(None) {
            posted += 1;
        }
        let queues = &mut port.driver.port.queues;
        if posted > 0 {
            queues[TX].publish()?;
        }
        if self.hostile {
            queues[TX].kick()?;
            queues[RX].kick()?;
        }
        Ok(())
    }
}

/// State of [`Actor::Sink`].
pub struct Sink {
    /// Index of the sink's port.
    pub port: usize,
    /// The load of its only sender, or those of all by their stations.
    pub from: Senders,
}

/// Senders to a sink.
pub enum Senders {
    /// One: no look at the frames.
    Only(usize),
    /// Station and load of each, by station.
    Several(Vec<(u16, usize)>),
}

impl Sink {
    fn turn(&mut self, stage: &mut Stage) -> Result<(), FrontendError> {
        let now_ns = stage.now_ns();
        let Stage { ports, tallies, .. } = stage;
        let port = &mut ports[self.port];
        match &self.from {
            Senders::Only(load) => {
                let (mut ops, mut bytes) = (0, 0);
                let count = |_: &[u8], len| (ops, bytes) = (ops + 1, bytes + len);
                port.receive(2 * BATCH, count, false)?;
                tallies[*load].add(now_ns, ops, bytes);
                Ok(())
            }
            Senders::Several(loads) => {
                let count = |frame: &[u8], len| {
                    let Some(station) = sender(frame) else { return };
                    if let Ok(at) = loads.binary_search_by_key(&station, |l| l.0) {
                        tallies[loads[at].1].add(now_ns, 1, len);
                    }
                };
                port.receive(2 * BATCH, count, true)
            }
        }
    }
}

/// State of [`Actor::RoundTrip`].
pub struct RoundTrip {
    /// Index of the round trips' load.
    pub load: usize,
    /// Indices of the ports that ask and that answer.
    pub ports: [usize; 2],
    /// When, nanoseconds.
    pub span_ns: std::ops::Range<u64>,
    /// Number of the frame under way.
    pub seq: u64,
    /// Time at which frame `seq` was sent; none: no frame is under way.
    pub asked_ns: Option<u64>,
}

impl RoundTrip {
    fn turn(&mut self, stage: &mut Stage, now_ns: u64) -> Result<(), FrontendError> {
        let [a, b] = self.ports;
        let (asker, answerer) = (stage.ports[a].station, stage.ports[b].station);
        let seq = self.seq;
        // Others' broadcasts arrive as well.
        let mut asked = false;
        let ours = |frame: &[u8], from| sender(frame) == Some(from) && read_seq(frame) == Some(seq);
        stage.ports[b].receive(BATCH, |f, _| asked |= ours(f, asker), true)?;
        if asked {
            self.send(stage, b)?;
        }
        let mut answered = false;
        stage.ports[a].receive(BATCH, |f, _| answered |= ours(f, answerer), true)?;
        let now_ns = if asked || answered { stage.now_ns() } else { now_ns };
        if let Some(asked_ns) = self.asked_ns {
            let took_ns = now_ns.saturating_sub(asked_ns);
            let tally = &mut stage.tallies[self.load];
            if answered {
                tally.latency(now_ns, took_ns);
                tally.add(now_ns, 1, (stage.ports[a].driver.tx.len - VNET_LEN) as u64);
            } else if took_ns < LOST_NS {
                return Ok(());
            } else {
                tally.lost += 1;
            }
            self.asked_ns = None;
        }
        if self.span_ns.contains(&now_ns) {
            self.seq += 1;
            if self.send(stage, a)? {
                self.asked_ns = Some(now_ns);
            }
        }
        Ok(())
    }

    fn send(&mut self, stage: &mut Stage, port: usize) -> Result<bool, FrontendError> {
        let port = &mut stage.ports[port];
        stage.tallies[self.load].taken += port.take_back(BATCH)? as u64;
        let posted = port.post(Some(self.seq));
        if posted {
            port.driver.port.queues[TX].publish()?;
        }
        Ok(posted)
    }
}

/// State of [`Actor::Disk`].
pub struct Disk {
    /// Index of the disk's load.
    pub load: usize,
    /// The disk.
    pub disk: DiskLoad,
    /// When, nanoseconds.
    pub span_ns: std::ops::Range<u64>,
    /// Requests kept under way.
    pub depth: usize,
    /// Length of each request.
    pub block_bytes: usize,
    /// Takes no completion while its time lasts.
    pub stalls: bool,
    /// Requests under way.
    pub out: usize,
}

impl Disk {
    fn turn(&mut self, stage: &mut Stage, now_ns: u64) -> Result<(), FrontendError> {
        let on = self.span_ns.contains(&now_ns);
        if on && self.out == 0 {
            self.out = (0..self.depth).take_while(|k| self.disk.next(*k, now_ns)).count();
            return self.disk.port.queues[0].publish();
        }
        if self.out == 0 || (on && self.stalls) {
            return Ok(());
        }
        let (mut finished, mut done_ns) = (0, 0);
        while finished < self.depth
            && let Some(k) = self.disk.finish()?
        {
            if finished == 0 {
                done_ns = stage.now_ns();
            }
            finished += 1;
            let took_ns = done_ns.saturating_sub(self.disk.started_ns(k));
            stage.tallies[self.load].latency(done_ns, took_ns);
            if !(on && self.disk.next(k, done_ns)) {
                self.out -= 1;
            }
        }
        let tally = &mut stage.tallies[self.load];
        tally.turns += u64::from(on);
        if finished > 0 {
            tally.taken += finished as u64;
            tally.dry += u64::from(on && finished == self.depth);
            tally.add(done_ns, finished as u64, (finished * self.block_bytes) as u64);
            self.disk.port.queues[0].publish()?;
        }
        Ok(())
    }
}
