//! The real daemon: ports of every kind, listings, attach and detach, a clean end.
#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::os::fd::AsFd;

use common::net_guest::NetGuest;
use common::{BASIC, IN, OUT, Place, TWO_VMS, driver, millrace, sector, text, wait_used};
use queue::Layout;
use serde_json::{Value, json};
use vhost_user::codec::{Region, Request};
use vhost_user::testing::{self, FrontEnd};

const ALL: &str = "
[[switch]]
name='lan'
[[vm]]
name='web'
trust_domain='shop'
[[vm.net]]
name='net0'
switch='lan'
mac='02:00:00:00:00:01'
[[vm.disk]]
name='root'
format='memory'
size='1MiB'
[[vm.disk]]
name='null'
format='null'
size='1GiB'
[vm.vsock]
cid=3
path='@/web.vsock'
[[vm]]
name='db'
[[vm.disk]]
name='broken'
format='raw'
path='@/missing.img'
";

#[test]
fn the_daemon_shows_serves_and_ends_cleanly() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let status = daemon.get("/v1/status");
    assert_eq!(status["vms"].as_array().unwrap().len(), 2);
    assert_eq!(status["switches"][0]["macs"][0]["mac"], "02:00:00:00:00:01");
    for port in ["net0", "root", "null", "vsock"] {
        assert_eq!(daemon.port("web", port)["health"], "ok", "{port}");
        assert!(common::listens(&place.socket(&format!("web-{port}.sock"))), "{port}");
    }
    // An image that is missing breaks its port and no other.
    let broken = daemon.port("db", "broken");
    assert_eq!(broken["health"], "broken");
    assert!(broken["reason"].as_str().unwrap().contains("missing.img"), "{broken}");

    let metrics = daemon.ask("GET", "/v1/metrics", None).body;
    for series in [
        "millrace_queue_requests_total{vm=\"web\",port=\"net0\",kind=\"net\",queue=\"1\"} 0",
        "millrace_disk_size_bytes{vm=\"web\",port=\"root\"} 1048576",
        "millrace_vsock_connections{vm=\"web\",port=\"vsock\"} 0",
        "millrace_switch_holds_total{switch=\"lan\"} 0",
        "millrace_switch_held_ns_total{switch=\"lan\"} 0",
        "millrace_worker_moves_total{worker=\"switch lan\",sidecore=\"0\"} 0",
        "millrace_worker_moves_total{worker=\"vsock shop\",sidecore=\"0\"} 0",
        "millrace_disk_flush_failed{vm=\"web\",port=\"root\"} 0",
        "millrace_port_healthy{vm=\"db\",port=\"broken\",kind=\"disk\"} 0",
        "millrace_sidecore_panics_total{sidecore=\"0\"} 0",
    ] {
        assert!(metrics.contains(series), "{series} is not in\n{metrics}");
    }
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    let left: Vec<_> = std::fs::read_dir(place.path("run")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!place.path("web.vsock").exists());
}

/// A service of systemd's has the journal as its standard error. Here nobody listens for journald,
/// or the lines go there.
#[test]
fn abuse_S3_lines_for_the_journal_begin_with_their_priority() {
    use std::os::linux::fs::MetadataExt;
    let place = Place::new(ALL);
    std::fs::write(place.path("log"), "").unwrap();
    let meta = place.path("log").metadata().unwrap();
    let stream = format!("{}:{}", meta.st_dev(), meta.st_ino());
    let config = place.path("bad.toml");
    std::fs::write(&config, "[daemons]\n").unwrap();
    let log = std::fs::File::options().append(true).open(place.path("log")).unwrap();
    let mut serve = millrace();
    serve.args(["serve", "-c"]).arg(&config).env("JOURNAL_STREAM", &stream).stderr(log);
    assert_eq!(serve.status().unwrap().code(), Some(1));
    assert!(place.log().starts_with("<3>"), "{}", place.log());
    if std::path::Path::new("/run/systemd/journal/socket").exists() {
        return;
    }
    let daemon = place.start_with(&[("JOURNAL_STREAM", stream.as_ref())]);
    assert_eq!(daemon.terminate().code(), Some(0));
    let log = place.log();
    let error = log.lines().find(|line| line.contains("port=db/broken")).unwrap();
    assert!(error.starts_with("<3>millrace::host: not started: "), "{error}");
    assert!(log.lines().all(|line| line.starts_with('<')), "{log}");
    assert!(log.contains("\n<6>millrace::serve: ready: 5 ports"), "{log}");
}

