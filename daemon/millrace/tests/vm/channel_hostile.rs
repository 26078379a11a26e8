//! A member that writes what no member writes: garbage in its directory, links, rings and slots,
//! while real packets go through them. Only its own traffic suffers.

use std::fs::{self, File};
use std::mem::size_of;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use base::random::{Random, Seeded};
use guest_abi::channel::{
    DIR_MAGIC, DONE_LEN, Dir, Entry, LINK_MAGIC, Link, LinkQueue, QueueState, RING_LEN, SLOTS, Slot,
};
use lab::{Guest, GuestBuilder, KernelChoice};
use rustix::process::{Pid, Signal, kill_process};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::channel_world::{
    Machine, World, address, channel, count, is_sound, load, nothing_is_held, recipe, unload,
    world, world_with,
};
use crate::common::{GIB, MIB, READY, alone, transfer, until};

const SEED: u64 = 0x6d69_6c6c_7261_6365;
/// How long the member is hostile.
const TIME: Duration = Duration::from_secs(15);
const SOAK_TIME: Duration = Duration::from_secs(20 * 60);
/// Length of one membership: afterwards it joins anew, since its peers have ended their links to
/// it.
const MEMBERSHIP: Duration = Duration::from_secs(2);
const PAGE: u64 = 4096;

/// Wrong, and some of it nearly right.
fn wrong(random: &mut Seeded, now: u32) -> u32 {
    let small = random.below(4096);
    match random.below(5) {
        0 => random.next_u64() as u32,
        1 => small,
        2 => now.wrapping_add(small % 20),
        3 => now.wrapping_sub(small % 20),
        _ => u32::MAX - small,
    }
}

/// Another hand on a guest's memory.
struct Spoiler {
    memory: File,
    dir_at: u64,
    random: Seeded,
    writes: u64,
}

impl Spoiler {
    /// Finds the member's memory. Its QEMU has the memory of the peers open, too: its own is where
    /// its directory is.
    fn new(guest: &Guest, id: u64, seed: u64) -> Option<Self> {
        let files = fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
        files.filter_map(Result::ok).find_map(|file| {
            let target = fs::read_link(file.path()).ok()?;
            target.to_string_lossy().starts_with("/memfd:").then_some(())?;
            let memory = File::options().read(true).write(true).open(file.path()).ok()?;
            let dir_at = directory(&memory, id)?;
            Some(Self { memory, dir_at, random: Seeded::new(seed), writes: 0 })
        })
    }

    /// None: not in the memory. What it says of itself may be garbage already.
    fn read<T: FromBytes + FromZeros + IntoBytes>(&self, at: u64) -> Option<T> {
        let mut value = T::new_zeroed();
        self.memory.read_exact_at(value.as_mut_bytes(), at).ok()?;
        Some(value)
    }

    /// Writes garbage in place of a number.
    fn spoil(&mut self, at: u64) {
        let Some(now) = self.read::<U32>(at) else { return };
        let wrong = wrong(&mut self.random, now.get());
        self.memory.write_all_at(&wrong.to_le_bytes(), at).unwrap();
        self.writes += 1;
    }

    /// Some garbage for one peer. None: it has no link now.
    fn burst(&mut self) -> Option<()> {
        let dir: Dir = self.read(self.dir_at)?;
        let links: Vec<u64> =
            dir.links.iter().map(|entry| entry.link_off.get()).filter(|off| *off != 0).collect();
        let at = *links.get(self.random.below(links.len().max(1) as u32) as usize)?;
        for _ in 0..=self.random.below(32) {
            let link: Link = self.read(at)?;
            if link.magic.get() != LINK_MAGIC {
                return None;
            }
            let queues = link.queues.get().clamp(1, link.queue.len() as u32);
            // Most packets go by the first.
            let queue = if self.random.below(4) > 0 { 0 } else { self.random.below(queues) };
            self.spoil_queue(at, &link.queue[queue as usize]);
        }
        Some(())
    }

