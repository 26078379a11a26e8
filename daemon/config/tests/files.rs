//! The config file: what is refused, with which words and where; drop-ins; defaults.
#![allow(non_snake_case, clippy::unwrap_used)]

mod problems;

use std::fs;
use std::path::{Path, PathBuf};

use config::{
    AttachBody, BindMode, BlockSize, Config, DiskFormat, HolderConfig, OnError, PauseKind,
    PipesConfig, Placement, Problems, SidecoreConfig, SocketMode, SpinKind, load, parse,
};
use problems::{errors, expect};

/// Each case: a config, and the problems it has, in order: where, and words of the text.
#[test]
fn bad_configs_are_told_with_place_and_fix() {
    let lan = "[[switch]]\nname=\"lan\"\n";
    let cases: &[(&str, &[(&str, &str)])] = &[
        ("[daemon", &[("m.toml:1:", "not TOML")]),
        ("[daemons]", &[("m.toml:1:2: daemons:", "did you mean `daemon`?")]),
        ("[daemon]\nrundir=\"/x\"", &[("m.toml:2:1: daemon.rundir:", "did you mean `run_dir`?")]),
        ("daemon = 3", &[("m.toml:1:10: daemon:", "is an integer, not a table")]),
        ("[daemon]\nrun_dir=\"run\"", &[("m.toml:2:9:", "absolute path; begin it with `/`")]),
        ("[daemon]\nread_socket='/r'", &[("m.toml:2:13:", "add `read_group")]),
        ("[daemon]\nread_group='g'", &[("m.toml:2:12:", "add `read_socket")]),
        (
            "[daemon]\ncontrol_socket='/r'\nread_socket='/r'\nread_group='g'",
            &[("m.toml:3:13: daemon.read_socket:", "taken by daemon.control_socket")],
        ),
        ("[daemon]\nholder=1", &[("m.toml:2:8: daemon.holder:", "write true, false")]),
        ("[daemon]\nlog=\"loud\"", &[("m.toml:2:5: daemon.log:", "\"loud\" is unknown")]),
        ("[daemon]\nsocket_mode=\"660x\"", &[("m.toml:2:13:", "write octal digits")]),
        ("[sidecore]\ncount=0", &[("m.toml:2:7:", "is 0; the limit is 1 to 64")]),
        ("[sidecore]\ncount=2\ncpus=[1]", &[("m.toml:2:7:", "together with `cpus`")]),
        ("[sidecore]\ncpus=[1,1]", &[("m.toml:2:6:", "CPU 1 twice")]),
        ("[sidecore]\ncount=2\nmax=4", &[("m.toml:3:5:", "together with `count`")]),
        ("[sidecore]\ncpus=[1,2]\nmax=3", &[("m.toml:3:5:", "there are 2 in `cpus`")]),
        ("[sidecore]\ncount=2\nmin=3", &[("m.toml:3:5:", "lower `min` to 2 at most")]),
        ("[sidecore]\nmin=3\nmax=2", &[("m.toml:2:5:", "at most 2 may be active")]),
        ("[sidecore]\nmin=0", &[("m.toml:2:5:", "is 0; the limit is 1 to 64")]),
        ("[sidecore]\nspin=\"on\"", &[("m.toml:2:6:", "write \"adaptive\" or \"fixed\"")]),
        ("[sidecore]\npause=\"c6\"", &[("m.toml:2:7:", "\"c6\" is unknown")]),
        ("[daemon]\nhuge_pages=2", &[("m.toml:2:12:", "\"auto\", true or false")]),
        ("[sidecore]\nyield=1", &[("m.toml:2:7:", "\"auto\", true or false")]),
        ("[sidecore]\ncpus=[]", &[("m.toml:2:6:", "names no CPU")]),
        (
            "[vm]\nname=\"web\"",
            &[("m.toml:1:1:", "is a table; write it in double brackets, [[...]]")],
        ),
        ("[sidecore]\nspin_us=1.5", &[("m.toml:2:9:", "is a float; write an integer")]),
        ("[[switch]]\nname=\"a/b\"", &[("m.toml:2:6: switch[0].name:", "'/'")]),
        ("[[switch]]", &[("m.toml:1:1: switch[0].name:", "is missing; add `name")]),
        (
            "[[switch]]\nname=\"a\"\n[[switch]]\nname=\"a\"",
            &[("m.toml:4:6: switch[1].name:", "\"a\" is taken by switch[0].name")],
        ),
        (
            "[[switch]]\nname=\"a\"\nuplink={tap=\"far-too-long-name\"}",
            &[("m.toml:3:13: switch[0].uplink.tap:", "no interface name")],
        ),
        ("[[vm]]\nname=\"v\"\nweight=10001", &[("m.toml:3:8:", "the limit is 1 to 10000")]),
        ("[[vm]]\nname=\"v\"\n[[vm]]\nname=\"v\"", &[("m.toml:4:6:", "taken by vm[0].name")]),
        (
            "[[vm]]\nname=\"v\"\nnet=[{name=\"n\",switch=\"lan\"}]",
            &[(
                "m.toml:3:23: vm[0].net[0].switch:",
                "there is no switch \"lan\"; add a [[switch]]",
            )],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname=\"v\"\n[[vm.net]]\nname=\"n\"\nswitch=\"lan\"\nmac=\"01:00:00:00:00:01\"\nmtu=67\nbind=\"ip\"\nbroadcasts_per_s=1000000001"
            ),
            &[
                ("m.toml:8:5: vm[0].net[0].mac:", "group address"),
                ("m.toml:9:5: vm[0].net[0].mtu:", "is 67; the limit is 68 to 65535"),
                ("m.toml:10:6:", "write \"mac-and-ip\" or \"mac\" or \"off\""),
                ("m.toml:11:18:", "is 1000000001; the limit is 0 to 1000000000"),
            ],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname=\"v\"\n[[vm.net]]\nname=\"vsock\"\nswitch=\"lan\"\nbind=\"mac\"\naddresses=[\"10.0.0.1\"]\nqueue_pairs=17"
            ),
            &[
                ("m.toml:6:6:", "name of every VM's vsock port"),
                ("m.toml:9:11:", "checked only with bind"),
                ("m.toml:10:13:", "the limit is 1 to 16"),
            ],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname=\"v\"\n[[vm.net]]\nname=\"n\"\nswitch=\"lan\"\naddresses=[\"10.0.0\", \"224.0.0.1\", 7]"
            ),
            &[("m.toml:8:11:", "no IP"), ("m.toml:8:11:", "no host"), ("m.toml:8:11:", "integer")],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname='v'\n[[vm.net]]\nname='n'\nswitch='lan'\nmac='02:00:00:00:00:01'\nbind_also=['02:00:00:00:00:01', '224.0.0.1', 'x', 7]\nallow=['router', 'router', 'hub', '0x5ff', 3]"
            ),
            &[
                ("m.toml:9:11: vm[0].net[0].bind_also:", "no port's `mac`"),
                ("m.toml:9:11:", "belongs to no host"),
                ("m.toml:9:11:", "\"x\""),
                ("m.toml:9:11:", "has an integer"),
                ("m.toml:10:7: vm[0].net[0].allow:", "names router twice"),
                ("m.toml:10:7:", "\"hub\" is no role and no EtherType"),
                ("m.toml:10:7:", "\"0x5ff\""),
                ("m.toml:10:7:", "has an integer"),
            ],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname='v'\n[[vm.net]]\nname='n'\nswitch='lan'\nbind_also=['02:00:00:00:00:01', '10.0.0.1', '10.0.0.9']\n[[vm.net]]\nname='o'\nswitch='lan'\nmac='02:00:00:00:00:01'\naddresses=['10.0.0.1']\nbind_also=['10.0.0.1', '10.0.0.9']"
            ),
            &[
                ("m.toml:8:11: vm[0].net[0].bind_also:", ":01 is taken by vm[0].net[1].mac"),
                ("m.toml:8:11:", "10.0.0.1 is taken by vm[0].net[1].addresses"),
                ("m.toml:14:11: vm[0].net[1].bind_also:", "10.0.0.1 is taken by vm[0].net[1].add"),
            ],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname='v'\n[[vm.net]]\nname='n'\nswitch='lan'\nbind='mac'\nallow=['any']"
            ),
            &[("m.toml:9:7: vm[0].net[0].allow:", "limits only ports with bind")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"",
            &[("m.toml:3:1: vm[0].disk[0].format:", "never guessed")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"raw\"\nsize=\"1MiB\"\nbacking_dir=\"/b\"",
            &[
                ("m.toml:3:1: vm[0].disk[0].path:", "needs the path"),
                ("m.toml:6:6:", "the size is that of the file"),
                ("m.toml:7:13:", "only qcow2"),
            ],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"raw\"\npath=\"/i\"\nregistered_memory='1GiB'",
            &[("m.toml:7:19: vm[0].disk[0].registered_memory:", "is set, and direct is false")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"qcow2\"\npath=\"/i\"\ndirect=true\nregistered_memory='1GiB'",
            &[("m.toml:8:19:", "does not go with format = \"qcow2\"")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"memory\"\nsize=\"1MiB\"\nregistered_memory='1GiB'",
            &[("m.toml:7:19:", "does not go with format = \"memory\"")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"null\"\npath=\"/x\"\nsize=\"1MB\"",
            &[("m.toml:6:6:", "there is no file"), ("m.toml:7:6:", "\"1MB\" is no size")],
        ),
        (
            "[[vm]]\nname=\"v\"\n[[vm.disk]]\nname=\"d\"\nformat=\"memory\"\nsize=1000\nblock_size=1000\nserial=\"123456789012345678901\"",
            &[
                ("m.toml:6:6:", "multiple of block_size"),
                ("m.toml:7:12:", "write 512, 1024, 2048, 4096 or \"auto\""),
                ("m.toml:8:8:", "at most 20 ASCII bytes"),
            ],
        ),
        (
            "[[vm]]\nname=\"v\"\nvsock={cid=2,path=\"/s\"}",
            &[("m.toml:3:12:", "the limit is 3 to 4294967294")],
        ),
        (
            "[[vm]]\nname=\"v\"\nvsock={}",
            &[
                ("m.toml:3:7: vm[0].vsock.cid:", "add `cid = 3`"),
                ("m.toml:3:7: vm[0].vsock.path:", "missing"),
            ],
        ),
        (
            "[[vm]]\nname=\"v\"\nvsock={cid=3,path=\"/s\"}\n[[vm]]\nname=\"w\"\nvsock={cid=3,path=\"/s\"}",
            &[
                ("m.toml:6:12: vm[1].vsock.cid:", "3 is taken by vm[0].vsock.cid"),
                ("m.toml:6:19: vm[1].vsock.path:", "/s is taken by vm[0].vsock.path"),
            ],
        ),
        (
            "[[vm]]\nname=\"v\"\npipes={max=4097,threads=65,poll=1}",
            &[
                ("m.toml:3:7: vm[0].pipes:", "without vsock, over which its agent asks for pipes"),
                ("m.toml:3:7: vm[0].pipes:", "without network"),
                ("m.toml:3:12: vm[0].pipes.max:", "is 4097; the limit is 1 to 4096"),
                ("m.toml:3:25: vm[0].pipes.threads:", "is 65; the limit is 1 to 64"),
                ("m.toml:3:28: vm[0].pipes.poll:", "take it out; known are max, threads"),
            ],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname=\"v\"\npipes=true\nnet=[{{name=\"n\",switch=\"lan\"}}]\nvsock={{cid=3,path=\"/s\"}}"
            ),
            &[("m.toml:5:7: vm[0].pipes:", "is a boolean, not a table")],
        ),
        (
            &format!(
                "{lan}[[vm]]\nname=\"v\"\npipes={{max=0,threads=0}}\nnet=[{{name=\"n\",switch=\"lan\"}}]"
            ),
            &[
                ("m.toml:5:7: vm[0].pipes:", "add a [vm.vsock], or take it out"),
                ("m.toml:5:12: vm[0].pipes.max:", "is 0; the limit is 1 to 4096"),
                ("m.toml:5:22: vm[0].pipes.threads:", "is 0; the limit is 1 to 64"),
            ],
        ),
    ];
    for (text, expected) in cases {
        problems::expect(text, expected);
    }
}

#[test]
fn a_syntax_error_does_not_hide_the_others() {
    let found = errors("[sidecore]\ncount = 99\n[daemon]\nlog = = 3\n[[vm]]\nnam = \"x\"\n");
    assert!(found.iter().any(|p| p.starts_with("m.toml:2:9: sidecore.count")), "{found:#?}");
    assert!(found.iter().any(|p| p.starts_with("m.toml:4:7: not TOML")), "{found:#?}");
    assert!(found.iter().any(|p| p.contains("did you mean `name`?")), "{found:#?}");
}

/// A guest can write any header into a raw image: whoever guesses the format from content gives it
/// the host's files.
#[test]
fn abuse_F1_the_format_of_an_image_is_never_guessed() {
    let disk = "[[vm]]\nname='v'\n[[vm.disk]]\nname='d'\npath='/d.qcow2'\n";
    assert!(errors(disk)[0].contains("never guessed"));
    // And without a folder for backing files there are none.
    let config = parse(Path::new("m.toml"), &format!("{disk}format='qcow2'\n")).unwrap();
    let path = PathBuf::from("/d.qcow2");
    let wanted = DiskFormat::Qcow2 {
        path,
        direct: false,
        backing_dir: None,
        data_file: None,
        map_cache_bytes: None,
    };
    assert_eq!(config.vms[0].disks[0].format, wanted);
}

#[test]
fn abuse_F2_one_image_behind_two_disks_is_refused_unless_read_only() {
    let config = |a: bool, b: bool| {
        format!(
            "[[vm]]\nname='v'\n[[vm.disk]]\nname='a'\nformat='raw'\npath='/i'\nread_only={a}\n\
             [[vm.disk]]\nname='b'\nformat='raw'\npath='/./i'\nread_only={b}\n"
        )
    };
    assert!(errors(&config(false, true))[0].contains("used by vm[0].disk[0].path"));
    assert!(parse(Path::new("m.toml"), &config(true, true)).is_ok());
}

#[test]
fn names_that_make_the_same_socket_are_refused() {
    let disk = |vm: &str, disk: &str| {
        format!("[[vm]]\nname='{vm}'\n[[vm.disk]]\nname='{disk}'\nformat='null'\nsize='1MiB'\n")
    };
    let found = errors(&format!("{}{}", disk("a-b", "c"), disk("a", "b-c")));
    assert!(found[0].contains("/run/millrace/a-b-c.sock is taken"), "{found:?}");
}

#[test]
fn abuse_C3_no_socket_is_a_port_of_the_host_for_another_guest() {
    let vm = |name: &str, cid: u32, path: &str| {
        format!("[[vm]]\nname='{name}'\nvsock={{cid={cid},path='{path}'}}\n")
    };
    let config = |other: &str| format!("{}{other}", vm("a", 3, "/m/a"));
    let reached = "is what a guest reaches as a port of the host under vm[0].vsock.path";
    // Another guest's own socket, however it is written; its vhost-user socket; the control socket.
    let listen = "[[vm]]\nname='b'\nvsock={cid=4,path='/m/b',socket='/m/a_70000'}\n";
    let control = "[daemon]\ncontrol_socket='/m/a_1'\n";
    let cases = [
        (config(&vm("b", 4, "/m/a_5")), "vm[1].vsock.path", "/m/a_5"),
        (config(&vm("b", 4, "/m/./a_5")), "vm[1].vsock.path", "/m/./a_5"),
        (config(listen), "vm[1].vsock.socket", "/m/a_70000"),
        (format!("{control}{}", config("")), "daemon.control_socket", "/m/a_1"),
        // The order does not matter.
        (format!("{}{}", vm("b", 4, "/m/a_5"), config("")), "vm[0].vsock.path", "/m/a_5"),
    ];
    for (text, field, path) in cases {
        let found = errors(&text);
        let reached =
            reached.replace('0', if text.starts_with("[[vm]]\nname='b'") { "1" } else { "0" });
        assert_eq!(found.len(), 1, "{text}\n=> {found:#?}");
        assert!(found[0].contains(&format!("{field}: {path} {reached}")), "{found:?}");
    }
    for good in ["/m/a_", "/m/a_5x", "/m/a5", "/n/a_5", "/m/b_5", "/m/a/_5"] {
        let text = config(&vm("b", 4, good));
        assert!(parse(Path::new("m.toml"), &text).is_ok(), "{good}");
    }
}

#[test]
fn a_port_s_full_name_is_measured() {
    let (vm, disk) = ("v".repeat(40), "d".repeat(24));
    let text =
        format!("[[vm]]\nname='{vm}'\n[[vm.disk]]\nname='{disk}'\nformat='null'\nsize=512\n");
    let found = errors(&text);
    assert!(found[0].contains("has 65 bytes, the limit is 64"), "{found:?}");
}

#[test]
fn socket_paths_are_measured() {
    let long = format!("/{}", "x".repeat(107));
    assert!(errors(&format!("[daemon]\ncontrol_socket='{long}'"))[0].contains("at most 107"));
    // A vsock's base needs room for the port.
    let base = &long[..100];
    let found = errors(&format!("[[vm]]\nname='v'\nvsock={{cid=3,path='{base}'}}"));
    assert!(found[0].contains("at most 96"), "{found:?}");
}

#[test]
fn the_example_is_good_and_names_every_setting() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/millrace.toml.example");
    let text = fs::read_to_string(&path).unwrap();
    let config = parse(&path, &text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((config.switches.len(), config.vms.len()), (1, 2));
    let json = serde_json::to_string(&config).unwrap();
    // Every key that the daemon shows of its config is explained in the example.
    for (key, _) in json.match_indices("\":").map(|(end, _)| {
        let start = json[..end].rfind('"').unwrap() + 1;
        (&json[start..end], ())
    }) {
        let internal = matches!(key, "placement" | "external");
        assert!(internal || text.contains(key), "{key} is not in the example");
    }
}

#[test]
fn an_empty_config_has_defaults() {
    let config = parse(Path::new("m.toml"), "").unwrap();
    assert_eq!(config.daemon.control_socket, PathBuf::from("/run/millrace/control.sock"));
    assert_eq!(config.daemon.holder, HolderConfig::Default);
    assert_eq!(config.daemon.huge_pages, None);
    assert_eq!(config.sidecore, SidecoreConfig::default());
}

#[test]
fn a_most_without_a_count_is_the_count() {
    let sidecore =
        |text: &str| parse(Path::new("m.toml"), &format!("[sidecore]\n{text}")).unwrap().sidecore;
    let found = sidecore("min=1\nmax=4\nyield=true\npause='c0.2'\nspin='fixed'");
    assert_eq!(found.placement, Placement::Count(4));
    assert_eq!((found.min, found.max, found.yields), (Some(1), Some(4), Some(true)));
    assert_eq!((found.pause, found.spin), (PauseKind::C02, SpinKind::Fixed));
    let found = sidecore("cpus=[3,4,5]\nmin=1\nmax=2");
    assert_eq!(found.placement, Placement::Cpus(vec![3, 4, 5]));
    assert_eq!((found.min, found.max), (Some(1), Some(2)));
}

#[test]
fn ports_have_defaults() {
    let text = "[[switch]]\nname='lan'\n[[vm]]\nname='v'\n[[vm.net]]\nname='n'\nswitch='lan'\n\
                [[vm.disk]]\nname='d'\nformat='memory'\nsize='1MiB'\nmode='dial'\n";
    let config = parse(Path::new("m.toml"), text).unwrap();
    let (net, disk) = (&config.vms[0].nets[0], &config.vms[0].disks[0]);
    assert_eq!((net.mtu, net.queue_pairs, net.bind), (1500, 1, BindMode::MacAndIp));
    assert!(net.offloads && net.packed);
    assert_eq!(net.endpoint.socket, PathBuf::from("/run/millrace/v-n.sock"));
    assert_eq!(net.endpoint.mode, SocketMode::Listen);
    assert_eq!(disk.format, DiskFormat::Memory { len_bytes: 1 << 20 });
    assert_eq!((disk.block_size, disk.endpoint.mode), (BlockSize::Bytes(512), SocketMode::Dial));
    assert_eq!(disk.on_error, OnError::Enospc);
    // What QEMU asks for goes by the VM's CPUs (B1).
    assert_eq!(disk.queues, base::limits::MAX_DISK_QUEUES);
    assert_eq!(disk.seg_max, 126);
    for (word, on_error) in
        [("enospc", OnError::Enospc), ("hold", OnError::Hold), ("report", OnError::Report)]
    {
        let text = format!("{text}on_error='{word}'\n");
        let config = parse(Path::new("m.toml"), &text).unwrap();
        assert_eq!(config.vms[0].disks[0].on_error, on_error);
        assert_eq!(serde_json::to_value(on_error).unwrap(), word);
    }
    let error = parse(Path::new("m.toml"), &format!("{text}on_error='stop'\n")).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("on_error") && error.contains("\"stop\" is unknown"), "{error}");
}

