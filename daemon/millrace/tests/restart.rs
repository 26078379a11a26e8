//! Daemons that are killed and started again, with and without a holder.
#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use common::net_guest::NetGuest;
use common::strace::Strace;
use common::{BASIC, Daemon, EndHolder, IN, OUT, Place, driver, offer_sector, sector, wait_used};
use queue::Layout;
use serde_json::json;
use vhost_user::testing::FrontEnd;

const HELD: &str = "
holder=true
[[switch]]
name='lan'
[[vm]]
name='a'
[[vm.disk]]
name='d'
format='raw'
path='@/d.img'
[[vm.net]]
name='n'
switch='lan'
[[vm]]
name='b'
[[vm.net]]
name='n'
switch='lan'
";

/// VIRTIO_F_RING_PACKED.
const PACKED: u64 = 1 << 34;

fn place() -> Place {
    let place = Place::new(HELD);
    std::fs::write(place.path("d.img"), vec![0u8; 1 << 20]).unwrap();
    place
}

fn disk_survives(layout: Layout, features: u64, end: impl Fn(Daemon)) {
    let place = place();
    let _end = EndHolder(&place);
    let mut daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(layout);
    front.start(features, &ring);
    for round in 0..3u8 {
        sector(&mut ring, OUT, u64::from(round), round + 1);
        daemon.wait_port("a", "d", &[("held", json!(true))]);
        end(daemon);
        // The guest goes on while nobody serves it; its kick is lost or not.
        let late = offer_sector(&mut ring, OUT, 100 + u64::from(round), 0x40 + round);
        ring.kick();
        daemon = place.start();
        let port = daemon.port("a", "d");
        assert_eq!(port["health"], "ok", "{port}\n{}", place.log());
        wait_used(&mut ring);
        late.byte(&ring);
        assert_eq!(sector(&mut ring, IN, u64::from(round), 0), round + 1);
        assert_eq!(sector(&mut ring, IN, 100 + u64::from(round), 0), 0x40 + round);
        assert!(ring.used().is_none(), "nothing is done twice");
        daemon.wait_port("a", "d", &[("connected", json!(true)), ("resumed", json!(1))]);
    }
}

#[test]
fn abuse_X_a_split_disk_survives_kills() {
    disk_survives(Layout::Split, BASIC, Daemon::kill);
}

#[test]
fn abuse_X_a_packed_disk_survives_kills() {
    disk_survives(Layout::Packed, BASIC | PACKED, Daemon::kill);
}

#[test]
fn a_disk_survives_a_clean_restart() {
    disk_survives(Layout::Packed, BASIC | PACKED, |daemon| {
        assert_eq!(daemon.terminate().code(), Some(0));
    });
}

#[test]
fn abuse_X_a_network_survives_kills() {
    let place = place();
    let _end = EndHolder(&place);
    let mut daemon = place.start();
    let mut a = NetGuest::start(&place, "a", 1);
    let mut b = NetGuest::start(&place, "b", 2);
    for round in 0..3u8 {
        let buffer = b.post();
        a.send(round);
        assert_eq!(b.receive(buffer), round);
        wait_used(&mut a.tx);
        let posted = b.post();
        daemon.kill();
        daemon = place.start();
        // Sessions are taken over one by one, and a frame for a port that is not there yet is
        // dropped, as on any network.
        for vm in ["a", "b"] {
            daemon.wait_port(vm, "n", &[("queues_running", json!(2)), ("resumed", json!(1))]);
        }
        a.send(0x80 + round);
        assert_eq!(b.receive(posted), 0x80 + round);
        wait_used(&mut a.tx);
        assert!(b.rx.used().is_none(), "nothing arrives twice");
    }
}

#[test]
fn without_a_holder_the_vmm_sees_a_disconnect_and_comes_back() {
    let place = Place::new("[[vm]]\nname='a'\n[[vm.disk]]\nname='d'\nformat='null'\nsize='1MiB'\n");
    for _ in 0..2 {
        let daemon = place.start();
        let front = FrontEnd::dial(&place.socket("a-d.sock"));
        front.start(BASIC, &driver(Layout::Split));
        daemon.kill();
        assert!(front.try_reply().is_none());
    }
}

