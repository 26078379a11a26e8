//! Guests whose drivers are not those of today's Linux: an old kernel, DPDK in a guest, and drivers
//! without an operating system.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use lab::{Disk, Guest, Image, ImageBuilder, KernelChoice, Lab, Net, Vm, Vsock};

use crate::common::{
    MIB, READY, alone, amount, boot, daemon, transfer, transfer_from_host, transfer_to_host, until,
};

/// A switch with a way to the host's namespace.
const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\n";
const HOST: &str = "10.0.0.254/24";

/// A VM with a port on a switch `lan`, a disk and vsock.
fn vm_with_all(disk: &str) -> Vm {
    Vm::new("a", "").net("n", "switch = \"lan\"").disk("d", disk).vsock(11)
}

fn host_address(lab: &Lab) {
    lab.net().address("up0", HOST).unwrap();
}

#[test]
fn the_oldest_kernel_of_debian_uses_every_device() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let disk = "format = \"memory\"\nsize = \"64MiB\"";
    let daemon = daemon("d").switch("lan", UPLINK).vm(vm_with_all(disk)).start(&lab).unwrap();
    host_address(&lab);
    let guest = Guest::builder("a")
        .kernel(KernelChoice::V5_10)
        .net(Net::vhost_user(daemon.socket("a", "n")))
        .address("10.0.0.1/24")
        .disk(Disk::vhost_user(daemon.socket("a", "d")))
        .vsock(Vsock::vhost_user(daemon.socket("a", "vsock")));
    let [guest] = boot(&lab, [guest]);
    assert!(guest.release().starts_with("5.10."), "{}", guest.release());

    guest.sh("ping -c 3 10.0.0.254").unwrap();
    let len_bytes = amount(512 * MIB);
    let host = ("tcp", "10.0.0.254:7002");
    transfer_to_host(&guest, host, host, len_bytes, |run| lab.net().inside(run).unwrap());
    transfer_from_host(&guest, ("tcp", "10.0.0.1"), len_bytes, |content| {
        let send = || lab_agent::tools::xfer::run("send", "tcp", "connect", "10.0.0.1", content);
        lab.net().inside(send).unwrap().unwrap().json()
    });
    let written = guest.sh("dd if=/dev/urandom of=/tmp/r bs=1M count=16 2>/dev/null && \
         dd if=/tmp/r of=/dev/vda bs=64k seek=16 conv=fsync 2>/dev/null && \
         echo 3 > /proc/sys/vm/drop_caches && sha256sum < /tmp/r && \
         dd if=/dev/vda bs=64k skip=16 count=256 2>/dev/null | sha256sum");
    let written = written.unwrap();
    let (wrote, read) = written.split_once('\n').unwrap();
    assert_eq!(wrote, read);
    let socket = format!("{}_9001", daemon.vsock_path("a").display());
    transfer_to_host(&guest, ("unix", &socket), ("vsock", "2:9001"), len_bytes, |run| run());
}

/// Size of the disk of the guest without an operating system, and of its requests.
const FOREIGN_BYTES: u64 = 16 * MIB;
const BLOCK_BYTES: usize = 9 * 512;
/// Echoes that the host asks for.
const ECHOES: u32 = 300;

/// Sum that the guest says of the first half, as `test/lab/foreign/src/disk.rs` sums it.
fn sum(block: usize, data: &[u8]) -> u64 {
    let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    data.iter().fold(block as u64, mix)
}

/// Bytes that the guest writes into a block of the second half.
fn content(block: usize) -> Vec<u8> {
    let mut state = block as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..BLOCK_BYTES).map(|_| next()).collect()
}

/// Sends back what one connection brings.
fn echo(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        // The guest's end is a reset, or the test's end.
        while let Ok(len @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
    });
}

/// Waits for a line of the guest's report, and fails with all of it when the guest has ended.
fn report(guest: &Guest, line: &str) -> String {
    let mut said = String::new();
    until(line, || {
        said = guest.console_tail(usize::MAX);
        assert!(guest.is_running(), "{said}");
        said.contains(line)
    });
    said
}

#[test]
fn drivers_without_an_operating_system_use_every_device() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let image = lab.path("disk.img");
    let disk: Vec<u8> = (0..FOREIGN_BYTES / 8).flat_map(|n| (n * n).to_le_bytes()).collect();
    std::fs::write(&image, &disk).unwrap();
    let port = format!("format = \"raw\"\nserial = \"mill\"\npath = {image:?}");
    let daemon = daemon("d").switch("lan", UPLINK).vm(vm_with_all(&port)).start(&lab).unwrap();
    host_address(&lab);
    echo(Path::new(&format!("{}_9001", daemon.vsock_path("a").display())));
    let guest = Guest::builder("a")
        .program(lab::foreign(lab.cache()).unwrap())
        .net(Net::vhost_user(daemon.socket("a", "n")))
        .disk(Disk::vhost_user(daemon.socket("a", "d")))
        .vsock(Vsock::vhost_user(daemon.socket("a", "vsock")));
    let guest = guest.start(&lab).unwrap();

    let said = report(&guest, "foreign: disk done");
    let blocks: Vec<&[u8]> = disk.chunks_exact(BLOCK_BYTES).collect();
    let half = blocks.len() / 2;
    let sums = blocks[..half].iter().enumerate().map(|(block, data)| sum(block, data));
    let sum = sums.fold(0, u64::wrapping_add);
    assert!(said.contains(&format!("read sum {sum:016x}")), "{said}");
    assert!(said.contains("serial Ok(\"mill"), "{said}");
    let now = std::fs::read(&image).unwrap();
    for (block, data) in now.chunks_exact(BLOCK_BYTES).enumerate().skip(half) {
        assert!(data == content(block), "block {block} differs");
    }
    assert!(now[..half * BLOCK_BYTES] == disk[..half * BLOCK_BYTES]);

    report(&guest, "foreign: card");
    let count = ECHOES.to_string();
    let ping = ["ping", "-A", "-q", "-W", "30", "-s", "1400", "-c", &count, "10.0.0.9"];
    let pinged = lab.net().command("busybox").args(ping).output().unwrap();
    assert!(pinged.status.success(), "{}", String::from_utf8_lossy(&pinged.stdout));
    let said = report(&guest, &format!("foreign: {ECHOES} echoes"));
    assert!(said.contains("foreign: vsock done"), "{said}");
}

