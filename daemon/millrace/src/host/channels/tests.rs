//! Candidates, with ports and members that are played.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ::channel::{Ceiling, Flow, LinkInfo, MemberConfig, QmpError};
use base::peer_fd::PeerFd;
use config::ChannelConfig;
use rustix::fs::MemfdFlags;
use vhost_user::SharedRegion;

use super::addresses::Addresses;
use super::*;

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Does what it is asked, unless it is to refuse, and says what that was.
pub struct Played {
    list: Mutex<Vec<MemberInfo>>,
    pub refuse: Mutex<VecDeque<ChannelError>>,
    asked: Mutex<Sender<String>>,
}

impl Played {
    fn note(&self, what: String) -> Result<(), ChannelError> {
        self.asked.lock().unwrap().send(what).unwrap();
        self.refuse.lock().unwrap().pop_front().map_or(Ok(()), Err)
    }
}

impl Members for Played {
    fn join(&self, config: MemberConfig) -> Result<(), ChannelError> {
        let regions = config.memory.regions.len();
        let (macs, ips) = (config.macs.len(), config.addresses.len());
        let limited = if config.ceiling.is_none() { "" } else { " limited" };
        let text = format!("join {} {} {regions} {macs} {ips}{limited}", config.vm, config.domain);
        self.note(text)?;
        self.list.lock().unwrap().push(info(&config.vm, "joined"));
        Ok(())
    }

    fn leave(&self, vm: &str) -> Result<(), ChannelError> {
        self.note(format!("leave {vm}"))?;
        self.list.lock().unwrap().retain(|member| member.vm != vm);
        Ok(())
    }

    fn set_addresses(&self, vm: &str, addresses: &Addresses) -> Result<(), ChannelError> {
        self.note(format!("{vm} has {:?}", addresses.ips))
    }

    fn set_ceiling(&self, vm: &str, ceiling: Ceiling) -> Result<(), ChannelError> {
        self.note(format!("{vm} may send {}", ceiling.bytes_per_s))
    }

    fn exclude(&self, vm: &str, flows: &[Flow]) -> Result<(), ChannelError> {
        self.note(format!("{vm} excludes {}", flows.len()))
    }

    fn list(&self) -> Vec<MemberInfo> {
        self.list.lock().unwrap().clone()
    }
}

fn info(vm: &str, state: &'static str) -> MemberInfo {
    MemberInfo {
        vm: vm.into(),
        domain: "t".into(),
        id: 1,
        state,
        why_broken: None,
        is_over_ceiling: false,
        generation: None,
        is_silent: false,
        window_len_bytes: MIB,
        macs: vec![[2; 6]],
        addresses: Vec::new(),
        zombies: 2,
        links: Vec::new(),
    }
}

/// The ports of a VM.
#[derive(Clone, Default)]
struct Ports(Arc<Mutex<PortsNow>>);