    fn spoil_queue(&mut self, link_at: u64, queue: &LinkQueue) {
        let word = |random: &mut Seeded, len: usize| u64::from(random.below(len as u32 / 4)) * 4;
        let (what, size_of_head) = (self.random.below(200), 48);
        let at = match what {
            // It would end the link at once, so not often.
            0 => self.dir_at + word(&mut self.random, size_of::<Dir>()),
            1 | 2 => link_at + word(&mut self.random, size_of::<Link>()),
            3..=59 => {
                let entry =
                    u64::from(self.random.below(RING_LEN as u32)) * size_of::<Entry>() as u64;
                queue.ring_off.get() + entry + word(&mut self.random, size_of_head)
            }
            60..=119 => {
                let slot = u64::from(self.random.below(SLOTS as u32)) * size_of::<Slot>() as u64;
                queue.slots_off.get() + slot + word(&mut self.random, size_of::<Slot>())
            }
            120..=139 => queue.state_off.get() + word(&mut self.random, 256),
            140..=159 => {
                let done = size_of::<QueueState>() - 2 * DONE_LEN;
                queue.state_off.get() + done as u64 + word(&mut self.random, 2 * DONE_LEN)
            }
            _ => queue.fifo_off[0].get() + word(&mut self.random, 65_536),
        };
        if at % 4 == 0 {
            self.spoil(at);
        }
    }
}

/// Offset of this member's directory, if this is its memory.
fn directory(memory: &File, id: u64) -> Option<u64> {
    let len = memory.metadata().ok()?.len();
    let mut block = vec![0; 1 << 20];
    (0..len / block.len() as u64).find_map(|number| {
        let start = number * block.len() as u64;
        memory.read_exact_at(&mut block, start).ok()?;
        let found = block.chunks(PAGE as usize).position(|page| {
            Dir::read_from_prefix(page).is_ok_and(|(dir, _)| {
                dir.magic.get() == DIR_MAGIC && u64::from(dir.member_id.get()) == id
            })
        })?;
        Some(start + found as u64 * PAGE)
    })
}