/// A log that cannot be written is no reason to end: VMs depend on the threads that write it.
#[test]
fn nobody_reads_the_log() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let place = Place::new(&format!("log='debug'\n{ALL}"));
    let daemon = place.start_to(&[], writer.into());
    for port in ["net0", "root", "null", "vsock"] {
        assert_eq!(daemon.port("web", port)["health"], "ok", "{port}");
    }
    let metrics = daemon.ask("GET", "/v1/metrics", None).body;
    assert!(metrics.contains("millrace_sidecore_panics_total{sidecore=\"0\"} 0"), "{metrics}");
    assert_eq!(daemon.terminate().code(), Some(0));
}

#[test]
fn a_disk_is_attached_used_resized_and_detached() {
    let place = Place::new("");
    let daemon = place.start();
    let body = json!({"disk": {"name": "d", "format": "memory", "size": "1MiB", "serial": "x"}});
    let answer = daemon.ask("POST", "/v1/vms/new/ports", Some(body.clone()));
    assert_eq!(answer.status, 201, "{}", answer.body);
    assert_eq!(daemon.ask("POST", "/v1/vms/new/ports", Some(body)).status, 409);

    let front = FrontEnd::dial(&place.socket("new-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    sector(&mut ring, OUT, 7, 0x5a);
    assert_eq!(sector(&mut ring, IN, 7, 0), 0x5a);
    let worker = &daemon.get("/v1/status")["workers"][0];
    assert_eq!(worker["name"], json!("disk new/d queue 0"));
    assert_eq!(worker["sidecore"], json!(0));
    let wanted = [("connected", json!(true)), ("queues_running", json!(1)), ("requests", json!(2))];
    daemon.wait_port("new", "d", &wanted);
    daemon.wait_port("new", "d", &[("held", json!(false)), ("bytes", json!(1024))]);

    // The second one's time is known once the queue has been polled again, which may be later.
    let latency = &daemon.port("new", "d")["disk"]["latency"];
    assert!(latency["count"].as_u64().is_some_and(|n| (1..=2).contains(&n)), "{latency}");
    let in_buckets = latency["buckets"].as_object().unwrap().values();
    assert_eq!(in_buckets.map(|n| n.as_u64().unwrap()).sum::<u64>(), latency["count"]);

    let answer = daemon.ask("POST", "/v1/vms/new/disks/d/resize", Some(json!({"size": "2MiB"})));
    // The front end set up no back-end channel, so nobody can tell its driver (B5).
    let told = answer.body.contains("has 2097152 bytes now") && answer.body.contains("not told");
    assert!(answer.status == 409 && told, "{}: {}", answer.status, answer.body);
    sector(&mut ring, OUT, 4095, 0x77);

    assert_eq!(daemon.ask("DELETE", "/v1/vms/new/ports/d", None).status, 204);
    assert!(front.try_reply().is_none(), "the VMM sees the disconnect");
    assert!(!place.socket("new-d.sock").exists());
    assert_eq!(daemon.get("/v1/ports"), json!([]));
    assert_eq!(daemon.ask("DELETE", "/v1/vms/new/ports/d", None).status, 404);
}

#[test]
fn what_cannot_be_started_is_refused_and_leaves_nothing() {
    let place = Place::new("[[switch]]\nname='lan'\n");
    let daemon = place.start();
    let attach = |body: Value| daemon.ask("POST", "/v1/vms/v/ports", Some(body));
    let missing = json!({"disk": {"name": "d", "format": "raw", "path": place.path("missing")}});
    let answer = attach(missing);
    assert_eq!(answer.status, 422, "{}", answer.body);
    assert!(answer.error().contains("missing"), "{}", answer.body);
    // The socket is taken by a file: the device was made, and must go again.
    std::fs::write(place.socket("v-d.sock"), "in the way").unwrap();
    let vsock = json!({"vsock": {"cid": 3, "path": place.path("v"),
                                 "socket": place.socket("v-d.sock")}});
    assert_eq!(attach(vsock).status, 422);
    let net = json!({"net": {"name": "n", "switch": "lan", "mac": "02:00:00:00:00:01",
                             "socket": place.socket("v-d.sock")}});
    assert_eq!(attach(net).status, 422);
    assert_eq!(daemon.get("/v1/status")["vms"], json!([]));

    for body in [
        json!({"disk": {"name": "d", "format": "null", "size": 512, "socket": place.socket("d")}}),
        json!({"vsock": {"cid": 3, "path": place.path("v")}}),
        json!({"net": {"name": "n", "switch": "lan", "mac": "02:00:00:00:00:01"}}),
    ] {
        let answer = attach(body);
        assert_eq!(answer.status, 201, "{}", answer.body);
    }
}

#[test]
fn abuse_F2_one_image_is_served_once_even_under_two_names() {
    let place = Place::new("");
    std::fs::write(place.path("a.img"), vec![0u8; 1 << 20]).unwrap();
    std::os::unix::fs::symlink(place.path("a.img"), place.path("b.img")).unwrap();
    std::fs::hard_link(place.path("a.img"), place.path("c.img")).unwrap();
    let daemon = place.start();
    let attach = |name: &str, file: &str| {
        let body = json!({"disk": {"name": name, "format": "raw", "path": place.path(file)}});
        daemon.ask("POST", "/v1/vms/v/ports", Some(body)).status
    };
    assert_eq!(attach("a", "a.img"), 201);
    assert_eq!(attach("c", "c.img"), 422, "a hard link");
    assert_eq!(attach("b", "b.img"), 422, "a symbolic link");
}

/// A port of the config is brought back by its name, whatever became of it.
#[test]
fn abuse_O6_a_port_of_the_config_is_started_by_name() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let socket = place.socket("control.sock");
    let run = |args: &[&str]| millrace().args(args).arg("--socket").arg(&socket).output().unwrap();
    let still = run(&["start", "db", "broken"]);
    assert_eq!(still.status.code(), Some(4));
    assert!(text(&still.stderr).contains("missing.img"), "{}", text(&still.stderr));
    std::fs::write(place.path("missing.img"), vec![0; 1 << 20]).unwrap();
    let started = run(&["start", "db", "broken"]);
    assert_eq!(started.status.code(), Some(0), "{}", text(&started.stderr));
    assert_eq!(text(&started.stdout).trim_end(), place.socket("db-broken.sock").to_str().unwrap());
    assert_eq!(daemon.port("db", "broken")["health"], "ok");
    let twice = run(&["start", "db", "broken"]);
    assert_eq!(text(&twice.stderr), "millrace: db/broken runs already\n");

    // Detached, then as the file says now.
    assert_eq!(run(&["detach", "web", "null"]).status.code(), Some(0));
    let config = std::fs::read_to_string(place.path("m.toml")).unwrap();
    std::fs::write(place.path("m.toml"), config.replace("1GiB", "2GiB")).unwrap();
    assert_eq!(run(&["start", "web", "null"]).status.code(), Some(0));
    assert_eq!(daemon.port("web", "null")["disk"]["len_bytes"], json!(2u64 << 30));
    let unknown = run(&["start", "web", "nothing"]);
    assert_eq!(text(&unknown.stderr), "millrace: there is no port web/nothing\n");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
}

#[test]
fn abuse_S5_what_is_logged_changes_while_the_daemon_runs() {
    let place = Place::new("log='error'\n");
    let daemon = place.start();
    let socket = place.socket("control.sock");
    let run = |args: &[&str]| millrace().args(args).arg("--socket").arg(&socket).output().unwrap();
    let level = |args: &[&str]| text(&run(&[&["log-level"], args].concat()).stdout);
    let attach = |name: &str| {
        let body = json!({"disk": {"name": name, "format": "null", "size": 512}});
        assert_eq!(daemon.ask("POST", "/v1/vms/v/ports", Some(body)).status, 201);
    };
    assert_eq!(level(&[]), "error\n");
    attach("quiet");
    assert_eq!(level(&["warn,millrace=info"]), "warn,millrace=info (daemon.log: error)\n");
    attach("told");
    let shown: Value = serde_json::from_str(&level(&["--json"])).unwrap();
    assert_eq!(shown, json!({"filter": "warn,millrace=info", "configured": "error"}));
    assert_eq!(level(&["error"]), "error\n");
    attach("quiet-again");
    let bad = run(&["log-level", "loud"]);
    assert_eq!(bad.status.code(), Some(4));
    let wanted = "millrace: filter: \"loud\" is unknown; write off, error, warn";
    assert!(text(&bad.stderr).starts_with(wanted), "{}", text(&bad.stderr));
    let log = place.log();
    assert!(log.contains("v/told") && !log.contains("v/quiet"), "{log}");
}

#[test]
fn abuse_S4_a_group_reads_metrics_on_a_socket_of_its_own() {
    let group = rustix::process::getgid().as_raw();
    let place = Place::new(&format!("read_socket='@/run/read.sock'\nread_group='{group}'\n{ALL}"));
    let daemon = place.start();
    let socket = place.socket("read.sock");
    let run = |args: &[&str]| millrace().args(args).arg("--socket").arg(&socket).output().unwrap();
    assert!(text(&run(&["metrics"]).stdout).contains("# TYPE millrace_build_info gauge"));
    assert!(text(&run(&["status"]).stdout).contains("switch lan"));
    let refused = run(&["detach", "web", "root"]);
    assert_eq!(refused.status.code(), Some(4));
    assert!(text(&refused.stderr).contains("is not for this socket"), "{}", text(&refused.stderr));
    assert_eq!(run(&["stop"]).status.code(), Some(4));
    assert_eq!(daemon.port("web", "root")["health"], "ok");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    assert!(!socket.exists());
}

/// Front ends such as libvirt and QEMU would wait for a socket that is not there without a word.
#[test]
fn abuse_O3_front_ends_of_a_port_that_was_not_started_are_turned_away_with_the_reason() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("db-broken.sock"));
    assert!(front.try_reply().is_none(), "its VMM sees the end");
    let log = place.log();
    let line = log.lines().find(|line| line.contains("turned away")).unwrap();
    assert!(line.contains("ERROR") && line.contains("missing.img"), "{line}");
    assert!(line.contains("port=db/broken"), "{line}");
    std::fs::write(place.path("missing.img"), vec![0; 1 << 20]).unwrap();
    assert_eq!(daemon.ask("POST", "/v1/vms/db/ports/broken/start", None).status, 200);
    FrontEnd::dial(&place.socket("db-broken.sock")).start(BASIC, &driver(Layout::Split));
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    let left: Vec<_> = std::fs::read_dir(place.path("run")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// QEMU asks for a queue per CPU of its VM, unless it is told `num-queues`, and ends where there
/// are less.
#[test]
fn abuse_B1_a_disk_with_defaults_has_32_queues() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("web-root.sock"));
    let mut ring = driver(Layout::Split);
    front.hello(BASIC);
    assert_eq!(front.get_u64(Request::GetQueueNum), 32);
    // The last one is served as the first.
    front.set_memory(&ring);
    front.start_ring(31, &ring, 0);
    sector(&mut ring, OUT, 3, 0x31);
    assert_eq!(sector(&mut ring, IN, 3, 0), 0x31);
    assert_eq!(daemon.port("web", "root")["health"], "ok");
}

