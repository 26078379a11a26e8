//! Report of a member: its half of the mailbox, copied and checked.

use guest_abi::channel::{
    GUEST_MAGIC, Guest, LinkStatus, MAX_MEMBERS, MAX_QUEUES, MAX_SEGS, PAGE_LEN, SLOTS, VERSION,
    guest_state, link_state,
};

/// Most messages that a peer can refer to: all slots of all rings.
const MAX_LENT: u32 = (MAX_QUEUES * SLOTS) as u32;
/// Most pages that can be in use: all of those messages' pieces.
const MAX_BORROWED: u32 = MAX_LENT * MAX_SEGS as u32;

/// State of a member's kernel module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModuleState {
    None,
    Active,
    Leaving,
    Left,
}

/// State of a member's link to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LinkState {
    /// No link.
    #[default]
    None,
    /// The link is offered; the peer's offer is awaited.
    Opening,
    /// Messages go both ways.
    Up,
    /// The link waits for pages lent and borrowed.
    Draining,
    /// Nothing is lent or borrowed.
    Closed,
}

impl LinkState {
    /// Name of the state, for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Opening => "opening",
            Self::Up => "up",
            Self::Draining => "draining",
            Self::Closed => "closed",
        }
    }

    fn of(number: u32) -> Option<Self> {
        Some(match number {
            link_state::NONE => Self::None,
            link_state::OPENING => Self::Opening,
            link_state::UP => Self::Up,
            link_state::DRAINING => Self::Draining,
            link_state::CLOSED => Self::Closed,
            _ => return None,
        })
    }
}

/// Link as its member reports it; counters are the member's word alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Link {
    /// Id of the peer.
    pub peer_id: u32,
    /// State of the link.
    pub state: LinkState,
    /// Number of the peer's pages that are in use.
    pub borrowed: u32,
    /// Number of messages that the peer still refers to.
    pub lent: u32,
    /// Number of messages.
    pub sent: u64,
    /// Number of messages.
    pub received: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes sent by reference.
    pub referred_bytes: u64,
    /// Number of the peer's messages that were wrong.
    pub refused: u64,
    /// Bytes received.
    pub received_bytes: u64,
}

/// Report of a member, out of its half of the mailbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemberReport {
    pub state: ModuleState,
    pub generation: u64,
    pub dir_off: u64,
    pub heartbeat: u64,
    pub excludes_seq: u32,
    links: Vec<Link>,
}

impl MemberReport {
    /// Checks a copy of the member's half; none when it has not spoken. The error says what is
    /// nonsense.
    pub fn check(guest: &Guest, window_len: u64) -> Result<Option<Self>, String> {
        if guest.magic == 0 {
            return Ok(None);
        }
        if guest.magic != GUEST_MAGIC {
            return Err(format!(
                "its magic number is {:#x}; {GUEST_MAGIC:#x} expected",
                guest.magic
            ));
        }
        if guest.version != VERSION {
            return Err(format!("it speaks version {}; {VERSION} expected", guest.version));
        }
        let state = match guest.state.get() {
            guest_state::NONE => ModuleState::None,
            guest_state::ACTIVE => ModuleState::Active,
            guest_state::LEAVING => ModuleState::Leaving,
            guest_state::LEFT => ModuleState::Left,
            other => return Err(format!("its state is {other}; the highest is 3")),
        };
        let dir_off = guest.dir_off.get();
        let end = dir_off.checked_add(PAGE_LEN);
        let inside = dir_off.is_multiple_of(PAGE_LEN) && end.is_some_and(|end| end <= window_len);
        if state == ModuleState::Active && !inside {
            return Err(format!(
                "its directory is at {dir_off:#x}; a whole page within {window_len:#x} bytes is \
                 expected"
            ));
        }
        let links = guest.links.iter().enumerate().map(|(index, link)| check(index, link));
        Ok(Some(Self {
            state,
            generation: guest.generation.get(),
            dir_off,
            heartbeat: guest.heartbeat.get(),
            excludes_seq: guest.excludes_seq.get(),
            links: links.collect::<Result<_, _>>()?,
        }))
    }

    /// Link to the peer with this index.
    pub fn link(&self, index: usize) -> Link {
        self.links.get(index).copied().unwrap_or_default()
    }

