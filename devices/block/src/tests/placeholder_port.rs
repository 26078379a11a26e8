//! PlaceholderRequest writes on real ports, sidecores and files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Weak};

use crate::stage::{BlockStage, Direction, Verdict};
use base::clock::MonotonicClock;
use queue::Layout;
use vhost_user::Device;

use super::port::{Guest, Held, cores, port};
use crate::backend::Backend;
use crate::placeholder::{Answers, PlaceholderHead, PlaceholderOp, TargetFile};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::placeholders::{TAG, TagHandler, sectors};
use crate::testing::{BOTH, UNTOUCHED, pattern};
use crate::{
    BackendConfig, BlockError, BlockPort, BlockPortConfig, InPlaceError, PlaceholderError,
    PlaceholderRequest,
};

const LEN: u64 = 4 << 20;

fn image(place: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(place).unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(LEN).unwrap();
    (dir, path)
}

fn raw(path: &Path, direct: bool) -> BackendConfig {
    BackendConfig::Raw { path: path.to_path_buf(), direct, registered_memory_bytes: 0 }
}

/// Writes the bytes of [`pattern`] 1 at the offsets in the pipe, until the end of the port.
fn pipe(taken: Receiver<PlaceholderRequest>) -> std::thread::JoinHandle<u64> {
    let bytes = pattern(1, LEN as usize);
    std::thread::spawn(move || {
        let mut count = 0;
        for write in taken {
            let at = write.at() as usize;
            let part = &bytes[at..at + write.len_bytes() as usize];
            let done = write.file().write_all_at(part, write.offset());
            count += 1;
            write.complete(done);
        }
        count
    })
}

fn waits(guest: &Guest, status: u64) -> bool {
    guest.driver.read(status, 1) == [UNTOUCHED]
}

/// Bytes of a pipe and of the guest, in turn and over each other, read back through the disk and in
/// place; the sidecore sleeps in between.
fn bytes_land(place: &str, direct: bool) {
    for layout in BOTH {
        let (_dir, path) = image(place);
        let port = port(raw(&path, direct), |c| c.block_size = 512.max(4096 * u32::from(direct)));
        port.activate(port.features()).unwrap();
        let (handler, taken) = TagHandler::new();
        let mut guest = Guest::new(layout);
        // Before the queue runs and again while it does, or only then.
        if layout == Layout::Split {
            port.set_placeholder_handler(Arc::new(NoneKnown)).unwrap();
        }
        port.start_queue(guest.driver.vring(0)).unwrap();
        port.set_placeholder_handler(handler).unwrap();
        let pipe = pipe(taken);
        let (bytes, image) = (pattern(1, LEN as usize), port.image().unwrap());
        let image = File::from(image.file);
        for round in 0..40u64 {
            let offset = round % 5 * 4096;
            let at = round * 8192;
            // Of the guest, below and behind.
            let own = pattern(round + 2, 16384);
            assert_eq!(guest.request(kind::OUT, offset / 512, &own, 0).0, 0);
            let holders = sectors(TAG, at, 8192);
            assert_eq!(guest.request(kind::OUT, offset / 512 + 8, &holders, 0).0, 0);
            let mut wanted = own.clone();
            wanted[4096..][..8192].copy_from_slice(&bytes[at as usize..][..8192]);
            if round % 2 == 0 {
                wanted[8192..][..4096].copy_from_slice(&pattern(round + 99, 4096));
                let data = pattern(round + 99, 4096);
                assert_eq!(guest.request(kind::OUT, offset / 512 + 16, &data, 0).0, 0);
            }
            if round % 3 == 0 {
                assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 0);
            }
            let (status, read) = guest.request(kind::IN, offset / 512, &[], 16384);
            assert!(status == 0 && read == wanted, "round {round}");
            let mut read = vec![0; 16384];
            image.read_exact_at(&mut read, offset).unwrap();
            assert!(read == wanted, "round {round} in place");
        }
        let stats = port.stats()[0].block.clone();
        assert_eq!((stats.placeholders.get(), stats.io_errors.get()), (40, 0));
        assert!(port.stop_queue(0).unwrap().is_some());
        drop(port);
        assert_eq!(pipe.join().unwrap(), 40);
    }
}

