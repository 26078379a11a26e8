//! Channels, as they are listed.

use std::net::IpAddr;

use serde::Serialize;

/// A VM that takes part in channels, or may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChannelStatus {
    /// VM.
    pub vm: String,
    /// Its trust domain: its members are its peers.
    pub domain: String,
    /// How it stands.
    pub state: ChannelState,
    /// Why it is not (or not well) a member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it joins by itself.
    pub auto: bool,
    /// Its number at the doorbell server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u16>,
    /// True when its module has not shown for `dead_after_ms` that it lives.
    pub silent: bool,
    /// Bytes of its memory that peers see.
    pub window_len_bytes: u64,
    /// MAC addresses that peers know it by.
    pub macs: Vec<String>,
    /// IP addresses of the same.
    pub addresses: Vec<IpAddr>,
    /// Devices of peers that should be gone and could not be unplugged from it yet.
    pub zombies: usize,
    /// How it stands with each peer, as its module says.
    pub links: Vec<ChannelLink>,
}

impl ChannelStatus {
    /// A VM that is no member.
    pub fn out(vm: &str, domain: &str, auto: bool) -> Self {
        Self {
            vm: vm.into(),
            domain: domain.into(),
            state: ChannelState::Out,
            reason: None,
            auto,
            id: None,
            silent: false,
            window_len_bytes: 0,
            macs: Vec::new(),
            addresses: Vec::new(),
            zombies: 0,
            links: Vec::new(),
        }
    }
}

/// How a VM stands in its trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelState {
    /// No member.
    Out,
    /// Its doorbell is being plugged.
    Joining,
    /// A member whose module has not spoken yet.
    Joined,
    /// A member whose module works.
    Active,
    /// Gives back what it has of others, and waits for what others have of it.
    Leaving,
    /// Its module said nonsense, or it lost its doorbell.
    Broken,
    /// Its VM is gone, and peers still have its memory.
    Dead,
}

impl ChannelState {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Out,
        Self::Joining,
        Self::Joined,
        Self::Active,
        Self::Leaving,
        Self::Broken,
        Self::Dead,
    ];

    /// The name in listings and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::Joining => "joining",
            Self::Joined => "joined",
            Self::Active => "active",
            Self::Leaving => "leaving",
            Self::Broken => "broken",
            Self::Dead => "dead",
        }
    }

    /// The state of a name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// A member's side of a link to one peer. Counters begin anew with each load of its module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChannelLink {
    /// The peer.
    pub vm: String,
    /// How the link stands: `none`, `opening`, `up`, `draining` or `closed`.
    pub state: String,
    /// The peer's memory in this VM: `none`, `plugging`, `plugged`, `unplugging` or `failed`.
    pub memory: String,
    /// Why it could not be plugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Pages of the peer that are in use here.
    pub held_pages: u32,
    /// Messages of this member that the peer still refers to.
    pub lent_messages: u32,
    /// Messages to the peer.
    pub sent: u64,
    /// Messages of the peer.
    pub received: u64,
    /// Bytes to the peer.
    pub sent_bytes: u64,
    /// Bytes of the peer, as the peer says.
    pub received_bytes: u64,
    /// Of the bytes sent: passed by reference, without a copy.
    pub referred_bytes: u64,
    /// Messages of the peer that were wrong.
    pub refused: u64,
}
