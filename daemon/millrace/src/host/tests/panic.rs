//! Workers that panic: what a test has them do, as a bug would.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use base::peer_fd::PeerFd;
use control::plane::{Health, Plane, PortStatus};
use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};
use rustix::event::{PollFd, PollFlags};
use serde_json::json;
use vhost_user::codec::Request;
use vhost_user::session_store::SavedSession;
use vhost_user::testing::{BASIC, FrontEnd};
use vhost_user::{SessionStore, VhostUserError};

use super::House;

const VMS: &str = "[[switch]]\nname='lan'\n[[vm]]\nname='a'\n[[vm.net]]\nname='n'\nswitch='lan'\n\
                   [[vm.disk]]\nname='d'\nformat='memory'\nsize='1MiB'\n\
                   [vm.vsock]\ncid=3\npath='DIR/v'\n\
                   [[vm]]\nname='b'\n[[vm.net]]\nname='n'\nswitch='lan'\n";

/// Types of disk requests (virtio 1.2, 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;

fn driver() -> ModelDriver {
    let options = ModelOptions { mem_bytes: 4 << 20, ..ModelOptions::default() };
    ModelDriver::with_options(Layout::Split, 16, options)
}

/// Reads or writes sector 7: its first byte.
fn sector(driver: &mut ModelDriver, kind: u32, fill: u8) -> u8 {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&7u64.to_le_bytes());
    let header = driver.buffer(&header);
    let (data, status) = (driver.buffer(&[fill; 512]), driver.buffer(&[0xff]));
    match kind {
        OUT => driver.offer(&[header, data], &[status]),
        _ => driver.offer(&[header], &[data, status]),
    };
    driver.kick();
    while driver.used().is_none() {
        let call = driver.call_event();
        rustix::event::poll(&mut [PollFd::new(call, PollFlags::IN)], None).unwrap();
        call.drain();
    }
    assert_eq!(driver.read(status.0, 1), [0], "the request failed");
    driver.read(data.0, 1)[0]
}

/// A holder in this process.
#[derive(Default)]
struct Held(Mutex<HashMap<String, (SavedSession, Vec<PeerFd>)>>);

impl SessionStore for Held {
    fn is_persistent(&self) -> bool {
        true
    }

    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap().into()).collect();
        self.0.lock().unwrap().insert(port.into(), (state.clone(), fds));
        Ok(())
    }

    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        let all = self.0.lock().unwrap();
        Ok(all.get(port).map(|(state, fds)| {
            (state.clone(), fds.iter().map(|fd| fd.try_clone().unwrap()).collect())
        }))
    }

    fn forget(&self, port: &str) -> Result<(), VhostUserError> {
        self.0.lock().unwrap().remove(port);
        Ok(())
    }
}

impl House {
    fn panic_in(&self, worker: &str) {
        assert!(self.host.cores[0].handle.panic_in(worker), "there is no {worker}");
    }

    fn port(&self, vm: &str, port: &str) -> PortStatus {
        self.host.ports().into_iter().find(|p| p.vm == vm && p.port == port).unwrap()
    }

    fn dial(&self, vm: &str, port: &str) -> FrontEnd {
        FrontEnd::dial(&self.port(vm, port).socket)
    }

    /// Waits until a worker has been made anew so often, or given up.
    fn wait_for(&self, what: &str, worker: &str, times: u64) {
        let series = format!("millrace_worker_{what}_total");
        let is_done = || {
            let all = self.host.metrics();
            let family = all.families.iter().find(|family| family.name == series)?;
            let found = family.samples.iter().find(|(labels, _)| labels[0].1 == worker)?;
            (found.1 >= times).then_some(())
        };
        while is_done().is_none() {
            std::thread::yield_now();
        }
        // Counted at the end, under this lock.
        drop(self.host.lock());
    }
}