const LIMITED: &str = "
[[vm]]
name='small'
memory_limit='6MiB'
[[vm.disk]]
name='d'
format='memory'
size='1MiB'
[[vm.disk]]
name='e'
format='memory'
size='1MiB'
[[vm]]
name='other'
[[vm.disk]]
name='d'
format='memory'
size='1MiB'
";

/// The memory limit holds for all front ends of a VM together: it is what the daemon can be made to
/// pay for.
#[test]
fn abuse_V11_a_vm_beyond_its_memory_limit_is_refused_and_others_are_served() {
    let place = Place::new(LIMITED);
    let daemon = place.start();
    let mapped = |vm: &str, what: &str, bytes: u64| {
        let metrics = daemon.ask("GET", "/v1/metrics", None).body;
        let series = format!("millrace_vm_mapped_{what}{{vm=\"{vm}\"}} {bytes}\n");
        assert!(metrics.contains(&series), "{series} is not in\n{metrics}");
    };
    let serves = |name: &str| {
        let (front, mut ring) = (FrontEnd::dial(&place.socket(name)), driver(Layout::Split));
        front.start(BASIC, &ring);
        sector(&mut ring, OUT, 1, 7);
        (front, ring)
    };
    let (_first, mut first) = serves("small-d.sock");
    let front = FrontEnd::dial(&place.socket("small-e.sock"));
    front.hello(BASIC);
    let (more, region) = (testing::memfd(9 << 20), Region { len_bytes: 9 << 20, ..testing::LOW });
    let answer = front.ack(Request::SetMemTable, &testing::table(&[region]), &[more.as_fd()]);
    assert_eq!(answer, Some(1));
    assert!(front.try_reply().is_none(), "its VMM sees the end");
    // It may map twice what it may have: VMMs cut the same files anew.
    let wanted = "SET_MEM_TABLE: memory region 0x0+0x900000 cannot be mapped: 0x900000 bytes more \
                  than the 0x400000 that are mapped now; the limit of one VM is 0xc00000";
    assert_eq!(daemon.port("small", "e")["last_error"], wanted);
    let log = place.log();
    let line = log.lines().find(|line| line.contains(wanted)).unwrap();
    assert!(line.contains("WARN") && line.contains("port=small/e"), "{line}");
    mapped("small", "limit_bytes", 12 << 20);
    mapped("small", "bytes", 4 << 20);

    // Its other port and other VMs do not notice; a file that both ports map counts once.
    let _other = serves("other-d.sock");
    let front = FrontEnd::dial(&place.socket("small-e.sock"));
    front.hello(BASIC);
    front.set_memory(&first);
    assert_eq!(sector(&mut first, IN, 1, 0), 7);
    mapped("small", "bytes", 4 << 20);
    mapped("other", "bytes", 4 << 20);
}

