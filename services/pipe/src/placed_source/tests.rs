//! A file that the guest reads, with the guest and its disk played by hand.

use super::*;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use block::{PlaceholderHandler, PlaceholderOp};
use guest_abi::frame::{HEADER_BYTES, Header};
use guest_abi::pipe::{self, BLOCK_BYTES, MAX_TAKE_BYTES, kind};
use proptest::prelude::*;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use crate::epoll_set::EpollSet;
use crate::job::StepOutcome;
use crate::line::Line;
use crate::placed_request::{Direction, Tag};
use crate::placeholders::PlaceholderTable;
use crate::pool::Pool;
use crate::testing::pattern;

const TAG: Tag = [7; 16];
const TOKEN: u64 = 2;

/// Offset on the disk at which the file begins.
const PLACE: u64 = 64 << 10;

/// Work that does nothing: the test does the steps.
struct Idle;

impl crate::job::Work for Idle {
    fn step(&mut self, _job: &Job, _epoll: &EpollSet) -> StepOutcome {
        unreachable!()
    }
    fn state(&self) -> &'static str {
        "idle"
    }
}

struct World {
    pool: Arc<Pool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    table: Arc<PlaceholderTable>,
    job: Job,
    /// The guest's end of the agent's stream.
    stream: UnixStream,
    disk: File,
    skew: u64,
    /// The file from the pipe's beginning on.
    content: Vec<u8>,
    source: PlacedSource,
    sink: (UnixStream, UnixStream),
    got: Vec<u8>,
}

impl World {
    fn new(len: usize, skew: u64, is_cached: bool) -> Self {
        let (pool, threads) = Pool::start("t", 1).unwrap();
        let table = Arc::new(PlaceholderTable::new(&pool));
        let (stream, own) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let line = (5, Arc::new(Line::new(&own).unwrap()));
        let ends = ["a".into(), "b".into()];
        let work = (Box::new(Idle) as Box<_>, Vec::new());
        let job = Job::new(TOKEN, line, (ends, len as u64), work, crate::testing::nobody());
        let (disk, content) = (tempfile::tempfile().unwrap(), pattern(len));
        disk.write_all_at(&content, PLACE + skew).unwrap();
        disk.set_len(PLACE + (skew + len as u64).next_multiple_of(BLOCK_BYTES as u64)).unwrap();
        let file = PlacedFile::new(&table, (TAG, skew), TOKEN, Direction::Read).unwrap();
        let source = PlacedSource::new(file, len as u64, is_cached);
        let sink = UnixStream::pair().unwrap();
        sink.1.set_nonblocking(true).unwrap();
        let got = Vec::new();
        Self { pool, threads, table, job, stream, disk, skew, content, source, sink, got }
    }

    /// The next request to the guest, if there is one.
    fn asked(&mut self) -> Option<(u64, u64, u8)> {
        let mut header = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            read => read.unwrap(),
        }
        let header: Header = zerocopy::transmute!(header);
        assert_eq!((header.kind.get(), header.id.get()), (kind::GIVE, 5));
        let mut body = vec![0; header.body_len().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        let take = pipe::Take::read_from_bytes(&body).unwrap();
        Some((take.at.get(), take.len_bytes.get().into(), take.how))
    }

    fn say(&self, at: u64, len: u64, errno: i32, bytes: &[u8]) {
        let (len_bytes, errno) = (U32::new(len as u32), U32::new(errno as u32));
        assert!(
            self.job.push_answer(Answer::Read(
                Taken { at: at.into(), len_bytes, errno },
                bytes.to_vec()
            ))
        );
    }

    /// The guest reads over placeholders; whether the disk's engine took it.
    fn read(&mut self, at: u64, len: u64, tag: Tag, way: PlaceholderOp) -> (bool, io::Result<()>) {
        let from = (PLACE + self.skew + at, len);
        let disk = self.disk.try_clone().unwrap();
        let (read, answer) = PlaceholderRequest::detached(tag, at, from, way, disk).unwrap();
        let is_taken = self.table.take(read).is_none();
        self.source.turn(&self.job);
        (is_taken, answer.wait())
    }

    /// Number of bytes of a range that the file has.
    fn there(&self, at: u64, len: u64) -> u64 {
        len.min((self.content.len() as u64).saturating_sub(at))
    }

