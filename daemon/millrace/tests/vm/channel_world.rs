//! Guests of one daemon and one trust domain, with the channel's kernel modules at hand.

use std::sync::OnceLock;

use lab::device::mac_of;
use lab::{
    Daemon, DaemonBuilder, Guest, GuestBuilder, Image, ImageBuilder, KernelChoice, Lab, Net, Qemu,
    Vm, qemu72,
};

use crate::common::{boot, daemon, until, until_ok};

/// One guest.
#[derive(Clone, Copy)]
pub struct Machine {
    pub name: &'static str,
    pub kernel: KernelChoice,
    pub vcpus: u32,
}

/// QEMU that runs the guests.
fn qemu() -> &'static Qemu {
    static QEMU: OnceLock<Qemu> = OnceLock::new();
    QEMU.get_or_init(|| {
        let lab = Lab::new().unwrap();
        lab.qemu().unwrap().under(lab::acceleration(&lab).unwrap().accelerator)
    })
}

/// Pairs of queues of a guest's network card: one for each CPU, as users have it.
fn queue_pairs(machine: &Machine) -> u16 {
    qemu72::queue_pairs(qemu(), machine.vcpus)
}

impl Machine {
    pub const fn new(name: &'static str, kernel: KernelChoice, vcpus: u32) -> Self {
        Self { name, kernel, vcpus }
    }

    /// A machine of several CPUs whose test has hung or ended QEMU 7.2, which emulates one.
    pub fn with_cpus(name: &'static str, kernel: KernelChoice, vcpus: u32) -> Self {
        Self { name, kernel, vcpus: qemu72::vcpus(qemu(), vcpus) }
    }
}

/// Fields go in this order: guests before the daemon, and the lab last.
pub struct World {
    pub guests: Vec<Guest>,
    pub daemon: Daemon,
    pub lab: Lab,
}

/// The image that most tests need. The packet filter is for [`qemu72::hold_hooks`].
pub fn recipe() -> ImageBuilder {
    Image::builder().kmod().packet_filter()
}

/// `10.0.0.1` is the first guest's address, `fd00::1` too.
pub fn address(at: usize) -> String {
    format!("10.0.0.{}", at + 1)
}

/// Boots the guests. No module is loaded.
pub fn world<const N: usize>(machines: [Machine; N], image: &ImageBuilder) -> World {
    world_with("switch = \"lan\"", machines, |machine| machine.image(image.clone()))
}

/// Makes a world as [`world`] does; `options` is for their network ports, `more` gives each guest
/// an image at least.
pub fn world_with<const N: usize>(
    options: &str,
    machines: [Machine; N],
    more: impl Fn(GuestBuilder) -> GuestBuilder,
) -> World {
    let lab = Lab::new().unwrap();
    let daemon = plan("d", "", options, &machines).start(&lab).unwrap();
    World::boot(lab, daemon, machines, more)
}

/// A daemon for these guests, with a switch. `options` is for their network ports; `@MAC@` in it is
/// the guest's address.
pub fn plan(name: &str, switch: &str, options: &str, machines: &[Machine]) -> DaemonBuilder {
    let vms = machines.iter().enumerate().map(|(at, machine)| vm(at, machine, options));
    vms.fold(daemon(name).switch("lan", switch), DaemonBuilder::vm)
}

/// The guest of this number as [`plan`] has it.
pub fn vm(at: usize, machine: &Machine, options: &str) -> Vm {
    let channel = format!(
        "[vm.channel]\nqmp = \"@RUN@/{}.qmp\"\naddresses = [\"{}\", \"fd00::{}\"]\n",
        machine.name,
        address(at),
        at + 1
    );
    let options = options.replace("@MAC@", &mac_of(machine.name, 0));
    let options = format!("{options}\nqueue_pairs = {}", queue_pairs(machine));
    Vm::new(machine.name, "trust_domain = \"t\"").net("n", &options).more(&channel)
}

/// A guest as this VM of the daemon. It has a name of its own, since a VM that moves is two guests.
pub fn guest(name: &str, daemon: &Daemon, machine: Machine) -> GuestBuilder {
    let socket = daemon.socket(machine.name, "n");
    let monitor = socket.with_file_name(format!("{}.qmp", machine.name));
    let mut net = Net::vhost_user(socket);
    net.mac = Some(mac_of(machine.name, 0));
    net.queues = queue_pairs(&machine);
    Guest::builder(name)
        .kernel(machine.kernel)
        .vcpus(machine.vcpus)
        .memory_power_of_two()
        .root_ports(5)
        .monitor(monitor)
        .net(net)
}