/// The receiver's VMM cut off the memory that its receive buffers are in. Queue 1 is the one that
/// meets it.
#[test]
fn abuse_V13_a_receiver_whose_memory_was_truncated_stops_with_the_right_name() {
    let place = Place::new(TWO_VMS);
    let daemon = place.start();
    let buffers = testing::memfd(1 << 20);
    let high = Region { guest_addr: 1 << 40, user_addr: 1 << 40, ..testing::LOW };
    let (mut a, mut b) = (NetGuest::start(&place, "a", 0xa), NetGuest::start(&place, "b", 0xb));
    b.front.ok(Request::AddMemReg, &testing::single(high), &[buffers.as_fd()]);
    rustix::fs::ftruncate(&buffers, 0).unwrap();
    b.rx.offer(&[], &[(high.guest_addr, 2048)]);
    b.rx.kick();
    a.send(1);
    daemon.wait_port("b", "n", &[("health", json!("broken"))]);
    let reason = "guest memory: memory region 0x10000000000+0x100000 was truncated by its owner";
    assert_eq!(daemon.port("b", "n")["reason"], reason);
    assert!(place.log().contains(&format!("port stopped: {reason} port=b/n")), "{}", place.log());
    assert_eq!(daemon.port("a", "n")["health"], "ok");
}

