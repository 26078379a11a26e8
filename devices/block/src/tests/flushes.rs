//! A flush that failed stays failed: for the image, on all queues, whatever later flushes would
//! say.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use base::io::{DiskDone, DiskOp, IoSlice};
use base::random::{Random, Seeded};
use queue::Layout;
use sidecore::Worker;
use vhost_user::Device;

use super::port::{Guest, Held, cores, port};
use crate::backend::Backend;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Offered, Rig, RigOptions, pattern, state};
use crate::{BackendConfig, BlockPort, BlockPortConfig};

/// Queues of one port on one disk.
fn queues(layout: Layout, disk: &ModelDisk, writeback: bool) -> [Rig; 3] {
    let port = state(4096, RigOptions { writeback, ..RigOptions::default() });
    [0; 3].map(|_| Rig::of_port(layout, 64, disk.boxed(), Arc::clone(&port)))
}

fn flush(rig: &mut Rig) -> u8 {
    let flush = rig.send(kind::FLUSH, 0, &[]);
    rig.finish(flush).0
}

#[test]
fn abuse_D1_a_failed_flush_fails_all_later_ones_on_all_queues() {
    for layout in BOTH {
        let disk = ModelDisk::new(4096);
        let mut rigs = queues(layout, &disk, true);
        rigs[0].write(0, &[1; 512]);
        disk.state().script.push_back(Err(libc::EIO));
        assert_eq!(flush(&mut rigs[0]), 1);
        let asked = disk.state().log.len();
        for rig in &mut rigs {
            assert_eq!((flush(rig), flush(rig)), (1, 1));
            // What needs no flush goes on.
            rig.write(1, &[2; 512]);
            assert_eq!(rig.read(0, 512), [1; 512]);
        }
        let state = disk.state();
        assert_eq!(state.durable[..512], [0; 512], "what the first flush lost stayed lost");
        assert!(state.log[asked..].iter().all(|op| op.0 != "flush"), "they fail at once");
    }
}

#[test]
fn abuse_D1_in_write_through_mode_every_write_fails_from_then_on() {
    for layout in BOTH {
        let disk = ModelDisk::new(4096);
        let mut rigs = queues(layout, &disk, false);
        disk.state().script.extend([Ok(512), Err(libc::EIO)]);
        let write = rigs[0].send(kind::OUT, 0, &[1; 512]);
        assert_eq!(rigs[0].finish(write), (1, 1));
        let asked = disk.state().log.len();
        for rig in &mut rigs {
            for (kind, data) in [
                (kind::OUT, vec![2; 512]),
                (kind::WRITE_ZEROES, crate::testing::range(0, 1, 0)),
                (kind::FLUSH, Vec::new()),
            ] {
                let offered = rig.send(kind, 0, &data);
                assert_eq!(rig.finish(offered), (1, 1));
            }
        }
        assert_eq!(disk.state().log.len(), asked, "they fail at once");
        // The driver switches the cache on: writes are no promise then, flushes still are.
        rigs[1].engine.set_writeback(true);
        rigs[1].write(0, &[3; 512]);
        assert_eq!(flush(&mut rigs[2]), 1);
    }
}

/// Flushes at the same time share one flush of the disk: of two, the kernel would tell only one of
/// the error.
#[test]
fn abuse_D1_flushes_at_the_same_time_share_one_and_its_failure() {
    for layout in BOTH {
        for error in [None, Some(libc::EIO)] {
            let disk = ModelDisk::new(4096);
            let [mut rig, ..] = queues(layout, &disk, true);
            disk.state().hold = true;
            let all: Vec<Offered> = (0..5)
                .map(|_| {
                    let flush = rig.send(kind::FLUSH, 0, &[]);
                    rig.engine.poll(0, &mut rig.ledger);
                    flush
                })
                .collect();
            assert_eq!(disk.state().held.len(), 1, "one is in the disk");
            disk.state().script.extend(error.map(Err));
            disk.finish_one(0);
            rig.engine.poll(0, &mut rig.ledger);
            rig.engine.poll(0, &mut rig.ledger);
            let done = std::iter::from_fn(|| rig.driver.used()).count();
            if error.is_some() {
                assert_eq!((done, disk.state().held.len()), (5, 0));
                assert!(all.iter().all(|flush| rig.status(*flush) == 1));
                continue;
            }
            assert_eq!((done, disk.state().held.len()), (1, 1), "and one for the rest");
            disk.let_go();
            assert_eq!(rig.settle().len(), 4);
            assert!(all.iter().all(|flush| rig.status(*flush) == 0));
        }
    }
}

