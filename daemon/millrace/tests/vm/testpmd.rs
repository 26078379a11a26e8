//! A front end that is not ours and no VM: DPDK's virtio-user driver in testpmd.

use std::io::Write;
use std::process::{Command, Stdio};

use lab::Lab;
use lab::Vm;

use crate::common::{alone, daemon};

const MACS: [&str; 2] = ["02:00:00:00:00:0a", "02:00:00:00:00:0b"];

/// Frames circulate between two virtio-user ports through the switch; every one that is received
/// was sent by the other port.
fn circulate(ring: &str) {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let port = |at: usize| format!("switch = \"lan\"\nmac = {:?}\nbind = \"mac\"", MACS[at]);
    let daemon = daemon("d")
        .switch("lan", "")
        .vm(Vm::new("a", "").net("n", &port(0)))
        .vm(Vm::new("b", "").net("n", &port(1)))
        .start(&lab)
        .unwrap();
    let vdev = |at: usize, vm: &str| {
        let path = daemon.socket(vm, "n");
        format!("net_virtio_user{at},path={},mac={},queue_size=256{ring}", path.display(), MACS[at])
    };
    let mut testpmd = Command::new("dpdk-testpmd")
        .args(["-l", "0-1", "--no-pci", "--no-huge", "-m", "256", "--file-prefix=millrace"])
        .args(["--vdev", &vdev(0, "a"), "--vdev", &vdev(1, "b")])
        .args(["--", "-i", "--forward-mode=mac", "--total-num-mbufs=8192"])
        .args([&format!("--eth-peer=0,{}", MACS[1]), &format!("--eth-peer=1,{}", MACS[0])])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = testpmd.stdin.take().unwrap();
    stdin.write_all(b"start tx_first 4\n").unwrap();
    let counted = wait_for_frames(&daemon, 100_000.0);
    stdin.write_all(b"stop\nquit\n").unwrap();
    drop(stdin);
    let output = testpmd.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(counted, "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("Bye..."), "{text}");
    let metrics = daemon.metrics().unwrap();
    for line in metrics.lines().filter(|l| l.contains("reason=\"") && !l.starts_with('#')) {
        let stalled = line.contains("receiver_stalled") || line.contains("link_down");
        assert!(stalled || line.ends_with(" 0"), "{line}");
    }
}

/// Looks at the counters until both VMs have received that many frames.
fn wait_for_frames(daemon: &lab::Daemon, least: f64) -> bool {
    let received = |vm: &str| {
        let labels = [("vm", vm), ("queue", "0")];
        daemon.metric_sum("millrace_queue_requests_total", &labels).unwrap()
    };
    (0..600).any(|_| {
        let enough = [received("a"), received("b")].iter().all(|&n: &f64| n >= least);
        if !enough {
            // There is no event for a counter; the bound is a minute.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        enough
    })
}

#[test]
fn dpdk_virtio_user_on_split_rings() {
    circulate("");
}

#[test]
fn dpdk_virtio_user_on_split_rings_in_order() {
    circulate(",in_order=1,mrg_rxbuf=0");
}

#[test]
fn dpdk_virtio_user_on_packed_rings() {
    circulate(",packed_vq=1");
}
