//! Channels in the config: what is refused, with which words and where; defaults.
#![allow(clippy::unwrap_used)]

mod problems;

use std::path::Path;

use config::{ChannelConfig, ChannelsConfig, Config, Problems, parse};
use problems::errors;
use serde_json::json;

fn read(text: &str) -> Result<Config, Problems> {
    parse(Path::new("m.toml"), text)
}

/// A VM of the domain `t`, with more of its channel.
fn member(name: &str, more: &str) -> String {
    format!("[[vm]]\nname='{name}'\ntrust_domain='t'\n[vm.channel]\nqmp='/q/{name}'\n{more}\n")
}

/// Each case: a config, and the problems it has, in order: where, and words of the text.
#[test]
fn bad_channels_are_told_with_place_and_fix() {
    let lan = "[[switch]]\nname='lan'\n";
    let net = "[[vm.net]]\nname='n'\nswitch='lan'\nmac='02:00:00:00:00:01'\naddresses=['10.0.0.1']";
    let many: Vec<String> = (0..17).map(|i| format!("'10.0.1.{i}'")).collect();
    let long = "x".repeat(64);
    let cases: &[(String, &[(&str, &str)])] = &[
        (
            "[channel]\nvectors=1\nheartbeat_ms=9\ndead_after_ms=3600001\n\
             drain_timeout_ms=0"
                .into(),
            &[
                ("m.toml:2:9: channel.vectors:", "is 1; the limit is 2 to 9"),
                ("m.toml:3:14: channel.heartbeat_ms:", "is 9; the limit is 10 to 60000"),
                ("m.toml:4:15: channel.dead_after_ms:", "is 3600001; the limit is 20 to"),
                ("m.toml:5:18: channel.drain_timeout_ms:", "is 0; the limit is 1 to 20000"),
            ],
        ),
        (
            "[channel]\nheartbeat_ms=500\ndead_after_ms=999\nvector=2".into(),
            &[
                ("m.toml:3:15:", "less than two heartbeats of 500 ms; write 1000 or more"),
                ("m.toml:4:1: channel.vector:", "did you mean `vectors`?"),
            ],
        ),
        (
            "[[vm]]\nname='v'\nchannel={}".into(),
            &[
                ("m.toml:3:9: vm[0].channel:", "without trust_domain"),
                ("m.toml:3:9: vm[0].channel.qmp:", "is missing; add the socket of QEMU's"),
            ],
        ),
        (
            "[[vm]]\nname='v'\ntrust_domain='t'\nchannel=true".into(),
            &[
                ("m.toml:4:9: vm[0].channel:", "is a boolean, not a table"),
                ("m.toml:4:9: vm[0].channel.qmp:", "is missing"),
            ],
        ),
        (
            "[[vm]]\nname='v'\ntrust_domain='t'\nchannel={qmp='q',root_ports='a/b',auto=1,macs=['01:00:00:00:00:00','x',3],addresses=['224.0.0.1']}".into(),
            &[
                ("m.toml:4:14: vm[0].channel.qmp:", "absolute path"),
                ("m.toml:4:29: vm[0].channel.root_ports:", "'/'"),
                ("m.toml:4:40: vm[0].channel.auto:", "true or false"),
                ("m.toml:4:47: vm[0].channel.macs:", "group address"),
                ("m.toml:4:47: vm[0].channel.macs:", "no MAC address"),
                ("m.toml:4:47: vm[0].channel.macs:", "has an integer"),
                ("m.toml:4:85: vm[0].channel.addresses:", "belongs to no host"),
            ],
        ),
        // A monitor serves one client at a time, and is none of a guest's ports.
        (
            member("a", "") + &member("b", "").replace("/q/b", "/q/./a"),
            &[("m.toml:11:5: vm[1].channel.qmp:", "/q/./a is taken by vm[0].channel.qmp")],
        ),
        (
            member("a", "").replace("/q/a", "/v_5") + "[vm.vsock]\ncid=3\npath='/v'\n",
            &[("m.toml:5:5: vm[0].channel.qmp:", "what a guest reaches")],
        ),
        (
            format!("{lan}{}{net}\n{}", member("a", ""), member("b", "macs=['02:00:00:00:00:01','02:00:00:00:00:02','02:00:00:00:00:02']\naddresses=['10.0.0.1','10.0.0.2']")),
            &[
                ("m.toml:19:6: vm[1].channel.macs:", "names 02:00:00:00:00:02 twice"),
                ("m.toml:19:6: vm[1].channel.macs:", ":01 is taken by vm[0].net[0].mac"),
                ("m.toml:20:11: vm[1].channel.addresses:", "taken by vm[0].net[0].addresses"),
            ],
        ),
        (
            format!("{lan}{}{net}", member("a", &format!("addresses=[{}]", many[..16].join(",")))),
            &[(
                "m.toml:8:11:",
                "has 17 IP addresses with those of the VM's network ports; the limit is 16",
            )],
        ),
        (
            member(&long, "").replace("/q", ""),
            &[(
                "m.toml:2:6: vm[0].name:",
                "has 64 bytes; the limit of a VM with a [vm.channel] is 63",
            )],
        ),
    ];
    for (text, expected) in cases {
        problems::expect(text, expected);
    }
}

