//! A VM with pipes and channels: what a pipe has shifted stays off the channel, and what may be on
//! the channel is not piped.

use lab::{Disk, Guest, KernelChoice, Lab, Running, Vsock};

use crate::channel_world::{
    Machine, World, address, count, guest, is_sound, linked, load, nothing_is_held, state, vm,
};
use crate::common::{MIB, READY, alone, boot, daemon, until, until_ok};
use crate::pipe_world::{agent, listening, recipe, sh};

const LEN: u64 = 8 * MIB;

/// Two VMs that have everything, and a file of the first.
fn world() -> World {
    let lab = Lab::new().unwrap();
    let machines =
        [Machine::new("a", KernelChoice::V6_1, 1), Machine::new("b", KernelChoice::V6_12, 1)];
    // A holder: vsock does not come back without one.
    let mut builder = daemon("d").switch("lan", "").holder();
    for (at, machine) in machines.iter().enumerate() {
        let disk = lab.scratch(&format!("{}.img", machine.name), 64 * MIB).unwrap();
        let vm = vm(at, machine, "switch = \"lan\"");
        let vm = vm.disk("d", &format!("format = \"raw\"\npath = {disk:?}"));
        builder = builder.vm(vm.vsock(7 + at as u32).more("[vm.pipes]\n"));
    }
    let daemon = builder.start(&lab).unwrap();
    let mut at = 0;
    let guests = machines.map(|machine| {
        at += 1;
        guest(machine.name, &daemon, machine)
            .image(recipe().kmod())
            .disk(Disk::vhost_user(daemon.socket(machine.name, "d")))
            .vsock(Vsock::vhost_user(daemon.socket(machine.name, "vsock")))
            .address(format!("{}/24", address(at - 1)))
            .address(format!("fd00::{at}/64"))
    });
    let guests = Vec::from(boot(&lab, guests));
    let make = "mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount -t ext4 /dev/vda /mnt";
    sh(&guests[0], &format!("{make} && agent fill /mnt/f {LEN}"));
    sh(&guests[1], &format!("agent fill /want {LEN}"));
    World { guests, daemon, lab }
}

impl World {
    fn ended(&self, reason: &str) -> f64 {
        let labels = [("vm", "a"), ("reason", reason)];
        self.daemon.metric_sum("millrace_pipe_ended_total", &labels).unwrap()
    }

    /// Reasons of pipes that began and ended while `work` ran: complete, and not piped for a
    /// channel.
    fn reasons(&self, work: impl FnOnce()) -> (f64, f64) {
        let now = || (self.ended("complete"), self.ended("on_channel"));
        let before = now();
        work();
        let after = now();
        (after.0 - before.0, after.1 - before.1)
    }
}

/// One connection from `b` to a server of `a` that sends the file again and again.
struct Connection<'a> {
    from: &'a Guest,
    port: u32,
    server: Running<'a>,
    rounds: u64,
}

impl<'a> Connection<'a> {
    fn open(guests: &'a [Guest], port: u32) -> Self {
        let [to, from] = [&guests[0], &guests[1]];
        let server = listening(to, &format!("mrpipe -l {port} -b -r -n 100 /mnt/f"));
        let nc = format!("busybox nc {} {port} <>/ask{port} >>/got{port}", address(0));
        from.sh(&format!("mkfifo /ask{port}; (exec {nc}) 2>/dev/null & echo $! >/pid{port}"))
            .unwrap();
        let established = format!("{}:{port} ", address(0));
        until("connected", || {
            let all = from.sh("netstat -tn").unwrap();
            all.lines().any(|line| line.contains(&established) && line.contains("ESTABLISHED"))
        });
        Self { from, port, server, rounds: 0 }
    }

    /// Has the file sent once more, and compares it.
    fn round(&mut self) {
        let Self { from, port, rounds, .. } = *self;
        let script = format!(
            "(echo MRPIPE {rounds} {LEN}; cat /want; echo END {rounds}) >/frame; \
             len=$(stat -c %s /frame); : >/got{port}; echo next >/ask{port}; \
             while [ $(stat -c %s /got{port}) -lt $len ]; do sleep 0.02; done; \
             cmp /frame /got{port}"
        );
        sh(from, &script);
        self.rounds += 1;
    }

    fn close(self) {
        let Self { from, port, server, .. } = self;
        from.sh(&format!("kill $(cat /pid{port})")).unwrap();
        println!("port {port}: {}", server.wait(READY).unwrap().text());
    }
}

/// A round of a shifted connection, which stays off the channel at both ends, and takes another
/// pipe.
fn stays(world: &World, [a, b]: [&Guest; 2], connection: &mut Connection<'_>) {
    let excluded = || [count(a, "excluded"), count(b, "excluded")];
    let before = excluded();
    assert_eq!(world.reasons(|| connection.round()), (1.0, 0.0));
    let now = excluded();
    assert!(now[0] > before[0] && now[1] > before[1] + 10, "{before:?} {now:?}");
}

/// A round by the channel.
fn goes_by_channel(a: &Guest, round: impl FnOnce()) {
    let before = count(a, "taken");
    round();
    assert!(count(a, "taken") > before + 10);
}

#[test]
fn pipes_and_channels_leave_each_others_connections_alone() {
    let _alone = alone();
    let mut world = world();
    world.guests.iter().for_each(load);
    world.command("b", "leave");
    let guests = std::mem::take(&mut world.guests);
    let both = [&guests[0], &guests[1]];
    let numbered = [(0, both[0]), (1, both[1])];
    let _agent = agent(both[0]);

    // No channel yet: one is piped, and shifted from then on; one is not used.
    let mut shifted = Connection::open(&guests, 7001);
    let mut unused = Connection::open(&guests, 7002);
    assert_eq!(world.reasons(|| shifted.round()), (1.0, 0.0));
    // Its peer comes.
    world.command("b", "join");
    linked(&numbered);
    stays(&world, both, &mut shifted);
    goes_by_channel(both[0], || {
        assert_eq!(world.reasons(|| unused.round()), (0.0, 1.0));
    });
    let mut late = Connection::open(&guests, 7003);
    goes_by_channel(both[0], || assert_eq!(world.reasons(|| late.round()).0, 0.0));

    // It goes: the switch has not seen everything of that which was on the channel, but of a new
    // one.
    world.command("b", "leave");
    assert_eq!(world.reasons(|| shifted.round()), (1.0, 0.0));
    assert_eq!(world.reasons(|| unused.round()), (0.0, 1.0));
    assert_eq!(world.reasons(|| late.round()).0, 0.0);
    let mut other = Connection::open(&guests, 7004);
    assert_eq!(world.reasons(|| other.round()), (1.0, 0.0));
    world.command("b", "join");
    linked(&numbered);
    stays(&world, both, &mut other);
    stays(&world, both, &mut shifted);

    // The next daemon knows of both.
    world.daemon.restart().unwrap();
    let of = |name: &str, labels: &[(&str, &str)]| world.daemon.metric_sum(name, labels).unwrap();
    until("the agent is back", || of("millrace_pipe_agents_total", &[("vm", "a")]) > 0.0);
    until_ok("both are members", || match of("millrace_channel_members", &[("state", "active")]) {
        2.0 => Ok(()),
        active => Err(format!("{active} active\n{}", both.map(state).join("\n"))),
    });
    linked(&numbered);
    stays(&world, both, &mut shifted);
    stays(&world, both, &mut other);
    goes_by_channel(both[0], || unused.round());

    for connection in [shifted, unused, late, other] {
        connection.close();
    }
    both.into_iter().for_each(|guest| {
        nothing_is_held(guest);
        is_sound(guest);
    });
}
