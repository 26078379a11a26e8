//! `[vm.channel]` at a daemon without QEMU: what it shows, what it refuses, and that no port minds.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use common::{BASIC, Daemon, FrontEnd, IN, OUT, Place, driver, run, sector, text};
use queue::Layout;
use serde_json::{Value, json};

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);

const VMS: &str = "
[[vm]]
name='web'
trust_domain='shop'
[vm.channel]
qmp='@/web.qmp'
addresses=['192.0.2.1']
[[vm.disk]]
name='d'
format='memory'
size='1MiB'
[[vm]]
name='db'
trust_domain='shop'
[vm.channel]
qmp='@/db.qmp'
auto=false
[[vm]]
name='other'
";

fn of<'a>(list: &'a Value, vm: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|channel| channel["vm"] == vm).unwrap()
}

/// Asks until there is an answer: a VM's thread looks when it is told to, and then again and again.
fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = ask() {
            return found;
        }
        assert!(begin.elapsed() < LIMIT, "it does not come");
        std::thread::yield_now();
    }
}

/// Waits until the VM is out for a reason with these words, and returns it.
fn wait_reason(daemon: &Daemon, vm: &str, words: &str) -> String {
    until(|| {
        let list = daemon.get("/v1/channels");
        let shown = of(&list, vm);
        let reason = shown["reason"].as_str().filter(|_| shown["state"] == "out")?;
        reason.contains(words).then(|| reason.to_owned())
    })
}

/// The command's exit code, and what it printed.
fn channel(place: &Place, args: &[&str]) -> (Option<i32>, String) {
    let socket = place.socket("control.sock");
    let all = [&["channel"][..], args, &["--socket", socket.to_str().unwrap()]].concat();
    let output = run(&all);
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn a_monitor_that_is_not_there_is_told_and_harms_no_port() {
    let place = Place::new(VMS);
    let daemon = place.start();
    wait_reason(&daemon, "web", "no front end is connected");
    let front = FrontEnd::dial(&place.socket("web-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    wait_reason(&daemon, "web", "web.qmp");
    sector(&mut ring, OUT, 7, 0x5a);
    assert_eq!(sector(&mut ring, IN, 7, 0), 0x5a);

    let reason = wait_reason(&daemon, "web", "web.qmp");
    assert!(reason.contains("VM web: monitor ") && reason.contains("No such file"), "{reason}");
    let list = until(|| {
        let (code, shown) = channel(&place, &["ls", "--json"]);
        assert_eq!(code, Some(0), "{shown}");
        let list: Value = serde_json::from_str(&shown).unwrap();
        (of(&list, "web")["reason"] == json!(reason)).then_some(list)
    });
    assert_eq!(list.as_array().unwrap().len(), 2);
    assert_eq!((&list[0]["auto"], &list[1]["auto"]), (&json!(true), &json!(false)));
    until(|| channel(&place, &["ls"]).1.contains(&reason).then_some(()));
    let members = "millrace_channel_members{domain=\"shop\",state=\"out\"} 2";
    until(|| daemon.ask("GET", "/v1/metrics", None).body.contains(members).then_some(()));

    drop(front);
    wait_reason(&daemon, "web", "no front end is connected");
    assert_eq!(daemon.port("web", "d")["health"], "ok");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
}

#[test]
fn commands_say_what_is_in_the_way() {
    let place = Place::new(VMS);
    let daemon = place.start();
    for (args, words) in [
        (["join", "db"], "VM db: no front end is connected"),
        (["join", "other"], "VM other has no [vm.channel]: add one to the config"),
        (["leave", "other"], "VM other has no [vm.channel]"),
        (["join", "nobody"], "there is no VM nobody"),
        (["leave", "nobody"], "there is no VM nobody"),
    ] {
        let (code, shown) = channel(&place, &args);
        assert!(code == Some(4) && shown.contains(words), "{args:?}: {code:?} {shown}");
    }
    let front = FrontEnd::dial(&place.socket("web-d.sock"));
    let ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    wait_reason(&daemon, "web", "web.qmp");
    let (code, shown) = channel(&place, &["join", "web"]);
    assert!(code == Some(4) && shown.contains("web.qmp"), "{shown}");
    // Who is no member has left; and it is left alone then.
    assert_eq!(channel(&place, &["leave", "web"]), (Some(0), String::new()));
    wait_reason(&daemon, "web", "told to leave");
    let (code, shown) = channel(&place, &["join", "web"]);
    assert!(code == Some(4) && shown.contains("web.qmp"), "{shown}");
    wait_reason(&daemon, "web", "web.qmp");
}

/// A monitor that takes the connection and says nothing costs its VM's channel, and no time of the
/// daemon's: neither an answer nor its end waits for it longer than a member may take to leave.
#[test]
fn a_monitor_that_says_nothing_holds_up_nobody() {
    let place = Place::new(&format!("[channel]\ndrain_timeout_ms=200\n{VMS}"));
    let monitor = UnixListener::bind(place.path("web.qmp")).unwrap();
    let daemon = place.start();
    let front = FrontEnd::dial(&place.socket("web-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    let (_connection, _) = monitor.accept().unwrap();
    sector(&mut ring, OUT, 7, 0x5a);
    let list = daemon.get("/v1/channels");
    assert_eq!(of(&list, "web")["state"], "joining", "{list}");
    assert_eq!(of(&list, "web")["addresses"], json!(["192.0.2.1"]), "{list}");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
}

#[test]
fn a_file_of_memberships_that_is_not_ours_costs_channels_only() {
    let place = Place::new(VMS);
    std::fs::create_dir_all(place.path("run")).unwrap();
    std::fs::write(place.socket("channels.json"), "{").unwrap();
    let daemon = place.start();
    wait_reason(&daemon, "web", "channels.json");
    let (code, shown) = channel(&place, &["join", "web"]);
    assert!(code == Some(4) && shown.contains("the daemon has no channels"), "{shown}");
    assert_eq!(daemon.port("web", "d")["health"], "ok");
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
}
