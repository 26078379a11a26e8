//! The guests, whoever is between them, and how ways are changed.

use std::cell::Cell;
use std::fmt::Display;
use std::time::{Duration, Instant};

use lab::device::mac_of;
use lab::{Daemon, Guest, GuestBuilder, Image, ImageBuilder, Lab, LabError, Net, Vm};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;

use super::Setup;
use super::counters::{self, Counters};
use super::route::{BUSY_RR_PORT, Route};
use crate::harness::cleanup::Cleanup;
use crate::harness::cpu::Accounts;
use crate::harness::error::BenchError;
use crate::harness::fleet::serve;
use crate::harness::fleet::vcpus;
use crate::harness::host::Thread;
use crate::harness::ovs::{Place, Switch, VSWITCHD};
use crate::harness::progress::Progress;

/// The client and the server; in the daemon's configuration as well.
const NAMES: [&str; 2] = ["client", "server"];
/// The host's end of the TAP bridge.
pub const HOST: &str = "10.0.0.254";
/// Memory of a guest with programs, MB: all with their libraries, twice while the image unpacks.
const PROGRAMS_MEMORY_MB: u32 = 512;
/// Microseconds that sockets poll.
const BUSY_US: u32 = 50;
/// Microseconds that idle CPUs poll at most, as the module is shipped.
pub const POLL_US: u32 = 1_000;
/// From how many bytes on pages are passed by reference, as the module is shipped; and never.
const REFER_BYTES: u32 = 4096;
const NEVER: u32 = u32::MAX;
/// Huge pages of Open vSwitch: 2 MiB each.
const HUGE_PAGES: u64 = 256;
/// Time for a guest to boot, on a busy machine.
const READY: Duration = Duration::from_secs(120);
/// For what takes milliseconds on a quiet machine: links, and the first packet on another way.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at what announces itself to nobody.
const LOOK: Duration = Duration::from_millis(20);
/// Time for a short script.
const CALL: Duration = Duration::from_secs(60);
/// First words of a failed script that the error shows.
const SHOWN_WORDS: usize = 8;
/// Shortens the wait for lost fragments, and makes room for them. What is left of datagrams that
/// lost a fragment fills the memory for fragments for half a minute, and then the next way's are
/// dropped: that would measure who came before.
const FRAGMENTS: &str =
    "cd /proc/sys/net/ipv4; echo 1 > ipfrag_time; echo 16777216 > ipfrag_high_thresh";
/// The module whose hook sees every packet.
const LOAD: &str = "modprobe millrace_net";
const UNLOAD: &str = "rmmod millrace_net";

/// The CPUs of the client's vCPU and of the server's: each its own, or whichever of two.
fn pair(setup: &Setup, cpus: &[usize]) -> Option<[usize; 2]> {
    let first = cpus.first_chunk().filter(|_| setup.vcpus == 1)?;
    (setup.pinned || cpus.len() == 2).then_some(*first)
}

/// Everything, running. It goes when this is dropped: guests before who serves them.
pub struct Bed {
    client: Guest,
    server: Guest,
    daemon: Daemon,
    ovs: Result<Switch, String>,
    lab: Lab,
    spinners: Vec<Thread>,
    cores: u32,
    poll_us: u32,
    /// CPUs of the two guests' vCPUs, if they are sure.
    pair: Option<[usize; 2]>,
    /// Route that packets take now, if it is known.
    way: Cell<Option<Route>>,
    _cleanup: Cleanup,
}