#[test]
fn a_cable_is_pulled_and_a_second_daemon_is_refused() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let link = "/v1/vms/web/nets/net0/link";
    assert_eq!(daemon.ask("PUT", link, Some(json!({"up": false}))).status, 200);
    assert_eq!(daemon.port("web", "net0")["net"]["link"], json!(false));
    assert_eq!(
        daemon.ask("PUT", "/v1/vms/web/nets/root/link", Some(json!({"up": true}))).status,
        404
    );
    assert_eq!(daemon.ask("POST", "/v1/vms/db/disks/broken/resize", None).status, 409);

    let second = millrace().args(["serve", "-c"]).arg(place.path("m.toml")).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another daemon answers on"), "{}", text(&second.stderr));
    assert_eq!(daemon.get("/v1/version")["api"], "v1");
}

#[test]
fn the_command_line_drives_the_daemon() {
    let place = Place::new(ALL);
    let daemon = place.start();
    let socket = place.socket("control.sock");
    let run = |args: &[&str]| millrace().args(args).arg("--socket").arg(&socket).output().unwrap();
    assert!(text(&run(&["status"]).stdout).contains("switch lan 02:00:00:00:00:01"));
    let ports: Value = serde_json::from_slice(&run(&["ports", "--json"]).stdout).unwrap();
    assert_eq!(ports.as_array().unwrap().len(), 5);
    let body = r#"{"disk": {"name": "x", "format": "null", "size": "1MiB"}}"#;
    let attached = run(&["attach", "db", body]);
    assert_eq!(text(&attached.stdout).trim_end(), place.socket("db-x.sock").to_str().unwrap());
    assert_eq!(text(&run(&["resize", "db", "x", "2MiB"]).stdout), "2097152 bytes\n");
    assert_eq!(run(&["link", "web", "net0", "down"]).status.code(), Some(0));
    assert_eq!(run(&["detach", "db", "x"]).status.code(), Some(0));
    let again = run(&["detach", "db", "x"]);
    assert_eq!(again.status.code(), Some(4));
    assert_eq!(text(&again.stderr), "millrace: there is no port db/x\n");
    assert!(text(&run(&["metrics"]).stdout).contains("# TYPE millrace_build_info gauge"));
    assert_eq!(run(&["stop"]).status.code(), Some(0));
    assert_eq!(daemon.ended().code(), Some(0));
}

