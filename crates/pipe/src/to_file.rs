//! Pipes whose sink is a file: the guest writes placeholders, and the bytes are put in their place where
//! its disk is written.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use guest_abi::Reason;
use guest_abi::pipe::{Taken, take};

use crate::connection::Connection;
use crate::file::Source;
use crate::job::{Job, Next, Side, Work};
use crate::limits::{BUFFER_BYTES, OPEN_TAKES, OWN_TIMEOUT, QUANTUM_BYTES, RECHECK, TAKE_BYTES};
use crate::message::Said;
use crate::places::{PlacedFile, fill};
use crate::pool::Pool;
use crate::receiving::Receiving;
use crate::supply::{Buffered, Room, Supply};
use crate::takes::{self, Take};

/// Where a pipe is.
enum State {
    /// The connection that is read has to be taken over.
    Starting(Connection),
    /// The guest writes the bytes that came before, since then.
    Own(Buffered, Instant),
    /// Bytes come and are written.
    Moving(Supply),
    Over,
}

/// See the module's text. Offsets are those of the pipe.
pub(crate) struct ToFile {
    state: State,
    sink: PlacedFile,
    /// What is asked for at the beginning.
    len_bytes: u64,
    /// Where the first byte is that is moved here.
    first: u64,
    /// Bytes before are asked for.
    asked: u64,
    /// Bytes before are in the file.
    done: u64,
    open: VecDeque<Take>,
    /// What nobody has seen written, and is to be asked for again, as bytes.
    missed: VecDeque<Take>,
    /// From there on the file could not be written, or the source not be read.
    failed_at: Option<u64>,
    /// Held to the end.
    room: Option<Room>,
}

impl ToFile {
    /// From another file.
    pub fn from_file(source: Source, sink: PlacedFile, len_bytes: u64) -> Self {
        Self::new(State::Moving(Supply::File(source, len_bytes)), sink, len_bytes)
    }

    /// From a connection.
    pub fn from_socket(source: Connection, sink: PlacedFile, len_bytes: u64, room: Room) -> Self {
        let mut work = Self::new(State::Starting(source), sink, len_bytes);
        work.room = Some(room);
        work
    }

    fn new(state: State, sink: PlacedFile, len_bytes: u64) -> Self {
        let (open, missed) = (VecDeque::new(), VecDeque::new());
        let (first, asked, done, failed_at, room) = (0, 0, 0, None, None);
        Self { state, sink, len_bytes, first, asked, done, open, missed, failed_at, room }
    }

    fn fail(&mut self, at: u64) {
        self.failed_at = Some(self.failed_at.map_or(at, |failed| failed.min(at)));
    }

    fn start(&mut self, source: Connection, job: &Job, pool: &Pool) -> Next {
        match Receiving::begin(source, self.len_bytes, pool) {
            Ok(source) => {
                let own_bytes = source.own_bytes;
                job.agent.begun(job.id, own_bytes);
                if source.len_bytes == 0 {
                    return Next::Over(0, Reason::Complete);
                }
                job.stats.started.fetch_add(1, Ordering::Relaxed);
                (self.first, self.asked, self.done) = (own_bytes, own_bytes, own_bytes);
                self.state = State::Own(Buffered::new(source, own_bytes), Instant::now());
                Next::Wait(Instant::now() + OWN_TIMEOUT)
            }
            Err(reason) => Next::Over(0, reason),
        }
    }

    fn await_own(&mut self, mut from: Buffered, since: Instant, job: &Job) -> Next {
        match job.heard() {
            Some(Said::Own(None)) => {
                from.source.own_read();
                self.state = State::Moving(Supply::Socket(from));
                Next::Again
            }
            None if since.elapsed() < OWN_TIMEOUT => {
                self.state = State::Own(from, since);
                Next::Wait(since + OWN_TIMEOUT)
            }
            _ => {
                from.source.reset();
                Next::Over(0, Reason::TimedOut)
            }
        }
    }

