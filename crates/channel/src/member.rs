//! A member: what is known of a VM that takes part, and what is plugged into it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use guest_abi::channel::{self, member_state};
use registry::{Membership, PluggedDevice};

use crate::config::Flow;
use crate::error::ChannelError;
use crate::mailbox::Mailbox;
use crate::memory::Memory;
use crate::plug::{Part, Place};
use crate::said::{ModuleState, Said};
use crate::table;
use crate::worker::Worker;

/// Where the answer to somebody who waits goes.
pub(crate) type Reply = SyncSender<Result<(), ChannelError>>;

/// What a member is, from the host's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its doorbell is being plugged; nobody else knows of it.
    Joining,
    /// It takes part.
    Joined,
    /// Its half of the mailbox is nonsense: nothing is plugged for it any more.
    Broken,
    /// It was told to leave.
    Leaving,
    /// Its VM is gone; peers still have its memory.
    Dead,
}

/// A device in a member's VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plug {
    /// Asked for, with this id.
    Plugging(String),
    /// There.
    In(Place),
    /// Asked to go, so many times beyond the first.
    Unplugging(Place, u32),
    /// Not there, and this is why.
    Failed(String),
}

impl Plug {
    /// Where it is, if it is there.
    pub fn place(&self) -> Option<&Place> {
        match self {
            Self::In(place) | Self::Unplugging(place, _) => Some(place),
            Self::Plugging(_) | Self::Failed(_) => None,
        }
    }

    /// For people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Plugging(_) => "plugging",
            Self::In(_) => "plugged",
            Self::Unplugging(..) => "unplugging",
            Self::Failed(_) => "failed",
        }
    }

    /// As the registry keeps it; none if it is not there.
    fn record(&self, part: Part) -> Option<PluggedDevice> {
        match self {
            Self::Plugging(id) => Some(part.record(id, None)),
            Self::In(place) | Self::Unplugging(place, _) => {
                Some(part.record(&place.id, Some(&place.port)))
            }
            Self::Failed(_) => None,
        }
    }

    fn is_failed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// Somebody who waits for a member.
#[derive(Debug)]
pub(crate) enum Wait {
    /// For its doorbell, and for its memory and that of its peers to be plugged.
    Join(Reply),
    /// For it to be gone.
    Leave(Reply, Instant),
    /// For it to keep flows off the channel.
    Exclude(Reply, u32, Instant),
}

/// A member.
#[derive(Debug)]
pub(crate) struct Member {
    /// Unique in this daemon: tells reports on a former member with this index apart.
    pub serial: u64,
    /// Its place in every table of the domain.
    pub index: usize,
    pub vm: String,
    pub qmp: PathBuf,
    pub memory: Memory,
    pub macs: Vec<[u8; 6]>,
    pub addresses: Vec<IpAddr>,
    pub mailbox: Mailbox,
    /// None before it was started, and when the VM is gone.
    pub worker: Option<Worker>,
    pub life: Life,
    /// What was nonsense.
    pub why_broken: Option<String>,
    /// Its doorbell; none when there is none (any more).
    pub bell: Option<Plug>,
    /// The memory of others, by their index.
    pub peers: BTreeMap<usize, Plug>,
    /// What it said last; none when it has not spoken or it was nonsense.
    pub said: Option<Said>,
    /// When its heartbeat was another one.
    pub heard_at: Instant,
    pub excludes: Vec<Flow>,
    pub excludes_seq: u32,
    /// What the registry knows of it.
    pub recorded: Vec<PluggedDevice>,
    pub waits: Vec<Wait>,
}

impl Member {
    /// Its number at the doorbell server: above the host's, and the same for as long as the index.
    pub fn id(&self) -> u16 {
        id_of(self.index)
    }

    /// True when peers' memory is to be plugged into it and its own into theirs.
    pub fn takes_part(&self) -> bool {
        self.life == Life::Joined
    }

    /// True when nothing of the member with this index is in use here, as far as it says. One that
    /// has not spoken uses nothing; one that speaks nonsense is not believed, and only its own guest
    /// is hurt when it loses what it still uses.
    pub fn has_closed(&self, index: usize) -> bool {
        self.said.as_ref().is_none_or(|said| said.has_closed(index, id_of(index)))
    }