#[test]
fn abuse_V11_the_memory_of_a_vm_has_a_limit_if_one_is_given() {
    let vm = |line: &str| format!("[[vm]]\nname='v'\n{line}\n");
    let limit = |line: &str| {
        parse(Path::new("m.toml"), &vm(line)).unwrap().vms.remove(0).memory_limit_bytes
    };
    for (line, bytes) in [
        ("", None),
        ("memory_limit='8GiB'", Some(8 << 30)),
        ("memory_limit='1MiB'", Some(1 << 20)),
        ("memory_limit=1048577", Some((1 << 20) + 1)),
        ("memory_limit='16TiB'", Some(16 << 40)),
    ] {
        assert_eq!(limit(line), bytes, "{line}");
    }
    let shown =
        serde_json::to_value(parse(Path::new("m.toml"), &vm("memory_limit='8GiB'")).unwrap());
    assert_eq!(shown.unwrap()["vm"][0]["memory_limit"], 8u64 << 30);
    let place = "m.toml:3:14: vm[0].memory_limit:";
    for (written, words) in [
        ("0", "is 0 bytes; 1 MiB to 16 TiB; give what the VM has, hot-plugged memory included"),
        ("'1023KiB'", "is 1047552 bytes; 1 MiB to 16 TiB"),
        ("'17TiB'", "is 18691697672192 bytes; 1 MiB to 16 TiB"),
        ("'8GB'", "\"8GB\" is no size"),
        ("'99999999999TiB'", "is no size"),
        ("-1", "is -1"),
        ("true", "\"64MiB\""),
        ("['8GiB']", "\"64MiB\""),
    ] {
        expect(&vm(&format!("memory_limit={written}")), &[(place, words)]);
    }
}

