//! Modules in the config: what is refused, with which words and where; defaults.
#![allow(clippy::unwrap_used)]

mod problems;

use std::path::{Path, PathBuf};

use config::{Config, ModuleConfig, Problems, RingConfig, VmModulesConfig, parse};
use problems::errors;
use serde_json::json;

const HASH: &str = "a19a76096a5584316e3ce290ef98e04d222adb0917b1f4763818149A144C1E93";

fn read(text: &str) -> Result<Config, Problems> {
    parse(Path::new("m.toml"), text)
}

fn module(name: &str) -> String {
    format!("[[module]]\nname='{name}'\npath='/m'\nsha256='{HASH}'\n")
}

/// A VM that uses `t`, with more of its table.
fn vm(name: &str, more: &str) -> String {
    format!("[[vm]]\nname='{name}'\n[vm.modules]\nuse=['t']\nsocket='/s/{name}'\n{more}\n")
}

/// Each case: a config, and the problems it has, in order: where, and words of the text.
#[test]
fn bad_modules_are_told_with_place_and_fix() {
    let seventeen: Vec<String> = (0..17).map(|i| format!("'m{i}'")).collect();
    let named: String = (0..16).map(|i| module(&format!("m{i}"))).collect();
    let many = format!("[[vm]]\nname='v'\nmodules={{socket='/s',use=[{}]}}", seventeen.join(","));
    let cases: &[(String, &[(&str, &str)])] = &[
        (
            "[[module]]".into(),
            &[
                ("m.toml:1:1: module[0].name:", "is missing; add `name"),
                ("m.toml:1:1: module[0].path:", "is missing; add the file of its WebAssembly"),
                (
                    "m.toml:1:1: module[0].sha256:",
                    "is missing: the file must be the one that you mean; write what `sha256sum`",
                ),
            ],
        ),
        ("[module]\nname='t'".into(), &[("m.toml:1:1: module:", "write it in double brackets")]),
        (
            format!(
                "[[module]]\nname='Table'\npath='t.wasm'\nsha256='{}'\nmemory='1023KiB'\ndeadline_ms=9\ndeadline=1",
                &HASH[1..]
            ),
            &[
                (
                    "m.toml:2:6: module[0].name:",
                    "\"Table\" is no name of a module; use 1 to 32 of lower-case",
                ),
                ("m.toml:3:6: module[0].path:", "absolute path"),
                ("m.toml:4:8: module[0].sha256:", "is no SHA-256; write what `sha256sum` says"),
                ("m.toml:5:8: module[0].memory:", "is 1047552 bytes; the limit is 1MiB to 4GiB"),
                ("m.toml:6:13: module[0].deadline_ms:", "is 9; the limit is 10 to 10000"),
                ("m.toml:7:1: module[0].deadline:", "did you mean `deadline_ms`?"),
            ],
        ),
        (
            module(&"x".repeat(33)).replace(HASH, &"g".repeat(64)),
            &[
                ("m.toml:2:6: module[0].name:", "no name of a module"),
                ("m.toml:4:8:", "no SHA-256"),
            ],
        ),
        (module("a/b"), &[("m.toml:2:6: module[0].name:", "\"a/b\" is no name")]),
        (
            module("t") + &module("t"),
            &[(
                "m.toml:6:6: module[1].name:",
                "\"t\" is taken by module[0].name; names must differ",
            )],
        ),
        (
            module("t") + "[[vm]]\nname='v'\n[vm.modules]\nuse=['t']",
            &[(
                "m.toml:7:1: vm[0].modules:",
                "without vsock, and has no `socket`: nobody reaches its modules; add a [vm.vsock]",
            )],
        ),
        (
            module("t") + "[[vm]]\nname='v'\nmodules={socket='/s'}",
            &[(
                "m.toml:7:9: vm[0].modules.use:",
                "is missing; name its modules: use = [\"table\"]",
            )],
        ),
        (
            module("t")
                + "[[vm]]\nname='v'\nmodules={use='t',socket='s',dir='d',disk='1KiB',disc=1}",
            &[
                ("m.toml:7:14: vm[0].modules.use:", "is a string; write a list"),
                ("m.toml:7:25: vm[0].modules.socket:", "absolute path"),
                ("m.toml:7:33: vm[0].modules.dir:", "absolute path"),
                ("m.toml:7:42: vm[0].modules.disk:", "is 1024 bytes; the limit is 1MiB to 1TiB"),
                ("m.toml:7:49: vm[0].modules.disc:", "did you mean `disk`?"),
            ],
        ),
        (
            module("t") + "[[vm]]\nname='v'\nmodules={socket='/s',use=[]}",
            &[("m.toml:7:26: vm[0].modules.use:", "names no module; name one, or take")],
        ),
        (
            module("t") + "[[vm]]\nname='v'\nmodules={socket='/s',use=['t',3,'t','u','tabel']}",
            &[
                ("m.toml:7:26: vm[0].modules.use:", "has an integer; write names"),
                ("m.toml:7:26: vm[0].modules.use:", "names \"t\" twice"),
                ("m.toml:7:26: vm[0].modules.use:", "no [[module]] \"u\"; did you mean \"t\"?"),
                (
                    "m.toml:7:26: vm[0].modules.use:",
                    "no [[module]] \"tabel\"; add a [[module]], or name one of: t",
                ),
            ],
        ),
        (
            vm("v", ""),
            &[(
                "m.toml:4:5: vm[0].modules.use:",
                "there is no [[module]] \"t\"; add a [[module]] with this name",
            )],
        ),
        (named + &many, &[("m.toml:67:26: vm[0].modules.use:", "has 17 modules; the limit is 16")]),
        (
            module("t") + &vm("v", "") + &vm("w", "").replace("/s/w", "/s/./v"),
            &[("m.toml:15:8: vm[1].modules.socket:", "/s/./v is taken by vm[0].modules.socket")],
        ),
        (
            module("t") + &vm("v", "[vm.vsock]\ncid=3\npath='/v'").replace("/s/v", "/v_5"),
            &[("m.toml:9:8: vm[0].modules.socket:", "what a guest reaches")],
        ),
        (
            module("t") + &vm("v", "").replace("/s/v", &format!("/{}", "x".repeat(107))),
            &[("m.toml:9:8: vm[0].modules.socket:", "at most 107")],
        ),
        (
            "[daemon]\nstate_dir='lib'".into(),
            &[("m.toml:2:11: daemon.state_dir:", "absolute path")],
        ),
    ];
    for (text, expected) in cases {
        problems::expect(text, expected);
    }
}