#[test]
fn abuse_S1_a_switch_that_panics_is_made_anew_with_its_ports_and_no_others() {
    let house = House::new(VMS);
    let nets = [house.dial("a", "n"), house.dial("b", "n")];
    let (disk, mut ring) = (house.dial("a", "d"), driver());
    disk.start(BASIC, &ring);
    house.panic_in("switch lan");
    // Without a holder VMMs see a disconnect.
    nets.iter().for_each(|net| assert!(net.try_reply().is_none()));
    house.wait_for("renewals", "switch lan", 1);
    sector(&mut ring, OUT, 0x5a);
    assert_eq!(sector(&mut ring, IN, 0), 0x5a);
    for vm in ["a", "b"] {
        assert_eq!(house.port(vm, "n").health, Health::Ok);
        // The new worker takes a queue.
        house.dial(vm, "n").start(BASIC, &driver());
    }
    let workers = house.host.status().workers;
    assert_eq!(workers.iter().filter(|w| w.name == "switch lan").count(), 1);
}

#[test]
fn abuse_S1_a_disk_that_panics_is_made_anew_with_its_bytes() {
    let house = House::new(VMS);
    let image = house.dir.path().join("r.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let raw = json!({ "disk": { "name": "r", "format": "raw", "path": image } });
    house.host.attach("a", &raw).unwrap();
    for name in ["d", "r"] {
        let (front, mut ring) = (house.dial("a", name), driver());
        front.start(BASIC, &ring);
        sector(&mut ring, OUT, 0x5a);
        let worker = format!("disk a/{name} queue 0");
        house.panic_in(&worker);
        assert!(front.try_reply().is_none());
        house.wait_for("renewals", &worker, 1);
        assert_eq!(house.port("a", name).reason, None);
        let (front, mut ring) = (house.dial("a", name), driver());
        front.start(BASIC, &ring);
        assert_eq!(sector(&mut ring, IN, 0), 0x5a, "{name}");
    }
}

/// The guest sees a pause, as over a restart of the daemon.
#[test]
fn abuse_S1_with_a_holder_no_vmm_sees_that_a_worker_panicked() {
    let house = House::with_session_store(VMS, Arc::<Held>::default());
    let (disk, mut ring) = (house.dial("a", "d"), driver());
    disk.start(BASIC, &ring);
    let (net, tx) = (house.dial("a", "n"), driver());
    net.start(BASIC, &tx);
    sector(&mut ring, OUT, 0x5a);
    for (times, worker, port) in
        [(1, "disk a/d queue 0", "d"), (2, "disk a/d queue 0", "d"), (1, "switch lan", "n")]
    {
        while !house.port("a", port).held || house.port("a", port).queues_running == 0 {
            std::thread::yield_now();
        }
        house.panic_in(worker);
        house.wait_for("renewals", worker, times);
        while house.port("a", port).resumed == 0 {
            std::thread::yield_now();
        }
        assert_eq!(sector(&mut ring, IN, 0), 0x5a);
    }
    // Their sessions answer still.
    assert!(disk.get_u64(Request::GetFeatures) != 0 && net.get_u64(Request::GetFeatures) != 0);
}

#[test]
fn abuse_S1_a_vsock_domain_that_panics_is_made_anew() {
    let house = House::new(VMS);
    let front = house.dial("a", "vsock");
    house.panic_in("vsock VM a");
    assert!(front.try_reply().is_none());
    house.wait_for("renewals", "vsock VM a", 1);
    assert_eq!((house.port("a", "vsock").health, house.domains()), (Health::Ok, 1));
    house.dial("a", "vsock").start(BASIC, &driver());
}

#[test]
fn abuse_S1_a_worker_that_panics_again_and_again_is_left_until_somebody_starts_its_ports() {
    let house = House::new(VMS);
    for times in 1..=5 {
        house.panic_in("switch lan");
        house.wait_for("renewals", "switch lan", times);
    }
    house.panic_in("switch lan");
    house.wait_for("given_up", "switch lan", 1);
    for vm in ["a", "b"] {
        let port = house.port(vm, "n");
        assert_eq!(port.health, Health::Broken);
        let reason = port.reason.unwrap();
        assert!(reason.contains("its worker panicked 5 times within 60 s"), "{reason}");
        house.host.start(vm, "n").unwrap();
        house.dial(vm, "n").start(BASIC, &driver());
    }
    assert_eq!(house.port("a", "d").health, Health::Ok);
}
