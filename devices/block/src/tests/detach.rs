//! The end of a port whose disk does not answer: nobody waits for it, and nobody gets its image.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::clock::MonotonicClock;
use base::io::{Disk, DiskDone, DiskOp};
use queue::Layout;
use sidecore::Sidecore;
use vhost_user::Device;

use super::port::{Guest, cores};
use crate::backend::Backend;
use crate::error::BlockError;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, UNTOUCHED};
use crate::{BackendConfig, BlockPort, BlockPortConfig};

/// Long enough for anything that ends.
const LIMIT: Duration = Duration::from_secs(60);

/// A real image, locked as long as anything uses it, behind a model of its disk.
struct Hanging {
    image: Arc<RawBackend>,
    disk: ModelDisk,
}

/// A disk that has the image open.
struct End {
    disk: Box<dyn Disk>,
    panics: bool,
    _image: Arc<RawBackend>,
}

impl Disk for End {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> std::io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.disk.submit(token, op) }
    }
    fn flush_submissions(&mut self) -> std::io::Result<()> {
        self.disk.flush_submissions()
    }
    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        if std::mem::take(&mut self.panics) {
            panic!("a bug, for this test");
        }
        self.disk.reap(done);
    }
    fn event_fd(&self) -> Option<std::os::fd::RawFd> {
        None
    }
    fn len_bytes(&self) -> u64 {
        self.disk.len_bytes()
    }
}

impl Backend for Hanging {
    fn kind(&self) -> &'static str {
        "hanging"
    }
    fn open_queue(&self, _depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        let (disk, panics) = (self.disk.boxed(), std::mem::take(&mut self.disk.state().panics));
        Ok(Box::new(End { disk, panics, _image: Arc::clone(&self.image) }))
    }
    fn len_bytes(&self) -> u64 {
        self.image.len_bytes()
    }
    fn resize(&self, _new: Option<u64>) -> Result<u64, BlockError> {
        Ok(self.image.len_bytes())
    }
    fn sync(&self) -> Result<(), BlockError> {
        Ok(())
    }
}

struct Bench {
    _dir: tempfile::TempDir,
    path: std::path::PathBuf,
    disk: ModelDisk,
    port: Arc<BlockPort>,
    cores: Vec<Sidecore>,
}

impl Bench {
    fn new(panics: bool) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let disk = ModelDisk::new(1 << 20);
        disk.state().hold = true;
        disk.state().panics = panics;
        let image = Arc::new(RawBackend::open(&path, false, false, 512).unwrap());
        let backend = Arc::new(Hanging { image, disk: disk.clone() });
        // The model rings no event: it is looked at while its sidecore polls.
        let cores = cores(1, 10_000_000);
        let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
        let port = BlockPort::with_backend(config, backend, &cores).unwrap();
        port.activate(port.features()).unwrap();
        Self { _dir: dir, path, disk, port, cores }
    }

    fn wait_until_held(&self, count: usize) {
        while self.disk.state().held.len() < count {
            std::thread::yield_now();
        }
    }
}

fn is_locked(path: &std::path::Path) -> bool {
    match RawBackend::open(path, false, false, 512) {
        Ok(_) => false,
        Err(BlockError::Locked { .. }) => true,
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn abuse_D2_an_image_stays_locked_until_the_last_request_of_its_port_is_over() {
    for layout in BOTH {
        let bench = Bench::new(false);
        let mut guest = Guest::new(layout);
        bench.port.start_queue(guest.driver.vring(0)).unwrap();
        for sector in 0..2 {
            let (_, status) = guest.offer(kind::OUT, sector, &[7; 512], 0);
            bench.wait_until_held(sector as usize + 1);
            assert_eq!(guest.driver.read(status, 1), [UNTOUCHED]);
        }
        // As `detach`, while the session already waits for the disk.
        let (tell, stopped) = mpsc::channel();
        let stopping = Arc::clone(&bench.port);
        let session = std::thread::spawn(move || {
            tell.send(stopping.stop_queue(0).map(|_| ())).unwrap();
            stopping.reset();
        });
        bench.port.give_up_after(Duration::from_millis(100));
        let text = stopped.recv_timeout(LIMIT).unwrap().unwrap_err().to_string();
        assert!(text.contains("left in the disk: 2"), "{text}");
        session.join().unwrap();
        assert_eq!(bench.port.orphaned_operations(), 2);
        assert!(crate::orphaned_operations() >= 2);
        let left = bench.port.orphans();
        let Bench { _dir, path, disk, port, cores } = bench;
        assert_eq!((Arc::strong_count(&port), cores[0].stats().workers.get()), (1, 0));
        drop(port);
        assert!(is_locked(&path), "writes are in the disk");
        disk.finish_one(0);
        assert!(is_locked(&path), "one is");
        disk.let_go();
        assert_eq!(left.wait(LIMIT), 0);
        assert!(!is_locked(&path));
        assert!(!disk.state().abandoned);
        assert_eq!(disk.state().cache[..1024], [7; 1024]);
    }
}

/// In whose place another one is dropped.
fn other_port(cores: &[Sidecore]) -> Arc<BlockPort> {
    let config = BlockPortConfig::new("vm/other", BackendConfig::Null { len_bytes: 512 });
    BlockPort::new(config, cores, Arc::new(MonotonicClock)).unwrap()
}

#[test]
fn abuse_D2_a_worker_that_panics_holds_up_no_sidecore_and_leaves_the_image_locked() {
    let bench = Bench::new(true);
    let mut guest = Guest::new(Layout::Split);
    let mut neighbour = Guest::new(Layout::Packed);
    let other = other_port(&bench.cores);
    other.start_queue(neighbour.driver.vring(0)).unwrap();
    bench.port.start_queue(guest.driver.vring(0)).unwrap();
    guest.offer(kind::OUT, 0, &[7; 512], 0);
    // The poll that gives it to the disk looks for what is done.
    bench.wait_until_held(1);
    for _ in 0..20 {
        assert_eq!(neighbour.request(kind::FLUSH, 0, &[], 0).0, 0);
    }
    assert_eq!(bench.cores[0].stats().panics.get(), 1);
    assert_eq!(bench.port.orphaned_operations(), 1);
    bench.port.stop_queue(0).unwrap_err();
    // The same requests are not taken again meanwhile.
    let text = bench.port.start_queue(guest.driver.vring(0)).unwrap_err().to_string();
    assert!(text.contains("still in the disk: 1"), "{text}");
    bench.disk.let_go();
    assert_eq!(bench.port.orphans().wait(LIMIT), 0);
    bench.port.start_queue(guest.driver.vring(0)).unwrap();
    assert!(!bench.disk.state().abandoned);
}

#[test]
fn a_disk_that_answers_in_time_leaves_nothing() {
    let bench = Bench::new(false);
    let mut guest = Guest::new(Layout::Split);
    bench.port.start_queue(guest.driver.vring(0)).unwrap();
    let (_, status) = guest.offer(kind::OUT, 0, &[7; 512], 0);
    bench.wait_until_held(1);
    bench.port.give_up_after(LIMIT);
    let stopping = Arc::clone(&bench.port);
    let session = std::thread::spawn(move || stopping.stop_queue(0).unwrap().is_some());
    bench.disk.let_go();
    assert!(session.join().unwrap());
    assert_eq!(guest.driver.read(status, 1), [0]);
    assert_eq!(bench.port.orphaned_operations(), 0);
}