/// Files of one VM are no other's, whatever the folders are called.
#[test]
fn folders_belong_to_one_vm() {
    let two = |a: &str, b: &str| {
        let dir = |dir: &str| if dir.is_empty() { String::new() } else { format!("dir='{dir}'") };
        module("t") + &vm("v", &dir(a)) + &vm("w", &dir(b))
    };
    read(&two("", "")).unwrap();
    read(&two("/a", "/ab")).unwrap();
    for (a, b) in [
        ("/a", "/a"),
        ("/a", "/a/t"),
        ("/a/t/x", "/a"),
        ("/a/", "/./a"),
        ("/var/lib/millrace/w", ""),
    ] {
        let found = errors(&two(a, b));
        assert!(found[0].contains("vm[1].modules.dir:"), "{found:?}");
        assert!(found[0].contains("is of vm[0].modules.dir; give each VM a folder"), "{found:?}");
    }
    for dir in ["/var/lib/millrace", "/var/lib/millrace/code", "/var/lib/millrace/code/v", "/"] {
        let found = errors(&two(dir, "/b"));
        assert!(found[0].contains("is of native code of modules"), "{found:?}");
    }
    assert!(errors(&two("/a/../b", "/c"))[0].contains("has a `..`; write where it leads to"));
    // A VM of this name has no folder of its own.
    let code = module("t") + &vm("code", "");
    assert!(errors(&code)[0].contains("is of native code of modules"));
    read(&format!("{code}dir='/b'")).unwrap();
}

