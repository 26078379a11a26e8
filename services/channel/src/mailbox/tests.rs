use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;

use guest_abi::channel::GUEST_MAGIC;
use zerocopy::IntoBytes;

use super::testing::MemberSide;
use super::*;

fn member_of(mailbox: &Mailbox) -> MemberSide {
    MemberSide::new(mailbox.file().as_fd().try_clone_to_owned().unwrap())
}

#[test]
fn the_file_keeps_its_length() {
    let mailbox = Mailbox::new().unwrap();
    assert_eq!(rustix::fs::fstat(&**mailbox.file()).unwrap().st_size, MAILBOX_LEN as i64);
    for len in [0, MAILBOX_LEN as u64 * 2] {
        assert!(rustix::fs::ftruncate(&**mailbox.file(), len).is_err());
    }
    assert!(rustix::fs::fcntl_add_seals(&**mailbox.file(), SealFlags::WRITE).is_err());
}

#[test]
fn the_magic_number_comes_with_the_first_half_and_the_sequence_is_even() {
    let mut mailbox = Mailbox::new().unwrap();
    let member = member_of(&mailbox);
    assert_eq!(member.word(0), 0);
    let mut half = [7; HOST_WORDS];
    assert!(mailbox.publish(&half));
    assert_eq!(member.word(0), HOST_MAGIC);
    assert_eq!(member.word(SEQ * WORD), 2);
    assert_eq!(member.word(GUEST_OFF - WORD), 7);
    assert_eq!(member.word(GUEST_OFF), 0);
    assert!(!mailbox.publish(&half));
    half[SEQ] = 3 << 32;
    assert!(mailbox.publish(&half));
    assert_eq!(member.word(SEQ * WORD), 3 << 32 | 4);
    mailbox.beat();
    mailbox.beat();
    assert_eq!(member.host().heartbeat.get(), 2);
}

#[test]
fn what_a_member_scribbles_over_the_hosts_half_is_healed() {
    let mut mailbox = Mailbox::new().unwrap();
    let member = member_of(&mailbox);
    let mut half = [7; HOST_WORDS];
    mailbox.publish(&half);
    for off in [0, SEQ * WORD, 4096] {
        member.scribble(off, u64::MAX);
    }
    half[1] = 8;
    mailbox.publish(&half);
    assert_eq!(member.word(0), HOST_MAGIC);
    assert_eq!(member.word(SEQ * WORD), 4);
    assert_eq!(member.word(4096), 7);
}

#[test]
fn a_reader_never_sees_half_of_a_change() {
    let mut mailbox = Mailbox::new().unwrap();
    let member = member_of(&mailbox);
    mailbox.publish(&[1; HOST_WORDS]);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let reader = std::thread::spawn(move || {
        let mut seen = 0;
        while !stopped.load(Ordering::Relaxed) {
            let bytes = member.host_bytes();
            let words: Vec<u64> = bytes
                .chunks_exact(WORD)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
                .collect();
            assert!(words[512..].iter().all(|word| *word == words[512]));
            assert!(words[512] >= seen);
            seen = words[512];
        }
    });
    for value in 2..2_000 {
        mailbox.publish(&[value; HOST_WORDS]);
    }
    stop.store(true, Ordering::Relaxed);
    reader.join().unwrap();
}

#[test]
fn the_members_half_is_what_it_wrote_until_it_is_forgotten() {
    let mut mailbox = Mailbox::new().unwrap();
    let member = member_of(&mailbox);
    let mut guest = Guest::new_zeroed();
    guest.magic = GUEST_MAGIC.into();
    guest.dir_off = 4096.into();
    guest.links[31].received_bytes = 9.into();
    member.enqueue(&guest);
    assert_eq!(mailbox.guest(), guest);
    mailbox.clear_guest();
    assert!(mailbox.guest().as_bytes().iter().all(|byte| *byte == 0));
}
