//! An idle VM moves to another host: the network hears where it is now, though its guest says
//! nothing.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lab::device::mac_of;
use lab::{Daemon, Guest, GuestBuilder, Lab, Net, NetLab, Vm};

use serde_json::json;

use crate::common::{READY, beside_others, boot, daemon, until_ok};

/// Guest and host on the bridge.
const GUEST: &str = "10.0.0.2";
const HOST: &str = "10.0.0.9/24";

/// A daemon that may have the VM, on the common bridge.
fn start(lab: &Lab, name: &str) -> Daemon {
    let uplink = format!("[switch.uplink]\ntap = \"up-{name}\"\nbridge = \"br0\"\n");
    let port = format!("switch = \"lan\"\nmac = \"{}\"", mac_of("a", 0));
    let vm = Vm::new("a", "").net("n", &port);
    daemon(name).switch("lan", &uplink).vm(vm).start(lab).unwrap()
}

fn guest(name: &str, at: &Daemon) -> GuestBuilder {
    let mut net = Net::vhost_user(at.socket("a", "n"));
    net.mac = Some(mac_of("a", 0));
    Guest::builder(name).net(net)
}

/// Port to which the bridge sends what is for the guest.
fn place(net: &NetLab) -> String {
    let output = net.command("bridge").args(["fdb", "show", "br", "br0"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let of_guest = text.lines().find(|line| line.starts_with(&mac_of("a", 0)));
    let words: Vec<&str> = of_guest.unwrap_or_default().split_whitespace().collect();
    words.get(2).unwrap_or(&"").to_string()
}

/// Asks the guest twenty times a second whether it is there.
struct Pings {
    child: Child,
    answers: Arc<Mutex<Vec<Instant>>>,
}

impl Pings {
    fn start(net: &NetLab) -> Self {
        let mut ping = net.command("busybox");
        let mut child =
            ping.args(["ping", "-i", "0.05", GUEST]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let answers = Arc::<Mutex<Vec<Instant>>>::default();
        let heard = Arc::clone(&answers);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok).filter(|line| line.contains("seq=")) {
                let _ = line;
                heard.lock().unwrap().push(Instant::now());
            }
        });
        Self { child, answers }
    }

    /// Waits for an answer, and returns the longest time without one since `from`.
    fn longest_gap(&self, from: Instant) -> Duration {
        let asked = Instant::now();
        until_ok("the guest answers", || {
            let answers = self.answers.lock().unwrap();
            answers.iter().any(|at| *at > asked).then_some(()).ok_or("no answer")
        });
        let answers = self.answers.lock().unwrap();
        let first = answers.partition_point(|at| *at < from).saturating_sub(1);
        answers[first..].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The VM goes on as a guest of this name, at this daemon; QEMU's own downtime.
fn migrate(lab: &Lab, from: &Guest, name: &str, to: &Daemon) -> (Guest, Duration) {
    let uri = format!("unix:{}", lab.path(&format!("{name}.migration")).display());
    let there = guest(name, to).qemu_args(["-incoming", &uri]).start(lab).unwrap();
    assert_eq!(there.qmp("query-status", json!({})).unwrap()["status"], "inmigrate");
    from.qmp("migrate", json!({"uri": uri})).unwrap();
    let state = until_ok("the VM has moved", || {
        let state = from.qmp("query-migrate", json!({})).unwrap();
        assert_ne!(state["status"], "failed", "{state}");
        if state["status"] == "completed" { Ok(state) } else { Err(state) }
    });
    (there, Duration::from_millis(state["downtime"].as_u64().unwrap()))
}

#[test]
fn an_idle_vm_that_moves_is_found_at_once() {
    let _beside = beside_others();
    let moves = if std::env::var_os("MILLRACE_SOAK").is_some() { 10 } else { 2 };
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    lab.net().address("br0", HOST).unwrap();
    let daemons = ["d", "e"].map(|name| start(&lab, name));
    let [mut at] = boot(&lab, [guest("a0", &daemons[0]).address(format!("{GUEST}/24"))]);
    // What a kernel says by itself now and then.
    at.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1").unwrap();
    let pings = Pings::start(lab.net());
    pings.longest_gap(Instant::now());
    for n in 1..=moves {
        let to = n % 2;
        let (up, told) = (format!("up-{}", ["d", "e"][to]), announced(&daemons[to]));
        let began = Instant::now();
        let (there, downtime) = migrate(&lab, &at, &format!("a{n}"), &daemons[to]);
        until_ok("the bridge has heard of it", || {
            let place = place(lab.net());
            if place == up { Ok(()) } else { Err(place) }
        });
        assert!(announced(&daemons[to]) > told, "{}", daemons[to].log_tail(20));
        let gap = pings.longest_gap(began);
        println!("move {n}: {gap:?} without an answer, of that QEMU's downtime {downtime:?}");
        at.kill();
        there.wait_ready(READY).unwrap();
        at = there;
    }
    at.check().unwrap();
}

/// How often the daemon has announced a VM.
fn announced(daemon: &Daemon) -> usize {
    daemon.log_tail(10_000).matches("announced").count()
}