#[test]
fn a_port_attached_at_run_time_survives_a_kill_and_a_detached_one_does_not() {
    let place = Place::new("");
    let daemon = place.start();
    for name in ["keep", "drop"] {
        let body = json!({"disk": {"name": name, "format": "null", "size": "1MiB"},
                          "trust_domain": "t", "weight": 5});
        assert_eq!(daemon.ask("POST", "/v1/vms/v/ports", Some(body)).status, 201);
    }
    assert_eq!(daemon.ask("DELETE", "/v1/vms/v/ports/drop", None).status, 204);
    daemon.kill();
    let daemon = place.start();
    let vm = &daemon.get("/v1/status")["vms"][0];
    assert_eq!((&vm["weight"], &vm["trust_domain"]), (&json!(5), &json!("t")));
    assert_eq!(daemon.get("/v1/ports").as_array().unwrap().len(), 1);
    daemon.kill();
    // Nonsense in the list does not keep the daemon from its other ports.
    std::fs::write(place.socket("attached.json"), "{").unwrap();
    let daemon = place.start();
    assert_eq!(daemon.get("/v1/ports"), json!([]));
    assert!(place.socket("attached.json.bad").exists());
}

const MEMORY: &str = "
[[vm]]
name='a'
[[vm.disk]]
name='d'
format='memory'
size='1MiB'
";

#[test]
fn a_memory_disk_lives_with_the_holder() {
    let place = Place::new(&format!("holder=true\n{MEMORY}"));
    let _end = EndHolder(&place);
    let mut daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    for round in 1..4u8 {
        sector(&mut ring, OUT, u64::from(round), round);
        daemon.wait_port("a", "d", &[("held", json!(true))]);
        daemon.kill();
        daemon = place.start();
        assert_eq!(daemon.port("a", "d")["health"], "ok", "{}", place.log());
        assert_eq!(sector(&mut ring, IN, u64::from(round), 0), round);
    }
    // It does not need a session, and goes with its port.
    drop(front);
    daemon.wait_port("a", "d", &[("connected", json!(false))]);
    daemon.kill();
    let daemon = place.start();
    let mut ring = driver(Layout::Packed);
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    front.start(BASIC | PACKED, &ring);
    assert_eq!(sector(&mut ring, IN, 2, 0), 2);
    assert_eq!(daemon.ask("DELETE", "/v1/vms/a/ports/d", None).status, 204);
    let body = json!({"disk": {"name": "d", "format": "memory", "size": "1MiB"}});
    assert_eq!(daemon.ask("POST", "/v1/vms/a/ports", Some(body)).status, 201);
    let mut ring = driver(Layout::Packed);
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    front.start(BASIC | PACKED, &ring);
    assert_eq!(sector(&mut ring, IN, 2, 0), 0);
}

#[test]
fn a_driver_whose_memory_disk_is_lost_is_told_and_not_served() {
    let place = Place::new(MEMORY);
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    sector(&mut ring, OUT, 1, 7);
    daemon.kill();
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    // It goes on where it was, as QEMU does at a reconnect.
    front.hello(BASIC);
    front.set_memory(&ring);
    front.start_ring(0, &ring, 1);
    daemon.wait_port("a", "d", &[("connected", json!(true)), ("health", json!("broken"))]);
    let port = daemon.port("a", "d");
    assert!(port.to_string().contains("in the memory of an earlier daemon and are lost"), "{port}");
    // A VM that begins anew is served.
    drop(front);
    daemon.wait_port("a", "d", &[("connected", json!(false))]);
    let mut ring = driver(Layout::Split);
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    front.start(BASIC, &ring);
    assert_eq!(sector(&mut ring, IN, 1, 0), 0);
    assert_eq!(daemon.port("a", "d")["health"], "ok");
    drop(front);
}

/// The lines of a trace with these words, in this order, each behind the one before.
fn in_order(trace: &str, wanted: &[&str]) -> bool {
    let mut lines = trace.lines();
    wanted.iter().all(|words| lines.any(|line| words.split(' ').all(|word| line.contains(word))))
}

