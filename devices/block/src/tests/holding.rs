//! Requests that wait for their storage: `on_error`.

use std::fs::File;
use std::sync::{Arc, mpsc};

use queue::Layout;
use queue::inflight::InflightRegion;
use queue::testing::{ModelDriver, ModelOptions};
use sidecore::{Arm, VmId, Worker};
use vhost_user::Device;

use super::files::SmallDisk;
use super::port::{Guest, Held, cores, port};
use crate::config::OnError;
use crate::gate::Gate;
use crate::limits::{BOUNCE_COUNT, HOLD_MAX_NS, HOLD_MIN_NS};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Offered, Rig, RigOptions, UNTOUCHED, pattern, range};
use crate::{BackendConfig, BlockPort, BlockPortConfig, Demands};

const LEN: usize = 1 << 20;

fn rig(layout: Layout, options: RigOptions) -> (Rig, ModelDisk) {
    let disk = ModelDisk::new(LEN);
    (Rig::with_disk(layout, disk.boxed(), options), disk)
}

fn holding(on_error: OnError) -> RigOptions {
    RigOptions { on_error, ..RigOptions::default() }
}

/// Polls until nothing more happens at this time.
fn poll(rig: &mut Rig, now_ns: u64) {
    while rig.engine.poll(now_ns, &mut rig.ledger) > 0 {}
}

/// When the queue wants to look again by itself.
fn next_look(rig: &mut Rig, now_ns: u64) -> u64 {
    let arm = rig.engine.arm(now_ns, &mut rig.ledger);
    rig.engine.disarm();
    let Arm::Until(at_ns) = arm else { panic!("{arm:?}") };
    at_ns
}

fn write(rig: &mut Rig, sector: u64, fill: u8) -> Offered {
    rig.send(kind::OUT, sector, &[fill; 512])
}

#[test]
fn abuse_B4_a_write_without_space_waits_and_goes_on_by_itself_when_there_is_some() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout, holding(OnError::Enospc));
        disk.state().full = Some(libc::ENOSPC);
        let writes = [0, 1, 2].map(|sector| write(&mut rig, sector, 7));
        poll(&mut rig, 5);
        assert!(rig.driver.used().is_none(), "nothing is answered");
        assert_eq!((rig.stats.held.get(), rig.stats.io_errors.get()), (3, 0));
        // Others go on meanwhile, on the slots that are free.
        assert_eq!(rig.driver.read(writes[0].status, 1), [UNTOUCHED]);
        let read = rig.ask(kind::IN, 8, 512);
        poll(&mut rig, 6);
        assert_eq!((rig.driver.used(), rig.status(read)), (Some((read.id, 513)), 0));
        disk.state().full = None;
        poll(&mut rig, HOLD_MIN_NS);
        assert!(rig.driver.used().is_none(), "not before it is time");
        let at_ns = next_look(&mut rig, HOLD_MIN_NS);
        assert_eq!(at_ns, 5 + HOLD_MIN_NS);
        poll(&mut rig, at_ns);
        assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 3);
        assert!(writes.iter().all(|write| rig.status(*write) == 0));
        assert_eq!(disk.state().cache[..1536], [7; 1536]);
        assert_eq!((rig.stats.held.get(), rig.stats.held_total.get()), (0, 3));
        assert_eq!(rig.engine.arm(at_ns + 1_000_000, &mut rig.ledger), Arm::Idle);
    }
}

