//! Reports of the daemon on qcow2 images: those that were not closed, and those that are damaged.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use common::{BASIC, IN, OUT, Place, driver, sector};
use queue::Layout;
use serde_json::json;
use vhost_user::testing::FrontEnd;

const ONE: &str = "
[[vm]]
name='a'
[[vm.disk]]
name='d'
format='qcow2'
path='@/d.qcow2'
";

/// A place with an image whose first two L2 tables are there.
fn place() -> Place {
    let place = Place::new(ONE);
    let image = place.path("d.qcow2");
    run(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1G"));
    let commands = ["-c", "write -P 9 0 64k", "-c", "write -P 9 512M 64k"];
    run(Command::new("qemu-io").args(["-f", "qcow2"]).args(commands).arg(&image));
    place
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", common::text(&output.stderr));
}

#[test]
fn an_image_that_a_killed_daemon_left_is_mended_and_it_is_told() {
    let place = place();
    let daemon = place.start();
    let image = &daemon.port("a", "d")["disk"]["image"];
    assert_eq!(image["was_checked"], false, "{image}");
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    // Into a new cluster: the rest of its reserve is lost with the daemon.
    sector(&mut ring, OUT, 4096, 0x5a);
    daemon.kill();

    let daemon = place.start();
    let port = daemon.port("a", "d");
    assert_eq!(
        (&port["health"], &port["disk"]["image"]["was_checked"]),
        (&json!("ok"), &json!(true))
    );
    let freed = port["disk"]["image"]["freed_leaks"].as_u64().unwrap();
    assert!(freed > 0, "{port}");
    let metrics = daemon.ask("GET", "/v1/metrics", None).body;
    for series in [
        "millrace_disk_image_checked{vm=\"a\",port=\"d\"} 1".to_owned(),
        format!("millrace_disk_image_freed_leaks{{vm=\"a\",port=\"d\"}} {freed}"),
        "millrace_disk_image_damaged{vm=\"a\",port=\"d\"} 0".to_owned(),
    ] {
        assert!(metrics.contains(&series), "{series} is not in\n{metrics}");
    }
    let front = FrontEnd::dial(&place.socket("a-d.sock"));
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    assert_eq!(sector(&mut ring, IN, 4096, 0), 0x5a);
    drop(front);
    assert_eq!(daemon.terminate().code(), Some(0), "{}", place.log());
    run(Command::new("qemu-img").args(["check", "-q"]).arg(place.path("d.qcow2")));

    let daemon = place.start();
    assert_eq!(daemon.port("a", "d")["disk"]["image"]["was_checked"], false, "it was closed");
}

/// Has both halves of the disk share a table.
fn damage(image: &Path) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let mut word = [0; 8];
    file.read_exact_at(&mut word, 40).unwrap();
    let l1 = u64::from_be_bytes(word);
    file.read_exact_at(&mut word, l1).unwrap();
    file.write_all_at(&word, l1 + 8).unwrap();
}

#[test]
fn a_damaged_image_breaks_its_port_and_says_why() {
    let place = place();
    damage(&place.path("d.qcow2"));
    let daemon = place.start();
    let port = daemon.port("a", "d");
    let reason = port["reason"].as_str().unwrap();
    assert_eq!(port["health"], "broken");
    assert!(
        reason.contains("contradict each other") && reason.contains("qemu-img check"),
        "{port}"
    );
    assert_eq!(port["disk"]["image"]["is_damaged"], true);
    let metrics = daemon.ask("GET", "/v1/metrics", None).body;
    let series = "millrace_disk_image_damaged{vm=\"a\",port=\"d\"} 1";
    assert!(metrics.contains(series), "{metrics}");
    let series = "millrace_port_healthy{vm=\"a\",port=\"d\",kind=\"disk\"} 0";
    assert!(metrics.contains(series), "{metrics}");
}
