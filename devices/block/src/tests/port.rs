//! The whole port, on real sidecores.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

use base::clock::MonotonicClock;
use queue::testing::{ModelDriver, ModelOptions};
use queue::{GuestMemory, Layout};
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::{ConfigNotifier, ConfigNotifyError, Device, DeviceError};

use crate::backend::{Backend, Demands};
use crate::config::feature;
use crate::error::BlockError;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, UNTOUCHED, pattern, range};
use crate::{BackendConfig, BlockPort, BlockPortConfig};

pub(super) fn cores(count: usize, spin_us: u32) -> Vec<Sidecore> {
    let spawn = |index| {
        let config =
            SidecoreConfig { index, spin_us, yield_when_idle: true, ..SidecoreConfig::default() };
        Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
    };
    (0..count).map(spawn).collect()
}

pub(super) fn port(
    backend: BackendConfig,
    change: impl FnOnce(&mut BlockPortConfig),
) -> Arc<BlockPort> {
    let mut config = BlockPortConfig::new("vm/disk", backend);
    change(&mut config);
    BlockPort::new(config, &cores(2, 0), Arc::new(MonotonicClock)).unwrap()
}

/// A driver that waits for interrupts, as a guest does.
pub(super) struct Guest {
    pub(super) driver: ModelDriver,
}

impl Guest {
    pub(super) fn new(layout: Layout) -> Self {
        let options = ModelOptions { event_idx: true, ..Default::default() };
        Self { driver: ModelDriver::with_options(layout, 32, options) }
    }

    /// Sends a request, kicks, waits for the interrupt; gives the status and the data buffer.
    pub(super) fn request(
        &mut self,
        kind: u32,
        sector: u64,
        out: &[u8],
        room: usize,
    ) -> (u8, Vec<u8>) {
        let (data, status) = self.offer(kind, sector, out, room);
        self.wait();
        (self.driver.read(status, 1)[0], self.driver.read(data, room))
    }

    pub(super) fn offer(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> (u64, u64) {
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let mut readable = vec![self.driver.buffer(&header)];
        if !out.is_empty() {
            readable.push(self.driver.buffer(out));
        }
        let data = self.driver.buffer(&vec![UNTOUCHED; room.max(1)]);
        let status = self.driver.buffer(&[UNTOUCHED]);
        let writable = if room > 0 { vec![data, status] } else { vec![status] };
        self.driver.offer(&readable, &writable);
        self.driver.kick();
        (data.0, status.0)
    }

    pub(super) fn wait(&mut self) {
        while self.driver.used().is_none() {
            let call = self.driver.call_event();
            let mut fds = [rustix::event::PollFd::new(call, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            call.drain();
        }
    }
}

#[derive(Default)]
struct Notices(AtomicU32, AtomicBool);

impl ConfigNotifier for Notices {
    fn config_changed(&self) -> Result<(), ConfigNotifyError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        if self.1.load(Ordering::SeqCst) { Err(ConfigNotifyError::Full) } else { Ok(()) }
    }
}

#[test]
fn a_guest_that_sleeps_is_served_and_the_sidecores_sleep_too() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    for layout in BOTH {
        for backend in [
            BackendConfig::Memory { len_bytes: 1 << 20 },
            BackendConfig::Raw { path: path.clone(), direct: false, registered_memory_bytes: 0 },
            BackendConfig::Raw { path: path.clone(), direct: true, registered_memory_bytes: 0 },
        ] {
            let port = port(backend, |c| c.block_size = 4096);
            port.activate(port.features()).unwrap();
            let mut guest = Guest::new(layout);
            port.start_queue(guest.driver.vring(0)).unwrap();
            for i in 0..50u64 {
                let data = pattern(i, 4096);
                assert_eq!(guest.request(kind::OUT, i % 8 * 8, &data, 0).0, 0);
                let (status, read) = guest.request(kind::IN, i % 8 * 8, &[], 4096);
                assert!(status == 0 && read == data);
                assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 0);
            }
            let stats = &port.stats()[0];
            assert!(stats.running);
            assert_eq!((stats.block.reads.get(), stats.block.flushes.get()), (50, 50));
            assert_eq!(stats.block.read_bytes.get(), 50 * 4096);
            assert!(port.stop_queue(0).unwrap().is_some());
        }
    }
}