/// Libraries that testpmd loads by their names; the last one as it ends.
const LIBRARIES: [&str; 4] = [
    "librte_bus_pci.so.23",
    "librte_mempool_ring.so.23",
    "librte_net_virtio.so.23",
    "libgcc_s.so.1",
];
/// Takes both cards from Linux's driver and gives them to DPDK's.
const TAKE_CARDS: &str = "\
    mkdir -p /dev/hugepages /var/run && mount -t hugetlbfs none /dev/hugepages && \
    echo 96 > /proc/sys/vm/nr_hugepages && modprobe uio_pci_generic && \
    for card in eth0 eth1; do \
        place=$(basename $(dirname $(readlink -f /sys/class/net/$card/device))) && \
        cd /sys/bus/pci/devices/$place && echo $place > driver/unbind && \
        echo uio_pci_generic > driver_override && echo $place > /sys/bus/pci/drivers_probe && \
        readlink driver || exit 1; \
    done";
/// Both of its threads are on the guest's only CPU.
const TESTPMD: &str = "\
    mkfifo /tmp/in && exec 3<>/tmp/in && \
    dpdk-testpmd --lcores=0@0,1@0 -d librte_bus_pci.so.23 -d librte_mempool_ring.so.23 \
        -d librte_net_virtio.so.23 -- -i --forward-mode=io --total-num-mbufs=4096 <&3";

fn dpdk_image() -> ImageBuilder {
    let tools = Image::builder().program("dpdk-testpmd").module("uio_pci_generic");
    LIBRARIES
        .iter()
        .fold(tools, |image, library| image.program(format!("/usr/lib/x86_64-linux-gnu/{library}")))
}

/// The sum of the numbers behind a word in the tables of testpmd's cards.
///
/// A card counts from its start. What forwarding counts leaves out a frame, say Linux's search for
/// a router, that came before or after it.
fn counted(text: &str, word: &str) -> u64 {
    let tables = text.split("NIC statistics for port").skip(1);
    let number = |table: &str| {
        let (_, rest) = table.split_once(word).expect(text);
        rest.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    tables.map(number).sum()
}

/// Frames of two Linux guests, on a switch each, pass a third guest, whose driver is DPDK's. It has
/// asked for no offloads: what Linux leaves to the card is done for it.
#[test]
fn dpdk_in_a_guest_forwards_between_two_ports() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let port = |switch: &str, more: &str| format!("switch = {switch:?}\n{more}");
    let (left, right, open) = ("left", "right", "bind = \"off\"");
    let between = Vm::new("r", "").net("n0", &port(left, open)).net("n1", &port(right, open));
    let daemon = daemon("d")
        .switch(left, "")
        .switch(right, "")
        .vm(Vm::new("a", "").net("n", &port(left, "")))
        .vm(Vm::new("b", "").net("n", &port(right, "")))
        .vm(between)
        .start(&lab)
        .unwrap();
    let linux = |name: &str, last: u8| {
        let guest = Guest::builder(name).net(Net::vhost_user(daemon.socket(name, "n")));
        guest.address(format!("10.0.0.{last}/24"))
    };
    let dpdk = Guest::builder("r").memory_mb(512).image(dpdk_image());
    let dpdk = ["n0", "n1"]
        .into_iter()
        .fold(dpdk, |guest, port| guest.net(Net::vhost_user(daemon.socket("r", port))));
    let [a, b, r] = boot(&lab, [linux("a", 1), linux("b", 2), dpdk]);

    r.sh(TAKE_CARDS).unwrap();
    let testpmd = r.spawn(TESTPMD).unwrap();
    r.sh("until [ -p /tmp/in ]; do :; done; echo start > /tmp/in").unwrap();
    until("frames pass", || a.run("ping -c 1 -W 1 10.0.0.2").unwrap().code == 0);
    transfer(&a, &b, "tcp", "10.0.0.2", amount(256 * MIB));
    transfer(&b, &a, "udp", "10.0.0.1", amount(256 * MIB));

    // No frame comes after the cards were asked, and a start reads those that wait.
    for guest in [&a, &b] {
        guest.sh("ip link set eth0 down").unwrap();
    }
    r.sh("printf 'stop\\nstart\\nshow port stats all\\nstop\\nquit\\n' > /tmp/in").unwrap();
    let output = testpmd.wait(READY).unwrap().ok().unwrap();
    let (received, sent) = (counted(&output, "RX-packets:"), counted(&output, "TX-packets:"));
    let queue = |queue: &str| {
        let labels = [("vm", "r"), ("queue", queue)];
        daemon.metric_sum("millrace_queue_requests_total", &labels).unwrap() as u64
    };
    // Queue 0 of a port receives, queue 1 sends.
    assert!(received > 2000, "{output}");
    assert_eq!((queue("0"), queue("1")), (received, sent), "{output}");
}