#[test]
fn abuse_V18_the_first_bad_frames_of_a_kind_are_logged_with_their_reason() {
    let place = Place::new(
        "[[switch]]\nname='lan'\n[[vm]]\nname='a'\n[[vm.net]]\nname='n'\nswitch='lan'\n",
    );
    let daemon = place.start();
    let mut guest = NetGuest::start(&place, "a", 1);
    guest.send(0);
    wait_used(&mut guest.tx);
    for _ in 0..50 {
        // A super-packet that nobody negotiated, a PPPoE frame, another's ARP, three bytes.
        guest.send_with(&[1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], 0x0800, 0);
        guest.send_with(&[0; 12], 0x8864, 0);
        guest.send_with(&[0; 12], 0x8035, 1);
        guest.send_bytes(&[0; 15]);
        for _ in 0..4 {
            wait_used(&mut guest.tx);
        }
    }
    daemon.wait_port("a", "n", &[("health", json!("ok"))]);
    let log = place.log();
    for (reason, what) in [
        ("malformed", "EtherType 0x0800"),
        ("not_allowed", "EtherType 0x8864"),
        ("spoofed", "EtherType 0x8035"),
    ] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(reason)).collect();
        assert_eq!(lines.len(), 1, "{reason}: {log}");
        assert!(lines[0].contains(what) && lines[0].contains("a/n"), "{}", lines[0]);
    }
}
