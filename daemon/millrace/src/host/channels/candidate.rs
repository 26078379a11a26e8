//! Candidate: a VM that may become a member; when it joins, and when it does not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use channel::{Ceiling, ChannelError, MemberConfig, MemberInfo, MemberMemory};
use config::ChannelConfig;
use control::plane::{ChannelState, PlaneError};
use vhost_user::SharedRegion;

use super::addresses::{Addresses, NetAddresses, gather};
use super::excludes::Excludes;
use super::inbox::{Command, Inbox, Todo};
use super::members::Members;
use super::memory::{self, FileId};
use super::vm::Vm;
use crate::process::describe;

/// First pause between two attempts to join: a QEMU that starts, or a peer that gives pages back,
/// is there soon.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest pause: a monitor that never comes costs a connect every half minute.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How often a member is looked at: nobody tells what a switch learns, nor that a monitor was
/// closed.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

const NO_FRONT_END: &str = "no front end is connected";
const NO_MEMORY: &str = "its front end has not shared its memory yet, as it does when the guest's \
                         driver starts";
const NOT_ASKED: &str = "it is to join by command: `millrace channel join`";
const TOLD_TO_LEAVE: &str = "it was told to leave: it joins by `millrace channel join`, or when \
                             its front end reconnects";
const STILL_LEAVING: &str = "it is still leaving: it can join when its peers have given back its \
                             memory, and it theirs";
const OTHER_MEMORY: &str = "its earlier membership, with other memory, has not ended yet";

/// A connected front end.
pub struct Session {
    /// Port that it is connected to.
    pub port: String,
    /// Number of the session at the port, counted from the daemon's start.
    pub number: u64,
    /// Memory that it shares.
    pub memory: Arc<[SharedRegion]>,
}

/// State of a VM's ports; a seam for tests.
pub trait FrontEnds: Send {
    /// Connected front ends.
    fn sessions(&self) -> Vec<Session>;
    /// Addresses of each network port.
    fn addresses(&self) -> Vec<NetAddresses>;
}

/// Whether it should be a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stance {
    /// Member as soon as it can be.
    Wanted,
    /// Out, by command.
    Left,
    /// Out until a command asks it to join.
    NotAsked,
}

/// Why it is no member, though it should be.
#[derive(Debug)]
enum Obstacle {
    /// An event of its ports will end this: no timer is needed.
    NotYet(&'static str),
    /// A later attempt may succeed.
    Failed(String),
}

impl Obstacle {
    fn text(&self) -> &str {
        match self {
            Self::NotYet(text) => text,
            Self::Failed(text) => text,
        }
    }
}

impl From<anyhow::Error> for Obstacle {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(describe(&error))
    }
}

