//! Member: a VM that takes part in channels, its state, and the devices plugged into it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use crate::registry::{Membership, PluggedDevice};
use guest_abi::channel::{self, member_state};

use crate::ceiling_check::CeilingCheck;
use crate::config::Flow;
use crate::error::ChannelError;
use crate::mailbox::Mailbox;
use crate::member_report::{MemberReport, ModuleState};
use crate::memory::Memory;
use crate::plug::{DeviceLocation, DevicePart};
use crate::table;
use crate::worker::MonitorWorker;

/// Channel for the answer to a caller (mpsc).
pub(crate) type Reply = SyncSender<Result<(), ChannelError>>;

/// Answers a caller. One that has given up gets no answer.
pub(crate) fn answer(reply: Reply, result: Result<(), ChannelError>) {
    let _ = reply.try_send(result);
}

/// Stage of a membership, from the host's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberStage {
    /// The doorbell is being plugged; no peer knows of the member.
    Joining,
    /// The member takes part.
    Joined,
    /// The member's half of the mailbox is nonsense: nothing is plugged for it any more.
    Broken,
    /// The member was told to leave.
    Leaving,
    /// The VM is gone; peers still have its memory.
    Dead,
}

/// State of a device of ours in a member's VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PlugState {
    /// The device is being plugged, with this id.
    Plugging(String),
    /// The device is plugged.
    Plugged(DeviceLocation),
    /// The device is being unplugged; the number counts repeated requests.
    Unplugging(DeviceLocation, u32),
    /// The device is not plugged, for this reason.
    Failed(String),
}

impl PlugState {
    /// Location of the device, if it is plugged.
    pub fn place(&self) -> Option<&DeviceLocation> {
        match self {
            Self::Plugged(place) | Self::Unplugging(place, _) => Some(place),
            Self::Plugging(_) | Self::Failed(_) => None,
        }
    }

