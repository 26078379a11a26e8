#![allow(non_snake_case)]

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest_abi::module_ring::MIN_REGION_BYTES;
use proptest::prelude::*;

use super::*;

/// A region as the host has it, and as a client does.
fn both() -> (Arc<Slots>, Arc<Region>) {
    let folder = tempfile::tempdir().unwrap();
    let file = open(&folder.path().join("ring"), MIN_REGION_BYTES, 0o600).unwrap();
    let theirs = Region::map(file.try_clone().unwrap(), MIN_REGION_BYTES).unwrap();
    let ours = Slots::begin(Region::map(file, MIN_REGION_BYTES).unwrap());
    (ours, Arc::new(theirs))
}

fn pair() -> (Ring, Ring) {
    let (slots, region) = both();
    let (slot, host) = slots.take().unwrap();
    let client = Ring::of_client(&region, slot, host.stamp).unwrap();
    assert!(client.is_mine());
    (host, client)
}

#[test]
fn a_head_says_what_the_region_is() {
    let (slots, region) = both();
    let head = region.head();
    assert_eq!((head.magic.get(), head.version.get(), head.slots.get()), (REGION_MAGIC, 1, 3));
    assert!(slots.is(&head.id) && !slots.is(&[0; 16]));
    assert!(Ring::of_client(&region, 3, 1).is_none());
}

#[test]
fn the_slot_that_is_free_for_the_longest_time_is_the_next() {
    let (slots, region) = both();
    let mut taken: Vec<(u32, Ring)> = (0..3).map(|_| slots.take().unwrap()).collect();
    assert!(slots.take().is_none());
    let (second, mut ring) = taken.remove(1);
    ring.writer.write(b"old").unwrap();
    assert!(ring.reader.sleep());
    drop(ring);
    let (first, _ring) = taken.remove(0);
    drop(_ring);
    assert_eq!(slots.take().unwrap().0, second);
    // Its words are zero again.
    let client = Ring::of_client(&region, second, 7).unwrap();
    assert!(!client.is_mine());
    assert!(!client.reader.has_some() && !client.writer.must_ring());
    let (slot, _kept) = slots.take().unwrap();
    assert_eq!(slot, first);
}

#[test]
fn a_client_sees_that_its_slot_is_somebody_elses() {
    let (slots, region) = both();
    let mut all: Vec<(u32, Ring)> = (0..3).map(|_| slots.take().unwrap()).collect();
    let (slot, mut ring) = all.remove(0);
    let mut old = Ring::of_client(&region, slot, ring.stamp).unwrap();
    ring.writer.write(b"last words").unwrap();
    drop(ring);
    // The connection has ended, by its socket: what was said last can be read until somebody has
    // the slot.
    let mut words = Vec::new();
    assert!(old.is_mine() && old.reader.read(&mut words, 99).is_ok() && words == b"last words");
    let (again, ring) = slots.take().unwrap();
    assert!(again == slot && !old.is_mine() && ring.stamp != old.stamp);
    assert!(Ring::of_client(&region, slot, ring.stamp).unwrap().is_mine());
    // Another process begins with all of them.
    let path = region.memory.as_fd().try_clone_to_owned().unwrap();
    let _next = Slots::begin(Region::map(path, MIN_REGION_BYTES).unwrap());
    assert!(!Ring::of_client(&region, slot, ring.stamp).unwrap().is_mine());
}

#[test]
fn a_file_of_another_length_is_not_touched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ring");
    let one_of_a_disk = vec![7; MIN_REGION_BYTES as usize];
    std::fs::write(&path, &one_of_a_disk).unwrap();
    let why = open(&path, MIN_REGION_BYTES, 0o600).unwrap_err().to_string();
    assert_eq!(why, "it is not empty, and no memory for rings");
    assert!(std::fs::read(&path).unwrap() == one_of_a_disk);
    std::fs::write(&path, [7; 100]).unwrap();
    let why = open(&path, MIN_REGION_BYTES, 0o600).unwrap_err().to_string();
    assert_eq!(why, format!("it is 100 bytes long, and not {MIN_REGION_BYTES}"));
    assert_eq!(std::fs::read(&path).unwrap(), [7; 100]);
    assert_eq!(open(folder.path(), 1, 0o600).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(open(&link, 100, 0o600).is_err());
    std::fs::write(&path, [0; 100]).unwrap();
    let short = open(&path, 100, 0o600).unwrap();
    assert!(Region::map(short, 100).is_err());
}

