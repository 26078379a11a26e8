//! Guests of one daemon and one trust domain, with the channel's kernel modules at hand.

use std::time::{Duration, Instant};

use lab::{Daemon, Guest, Image, ImageBuilder, KernelChoice, Lab, Net, Vm};

use crate::common::{LONG, alone, boot, daemon};

/// For what takes milliseconds on a quiet machine: hot-plug, links, leaving.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at what announces itself to nobody.
const LOOK: Duration = Duration::from_millis(20);
/// Of a xfer receiver to say that it listens, and of a program to end after its work.
pub const READY: Duration = Duration::from_secs(60);

/// One guest.
#[derive(Clone, Copy)]
pub struct Machine {
    pub name: &'static str,
    pub kernel: KernelChoice,
    pub vcpus: u32,
}

impl Machine {
    pub const fn new(name: &'static str, kernel: KernelChoice, vcpus: u32) -> Self {
        Self { name, kernel, vcpus }
    }
}

/// Fields go in this order: guests before the daemon, and the lab last.
pub struct World {
    pub guests: Vec<Guest>,
    pub daemon: Daemon,
    _lab: Lab,
}

/// The image that most tests need.
pub fn recipe() -> ImageBuilder {
    Image::builder().kmod()
}

/// `10.0.0.1` is the first guest's address, `fd00::1` too.
pub fn address(at: usize) -> String {
    format!("10.0.0.{}", at + 1)
}

/// Boots the guests; `options` is for their network ports. No module is loaded.
pub fn world<const N: usize>(machines: [Machine; N], image: &ImageBuilder) -> World {
    let lab = Lab::new().unwrap();
    let mut builder = daemon("d").switch("lan", "");
    for (at, machine) in machines.iter().enumerate() {
        // Its MAC address is learned.
        let channel = format!(
            "[vm.channel]\nqmp = \"@RUN@/{}.qmp\"\naddresses = [\"{}\", \"fd00::{}\"]\n",
            machine.name,
            address(at),
            at + 1
        );
        let vm = Vm::new(machine.name, "trust_domain = \"t\"");
        builder = builder.vm(vm.net("n", "switch = \"lan\"").more(&channel));
    }
    let daemon = builder.start(&lab).unwrap();
    let mut at = 0;
    let guests = machines.map(|machine| {
        at += 1;
        guest(&lab, &daemon, machine, image)
            .address(format!("{}/24", address(at - 1)))
            .address(format!("fd00::{at}/64"))
    });
    let guests = Vec::from(boot(&lab, guests));
    World { guests, daemon, _lab: lab }
}

fn guest(lab: &Lab, daemon: &Daemon, machine: Machine, image: &ImageBuilder) -> lab::GuestBuilder {
    let monitor = lab.run_folder().join("d").join(format!("{}.qmp", machine.name));
    Guest::builder(machine.name)
        .kernel(machine.kernel)
        .vcpus(machine.vcpus)
        .image(image.clone())
        .memory_power_of_two()
        .root_ports(5)
        .monitor(monitor)
        .net(Net::vhost_user(daemon.socket(machine.name, "n")))
}

#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(LOOK);
    }
}

/// A number after a word in one of the modules' listings, summed over all lines that begin so.
fn number(listing: &str, line: &str, word: &str) -> u64 {
    listing
        .lines()
        .filter(|text| text.split_whitespace().next() == Some(line))
        .filter_map(|text| {
            let mut words = text.split_whitespace();
            words.find(|found| *found == word)?;
            words.next()?.parse::<u64>().ok()
        })
        .sum()
}

/// How many packets had this fate in `millrace_net`.
pub fn count(guest: &Guest, fate: &str) -> u64 {
    number(&guest.sh("cat /sys/kernel/debug/millrace_net").unwrap(), fate, fate)
}

/// A number of `millrace_channel`'s listing.
pub fn channel(guest: &Guest, line: &str, word: &str) -> u64 {
    number(&guest.sh("cat /sys/kernel/debug/millrace/channel").unwrap(), line, word)
}

/// Loads the modules, with parameters of `millrace_net`.
pub fn load(guest: &Guest) {
    guest
        .sh("mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug; \
             modprobe millrace_net")
        .unwrap();
}