impl Bed {
    /// Boots everything; `spinners` are left out of the accounts.
    pub fn boot(
        setup: &Setup,
        spinners: Vec<Thread>,
        progress: &mut Progress,
    ) -> Result<Bed, BenchError> {
        progress.step("preparing kernel, modules and guest image");
        let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
        let mut cleanup = Cleanup::new()?;
        let has_vhost = setup.ways.contains(&Route::TapVhost);
        bridges(&lab, has_vhost)?;
        progress.step("starting the daemon and Open vSwitch");
        let daemon = daemon(&lab, setup)?;
        let ovs = match setup.ways.contains(&Route::OvsNormal) {
            true => start_ovs(&lab, &mut cleanup).map_err(|e| e.to_string()),
            false => Err("not asked for".into()),
        };
        progress.step("booting two guests");
        let image = image(setup);
        let describe = |at| {
            let guest = guest(&lab, setup, &image, at)
                .net(Net::tap(tap(at)))
                .address(format!("10.0.0.{}/24", at + 1))
                .net(Net::vhost_user(daemon.socket(NAMES[at], "n")))
                .address(format!("10.0.1.{}/24", at + 1));
            let guest = match &ovs {
                Ok(ovs) => guest
                    .net(Net::vhost_user(&ovs.ports[at]))
                    .address(format!("10.0.2.{}/24", at + 1)),
                Err(_) => guest,
            };
            match has_vhost {
                true => guest
                    .net(Net::tap_vhost(vhost_tap(at)))
                    .address(format!("10.0.3.{}/24", at + 1)),
                false => guest,
            }
        };
        let booted = lab::boot(&lab, [describe(0), describe(1)], READY);
        let [client, server] = booted.map_err(|e| BenchError::lab("boot the guests", e))?;
        let cpus = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
        let (cores, pair) = (cpus.len() as u32, pair(setup, &cpus));
        let (way, poll_us, _cleanup) = (Cell::new(None), setup.poll_us, cleanup);
        let bed =
            Bed { client, server, daemon, ovs, lab, spinners, cores, poll_us, pair, way, _cleanup };
        if setup.pinned {
            bed.pin()?;
        }
        progress.step("loading the modules");
        bed.prepare()?;
        Ok(bed)
    }

    /// Gives each virtual CPU a CPU of the host, as far as there are enough, so that one that polls
    /// never keeps the guest off its CPU whose answer it waits for. QEMU's other threads go where
    /// there is room.
    fn pin(&self) -> Result<(), BenchError> {
        let cpus = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
        let mut next = cpus.iter().cycle();
        for guest in self.guests() {
            for tid in vcpus(guest)? {
                let mut set = CpuSet::new();
                next.next().into_iter().for_each(|cpu| set.set(*cpu));
                let pid = i32::try_from(tid).ok().and_then(Pid::from_raw);
                sched_setaffinity(pid, &set).map_err(|e| failed("bind a vCPU", guest, e))?;
            }
        }
        Ok(())
    }

    /// Modules and servers.
    fn prepare(&self) -> Result<(), BenchError> {
        for guest in self.guests() {
            sh(
                guest,
                "mountpoint -q /sys/kernel/debug || mount -t debugfs none /sys/kernel/debug",
            )?;
            sh(guest, LOAD)?;
            sh(guest, FRAGMENTS)?;
            serve(guest, "agent rr-server")?;
            serve(guest, "agent sink")?;
        }
        sh(&self.server, &busy_sockets(BUSY_US))?;
        serve(&self.server, &format!("agent rr-server {BUSY_RR_PORT}"))?;
        // Without an owner it would poll all the time.
        self.stop_ovs(true)?;
        self.linked()
    }

    /// How far the two guests' CPUs are from each other now, ns there and back.
    pub fn apart_ns(&self) -> Option<f64> {
        crate::harness::distance::line_ns(self.pair?)
    }

    /// The client first.
    pub fn guests(&self) -> [&Guest; 2] {
        [&self.client, &self.server]
    }

    /// The lab's namespace and cache.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Why there is no Open vSwitch although it was asked for.
    pub fn no_ovs(&self) -> Option<&str> {
        self.ovs.as_ref().err().map(String::as_str).filter(|why| *why != "not asked for")
    }

    /// Whether a way is there.
    pub fn has(&self, way: Route) -> bool {
        way != Route::OvsNormal || self.ovs.is_ok()
    }