#[derive(Default)]
struct PortsNow {
    sessions: Vec<(&'static str, u64, Arc<[SharedRegion]>)>,
    nets: Vec<NetAddresses>,
}

impl Ports {
    fn set(&self, sessions: &[(&'static str, u64, &Arc<[SharedRegion]>)]) {
        self.0.lock().unwrap().sessions = sessions
            .iter()
            .map(|(port, number, memory)| (*port, *number, (*memory).clone()))
            .collect();
    }
}

impl FrontEnds for Ports {
    fn sessions(&self) -> Vec<Session> {
        let session = |(port, number, memory): &(&str, u64, Arc<[SharedRegion]>)| Session {
            port: (*port).into(),
            number: *number,
            memory: memory.clone(),
        };
        self.0.lock().unwrap().sessions.iter().map(session).collect()
    }

    fn addresses(&self) -> Vec<NetAddresses> {
        self.0.lock().unwrap().nets.clone()
    }
}

fn file() -> Arc<PeerFd> {
    let file = rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, MIB).unwrap();
    Arc::new(file.into())
}

fn table(files: &[&Arc<PeerFd>]) -> Arc<[SharedRegion]> {
    let region = |(i, file): (usize, &&Arc<PeerFd>)| SharedRegion {
        guest_addr: i as u64 * 2 * MIB,
        len_bytes: MIB,
        mmap_offset: 0,
        file: Arc::clone(file),
    };
    files.iter().enumerate().map(region).collect()
}

/// A VM `a`, and what it is played with.
struct World {
    ports: Ports,
    members: Arc<Played>,
    asked: Receiver<String>,
    inbox: Inbox,
    candidate: Candidate,
}

fn vm(auto: bool) -> Vm {
    let mut vm = vm_named("a");
    vm.config.auto = auto;
    vm
}

/// One of the domain `t`, which joins by itself.
pub fn vm_named(name: &str) -> Vm {
    let config = ChannelConfig {
        qmp: "/q".into(),
        root_ports: "millrace".into(),
        macs: vec![[2; 6]],
        addresses: Vec::new(),
        allow_unsealed: false,
        auto: true,
    };
    Vm::new(name.into(), "t".into(), config, &CreditConfig::default())
}

/// Members, and what they are asked.
pub fn played() -> (Arc<Played>, Receiver<String>) {
    let (told, asked) = channel();
    let (list, refuse) = (Mutex::default(), Mutex::default());
    (Arc::new(Played { list, refuse, asked: Mutex::new(told) }), asked)
}

/// Excludes of VMs without pipes.
fn no_excludes() -> Excludes {
    Excludes::new(Arc::default(), Box::new(|_| Vec::new()))
}

impl World {
    fn new(auto: bool) -> Self {
        let (members, asked) = played();
        let ports = Ports::default();
        let front = Box::new(ports.clone());
        let excludes = Arc::new(no_excludes());
        let candidate = Candidate::new(Arc::new(vm(auto)), members.clone(), excludes, front);
        Self { ports, members, asked, inbox: Inbox::default(), candidate }
    }

    /// Looks, and returns what it asked and why it is no member.
    fn look(&mut self) -> (Vec<String>, String) {
        self.candidate.look(&self.inbox);
        (self.asked.try_iter().collect(), self.inbox.why().unwrap_or_default())
    }

