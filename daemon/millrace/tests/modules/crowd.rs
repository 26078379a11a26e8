//! Limits of what clients make a process hold: the client that holds most pays for it.

use guest_abi::module::{FRAME_BYTES, Frame, failure, kind};
use rustix::process::{Pid, test_kill_process};
use zerocopy::IntoBytes;

use crate::client::frame;
use crate::world::World;

/// Clients that are too many at [`PART_BYTES`] each: 480 MiB.
const HOGS: u8 = 40;
const PART_BYTES: usize = 12 << 20;

#[test]
fn abuse_M_requests_that_do_not_come_in_whole_find_no_more_room_at_last() {
    let world = World::start();
    let pid = Pid::from_raw(world.pid()).unwrap();
    let (mut small, mut other) = (world.client(201, "a"), world.client(202, "b"));
    let head = Frame::new(kind::REQUEST, 0, 1, 16 << 20);
    let part = [head.as_bytes(), &vec![1; PART_BYTES]].concat();
    let mut hogs = Vec::new();
    for id in 1..=HOGS {
        let mut hog = world.client(id, if id % 2 == 0 { "a" } else { "b" });
        hog.send(&part);
        hogs.push(hog);
        // Whoever holds little is served throughout.
        assert_eq!(small.ask(id.into(), b"a little"), b"a little");
        assert_eq!(other.ask(id.into(), b"other"), b"other");
    }
    // So is one with a long request, once it is its turn.
    let body = vec![b'z'; 12 << 20];
    let mut long = world.client(203, "a");
    long.send(&frame(kind::REQUEST, 0, 1, &body));
    let answer = long.next().unwrap();
    assert!(answer.flags == 0 && answer.body == body, "{:?}", answer.failure());
    let stats = world.modules.stats();
    let crowded: u64 = stats.iter().map(|s| s.crowded).sum();
    // 256 MiB in the pot and 32 for each module hold 26 such parts.
    assert!((10..u64::from(HOGS)).contains(&crowded), "{stats:?}");
    test_kill_process(pid).unwrap();
    assert_eq!(world.pid(), pid.as_raw_nonzero().get());
    // The first ones hold as much as the others: each that was sent away was told why.
    let gone = usize::try_from(crowded).unwrap();
    let mut told = 0;
    world.modules.stop();
    for hog in &mut hogs {
        while let Some(got) = hog.next() {
            let (code, text) = got.failure();
            assert!(matches!(code, failure::LIMIT | failure::ENDING), "{text}");
            told += usize::from(code == failure::LIMIT);
        }
    }
    assert_eq!(told, gone);
}

#[test]
fn abuse_M_replies_that_nobody_takes_find_no_more_room_at_last() {
    let world = World::start();
    let pid = world.pid();
    let mut small = world.client(201, "a");
    let body = vec![b'z'; 4 << 20];
    let mut deaf = Vec::new();
    for id in 1..=100 {
        let mut client = world.client(id, "a");
        client.request(1, 0, &body);
        deaf.push(client);
        assert_eq!(small.ask(id.into(), b"a little"), b"a little");
    }
    let stats = world.modules.stats();
    assert!(stats[0].crowded > 0, "{stats:?}");
    assert_eq!(world.pid(), pid);
    // The last one has its room: others were sent away for it.
    let last = deaf.last_mut().unwrap().next().unwrap();
    assert!(last.flags == 0 && last.body.len() + FRAME_BYTES > 4 << 20);
}
