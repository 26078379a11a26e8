//! Two guests of one side: one puts on the load, one answers.

use std::path::Path;
use std::time::Duration;

use lab::{Daemon, Disk, Guest, GuestBuilder, ImageBuilder, Lab, Net, Vm, Vsock};

use super::{CLIENT, DISK_LEN_BYTES, SERVER};
use crate::harness::error::BenchError;
use crate::harness::fleet::{Ground, qemu_disk, serve};

/// Time for a guest to boot, on a busy machine.
const READY: Duration = Duration::from_secs(60);
/// Memory of a guest: fio comes with 90 MB of libraries, and they are in memory twice while the
/// image unpacks, in a file system that may take half of it.
const MEMORY_MB: u32 = 384;

/// Descriptors of a disk's ring, and segments of a request: those that QEMU's own virtio-blk has
/// unless told otherwise. With fewer, a guest cuts a request of 1 MiB in more parts.
const QUEUE_SIZE: u32 = 256;
const SEG_MAX: u32 = QUEUE_SIZE - 2;

/// Base that both sides share.
pub struct Base<'a> {
    /// Session, kernel and disks.
    pub ground: Ground<'a>,
    /// Image of all guests.
    pub image: &'a ImageBuilder,
}

/// The guests of one side.
pub struct Pair {
    /// Puts on the load.
    pub client: Guest,
    /// Answers it.
    pub server: Guest,
}

impl Base<'_> {
    fn guest(&self, name: &str, address: impl std::fmt::Display, net: Net) -> GuestBuilder {
        Guest::builder(name)
            .kernel(self.ground.kernel)
            .image(self.image.clone())
            .memory_mb(MEMORY_MB)
            .net(net)
            .address(format!("{address}/24"))
    }

    fn start(&self, guest: GuestBuilder) -> Result<Guest, BenchError> {
        guest.start(self.ground.lab).map_err(|e| BenchError::lab("boot a guest", e))
    }
}

impl Pair {
    /// Waits until both guests answer, and starts what the loads talk to.
    pub fn wait_ready(&self) -> Result<(), BenchError> {
        for guest in [&self.client, &self.server] {
            let failed = |e| BenchError::lab(format!("boot guest {}", guest.name()), e);
            guest.wait_ready(READY).map_err(failed)?;
        }
        self.start_servers()
    }

    /// Ends both guests at once, whatever they do.
    pub fn kill(&self) {
        self.client.kill();
        self.server.kill();
    }

    fn start_servers(&self) -> Result<(), BenchError> {
        ["agent rr-server", "agent sink"].iter().try_for_each(|tool| serve(&self.server, tool))
    }

    /// The QEMU processes, and threads of the kernel that serve their network.
    pub fn pids(&self) -> Vec<u32> {
        let qemu = [self.client.pid(), self.server.pid()];
        qemu.into_iter().chain(qemu.into_iter().flat_map(lab::vhost_threads)).collect()
    }
}

/// Guests of a peer on QEMU's own devices: TAPs of a bridge, virtio-blk on a file.
pub struct Peer {
    bridge: &'static str,
    /// Names of the guests, and of their TAP devices.
    guests: [(&'static str, &'static str); 2],
    net: fn(&'static str) -> Net,
}

/// QEMU serves the network.
pub const TAP: Peer =
    Peer { bridge: "br0", guests: [("peer-a", "tap0"), ("peer-b", "tap1")], net: Net::tap };
/// The host's kernel serves it.
pub const VHOST: Peer =
    Peer { bridge: "br1", guests: [("vhost-a", "tap2"), ("vhost-b", "tap3")], net: Net::tap_vhost };

impl Peer {
    /// Makes the bridge with the TAP devices.
    pub fn bridge(&self, lab: &Lab) -> Result<(), BenchError> {
        let (net, bridge) = (lab.net(), self.bridge);
        net.bridge(bridge).map_err(|e| BenchError::lab("make the bridge", e))?;
        for (_, tap) in self.guests {
            net.tap(tap, Some(bridge)).map_err(|e| BenchError::lab(format!("make {tap}"), e))?;
        }
        Ok(())
    }

    /// Starts the guests on [`bridge`](Self::bridge).
    pub fn start(&self, base: &Base) -> Result<Pair, BenchError> {
        let boot = |(name, tap): (&str, &'static str), address: std::net::Ipv4Addr| {
            let image = base.ground.disks.image(&format!("{name}.raw"), DISK_LEN_BYTES)?;
            base.start(base.guest(name, address, (self.net)(tap)).disk(qemu_disk(&image)))
        };
        Ok(Pair { client: boot(self.guests[0], CLIENT)?, server: boot(self.guests[1], SERVER)? })
    }
}

/// Names of our guests, in the daemon's configuration as well.
const OURS: [&str; 2] = ["our-a", "our-b"];

/// The daemon with the ports of both guests: one switch, disks on files, vsock.
pub fn daemon(base: &Base, program: &Path) -> Result<Daemon, BenchError> {
    let mut daemon = Daemon::builder("d").binary(program).switch("lan", "");
    for (name, cid) in OURS.into_iter().zip(3..) {
        let path = base.ground.disks.image(&format!("{name}.raw"), DISK_LEN_BYTES)?;
        let disk = format!(
            "format = \"raw\"\npath = {:?}\ndirect = true\nseg_max = {SEG_MAX}",
            path.display()
        );
        let vm = Vm::new(name, "trust_domain = \"demo\"");
        daemon = daemon.vm(vm.net("net0", "switch = \"lan\"").disk("disk0", &disk).vsock(cid));
    }
    daemon.start(base.ground.lab).map_err(|e| BenchError::lab("start the daemon", e))
}

/// Guests on Millrace's devices.
pub fn millrace(base: &Base, daemon: &Daemon) -> Result<Pair, BenchError> {
    let boot = |name: &str, address: std::net::Ipv4Addr| {
        let net = Net::vhost_user(daemon.socket(name, "net0")).into();
        let mut disk = Disk::vhost_user(daemon.socket(name, "disk0"));
        disk.properties.push(format!("queue-size={QUEUE_SIZE}"));
        let vsock = Vsock::vhost_user(daemon.socket(name, "vsock"));
        base.start(base.guest(name, address, net).disk(disk).vsock(vsock).aligned_memory())
    };
    Ok(Pair { client: boot(OURS[0], CLIENT)?, server: boot(OURS[1], SERVER)? })
}

/// QEMU's version, as it says.
pub fn qemu_version(guest: &Guest) -> Result<String, BenchError> {
    let failed = |e| BenchError::lab("ask QEMU's version", e);
    let answer = guest.qmp("query-version", serde_json::json!({})).map_err(failed)?;
    let part = |name: &str| answer["qemu"][name].as_u64().unwrap_or_default();
    Ok(format!("QEMU {}.{}.{}", part("major"), part("minor"), part("micro")))
}
