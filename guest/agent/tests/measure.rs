//! Break-even size of pipes, measured with a daemon that refuses. Needs root.

#![allow(missing_docs, clippy::unwrap_used)]

use std::os::unix::fs::MetadataExt;

use common::{Mounted, World, ask, request};
use guest_abi::Reason;
use guest_abi::program::op;

mod common;

const EXT4: &str = "mke2fs -q -F -t ext4";

#[test]
fn what_pays_is_measured_once_and_told() {
    let mounted = Mounted::new(EXT4, "rw", None);
    let world = World::new(&mounted.image, true);
    let (mut daemon, program) = (world.daemon(), world.program());
    let query = || ask(&program, &request(op::QUERY, 0, 0), &[]).min_bytes_kib.get();
    assert_eq!(query(), 0);
    let device = std::fs::metadata(mounted.path("")).unwrap().dev();
    world.agent.as_ref().unwrap().measure(device);
    world.agent.as_ref().unwrap().measure(device);
    for _ in 0..16 {
        let asked = daemon.pipe();
        assert_eq!((asked.len_bytes, asked.bytes), (4096, vec![0x5A; 4096]));
        assert_eq!(query(), 0);
        daemon.done(asked.id, 0, Reason::NoFlow);
    }
    let kib = std::iter::repeat_with(query).find(|kib| *kib > 0).unwrap();
    assert!(kib.is_multiple_of(64) && (64..=64 << 10).contains(&kib), "{kib}");
}