    /// Whether nothing of the peer with this index and id is in use here, as far as this member
    /// says.
    pub fn has_closed(&self, index: usize, id: u16) -> bool {
        if matches!(self.state, ModuleState::None | ModuleState::Left) {
            return true;
        }
        let link = self.link(index);
        match link.state {
            LinkState::None => true,
            // The id was written already, or will be soon.
            _ if link.peer_id != u32::from(id) => false,
            LinkState::Closed => link.borrowed == 0 && link.lent == 0,
            _ => false,
        }
    }
}

fn check(index: usize, status: &LinkStatus) -> Result<Link, String> {
    debug_assert!(index < MAX_MEMBERS);
    let number = status.state.get();
    let Some(state) = LinkState::of(number) else {
        return Err(format!("the state of link {index} is {number}; the highest is 4"));
    };
    let limits = [
        ("pages borrowed", status.borrowed.get(), MAX_BORROWED),
        ("messages lent", status.lent.get(), MAX_LENT),
    ];
    for (what, value, most) in limits {
        if value > most {
            return Err(format!("{what} on link {index} are {value}; at most {most} can be"));
        }
    }
    Ok(Link {
        peer_id: status.peer_id.get(),
        state,
        borrowed: status.borrowed.get(),
        lent: status.lent.get(),
        sent: status.sent.get(),
        received: status.received.get(),
        sent_bytes: status.sent_bytes.get(),
        referred_bytes: status.referred_bytes.get(),
        refused: status.refused.get(),
        received_bytes: status.received_bytes.get(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::{FromBytes, FromZeros};

    use super::*;

    const WINDOW: u64 = 1 << 20;

    fn guest() -> Guest {
        let mut guest = Guest::new_zeroed();
        guest.magic = GUEST_MAGIC.into();
        guest.version = VERSION.into();
        guest.state = guest_state::ACTIVE.into();
        guest.dir_off = (WINDOW - PAGE_LEN).into();
        guest
    }

    #[test]
    fn nonsense_is_named() {
        let says = |change: fn(&mut Guest)| {
            let mut guest = guest();
            change(&mut guest);
            MemberReport::check(&guest, WINDOW).unwrap_err()
        };
        for (error, text) in [
            (says(|g| g.magic = 1.into()), "magic number is 0x1;"),
            (says(|g| g.version = 2.into()), "version 2; 5 expected"),
            (says(|g| g.state = 4.into()), "state is 4; the highest is 3"),
            (says(|g| g.dir_off = 1.into()), "directory is at 0x1;"),
            (says(|g| g.dir_off = WINDOW.into()), "within 0x100000 bytes"),
            (says(|g| g.dir_off = (u64::MAX - 4095).into()), "directory"),
            (says(|g| g.links[3].state = 5.into()), "link 3 is 5; the highest is 4"),
            (says(|g| g.links[0].lent = 1025.into()), "lent on link 0 are 1025; at most 1024"),
            (says(|g| g.links[31].borrowed = 18433.into()), "link 31 are 18433; at most 18432"),
        ] {
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_link_is_closed_when_it_says_so_and_holds_nothing() {
        let mut guest = guest();
        let closed =
            |guest: &Guest| MemberReport::check(guest, WINDOW).unwrap().unwrap().has_closed(2, 3);
        assert!(closed(&guest));
        let link = &mut guest.links[2];
        link.peer_id = 3.into();
        link.state = link_state::UP.into();
        assert!(!closed(&guest));
        guest.links[2].state = link_state::CLOSED.into();
        assert!(closed(&guest));
        guest.links[2].borrowed = 1.into();
        assert!(!closed(&guest));
        guest.links[2].borrowed = 0.into();
        guest.links[2].peer_id = 0.into();
        assert!(!closed(&guest));
        guest.state = guest_state::LEFT.into();
        assert!(closed(&guest));
    }

    #[test]
    fn silence_is_no_nonsense() {
        assert_eq!(MemberReport::check(&Guest::new_zeroed(), WINDOW), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_checked(
            mut bytes in proptest::collection::vec(any::<u8>(), size_of::<Guest>()),
            good in any::<bool>(),
        ) {
            if good {
                bytes[..12].copy_from_slice(&zerocopy::IntoBytes::as_bytes(&guest())[..12]);
            }
            let guest = Guest::read_from_bytes(&bytes).unwrap();
            if let Ok(Some(report)) = MemberReport::check(&guest, WINDOW) {
                prop_assert!(report.state != ModuleState::Active || report.dir_off < WINDOW);
                prop_assert!(report.links.iter().all(|link| link.borrowed <= MAX_BORROWED));
            }
        }
    }
}