#[test]
fn a_full_disk_is_tried_with_one_request_and_less_and_less_often() {
    let (mut rig, disk) = rig(Layout::Split, holding(OnError::Enospc));
    disk.state().full = Some(libc::EDQUOT);
    for sector in 0..16 {
        write(&mut rig, sector, 7);
    }
    let mut now_ns = 0;
    poll(&mut rig, now_ns);
    let mut pause_ns = HOLD_MIN_NS;
    for _ in 0..10 {
        disk.state().log.clear();
        let at_ns = next_look(&mut rig, now_ns);
        assert_eq!(at_ns - now_ns, pause_ns);
        poll(&mut rig, at_ns - 1);
        assert!(disk.state().log.is_empty());
        poll(&mut rig, at_ns);
        assert_eq!(disk.state().log.len(), 1);
        (now_ns, pause_ns) = (at_ns, (pause_ns * 2).min(HOLD_MAX_NS));
    }
    assert_eq!(pause_ns, HOLD_MAX_NS);
    // By command at once; and pauses begin anew.
    disk.state().log.clear();
    assert_eq!(rig.engine.resume_held(), 16);
    poll(&mut rig, now_ns);
    assert_eq!((disk.state().log.len(), rig.stats.held.get()), (16, 16));
    assert_eq!(next_look(&mut rig, now_ns) - now_ns, HOLD_MIN_NS);
    disk.state().full = None;
    assert_eq!(rig.engine.resume_held(), 16);
    poll(&mut rig, now_ns);
    assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 16);
    assert_eq!((rig.stats.held.get(), rig.stats.io_errors.get()), (0, 0));
    assert_eq!(rig.engine.resume_held(), 0);
}

#[test]
fn what_is_held_is_what_the_setting_says() {
    let (write, read) = ((kind::OUT, vec![1; 512]), (kind::IN, Vec::new()));
    let zeroes = (kind::WRITE_ZEROES, range(0, 1, 0));
    let (space, quota, io) = (libc::ENOSPC, libc::EDQUOT, libc::EIO);
    for (on_error, request, errno, is_held) in [
        (OnError::Enospc, &write, space, true),
        (OnError::Enospc, &write, quota, true),
        (OnError::Enospc, &zeroes, space, true),
        (OnError::Enospc, &write, io, false),
        (OnError::Enospc, &read, space, false),
        (OnError::Enospc, &read, io, false),
        (OnError::Hold, &write, io, true),
        (OnError::Hold, &read, io, true),
        (OnError::Hold, &write, libc::ETIMEDOUT, true),
        (OnError::Hold, &write, libc::EFAULT, false),
        (OnError::Hold, &read, libc::EINVAL, false),
        (OnError::Report, &write, space, false),
        (OnError::Report, &write, io, false),
    ] {
        let (mut rig, disk) = rig(Layout::Packed, holding(on_error));
        disk.state().script.push_back(Err(errno));
        let (kind, data) = request;
        let offered = match *kind {
            kind::IN => rig.ask(*kind, 0, 512),
            _ => rig.send(*kind, 0, data),
        };
        poll(&mut rig, 0);
        let text = format!("{on_error:?} {kind} {errno}");
        assert_eq!(rig.stats.held.get() == 1, is_held, "{text}");
        assert_eq!(rig.status(offered), if is_held { UNTOUCHED } else { 1 }, "{text}");
        poll(&mut rig, HOLD_MIN_NS);
        assert_eq!(rig.status(offered), u8::from(!is_held), "{text}");
    }
}

/// Data that a failed flush lost cannot be written again: holding the flush would end in a lie.
#[test]
fn a_flush_is_never_held() {
    for writeback in [true, false] {
        for on_error in [OnError::Hold, OnError::Enospc] {
            let options = RigOptions { writeback, ..holding(on_error) };
            let (mut rig, disk) = rig(Layout::Split, options);
            let (kind, data) =
                if writeback { (kind::FLUSH, vec![]) } else { (kind::OUT, vec![1; 512]) };
            let script =
                if writeback { vec![Err(libc::ENOSPC)] } else { vec![Ok(512), Err(libc::ENOSPC)] };
            disk.state().script = script.into();
            let offered = rig.send(kind, 0, &data);
            assert_eq!(rig.finish(offered), (1, 1));
            assert_eq!(rig.stats.held.get(), 0);
        }
    }
}

#[test]
fn in_write_through_mode_a_held_write_is_durable_when_it_is_answered() {
    let options = RigOptions { writeback: false, ..holding(OnError::Enospc) };
    let (mut rig, disk) = rig(Layout::Split, options);
    disk.state().full = Some(libc::ENOSPC);
    let writes = [0, 1].map(|sector| write(&mut rig, sector, 9));
    poll(&mut rig, 0);
    disk.state().full = None;
    poll(&mut rig, HOLD_MIN_NS);
    assert!(writes.iter().all(|write| rig.status(*write) == 0));
    assert_eq!(disk.state().durable[..1024], [9; 1024]);
}