/// Knows none.
#[derive(Debug)]
struct NoneKnown;

impl crate::PlaceholderHandler for NoneKnown {
    fn has_any(&self) -> bool {
        false
    }
    fn take(&self, write: PlaceholderRequest) -> Option<PlaceholderRequest> {
        Some(write)
    }
}

#[test]
fn a_pipes_bytes_land_among_the_guests_buffered() {
    bytes_land("/var/tmp", false);
}

#[test]
fn a_pipes_bytes_land_among_the_guests_past_the_page_cache() {
    bytes_land("/var/tmp", true);
}

#[test]
fn a_pipes_bytes_land_among_the_guests_on_tmpfs() {
    bytes_land("/dev/shm", false);
}

/// A port with a queue, and a write that waits.
struct Parked {
    _dir: tempfile::TempDir,
    path: PathBuf,
    port: Arc<BlockPort>,
    guest: Guest,
    status: u64,
    write: PlaceholderRequest,
}

impl Parked {
    fn new(layout: Layout) -> Self {
        let (dir, path) = image("/var/tmp");
        let port = port(raw(&path, false), |_| {});
        let (handler, taken) = TagHandler::new();
        port.set_placeholder_handler(handler).unwrap();
        let mut guest = Guest::new(layout);
        port.start_queue(guest.driver.vring(0)).unwrap();
        let (_, status) = guest.offer(kind::OUT, 8, &sectors(TAG, 0, 4096), 0);
        let write = taken.recv().unwrap();
        Self { _dir: dir, path, port, guest, status, write }
    }
}

#[test]
fn stopping_a_queue_waits_for_placed_writes_without_holding_up_its_sidecore() {
    for layout in BOTH {
        let cores = cores(1, 0);
        let other = BlockPortConfig::new("vm/other", BackendConfig::Memory { len_bytes: 1 << 20 });
        let other = BlockPort::new(other, &cores, Arc::new(MonotonicClock)).unwrap();
        let (_dir, path) = image("/var/tmp");
        let config = BlockPortConfig::new("vm/disk", raw(&path, false));
        let port = BlockPort::new(config, &cores, Arc::new(MonotonicClock)).unwrap();
        let (handler, taken) = TagHandler::new();
        port.set_placeholder_handler(handler).unwrap();
        let (mut guest, mut neighbour) = (Guest::new(layout), Guest::new(Layout::Packed));
        port.start_queue(guest.driver.vring(0)).unwrap();
        other.start_queue(neighbour.driver.vring(0)).unwrap();
        let (_, status) = guest.offer(kind::OUT, 8, &sectors(TAG, 0, 4096), 0);
        let write = taken.recv().unwrap();
        let (tell, stopped) = mpsc::channel();
        let stopping = Arc::clone(&port);
        std::thread::spawn(move || tell.send(stopping.stop_queue(0).unwrap().is_some()).unwrap());
        for _ in 0..20 {
            assert_eq!(neighbour.request(kind::FLUSH, 0, &[], 0).0, 0);
        }
        assert!(stopped.try_recv().is_err() && waits(&guest, status), "one is in flight");
        write.complete(Ok(()));
        assert!(stopped.recv().unwrap());
        assert_eq!(guest.driver.read(status, 1), [0]);
    }
}

#[test]
fn a_write_that_waits_moves_with_its_queue() {
    let mut parked = Parked::new(Layout::Split);
    let worker = parked.port.worker(0);
    // Sidecores that sleep at once.
    let targets = cores(2, 0);
    for target in &targets {
        worker.move_to(target).unwrap();
        assert_eq!(parked.guest.request(kind::FLUSH, 0, &[], 0).0, 0);
        assert!(waits(&parked.guest, parked.status));
    }
    parked.write.complete(Ok(()));
    parked.guest.wait();
    assert_eq!(parked.guest.driver.read(parked.status, 1), [0]);
    drop(parked.port);
}

