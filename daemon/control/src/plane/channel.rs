//! Channels, as they are listed.

use std::net::IpAddr;

use serde::Serialize;

/// A VM that takes part in channels, or may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChannelStatus {
    /// VM.
    pub vm: String,
    /// Trust domain, whose other members are its peers.
    pub domain: String,
    /// State of its membership.
    pub state: ChannelState,
    /// Reason why it is not (or not well) a member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it joins without being asked.
    pub auto: bool,
    /// Id at the doorbell server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u16>,
    /// Whether its kernel module has sent no heartbeat for `dead_after_ms`.
    pub silent: bool,
    /// Whether it is broken because it sent more than its ceiling; for metrics, beside `reason`.
    #[serde(skip)]
    pub over_ceiling: bool,
    /// Bytes of its memory that peers see.
    pub window_len_bytes: u64,
    /// MAC addresses that peers know it by.
    pub macs: Vec<String>,
    /// IP addresses that peers know it by.
    pub addresses: Vec<IpAddr>,
    /// Devices of peers that should be gone and could not be unplugged from it yet.
    pub zombies: usize,
    /// Links to its peers, as its kernel module reports them.
    pub links: Vec<ChannelLink>,
}

impl ChannelStatus {
    /// Status of a VM that is no member.
    pub fn out(vm: &str, domain: &str, auto: bool) -> Self {
        Self {
            vm: vm.into(),
            domain: domain.into(),
            state: ChannelState::Out,
            reason: None,
            auto,
            id: None,
            silent: false,
            over_ceiling: false,
            window_len_bytes: 0,
            macs: Vec::new(),
            addresses: Vec::new(),
            zombies: 0,
            links: Vec::new(),
        }
    }
}

/// State of a VM's membership in its trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelState {
    /// No member.
    Out,
    /// The doorbell is being plugged.
    Joining,
    /// A member whose kernel module has not spoken yet.
    Joined,
    /// A member whose kernel module works.
    Active,
    /// Gives back what it has of others, and waits for what others have of it.
    Leaving,
    /// The kernel module sent nonsense or more than its ceiling, or the VM lost its doorbell.
    Broken,
    /// The VM is gone, and peers still have its memory.
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

/// A member's side of a link to one peer. Counters begin anew with each load of its kernel module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChannelLink {
    /// The peer.
    pub vm: String,
    /// State of the link: `none`, `opening`, `up`, `draining` or `closed`.
    pub state: String,
    /// State of the peer's memory in this VM: `none`, `plugging`, `plugged`, `unplugging` or
    /// `failed`.
    pub memory: String,
    /// Reason why the memory could not be plugged.
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
    /// Bytes sent that were passed by reference, without a copy.
    pub referred_bytes: u64,
    /// Messages of the peer that were wrong.
    pub refused: u64,
}
