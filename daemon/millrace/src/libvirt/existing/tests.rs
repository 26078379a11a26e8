//! Domains before and after, and those that are refused.

use super::*;

const OWN: &str = include_str!("../golden/own.xml");
const CHANGED: &str = include_str!("../golden/own-changed.xml");
const CONFIG: &str = r#"
[[switch]]
name = "lan"
[[vm]]
name = "own"
[[vm.net]]
name = "net0"
switch = "lan"
[[vm.disk]]
name = "root"
format = "qcow2"
path = "/var/lib/libvirt/images/own.qcow2"
queues = 2
[[vm.disk]]
name = "scratch"
format = "memory"
size = "64MiB"
"#;

/// The domain `text` with the ports of that VM, whose config has `new` in place of `old`.
fn put(text: &str, (old, new): (&str, &str)) -> Result<String, String> {
    assert!(CONFIG.contains(old));
    let config = CONFIG.replacen(old, new, 1);
    let config = config::parse(Path::new("m.toml"), &config).unwrap();
    write(&config.vms[0], text).map_err(|e| format!("{e:#}"))
}

const AS_IT_IS: (&str, &str) = ("", "");

#[test]
fn ports_take_the_places_of_devices() {
    let changed = put(OWN, AS_IT_IS).unwrap();
    assert_eq!(changed, CHANGED, "{changed}");
}

#[test]
fn a_second_time_changes_nothing() {
    assert_eq!(put(CHANGED, AS_IT_IS).unwrap(), CHANGED);
    let emulated = put(&OWN.replace("'kvm'", "'qemu'"), AS_IT_IS).unwrap();
    assert_eq!(put(&emulated, AS_IT_IS).unwrap(), emulated);
}

#[test]
fn an_emulated_domain_gets_properties_of_its_cards() {
    let changed = put(&OWN.replace("'kvm'", "'qemu'"), AS_IT_IS).unwrap();
    let start = format!("<domain xmlns:qemu='{QEMU_SPACE}' type='qemu'>");
    assert!(changed.starts_with(&start), "{changed}");
    let end = changed.split_once("</devices>").unwrap().1;
    assert!(end.contains("<qemu:device alias='ua-net0'>"), "{changed}");
    assert!(end.ends_with("  </qemu:override>\n</domain>\n"), "{changed}");
}

/// The emulated domain with this inside of its override.
fn overriding(inside: &str) -> String {
    let head = format!("<domain type='qemu' xmlns:qemu='{QEMU_SPACE}'>");
    let own = OWN.replace("<domain type='kvm'>", &head);
    own.replace("</domain>", &format!("  <qemu:override>{inside}</qemu:override>\n</domain>"))
}

#[test]
fn an_override_is_added_to() {
    for inside in ["", "\n    <qemu:device alias='ua-other'/>\n  "] {
        let changed = put(&overriding(inside), AS_IT_IS).unwrap();
        assert_eq!(changed.matches("<qemu:override>").count(), 1, "{changed}");
        assert!(changed.contains(inside.trim()), "{changed}");
        assert_eq!(changed.matches("alias='ua-net0'>").count(), 1, "{changed}");
        assert_eq!(put(&changed, AS_IT_IS).unwrap(), changed);
    }
    // One of two cards has a property.
    let second = "switch = \"lan\"\n[[vm.net]]\nname = \"wide\"\nswitch = \"lan\"\nmtu = 9000";
    let two = |text: &str| put(text, ("switch = \"lan\"", second)).unwrap();
    let changed = two(OWN);
    assert_eq!(changed.matches("<qemu:device").count(), 1, "{changed}");
    assert_eq!(two(&changed), changed);
    for alias in ["net0", "net1", "virtio-disk0"] {
        let told = put(&overriding(&format!("<qemu:device alias='{alias}'/>")), AS_IT_IS);
        let told = told.unwrap_err();
        assert!(told.contains(&format!("has properties of device {alias},")), "{told}");
    }
    assert!(put(&overriding("<qemu:device alias='virtio-disk1'/>"), AS_IT_IS).is_ok());
    let remark = put(&overriding("<!-- mine -->"), AS_IT_IS).unwrap();
    assert!(remark.contains("<!-- mine -->") && remark.contains("alias='ua-net0'>"), "{remark}");
}

