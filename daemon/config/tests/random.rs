//! Random configs: whatever comes in, an answer comes out; and what was attached can be attached
//! again from its own description.
#![allow(non_snake_case, clippy::unwrap_used)]

use std::path::Path;

use config::{AttachBody, AttachError, Config, parse};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Words that settings are made of, so that random texts reach deep.
const WORDS: &[&str] = &[
    "[daemon]",
    "[sidecore]",
    "[[switch]]",
    "[[vm]]",
    "[[vm.net]]",
    "[[vm.disk]]",
    "[vm.vsock]",
    "[vm.pipes]",
    "[[module]]",
    "[vm.modules]",
    "[channel]",
    "[vm.channel]",
    "[switch.uplink]",
    "name",
    "switch",
    "mac",
    "addresses",
    "format",
    "size",
    "path",
    "cid",
    "cpus",
    "count",
    "max",
    "threads",
    "qmp",
    "use",
    "sha256",
    "memory",
    "socket",
    "macs",
    "trust_domain",
    "=",
    "\"lan\"",
    "\"raw\"",
    "\"64MiB\"",
    "\"02:00:00:00:00:01\"",
    "[",
    "]",
    "{",
    "}",
    "1",
    "-1",
    "99999999999999999999",
    "1.5",
    "true",
    "\n",
    ",",
    "'",
    "\"\"\"",
    "#",
    "ä",
    "1979-05-27",
];

fn empty() -> Config {
    parse(Path::new("m.toml"), "[[switch]]\nname='lan'").unwrap()
}

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec!["lan", "raw", "memory", "64MiB", "/a", "02:00:00:00:00:01", "n"])
            .prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ]
}

