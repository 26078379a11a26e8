//! Costs of the daemon: nothing when idle, no system call per packet when busy.

use std::time::Duration;

use lab::Vm;
use lab::{Daemon, Disk, Guest, Lab, Net, Vsock};

use crate::common::{MIB, READY, alone, boot, daemon, transfer};
use crate::strace::Strace;

const WATCHED: Duration = Duration::from_secs(10);

fn two_guests(lab: &Lab) -> (Daemon, [Guest; 2]) {
    let vm = |name: &str, cid| {
        let disk = "format = \"memory\"\nsize = \"64MiB\"";
        Vm::new(name, "").net("n", "switch = \"lan\"").disk("d", disk).vsock(cid)
    };
    let daemon = daemon("d").switch("lan", "").vm(vm("a", 11)).vm(vm("b", 12)).start(lab).unwrap();
    let guest = |name: &str, last: u8| {
        Guest::builder(name)
            .net(Net::vhost_user(daemon.socket(name, "n")))
            .address(format!("10.0.0.{last}/24"))
            .disk(Disk::vhost_user(daemon.socket(name, "d")))
            .vsock(Vsock::vhost_user(daemon.socket(name, "vsock")))
    };
    let guests = boot(lab, [guest("a", 1), guest("b", 2)]);
    (daemon, guests)
}

#[test]
fn idle_under_one_percent_of_a_core() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let (daemon, [a, b]) = two_guests(&lab);
    transfer(&a, &b, "tcp", "10.0.0.2", 4 * MIB);
    daemon.wait_for_huge_pages(READY).unwrap();
    let before = daemon.cpu_time().unwrap();
    // The amount is CPU time, not time: a busy machine makes it smaller, never larger.
    std::thread::sleep(WATCHED);
    let used = daemon.cpu_time().unwrap() - before;
    println!("idle: {used:?} of CPU in {WATCHED:?}");
    assert!(used * 100 < WATCHED, "{used:?} of CPU in {WATCHED:?}");
}

fn frames(daemon: &Daemon) -> f64 {
    daemon.metric_sum("millrace_queue_requests_total", &[("kind", "net")]).unwrap()
}

#[test]
fn busy_without_a_system_call_per_packet() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let (daemon, [a, b]) = two_guests(&lab);
    let mut sink = b.spawn("agent sink").unwrap();
    sink.wait_line("listening", WATCHED).unwrap();
    let strace = Strace::attach(&["-f", "-p", &daemon.pid().to_string()], &lab.path("strace.txt"));
    let before = frames(&daemon);
    let result = a.run_for("agent udp-small 10.0.0.2 5", WATCHED * 6).unwrap().json().unwrap();
    let moved = frames(&daemon) - before;
    let (calls, text) = strace.finish();
    assert!(calls > 0, "a sidecore that sleeps makes some: {text}");
    println!("{calls} system calls for {moved} frames ({result})\n{text}");
    assert!((calls as f64) < moved / 4.0, "{calls} system calls for {moved} frames\n{text}");
}