#[test]
fn abuse_D5_what_was_changed_at_run_time_is_durable_before_the_answer() {
    let place = Place::new("[[vm]]\nname='a'\n");
    let daemon = place.start();
    let disk = json!({"disk": {"name": "d", "format": "null", "size": "1MiB"}});
    for (method, path, body, status, file) in [
        ("POST", "/v1/vms/v/ports", Some(disk), 201, "attached.json"),
        ("PATCH", "/v1/vms/v", Some(json!({"weight": 300})), 200, "granted.json"),
        ("DELETE", "/v1/vms/v/ports/d", None, 204, "attached.json"),
    ] {
        let (pid, log) = (daemon.pid().to_string(), place.path("strace.txt"));
        let calls = "trace=fsync,rename,renameat,renameat2,write,writev,sendto,sendmsg";
        let strace = Strace::log(&["-f", "-y", "-e", calls, "-p", &pid], &log);
        assert_eq!(daemon.ask(method, path, body).status, status);
        let (_, trace) = strace.finish();
        let run_dir = place.socket("");
        let run_dir = run_dir.to_str().unwrap().trim_end_matches('/');
        let wanted = [
            format!("write( {file}.new"),
            format!("fsync( {file}.new"),
            format!("rename {file}.new {file}\""),
            format!("fsync( {run_dir}>"),
            format!("HTTP/1.1 {status}"),
        ];
        let wanted: Vec<_> = wanted.iter().map(String::as_str).collect();
        assert!(in_order(&trace, &wanted), "{method} {path}: {wanted:?}\n{trace}");
    }
}

#[test]
fn what_a_vm_was_granted_survives_a_kill_until_the_config_says_something_new() {
    let config =
        "[[vm]]\nname='a'\nweight=100\n[[vm.disk]]\nname='d'\nformat='null'\nsize='1MiB'\n";
    let place = Place::new(config);
    let daemon = place.start();
    let grant = json!({"weight": 300, "ceiling_bytes_per_s": "100MiB"});
    assert_eq!(daemon.ask("PATCH", "/v1/vms/a", Some(grant)).status, 200);
    let of_a = |daemon: &Daemon| {
        let vm = daemon.get("/v1/status")["vms"][0].clone();
        (vm["weight"].clone(), vm["ceiling_bytes_per_s"].clone())
    };
    daemon.kill();
    let daemon = place.start();
    assert_eq!(of_a(&daemon), (json!(300), json!(100 << 20)));
    daemon.kill();
    let text = std::fs::read_to_string(place.path("m.toml")).unwrap();
    std::fs::write(place.path("m.toml"), text.replace("weight=100", "weight=50")).unwrap();
    let daemon = place.start();
    assert_eq!(of_a(&daemon), (json!(50), json!(0)));
    daemon.kill();
    // What was granted before is forgotten, whatever the config says later.
    std::fs::write(place.path("m.toml"), text).unwrap();
    assert_eq!(of_a(&place.start()), (json!(100), json!(0)));
}

#[test]
fn a_vm_of_the_config_keeps_its_settings_without_ports() {
    let place = Place::new(
        "[[vm]]\nname='a'\nweight=7\nceiling_ops_per_s=1000\n\
         [[vm.disk]]\nname='d'\nformat='null'\nsize='1MiB'\n",
    );
    let daemon = place.start();
    let port = json!({"disk": {"name": "d", "format": "null", "size": "1MiB"}});
    assert_eq!(daemon.ask("DELETE", "/v1/vms/a/ports/d", None).status, 204);
    assert_eq!(daemon.ask("POST", "/v1/vms/a/ports", Some(port)).status, 201);
    let vm = &daemon.get("/v1/status")["vms"][0];
    assert_eq!((&vm["weight"], &vm["ceiling_ops_per_s"]), (&json!(7), &json!(1000)));
    daemon.kill();
    // The config has the port again, which is no reason to complain.
    let daemon = place.start();
    assert_eq!(daemon.get("/v1/ports").as_array().unwrap().len(), 1);
}

#[test]
fn ports_and_grants_of_a_vm_made_at_run_time_come_back_together() {
    let place = Place::new("");
    let daemon = place.start();
    let port = |name: &str| json!({"disk": {"name": name, "format": "null", "size": "1MiB"}});
    assert_eq!(daemon.ask("POST", "/v1/vms/v/ports", Some(port("a"))).status, 201);
    let grant = json!({"weight": 300, "ceiling_ops_per_s": 9});
    assert_eq!(daemon.ask("PATCH", "/v1/vms/v", Some(grant)).status, 200);
    assert_eq!(daemon.ask("POST", "/v1/vms/v/ports", Some(port("b"))).status, 201);
    // What made the VM is gone; what it was granted since is not.
    assert_eq!(daemon.ask("DELETE", "/v1/vms/v/ports/a", None).status, 204);
    daemon.kill();
    let daemon = place.start();
    let vm = &daemon.get("/v1/status")["vms"][0];
    assert_eq!((&vm["weight"], &vm["ceiling_ops_per_s"]), (&json!(300), &json!(9)));
    assert_eq!(daemon.ask("DELETE", "/v1/vms/v/ports/b", None).status, 204);
    assert_eq!(daemon.get("/v1/status")["vms"], json!([]));
    // A new one of that name has nothing of it.
    assert_eq!(daemon.ask("POST", "/v1/vms/v/ports", Some(port("c"))).status, 201);
    assert_eq!(daemon.get("/v1/status")["vms"][0]["weight"], json!(100));
}