/// The one that is tried again may fail for another reason, or not at all get to the disk.
#[test]
fn a_try_that_ends_otherwise_leaves_the_others_their_turn() {
    let (mut rig, disk) = rig(Layout::Split, holding(OnError::Enospc));
    disk.state().full = Some(libc::ENOSPC);
    let writes = [0, 1, 2].map(|sector| write(&mut rig, sector, 9));
    poll(&mut rig, 0);
    disk.state().full = Some(libc::EIO);
    let at_ns = next_look(&mut rig, 0);
    poll(&mut rig, at_ns);
    assert_eq!((rig.status(writes[0]), rig.stats.held.get()), (1, 2));
    disk.state().full = None;
    let at_ns = next_look(&mut rig, at_ns);
    poll(&mut rig, at_ns);
    assert_eq!((rig.status(writes[1]), rig.status(writes[2]), rig.stats.held.get()), (0, 0, 0));
}

#[test]
fn held_requests_take_no_bounce_buffer_and_no_place_in_a_shared_device() {
    let gate = Arc::new(Gate::new(7));
    let demands = Demands { mem_align: 512, offset_align: 512, ..Demands::NONE };
    let options = RigOptions {
        demands,
        gate: Some(Arc::clone(&gate)),
        vm: VmId::NONE,
        ..holding(OnError::Enospc)
    };
    let (mut rig, disk) = rig(Layout::Split, options);
    disk.state().full = Some(libc::ENOSPC);
    for sector in 0..18 {
        // Not where a disk with demands takes it from.
        rig.driver.buffer(&[0; 8]);
        write(&mut rig, sector, 7);
    }
    poll(&mut rig, 0);
    assert_eq!((rig.stats.held.get(), gate.in_flight()), (18, 0));
    assert_eq!(rig.engine.requests.in_flight.free_bounces(), usize::from(BOUNCE_COUNT));
    let read = rig.ask(kind::IN, 0, 512);
    poll(&mut rig, 1);
    assert_eq!(rig.status(read), 0);
    disk.state().full = None;
    poll(&mut rig, HOLD_MIN_NS);
    assert_eq!(rig.stats.held.get(), 0);
    assert_eq!(disk.state().cache[..512], [7; 512]);
}

#[test]
fn a_queue_that_stops_answers_what_it_holds() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout, holding(OnError::Hold));
        disk.state().full = Some(libc::EIO);
        let writes = [0, 1].map(|sector| write(&mut rig, sector, 7));
        poll(&mut rig, 0);
        // One more is in the disk, and fails at the end.
        disk.state().hold = true;
        let late = write(&mut rig, 2, 7);
        poll(&mut rig, 1);
        let (notice, drained) = mpsc::channel();
        rig.engine.drain(notice, false);
        assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 2, "at once");
        assert!(writes.iter().all(|write| rig.status(*write) == 1));
        assert!(drained.try_recv().is_err());
        disk.let_go();
        poll(&mut rig, 2);
        drained.recv().unwrap();
        assert_eq!((rig.status(late), rig.stats.held.get(), rig.stats.io_errors.get()), (1, 0, 3));
    }
}