#[test]
fn the_image_stays_locked_until_the_last_write_is_answered_and_no_longer() {
    for round in 0..50 {
        let parked = Parked::new(BOTH[round % 2]);
        let weak: Weak<BlockPort> = Arc::downgrade(&parked.port);
        let again = || {
            let config = BlockPortConfig::new("vm/disk", raw(&parked.path, false));
            BlockPort::new(config, &cores(1, 0), Arc::new(MonotonicClock))
        };
        let (port, path) = (parked.port, &parked.path);
        // Ends when the write does.
        let ends = std::thread::spawn(move || drop(port));
        while weak.strong_count() > 0 {
            std::thread::yield_now();
        }
        assert!(matches!(again(), Err(BlockError::Locked { .. })), "{}", path.display());
        parked.write.complete(Ok(()));
        ends.join().unwrap();
        again().unwrap();
        assert_eq!(parked.guest.driver.read(parked.status, 1), [0]);
    }
}

#[test]
fn past_the_page_cache_only_whole_pages_are_placed() {
    let (_dir, path) = image("/var/tmp");
    let with = |direct: bool| {
        let port = port(raw(&path, direct), |_| {});
        let (handler, taken) = TagHandler::new();
        port.set_placeholder_handler(handler).unwrap();
        let mut guest = Guest::new(Layout::Split);
        port.start_queue(guest.driver.vring(0)).unwrap();
        let pipe = pipe(taken);
        let mut placed = Vec::new();
        for (sector, len) in [(0, 4096), (8, 8192), (1, 4096), (8, 4608), (7, 4608), (8, 512)] {
            let before = port.stats()[0].block.placeholders.get();
            let holders = sectors(TAG, 0, len);
            assert_eq!(guest.request(kind::OUT, sector, &holders, 0).0, 0);
            let is_placed = port.stats()[0].block.placeholders.get() > before;
            let wanted = if is_placed { pattern(1, len) } else { holders };
            assert!(guest.request(kind::IN, sector, &[], len).1 == wanted);
            placed.push(is_placed);
        }
        drop(port);
        pipe.join().unwrap();
        placed
    };
    assert_eq!(with(false), [true; 6]);
    // A file system with larger blocks would not open it so at all.
    assert_eq!(with(true), [true, true, false, false, false, false]);
}

struct Marked(bool);

impl BlockStage for Marked {
    fn name(&self) -> &str {
        "mark"
    }
    fn changes_content(&self) -> bool {
        self.0
    }
    fn push(&mut self, _direction: Direction, _offset: u64, _data: &mut [u8]) -> Verdict {
        Verdict::Pass
    }
}

#[test]
fn placeholders_need_a_raw_disk_that_is_written_and_not_changed() {
    let (_dir, path) = image("/var/tmp");
    let set = |port: Arc<BlockPort>| port.set_placeholder_handler(TagHandler::new().0);
    assert!(matches!(
        set(port(BackendConfig::Memory { len_bytes: LEN }, |_| {})),
        Err(PlaceholderError::NotInPlace(InPlaceError::Format { kind: "memory", .. }))
    ));
    let error = set(port(raw(&path, false), |c| c.read_only = true)).unwrap_err();
    let expected = "disk vm/disk: it is read-only, so no placeholders are written to it";
    assert!(matches!(error, PlaceholderError::ReadOnly { .. }) && error.to_string() == expected);
    assert!(matches!(
        set(port(raw(&path, false), |c| c.stages = vec![Box::new(Marked(true))])),
        Err(PlaceholderError::NotInPlace(InPlaceError::Stage { .. }))
    ));
    set(port(raw(&path, false), |c| c.stages = vec![Box::new(Marked(false))])).unwrap();
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
    let held = Arc::new(Held(ModelDisk::new(LEN as usize)));
    let other = BlockPort::with_backend(config, held, &cores(1, 0)).unwrap();
    assert!(matches!(set(other), Err(PlaceholderError::NotInPlace(InPlaceError::Format { .. }))));
}