#[test]
fn a_block_size_is_a_number_or_auto() {
    let with = |size: &str| {
        let text = format!(
            "[[vm]]\nname='v'\n[[vm.disk]]\nname='d'\nformat='raw'\npath='/i'\nblock_size={size}\n"
        );
        parse(Path::new("m.toml"), &text)
    };
    for (written, is) in [("'auto'", BlockSize::AUTO), ("4096", BlockSize::Bytes(4096))] {
        let disk = with(written).unwrap().vms[0].disks[0].clone();
        assert_eq!(disk.block_size, is);
        // As it is written in the list of attached ports.
        assert_eq!(serde_json::to_string(&is).unwrap().replace('"', "'"), written);
    }
    let text = with("'large'").unwrap_err().to_string();
    assert!(text.contains("auto"), "{text}");
}

/// A VM with all that pipes need.
fn piped(pipes: &str) -> String {
    format!(
        "[[switch]]\nname='lan'\n[[vm]]\nname='v'\n[[vm.net]]\nname='n'\nswitch='lan'\n\
         [vm.vsock]\ncid=3\npath='/v'\n{pipes}"
    )
}

#[test]
fn pipes_are_there_when_their_table_is() {
    let pipes = |text: &str| {
        let config = parse(Path::new("m.toml"), &piped(text)).unwrap_or_else(|e| panic!("{e}"));
        (
            config.vms[0].pipes.clone(),
            serde_json::to_value(&config).unwrap()["vm"][0]["pipes"].clone(),
        )
    };
    assert_eq!(pipes(""), (None, serde_json::Value::Null));
    let json = |max: u32, threads: u32| serde_json::json!({"max": max, "threads": threads});
    for (text, max, threads) in [
        ("[vm.pipes]", 256, 4),
        ("[vm.pipes]\nmax=1\nthreads=1", 1, 1),
        ("[vm.pipes]\nmax=4096\nthreads=64", 4096, 64),
    ] {
        let wanted = PipesConfig { max, threads, secret: None };
        assert_eq!(pipes(text), (Some(wanted), json(max, threads)), "{text}");
    }
}

