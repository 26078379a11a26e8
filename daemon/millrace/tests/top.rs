//! `millrace top` against the real daemon under load, and on a real terminal.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ExitStatus, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use common::{Place, millrace, terminate, text};
use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::ring::RingShape;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

const CONFIG: &str = "
[sidecore]
count=1
[[switch]]
name='lan'
[[vm]]
name='web'
weight=300
[[vm.disk]]
name='d'
format='memory'
size='4MiB'
[[vm]]
name='idle'
[[vm.net]]
name='n'
switch='lan'
mac='02:00:00:00:00:0b'
";

/// Loads the disk until `ended`; tells `begun` when it has begun.
fn load(socket: &Path, begun: &Sender<()>, ended: &AtomicBool) {
    let shape =
        RingShape { size: 64, packed: false, in_order: false, event_idx: true, indirect: false };
    let (op, depth, block_bytes) = (Op::Mixed, 8, 4096);
    let run =
        DiskRun { op, shape, block_bytes, depth, verify: true, wait: true, huge: false, seed: 7 };
    let mut load = DiskLoad::start(Reach::Dial(socket), run).unwrap();
    begun.send(()).unwrap();
    while !ended.load(Ordering::Relaxed) {
        assert_eq!(load.run(10_000_000).unwrap().errors, 0);
    }
    load.stop().unwrap();
}

/// Output of `top` while a disk is under load.
fn under_load(place: &Place, args: &[&str]) -> Output {
    let (ended, disk) = (AtomicBool::new(false), place.socket("web-d.sock"));
    std::thread::scope(|scope| {
        let (begin, begun) = mpsc::channel();
        let driver = scope.spawn({
            let (disk, ended) = (&disk, &ended);
            move || load(disk, &begin, ended)
        });
        begun.recv().unwrap();
        let mut top = millrace();
        top.args(["top", "--interval-ms", "300"]).args(args).arg("--socket");
        let output = top.arg(place.socket("control.sock")).output();
        ended.store(true, Ordering::Relaxed);
        driver.join().unwrap();
        output.unwrap()
    })
}

#[test]
fn a_snapshot_shows_what_the_load_does() {
    let place = Place::new(CONFIG);
    let daemon = place.start();
    let output = under_load(&place, &["--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let view: Value = serde_json::from_slice(&output.stdout).unwrap();

    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/top.json");
    let schema: Value = serde_json::from_slice(&std::fs::read(schema).unwrap()).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let problems: Vec<String> = validator.iter_errors(&view).map(|e| e.to_string()).collect();
    assert!(problems.is_empty(), "{problems:?} in {view:#}");

    let (web, idle) = (&view["vms"][0], &view["vms"][1]);
    assert_eq!((web["name"].as_str(), web["weight"].as_u64()), (Some("web"), Some(300)));
    // Nobody else does anything.
    assert_eq!((web["share"].as_f64(), idle["share"].as_f64()), (Some(1.0), Some(0.0)), "{view:#}");
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(number(&web["requests_per_s"]) > 0.0 && number(&web["bytes_per_s"]) > 0.0, "{web:#}");
    let (p50, p99) = (&web["disk_p50_ns"], &web["disk_p99_ns"]);
    assert!(0.0 < number(p50) && number(p50) <= number(p99), "{web:#}");
    assert_eq!(idle["disk_p99_ns"], Value::Null);
    assert!(number(&view["sidecores"][0]["busy_share"]) > 0.0, "{view:#}");
    let workers = view["workers"].as_array().unwrap();
    let names: Vec<&str> = workers.iter().filter_map(|w| w["name"].as_str()).collect();
    assert_eq!(names, ["switch lan", "disk web/d queue 0"]);
    let ports = view["ports"].as_array().unwrap();
    let states: Vec<&str> = ports.iter().filter_map(|p| p["state"].as_str()).collect();
    assert_eq!(states, ["up", "down"]);
    assert!(daemon.terminate().success());
}

#[test]
fn plain_text_needs_no_terminal_and_the_live_view_does() {
    let place = Place::new(CONFIG);
    let daemon = place.start();
    let output = under_load(&place, &["--once"]);
    let shown = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(shown.contains("sidecores 1/1 active  2 VMs  2 ports"), "{shown}");
    let web = shown.lines().find(|line| line.starts_with("web ")).unwrap();
    assert_eq!(web.split_whitespace().nth(2), Some("100.0%"), "{shown}");

    let socket = place.socket("control.sock");
    let live = millrace().args(["top", "--socket"]).arg(&socket).output().unwrap();
    assert_eq!(live.status.code(), Some(1));
    assert!(text(&live.stderr).contains("--once"), "{}", text(&live.stderr));
    assert!(daemon.terminate().success());
    let gone = millrace().args(["top", "--once", "--socket"]).arg(&socket).output().unwrap();
    assert_eq!(gone.status.code(), Some(3), "{}", text(&gone.stderr));
}

/// A terminal of 100 by 30 and its other end.
fn terminal() -> (File, OwnedFd) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    resize(&ours, 100, 30);
    (ours.into(), theirs.into())
}

fn resize(terminal: impl AsFd, ws_col: u16, ws_row: u16) {
    tcsetwinsize(terminal, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
}

/// Reads from the terminal until `wanted` was there; the program must not have ended before.
fn read_until(terminal: &mut File, wanted: &str) -> String {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        let n = terminal.read(&mut buffer).unwrap();
        seen.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

/// Ends a live view by its terminal or otherwise.
type Leave = fn(&mut File, Child) -> ExitStatus;

#[test]
fn the_live_view_obeys_keys_and_gives_the_terminal_back() {
    let place = Place::new(CONFIG);
    let daemon = place.start();
    let leave: [(&str, Leave); 3] = [
        ("q", |terminal, mut child| {
            terminal.write_all(b"q").unwrap();
            child.wait().unwrap()
        }),
        ("Ctrl-C", |terminal, mut child| {
            terminal.write_all(b"\x03").unwrap();
            child.wait().unwrap()
        }),
        ("SIGTERM", |_, child| terminate(child)),
    ];
    for (how, leave) in leave {
        let (mut ours, theirs) = terminal();
        let before = tcgetattr(&theirs).unwrap().local_modes;
        assert!(before.contains(LocalModes::ECHO | LocalModes::ICANON));
        let child = millrace()
            .args(["top", "--interval-ms", "100", "--socket"])
            .arg(place.socket("control.sock"))
            .env("TERM", "xterm")
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .spawn()
            .unwrap();
        // A screen is drawn from the top; its last line comes last.
        let first = read_until(&mut ours, "q quit");
        // Blanks are not drawn, they are stepped over: single words only.
        assert!(first.contains("sidecores"), "{how}: {first}");
        assert!(!tcgetattr(&theirs).unwrap().local_modes.contains(LocalModes::ICANON));
        ours.write_all(b"w").unwrap();
        read_until(&mut ours, "WORKER");
        ours.write_all(b"p").unwrap();
        read_until(&mut ours, "PORT");
        assert!(leave(&mut ours, child).success(), "{how}");
        assert_eq!(tcgetattr(&theirs).unwrap().local_modes, before, "{how}");
        read_until(&mut ours, "\x1b[?1049l");
    }
    assert!(daemon.terminate().success());
}
