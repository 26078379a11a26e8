//! A member's module, as far as the host sees it: played by a test.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use base::doorbell::Doorbell;
use guest_abi::channel::{GUEST_MAGIC, Guest, VERSION, guest_state};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zerocopy::FromZeros;

use super::fake_qemu::FakeQemu;
use crate::doorbell::testing::receive_all;
use crate::mailbox::testing::MemberSide;

/// A guest's part of a channel: the device and its driver.
pub(crate) struct FakeGuest {
    connection: OwnedFd,
    pub mailbox: MemberSide,
    pub id: u16,
    /// Doorbells of the members that can be rung, by the member's number.
    pub bells: BTreeMap<i64, Vec<Doorbell>>,
    pub says: Guest,
}

impl FakeGuest {
    /// Reads what the doorbell server says to a VM's device.
    pub fn of(qemu: &FakeQemu) -> Self {
        let connection = qemu.books().chardevs["millrace-bell"].try_clone().unwrap();
        let mut greeting = receive_all(connection.as_fd()).into_iter();
        assert_eq!(greeting.next().unwrap().0, 0);
        let id = u16::try_from(greeting.next().unwrap().0).unwrap();
        let (value, mailbox) = greeting.next().unwrap();
        assert_eq!(value, -1);
        let mailbox = MemberSide::new(mailbox.unwrap());
        let mut says = Guest::new_zeroed();
        says.magic = GUEST_MAGIC.into();
        says.version = VERSION.into();
        let mut guest = Self { connection, mailbox, id, bells: BTreeMap::new(), says };
        guest.take(greeting);
        guest
    }

    fn take(&mut self, messages: impl Iterator<Item = (i64, Option<OwnedFd>)>) {
        for (id, fd) in messages {
            // QEMU cannot bear to be told that somebody has left.
            self.bells
                .entry(id)
                .or_default()
                .push(Doorbell::from_peer(fd.unwrap().into()).unwrap());
        }
    }

    /// Hears who came.
    pub fn listen(&mut self) {
        let messages = receive_all(self.connection.as_fd());
        self.take(messages.into_iter());
    }

    /// Says what it has to say, and calls the host.
    pub fn call(&self) {
        self.mailbox.enqueue(&self.says);
        self.bells[&0][0].ring().unwrap();
    }

    /// Announces the guest's module, which begins.
    pub fn announce(&mut self, generation: u64, dir_off: u64) {
        self.says.state = guest_state::ACTIVE.into();
        (self.says.generation, self.says.dir_off) = (generation.into(), dir_off.into());
        self.call();
    }

    /// How the link to the peer with this index stands.
    pub fn link(&mut self, index: usize, state: u32, borrowed: u32) {
        let link = &mut self.says.links[index];
        link.peer_id = u32::try_from(index + 1).unwrap().into();
        (link.state, link.borrowed) = (state.into(), borrowed.into());
        self.call();
    }

    /// The state of a member in its table.
    pub fn state(&self, index: usize) -> u32 {
        self.mailbox.member(index).state.get()
    }

    /// Waits to be called until its table says so.
    pub fn wait_for(&self, what: &str, so: impl Fn(&Self) -> bool) {
        let bell = &self.bells[&i64::from(self.id)][0];
        // Nothing in a test takes so long.
        let long = Timespec { tv_sec: 60, tv_nsec: 0 };
        loop {
            bell.drain();
            if so(self) {
                return;
            }
            let called = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&long)).unwrap();
            assert!(called > 0, "{what}");
        }
    }
}