#[test]
fn queues_stop_and_start_where_they_were() {
    for layout in BOTH {
        let port = port(BackendConfig::Memory { len_bytes: 1 << 20 }, |c| c.queues = 2);
        let mut guest = Guest::new(layout);
        port.start_queue(guest.driver.vring(1)).unwrap();
        assert!(matches!(port.start_queue(guest.driver.vring(1)), Err(DeviceError::Failed(_))));
        for round in 0..40u8 {
            assert_eq!(guest.request(kind::OUT, 3, &[round; 512], 0).0, 0);
            let vring = port.stop_queue(1).unwrap().unwrap();
            assert!(port.stop_queue(1).unwrap().is_none());
            // The first queue never ran, and has no counters.
            let stats = &port.stats()[0];
            assert_eq!((stats.index, stats.running), (1, false));
            port.start_queue(vring).unwrap();
            assert_eq!(guest.request(kind::IN, 3, &[], 512), (0, vec![round; 512]));
        }
        let outside = port.start_queue(guest.driver.vring(2)).unwrap_err();
        assert!(outside.to_string().contains("limit 1"), "{outside}");
        assert!(port.stop_queue(9).unwrap().is_none());
        port.update_memory(guest.driver.memory()).unwrap();
        assert_eq!(guest.request(kind::IN, 3, &[], 512).0, 0);
        port.update_memory(GuestMemory::empty()).unwrap();
        assert!(!guest.driver.health().is_live());
        port.reset();
        assert!(!port.stats()[0].running);
    }
}

/// A VMM sets up as many queues as it likes, one for each CPU mostly. What it does not is nothing
/// but a number.
#[test]
fn abuse_B1_queues_that_nobody_sets_up_have_no_worker_and_no_counters() {
    let disk = BackendConfig::Memory { len_bytes: 1 << 20 };
    let port = port(disk, |c| c.queues = base::limits::MAX_DISK_QUEUES);
    assert_eq!((port.queue_count(), port.stats().len()), (32, 0));
    let mut guest = Guest::new(Layout::Split);
    port.start_queue(guest.driver.vring(0)).unwrap();
    assert_eq!(guest.request(kind::OUT, 3, &[7; 512], 0).0, 0);
    let stats = port.stats();
    assert_eq!((stats.len(), stats[0].index), (1, 0));
    assert!(port.held().is_none() && port.resume() == 0);
    port.stop_queue(0).unwrap();
    assert_eq!(port.stats()[0].block.writes.get(), 1, "kept when the queue stops");
}

#[test]
fn abuse_B11_what_a_driver_did_not_take_is_unsupported() {
    let port = port(BackendConfig::Memory { len_bytes: 1 << 20 }, |_| ());
    for (taken, status) in [(false, 2), (true, 0), (false, 2)] {
        let bits = feature::DISCARD | feature::WRITE_ZEROES;
        let features = if taken { port.features() } else { port.features() & !bits };
        port.activate(features).unwrap();
        let mut guest = Guest::new(Layout::Split);
        port.start_queue(guest.driver.vring(0)).unwrap();
        for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
            assert_eq!(guest.request(kind, 0, &range(0, 8, 0), 0).0, status);
        }
        port.stop_queue(0).unwrap();
        port.reset();
    }
}

/// Hands out a disk that holds its operations.
pub(super) struct Held(pub(super) ModelDisk);

impl Backend for Held {
    fn kind(&self) -> &'static str {
        "held"
    }
    fn open_queue(&self, _depth: u16) -> Result<Box<dyn base::io::Disk>, BlockError> {
        Ok(self.0.boxed())
    }
    fn len_bytes(&self) -> u64 {
        1 << 20
    }
    fn demands(&self) -> Demands {
        Demands::NONE
    }
    fn resize(&self, _new: Option<u64>) -> Result<u64, BlockError> {
        Ok(1 << 20)
    }
    fn sync(&self) -> Result<(), BlockError> {
        let mut state = self.0.state();
        state.log.push(("sync", 0, 0));
        let error = state.sync_error.map(std::io::Error::from_raw_os_error);
        error.map_or(Ok(()), |e| Err(BlockError::resource("syncing")(e)))
    }
}

