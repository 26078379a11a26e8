//! Namespaces of pipes' twins, seen from the host: nothing leads from there to anybody else.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::pipe_world::World;

/// The namespaces of the daemon's twins, by what they are called.
fn namespaces(world: &World) -> BTreeMap<String, PathBuf> {
    let process = PathBuf::from(format!("/proc/{}", world.daemon.pid()));
    let own = fs::read_link(process.join("ns/net")).unwrap();
    let open = fs::read_dir(process.join("fd")).unwrap().flatten().map(|entry| entry.path());
    let of = |path: PathBuf| Some((fs::read_link(&path).ok()?, path));
    open.filter_map(of)
        .filter(|(link, _)| link.to_string_lossy().starts_with("net:[") && *link != own)
        .map(|(link, path)| (link.to_string_lossy().into_owned(), path))
        .collect()
}

fn inside<T: Send>(namespace: &Path, work: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(namespace).unwrap();
    thread::scope(|scope| {
        let enter = || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).unwrap();
            work()
        };
        scope.spawn(enter).join().unwrap()
    })
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}");
    String::from_utf8(output.stdout).unwrap()
}

/// A table of the thread's namespace, without its heading.
fn sockets(protocol: &str) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/thread-self/net/{protocol}")).unwrap();
    table.lines().skip(1).map(str::to_owned).collect()
}

/// Whether a line of a TCP table is in a state.
fn is_in(state: &str, line: &str) -> bool {
    line.split_whitespace().nth(3) == Some(state)
}

/// While `count` twins of the VMs with these addresses are at work: there is nothing but them, and
/// one way out.
pub fn are_alone(world: &World, vms: &[&str], count: usize) {
    const ESTABLISHED: &str = "01";
    const LISTEN: &str = "0A";
    let all = namespaces(world);
    assert_eq!(all.len(), vms.len(), "{all:?}");
    let mut found = 0;
    for namespace in all.values() {
        inside(namespace, || {
            has_one_way_out(vms);
            for protocol in ["udp", "udp6", "raw", "raw6", "packet"] {
                assert_eq!(sockets(protocol), Vec::<String>::new(), "{protocol}");
            }
            let tcp = [sockets("tcp"), sockets("tcp6")].concat();
            assert!(!tcp.iter().any(|line| is_in(LISTEN, line)), "{tcp:?}");
            found += tcp.iter().filter(|line| is_in(ESTABLISHED, line)).count();
        });
    }
    assert!(found >= count, "{found}");
}

/// Checks that the thread's namespace has one way out.
fn has_one_way_out(vms: &[&str]) {
    let up = ip("-o link show up");
    let names: Vec<_> = up.lines().filter_map(|line| line.split(": ").nth(1)).collect();
    assert_eq!(names, ["lo", "twin"]);
    let routes = ip("-4 route show table all") + &ip("-6 route show table all");
    let stays = |line: &str| line.contains("dev twin") || line.contains("dev lo");
    assert!(routes.lines().all(stays), "{routes}");
    let addresses = ip("-o addr show dev twin");
    let is_of_a_vm = |line: &str| vms.iter().any(|vm| line.contains(&format!("{vm}/")));
    assert!(addresses.lines().all(is_of_a_vm), "{addresses}");
    for setting in ["ipv4/ip_forward", "ipv4/conf/twin/forwarding", "ipv6/conf/all/forwarding"] {
        let value = fs::read_to_string(Path::new("/proc/sys/net").join(setting)).unwrap();
        assert_eq!(value, "0\n", "{setting}");
    }
}

/// Nor could anything else that ran there: what is no twin's does not pass the switch. `pipe` is
/// one of the VM with this address.
pub fn reach_nobody(world: &World, vm: &str, pipe: impl FnOnce()) {
    let listen = || {
        let listener = TcpListener::bind("10.0.0.254:0").unwrap();
        let datagrams = UdpSocket::bind(listener.local_addr().unwrap()).unwrap();
        (listener, datagrams)
    };
    let (listener, datagrams) = world.lab.net().inside(listen).unwrap();
    let host = listener.local_addr().unwrap();
    let mut tried = 0;
    for namespace in namespaces(world).values() {
        inside(namespace, || {
            if ip("-o addr show dev twin").contains(&format!("{vm}/")) {
                knock(SocketAddr::new(vm.parse().unwrap(), 0), host);
                tried += 1;
            }
        });
    }
    assert_eq!(tried, 1);
    // Goes the same way behind it.
    pipe();
    listener.set_nonblocking(true).unwrap();
    datagrams.set_nonblocking(true).unwrap();
    let nothing = Some(ErrorKind::WouldBlock);
    assert_eq!(listener.accept().err().map(|error| error.kind()), nothing);
    assert_eq!(datagrams.recv(&mut [0; 8]).err().map(|error| error.kind()), nothing);
}

/// Says something to an address, and begins to connect to it.
fn knock(from: SocketAddr, to: SocketAddr) {
    UdpSocket::bind(from).unwrap().send_to(b"hello", to).unwrap();
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::NONBLOCK, None).unwrap();
    rustix::net::bind(&socket, &from).unwrap();
    assert_eq!(rustix::net::connect(&socket, &to), Err(rustix::io::Errno::INPROGRESS));
}