/// A config that is good stays good: a port that is detached takes no other VM's attach with it.
#[test]
fn ports_that_pipes_need_come_and_go_at_run_time() {
    let mut config = parse(Path::new("m.toml"), &piped("[vm.pipes]\nmax=9")).unwrap();
    let before = config.clone();
    let vsock = config.detach("v", "vsock").unwrap();
    config.detach("v", "n").unwrap();
    let disk = serde_json::json!({"disk": {"name": "d", "format": "null", "size": 512}});
    config.attach("w", &disk).unwrap();
    config.attach("v", &disk).unwrap();
    let pipes = config.vms[0].pipes.as_ref().unwrap();
    assert_eq!((pipes.max, pipes.threads), (9, 4));
    config.detach("w", "d").unwrap();
    config.detach("v", "d").unwrap();
    config.attach("v", &serde_json::json!({"net": {"name": "n", "switch": "lan"}})).unwrap();
    let body = serde_json::to_value(AttachBody { port: &vsock, trust_domain: None, weight: 100 });
    config.attach("v", &body.unwrap()).unwrap();
    assert_eq!(config, before);
    // Not of a request: what a VM may do is the files' matter.
    let body = serde_json::json!({"disk": disk["disk"], "pipes": {}});
    assert!(config.attach("v", &body).unwrap_err().to_string().contains("pipes"));
}