    /// One turn of taking in, asking for, and putting in place.
    fn turn(&mut self, mut supply: Supply, why: Option<Reason>, job: &Job, pool: &Pool) -> Next {
        let put = self.put_in_place(&supply);
        while let Some(said) = job.heard() {
            match said {
                Said::Taken(taken) => self.hear(&taken, job),
                Said::Own(_) | Said::Given(..) => self.fail(self.done),
            }
        }
        supply.release(self.done);
        let filled = match self.take_in(&mut supply, why, job) {
            Ok(filled) => filled,
            Err(reason) => return self.lose(supply, reason),
        };
        if let Some(over) = self.is_over(&mut supply, why) {
            return over;
        }
        if job.is_overdue() || job.agent.is_closed() {
            return self.lose(supply, why.unwrap_or(Reason::HostGone));
        }
        self.ask(&supply, why, job);
        let goes_on = put || filled >= QUANTUM_BYTES;
        let next = if goes_on || !arm(&supply, pool) { Next::Again } else { wait() };
        self.state = State::Moving(supply);
        next
    }

    /// Puts bytes where the guest has written placeholders. True: there was something to do.
    fn put_in_place(&mut self, supply: &Supply) -> bool {
        let mut moved = 0;
        while moved < QUANTUM_BYTES
            && let Some(write) = self.sink.placing.next()
        {
            let (at, len) = (write.at(), write.len_bytes());
            let done = fill(&write, |file, offset| supply.put(at, len, file, offset));
            if done.is_ok()
                && let Some(take) = self.open.iter_mut().find(|take| take.range.contains(&at))
            {
                take.see(at..at + len);
            }
            write.complete(done);
            moved += len as usize;
        }
        moved > 0
    }

    /// The guest has written what it was asked for.
    fn hear(&mut self, taken: &Taken, job: &Job) {
        let at = taken.at.get();
        let Some(index) = self.open.iter().position(|take| take.range.start == at) else { return };
        let Some(take) = self.open.remove(index) else { return };
        if take.how == take::PLACES {
            self.sink.placing.close(at);
        }
        match taken.errno.get() {
            // What went not through the disk that we know comes as bytes.
            0 => self.missed.extend(take.missed()),
            _ => self.fail(at),
        }
        let starts = self.open.iter().chain(&self.missed).map(|take| take.range.start);
        self.done = starts.chain(self.failed_at).min().unwrap_or(self.asked);
        job.moved_bytes.store(self.done - self.first, Ordering::Relaxed);
    }