/// The file of a write is the image, opened through the page cache, whatever came to its path.
#[test]
fn abuse_F2_the_file_of_a_write_is_the_disks() {
    use std::os::unix::fs::MetadataExt;
    for direct in [false, true] {
        let (dir, path) = image("/var/tmp");
        let id = std::fs::metadata(&path).unwrap().ino();
        let port = port(raw(&path, direct), |c| c.block_size = 4096);
        let other = dir.path().join("other.img");
        std::fs::write(&other, [8; 4096]).unwrap();
        std::fs::rename(&other, &path).unwrap();
        let (handler, taken) = TagHandler::new();
        port.set_placeholder_handler(handler).unwrap();
        let mut guest = Guest::new(Layout::Split);
        port.start_queue(guest.driver.vring(0)).unwrap();
        guest.offer(kind::OUT, 8, &sectors(TAG, 0, 4096), 0);
        let write = taken.recv().unwrap();
        assert_eq!(write.file().metadata().unwrap().ino(), id);
        let flags = rustix::fs::fcntl_getfl(write.file()).unwrap();
        let wanted = rustix::fs::OFlags::RDWR;
        let mask = rustix::fs::OFlags::ACCMODE | rustix::fs::OFlags::DIRECT;
        assert_eq!(flags & (mask | rustix::fs::OFlags::NONBLOCK), wanted);
        drop(write);
    }
}

/// A queue that went with its sidecore leaves writes behind that may still be made.
#[test]
fn abuse_D3_a_write_without_a_queue_keeps_the_image_locked_and_its_answer_reaches_nobody() {
    let (_dir, path) = image("/var/tmp");
    let cores = cores(1, 0);
    let config = || BlockPortConfig::new("vm/disk", raw(&path, false));
    let port = BlockPort::new(config(), &cores, Arc::new(MonotonicClock)).unwrap();
    let (handler, taken) = TagHandler::new();
    port.set_placeholder_handler(handler).unwrap();
    let mut guest = Guest::new(Layout::Packed);
    port.start_queue(guest.driver.vring(0)).unwrap();
    let (_, status) = guest.offer(kind::OUT, 8, &sectors(TAG, 0, 4096), 0);
    let write = taken.recv().unwrap();
    cores[0].shutdown();
    assert!(port.stop_queue(0).is_err());
    drop(port);
    let again = || BlockPort::new(config(), &super::port::cores(1, 0), Arc::new(MonotonicClock));
    assert!(matches!(again(), Err(BlockError::Locked { .. })));
    write.complete(Ok(()));
    again().unwrap();
    assert!(waits(&guest, status) && guest.driver.used().is_none());
}

/// Notes whether answers had been given when it went.
struct Last(Arc<Answers>, mpsc::Sender<bool>);

impl Drop for Last {
    fn drop(&mut self) {
        let mut given = Vec::new();
        self.0.reap(&mut given);
        self.1.send(!given.is_empty()).unwrap();
    }
}

impl Backend for Last {
    fn kind(&self) -> &'static str {
        "last"
    }
    fn open_queue(&self, _depth: u16) -> Result<Box<dyn base::io::Disk>, BlockError> {
        Ok(ModelDisk::new(512).boxed())
    }
    fn len_bytes(&self) -> u64 {
        512
    }
    fn resize(&self, _new: Option<u64>) -> Result<u64, BlockError> {
        Ok(512)
    }
    fn sync(&self) -> Result<(), BlockError> {
        Ok(())
    }
}

#[test]
fn the_image_is_unlocked_when_the_answer_comes() {
    let answers = Arc::new(Answers::new(1).unwrap());
    let (tell, went) = mpsc::channel();
    let last = Arc::new(Last(Arc::clone(&answers), tell));
    let place = TargetFile::new(tempfile::tempfile().unwrap(), false, Some(last));
    let own = (Arc::clone(&answers), 0);
    PlaceholderRequest::new(PlaceholderHead::default(), (0, 512), PlaceholderOp::Read, place, own)
        .complete(Ok(()));
    assert!(!went.recv().unwrap(), "the answer came first");
    let mut given = Vec::new();
    answers.reap(&mut given);
    assert_eq!(given.len(), 1);
}