/// Requests are held when the session ends, and the next one knows what was in flight.
#[test]
fn what_is_held_when_the_session_ends_is_taken_again_by_the_next_one() {
    for layout in BOTH {
        let region = InflightRegion::new(1, 64, layout).unwrap();
        let options = ModelOptions { event_idx: true, mem_bytes: 16 << 20, ..Default::default() };
        let driver = ModelDriver::with_options(layout, 64, options);
        let mut parts = driver.parts(0);
        parts.inflight = Some(Arc::clone(&region));
        let vring = queue::Vring::new(driver.queue(), parts).unwrap();
        let disk = ModelDisk::new(LEN);
        let engine = Rig::around(vring, &disk, holding(OnError::Enospc));
        let (ledger, stats) = (Default::default(), Arc::default());
        let mut rig = Rig { driver, engine, ledger, stats };
        disk.state().full = Some(libc::ENOSPC);
        let writes = [0, 1].map(|sector| write(&mut rig, sector, 7));
        poll(&mut rig, 0);
        // And one that is in the disk still.
        disk.state().hold = true;
        let late = write(&mut rig, 2, 7);
        poll(&mut rig, 1);
        let (notice, drained) = mpsc::channel();
        rig.engine.drain(notice, true);
        disk.let_go();
        poll(&mut rig, 2);
        drained.recv().unwrap();
        assert!(rig.driver.used().is_none(), "nothing is answered");
        // The next session, with room again.
        disk.state().full = None;
        let Rig { driver, engine, .. } = rig;
        let queue::Vring { queue, .. } = engine.into_vring();
        let mut parts = driver.parts(0);
        parts.inflight = Some(region);
        let vring = queue::Vring::new(queue, parts).unwrap();
        let engine = Rig::around(vring, &disk, holding(OnError::Enospc));
        let mut rig = Rig { driver, engine, ledger: Default::default(), stats: Arc::default() };
        assert_eq!(rig.settle().len(), 3);
        assert!(writes.iter().chain([&late]).all(|write| rig.status(*write) == 0));
        assert_eq!(disk.state().cache[..1536], [7; 1536]);
    }
}

#[test]
fn a_port_says_what_it_holds_goes_on_by_command_and_stops_at_once() {
    let disk = ModelDisk::new(1 << 20);
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
    let config = BlockPortConfig { queues: 2, on_error: OnError::Hold, ..config };
    let port = BlockPort::with_backend(config, Arc::new(Held(disk.clone())), &cores(1, 0)).unwrap();
    port.activate(port.features()).unwrap();
    let mut guest = Guest::new(Layout::Split);
    port.start_queue(guest.driver.vring(1)).unwrap();
    assert!(port.held().is_none());
    disk.state().full = Some(libc::EIO);
    let (_, status) = guest.offer(kind::OUT, 0, &[5; 512], 0);
    while port.held().is_none() {
        std::thread::yield_now();
    }
    let (count, error) = port.held().unwrap();
    assert_eq!((count, error.raw_os_error()), (1, Some(libc::EIO)));
    disk.state().full = None;
    // It may go on by itself just before.
    assert!(port.resume() <= 1);
    guest.wait();
    assert_eq!(guest.driver.read(status, 1), [0]);
    assert!(port.held().is_none());
    // The driver, or its VMM, takes the queue away.
    disk.state().full = Some(libc::EIO);
    let (_, status) = guest.offer(kind::IN, 0, &[], 512);
    while port.held().is_none() {
        std::thread::yield_now();
    }
    assert!(port.stop_queue(1).unwrap().is_some());
    assert_eq!(
        (guest.driver.used().map(|used| used.1), guest.driver.read(status, 1)),
        (Some(0), vec![1])
    );
    assert!(port.held().is_none());
}

#[test]
fn abuse_B4_a_guest_waits_while_its_images_file_system_is_full() {
    let Some(small) = SmallDisk::mount() else {
        eprintln!("not run: mounting a tmpfs needs root");
        return;
    };
    let (path, other) = (small.0.path().join("disk.img"), small.0.path().join("other"));
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    std::fs::write(&other, vec![1; 512 << 10]).unwrap();
    let raw = BackendConfig::Raw { path, direct: false, registered_memory_bytes: 0 };
    let port = port(raw, |_| {});
    port.activate(port.features()).unwrap();
    let mut guest = Guest::new(Layout::Packed);
    port.start_queue(guest.driver.vring(0)).unwrap();
    let data = pattern(3, 768 << 10);
    let (_, status) = guest.offer(kind::OUT, 0, &data, 0);
    while port.held().is_none() {
        std::thread::yield_now();
    }
    assert_eq!(guest.driver.read(status, 1), [UNTOUCHED]);
    assert_eq!(port.held().unwrap().1.raw_os_error(), Some(libc::ENOSPC));
    std::fs::remove_file(other).unwrap();
    guest.wait();
    assert_eq!(guest.driver.read(status, 1), [0]);
    assert!(guest.request(kind::IN, 0, &[], 768 << 10) == (0, data));
}