/// One queue's flush is under way while another's fails: it may have begun before the error.
#[test]
fn abuse_D1_a_flush_that_ends_after_anothers_failure_has_failed() {
    let disk = ModelDisk::new(4096);
    let mut rigs = queues(Layout::Split, &disk, true);
    disk.state().hold = true;
    let flushes = [0, 1].map(|k: usize| {
        let flush = rigs[k].send(kind::FLUSH, 0, &[]);
        let Rig { engine, ledger, .. } = &mut rigs[k];
        engine.poll(0, ledger);
        flush
    });
    disk.state().script.push_back(Err(libc::EIO));
    disk.finish_one(0);
    disk.finish_one(0);
    // The model has one list of results for all its ends: the first queue to look takes both.
    let mut done = Vec::with_capacity(8);
    rigs[2].engine.requests.in_flight.disk.reap(&mut done);
    let [failed, ended] = done[..] else { panic!("{done:?}") };
    assert_eq!((failed.result, ended.result), (Err(libc::EIO), Ok(0)));
    for (k, result) in [(0, failed), (1, ended)] {
        disk.give_back(result);
        let Rig { engine, ledger, .. } = &mut rigs[k];
        engine.poll(0, ledger);
        assert_eq!(rigs[k].status(flushes[k]), 1);
    }
}

#[test]
fn interrupted_flushes_are_repeated_and_break_nothing() {
    let disk = ModelDisk::new(4096);
    let mut rigs = queues(Layout::Packed, &disk, true);
    rigs[0].write(0, &[1; 512]);
    disk.state().script.extend([Err(libc::EINTR), Err(libc::EAGAIN)]);
    assert_eq!((flush(&mut rigs[0]), flush(&mut rigs[1])), (0, 0));
    assert_eq!(disk.state().durable[..512], [1; 512]);
}

/// Random writes and flushes of several queues, of which some fail: what was promised is there.
#[test]
fn abuse_D1_nothing_is_promised_after_a_failure_whatever_the_order() {
    for seed in 0..60 {
        let disk = ModelDisk::new(8 * 512);
        let writeback = seed % 2 == 0;
        let port = state(8 * 512, RigOptions { writeback, ..RigOptions::default() });
        let mut rigs =
            [0; 3].map(|_| Rig::of_port(Layout::Split, 64, disk.boxed(), Arc::clone(&port)));
        let mut random = Seeded::new(seed);
        let (mut written, mut has_failed) = ([0u8; 8], false);
        for stamp in 1..120u8 {
            let rig = &mut rigs[random.below(3) as usize];
            let block = random.below(8) as usize;
            let may_fail = random.below(20) == 0;
            if may_fail {
                let script =
                    if writeback { vec![Err(libc::EIO)] } else { vec![Ok(512), Err(libc::EIO)] };
                disk.state().script = script.into();
            }
            let is_flush = writeback && (may_fail || random.below(3) == 0);
            let status = if is_flush {
                flush(rig)
            } else {
                let write = rig.send(kind::OUT, block as u64, &[stamp; 512]);
                rig.finish(write).0
            };
            disk.state().script.clear();
            has_failed |= may_fail;
            assert_eq!(status != 0, has_failed && (is_flush || !writeback));
            if !is_flush && status == 0 {
                written[block] = stamp;
            }
            if status == 0 && (is_flush || !writeback) {
                let state = disk.state();
                assert!((0..8).all(|b| written[b] == 0 || state.durable[b * 512] == written[b]));
            }
        }
    }
}

#[test]
fn abuse_D1_the_ports_own_sync_fails_and_is_failed_like_a_queues() {
    let all = |port: &BlockPort| port.activate(port.features()).unwrap();
    let disk = ModelDisk::new(1 << 20);
    let new = || {
        let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
        let config = BlockPortConfig { queues: 2, ..config };
        BlockPort::with_backend(config, Arc::new(Held(disk.clone())), &cores(1, 0)).unwrap()
    };
    // A queue's flush fails, then the driver switches the cache off.
    let port = new();
    all(&port);
    let mut guest = Guest::new(Layout::Split);
    port.start_queue(guest.driver.vring(0)).unwrap();
    disk.state().script.push_back(Err(libc::EIO));
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 1);
    let text = port.write_config(32, &[0]).unwrap_err().to_string();
    assert!(text.contains("a flush failed before"), "{text}");
    assert_eq!(port.flush_failure().unwrap().raw_os_error(), Some(libc::EIO));
    // A reset of the device, or another driver, brings nothing back.
    port.reset();
    all(&port);
    port.start_queue(guest.driver.vring(0)).unwrap();
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 1);
    drop(port);
    // The other way round; and a port made anew begins anew.
    let port = new();
    all(&port);
    assert!(port.flush_failure().is_none());
    disk.state().sync_error = Some(libc::EIO);
    port.write_config(32, &[0]).unwrap_err();
    disk.state().sync_error = None;
    let mut guest = Guest::new(Layout::Packed);
    port.start_queue(guest.driver.vring(1)).unwrap();
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 1);
    port.write_config(32, &[0]).unwrap_err();
}

