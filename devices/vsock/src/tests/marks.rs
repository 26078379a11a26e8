//! The dirty log of a migration: every byte that reaches the guest is in it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use queue::MemoryShare;
use queue::dirty::DirtyLog;
use rustix::fs::MemfdFlags;

use super::*;

const PAGE: u64 = 4096;

/// A log of all of a guest's memory, which is in use from now on.
struct Log(File);

impl Log {
    fn begin(world: &mut TestDomain, guest: usize) -> Self {
        let driver = &world.guests[guest].rx;
        let region = driver.region();
        let len = (region.guest_addr + region.len_bytes) / PAGE / 8 + 1;
        let file = File::from(rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len).unwrap();
        let fd = file.try_clone().unwrap();
        let log = Arc::new(DirtyLog::new(&MemoryShare::new(), fd, len, 0).unwrap());
        let memory = driver.memory().with_log(Some(log));
        world.engine.set_memory(world.ids[guest], &memory).unwrap();
        Self(file)
    }

    fn has(&self, addr: u64) -> bool {
        let page = addr / PAGE;
        let mut byte = [0];
        self.0.read_exact_at(&mut byte, page / 8).unwrap();
        byte[0] >> (page % 8) & 1 == 1
    }
}

/// Rounds; checks that what they wrote to a guest is in the log. Returns how many payload bytes.
fn logged_bytes(world: &mut TestDomain, guest: usize, log: &Log) -> u32 {
    let mut bytes = 0;
    let mut packets = 0;
    for _ in 0..10 {
        world.now_ns += IDLE_SOCKET_POLL_INTERVAL_NS;
        world.engine.poll(world.now_ns, &mut world.ledger);
        while let Some((id, written)) = world.guests[guest].rx.used() {
            let (addr, _) = world.guests[guest].buffers.remove(&id).unwrap();
            assert!(written >= HEADER as u32);
            let last = addr + u64::from(written) - 1;
            for page in addr / PAGE..=last / PAGE {
                assert!(log.has(page * PAGE), "a written page is missing in the log");
            }
            packets += 1;
            bytes += written - HEADER as u32;
        }
    }
    assert!(packets > 0, "nothing was written");
    let unused: Vec<_> = world.guests[guest].buffers.values().collect();
    assert!(unused.iter().any(|(addr, _)| !log.has(addr + PAGE)), "the log is not all ones");
    bytes
}

#[test]
fn abuse_P11_a_reset_is_in_the_dirty_log() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut world = TestDomain::new();
        world.add_guest(layout, |_| {});
        let log = Log::begin(&mut world, 0);
        let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
        let header = world.guests[0].header(key, Op::Request);
        world.guests[0].send(&header, &[]);
        assert_eq!(logged_bytes(&mut world, 0, &log), 0);
    }
}

#[test]
fn abuse_P11_bytes_of_a_host_program_are_in_the_dirty_log() {
    let mut world = TestDomain::with_guests(1);
    let (_sock, mut stream) = world.connect_in(0, 80);
    let log = Log::begin(&mut world, 0);
    stream.write_all(&[7; 10_000]).unwrap();
    assert_eq!(logged_bytes(&mut world, 0, &log), 10_000);
}

#[test]
fn abuse_P11_bytes_of_another_guest_are_in_the_dirty_log() {
    let mut world = TestDomain::with_guests(2);
    let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    let mut b = Sock::new(world.packet(1).key());
    b.buf_alloc = 10_000;
    b.send(&mut world.guests[1], Op::Response, 0, &[]);
    world.feed(0, &mut a);
    let log = Log::begin(&mut world, 1);
    a.send(&mut world.guests[0], Op::Rw, 0, &[7; 40_000]);
    assert_eq!(logged_bytes(&mut world, 1, &log), 10_000, "straight, as far as there is credit");
    b.buf_alloc = 100_000;
    b.send(&mut world.guests[1], Op::CreditUpdate, 0, &[]);
    assert_eq!(logged_bytes(&mut world, 1, &log), 30_000, "out of our buffer");
    assert_eq!(world.stats[0].buffered_bytes.get(), 30_000);
}
