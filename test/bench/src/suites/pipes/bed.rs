//! The server VM, its neighbours, the daemon and the network.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use lab::{AGENT_SERVICE, Daemon, Disk, Guest, GuestBuilder, Image, Lab, Net, NetLab, Vm, Vsock};
use serde_json::json;

use super::meter::Meter;
use super::{Setup, reference};
use crate::harness::cpu::Accounts;
use crate::harness::error::BenchError;
use crate::harness::fleet::vcpus;
use crate::harness::folder::Folder;
use crate::harness::host::Thread;
use crate::harness::progress::Progress;

/// The server VM's name; it is in the daemon's counters.
const VM: &str = "srv";
/// File in which the agent writes its log.
const AGENT_LOG: &str = "/tmp/agent.log";
/// Address of the server VM.
pub const SERVER: &str = "10.0.0.1";
/// The client's.
const CLIENT: &str = "10.0.0.254";
/// Bytes of the disk besides its files: the file system's own.
const DISK_SPARE_BYTES: u64 = 64 << 20;
/// Memory of the server besides its files, which its page cache is to hold. Web servers with all
/// that they need are in it too.
const MEMORY_MB: u64 = 384;
/// Time for a guest to boot: up to four share a CPU.
const BOOT: Duration = Duration::from_secs(180);
/// Time for anything in the server's guest while it has the CPU.
const CALL: Duration = Duration::from_secs(300);
/// From when neighbours run again until the scheduler has noticed.
const SETTLE: Duration = Duration::from_millis(50);

/// Everything, running. It goes when this is dropped.
pub struct Bed {
    server: Guest,
    neighbours: Vec<Guest>,
    busy: Cell<usize>,
    daemon: Daemon,
    /// Address of the reference, and its thread.
    reference: (SocketAddr, Thread),
    lab: Lab,
    client_cpu: usize,
    vcpus: Vec<u32>,
    cores: u32,
    _far: NetLab,
    _disks: Folder,
}

impl Bed {
    /// Boots everything; no neighbour is busy.
    pub fn boot(setup: &Setup, progress: &mut Progress) -> Result<Bed, BenchError> {
        progress.step("preparing kernel, guest image and disks");
        let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
        let disks = Folder::new(&setup.out.join("pipes-disks"))?;
        let files_bytes = setup.file_bytes + setup.servers_files_bytes();
        let image = disks.image("disk.raw", files_bytes + files_bytes / 16 + DISK_SPARE_BYTES)?;
        let file = disks.image("reference", setup.file_bytes)?;
        progress.step("starting the daemon and the server");
        let daemon = daemon(&lab, setup, &image)?;
        let far = reference::namespace(lab.net(), "br0")?;
        let reference = reference::serve(&far, &file, setup.cpus.1)?;
        let guest = server(setup, &daemon, files_bytes);
        let server = start(guest, &lab)?;
        let most = setup.busy.iter().chain(&setup.servers_busy).max().copied().unwrap_or(0);
        let mut neighbours = Vec::new();
        for i in 0..most {
            progress.step(&format!("starting neighbour {} of {most}", i + 1));
            neighbours.push(neighbour(setup, &lab, i)?);
        }
        let vcpus = vcpus(&server)?;
        let cores = base::cpu::allowed_cpus().map_or(1, |c| c.len() as u32);
        let (busy, client_cpu) = (Cell::new(0), setup.cpus.1);
        let (_far, _disks) = (far, disks);
        let bed = Bed {
            server,
            neighbours,
            busy,
            daemon,
            reference,
            lab,
            client_cpu,
            vcpus,
            cores,
            _far,
            _disks,
        };
        bed.prepare()?;
        Ok(bed)
    }

    /// File system, agent.
    fn prepare(&self) -> Result<(), BenchError> {
        self.sh("mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt")?;
        let failed = |e| BenchError::lab("start the guest's agent", e);
        let script = format!("{AGENT_SERVICE} 2> {AGENT_LOG} & tail -F {AGENT_LOG}");
        let mut agent = self.server.spawn(&script).map_err(failed)?;
        // Dropping it afterwards leaves it running.
        agent.wait_line("connected", BOOT).map_err(failed)?;
        Ok(())
    }

    /// From how many bytes on pipes pay, as the agent has measured it: its own words.
    pub fn agents_threshold(&self) -> Result<String, BenchError> {
        Ok(self.sh(&format!("grep 'pay' {AGENT_LOG} || true"))?.trim().to_owned())
    }

    /// Makes a file in the guest.
    pub fn fill(&self, path: &str, bytes: u64) -> Result<(), BenchError> {
        self.sh(&format!("agent fill {path} {bytes}")).map(|_| ())
    }

    /// Runs a script in the server's guest; what it printed.
    pub fn sh(&self, script: &str) -> Result<String, BenchError> {
        let done = self.server.run_for(script, CALL).and_then(lab::Output::ok);
        done.map_err(|e| BenchError::lab(format!("{script} on {VM}"), e))
    }

    /// Writes a file in the guest.
    pub fn put(&self, path: &str, text: &str) -> Result<(), BenchError> {
        let done = self.server.put_bytes(path, 0o644, text.as_bytes());
        done.map_err(|e| BenchError::lab(format!("write {path} on {VM}"), e))
    }