/// Takes the modules out while packets go through them.
pub fn unload(guest: &Guest) {
    guest.sh("rmmod millrace_net").unwrap();
    // Pages of a peer that are in some socket keep it in.
    until("the channel's module goes", || guest.run("rmmod millrace_channel").unwrap().code == 0);
}

impl World {
    /// Links that are up at one guest.
    pub fn links(&self, guest: &Guest) -> u64 {
        let listing = guest.run("cat /sys/kernel/debug/millrace/channel").unwrap().text();
        number(&listing, "peer", "open")
    }

    /// Waits until each of these has a link to each other, and uses it.
    pub fn linked(&self, guests: &[&Guest]) {
        for guest in guests {
            until(&format!("{}: links", guest.name()), || {
                self.links(guest) == guests.len() as u64 - 1
            });
        }
        for guest in guests {
            for peer in guests.iter().filter(|peer| peer.name() != guest.name()) {
                let at = self.guests.iter().position(|g| g.name() == peer.name()).unwrap();
                until(&format!("{} to {} by the channel", guest.name(), peer.name()), || {
                    is_used(guest, at)
                });
            }
        }
    }

    /// A command of the control API.
    pub fn command(&self, vm: &str, what: &str) {
        self.daemon.request("POST", &format!("/v1/vms/{vm}/channel/{what}"), None).unwrap();
    }
}

/// Packets to both addresses of the guest of this number go by the channel. Some have to, for that.
fn is_used(guest: &Guest, at: usize) -> bool {
    let (v4, v6) = (address(at), format!("fd00::{}", at + 1));
    // Nobody listens there: the answer is a reset.
    let knock = |to: &str| format!("timeout 1 busybox nc {to} 9 </dev/null; ");
    guest.sh(&format!("{}{}true", knock(&v4), knock(&v6))).unwrap();
    let listing = guest.sh("cat /sys/kernel/debug/millrace_net").unwrap();
    let used = |to: &str| {
        listing.lines().any(|line| {
            line.starts_with("destination")
                && line.contains(&format!("{to} "))
                && line.contains("way channel")
        })
    };
    used(&v4) && used(&v6)
}

/// No page of a peer is in use, and none of ours at a peer.
pub fn nothing_is_held(guest: &Guest) {
    until(&format!("{}: nothing borrowed or lent", guest.name()), || {
        let listing = guest.sh("cat /sys/kernel/debug/millrace/channel").unwrap();
        let of = |line, word| number(&listing, line, word);
        of("peer", "borrowed") + of("memory", "in_use") + of("queue", "lent") == 0
    });
    assert_eq!(channel(guest, "peer", "refused"), 0, "{}", guest.name());
}

/// The kernel has not complained.
pub fn is_sound(guest: &Guest) {
    let log = guest.sh("dmesg").unwrap();
    let bad: Vec<&str> = log
        .lines()
        .filter(|line| {
            ["BUG:", "WARNING:", "Oops", "Call Trace", "KASAN"].iter().any(|w| line.contains(w))
        })
        .collect();
    assert!(bad.is_empty(), "{}: {bad:#?}", guest.name());
}

/// A transfer from one guest to another, with `mid` done while it runs; hashes compared.
pub fn during(from: &Guest, to: &Guest, kind: &str, at: &str, len_bytes: u64, mid: impl FnOnce()) {
    let mut receiver =
        to.spawn(&format!("agent xfer recv {kind} listen {at} {len_bytes}")).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let sender = from.spawn(&format!("agent xfer send {kind} connect {at} {len_bytes}")).unwrap();
    mid();
    let sent = sender.wait(LONG).unwrap().json().unwrap();
    let received = receiver.wait(LONG).unwrap().json().unwrap();
    assert_eq!(sent["hash"], received["hash"], "{kind} {at}");
    assert_eq!((&sent["bytes"], &received["bytes"]), (&len_bytes.into(), &len_bytes.into()));
    println!("{} -> {} {kind} {at}: {sent}", from.name(), to.name());
}

/// Keeps other VM tests out.
pub fn quiet() -> std::sync::MutexGuard<'static, ()> {
    alone()
}
