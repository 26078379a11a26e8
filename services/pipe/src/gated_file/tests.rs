//! A file that goes to a socket at its VM's ceiling.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::pipe::HOLE;

use super::*;
use crate::purse::Purse;
use crate::testing::{pattern, vm_with};

fn file(purse: &Arc<Purse>, bytes: &[u8], extents: Vec<(u64, u64)>) -> GatedFile {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(bytes, 0).unwrap();
    let len_bytes = extents.iter().map(|(_, len)| len).sum();
    let source = FileSource::new(image.into(), bytes.len() as u64, extents, len_bytes).unwrap();
    GatedFile::new(source, DiskGate::new(Arc::clone(purse), None))
}

#[test]
fn a_socket_gets_what_the_ceiling_allows_and_holes_beyond_it() {
    const RATE: u64 = 1 << 20;
    let bytes = pattern(1 << 20);
    let (purse, account, clock) = vm_with(RATE);
    let mut file = file(&purse, &bytes, vec![(HOLE, 5000), (0, 300_000), (HOLE, 5000)]);
    let (sink, mut taker) = UnixStream::pair().unwrap();
    let (mut sent, mut got) = (0, Vec::new());
    let start_ns = purse.now_ns();
    loop {
        match file.send(sink.as_fd(), 20_000) {
            Transfer::Bytes(n) => {
                sent += n;
                let mut new = vec![0; n];
                taker.read_exact(&mut new).unwrap();
                got.extend(new);
            }
            Transfer::Held(_) => {
                assert!(file.is_held());
                let due = RATE * (purse.now_ns() - start_ns + 100_000_000) / 1_000_000_000;
                let read = purse.stats.read_bytes.load(Ordering::Relaxed);
                assert!(read <= due + (64 << 10), "{read} of {due}");
                clock.advance_ns(10_000_000);
            }
            Transfer::End => break,
            _ => panic!("neither moved nor held"),
        }
    }
    assert_eq!(sent, 310_000);
    assert!(got[..5000].iter().chain(&got[305_000..]).all(|byte| *byte == 0));
    assert!(got[5000..305_000] == bytes[..300_000]);
    assert!(!file.is_held());
    assert!(account.stats.charged_bytes.load(Ordering::Relaxed) >= 300_000);
    assert!(purse.now_ns() > start_ns, "it never waited");
}

/// Else the rest of a block could not be shared, and its disk would read it twice.
#[test]
fn a_file_gets_whole_blocks() {
    let bytes = pattern(1 << 20);
    let (purse, _, clock) = vm_with(777_777);
    let mut file = file(&purse, &bytes, vec![(0, 1 << 20)]);
    let sink = tempfile::tempfile().unwrap();
    let mut at = 0;
    while at < 1 << 20 {
        match file.put((at, (1 << 20) - at), (sink.as_fd(), at), false) {
            Transfer::Bytes(n) => at += n as u64,
            Transfer::Held(_) => clock.advance_ns(10_000_000),
            _ => panic!("neither moved nor held"),
        }
        assert_eq!(at % 4096, 0);
    }
    let mut got = vec![0; 1 << 20];
    sink.read_exact_at(&mut got, 0).unwrap();
    assert!(got == bytes);
    assert_eq!([5, 4095, 4096, 8191, 8192].map(whole_blocks), [5, 4095, 4096, 4096, 8192]);
}