    /// Starts a server in the guest and waits until it says that it listens.
    pub fn serve(&self, script: &str) -> Result<(), BenchError> {
        crate::harness::fleet::serve(&self.server, script)
    }

    /// Lets so many neighbours run, and stops the others.
    pub fn busy(&self, wanted: usize) -> Result<(), BenchError> {
        if wanted == self.busy.get() {
            return Ok(());
        }
        for (i, guest) in self.neighbours.iter().enumerate() {
            pause(guest, i >= wanted)?;
        }
        self.busy.set(wanted);
        std::thread::sleep(SETTLE);
        Ok(())
    }

    /// Network in which clients live.
    pub fn net(&self) -> &NetLab {
        self.lab.net()
    }

    /// Address on which the reference listens.
    pub fn reference(&self) -> SocketAddr {
        self.reference.0
    }

    /// The CPU of clients.
    pub fn client_cpu(&self) -> usize {
        self.client_cpu
    }

    /// Kernel of the guests, and QEMU.
    pub fn release(&self) -> &str {
        self.server.release()
    }

    /// A sum over the server's own samples of a counter of the daemon.
    pub fn counter(&self, name: &str) -> Result<f64, BenchError> {
        let sum = self.daemon.metric_sum(name, &[("vm", VM)]);
        sum.map_err(|e| BenchError::lab(format!("read {name}"), e))
    }

    /// Meter of the processes and threads to be measured.
    pub fn meter(&self) -> Meter {
        let (qemu, daemon) = (self.server.pid(), self.daemon.pid());
        let side = std::iter::once(qemu).chain(self.daemon.pids()).collect();
        let other = self.neighbours.iter().map(Guest::pid).collect();
        let accounts = Accounts { side, other, cores: self.cores, ..Accounts::default() };
        Meter { qemu, vcpus: self.vcpus.clone(), daemon, sender: self.reference.1, accounts }
    }
}

/// Stops a guest or lets it run on; its clock stands meanwhile.
fn pause(guest: &Guest, stop: bool) -> Result<(), BenchError> {
    let command = if stop { "stop" } else { "cont" };
    let done = guest.qmp(command, json!({}));
    done.map(|_| ()).map_err(|e| BenchError::lab(format!("{command} {}", guest.name()), e))
}

fn start(guest: GuestBuilder, lab: &Lab) -> Result<Guest, BenchError> {
    let booted = lab::boot(lab, [guest], BOOT);
    booted.map(|[guest]| guest).map_err(|e| BenchError::lab("boot a guest", e))
}

/// The daemon, with the switch's uplink in the client's bridge.
fn daemon(lab: &Lab, setup: &Setup, image: &Path) -> Result<Daemon, BenchError> {
    let net = lab.net();
    let failed = |e| BenchError::lab("make the client's bridge", e);
    net.bridge("br0").and_then(|()| net.address("br0", &format!("{CLIENT}/24"))).map_err(failed)?;
    // Through the host's page cache, as the pipe: nobody has a disk that the other has not.
    let disk = format!("format = \"raw\"\npath = {image:?}");
    let vm = Vm::new(VM, "")
        .net("net0", "switch = \"lan\"")
        .disk("disk0", &disk)
        .vsock(7)
        .more("[vm.pipes]\n");
    let daemon = Daemon::builder("pipes")
        .binary(&setup.millrace)
        .host_cpus(&[setup.cpus.1])
        .sidecore(&format!("cpus = [{}]\n{}", setup.cpus.1, setup.sidecore))
        .switch("lan", "[switch.uplink]\ntap = \"up0\"\nbridge = \"br0\"\n")
        .vm(vm);
    daemon.start(lab).map_err(|e| BenchError::lab("start the daemon", e))
}

fn server(setup: &Setup, daemon: &Daemon, files_bytes: u64) -> GuestBuilder {
    let recipe = Image::builder().guest_pieces().program("mke2fs").module("ext4");
    let recipe = setup.servers.iter().fold(recipe, |r, s| r.packaged(s.name(), s.program()));
    Guest::builder(VM)
        .kernel(setup.kernel)
        .memory_mb((MEMORY_MB + (files_bytes >> 20)) as u32)
        .host_cpus(&[setup.cpus.0])
        .image(recipe)
        .net(Net::vhost_user(daemon.socket(VM, "net0")))
        .address(format!("{SERVER}/24"))
        .disk(Disk::vhost_user(daemon.socket(VM, "disk0")))
        .vsock(Vsock::vhost_user(daemon.socket(VM, "vsock")))
}

/// A guest with nothing but a busy loop, stopped.
fn neighbour(setup: &Setup, lab: &Lab, number: usize) -> Result<Guest, BenchError> {
    let guest =
        Guest::builder(format!("busy{number}")).kernel(setup.kernel).host_cpus(&[setup.cpus.0]);
    let guest = start(guest, lab)?;
    let looping = guest.spawn("while :; do :; done");
    looping.map_err(|e| BenchError::lab("start a busy loop", e))?;
    pause(&guest, true)?;
    Ok(guest)
}