    /// True while it, or its module, waits for others to let go of it.
    pub fn is_leaving(&self) -> bool {
        let module = self.said.as_ref().is_some_and(|said| said.state == ModuleState::Leaving);
        self.life == Life::Leaving || module
    }

    /// True when its module has not said for too long that it lives.
    pub fn is_silent(&self, now: Instant, dead_after_ms: u32) -> bool {
        let speaks = |said: &Said| matches!(said.state, ModuleState::Active | ModuleState::Leaving);
        let since = now.saturating_duration_since(self.heard_at).as_millis();
        self.said.as_ref().is_some_and(speaks) && since > u128::from(dead_after_ms)
    }

    /// Copies and checks its half of the mailbox.
    pub fn hear(&mut self, now: Instant) {
        if !matches!(self.life, Life::Joined | Life::Leaving) {
            return;
        }
        match Said::check(&self.mailbox.guest(), self.memory.window_len) {
            Ok(said) => {
                let beat = |said: &Option<Said>| said.as_ref().map(|said| said.heartbeat);
                if beat(&said) != beat(&self.said) {
                    self.heard_at = now;
                }
                self.said = said;
            }
            Err(why) => self.set_broken(why),
        }
    }

    /// It is not believed any more.
    pub fn set_broken(&mut self, why: String) {
        tracing::error!(vm = %self.vm, "a member of a channel is broken: {why}");
        if self.life == Life::Joined {
            self.life = Life::Broken;
        }
        self.said = None;
        self.why_broken = Some(why);
    }

    /// What ran in the guest runs no more, and what it said is void.
    pub fn forget_guest(&mut self) {
        self.mailbox.clear_guest();
        self.said = None;
        if self.life == Life::Broken && self.bell.is_some() {
            self.life = Life::Joined;
            self.why_broken = None;
        }
    }

    /// Root ports may be free again: what could not be plugged may be tried again.
    pub fn forget_failures(&mut self) {
        self.peers.retain(|_, plug| !plug.is_failed());
    }

    /// Its state as tables have it.
    pub fn state(&self) -> u32 {
        match self.life {
            Life::Joining => member_state::NONE,
            Life::Broken | Life::Leaving => member_state::LEAVING,
            Life::Dead => member_state::DEAD,
            Life::Joined => match self.said.as_ref().map(|said| said.state) {
                Some(ModuleState::Active) => member_state::ACTIVE,
                Some(ModuleState::Leaving) => member_state::LEAVING,
                Some(ModuleState::None | ModuleState::Left) | None => member_state::JOINED,
            },
        }
    }

    /// Its state for people.
    pub fn state_name(&self) -> &'static str {
        match (self.life, self.state()) {
            (Life::Joining, _) => "joining",
            (Life::Broken, _) => "broken",
            (_, member_state::ACTIVE) => "active",
            (_, member_state::LEAVING) => "leaving",
            (_, member_state::DEAD) => "dead",
            _ => "joined",
        }
    }

    /// Its entry in a table, in which its memory is plugged into a slot.
    pub fn entry(&self, slot: u32) -> channel::Member {
        let mut entry = table::entry(&self.vm, &self.macs, &self.addresses);
        entry.id = u32::from(self.id()).into();
        entry.state = self.state().into();
        entry.window_len = self.memory.window_len.into();
        entry.slot = slot.into();
        if let Some(said) = &self.said {
            entry.generation = said.generation.into();
            entry.dir_off = said.dir_off.into();
        }
        entry
    }

    /// What is plugged into its VM, or may be.
    pub fn devices(&self) -> Vec<PluggedDevice> {
        let bell = self.bell.iter().map(|plug| (Part::Bell, plug));
        let peers = self.peers.iter().map(|(index, plug)| (Part::Memory(*index), plug));
        bell.chain(peers).filter_map(|(part, plug)| plug.record(part)).collect()
    }

    /// As the registry keeps it.
    pub fn membership(&self, domain: &str) -> Membership {
        Membership {
            vm: self.vm.clone(),
            domain: domain.into(),
            qmp: self.qmp.clone(),
            devices: self.devices(),
        }
    }
}

/// The number at the doorbell server of the member with this index.
pub(crate) fn id_of(index: usize) -> u16 {
    // Indices are below MAX_MEMBERS.
    u16::try_from(index + 1).unwrap_or(u16::MAX)
}
