//! Guests of one side: small VMs on Millrace's devices, or on QEMU's own.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::{
    Aio, CacheMode, Daemon, Disk, Guest, GuestBuilder, ImageBuilder, KernelChoice, Lab, Net,
    QemuFile, Vm,
};

use crate::harness::error::BenchError;
use crate::harness::folder::Folder;
use crate::harness::host::{self, Thread};

/// Bytes of each disk image: as much as the guest's memory, read past both page caches.
pub const DISK_LEN_BYTES: u64 = 128 << 20;
/// Time for a guest to boot, on a busy machine with many of them.
const READY: Duration = Duration::from_secs(120);
/// Time for a server to listen, on a machine busy with many guests.
const LISTEN: Duration = Duration::from_secs(30);
/// Guests that boot at once: more take longer together than one after the other.
const BOOT_AT_ONCE: usize = 2;

/// Server of the devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// A daemon with these lines in its `[sidecore]` table.
    Millrace {
        /// For example `spin_us = 0`.
        sidecore: String,
    },
    /// QEMU: virtio-net on TAP and bridge, in its main loop; virtio-blk with a thread of its own.
    Qemu,
    /// The same with virtio-net in the host's kernel, by vhost-net.
    Vhost,
}

/// Session, kernel and disks of guests.
#[derive(Clone, Copy)]
pub struct Ground<'a> {
    /// The session.
    pub lab: &'a Lab,
    /// Kernel of all guests.
    pub kernel: KernelChoice,
    /// Folder in which disks are made.
    pub disks: &'a Folder,
}

/// Base that all fleets share.
pub struct Base<'a> {
    /// Session, kernel and disks.
    pub ground: Ground<'a>,
    /// Path of Millrace's daemon.
    pub millrace: &'a Path,
}

/// QEMU's own disk on an image: past the page cache, by io_uring.
pub fn qemu_disk(image: &Path) -> QemuFile {
    let mut disk = Disk::file(image);
    disk.cache = CacheMode::None;
    disk.aio = Aio::IoUring;
    disk
}

/// Running guests. They go when this is dropped, and the daemon with them.
pub struct Fleet {
    guests: Vec<Guest>,
    daemon: Option<Daemon>,
}

/// Address of a guest by its number; every fleet has a network of its own.
pub fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from(0x0a00_0001 + number as u32)
}

impl Fleet {
    /// Boots `disks.len()` guests; those marked have a disk. `name` is at most eight letters and
    /// told apart from other fleets.
    pub fn boot(
        base: &Base,
        name: &str,
        devices: &Devices,
        disks: &[bool],
    ) -> Result<Fleet, BenchError> {
        let image = |i: usize| base.ground.disks.image(&format!("{name}{i}.raw"), DISK_LEN_BYTES);
        let images = disks
            .iter()
            .enumerate()
            .map(|(i, yes)| yes.then(|| image(i)).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let daemon = match devices {
            Devices::Millrace { sidecore } => Some(start_daemon(base, name, sidecore, &images)?),
            Devices::Qemu | Devices::Vhost => {
                bridge(base.ground.lab, name, disks.len())?;
                None
            }
        };
        let mut fleet = Fleet { guests: Vec::new(), daemon };
        let on_tap: fn(String) -> Net =
            if *devices == Devices::Vhost { Net::tap_vhost } else { Net::tap };
        let guests = images.iter().enumerate();
        let guests =
            guests.map(|(i, image)| fleet.describe(base, name, i, image.as_deref(), on_tap));
        let guests: Vec<_> = guests.collect();
        for guests in guests.chunks(BOOT_AT_ONCE) {
            let booted = lab::boot_all(base.ground.lab, guests.to_vec(), READY);
            fleet.guests.extend(booted.map_err(|e| failed(name, e))?);
        }
        if let Some(daemon) = &fleet.daemon {
            daemon.wait_for_huge_pages(READY).map_err(|e| failed(name, e))?;
        }
        Ok(fleet)
    }

    fn describe(
        &self,
        base: &Base,
        name: &str,
        i: usize,
        image: Option<&Path>,
        on_tap: fn(String) -> Net,
    ) -> GuestBuilder {
        let vm = format!("{name}{i}");
        let net = match &self.daemon {
            Some(daemon) => Net::vhost_user(daemon.socket(&vm, "net0")).into(),
            None => on_tap(tap(name, i)),
        };
        let guest = Guest::builder(&vm)
            .kernel(base.ground.kernel)
            .image(ImageBuilder::default())
            .net(net)
            .aligned_memory()
            .address(format!("{}/24", address(i)));
        match (image, &self.daemon) {
            (None, _) => guest,
            (Some(_), Some(daemon)) => guest.disk(Disk::vhost_user(daemon.socket(&vm, "disk0"))),
            (Some(image), None) => guest.disk(qemu_disk(image)),
        }
    }

    /// A guest by its number.
    pub fn guest(&self, number: usize) -> Result<&Guest, BenchError> {
        let none = || BenchError::lab(format!("guest {number}"), "there are fewer");
        self.guests.get(number).ok_or_else(none)
    }

    /// The guests.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// The daemon, where there is one.
    pub fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }

    /// All processes: QEMU's, threads of the kernel that serve their network, and the daemon.
    pub fn pids(&self) -> Vec<u32> {
        let guests = self.guests.iter().map(Guest::pid);
        let kernel = guests.clone().flat_map(lab::vhost_threads);
        guests.chain(kernel).chain(self.daemon.iter().flat_map(Daemon::pids)).collect()
    }