#[test]
fn stop_with_forget_ends_sessions_and_the_holder() {
    let place = place();
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    front.start(BASIC, &driver(Layout::Split));
    let answer = daemon.ask("POST", "/v1/shutdown", Some(json!({"forget": true})));
    assert_eq!(answer.status, 202);
    assert_eq!(daemon.ended().code(), Some(0));
    assert!(front.try_reply().is_none());
    assert!(!place.socket("holder.sock").exists(), "{}", place.log());
}

/// The guest goes on until the daemon ends, which is as far as the config lets it.
#[test]
fn abuse_O2_a_holder_that_the_config_no_longer_names_has_its_sessions_taken_up() {
    let place = place();
    let _end = EndHolder(&place);
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    sector(&mut ring, OUT, 7, 0x5a);
    daemon.wait_port("a", "d", &[("held", json!(true))]);
    daemon.kill();
    let config = std::fs::read_to_string(place.path("m.toml")).unwrap();
    std::fs::write(place.path("m.toml"), config.replace("holder=true", "holder=false")).unwrap();
    let daemon = place.start();
    let wanted = [("connected", json!(true)), ("resumed", json!(1)), ("held", json!(false))];
    daemon.wait_port("a", "d", &wanted);
    assert_eq!(sector(&mut ring, IN, 7, 0), 0x5a);
    let log = place.log();
    let told =
        format!("daemon.holder was {} and is not any more", place.socket("holder.sock").display());
    assert!(log.contains(&told) && log.contains("kept by nobody from now on"), "{log}");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    assert!(front.try_reply().is_none(), "its VMM must not wait for ever");
    assert!(!place.socket("holder.sock").exists(), "{}", place.log());
}

/// Daemon and holder are started as by the packaged units, with a config that does not speak of a
/// holder.
#[test]
fn abuse_S2_the_unit_has_a_holder_where_the_config_says_nothing() {
    let place = Place::new(&HELD.replace("holder=true\n", ""));
    std::fs::write(place.path("d.img"), vec![0u8; 1 << 20]).unwrap();
    let socket = place.path("unit-holder.sock");
    let start = || {
        let log = std::fs::File::options().create(true).append(true).open(place.path("log"));
        let args = ["--default-holder".as_ref(), socket.as_os_str()];
        place.start_command(&args, &[], log.unwrap().into())
    };
    // Not there: the daemon says so, and serves.
    let daemon = start();
    assert_eq!(daemon.get("/v1/status")["holder"]["enabled"], json!(false));
    assert!(place.log().contains("no holder answers on"), "{}", place.log());
    assert!(place.log().contains("will disconnect the VMMs"), "{}", place.log());
    daemon.kill();
    let mut holder = common::millrace();
    let mut holder = holder.arg("holder").arg("--socket").arg(&socket).spawn().unwrap();
    let daemon = start();
    assert_eq!(daemon.get("/v1/status")["holder"]["socket"], json!(socket));
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    daemon.wait_port("a", "d", &[("held", json!(true))]);
    daemon.kill();
    let daemon = start();
    daemon.wait_port("a", "d", &[("resumed", json!(1))]);
    sector(&mut ring, OUT, 7, 0x5a);
    holder.kill().unwrap();
    holder.wait().unwrap();
}

#[test]
fn a_session_of_a_port_that_is_gone_is_dropped() {
    let place = place();
    let _end = EndHolder(&place);
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    front.start(BASIC, &driver(Layout::Split));
    daemon.kill();
    let config = std::fs::read_to_string(place.path("m.toml")).unwrap();
    let without = config
        .replace("[[vm.disk]]\nname='d'\nformat='raw'", "[[vm.disk]]\nname='e'\nformat='raw'");
    std::fs::write(place.path("m.toml"), without).unwrap();
    let _daemon = place.start();
    assert!(front.try_reply().is_none(), "its VMM must not wait for ever");
}