#[test]
fn stopping_a_queue_waits_for_what_is_in_flight_without_holding_up_its_sidecore() {
    let disk = ModelDisk::new(1 << 20);
    disk.state().hold = true;
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
    // Without an event of its own this disk is only looked at while its sidecore polls.
    let cores = cores(1, 10_000_000);
    let port = BlockPort::with_backend(config, Arc::new(Held(disk.clone())), &cores).unwrap();
    let other = BlockPortConfig::new("vm/other", BackendConfig::Memory { len_bytes: 1 << 20 });
    let other = BlockPort::new(other, &cores, Arc::new(MonotonicClock)).unwrap();
    let (mut guest, mut neighbour) = (Guest::new(Layout::Split), Guest::new(Layout::Packed));
    port.start_queue(guest.driver.vring(0)).unwrap();
    other.start_queue(neighbour.driver.vring(0)).unwrap();
    let (_, status) = guest.offer(kind::OUT, 0, &[1; 512], 0);
    while disk.state().held.is_empty() {
        std::thread::yield_now();
    }
    let (tell, stopped) = mpsc::channel();
    let stopping = Arc::clone(&port);
    std::thread::spawn(move || tell.send(stopping.stop_queue(0).unwrap().is_some()).unwrap());
    // The neighbour on the same sidecore is served all the while.
    for _ in 0..20 {
        assert_eq!(neighbour.request(kind::FLUSH, 0, &[], 0).0, 0);
    }
    assert!(stopped.try_recv().is_err(), "one request is in flight");
    assert_eq!(guest.driver.read(status, 1), [UNTOUCHED]);
    disk.let_go();
    assert!(stopped.recv().unwrap());
    assert_eq!(guest.driver.read(status, 1), [0]);
}