    /// Waits until the guests' modules have found each other.
    fn linked(&self) -> Result<(), BenchError> {
        let read = "cat /sys/kernel/debug/millrace/channel";
        for guest in self.guests() {
            until("the channel's link", || {
                Ok(counters::sum(&sh(guest, read)?, "peer", "open") == 1)
            })?;
        }
        Ok(())
    }

    /// Makes packets go a way; what both modules had counted when they did, the client's first.
    pub fn take(&self, way: Route) -> Result<[Counters; 2], BenchError> {
        let counted = if self.way.replace(None) == Some(way) {
            self.counters()?
        } else {
            self.stop_ovs(way != Route::OvsNormal)?;
            self.settle(way)?
        };
        self.way.set(Some(way));
        Ok(counted)
    }

    /// Sets both guests up, and sends packets until the modules' counters say that both guests' go
    /// where they should.
    fn settle(&self, way: Route) -> Result<[Counters; 2], BenchError> {
        let busy = if way.is_busy() { format!(":{BUSY_RR_PORT}") } else { String::new() };
        let probe = format!("agent rr udp {}{busy} 0.01 64", way.server());
        let script = format!("{}; {}", settings(way, self.poll_us), counters::SCRIPT);
        let mut before = self.both(&script)?.map(|text| Counters::parse(&text));
        until(&format!("packets go by {}", way.name()), || {
            // The first ones may be lost while the switch learns.
            let answer = self.tool(&probe, CALL)?;
            let after = self.counters()?;
            let has_answer = answer["count"].as_f64().is_some_and(|count| count > 0.0);
            let as_wanted = |at: usize| {
                let counted: Counters = after[at].since(&before[at]);
                (counted.taken > 0) == way.is_channel()
            };
            let done = has_answer && as_wanted(0) && as_wanted(1);
            before = after;
            Ok(done)
        })?;
        Ok(before)
    }

    /// Loads `millrace_net` in the client, or takes it out.
    pub fn load_hook(&self, loaded: bool) -> Result<(), BenchError> {
        self.way.set(None);
        self.stop_ovs(true)?;
        sh(&self.client, if loaded { LOAD } else { UNLOAD })?;
        if loaded { self.linked() } else { Ok(()) }
    }

    /// Counters of both modules so far, the client's first.
    pub fn counters(&self) -> Result<[Counters; 2], BenchError> {
        Ok(self.both(counters::SCRIPT)?.map(|text| Counters::parse(&text)))
    }

    /// Runs a script in both guests at once; what it printed.
    fn both(&self, script: &str) -> Result<[String; 2], BenchError> {
        let client = self.client.spawn(script).map_err(|e| failed(script, &self.client, e))?;
        let server = self.server.spawn(script).map_err(|e| failed(script, &self.server, e))?;
        let end = |running: lab::Running, guest| {
            let done = running.wait(CALL).and_then(lab::Output::ok);
            done.map_err(|e| failed_script(script, guest, &e))
        };
        Ok([end(client, &self.client)?, end(server, &self.server)?])
    }

    /// Runs a tool in the client's guest and reads the JSON that it prints.
    pub fn tool(&self, script: &str, time: Duration) -> Result<Value, BenchError> {
        let answer = self.client.run_for(script, time).and_then(lab::Output::json);
        answer.map_err(|e| failed_script(script, &self.client, &e))
    }

    /// Processes whose CPU time belongs to a way.
    pub fn accounts(&self, way: Route) -> Accounts {
        let (client, server) = (self.client.pid(), self.server.pid());
        let ovs = self.ovs.as_ref().ok().map(|ovs| ovs.process.pid());
        let side = match way {
            Route::Loopback => vec![client],
            Route::TapBridge | Route::TapBridgeBusy => vec![client, server],
            Route::TapVhost => {
                let kernel = [client, server].into_iter().flat_map(lab::vhost_threads);
                [client, server].into_iter().chain(kernel).collect()
            }
            Route::OvsNormal => [client, server].into_iter().chain(ovs).collect(),
            _ => [client, server].into_iter().chain(self.daemon.pids()).collect(),
        };
        let all = [client, server].into_iter().chain(self.daemon.pids()).chain(ovs);
        let other = all.filter(|pid| !side.contains(pid)).collect();
        Accounts { side, other, spinners: self.spinners.clone(), cores: self.cores }
    }