#[test]
fn a_word_that_cannot_be_true_is_told() {
    for lie in [DATA_BYTES as u64 + 1, u64::MAX / 2, 1 << 40] {
        let (slots, region) = both();
        let mut all = std::iter::from_fn(|| slots.take());
        let (mut host, mut into) = (all.find(|(slot, _)| *slot == 0).unwrap().1, Vec::new());
        region.write_word(0, TO_HOST.tail_off, lie);
        assert!(host.reader.has_some());
        let damaged = Damaged { bytes: lie };
        assert_eq!(host.reader.read(&mut into, usize::MAX), Err(damaged));
        assert!(into.is_empty() && !host.reader.sleep());
        // Bytes that were never written were not read.
        region.write_word(0, TO_CLIENT.head_off, lie);
        assert_eq!(host.writer.write(b"x"), Err(Damaged { bytes: lie.wrapping_neg() }));
        assert_eq!(host.writer.wait(), Err(Damaged { bytes: lie.wrapping_neg() }));
    }
}

#[test]
fn who_sleeps_is_rung_once() {
    let (mut host, mut client) = pair();
    assert!(!client.writer.must_ring());
    assert!(host.reader.sleep());
    client.writer.write(b"one").unwrap();
    assert!(client.writer.must_ring() && !client.writer.must_ring());
    // Something is there: it does not sleep, and is not rung.
    assert!(!host.reader.sleep());
    assert!(!client.writer.must_ring());
    let mut into = Vec::new();
    host.reader.read(&mut into, 2).unwrap();
    assert_eq!(into, b"on");
    // A full ring: who waits for room is rung by who reads.
    let long = vec![1; DATA_BYTES + 5];
    assert!(!client.writer.wait().unwrap());
    assert_eq!(client.writer.write(&long).unwrap(), DATA_BYTES - 1);
    assert_eq!(client.writer.write(&long).unwrap(), 0);
    assert!(!host.reader.must_ring());
    assert!(client.writer.wait().unwrap());
    host.reader.read(&mut into, 1).unwrap();
    assert!(host.reader.must_ring() && !host.reader.must_ring());
}

/// Sends so many bytes, and sleeps when the ring is full.
fn send_all(writer: &mut Writer, bell: &UnixStream, bytes: &[u8]) {
    let mut left = bytes;
    while !left.is_empty() {
        let n = writer.write(left).unwrap();
        left = &left[n..];
        if writer.must_ring() {
            ring(bell);
        }
        if n == 0 && writer.wait().unwrap() {
            hear(bell);
        }
    }
}

fn ring(bell: &UnixStream) {
    rustix::net::send(bell.as_fd(), &[0], rustix::net::SendFlags::empty()).unwrap();
}

fn hear(bell: &UnixStream) {
    let heard = rustix::net::recv(bell.as_fd(), &mut [0u8; 64], rustix::net::RecvFlags::empty());
    assert_ne!(heard.unwrap().0, 0);
}

/// Two threads that sleep whenever they can: a bell that is lost leaves both asleep, and the test
/// ends by its limit.
#[test]
fn no_bell_is_lost() {
    let (mut host, client) = pair();
    let (ours, theirs) = UnixStream::pair().unwrap();
    for end in [&ours, &theirs] {
        end.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    }
    let sent: Vec<u8> = (0..40 * DATA_BYTES).map(|i| ((i * 31) >> 7) as u8).collect();
    let got = std::thread::scope(|scope| {
        let (sent, theirs) = (&sent, &theirs);
        let sender = scope.spawn(move || {
            // From single bytes to more than the ring has room for.
            let mut left = &sent[..];
            let (mut client, mut size) = (client, 1);
            while !left.is_empty() {
                let (now, rest) = left.split_at(size.min(left.len()));
                send_all(&mut client.writer, theirs, now);
                (left, size) = (rest, size * 7 % 150_001);
            }
        });
        let mut got = Vec::new();
        while got.len() < sent.len() {
            host.reader.read(&mut got, 10_000).unwrap();
            if host.reader.must_ring() {
                ring(&ours);
            }
            if got.len() < sent.len() && host.reader.sleep() {
                hear(&ours);
                host.reader.wake();
            }
        }
        sender.join().unwrap();
        got
    });
    assert!(got == sent);
}

proptest! {
    #[test]
    fn abuse_M_whatever_a_guest_writes_the_host_stays_within_its_ring(
        bytes in proptest::collection::vec(any::<u8>(), 0..900)
    ) {
        let _ = crate::fuzzing::Shared::new().unwrap().ring(&bytes);
    }

    #[test]
    fn bytes_come_out_as_they_went_in(
        steps in proptest::collection::vec((any::<bool>(), 0..200_000usize), 1..60)
    ) {
        let (mut host, mut client) = pair();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for (writes, len) in steps {
            if writes {
                let bytes: Vec<u8> = (0..len).map(|i| (i + sent.len()) as u8).collect();
                let n = client.writer.write(&bytes).unwrap();
                prop_assert_eq!(n, len.min(DATA_BYTES - (sent.len() - got.len())));
                sent.extend_from_slice(&bytes[..n]);
            } else {
                let n = host.reader.read(&mut got, len).unwrap();
                prop_assert!(n <= len);
            }
            prop_assert!(got[..] == sent[..got.len()]);
        }
        host.reader.read(&mut got, usize::MAX).unwrap();
        prop_assert!(got == sent);
    }
}