    fn refuse(&self, errors: impl IntoIterator<Item = ChannelError>) {
        self.members.refuse.lock().unwrap().extend(errors);
    }
}

fn unreachable() -> ChannelError {
    let source = QmpError::Closed { command: "the greeting" }.into();
    ChannelError::Plug { vm: "a".into(), source }
}

#[test]
fn a_vm_joins_when_its_memory_is_known_and_is_looked_after() {
    let mut world = World::new(true);
    let nothing = Vec::<String>::new;
    assert_eq!(world.look(), (nothing(), "no front end is connected".into()));
    world.ports.set(&[("n", 1, &table(&[]))]);
    let (asked, why) = world.look();
    assert!(asked.is_empty() && why.contains("has not shared its memory yet"), "{why}");
    let memory = table(&[&file()]);
    world.ports.set(&[("d", 1, &table(&[])), ("n", 1, &memory)]);
    assert_eq!(world.look(), (vec!["join a t 1 1 0".into()], String::new()));
    assert_eq!(world.look(), (nothing(), String::new()));
    let known = vec!["10.0.0.7".parse().unwrap()];
    world.ports.0.lock().unwrap().nets = vec![NetAddresses { known, ..NetAddresses::default() }];
    assert_eq!(world.look().0, ["a has [10.0.0.7]"]);
    assert_eq!(world.look().0, nothing());
    // Its monitor was closed: nobody but the list says so.
    world.members.list.lock().unwrap().clear();
    assert_eq!(world.look().0, ["join a t 1 1 1"]);
}

#[test]
fn ceilings_reach_a_member_when_it_joins_and_when_they_change() {
    let mut world = World::new(true);
    let grant = |world: &World, ceiling_bytes_per_s| {
        world.candidate.vm().grant(&CreditConfig { ceiling_bytes_per_s, ..Default::default() });
    };
    grant(&world, 5 * MIB);
    world.ports.set(&[("n", 1, &table(&[&file()]))]);
    assert_eq!(world.look().0, ["join a t 1 1 0 limited"]);
    assert!(world.look().0.is_empty());
    grant(&world, MIB);
    // One that is not told is told with the next look.
    world.refuse([unreachable()]);
    assert_eq!(world.look().0, [format!("a may send {MIB}")]);
    grant(&world, 0);
    world.candidate.join(&world.inbox).unwrap();
    assert_eq!(world.look().0, ["a may send 0"]);
    assert!(world.look().0.is_empty());
}

#[test]
fn who_was_told_to_leave_stays_out_until_another_front_end_comes() {
    let mut world = World::new(true);
    let memory = table(&[&file()]);
    world.ports.set(&[("n", 1, &memory)]);
    world.look();
    world.candidate.leave().unwrap();
    let (asked, why) = world.look();
    assert_eq!(asked, ["leave a"]);
    assert!(why.contains("told to leave"), "{why}");
    // A second port of the same front end, and the first one gone.
    for sessions in [&[("n", 1, &memory), ("d", 1, &memory)][..], &[("d", 1, &memory)]] {
        world.ports.set(sessions);
        assert!(world.look().0.is_empty());
    }
    world.ports.set(&[("d", 2, &memory)]);
    assert_eq!(world.look().0, ["join a t 1 1 0"]);

    // A command is stronger. Who is no member has left.
    world.refuse([ChannelError::NotMember { vm: "a".into() }]);
    world.candidate.leave().unwrap();
    world.members.list.lock().unwrap().clear();
    world.candidate.join(&world.inbox).unwrap();
    assert_eq!(world.look(), (vec!["leave a".into(), "join a t 1 1 0".into()], String::new()));
}

#[test]
fn without_auto_a_vm_joins_by_command_alone() {
    let mut world = World::new(false);
    let none = world.candidate.join(&world.inbox).unwrap_err();
    assert!(matches!(&none, PlaneError::Conflict(text) if text.contains("no front end")), "{none}");
    let memory = table(&[&file()]);
    world.ports.set(&[("n", 1, &memory)]);
    let (asked, why) = world.look();
    assert!(asked.is_empty() && why.contains("by command"), "{why}");
    world.refuse([unreachable()]);
    let refused = world.candidate.join(&world.inbox).unwrap_err();
    assert!(matches!(&refused, PlaneError::Refused(text) if text.contains("VM a")), "{refused}");
    // It is not tried again.
    let (asked, why) = world.look();
    assert!(asked == ["join a t 1 1 0"] && why.contains("by command"), "{asked:?} {why}");
    world.candidate.join(&world.inbox).unwrap();
    assert_eq!(world.look(), (vec!["join a t 1 1 0".into()], String::new()));
    // Of the next front end nobody has said so.
    world.ports.set(&[("n", 2, &memory)]);
    world.members.list.lock().unwrap().clear();
    assert!(world.look().0.is_empty());
}

#[test]
fn a_failure_is_told_and_tried_again_after_a_pause() {
    let mut world = World::new(true);
    world.ports.set(&[("n", 1, &table(&[&file(), &file()]))]);
    let (asked, why) = world.look();
    assert!(asked.is_empty() && why.contains("in 2 files"), "{why}");
    let memory = table(&[&file()]);
    world.ports.set(&[("n", 2, &memory)]);
    world.refuse([unreachable()]);
    let (asked, why) = world.look();
    assert!(asked == ["join a t 1 1 0"] && why.contains("closed by QEMU"), "{asked:?} {why}");
    let left = world.candidate.look(&world.inbox).unwrap();
    assert!(left <= Duration::from_millis(250), "{left:?}");
    assert!(world.asked.try_recv().is_err());
    // Whatever changes may have ended it.
    world.ports.set(&[("n", 2, &memory), ("d", 1, &memory)]);
    assert_eq!(world.look().0, ["join a t 1 1 0"]);
}

#[test]
fn an_earlier_membership_has_to_end_first() {
    let mut world = World::new(true);
    world.ports.set(&[("n", 1, &table(&[&file()]))]);
    world.look();
    // Another QEMU, and the end of the first one is not known yet.
    let memory = table(&[&file()]);
    world.ports.set(&[("n", 2, &memory)]);
    let (asked, why) = world.look();
    assert!(asked.is_empty() && why.contains("earlier membership"), "{why}");
    world.members.list.lock().unwrap()[0].state = "leaving";
    let error = world.candidate.join(&world.inbox).unwrap_err();
    assert!(
        matches!(&error, PlaneError::Conflict(text) if text.contains("still leaving")),
        "{error}"
    );
    world.members.list.lock().unwrap()[0].state = "dead";
    world.candidate.join(&world.inbox).unwrap();
    assert_eq!(world.look(), (vec!["join a t 1 1 0".into()], String::new()));
}

fn started(ports: &Ports, members: &Arc<Played>) -> Channels {
    let front = |_: &Vm| Box::new(ports.clone()) as Box<dyn FrontEnds>;
    Channels::with(members.clone(), no_excludes(), vec![vm(true)], front).unwrap()
}

#[test]
fn a_thread_retries_obeys_and_leaves_at_the_end() {
    let (members, asked) = played();
    let ports = Ports::default();
    members.refuse.lock().unwrap().extend([unreachable(), unreachable()]);
    let channels = started(&ports, &members);
    let memory = table(&[&file()]);
    ports.set(&[("n", 1, &memory)]);
    channels.ports_changed("a");
    channels.ports_changed("unknown");
    for _ in 0..3 {
        assert_eq!(asked.recv_timeout(LIMIT).unwrap(), "join a t 1 1 0");
    }
    let joined = channels.join("a").unwrap();
    assert_eq!((joined.state, joined.reason), (ChannelState::Joined, None));
    let holders = "b has 3 pages of a in use".into();
    let timeout = ChannelError::DrainTimeout { vm: "a".into(), timeout_ms: 5, holders };
    members.refuse.lock().unwrap().push_back(timeout);
    let error = channels.leave("a").unwrap_err();
    assert!(matches!(&error, PlaneError::Refused(text) if text.contains("3 pages")), "{error}");
    assert!(matches!(channels.join("nobody"), Err(PlaneError::Conflict(_))));
    channels.stop();
    assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["leave a", "leave a"]);
    assert!(matches!(channels.leave("a"), Err(PlaneError::Failed(_))));
    assert_eq!(channels.status()[0].state, ChannelState::Out);
}

#[test]
fn a_list_has_a_members_links_and_who_is_not_there() {
    let link = |vm: &str, id, sent_bytes, received_bytes| LinkInfo {
        vm: vm.into(),
        id,
        memory: "plugged",
        why_failed: None,
        slot: None,
        link: ::channel::Link { borrowed: 3, sent_bytes, received_bytes, ..Default::default() },
    };
    let mut members = vec![info("a", "active"), info("a", "dead"), info("b", "active")];
    members[1].id = 3;
    members[2].id = 2;
    members[0].links = vec![link("b", 2, 10, 20), link("a", 3, 0, 0)];
    members[2].links = vec![link("a", 1, 30, 40)];
    members[0].is_over_ceiling = true;
    let all = show::status(&vm(true), None, &members);
    assert_eq!(all.iter().map(|s| s.state.name()).collect::<Vec<_>>(), ["dead", "active"]);
    let links: Vec<_> = all[1].links.iter().map(|l| (l.sent_bytes, l.received_bytes)).collect();
    assert_eq!(links, [(10, 20), (0, 0)]);
    assert_eq!((all[1].macs[0].as_str(), &all[1].reason), ("02:02:02:02:02:02", &None));

    let why = Some("because".to_owned());
    let gone = show::status(&vm(true), why.clone(), &members[1..]);
    assert_eq!(gone.iter().map(|s| s.state.name()).collect::<Vec<_>>(), ["dead", "out"]);
    assert_eq!(gone[1].reason, why);
    assert_eq!(show::status(&vm(true), why, &members[2..]).len(), 1);

    let mut metrics = Metrics::default();
    show::metrics(&all, &mut metrics);
    let text = control::metrics::render(&metrics);
    for line in [
        "millrace_channel_members{domain=\"t\",state=\"active\"} 1",
        "millrace_channel_members{domain=\"t\",state=\"leaving\"} 0",
        "millrace_channel_bytes_total{vm=\"a\",direction=\"received\",peer=\"b\"} 20",
        "millrace_channel_held_pages{vm=\"a\",peer=\"b\"} 3",
        "millrace_channel_zombies{vm=\"a\"} 2",
        "millrace_channel_over_ceiling{vm=\"a\"} 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