    /// Takes in what a connection has brought. Also when it is given back: what its peer believes to
    /// have arrived is written.
    fn take_in(
        &mut self,
        supply: &mut Supply,
        why: Option<Reason>,
        job: &Job,
    ) -> Result<usize, Reason> {
        let Supply::Socket(from) = supply else { return Ok(0) };
        if why.is_some() && !job.is_reset(Side::Source) {
            from.source.stop()?;
        }
        let mut filled = 0;
        while from.has_room() && filled < QUANTUM_BYTES && from.source.left_bytes() > 0 {
            match from.fill() {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Reason::TwinFailed),
            }
        }
        if job.is_reset(Side::Source) && from.has_room() {
            // What came before is here.
            from.source.reset();
        }
        Ok(filled)
    }

    /// How far the pipe goes, and whether that is known.
    fn end(&self, supply: &Supply, why: Option<Reason>) -> (u64, bool) {
        match supply {
            Supply::File(_, len_bytes) if why.is_none() => (*len_bytes, true),
            Supply::File(..) => (self.asked, true),
            Supply::Socket(from) => (supply.until(), from.source.left_bytes() == 0),
        }
    }

    fn is_over(&self, supply: &mut Supply, why: Option<Reason>) -> Option<Next> {
        let moved = self.done - self.first;
        let is_asked = !self.open.is_empty();
        if self.failed_at.is_some() {
            if let Supply::Socket(from) = supply {
                // Nobody can have what its peer believes to have arrived.
                from.source.reset();
            }
            return (!is_asked).then_some(Next::Over(moved, Reason::SinkFailed));
        }
        let (end, is_known) = self.end(supply, why);
        if !is_known || self.done < end || is_asked {
            return None;
        }
        // Only now: until the file has them, bytes that the peer believes to have arrived may be lost.
        if let Supply::Socket(from) = supply
            && let Err(reason) = from.source.finish()
        {
            return Some(Next::Over(moved, reason));
        }
        let is_whole = end == self.len_bytes;
        let reason = if is_whole { Reason::Complete } else { why.unwrap_or(Reason::Complete) };
        Some(Next::Over(moved, reason))
    }

    /// Asks the guest to write what is there.
    fn ask(&mut self, supply: &Supply, why: Option<Reason>, job: &Job) {
        let (end, is_end) = self.end(supply, why);
        let max_bytes = match supply {
            Supply::File(..) => TAKE_BYTES,
            Supply::Socket(_) => BUFFER_BYTES,
        };
        while self.open.len() < OPEN_TAKES && self.failed_at.is_none() {
            let missed = self.missed.pop_front();
            let skew = self.sink.skew_bytes;
            let Some(take) =
                missed.or_else(|| takes::next(self.asked, end, is_end, skew, max_bytes))
            else {
                return;
            };
            self.asked = self.asked.max(take.range.end);
            match self.say(&take, supply, job) {
                Ok(()) => self.open.push_back(take),
                Err(error) => {
                    tracing::warn!("reading for a pipe: {error}");
                    self.fail(take.range.start);
                    self.done = self.done.min(take.range.start);
                }
            }
        }
    }

    fn say(&self, take: &Take, supply: &Supply, job: &Job) -> io::Result<()> {
        let bytes = match take.how {
            take::BYTES => supply.read(take.range.start, take.len_bytes())?,
            _ => {
                self.sink.placing.open(take.range.start, take.len_bytes());
                Vec::new()
            }
        };
        job.agent.take(job.id, take, &bytes);
        Ok(())
    }

    /// It cannot go on: what was moved is told, and a connection whose bytes are lost ends.
    fn lose(&mut self, supply: Supply, reason: Reason) -> Next {
        if let Supply::Socket(mut from) = supply {
            from.source.reset();
        }
        Next::Over(self.done - self.first, reason)
    }
}

fn arm(supply: &Supply, pool: &Pool) -> bool {
    match supply {
        Supply::Socket(from) if from.has_room() && from.source.left_bytes() > 0 => {
            from.source.arm(pool)
        }
        _ => true,
    }
}

fn wait() -> Next {
    Next::Wait(Instant::now() + RECHECK)
}

impl Work for ToFile {
    fn step(&mut self, job: &Job, pool: &Pool) -> Next {
        let state = std::mem::replace(&mut self.state, State::Over);
        let is_reset = job.is_reset(Side::Source).then_some(Reason::FlowReset);
        let ended = job.has_ended().then_some(Reason::EndOfFile);
        let why = job.cancelled().or(is_reset).or(ended);
        match (state, why) {
            (State::Starting(source), None) => self.start(source, job, pool),
            (State::Starting(source), Some(reason)) => {
                source.release();
                Next::Over(0, reason)
            }
            (State::Own(from, since), None | Some(Reason::EndOfFile)) => {
                self.await_own(from, since, job)
            }
            (State::Own(mut from, _), Some(reason)) => {
                // The guest did not get its own bytes to the file.
                from.source.refuse();
                Next::Over(0, reason)
            }
            (State::Moving(supply), why) => self.turn(supply, why, job, pool),
            (State::Over, _) => Next::Over(0, Reason::Unknown),
        }
    }

    fn state(&self) -> &'static str {
        match self.state {
            State::Starting(_) | State::Own(..) => "starting",
            State::Moving(_) => "moving",
            State::Over => "over",
        }
    }
}

#[cfg(test)]
mod tests;