#[test]
fn an_override_of_a_port_is_as_the_port_needs_it() {
    let entry = |properties: &str| {
        let front = format!("<qemu:frontend>{properties}</qemu:frontend>");
        overriding(&format!("<qemu:device alias='ua-net0'>{front}</qemu:device>"))
    };
    let vectors = "<qemu:property name='vectors' type='unsigned' value='0'/>";
    let mtu = "<qemu:property name='host_mtu' type='unsigned' value='9000'/>";
    let own = "<qemu:property name='mrg_rxbuf' type='bool' value='false'/>";
    let wide = ("switch = \"lan\"", "switch = \"lan\"\nmtu = 9000");
    assert!(put(&entry(&format!("{vectors}{own}")), AS_IT_IS).unwrap().contains("mrg_rxbuf"));
    assert!(put(&entry(&format!("{vectors}{mtu}")), wide).is_ok());
    let told = put(&entry(vectors), wide).unwrap_err();
    assert!(told.starts_with("port net0 needs host_mtu 9000"), "{told}");
    let told = put(&entry(mtu), wide).unwrap_err();
    assert!(told.starts_with("port net0 needs vectors 0"), "{told}");
    let told = put(&entry(&format!("{vectors}{mtu}")), AS_IT_IS).unwrap_err();
    assert!(told.contains("an MTU of 9000, and the config one of 1500"), "{told}");
}

#[test]
fn ports_keep_their_own_devices() {
    // Sockets that have changed their ports.
    let swap = |text: &str| {
        let text = text.replace("own-root.sock", "own-x.sock");
        text.replace("own-scratch.sock", "own-root.sock").replace("own-x.sock", "own-scratch.sock")
    };
    assert_eq!(put(&swap(CHANGED), AS_IT_IS).unwrap(), CHANGED);
    // One that was put in by hand.
    let by_hand = CHANGED.replace("      <alias name='ua-net0'/>\n", "");
    assert_eq!(put(&by_hand, AS_IT_IS).unwrap(), CHANGED);
    let pairs = ("switch = \"lan\"", "switch = \"lan\"\nqueue_pairs = 2");
    assert!(put(CHANGED, pairs).unwrap().contains("<driver queues='2'/>"));
    let mac = ("switch = \"lan\"", "switch = \"lan\"\nmac = \"52:54:00:12:34:57\"");
    let told = put(CHANGED, mac).unwrap_err();
    assert!(told.starts_with("port net0 has the mac 52:54:00:12:34:57 in the config"), "{told}");
    let renamed = put(CHANGED, ("\"net0\"", "\"lan0\"")).unwrap_err();
    let start = "card 52:54:00:12:34:56 is on /run/millrace/own-net0.sock, a socket that no port";
    assert!(renamed.starts_with(start), "{renamed}");
    let renamed = put(CHANGED, ("\"root\"", "\"boot\"")).unwrap_err();
    assert!(renamed.starts_with("disk vda is on /run/millrace/own-root.sock"), "{renamed}");
    // Another back end's.
    let other = CHANGED.replace("/run/millrace/own-scratch.sock", "/run/other/disk.sock");
    let other = other.replace("ua-scratch", "ua-other");
    assert!(put(&other, AS_IT_IS).unwrap().contains("/run/other/disk.sock"));
    // An image that is there a second time.
    let again = "<memballoon model='virtio'/>\n    <disk type='file' device='disk'>\
                 <source file='/var/lib/libvirt/images/own.qcow2'/><target dev='vdc'/></disk>";
    let told = put(&CHANGED.replace("<memballoon model='virtio'/>", again), AS_IT_IS).unwrap_err();
    assert_eq!(told, "disk vdc has the image of port root, too");
}

#[test]
fn a_port_with_another_socket_stays_where_it_is() {
    let moved = CHANGED.replace("/run/millrace/own-", "/run/before/own-");
    assert_eq!(put(&moved, AS_IT_IS).unwrap(), CHANGED);
}