/// Leaves, and joins with a new generation. False: not in time.
fn join_anew(world: &World, vm: &str, guest: &Guest) -> bool {
    let ask =
        |what: &str| world.daemon.request("POST", &format!("/v1/vms/{vm}/channel/{what}"), None);
    let end = Instant::now() + READY;
    let _ = ask("leave");
    while ask("join").is_err() {
        if Instant::now() > end || guest.check().is_err() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    while world.links(guest) < 2 {
        if Instant::now() > end || guest.check().is_err() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Least memberships, and numbers spoiled, where joining takes most of the time.
const LEAST_MEMBERSHIPS: u64 = 2;
const LEAST_WRITES: u64 = 501;

/// Until the time is over, or the member has ruined itself. Returns memberships and garbage
/// written.
fn be_hostile(world: &World, guest: &Guest, until: Instant) -> (u64, u64) {
    let (mut memberships, mut writes, mut random) = (0, 0, Seeded::new(SEED));
    while Instant::now() < until || memberships < LEAST_MEMBERSHIPS || writes < LEAST_WRITES {
        let id = channel(guest, "member", "member");
        let Some(mut spoiler) = Spoiler::new(guest, id, random.next_u64()) else { break };
        let end = Instant::now() + MEMBERSHIP;
        while Instant::now() < end && spoiler.burst().is_some() {
            std::thread::sleep(Duration::from_millis(5));
        }
        memberships += 1;
        writes += spoiler.writes;
        if !join_anew(world, guest.name(), guest) {
            println!("{} has ruined itself: {}", guest.name(), guest.console_tail(5));
            break;
        }
    }
    (memberships, writes)
}

#[test]
#[allow(non_snake_case)]
fn abuse_I_a_hostile_member_spoils_only_its_own_traffic() {
    let _alone = alone();
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let machines = [
        Machine::new("a", KernelChoice::V6_1, 1),
        Machine::with_cpus("b", KernelChoice::V6_1, 2),
        Machine::new("c", KernelChoice::V6_12, 1),
    ];
    // Every use of freed memory and every write behind an object's end is told.
    let strict = |guest: GuestBuilder| guest.image(recipe()).cmdline("slub_debug=FZPU");
    let world = world_with("switch = \"lan\"", machines, strict);
    let [a, b, c] = [&world.guests[0], &world.guests[1], &world.guests[2]];
    [a, b, c].into_iter().for_each(load);
    world.linked(&[a, b, c]);
    let _sinks = [a, b].map(|guest| {
        let mut sink = guest.spawn("agent sink").unwrap();
        sink.wait_line("listening", READY).unwrap();
        sink
    });
    let traffic = |to: &str| {
        format!(
            "while true; do timeout 4 agent udp-small {to} 1 1400; \
             timeout 4 agent tcp-stream {to} 2; done >/dev/null 2>&1"
        )
    };
    let _there = a.spawn(&traffic(&address(1))).unwrap();
    let _back = b.spawn(&traffic(&address(0))).unwrap();
    let end = Instant::now() + if soak { SOAK_TIME } else { TIME };
    std::thread::scope(|scope| {
        let hostile = scope.spawn(|| be_hostile(&world, a, end));
        while !hostile.is_finished() {
            transfer(b, c, "tcp", &address(2), 16 * MIB);
            transfer(c, b, "tcp", &address(1), 16 * MIB);
        }
        let (memberships, writes) = hostile.join().unwrap();
        println!("{writes} numbers spoiled in {memberships} memberships, seed {SEED:#x}");
        assert!(memberships >= LEAST_MEMBERSHIPS && writes >= LEAST_WRITES);
    });
    a.kill();
    until("its memory is unplugged", || {
        [b, c].iter().all(|guest| channel(guest, "memory", "mapped") == 1)
    });
    for guest in [b, c] {
        nothing_is_held(guest);
        is_sound(guest);
    }
    let log = b.sh("dmesg").unwrap();
    assert!(log.contains("its link ends"), "nothing was refused");
}

/// A guest leaves, and its modules go, while its peer is stopped with pages of it in use. The
/// host's half is a test of the crate channel.
#[test]
#[ignore = "a minute, most of it the host's patience with a silent peer: make soak"]
#[allow(non_snake_case)]
fn abuse_V10_modules_leave_a_frozen_peer() {
    let _alone = alone();
    let machines =
        [Machine::new("a", KernelChoice::V6_12, 1), Machine::new("b", KernelChoice::V6_1, 1)];
    let world = world(machines, &recipe());
    let [a, b] = [&world.guests[0], &world.guests[1]];
    [a, b].into_iter().for_each(load);
    world.linked(&[a, b]);
    let signal = |signal| kill_process(Pid::from_raw(b.pid() as i32).unwrap(), signal).unwrap();
    let mut receiver =
        b.spawn(&format!("agent xfer recv tcp listen {} {GIB}", address(1))).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let send = format!("agent xfer send tcp connect {} {GIB}", address(1));
    let sender = a.spawn(&send).unwrap();
    let before = count(a, "taken");
    until("taken", || count(a, "taken") > before + 1000);
    signal(Signal::STOP);
    // What it sent lies in the peer's hands, and nobody gives it back.
    until("lent", || channel(a, "queue", "lent") > 0);
    sender.kill().unwrap();
    let ask = |vm: &str, what: &str| {
        world.daemon.request("POST", &format!("/v1/vms/{vm}/channel/{what}"), None)
    };
    let state = |vm: &str| {
        let all = world.daemon.request("GET", "/v1/channels", None).unwrap();
        let own = all.as_array().unwrap().iter().find(|member| member["vm"] == vm);
        own.unwrap()["state"].clone()
    };
    // Not in time, because of whom; its own kernel is rid of it all the same.
    let told = ask("a", "leave").unwrap_err().to_string();
    assert!(told.contains("channels of VM a: leaving took more than"), "{told}");
    assert!(told.contains("b has ") && told.contains(" pages of a in use"), "{told}");
    unload(a);
    assert_eq!(state("b"), "broken");
    // Its memory is plugged in the other's monitor, until that goes on.
    signal(Signal::CONT);
    until("a has left", || state("a") == "out");
    until("b leaves", || ask("b", "leave").is_ok());
    load(a);
    ["a", "b"].into_iter().for_each(|vm| world.command(vm, "join"));
    world.linked(&[a, b]);
    transfer(a, b, "tcp", &address(1), 16 * MIB);
    [a, b].into_iter().for_each(nothing_is_held);
    [a, b].into_iter().for_each(is_sound);
}
