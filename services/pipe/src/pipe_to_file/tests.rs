//! A file to a file, with the guest played by hand.

use super::*;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use block::{PlaceholderHandler, PlaceholderOp, PlaceholderRequest};
use guest_abi::frame::{HEADER_BYTES, Header};
use guest_abi::pipe::{self, BLOCK_BYTES, Done, HOLE, Taken, kind, take};
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use crate::disk_gate::DiskGate;
use crate::file_source::FileSource;
use crate::line::Line;
use crate::placed_request::{Direction, Tag};
use crate::placeholders::PlaceholderTable;
use crate::pool::Pool;
use crate::purse::Purse;
use crate::self_test::SelfTest;
use crate::testing::{PATIENCE, nobody, pattern, vm_with};

const TAG: Tag = [7; 16];
const ID: u64 = 5;
const WRITE: PlaceholderOp = PlaceholderOp::Write { sync: false };

/// The guest's side, and both files.
struct World {
    pool: Arc<Pool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    table: Arc<PlaceholderTable>,
    line: Arc<Line>,
    stream: UnixStream,
    sink: File,
    skew: u64,
    purse: Arc<Purse>,
}

/// A message of the daemon.
#[derive(Debug)]
enum Heard {
    Take(pipe::Take, Vec<u8>),
    Done(u64, Reason),
}

/// Offset in the sink's file at which the first byte goes.
const PLACE: u64 = 64 << 10;

impl World {
    fn new(skew: u64) -> Self {
        Self::paid_by(nobody(), skew)
    }

    fn paid_by(purse: Arc<Purse>, skew: u64) -> Self {
        let (pool, threads) = Pool::start("t", 2).unwrap();
        let table = Arc::new(PlaceholderTable::new(&pool));
        let (stream, own) = UnixStream::pair().unwrap();
        let line = Arc::new(Line::new(&own).unwrap());
        let sink = tempfile::tempfile().unwrap();
        Self { pool, threads, table, line, stream, sink, skew, purse }
    }

    fn begin(&self, bytes: &[u8], extents: Vec<(u64, u64)>, len_bytes: u64) {
        let image = tempfile::tempfile().unwrap();
        image.write_all_at(bytes, 0).unwrap();
        let source = FileSource::new(image.into(), bytes.len() as u64, extents, len_bytes).unwrap();
        let source = GatedFile::new(source, DiskGate::new(Arc::clone(&self.purse), None));
        let sink = PlacedFile::new(&self.table, (TAG, self.skew), 2, Direction::Write).unwrap();
        let work = Box::new(PipeToFile::from_file(source, sink, len_bytes));
        let ends = ["a".into(), "b".into()];
        let line = (ID, Arc::clone(&self.line));
        let purse = Arc::clone(&self.purse);
        self.pool.add(Job::new(2, line, (ends, len_bytes), (work, Vec::new()), purse));
    }

    fn hear(&mut self) -> Heard {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).unwrap();
        let header: Header = zerocopy::transmute!(header);
        assert_eq!(header.id.get(), ID);
        let mut body = vec![0; header.body_len().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        match header.kind.get() {
            kind::TAKE => {
                let (take, rest) = pipe::Take::read_from_prefix(&body).unwrap();
                Heard::Take(take, rest.to_vec())
            }
            kind::DONE => {
                let done = Done::read_from_bytes(&body).unwrap();
                Heard::Done(done.moved_bytes.get(), Reason::from_number(done.reason.get()))
            }
            kind => panic!("kind {kind}"),
        }
    }

    fn write(&self, at: u64, len: u64) -> (PlaceholderRequest, block::placeholder::Answer) {
        let to = (PLACE + self.skew + at, len);
        PlaceholderRequest::detached(TAG, at, to, WRITE, self.sink.try_clone().unwrap()).unwrap()
    }

    /// The guest writes placeholders; those that nobody knows are written as they are.
    fn write_places(&self, at: u64, len: u64) -> io::Result<()> {
        let (write, answer) = self.write(at, len);
        match self.table.take(write) {
            None => answer.wait(),
            Some(_) => {
                let place = PLACE + self.skew + at;
                self.sink.write_all_at(&vec![0xbb; len as usize], place)
            }
        }
    }