    /// Stops Open vSwitch, or lets it go on: its polling thread takes a CPU, whoever is measured.
    fn stop_ovs(&self, stop: bool) -> Result<(), BenchError> {
        let Ok(ovs) = &self.ovs else { return Ok(()) };
        let signal = if stop { Signal::STOP } else { Signal::CONT };
        let pid = i32::try_from(ovs.process.pid()).ok().and_then(Pid::from_raw);
        let done = pid.map_or(Ok(()), |pid| kill_process(pid, signal));
        done.map_err(|e| BenchError::lab("stop Open vSwitch, or let it go on", e))
    }

    /// Neither kernel has complained.
    pub fn is_sound(&self) -> Result<(), BenchError> {
        let bad = ["BUG:", "WARNING:", "Oops", "Call Trace"];
        for guest in self.guests() {
            let log = sh(guest, "dmesg")?;
            if let Some(line) = log.lines().find(|line| bad.iter().any(|word| line.contains(word)))
            {
                return Err(failed("the kernel complains", guest, line));
            }
        }
        Ok(())
    }
}

/// Runs a script that must succeed; what it printed.
pub fn sh(guest: &Guest, script: &str) -> Result<String, BenchError> {
    let done = guest.run_for(script, CALL).and_then(lab::Output::ok);
    done.map_err(|e| failed_script(script, guest, &e))
}

fn failed(what: &str, guest: &Guest, why: impl Display) -> BenchError {
    BenchError::lab(format!("{what} on {}", guest.name()), why)
}