    /// Starts the server `tool` on guest `number`, as [`serve`] does.
    pub fn serve(&self, number: usize, tool: &str) -> Result<(), BenchError> {
        serve(self.guest(number)?, tool)
    }

    /// Runs a tool on a guest and reads the JSON that it prints last.
    pub fn tool(
        &self,
        number: usize,
        script: &str,
        time: Duration,
    ) -> Result<serde_json::Value, BenchError> {
        let guest = self.guest(number)?;
        let answer = guest.run_for(script, time).and_then(lab::Output::json);
        answer.map_err(|e| BenchError::lab(format!("{script} on {}", guest.name()), e))
    }

    /// QEMU's main loops.
    pub fn main_loops(&self) -> Vec<Thread> {
        self.guests.iter().map(|g| Thread { pid: g.pid(), tid: g.pid() }).collect()
    }

    /// QEMU's threads for disks, of all guests. Empty where the daemon serves them.
    pub fn disk_threads(&self) -> Result<Vec<Thread>, BenchError> {
        let mut all = Vec::new();
        for guest in &self.guests {
            let answer = guest.qmp("query-iothreads", serde_json::json!({}));
            let answer = answer.map_err(|e| BenchError::lab("ask for QEMU's I/O threads", e))?;
            let ids = answer.as_array().into_iter().flatten();
            all.extend(ids.filter_map(|t| {
                let tid = u32::try_from(t["thread-id"].as_u64()?).ok()?;
                Some(Thread { pid: guest.pid(), tid })
            }));
        }
        Ok(all)
    }

    /// Threads of the kernel that serve the guests' network, those of QEMU's processes included.
    pub fn vhost_threads(&self) -> Result<Vec<Thread>, BenchError> {
        let mut all = Vec::new();
        for guest in &self.guests {
            let own = lab::vhost_threads(guest.pid());
            match own.is_empty() {
                true => all.extend(host::named(guest.pid(), "vhost-")?),
                false => all.extend(own.into_iter().map(|tid| Thread { pid: tid, tid })),
            }
        }
        Ok(all)
    }

    /// The daemon's polling threads.
    pub fn sidecores(&self) -> Result<Vec<Thread>, BenchError> {
        self.daemon.as_ref().map_or(Ok(Vec::new()), |d| host::named(d.pid(), "sidecore-"))
    }
}

/// Starts a server of the agent's tools on a guest and waits until it listens.
pub fn serve(guest: &Guest, tool: &str) -> Result<(), BenchError> {
    let failed = |e| BenchError::lab(format!("{tool} on {}", guest.name()), e);
    let mut running = guest.spawn(tool).map_err(failed)?;
    // Dropping it afterwards leaves the command running.
    running.wait_line("listening", LISTEN).map_err(failed)?;
    Ok(())
}

/// QEMU's threads for the guest's CPUs.
pub fn vcpus(guest: &Guest) -> Result<Vec<u32>, BenchError> {
    let answer = guest.qmp("query-cpus-fast", serde_json::json!({}));
    let answer = answer.map_err(|e| BenchError::lab("ask for QEMU's threads", e))?;
    let tid = |cpu: &serde_json::Value| u32::try_from(cpu["thread-id"].as_u64()?).ok();
    let found: Option<Vec<u32>> = answer.as_array().and_then(|all| all.iter().map(tid).collect());
    found
        .filter(|tids| !tids.is_empty())
        .ok_or_else(|| BenchError::lab("ask for QEMU's threads", format!("{answer}")))
}

fn failed(name: &str, error: impl std::fmt::Display) -> BenchError {
    BenchError::lab(format!("boot {name}"), error)
}

fn tap(fleet: &str, number: usize) -> String {
    format!("{fleet}t{number}")
}

fn bridge(lab: &Lab, name: &str, taps: usize) -> Result<(), BenchError> {
    let bridge = format!("{name}br");
    let made = lab
        .net()
        .bridge(&bridge)
        .and_then(|()| (0..taps).try_for_each(|i| lab.net().tap(&tap(name, i), Some(&bridge))));
    made.map_err(|e| BenchError::lab("make a bridge with TAP devices", e))
}

fn start_daemon(
    base: &Base,
    name: &str,
    sidecore: &str,
    images: &[Option<PathBuf>],
) -> Result<Daemon, BenchError> {
    let mut daemon =
        Daemon::builder(name).binary(base.millrace).sidecore(sidecore).switch("lan", "");
    for (i, image) in images.iter().enumerate() {
        let mut vm = Vm::new(&format!("{name}{i}"), "").net("net0", "switch = \"lan\"");
        if let Some(path) = image {
            let disk = format!("format = \"raw\"\npath = {:?}\ndirect = true", path.display());
            vm = vm.disk("disk0", &disk);
        }
        daemon = daemon.vm(vm);
    }
    daemon.start(base.ground.lab).map_err(|e| BenchError::lab("start the daemon", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_have_addresses_in_order() {
        assert_eq!(address(0), Ipv4Addr::new(10, 0, 0, 1));
        assert_eq!(address(7), Ipv4Addr::new(10, 0, 0, 8));
        // Linux takes interface names of up to 15 letters.
        assert!(tap("qemu", 7).len() <= 15);
    }
}