#[test]
fn the_write_cache_follows_config_features_and_driver() {
    let disk = ModelDisk::new(1 << 20);
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
    let port = BlockPort::with_backend(config, Arc::new(Held(disk.clone())), &cores(1, 0)).unwrap();
    let wce = |port: &BlockPort| {
        let mut byte = [9];
        port.read_config(32, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(wce(&port), 1);
    assert!(port.write_config(32, &[0]).is_err(), "CONFIG_WCE is not negotiated yet");
    port.activate(feature::VERSION_1).unwrap();
    assert_eq!(wce(&port), 0, "a driver that cannot flush gets write-through");
    port.activate(feature::VERSION_1 | feature::FLUSH | feature::CONFIG_WCE).unwrap();
    assert_eq!(wce(&port), 1);
    port.write_config(32, &[0]).unwrap();
    assert_eq!(wce(&port), 0);
    assert_eq!(disk.state().log, [("sync", 0, 0)], "what was volatile is made durable");
    port.write_config(32, &[1]).unwrap();
    assert_eq!(wce(&port), 1);
    for (offset, data) in [(0, &[1u8][..]), (33, &[1]), (32, &[2]), (32, &[1, 0]), (32, &[])] {
        assert!(port.write_config(offset, data).is_err(), "{offset} {data:?}");
    }
    port.reset();
    assert_eq!(wce(&port), 1, "a reset goes back to the config");
    assert!(port.read_config(250, &mut [0; 7]).is_err());
}

/// A front end that connects again, or a next daemon, says nothing of the write cache; the driver
/// that switched it off sends no flush any more.
#[test]
fn abuse_X_a_write_cache_that_a_driver_switched_off_stays_off() {
    let all = feature::VERSION_1 | feature::FLUSH | feature::CONFIG_WCE;
    let memory = || port(BackendConfig::Memory { len_bytes: 1 << 20 }, |_| {});
    let first = memory();
    first.activate(all).unwrap();
    assert!(!first.writes_through());
    first.write_config(32, &[0]).unwrap();
    assert!(first.writes_through());
    // The front end goes, comes again, and starts the same driver, or firmware and then a driver.
    first.reset();
    assert!(!first.writeback());
    first.activate(feature::VERSION_1 | feature::FLUSH).unwrap();
    assert!(!first.writeback());
    first.activate(all).unwrap();
    assert!(!first.writeback() && first.writes_through());

    // The next daemon.
    let next = memory();
    next.keep_writing_through();
    assert!(!next.writeback() && next.writes_through());
    next.activate(all).unwrap();
    assert!(!next.writeback());
    // Only the driver takes it back.
    next.write_config(32, &[1]).unwrap();
    assert!(next.writeback() && !next.writes_through());
    next.reset();
    next.activate(all).unwrap();
    assert!(next.writeback());
}

#[test]
fn a_resize_reaches_guest_config_and_checks() {
    for backend in
        [BackendConfig::Memory { len_bytes: 1 << 20 }, BackendConfig::Null { len_bytes: 1 << 20 }]
    {
        let port = port(backend, |_| {});
        let notices = Arc::new(Notices::default());
        port.set_notifier(Some(notices.clone()));
        let mut guest = Guest::new(Layout::Split);
        port.start_queue(guest.driver.vring(0)).unwrap();
        assert_eq!(guest.request(kind::IN, 2048, &[], 512).0, 1);
        assert_eq!(port.resize(Some(2 << 20)).unwrap(), 2 << 20);
        assert_eq!(notices.0.load(Ordering::SeqCst), 1);
        let mut capacity = [0; 8];
        port.read_config(0, &mut capacity).unwrap();
        assert_eq!(u64::from_le_bytes(capacity), 4096);
        assert_eq!(guest.request(kind::OUT, 2048, &[8; 512], 0).0, 0);
        // The same size again is no news.
        port.resize(None).unwrap();
        assert_eq!(notices.0.load(Ordering::SeqCst), 1);
        // Smaller, then larger: what was cut off does not come back.
        port.resize(Some(1 << 20)).unwrap();
        assert_eq!(guest.request(kind::IN, 2048, &[], 512).0, 1);
        port.resize(Some(2 << 20)).unwrap();
        assert_eq!(guest.request(kind::IN, 2048, &[], 512), (0, vec![0; 512]));
        assert!(port.resize(Some(u64::MAX)).is_err());
        port.set_notifier(None);
        port.resize(Some(1 << 20)).unwrap();
        assert_eq!(notices.0.load(Ordering::SeqCst), 3);
    }
}

#[test]
fn abuse_B5_a_resize_that_the_guest_was_not_told_of_says_so() {
    let port = port(BackendConfig::Memory { len_bytes: 1 << 20 }, |_| {});
    // Nobody is there to be told.
    assert_eq!(port.resize(Some(2 << 20)).unwrap(), 2 << 20);
    port.connected(true);
    let text = port.resize(Some(3 << 20)).unwrap_err().to_string();
    assert!(
        text.contains("has 3145728 bytes now") && text.contains("no back-end channel"),
        "{text}"
    );
    assert_eq!(port.len_bytes(), 3 << 20, "it was resized all the same");
    assert!(port.resize(None).is_err(), "nor was it told meanwhile");
    let notices = Arc::new(Notices::default());
    port.set_notifier(Some(notices.clone()));
    notices.1.store(true, Ordering::SeqCst);
    let text = port.resize(None).unwrap_err().to_string();
    assert!(text.contains("which is full"), "{text}");
    notices.1.store(false, Ordering::SeqCst);
    assert_eq!(port.resize(None).unwrap(), 3 << 20);
    assert_eq!(port.resize(None).unwrap(), 3 << 20);
    assert_eq!(notices.0.load(Ordering::SeqCst), 2, "once more, and then no more");
    // A front end that connects anew reads the size.
    notices.1.store(true, Ordering::SeqCst);
    assert!(port.resize(Some(1 << 20)).is_err());
    port.set_notifier(None);
    port.connected(false);
    port.connected(true);
    assert_eq!(port.resize(None).unwrap(), 1 << 20);
}

#[test]
fn a_dropped_port_leaves_its_sidecores() {
    let cores = cores(1, 0);
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 512 });
    let port = BlockPort::new(config, &cores, Arc::new(MonotonicClock)).unwrap();
    let guest = Guest::new(Layout::Split);
    port.start_queue(guest.driver.vring(0)).unwrap();
    assert_eq!(cores[0].stats().workers.get(), 1);
    drop(port);
    assert_eq!(cores[0].stats().workers.get(), 0);
}