/// A block device that fails: a loop device over a sparse file that its file system has no room
/// for.
struct FailingDevice {
    mount: tempfile::TempDir,
    path: PathBuf,
}

impl FailingDevice {
    /// None where this user, or this kernel, does not allow it.
    fn make(len_bytes: u64) -> Option<Self> {
        let mount = tempfile::tempdir().unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=1m", "millrace-test"], mount.path())?;
        let file = mount.path().join("device");
        File::create(&file).unwrap().set_len(len_bytes).unwrap();
        let Some(path) = run("losetup", &["--find", "--show"], &file) else {
            run("umount", &[], mount.path());
            return None;
        };
        Some(Self { mount, path: path.trim().into() })
    }

    /// More room below it: writes succeed from now on.
    fn mend(&self) {
        run("mount", &["-o", "remount,size=64m"], self.mount.path()).unwrap();
    }
}

impl Drop for FailingDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach"], &self.path);
        run("umount", &["-l"], self.mount.path());
    }
}

fn run(program: &str, args: &[&str], last: &Path) -> Option<String> {
    let done = Command::new(program).args(args).arg(last).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Does one operation and waits for it.
fn operate(disk: &mut dyn base::io::Disk, op: DiskOp) -> DiskDone {
    let mut done = Vec::with_capacity(1);
    // SAFETY: buffers are the caller's, who waits here.
    unsafe { disk.submit(0, op) }.unwrap();
    while done.is_empty() {
        disk.flush_submissions().unwrap();
        disk.reap(&mut done);
        std::thread::yield_now();
    }
    done[0]
}

#[test]
fn abuse_D1_each_queue_hears_of_a_devices_error_by_itself() {
    let Some(device) = FailingDevice::make(16 << 20) else {
        eprintln!("not run: loop devices need root");
        return;
    };
    let backend = RawBackend::open(&device.path, false, false, 512).unwrap();
    let mut disks = [0; 3].map(|_| backend.open_queue(4).unwrap());
    let data = pattern(1, 8 << 20);
    let buf = IoSlice { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
    let write = DiskOp::Write { offset: 0, bufs: &raw const buf, count: 1, len_bytes: 8 << 20 };
    assert_eq!(operate(&mut *disks[0], write).result, Ok(8 << 20), "into the page cache");
    for disk in &mut disks {
        operate(&mut **disk, DiskOp::Flush).result.unwrap_err();
    }
    // That is all that the kernel says of it: why the engine must remember.
    for disk in &mut disks {
        assert_eq!(operate(&mut **disk, DiskOp::Flush).result, Ok(0));
    }
    drop(disks);
    // Openings go from ring to ring, as many as there were at a time.
    drop([0; 3].map(|_| backend.open_queue(4).unwrap()));
    assert_eq!(backend.spare_openings(), 3);
}

#[test]
fn abuse_D1_on_a_device_that_failed_once_every_flush_fails_until_it_is_opened_anew() {
    let Some(device) = FailingDevice::make(16 << 20) else {
        eprintln!("not run: loop devices need root");
        return;
    };
    let raw = || BackendConfig::Raw {
        path: device.path.clone(),
        direct: false,
        registered_memory_bytes: 0,
    };
    let disk = port(raw(), |config| config.queues = 2);
    disk.activate(disk.features()).unwrap();
    let mut guests = [Layout::Split, Layout::Packed].map(Guest::new);
    for (index, guest) in guests.iter().enumerate() {
        disk.start_queue(guest.driver.vring(index as u16)).unwrap();
    }
    for sector in (0..16384).step_by(1024) {
        assert_eq!(guests[0].request(kind::OUT, sector, &pattern(sector, 512 << 10), 0).0, 0);
    }
    assert_eq!(guests[1].request(kind::FLUSH, 0, &[], 0).0, 1);
    // The storage is mended, and the kernel would say that all is well.
    device.mend();
    for _ in 0..3 {
        for guest in &mut guests {
            assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 1);
        }
    }
    assert!(disk.flush_failure().is_some());
    disk.write_config(32, &[0]).unwrap_err();
    drop(disk);
    let disk = port(raw(), |_| {});
    disk.activate(disk.features()).unwrap();
    let mut guest = Guest::new(Layout::Split);
    disk.start_queue(guest.driver.vring(0)).unwrap();
    assert_eq!(guest.request(kind::OUT, 0, &pattern(1, 4096), 0).0, 0);
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).0, 0);
}