fn write(dir: &Path, files: &[(&str, &str)]) -> PathBuf {
    fs::create_dir_all(dir.join("m.d")).unwrap();
    for (name, text) in files {
        fs::write(dir.join(name), text).unwrap();
    }
    dir.join("m.toml")
}

fn load_files(files: &[(&str, &str)]) -> Result<Config, Problems> {
    let dir = tempfile::tempdir().unwrap();
    load(&write(dir.path(), files))
}

#[test]
fn drop_ins_add_entries_and_override_scalars() {
    let config = load_files(&[
        ("m.toml", "[daemon]\nlog='info'\nrun_dir='/a'\n[sidecore]\ncpus=[1,2]\n[[vm]]\nname='a'"),
        ("m.d/20-late.toml", "[daemon]\nlog='error'\n[[vm]]\nname='c'"),
        ("m.d/10-early.toml", "[daemon]\nlog='debug'\n[sidecore]\ncpus=[3]\n[[vm]]\nname='b'"),
        ("m.d/README", "not TOML and not read"),
    ])
    .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.daemon.log, "error");
    assert_eq!(config.daemon.run_dir, PathBuf::from("/a"));
    assert_eq!(config.sidecore.placement, Placement::Cpus(vec![3]));
    let names: Vec<&str> = config.vms.iter().map(|v| v.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

#[test]
fn problems_of_all_files_are_told_in_their_order() {
    let problems = load_files(&[
        ("m.toml", "[[vm]]\nname='a'\nweight=0"),
        ("m.d/10.toml", "[[vm]]\nname='a'"),
        ("m.d/20.toml", "[daemon]\nlog='x'\nlogg='y'"),
    ])
    .unwrap_err();
    let places: Vec<String> = problems
        .problems
        .iter()
        .map(|p| {
            let at = p.location.as_ref().unwrap();
            format!("{}:{}:{}", at.file.file_name().unwrap().display(), at.line, at.column)
        })
        .collect();
    assert_eq!(places, ["m.toml:3:8", "10.toml:2:6", "20.toml:2:5", "20.toml:3:1"]);
}

#[test]
fn files_that_cannot_be_read_are_problems() {
    let missing = load(Path::new("/nonexistent/m.toml")).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/m.toml") && missing.contains("--config"), "{missing}");
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), &[]);
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("not UTF-8"));
    fs::write(&path, "#".repeat((1 << 20) + 1)).unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("larger than 1048576"));
}

/// A user who may write the config decides what root's daemon opens.
#[test]
fn abuse_O6_what_every_user_may_write_is_no_config() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let main = write(dir.path(), &[("m.toml", "[[vm]]\nname='a'"), ("m.d/a.toml", "")]);
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let refused = |path: &Path, bad, good, words: &str| {
        set(path, bad);
        let told = load(&main).unwrap_err().to_string();
        assert!(told.contains(&format!("{words} {}", path.display())), "{told}");
        assert!(told.contains(&format!("run `chmod o-w {}`", path.display())), "{told}");
        set(path, good);
        load(&main).unwrap();
    };
    // A group of administrators may write it.
    refused(&main, 0o646, 0o664, "anybody may write");
    refused(&dir.path().join("m.d/a.toml"), 0o666, 0o644, "anybody may write");
    refused(&dir.path().join("m.d"), 0o1777, 0o755, "anybody may add drop-ins to");
    // As in /tmp, files of others are safe in a folder with the sticky bit.
    refused(dir.path(), 0o777, 0o1777, "anybody may replace files in");
}