#[test]
fn what_is_left_out_has_a_default() {
    let config = read(&(module("t") + &vm("v", ""))).unwrap();
    let wanted = ModuleConfig {
        name: "t".into(),
        path: "/m".into(),
        sha256: config.modules[0].sha256,
        memory_bytes: 256 << 20,
        deadline_ms: 100,
    };
    assert_eq!(config.modules, [wanted]);
    assert_eq!((config.modules[0].sha256[0], config.modules[0].sha256[31]), (0xa1, 0x93));
    let wanted = VmModulesConfig {
        names: vec!["t".into()],
        disk_bytes: 10 << 30,
        cpu_percent: 100,
        dir: "/var/lib/millrace/v".into(),
        socket: Some("/s/v".into()),
        guest_users: false,
        ring: None,
    };
    assert_eq!(config.vms[0].modules, Some(wanted));
    assert_eq!(config.code_dir(), PathBuf::from("/var/lib/millrace/code"));
    let shown = serde_json::to_value(&config).unwrap();
    let shown_module = json!({"name": "t", "path": "/m", "sha256": HASH.to_lowercase(),
                        "memory": 256 << 20, "deadline_ms": 100});
    assert_eq!(shown["module"], json!([shown_module]));
    let modules = json!({"use": ["t"], "disk": 10u64 << 30, "cpu_percent": 100,
                         "dir": "/var/lib/millrace/v", "socket": "/s/v", "guest_users": false});
    assert_eq!(shown["vm"][0]["modules"], modules);
    let elsewhere = format!("[daemon]\nstate_dir='/d'\n{}{}", module("t"), vm("v", "disk='1TiB'"));
    let config = read(&elsewhere).unwrap();
    assert_eq!(config.vms[0].modules.as_ref().unwrap().dir, PathBuf::from("/d/v"));
    assert_eq!(config.code_dir(), PathBuf::from("/d/code"));
    assert_eq!(read("[[vm]]\nname='v'").unwrap().vms[0].modules, None);
}

#[test]
fn a_ring_is_a_memory_bar() {
    let with = |ring: &str| module("t") + &vm("v", &format!("[vm.modules.ring]\n{ring}"));
    let config = read(&with("path='/run/v.ring'")).unwrap();
    let ring = config.vms[0].modules.as_ref().unwrap().ring.clone();
    let wanted =
        RingConfig { path: "/run/v.ring".into(), bytes: 16 << 20, spin_us: 50, required: false };
    assert_eq!(ring, Some(wanted));
    let shown = serde_json::to_value(&config).unwrap();
    let ring = json!({"path": "/run/v.ring", "size": 16 << 20, "spin_us": 50, "required": false});
    assert_eq!(shown["vm"][0]["modules"]["ring"], ring);
    let most = read(&with("path='/r'\nsize='1GiB'\nspin_us=10000\nrequired=true")).unwrap();
    assert!(most.vms[0].modules.as_ref().unwrap().ring.as_ref().unwrap().required);
    for (ring, wrong) in [
        ("", "vm[0].modules.ring.path: is missing"),
        ("path='r'", "vm[0].modules.ring.path: "),
        ("path='/r'\nsize='3MiB'", "is 3145728 bytes, and no power of two; use 1MiB, 2MiB"),
        ("path='/r'\nsize='512KiB'", "is 524288 bytes; the limit is 1MiB to 1GiB"),
        ("path='/r'\nspin_us=10001", "vm[0].modules.ring.spin_us"),
        ("path='/r'\nspins=1", "vm[0].modules.ring.spins"),
    ] {
        let found = errors(&with(ring));
        assert!(found.iter().any(|error| error.contains(wrong)), "{ring}: {found:?}");
    }
}

#[test]
fn a_ring_is_one_vms_alone() {
    let of = |name: &str, path: &str| vm(name, &format!("[vm.modules.ring]\npath='{path}'"));
    read(&(module("t") + &of("v", "/r/v") + &of("w", "/r/w"))).unwrap();
    let found = errors(&(module("t") + &of("v", "/r/v") + &of("w", "/r/./v")));
    let wrong =
        "vm[1].modules.ring.path: the file /r/v is taken by vm[0].modules.ring.path; give each VM";
    assert!(found[0].contains(wrong), "{found:?}");
}

#[test]
fn modules_are_listed_in_the_order_of_their_vm() {
    let text =
        module("a") + &module("b") + &module("t") + &vm("v", "").replace("['t']", "['t','a']");
    let config = read(&text).unwrap();
    let (_, all) = config.modules_of("v").unwrap();
    assert_eq!(all.iter().map(|m| &m.name[..]).collect::<Vec<_>>(), ["t", "a"]);
    assert_eq!(config.modules_of("nobody"), None);
}

/// Modules of a VM are settings of its file, as pipes are, and ports come and go.
#[test]
fn modules_need_no_port_once_the_daemon_runs() {
    let text =
        module("t") + "[[vm]]\nname='v'\n[vm.modules]\nuse=['t']\n[vm.vsock]\ncid=3\npath='/v'\n";
    let mut config = read(&text).unwrap();
    config.detach("v", "vsock").unwrap();
    let disk = json!({"disk": {"name": "d", "format": "null", "size": 512}});
    config.attach("v", &disk).unwrap();
    assert!(config.vms[0].modules.is_some());
    let body = json!({"disk": disk["disk"], "modules": {}});
    assert!(config.attach("w", &body).unwrap_err().to_string().contains("modules"));
}