    /// The guest does what it was asked for, in reads of at most so many bytes; each `lost`th is
    /// none of a disk that is known.
    fn answer(
        &mut self,
        (at, len, how): (u64, u64, u8),
        most: u64,
        lost: usize,
        count: &mut usize,
    ) {
        let there = self.there(at, len);
        if how == take::BYTES {
            assert!(len <= MAX_TAKE_BYTES as u64);
            let bytes = self.content.get(at as usize..).unwrap_or_default();
            return self.say(at, there, 0, &bytes[..there as usize]);
        }
        assert_eq!(((self.skew + at) % BLOCK_BYTES as u64, len % BLOCK_BYTES as u64), (0, 0));
        // The file system reads whole blocks.
        let end = at + there.next_multiple_of(BLOCK_BYTES as u64);
        for at in (at..end).step_by(most as usize) {
            *count += 1;
            if !count.is_multiple_of(lost) {
                let len = most.min(end - at);
                let (is_taken, read) = self.read(at, len, TAG, PlaceholderOp::Read);
                assert_eq!((is_taken, read.is_ok()), (len >= MIN_READ_BYTES, is_taken));
            }
        }
        self.say(at, there, 0, &[]);
    }

    /// Gives the connection what is there. True: that was all.
    fn give(&mut self) -> bool {
        let end = loop {
            self.source.turn(&self.job);
            match self.source.send(self.sink.0.as_fd(), 300_000) {
                Transfer::Bytes(_) | Transfer::Full => self.drink(),
                Transfer::Empty => break false,
                Transfer::End => break true,
                Transfer::Failed(error) => panic!("{error}"),
                Transfer::Held(_) => panic!("it has no gate"),
            }
        };
        self.drink();
        end
    }