#[test]
fn channels_have_defaults() {
    let config = read(&member("a", "")).unwrap();
    assert_eq!(config.channel, ChannelsConfig::default());
    let wanted = ChannelConfig {
        qmp: "/q/a".into(),
        root_ports: "millrace".into(),
        macs: Vec::new(),
        addresses: Vec::new(),
        auto: true,
        allow_unsealed: false,
    };
    assert_eq!(config.vms[0].channel.as_ref(), Some(&wanted));
    let slow = read("[channel]\nheartbeat_ms=1000\nvectors=9\ndrain_timeout_ms=20000").unwrap();
    assert_eq!((slow.channel.dead_after_ms, slow.channel.vectors), (4000, 9));
    let config = read(&member(
        "a",
        "macs=['02-00-00-00-00-0A']\naddresses=['::1']\nauto=false\nallow_unsealed=true",
    ));
    let shown = serde_json::to_value(config.unwrap()).unwrap();
    let wanted = json!({"qmp": "/q/a", "root_ports": "millrace", "macs": ["02:00:00:00:00:0a"],
                        "addresses": ["::1"], "auto": false, "allow_unsealed": true});
    assert_eq!(shown["vm"][0]["channel"], wanted);
}

#[test]
fn a_domain_has_32_members_and_others_do_not_count() {
    let members = |count| -> String { (0..count).map(|i| member(&format!("m{i}"), "")).collect() };
    let others =
        "[[vm]]\nname='o'\ntrust_domain='t'\n".to_owned() + &member("p", "").replace("'t'", "'u'");
    read(&(members(32) + &others)).unwrap();
    let found = errors(&(members(34) + &others));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("vm[32].channel: trust domain t has more than 32 VMs"), "{found:?}");
}

/// Addresses of an attached port count as if they were in the file.
#[test]
fn a_port_that_is_attached_may_not_bring_too_many_addresses() {
    let text = "[[switch]]\nname='lan'\n".to_owned() + &member("a", "addresses=['10.0.0.1']");
    let mut config = read(&text).unwrap();
    let body = |count: u8| {
        let addresses: Vec<String> = (0..count).map(|i| format!("10.1.0.{i}")).collect();
        json!({"net": {"name": "n", "switch": "lan", "addresses": addresses}})
    };
    let error = config.attach("a", &body(16)).unwrap_err().to_string();
    assert!(error.contains("has 17 IP addresses"), "{error}");
    config.attach("a", &body(15)).unwrap();
    // Channels are the files' matter.
    let body = json!({"disk": {"name": "d", "format": "null", "size": 512}, "channel": {}});
    assert!(config.attach("a", &body).unwrap_err().to_string().contains("channel"));
}
