//! Larger tools for guests, on all kernels: the packet filter, and QUIC by Python.

use std::time::Duration;

use lab::{Guest, Image, KernelChoice, Lab, Net};

const BOOT: Duration = Duration::from_secs(180);
const LONG: Duration = Duration::from_secs(180);

const RULES: &str = "
table inet filter {
  chain in {
    type filter hook input priority 0
    ct state established counter accept
    udp dport 7443 ct state new counter accept
    udp dport 7444 reject
    limit rate 1000/second counter
  }
}
table ip nat {
  chain before { type nat hook prerouting priority -100; udp dport 7445 redirect to :7443; }
  chain after { type nat hook postrouting priority 100; oifname none masquerade; }
}
";

#[test]
#[ignore = "a minute; channels are tested with both tools on both kernels: make soak"]
fn quic_passes_the_packet_filter() {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    let guests = KernelChoice::CURRENT.into_iter().enumerate().map(|(number, kernel)| {
        let tap = format!("tap{number}");
        lab.net().tap(&tap, Some("br0")).unwrap();
        Guest::builder(format!("g{number}"))
            .kernel(kernel)
            .image(Image::builder().python_quic().packet_filter())
            .net(Net::tap(tap))
            .address(format!("10.0.0.{number}/24"))
            .address(format!("fd00::{number}/64"))
    });
    let guests = lab::boot_all(&lab, guests.collect(), BOOT).unwrap();
    for guest in &guests {
        guest.put_bytes("/tmp/rules", 0o644, RULES.as_bytes()).unwrap();
        guest.sh("nft -f /tmp/rules").unwrap();
    }
    for (here, there) in [(0, 1), (1, 0)] {
        let mut server = guests[there].spawn("python3 /lab/quic.py server :: 7443").unwrap();
        server.wait_line("listening", LONG).unwrap();
        // By the redirection and without it.
        for to in [format!("10.0.0.{there} 7445"), format!("fd00::{there} 7443")] {
            let client = format!("python3 /lab/quic.py client {to} 300000");
            let told = guests[here].run_for(&client, LONG).unwrap().json().unwrap();
            assert_eq!(told, serde_json::json!({"bytes": 300_000, "same": true}));
        }
        server.kill().unwrap();
        let rules = guests[there].sh("nft list ruleset").unwrap();
        assert!(rules.contains("ct state new counter packets 2 "), "{rules}");
    }
}