    fn drink(&mut self) {
        let read = self.sink.1.read_to_end(&mut self.got);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    /// Runs the source to its end.
    fn run(&mut self, most: u64, lost: usize) {
        let mut count = 0;
        while !self.give() {
            let asked = self.asked().expect("it waits for what nobody was asked for");
            self.answer(asked, most, lost, &mut count);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.pool.stop();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_byte_comes_whatever_the_disk_has_seen(
        len in 1..6_000_000usize,
        skew in prop_oneof![Just(0), 0..4096u64],
        most in prop_oneof![Just(4096u64), Just(512 << 10), Just(1 << 20)],
        lost in 1..5usize,
    ) {
        let mut world = World::new(len, skew, false);
        world.run(most, lost);
        prop_assert_eq!(world.source.end_reason(), None);
        prop_assert!(world.got == world.content);
    }

    #[test]
    fn a_file_that_is_cut_off_ends_there(
        len in 1..4_000_000usize,
        left in 0..4_000_000usize,
        skew in 0..4096u64,
        lost in 1..4usize,
    ) {
        let mut world = World::new(len, skew, false);
        let left = left.min(len);
        world.content.truncate(left);
        world.run(512 << 10, lost);
        prop_assert_eq!(world.source.end_reason(), (left < len).then_some(Reason::EndOfFile));
        prop_assert!(world.got == world.content);
    }
}

#[test]
fn it_holds_no_more_than_three_pieces_and_asks_for_two() {
    let mut world = World::new(8 << 20, 0, false);
    assert!(!world.give());
    let first: Vec<_> = std::iter::from_fn(|| world.asked()).collect();
    assert_eq!(first, [(0, 1 << 20, take::PLACES), (1 << 20, 1 << 20, take::PLACES)]);
    let mut count = 0;
    for asked in first {
        world.answer(asked, 1 << 20, usize::MAX, &mut count);
    }
    // The peer takes nothing: one more is asked for.
    world.source.turn(&world.job);
    assert_eq!(world.asked(), Some((2 << 20, 1 << 20, take::PLACES)));
    assert_eq!(world.asked(), None);
    assert!(!world.give());
    assert!(world.got == world.content[..2 << 20]);
    assert_eq!(world.asked(), Some((3 << 20, 1 << 20, take::PLACES)));
}

#[test]
fn reads_that_were_not_asked_for_are_ordinary_ones() {
    let mut world = World::new(2 << 20, 0, false);
    assert!(world.table.has_any());
    world.give();
    let write = PlaceholderOp::Write { sync: false };
    const LEN: u64 = MIN_READ_BYTES;
    let asked = [
        (2 << 20, LEN, TAG, PlaceholderOp::Read),
        (0, LEN, [8; 16], PlaceholderOp::Read),
        (0, LEN, TAG, write),
        // It may be of anybody whose memory was ours.
        (0, LEN - 4096, TAG, PlaceholderOp::Read),
    ];
    for (at, len, tag, way) in asked {
        // Given back, it is nobody's: dropped.
        assert!(!world.read(at, len, tag, way).0);
    }
    assert!(world.read(0, LEN, TAG, PlaceholderOp::Read).0);
}

#[test]
fn a_guest_that_cannot_read_ends_it_there() {
    let mut world = World::new(3 << 20, 0, false);
    world.give();
    let (first, second) = (world.asked().unwrap(), world.asked().unwrap());
    // In any order.
    world.say(second.0, second.1, libc::EIO, &[]);
    world.answer(first, 1 << 20, usize::MAX, &mut 0);
    assert!(world.give());
    assert_eq!(world.source.end_reason(), Some(Reason::DiskFailed));
    assert!(world.got == world.content[..1 << 20]);
}

#[test]
fn what_cannot_be_read_here_the_guest_is_asked_for() {
    let mut world = World::new(1 << 20, 0, false);
    world.disk.set_len(PLACE + MIN_READ_BYTES).unwrap();
    world.give();
    let asked = world.asked().unwrap();
    for at in [0, MIN_READ_BYTES] {
        let (is_taken, read) = world.read(at, MIN_READ_BYTES, TAG, PlaceholderOp::Read);
        assert!(is_taken && read.is_ok());
    }
    world.say(asked.0, asked.1, 0, &[]);
    assert!(!world.give());
    assert_eq!(world.asked().unwrap().0, MIN_READ_BYTES);
}

#[test]
#[allow(non_snake_case)]
fn abuse_R10_reads_without_end_leave_others_their_turn() {
    let mut world = World::new(1 << 20, 0, false);
    world.give();
    let read = |disk: &File| {
        let disk = disk.try_clone().unwrap();
        PlaceholderRequest::detached(TAG, 0, (PLACE, 512 << 10), PlaceholderOp::Read, disk).unwrap()
    };
    let answers: Vec<_> = (0..5)
        .map(|_| {
            let (read, answer) = read(&world.disk);
            assert!(world.table.take(read).is_none());
            answer
        })
        .collect();
    for (copied, has_more) in [(2, true), (2, true), (1, false)] {
        world.source.turn(&world.job);
        assert_eq!(answers.iter().filter_map(block::placeholder::Answer::get).count(), copied);
        assert_eq!(world.source.has_more(), has_more);
    }
}

#[test]
fn what_the_guest_has_in_memory_and_the_host_does_not_is_not_read() {
    // On a disk: what is on a tmpfs is in memory.
    let mut world = World::new(1 << 20, 0, true);
    let disk = tempfile::tempfile_in("/var/tmp").unwrap();
    disk.write_all_at(&vec![7; 2 << 20], 0).unwrap();
    disk.sync_all().unwrap();
    crate::page_cache::drop_cached(disk.as_fd(), 0, 2 << 20);
    world.disk = disk;
    world.give();
    let (is_taken, read) = world.read(0, 512 << 10, TAG, PlaceholderOp::Read);
    assert!(is_taken && read.is_ok());
    assert!(world.give());
    assert_eq!((world.source.end_reason(), world.got.len()), (Some(Reason::Cached), 0));
}

#[test]
fn senseless_answers_end_it_and_lose_nothing_that_came_before() {
    let all = |at, len, errno, bytes: &[u8]| {
        let mut world = World::new(3 << 20, 0, false);
        world.give();
        let (first, _second) = (world.asked().unwrap(), world.asked().unwrap());
        world.answer(first, 1 << 20, usize::MAX, &mut 0);
        world.say(at, len, errno, bytes);
        let end = world.give();
        assert!(world.got == world.content[..1 << 20]);
        (end, world.source.end_reason())
    };
    let ended = (true, Some(Reason::DiskFailed));
    assert_eq!(all(1 << 20, (1 << 20) + 1, 0, &[]), ended, "too long");
    // Of what nobody was asked for.
    assert_eq!(all(5, 1 << 20, 0, &[]), (false, None));
    assert_eq!(all(u64::MAX, u64::from(u32::MAX), 0, &[]), (false, None));
    // Bytes although the disk has seen none: they are asked for.
    assert_eq!(all(1 << 20, 8, 0, &[1; 8]), (false, Some(Reason::EndOfFile)));
}

#[test]
fn reads_of_a_pipe_that_is_over_end_too() {
    let mut world = World::new(1 << 20, 0, false);
    world.give();
    let disk = world.disk.try_clone().unwrap();
    let read = |disk| {
        PlaceholderRequest::detached(TAG, 0, (PLACE, MIN_READ_BYTES), PlaceholderOp::Read, disk)
            .unwrap()
    };
    let (waiting, answer) = read(disk);
    assert!(world.table.take(waiting).is_none());
    let other = PlacedFile::new(&world.table, ([9; 16], 0), 4, Direction::Read).unwrap();
    drop(std::mem::replace(&mut world.source, PlacedSource::new(other, 1, false)));
    answer.get().expect("answered").unwrap();
    let (late, _answer) = read(world.disk.try_clone().unwrap());
    assert!(world.table.take(late).is_some());
}