    /// Name of the state, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Plugging(_) => "plugging",
            Self::Plugged(_) => "plugged",
            Self::Unplugging(..) => "unplugging",
            Self::Failed(_) => "failed",
        }
    }

    /// Record for the registry; none if the device is not plugged.
    fn record(&self, part: DevicePart) -> Option<PluggedDevice> {
        match self {
            Self::Plugging(id) => Some(part.record(id, None)),
            Self::Plugged(place) | Self::Unplugging(place, _) => {
                Some(part.record(&place.id, Some(&place.port)))
            }
            Self::Failed(_) => None,
        }
    }

    fn is_failed(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// Caller who waits for a member.
#[derive(Debug)]
pub(crate) enum Waiter {
    /// Waits for the doorbell, and for the memory of the member and its peers to be plugged.
    Join(Reply),
    /// Waits for the member to be gone.
    Leave(Reply, Instant),
    /// Waits for the member to keep flows off the channel.
    Exclude(Reply, u32, Instant),
}

/// Member of a trust domain.
#[derive(Debug)]
pub(crate) struct Member {
    /// Unique in this daemon: tells reports on a former member with this index apart.
    pub serial: u64,
    /// Index in every table of the domain.
    pub index: usize,
    pub vm: String,
    pub qmp: PathBuf,
    pub memory: Memory,
    pub macs: Vec<[u8; 6]>,
    pub addresses: Vec<IpAddr>,
    pub mailbox: Mailbox,
    /// Worker for the monitor; none before it was started, and when the VM is gone.
    pub worker: Option<MonitorWorker>,
    pub stage: MemberStage,
    /// Reason why the member is broken.
    pub why_broken: Option<String>,
    /// Whether that is its ceiling.
    pub is_over_ceiling: bool,
    pub ceiling: CeilingCheck,
    /// State of the doorbell; none when there is none (any more).
    pub bell: Option<PlugState>,
    /// States of peers' memory, by their index.
    pub peers: BTreeMap<usize, PlugState>,
    /// Last report; none when the member has not spoken or the report was nonsense.
    pub report: Option<MemberReport>,
    /// Time at which the heartbeat last changed.
    pub heartbeat_changed_at: Instant,
    pub excludes: Vec<Flow>,
    pub excludes_seq: u32,
    /// Devices that the registry has recorded.
    pub recorded: Vec<PluggedDevice>,
    pub waiters: Vec<Waiter>,
}

impl Member {
    /// Id at the doorbell server: above the host's, and the same for as long as the index.
    pub fn id(&self) -> u16 {
        id_of(self.index)
    }

    /// Whether peers' memory is to be plugged into it and its own into theirs.
    pub fn is_joined(&self) -> bool {
        self.stage == MemberStage::Joined
    }

    /// Whether nothing of the member with this index is in use here, by this member's report. One
    /// that has not spoken uses nothing; one that speaks nonsense is not believed, and only its own
    /// guest is hurt when it loses what it still uses.
    pub fn has_closed(&self, index: usize) -> bool {
        self.report.as_ref().is_none_or(|report| report.has_closed(index, id_of(index)))
    }

    /// Whether the member, or its module, waits for others to let go of it.
    pub fn is_leaving(&self) -> bool {
        let module =
            self.report.as_ref().is_some_and(|report| report.state == ModuleState::Leaving);
        self.stage == MemberStage::Leaving || module
    }

    /// Whether its module's heartbeat has stood still for too long.
    pub fn is_silent(&self, now: Instant, dead_after_ms: u32) -> bool {
        let speaks = |report: &MemberReport| {
            matches!(report.state, ModuleState::Active | ModuleState::Leaving)
        };
        let since = now.saturating_duration_since(self.heartbeat_changed_at).as_millis();
        self.report.as_ref().is_some_and(speaks) && since > u128::from(dead_after_ms)
    }

    /// Copies and checks its half of the mailbox.
    pub fn read_report(&mut self, now: Instant) {
        if !matches!(self.stage, MemberStage::Joined | MemberStage::Leaving) {
            return;
        }
        match MemberReport::check(&self.mailbox.guest(), self.memory.window_len) {
            Ok(report) => {
                let beat =
                    |report: &Option<MemberReport>| report.as_ref().map(|report| report.heartbeat);
                if beat(&report) != beat(&self.report) {
                    self.heartbeat_changed_at = now;
                }
                self.report = report;
            }
            Err(why) => self.set_broken(why),
        }
    }

    /// Breaks the member: its reports are not believed any more.
    pub fn set_broken(&mut self, why: String) {
        tracing::error!(vm = %self.vm, "a member of a channel is broken: {why}");
        if self.stage == MemberStage::Joined {
            self.stage = MemberStage::Broken;
        }
        self.report = None;
        self.why_broken = Some(why);
    }

    /// Forgets the guest's report: what ran in the guest runs no more.
    pub fn forget_guest(&mut self) {
        self.mailbox.clear_guest();
        self.report = None;
        if self.stage == MemberStage::Broken && self.bell.is_some() {
            self.stage = MemberStage::Joined;
            self.why_broken = None;
            self.is_over_ceiling = false;
        }
    }

    /// Forgets failures to plug, since root ports may be free again.
    pub fn forget_failures(&mut self) {
        self.peers.retain(|_, plug| !plug.is_failed());
    }

    /// State of the member as tables have it.
    pub fn state(&self) -> u32 {
        match self.stage {
            MemberStage::Joining => member_state::NONE,
            MemberStage::Broken | MemberStage::Leaving => member_state::LEAVING,
            MemberStage::Dead => member_state::DEAD,
            MemberStage::Joined => match self.report.as_ref().map(|report| report.state) {
                Some(ModuleState::Active) => member_state::ACTIVE,
                Some(ModuleState::Leaving) => member_state::LEAVING,
                Some(ModuleState::None | ModuleState::Left) | None => member_state::JOINED,
            },
        }
    }

    /// Name of the member's state, for people.
    pub fn state_name(&self) -> &'static str {
        match (self.stage, self.state()) {
            (MemberStage::Joining, _) => "joining",
            (MemberStage::Broken, _) => "broken",
            (_, member_state::ACTIVE) => "active",
            (_, member_state::LEAVING) => "leaving",
            (_, member_state::DEAD) => "dead",
            _ => "joined",
        }
    }

    /// Entry of the member for a peer's table; its memory is plugged into `slot` there.
    pub fn entry(&self, slot: u32) -> channel::Member {
        let mut entry = table::entry(&self.vm, &self.macs, &self.addresses);
        entry.id = u32::from(self.id()).into();
        entry.state = self.state().into();
        entry.window_len = self.memory.window_len.into();
        entry.slot = slot.into();
        if let Some(report) = &self.report {
            entry.generation = report.generation.into();
            entry.dir_off = report.dir_off.into();
        }
        entry
    }

    /// Devices that are plugged into the VM, or may be.
    pub fn devices(&self) -> Vec<PluggedDevice> {
        let bell = self.bell.iter().map(|plug| (DevicePart::Bell, plug));
        let peers = self.peers.iter().map(|(index, plug)| (DevicePart::Memory(*index), plug));
        bell.chain(peers).filter_map(|(part, plug)| plug.record(part)).collect()
    }

    /// Membership for the registry.
    pub fn membership(&self, domain: &str) -> Membership {
        Membership {
            vm: self.vm.clone(),
            domain: domain.into(),
            qmp: self.qmp.clone(),
            devices: self.devices(),
        }
    }
}

/// Id at the doorbell server of the member with this index.
pub(crate) fn id_of(index: usize) -> u16 {
    // Indices are below MAX_MEMBERS.
    u16::try_from(index + 1).unwrap_or(u16::MAX)
}