#[test]
fn memory_and_blocks_are_as_the_config_has_them() {
    let limit = |size| ("name = \"own\"", format!("name = \"own\"\nmemory_limit = \"{size}\""));
    let put_limited = |size, text: &str| put(text, (limit(size).0, &limit(size).1));
    assert!(put_limited("2GiB", OWN).is_ok());
    let told = put_limited("1GiB", OWN).unwrap_err();
    assert!(told.starts_with("2048 MiB of memory are more than VM own may share"), "{told}");
    let more =
        OWN.replace("  <memory ", "  <maxMemory slots='2' unit='G'>4</maxMemory>\n  <memory ");
    assert!(put_limited("2GiB", &more).unwrap_err().starts_with("4096 MiB"));
    let memory = |inside: &str| {
        let start = OWN.find("<memory ").unwrap();
        let end = OWN.find("</memory>").unwrap();
        put(&format!("{}{inside}{}", &OWN[..start], &OWN[end..]), AS_IT_IS)
    };
    for fits in ["<memory>2097152", "<memory unit='gib'>2", "<memory unit='byte'>1"] {
        assert!(memory(fits).is_ok(), "{fits}");
    }
    let told = "<memory> of the domain is no size";
    for unfit in ["<memory unit='mile'>2", "<memory>", "<memory unit='E'>99", "<memory unit='ä'>2"]
    {
        assert_eq!(memory(unfit).unwrap_err(), told, "{unfit}");
    }
    let large = ("queues = 2", "block_size = 4096");
    let told = put(OWN, large).unwrap_err();
    assert_eq!(told, "disk vda has blocks of 512 bytes in the domain, and port root of 4096");
    let blocks = |more: &str| {
        let element = format!("<blockio logical_block_size='4096'{more}/>");
        put(&OWN.replacen("<backingStore/>", &element, 1), large)
    };
    assert!(!blocks("").unwrap().contains("blockio"));
    let told = blocks(" physical_block_size='8192'").unwrap_err();
    assert!(told.starts_with("disk vda has <blockio>"), "{told}");
    let auto = ("queues = 2", "block_size = \"auto\"");
    let usual = "<blockio logical_block_size='512'/>";
    assert!(put(&OWN.replacen("<backingStore/>", usual, 1), auto).is_ok());
}

#[test]
fn a_mac_address_names_the_card() {
    let mac = |mac| ("switch = \"lan\"", format!("switch = \"lan\"\nmac = \"{mac}\""));
    let (old, second) = mac("52:54:00:12:34:57");
    let changed = put(OWN, (old, &second)).unwrap();
    assert!(changed.contains("<source network='default'/>"), "{changed}");
    assert!(!changed.contains("<source bridge='br0'/>"), "{changed}");
    let (old, third) = mac("52:54:00:12:34:58");
    let told = put(OWN, (old, &third)).unwrap_err();
    assert!(told.starts_with("no card of the domain has the mac 52:54:00:12:34:58"), "{told}");
}