/// A number after a word in one of the modules' listings, summed over all lines that begin so.
pub fn number(listing: &str, line: &str, word: &str) -> u64 {
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
    until_ok(&format!("{}: the channel's module goes", guest.name()), || {
        match guest.run("rmmod millrace_channel").unwrap() {
            done if done.code == 0 => Ok(()),
            done => Err(done.text() + &state(guest)),
        }
    });
}

/// All that the modules and TCP say of themselves.
pub fn state(guest: &Guest) -> String {
    guest
        .run(
            "cat /sys/kernel/debug/millrace/channel /sys/kernel/debug/millrace_net; \
             netstat -tn; dmesg | tail -n 20",
        )
        .unwrap()
        .text()
}

impl World {
    /// Boots guests on a daemon.
    pub fn boot<const N: usize>(
        lab: Lab,
        daemon: Daemon,
        machines: [Machine; N],
        more: impl Fn(GuestBuilder) -> GuestBuilder,
    ) -> Self {
        let mut at = 0;
        let guests = machines.map(|machine| {
            at += 1;
            more(guest(machine.name, &daemon, machine))
                .address(format!("{}/24", address(at - 1)))
                .address(format!("fd00::{at}/64"))
        });
        let guests = Vec::from(boot(&lab, guests));
        let several = machines.iter().zip(&guests).filter(|(machine, _)| machine.vcpus > 1);
        if let Some(script) = qemu72::hold_hooks(qemu()) {
            several.for_each(|(_, guest)| drop(guest.sh(&script).unwrap()));
        }
        Self { guests, daemon, lab }
    }

    /// Links that are up at one guest.
    pub fn links(&self, guest: &Guest) -> u64 {
        links(guest)
    }

    /// Waits until each of these has a link to each other, and uses it.
    pub fn linked(&self, guests: &[&Guest]) {
        let at = |guest: &Guest| self.guests.iter().position(|g| g.name() == guest.name()).unwrap();
        let numbered: Vec<_> = guests.iter().map(|guest| (at(guest), *guest)).collect();
        linked(&numbered);
    }

    /// A command of the control API.
    pub fn command(&self, vm: &str, what: &str) {
        self.daemon.request("POST", &format!("/v1/vms/{vm}/channel/{what}"), None).unwrap();
    }
}

fn links(guest: &Guest) -> u64 {
    let listing = guest.run("cat /sys/kernel/debug/millrace/channel").unwrap().text();
    number(&listing, "peer", "open")
}

/// Waits until each of these, with their numbers, has a link to each other, and uses it.
pub fn linked(guests: &[(usize, &Guest)]) {
    for (_, guest) in guests {
        until(&format!("{}: links", guest.name()), || links(guest) == guests.len() as u64 - 1);
    }
    for (_, guest) in guests {
        for (at, peer) in guests.iter().filter(|(_, peer)| peer.name() != guest.name()) {
            until(&format!("{} to {} by the channel", guest.name(), peer.name()), || {
                is_used(guest, *at)
            });
        }
    }
}

/// Packets to both addresses of the guest of this number go by the channel. Some have to, for that.
fn is_used(guest: &Guest, at: usize) -> bool {
    let (v4, v6) = (address(at), format!("fd00::{}", at + 1));
    // Nobody listens there: the answer is a reset.
    let knock = |to: &str| format!("timeout 1 busybox nc {to} 9 </dev/null; ");
    guest.sh(&format!("{}{}true", knock(&v4), knock(&v6))).unwrap();
    goes(guest, &v4, "channel") && goes(guest, &v6, "channel")
}

/// Whether packets to this address go this way now.
pub fn goes(guest: &Guest, to: &str, way: &str) -> bool {
    let listing = guest.sh("cat /sys/kernel/debug/millrace_net").unwrap();
    listing.lines().any(|line| {
        line.starts_with("destination")
            && line.contains(&format!("{to} "))
            && line.contains(&format!("way {way}"))
    })
}

/// No page of a peer is in use, and none of ours at a peer.
pub fn nothing_is_held(guest: &Guest) {
    until_ok(&format!("{}: nothing borrowed or lent", guest.name()), || {
        let listing = guest.sh("cat /sys/kernel/debug/millrace/channel").unwrap();
        let of = |line, word| number(&listing, line, word);
        let held = of("peer", "borrowed") + of("memory", "in_use") + of("queue", "lent");
        if held == 0 { Ok(()) } else { Err(state(guest)) }
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