    fn taken(&self, take: &pipe::Take, errno: u32) {
        let taken = Taken { at: take.at, len_bytes: take.len_bytes, errno: U32::new(errno) };
        let job = self.pool.find(&self.line, ID).unwrap();
        assert!(job.push_answer(Answer::Written(taken)));
        self.pool.nudge(job.token);
    }

    fn content(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.sink.read_exact_at(&mut bytes, PLACE + self.skew).unwrap();
        bytes
    }

    /// The guest does all that it is asked for, in writes of at most so many bytes, and forgets
    /// each `lost`th.
    fn serve(&mut self, most: u64, lost: Option<usize>) -> (u64, Reason) {
        let mut count = 0;
        loop {
            match self.hear() {
                Heard::Done(moved, reason) => return (moved, reason),
                Heard::Take(take, bytes) if take.how == take::BYTES => {
                    assert_eq!(bytes.len() as u32, take.len_bytes.get());
                    let place = PLACE + self.skew + take.at.get();
                    self.sink.write_all_at(&bytes, place).unwrap();
                    self.taken(&take, 0);
                }
                Heard::Take(take, bytes) => {
                    assert!(bytes.is_empty());
                    let (mut at, len) = (take.at.get(), u64::from(take.len_bytes.get()));
                    assert_eq!((self.skew + at) % BLOCK_BYTES as u64, 0);
                    let end = at + len;
                    while at < end {
                        let n = most.min(end - at);
                        count += 1;
                        if lost.is_none_or(|lost| count % lost != 0) {
                            self.write_places(at, n).unwrap();
                        }
                        at += n;
                    }
                    self.taken(&take, 0);
                }
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.pool.stop();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn a_file_with_holes_lands_at_any_offset() {
    let bytes = pattern(12 << 20);
    let extents = vec![(5000, 3_000_000), (HOLE, 2_500_001), (4_000_000, 7_000_123), (0, 1)];
    let mut want = bytes[5000..3_005_000].to_vec();
    want.extend(vec![0; 2_500_001]);
    want.extend(&bytes[4_000_000..11_000_123]);
    want.push(bytes[0]);
    let len = want.len() as u64;
    for (skew, most) in [(0, 1 << 20), (1, 1 << 20), (512, 4096), (4095, 64 << 10)] {
        let mut world = World::new(skew);
        world.begin(&bytes, extents.clone(), len);
        assert_eq!(world.serve(most, None), (len, Reason::Complete));
        assert!(world.content(want.len()) == want, "skew {skew}");
        assert!(!world.table.has_any());
    }
}

#[test]
fn what_nobody_saw_comes_again_as_bytes() {
    let bytes = pattern(9 << 20);
    let mut world = World::new(77);
    world.begin(&bytes, vec![(0, 9 << 20)], 9 << 20);
    assert_eq!(world.serve(64 << 10, Some(3)), (9 << 20, Reason::Complete));
    assert!(world.content(9 << 20) == bytes);
}

#[test]
fn a_guest_that_cannot_write_is_told_how_far_it_came() {
    let bytes = pattern(9 << 20);
    let mut world = World::new(0);
    world.begin(&bytes, vec![(0, 9 << 20)], 9 << 20);
    let Heard::Take(first, _) = world.hear() else { panic!() };
    let Heard::Take(second, _) = world.hear() else { panic!() };
    world.write_places(0, first.len_bytes.get().into()).unwrap();
    // In any order.
    world.taken(&second, libc::ENOSPC as u32);
    world.taken(&first, 0);
    let moved = u64::from(first.len_bytes.get());
    let Heard::Done(got, reason) = world.hear() else { panic!() };
    assert_eq!((got, reason), (moved, Reason::SinkFailed));
    assert!(world.content(moved as usize) == bytes[..moved as usize]);
    // A write that comes too late is an ordinary one.
    let (write, _answer) = world.write(second.at.get(), 4096);
    assert!(world.table.take(write).is_some());
}

#[test]
fn a_cancelled_pipe_ends_behind_what_was_asked_for() {
    let bytes = pattern(20 << 20);
    let mut world = World::new(0);
    world.begin(&bytes, vec![(0, 20 << 20)], 20 << 20);
    let Heard::Take(first, _) = world.hear() else { panic!() };
    let job = world.pool.find(&world.line, ID).unwrap();
    job.cancel(Reason::TimedOut);
    world.pool.nudge(job.token);
    world.write_places(first.at.get(), first.len_bytes.get().into()).unwrap();
    world.taken(&first, 0);
    let Heard::Take(second, _) = world.hear() else { panic!() };
    world.write_places(second.at.get(), second.len_bytes.get().into()).unwrap();
    world.taken(&second, 0);
    let moved = second.at.get() + u64::from(second.len_bytes.get());
    let Heard::Done(got, reason) = world.hear() else { panic!() };
    assert_eq!((got, reason), (moved, Reason::TimedOut));
    assert!(world.content(moved as usize) == bytes[..moved as usize]);
}

#[test]
fn placeholders_that_were_not_asked_for_are_data() {
    let world = World::new(0);
    let (write, _answer) = world.write(0, 4096);
    assert!(world.table.take(write).is_some(), "no pipe");
    world.begin(&pattern(1 << 20), vec![(0, 1 << 20)], 1 << 20);
    for (at, len) in [(1 << 20, 4096), (0, (1 << 20) + 512), (1 << 40, 512)] {
        let (write, _answer) = world.write(at, len);
        assert!(world.table.take(write).is_some(), "{at} {len}");
    }
    let (other, _answer) =
        PlaceholderRequest::detached([8; 16], 0, (0, 4096), WRITE, tempfile::tempfile().unwrap())
            .unwrap();
    assert!(world.table.take(other).is_some(), "another tag");
    assert!(
        PlacedFile::new(&world.table, (TAG, 0), 4, Direction::Write).is_none(),
        "the tag is in use"
    );
}

#[test]
fn an_agent_that_has_gone_ends_it() {
    let mut world = World::new(0);
    world.begin(&pattern(1 << 20), vec![(0, 1 << 20)], 1 << 20);
    let Heard::Take(..) = world.hear() else { panic!() };
    let (write, answer) = world.write(0, 4096);
    world.line.close();
    let job = world.pool.find(&world.line, ID).unwrap();
    job.cancel(Reason::Cancelled);
    world.pool.nudge(job.token);
    world.pool.drain(Reason::HostGone, crate::limits::DRAIN_TIMEOUT);
    assert_eq!(world.pool.len(), 0);
    // Nobody waits for a placeholder for ever.
    assert!(world.table.take(write).is_some());
    assert!(answer.wait().is_err());
}

#[test]
fn a_daemon_that_stops_leaves_no_placeholder_waiting() {
    let mut world = World::new(0);
    world.begin(&pattern(1 << 20), vec![(0, 1 << 20)], 1 << 20);
    let Heard::Take(..) = world.hear() else { panic!() };
    world.pool.stop();
    world.threads.drain(..).for_each(|thread| thread.join().unwrap());
    let (write, answer) = world.write(0, 4096);
    assert!(world.table.take(write).is_none());
    world.pool.clear();
    assert!(answer.wait().is_err());
    assert!(!world.table.has_any());
    let (write, _answer) = world.write(0, 4096);
    assert!(world.table.take(write).is_some());
}

#[test]
fn a_self_test_is_answered_once() {
    let world = World::new(0);
    let probe = guest_abi::pipe::ProbePlaces {
        disk: U32::ZERO,
        reserved: U32::ZERO,
        tag: TAG,
        secret: [0x5a; 32],
    };
    let test = SelfTest { direction: Direction::Write, probe };
    world.table.expect_self_test(Some(test));
    assert!(world.table.has_any());
    world.write_places(0, 4096).unwrap();
    assert_eq!(world.content(4096), [0x5a; 4096]);
    assert!(!world.table.has_any());
    world.write_places(0, 4096).unwrap();
    assert_eq!(world.content(4096), [0xbb; 4096], "the second is data");
    world.table.expect_self_test(Some(test));
    world.table.expect_self_test(None);
    assert!(!world.table.has_any());
}

/// Whether the pipe waits at the ceiling; looks again until it does.
fn await_hold(purse: &Purse) {
    let begun = Instant::now();
    while purse.held() == 0 {
        assert!(begun.elapsed() < PATIENCE, "nobody waits");
        std::thread::yield_now();
    }
}

/// The pipe's reads of its source go to the ceiling, by the account's clock alone.
#[test]
fn a_vm_at_its_ceiling_reads_no_more_than_that() {
    const RATE: u64 = 10 << 20;
    let bytes = pattern(4 << 20);
    let (purse, account, clock) = vm_with(RATE);
    let mut world = World::paid_by(Arc::clone(&purse), 0);
    world.begin(&bytes, vec![(0, 3 << 20), (HOLE, 1 << 20)], 4 << 20);
    let Heard::Take(take, _) = world.hear() else { panic!() };
    let (write, answer) = world.write(0, take.len_bytes.get().into());
    assert!(world.table.take(write).is_none());
    let read = || purse.stats.read_bytes.load(Ordering::Relaxed);
    let start_ns = purse.now_ns();
    let mut waits = 0;
    while read() < 3 << 20 {
        await_hold(&purse);
        // A burst, what has come in, and what the last read borrowed.
        let due = RATE * (purse.now_ns() - start_ns + 100_000_000) / 1_000_000_000;
        assert!(read() <= due + (64 << 10), "{} of {due}", read());
        assert!(answer.get().is_none());
        let job = world.pool.jobs().remove(0);
        assert!(matches!(job.state(), Some("held") | None));
        // It wakes up by itself, and finds nothing until the clock goes on.
        let before = read();
        world.pool.nudge(job.token);
        assert_eq!(read(), before);
        clock.advance_ns(50_000_000);
        waits += 1;
        let begun = Instant::now();
        while read() == before {
            assert!(begun.elapsed() < PATIENCE, "it sleeps for ever");
            std::thread::yield_now();
        }
    }
    // 3 MiB less the burst of 1, at half a MiB each.
    assert!((3..=5).contains(&waits), "{waits}");
    answer.wait().unwrap();
    world.taken(&take, 0);
    assert_eq!(world.serve(1 << 20, None), (4 << 20, Reason::Complete));
    assert!(world.content(3 << 20) == bytes[..3 << 20]);
    assert_eq!(read(), 3 << 20, "a hole is on no disk");
    let counted = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!(counted(&account.stats.charged_bytes), 3 << 20);
    assert!(counted(&account.stats.held_by_ceiling) >= waits);
    assert!(counted(&account.stats.held_by_ceiling_ns) >= 50_000_000 * waits);
    assert_eq!(purse.held(), 0);
}

/// The end of a pipe does not wait for the gate, nor does the guest.
#[test]
fn a_pipe_that_is_cancelled_at_the_gate_answers_the_guest_at_once() {
    let bytes = pattern(4 << 20);
    let (purse, account, _clock) = vm_with(1 << 20);
    let mut world = World::paid_by(Arc::clone(&purse), 0);
    world.begin(&bytes, vec![(0, 4 << 20)], 4 << 20);
    let Heard::Take(take, _) = world.hear() else { panic!() };
    let (write, answer) = world.write(0, 4 << 20);
    assert!(world.table.take(write).is_none());
    await_hold(&purse);
    world.pool.jobs().iter().for_each(|job| job.cancel(Reason::Cancelled));
    world.pool.nudge(2);
    answer.wait().unwrap();
    world.taken(&take, 0);
    assert!(matches!(world.hear(), Heard::Done(moved, Reason::Complete) if moved == 4 << 20));
    assert!(world.content(4 << 20) == bytes);
    // It is owed.
    assert_eq!(account.stats.charged_bytes.load(Ordering::Relaxed), 4 << 20);
    assert!(account.ask(1, purse.now_ns()).is_err());
    assert_eq!(purse.held(), 0);
}

#[test]
fn a_daemon_that_stops_at_the_gate_leaves_nobody_waiting() {
    for is_drained in [true, false] {
        let (purse, _, _clock) = vm_with(1 << 20);
        let mut world = World::paid_by(Arc::clone(&purse), 0);
        world.begin(&pattern(4 << 20), vec![(0, 4 << 20)], 4 << 20);
        let Heard::Take(..) = world.hear() else { panic!() };
        let (write, answer) = world.write(0, 4 << 20);
        assert!(world.table.take(write).is_none());
        await_hold(&purse);
        if is_drained {
            world.pool.drain(Reason::HostGone, Duration::ZERO);
            answer.wait().unwrap();
        }
        world.pool.stop();
        world.threads.drain(..).for_each(|thread| thread.join().unwrap());
        world.pool.clear();
        if !is_drained {
            assert!(answer.wait().is_err());
        }
        assert_eq!((purse.held(), world.table.has_any()), (0, false));
    }
}