fn body() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "net",
        "disk",
        "vsock",
        "name",
        "switch",
        "mac",
        "addresses",
        "bind_also",
        "allow",
        "format",
        "size",
        "path",
        "cid",
        "weight",
        "trust_domain",
        "pipes",
        "max",
        "mode",
        "queues",
        "x",
    ]);
    leaf().prop_recursive(4, 64, 12, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(key.clone().prop_map(String::from), inner, 0..8)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

fn good_body() -> impl Strategy<Value = Value> {
    let net = (any::<[u8; 5]>(), 1u16..=16, 68u16..=65535, any::<bool>()).prop_map(
        |(mac, queue_pairs, mtu, packed)| {
            let [a, b, c, d, e] = mac;
            let mac = format!("02:{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}");
            json!({"net": {"name": "n", "switch": "lan", "mac": mac, "queue_pairs": queue_pairs,
                           "mtu": mtu, "packed": packed, "addresses": ["10.0.0.1", "fe80::1"],
                           "bind_also": ["00:00:5e:00:01:07", "10.0.0.9"],
                           "allow": ["dhcp-server", "llc", "0x8847"]}})
        },
    );
    let disk = (0u64..1 << 16, any::<bool>(), 0..3usize).prop_map(|(mib, read_only, kind)| {
        let mut disk = json!({"name": "d", "read_only": read_only, "mode": "dial"});
        let more = match kind {
            0 => json!({"format": "memory", "size": (mib + 1) << 20}),
            1 => json!({
                "format": "qcow2", "path": "/i", "backing_dir": "/b", "data_file": "/d",
                "map_cache": "1MiB",
            }),
            _ => json!({"format": "raw", "path": "/i", "direct": true,
                        "registered_memory": mib << 20}),
        };
        let fields = disk.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        json!({ "disk": disk, "weight": 7, "trust_domain": "t" })
    });
    let vsock = (3u64..0xffff_ffff).prop_map(|cid| json!({"vsock": {"cid": cid, "path": "/v"}}));
    prop_oneof![net, disk, vsock]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn random_words_never_panic(
        words in prop::collection::vec(prop::sample::select(WORDS), 0..60),
    ) {
        let text = words.join(" ");
        if let Err(problems) = parse(Path::new("m.toml"), &text) {
            prop_assert!(!problems.to_string().is_empty());
        }
    }

    #[test]
    fn random_text_never_panics(text in "(?s).{0,200}") {
        let _ = parse(Path::new("m.toml"), &text);
    }

    #[test]
    fn random_bodies_never_panic_and_change_nothing_when_refused(body in body()) {
        let mut config = empty();
        if config.attach("v", &body).is_err() {
            prop_assert_eq!(config, empty());
        }
    }

    #[test]
    fn an_attached_port_can_be_attached_from_its_description(body in good_body()) {
        let mut config = empty();
        let port = config.attach("v", &body).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let vm = &config.vms[0];
        let again = serde_json::to_value(AttachBody {
            port: &port,
            trust_domain: vm.trust_domain.as_deref(),
            weight: vm.credit.weight,
        })
        .unwrap();
        let mut second = empty();
        second.attach("v", &again).map_err(|e| TestCaseError::fail(format!("{again}: {e}")))?;
        prop_assert_eq!(&second, &config);
        prop_assert!(config.detach("v", port.name()).is_some());
        prop_assert_eq!(config, empty());
    }
}

#[test]
fn attaching_checks_against_the_config_and_names_fields_of_the_body() {
    let mut config = empty();
    let net = json!({"net": {"name": "n", "switch": "lan", "mac": "02:00:00:00:00:01"}});
    config.attach("a", &net).unwrap();
    assert!(matches!(config.attach("a", &net), Err(AttachError::Exists { .. })));

    let Err(AttachError::Invalid(problems)) = config.attach("b", &net) else {
        panic!("the same MAC twice");
    };
    assert_eq!(problems.problems[0].field, "net.mac");
    assert!(problems.to_string().contains("is taken by mac of port a/n"), "{problems}");

    let more = json!({"disk": {"name": "d", "format": "null", "size": 512}, "weight": 2});
    let Err(AttachError::Invalid(problems)) = config.attach("a", &more) else {
        panic!("another weight for a VM that is there");
    };
    assert_eq!(problems.problems[0].field, "weight");
    let two = json!({"vsock": {"cid": 3, "path": "/v"}, "disk": {}});
    assert!(config.attach("a", &two).unwrap_err().to_string().contains("exactly one"));
    assert!(config.attach("a/../b", &net).unwrap_err().to_string().contains("'/'"));
}

/// The sender of a request does not know where ports stand in the config, nor which of two comes
/// first.
#[test]
fn abuse_O6_an_attach_that_contradicts_another_port_names_that_port() {
    let mut config = empty();
    let null = |name: &str, socket: &str| {
        json!({"disk": {"name": name, "format": "null",
        "size": 512, "socket": socket}})
    };
    config.attach("first", &null("a", "/run/a")).unwrap();
    config.attach("second", &json!({"vsock": {"cid": 3, "path": "/run/v"}})).unwrap();
    let raw = |name: &str| json!({"disk": {"name": name, "format": "raw", "path": "/d.img"}});
    config.attach("second", &raw("root")).unwrap();
    let mut refused = |vm: &str, body: &Value, field: &str, words: &str| {
        let Err(AttachError::Invalid(problems)) = config.attach(vm, body) else {
            panic!("{body} contradicts a port");
        };
        assert_eq!(problems.problems[0].field, field, "{problems}");
        assert!(problems.to_string().contains(words), "{problems}");
    };
    // The VM that is asked for comes first in the config, the other port is noted second.
    let words = "the image /d.img is used by path of port second/root; give each";
    refused("first", &raw("b"), "disk.path", words);
    refused("first", &null("b", "/run/v"), "disk.socket", "is taken by path of port second/vsock");
    refused("first", &null("b", "/run/v_7"), "disk.socket", "under path of port second/vsock");
    refused("new", &null("b", "/run/a"), "disk.socket", "is taken by socket of port first/a");
    let twice = json!({"vsock": {"cid": 3, "path": "/run/w"}});
    refused("first", &twice, "vsock.cid", "context id 3 is taken by cid of port second/vsock");
}

#[test]
fn a_port_is_put_in_the_place_of_one_that_does_not_run() {
    let mut config = empty();
    let disk = |size: u32| json!({"disk": {"name": "d", "format": "null", "size": size}});
    let small = config.attach("v", &disk(512)).unwrap();
    let large = empty().attach("v", &disk(1024)).unwrap();
    let before = config.clone();
    let vsock = json!({"vsock": {"cid": 3, "path": "/v", "socket": small.endpoint().socket}});
    let vsock = empty().attach("v", &vsock).unwrap();
    let error = config.put_port("v", &vsock).unwrap_err().to_string();
    assert!(error.contains("is taken by socket of port v/d"), "{error}");
    assert_eq!(config, before);
    config.put_port("v", &large).unwrap();
    assert_eq!(config.detach("v", "d"), Some(large));
    let error = config.put_port("v", &small).unwrap_err().to_string();
    assert!(error.contains("there is no VM v; restart the daemon"), "{error}");
}