#[test]
fn memory_stays_in_huge_pages_and_becomes_shared() {
    let backing = |inside: &str| {
        let own =
            OWN.replace("  <vcpu", &format!("  <memoryBacking>{inside}</memoryBacking>\n  <vcpu"));
        let changed = put(&own, AS_IT_IS).unwrap();
        let (_, rest) = changed.split_once("<memoryBacking>").unwrap();
        let inside = rest.split_once("</memoryBacking>").unwrap().0;
        inside.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let shared = "<source type='memfd'/> <access mode='shared'/>";
    assert_eq!(backing("<hugepages/>"), format!("{shared} <hugepages/>"));
    let private = "<source type='anonymous'/><access mode='private'/><locked/>";
    assert_eq!(backing(private), format!("{shared} <locked/>"));
    let file = "<source type='file'/> <access mode='shared'/>";
    assert_eq!(backing(file), file);
}

#[test]
fn what_a_guest_would_find_changed_is_refused() {
    let told = |old, new| put(&OWN.replacen(old, new, 1), AS_IT_IS).unwrap_err();
    let sata = told("dev='vda' bus='virtio'", "dev='sdb' bus='sata'");
    assert!(sata.starts_with("disk sdb is a disk on bus \"sata\""), "{sata}");
    let raw = told("type='qcow2'", "type='raw'");
    assert_eq!(raw, "disk vda is \"raw\" in the domain, and port root is \"qcow2\"");
    let fixed = told("<backingStore/>", "<readonly/>");
    assert_eq!(fixed, "disk vda is read-only in the domain, and port root is not");
    let serial = told("<backingStore/>", "<serial>x</serial>");
    assert_eq!(serial, "disk vda has the serial \"x\" in the domain, and port root not");
    let card = told("<model type='virtio'/>", "<model type='e1000'/>");
    assert!(card.starts_with("card 52:54:00:12:34:56 is a \"e1000\""), "{card}");
    let mtu = told("<model type='virtio'/>", "<model type='virtio'/><mtu size='9000'/>");
    assert!(mtu.ends_with("an MTU of 9000 in the domain, and port net0 of 1500"), "{mtu}");
    let dial = put(OWN, ("queues = 2", "mode = \"dial\"")).unwrap_err();
    assert!(dial.starts_with("libvirt has no element for root"), "{dial}");
}

#[test]
fn nothing_is_lost_in_silence() {
    let told = |old: &str, new: &str| put(&OWN.replacen(old, new, 1), AS_IT_IS).unwrap_err();
    let model = "<model type='virtio'/>";
    for lost in ["<filterref filter='clean-traffic'/>", "<bandwidth/>", "<vlan/>", "<port/>"] {
        let name = lost.trim_matches(['<', '>', '/']).split(' ').next().unwrap();
        let told = told(model, &format!("{model}{lost}"));
        assert!(told.starts_with(&format!("card 52:54:00:12:34:56 has <{name}>")), "{told}");
    }
    for lost in ["<iotune/>", "<encryption/>", "<shareable/>", "<transient/>"] {
        let told = told("<backingStore/>", lost);
        assert!(told.starts_with(&format!("disk vda has {}", lost.replace("/>", ">"))), "{told}");
    }
    let slices = told("own.qcow2'/>", "own.qcow2'><slices/></source>");
    assert!(slices.starts_with("the source of disk vda has <slices>"), "{slices}");
    let cell = "<cpu><numa><cell id='0' memAccess='private'/></numa></cpu>\n  <os>";
    assert!(told("<os>", cell).contains("memAccess='private'"));
    let module = "<memory model='dimm' access='private'/><memballoon";
    assert!(told("<memballoon", module).contains("access='private'"));
    assert!(told("<os>", "<launchSecurity/><os>").contains("encrypted"));
    let driver = "<driver name='qemu' iommu='on'/>";
    assert!(told(model, &format!("{model}{driver}")).contains("iommu='on'"));
    let group = told("network='default'", "network='default' portgroup='a'");
    assert!(group.contains("group of ports"), "{group}");
    let ovs = told(model, &format!("{model}<virtualport type='openvswitch'/>"));
    assert!(ovs.contains("has <virtualport>"), "{ovs}");
    let below = "own.snap1'/><backingStore><source file='/var/lib/libvirt/images/own.qcow2'/>\
                 </backingStore>";
    let snapshot = told("own.qcow2'/>\n      <backingStore/>", below);
    assert!(snapshot.contains("lies below disk vda"), "{snapshot}");
    let pool = OWN.replacen("type='file'", "type='volume'", 1);
    let file = "file='/var/lib/libvirt/images/own.qcow2'";
    let pool = put(&pool.replacen(file, "pool='default' volume='own.qcow2'", 1), AS_IT_IS);
    assert!(pool.unwrap_err().contains("volume of a pool"));
}

#[test]
fn what_is_no_domain_is_told() {
    let told = |text: &str| put(text, AS_IT_IS).unwrap_err();
    assert!(told("<domain>").starts_with("the domain is not well-formed: "));
    assert!(told("<network/>").ends_with("its first element is network"));
    assert_eq!(told("<domain/>"), "the domain has no devices");
    assert!(told("<!DOCTYPE d [<!ENTITY a 'a'>]><domain/>").contains("not well-formed"));
    assert!(told(&" ".repeat(MAX_DOMAIN_BYTES + 1)).ends_with("the limit is 1048576"));
}