/// A script that failed, by its first words and what it said last: it may be long.
pub fn failed_script(script: &str, guest: &Guest, error: &LabError) -> BenchError {
    let words: Vec<&str> = script.split_whitespace().take(SHOWN_WORDS).collect();
    let why = match error {
        LabError::GuestCommand { code, stdout, stderr, .. } => {
            let said = stderr.lines().last().or(stdout.lines().last()).unwrap_or_default();
            format!("ended with {code}: {said}")
        }
        other => other.to_string(),
    };
    failed(&words.join(" "), guest, why)
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool, BenchError>) -> Result<(), BenchError> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        if Instant::now() > end {
            return Err(BenchError::lab(what, format!("not within {PATIENCE:?}")));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn busy_sockets(us: u32) -> String {
    let folder = "/proc/sys/net/core";
    format!("echo {us} > {folder}/busy_read; echo {us} > {folder}/busy_poll")
}

/// Sets a guest up for a way.
fn settings(way: Route, poll_us: u32) -> String {
    let enabled = if way == Route::Switch { "N" } else { "Y" };
    let refer = if way == Route::ChannelCopy { NEVER } else { REFER_BYTES };
    let poll = if matches!(way, Route::ChannelPoll | Route::ChannelBusy) { poll_us } else { 0 };
    format!(
        "set -e; cd /sys/module; echo {enabled} > millrace_net/parameters/enabled; \
         echo {refer} > millrace_net/parameters/refer_bytes; \
         echo {poll} > millrace_channel/parameters/poll_us; {}",
        busy_sockets(if way.is_busy() { BUSY_US } else { 0 })
    )
}

fn tap(at: usize) -> String {
    format!("tap{at}")
}

fn vhost_tap(at: usize) -> String {
    format!("vtap{at}")
}

/// The TAPs' bridge, and that of the TAPs which the host's kernel serves.
fn bridges(lab: &Lab, has_vhost: bool) -> Result<(), BenchError> {
    let (net, name, vhost) = (lab.net(), "br0", "br1");
    let mut made = net.bridge(name).and_then(|()| {
        (0..NAMES.len()).try_for_each(|at| net.tap(&tap(at), Some(name)))?;
        net.address(name, &format!("{HOST}/24"))
    });
    if made.is_ok() && has_vhost {
        made = net.bridge(vhost).and_then(|()| {
            (0..NAMES.len()).try_for_each(|at| net.tap(&vhost_tap(at), Some(vhost)))
        });
    }
    made.map_err(|e| BenchError::lab("make the bridge", e))
}

fn daemon(lab: &Lab, setup: &Setup) -> Result<Daemon, BenchError> {
    let mut daemon = Daemon::builder("d").binary(&setup.millrace).switch("lan", "");
    for (at, name) in NAMES.iter().enumerate() {
        // Configured, so that peers send to this card's address by the channel and to no other.
        let port = format!(
            "switch = \"lan\"\nmac = \"{}\"\naddresses = [\"10.0.1.{}\"]",
            mac_of(name, 1),
            at + 1
        );
        let channel = format!("[vm.channel]\nqmp = \"@RUN@/{name}.qmp\"\n");
        daemon =
            daemon.vm(Vm::new(name, "trust_domain = \"bench\"").net("n", &port).more(&channel));
    }
    daemon.start(lab).map_err(|e| BenchError::lab("start the daemon", e))
}

fn start_ovs(lab: &Lab, cleanup: &mut Cleanup) -> Result<Switch, BenchError> {
    if !std::path::Path::new(VSWITCHD).is_file() {
        return Err(BenchError::lab(
            "Open vSwitch on DPDK",
            "not installed; scripts/peers does it",
        ));
    }
    let cpus = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
    let (main_cpu, poll_cpu) = match (cpus.first(), cpus.last()) {
        (Some(first), Some(last)) => (*first, *last),
        _ => return Err(BenchError::lab("list CPUs", "there is none")),
    };
    let folder = lab.path("ovs");
    std::fs::create_dir(&folder).map_err(|e| BenchError::file("make folder", &folder, e))?;
    let hugepages = cleanup.reserve_huge_pages(HUGE_PAGES)?;
    let place = Place { poll_cpu, main_cpu, hugepages };
    Switch::start(Route::OvsNormal.name(), &place, &folder)
}

fn image(setup: &Setup) -> ImageBuilder {
    let image = Image::builder().kmod().module("dummy");
    setup.programs.iter().fold(image, |image, program| program.add_to(image))
}

fn guest(lab: &Lab, setup: &Setup, image: &ImageBuilder, at: usize) -> GuestBuilder {
    let monitor = lab.path("d").join(format!("{}.qmp", NAMES[at]));
    let guest = Guest::builder(NAMES[at])
        .kernel(setup.kernel)
        .vcpus(setup.vcpus)
        .image(image.clone())
        .memory_power_of_two()
        .root_ports(3)
        .monitor(monitor);
    match setup.programs.is_empty() {
        true => guest,
        false => guest.memory_mb(PROGRAMS_MEMORY_MB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_its_settings() {
        let has = |way, text: &str| settings(way, POLL_US).contains(text);
        for way in Route::ALL {
            assert_eq!(has(way, "echo N > millrace_net/parameters/enabled"), way == Route::Switch);
            let polls = matches!(way, Route::ChannelPoll | Route::ChannelBusy);
            assert_eq!(has(way, "echo 1000 > millrace_channel/parameters/poll_us"), polls);
            assert_eq!(has(way, "echo 50 > /proc/sys/net/core/busy_read"), way.is_busy());
            assert_eq!(has(way, "echo 4096 > millrace_net/"), way != Route::ChannelCopy);
        }
    }

    #[test]
    fn what_does_not_come_is_told() {
        let mut looks = 0;
        let done = until("x", || {
            looks += 1;
            Ok(looks == 3)
        });
        assert!(done.is_ok() && looks == 3);
        let text = until("x", || Err(BenchError::lab("guest", "gone"))).unwrap_err().to_string();
        assert_eq!(text, "guest: gone");
    }
}
