//! Real guests: boot, commands, files, network, crash.

use std::time::Duration;

use lab::{Guest, Lab, Net};

const BOOT: Duration = Duration::from_secs(60);

#[test]
fn a_guest_boots_and_takes_commands_and_files() {
    let lab = Lab::new().unwrap();
    let guest = Guest::builder("a").start(&lab).unwrap();
    guest.wait_ready(BOOT).unwrap();
    assert!(guest.release().contains("cloud-amd64"), "{}", guest.release());
    assert_eq!(guest.sh("hostname; uname -r").unwrap(), format!("a\n{}", guest.release()));
}

#[test]
fn two_guests() {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    lab.net().tap("tap0", Some("br0")).unwrap();
    lab.net().tap("tap1", Some("br0")).unwrap();
    let t = std::time::Instant::now();
    let a = Guest::builder("a").net(Net::tap("tap0")).address("10.0.0.1/24").start(&lab).unwrap();
    let b = Guest::builder("b").net(Net::tap("tap1")).address("10.0.0.2/24").start(&lab).unwrap();
    a.wait_ready(BOOT).unwrap();
    b.wait_ready(BOOT).unwrap();
    eprintln!("boot {:?}", t.elapsed());
    eprintln!("{}", a.sh("dmesg | tail -30; ip a; ping -c 1 10.0.0.2").unwrap());
}