impl From<ChannelError> for Obstacle {
    fn from(error: ChannelError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// State of the thread that makes one VM a member and looks after it.
pub struct Candidate {
    vm: Arc<Vm>,
    members: Arc<dyn Members>,
    excludes: Arc<Excludes>,
    front: Box<dyn FrontEnds>,
    stance: Stance,
    /// The sessions of the last look.
    seen: Vec<(String, u64)>,
    /// Memory and addresses that it joined with last.
    joined: Option<(FileId, Addresses)>,
    /// Ceiling that its member has.
    ceiling: Ceiling,
    pause: Duration,
    next_try: Option<Instant>,
}

impl Candidate {
    /// Makes a candidate that has not looked at its ports yet.
    pub fn new(
        vm: Arc<Vm>,
        members: Arc<dyn Members>,
        excludes: Arc<Excludes>,
        front: Box<dyn FrontEnds>,
    ) -> Self {
        let stance = first_stance(&vm.config);
        let seen = Vec::new();
        let (joined, pause, next_try) = (None, FIRST_PAUSE, None);
        let ceiling = vm.ceiling();
        Self { vm, members, excludes, front, stance, seen, joined, ceiling, pause, next_try }
    }

    #[cfg(test)]
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Runs until the inbox is stopped.
    pub fn run(mut self, inbox: &Inbox) {
        let mut limit = self.look(inbox);
        loop {
            match inbox.next(limit) {
                Todo::Stop => return,
                Todo::Look => limit = self.look(inbox),
                Todo::Command(command, answer) => {
                    let result = match command {
                        Command::Join => self.join(inbox),
                        Command::Leave => self.leave(),
                    };
                    limit = self.look(inbox);
                    // Who does not wait any more does not hear it.
                    let _ = answer.try_send(result);
                }
            }
        }
    }

    /// Joins, or looks after the membership, as the ports' state demands. Returns when to look
    /// again at the latest; none: when something changes.
    pub fn look(&mut self, inbox: &Inbox) -> Option<Duration> {
        let sessions = self.front.sessions();
        if self.has_changed(&sessions) {
            (self.pause, self.next_try) = (FIRST_PAUSE, None);
        }
        let resting = match (sessions.is_empty(), self.stance) {
            (true, _) => NO_FRONT_END,
            (false, Stance::Left) => TOLD_TO_LEAVE,
            (false, Stance::NotAsked) => NOT_ASKED,
            (false, Stance::Wanted) => return self.pursue(&sessions, inbox),
        };
        self.next_try = None;
        inbox.set_why(Some(resting));
        self.watch_end()
    }

    /// Gives the addresses up once the VM is no member. The end of a membership wakes nobody:
    /// returns when to look for it again.
    fn watch_end(&self) -> Option<Duration> {
        if self.membership().is_some() {
            return Some(LOOK_INTERVAL);
        }
        self.excludes.leave(&self.vm);
        None
    }

    /// Compares the sessions with those of the last look. When none of those is left it is another
    /// front end, for which commands given to the one before do not hold.
    fn has_changed(&mut self, sessions: &[Session]) -> bool {
        let now: Vec<(String, u64)> = sessions.iter().map(|s| (s.port.clone(), s.number)).collect();
        if !self.seen.iter().any(|old| now.contains(old)) {
            self.stance = first_stance(&self.vm.config);
        }
        let changed = now != self.seen;
        self.seen = now;
        changed
    }

    fn pursue(&mut self, sessions: &[Session], inbox: &Inbox) -> Option<Duration> {
        let left = self.next_try.map(|at| at.saturating_duration_since(Instant::now()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            return Some(left);
        }
        self.next_try = None;
        let Err(obstacle) = self.advance(sessions) else {
            self.pause = FIRST_PAUSE;
            inbox.set_why(None);
            return Some(LOOK_INTERVAL);
        };
        let news = inbox.set_why(Some(obstacle.text()));
        match obstacle {
            Obstacle::NotYet(_) => self.watch_end(),
            Obstacle::Failed(why) => {
                if news && !inbox.is_stopping() {
                    tracing::warn!(vm = %self.vm.name, "no channels yet: {why}");
                }
                let pause = self.pause;
                self.next_try = Instant::now().checked_add(pause);
                self.pause = (2 * pause).min(LONGEST_PAUSE);
                Some(pause)
            }
        }
    }

    /// Makes it a member, or looks after one that is.
    fn advance(&mut self, sessions: &[Session]) -> Result<(), Obstacle> {
        if sessions.is_empty() {
            return Err(Obstacle::NotYet(NO_FRONT_END));
        }
        let table = sessions.iter().map(|s| &s.memory).find(|table| !table.is_empty());
        let table = table.ok_or(Obstacle::NotYet(NO_MEMORY))?;
        let (file, memory) =
            memory::of(table).map_err(|error| Obstacle::Failed(describe(&error)))?;
        let addresses = gather(&self.vm.config, &self.front.addresses());
        match self.membership() {
            None => self.enter(file, memory, addresses),
            Some(member) if member.state == ChannelState::Leaving.name() => {
                Err(Obstacle::Failed(STILL_LEAVING.into()))
            }
            Some(member) => match &self.joined {
                Some((with, known)) if *with == file => {
                    let known = known.clone();
                    self.refresh(&member, file, &known, addresses)
                }
                _ => Err(Obstacle::Failed(OTHER_MEMORY.into())),
            },
        }
    }

    fn membership(&self) -> Option<MemberInfo> {
        let lives = |member: &MemberInfo| {
            member.vm == self.vm.name && member.state != ChannelState::Dead.name()
        };
        self.members.list().into_iter().find(lives)
    }

    fn enter(
        &mut self,
        file: FileId,
        memory: MemberMemory,
        addresses: Addresses,
    ) -> Result<(), Obstacle> {
        (self.joined, self.ceiling) = (None, self.vm.ceiling());
        // Of an earlier membership.
        self.excludes.leave(&self.vm);
        self.join_with(memory, &addresses).inspect_err(|_| _ = self.watch_end())?;
        tracing::info!(vm = %self.vm.name, domain = %self.vm.domain, "joined the channels");
        self.joined = Some((file, addresses));
        Ok(())
    }

    fn join_with(&self, memory: MemberMemory, addresses: &Addresses) -> Result<(), Obstacle> {
        let excludes = self.excludes.join(&*self.members, &self.vm, &addresses.ips)?;
        self.members.join(MemberConfig {
            vm: self.vm.name.clone(),
            domain: self.vm.domain.clone(),
            qmp: self.vm.config.qmp.clone(),
            root_ports: self.vm.config.root_ports.clone(),
            memory,
            allow_unsealed: self.vm.config.allow_unsealed,
            macs: addresses.macs.clone(),
            addresses: addresses.ips.clone(),
            excludes,
            ceiling: self.ceiling,
        })?;
        Ok(())
    }

    /// Keeps a member's addresses, ceiling and excluded flows current. A broken member stays so
    /// until it leaves: the list says why.
    fn refresh(
        &mut self,
        member: &MemberInfo,
        file: FileId,
        known: &Addresses,
        addresses: Addresses,
    ) -> Result<(), Obstacle> {
        if addresses != *known {
            tracing::debug!(vm = %member.vm, ?addresses, "other addresses");
            self.excludes.add(&*self.members, &self.vm, &addresses.ips)?;
            self.members.set_addresses(&self.vm.name, &addresses)?;
            self.excludes.settle(&self.vm, &addresses.ips);
            self.joined = Some((file, addresses));
        }
        let ceiling = self.vm.ceiling();
        if ceiling != self.ceiling {
            self.members.set_ceiling(&self.vm.name, ceiling)?;
            self.ceiling = ceiling;
        }
        self.excludes.refresh(&*self.members, &self.vm)?;
        Ok(())
    }

    /// Joins by command: now, and later by itself.
    pub fn join(&mut self, inbox: &Inbox) -> Result<(), PlaneError> {
        let sessions = self.front.sessions();
        self.has_changed(&sessions);
        let before = std::mem::replace(&mut self.stance, Stance::Wanted);
        (self.pause, self.next_try) = (FIRST_PAUSE, None);
        let obstacle = match self.advance(&sessions) {
            Ok(()) => return Ok(()),
            Err(obstacle) => obstacle,
        };
        if !self.vm.config.auto {
            self.stance = before;
        }
        inbox.set_why(Some(obstacle.text()));
        // The look that follows tries again only after a pause.
        self.next_try = Instant::now().checked_add(self.pause);
        let text = || format!("VM {}: {}", self.vm.name, obstacle.text());
        match &obstacle {
            Obstacle::NotYet(_) => Err(PlaneError::Conflict(text())),
            Obstacle::Failed(why) if [STILL_LEAVING, OTHER_MEMORY].contains(&&**why) => {
                Err(PlaneError::Conflict(text()))
            }
            // It names the VM itself.
            Obstacle::Failed(why) => Err(PlaneError::Refused(why.clone())),
        }
    }

    /// Leaves by command, and stays out then.
    pub fn leave(&mut self) -> Result<(), PlaneError> {
        let sessions = self.front.sessions();
        self.has_changed(&sessions);
        self.stance = Stance::Left;
        self.joined = None;
        match self.members.leave(&self.vm.name) {
            Ok(()) | Err(ChannelError::NotMember { .. }) => Ok(()),
            Err(error) => Err(PlaneError::Refused(error.to_string())),
        }
    }
}

fn first_stance(config: &ChannelConfig) -> Stance {
    if config.auto { Stance::Wanted } else { Stance::NotAsked }
}
