//! The bed of the demo: four VMs at once, two on Millrace and two on QEMU's own devices; where the
//! host has vhost-net, two more on those.

pub mod cases;
pub(crate) mod command;
pub mod output;
mod pair;
mod storage;

use std::cell::{Ref, RefCell};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lab::{Accelerator, Daemon, ImageBuilder, KernelChoice, Lab};

use crate::harness::cpu::Accounts;
use crate::harness::error::BenchError;
use crate::harness::fleet::Ground;
use crate::harness::folder::Folder;
use crate::harness::progress::Progress;
use crate::harness::runner::{self, Side, VHOST, vhost_text};
use cases::{Modes, Shell};
use pair::Pair;

/// Bytes of each disk image: more than the guest's memory, so that nobody serves it from there.
const DISK_LEN_BYTES: u64 = 256 << 20;
/// Time for the VMs' memory to come into huge pages: ten times as long as a quiet machine takes.
const MEMORY_RESTS: Duration = Duration::from_secs(240);
/// Address of the guest that puts on the load; both pairs have a network of their own.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// Address of the guest that answers.
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Setup of the guests to be booted.
#[derive(Debug)]
pub struct Setup {
    kernel: KernelChoice,
    millrace: PathBuf,
    folder: PathBuf,
}

impl Setup {
    /// `millrace` is the daemon's program; disk images are made in a folder within `out` and
    /// removed at the end.
    pub fn new(kernel: KernelChoice, millrace: PathBuf, out: &Path) -> Setup {
        Setup { kernel, millrace, folder: out.join("demo-disks") }
    }
}

/// The VMs, running. They go when this is dropped.
pub struct Bed {
    /// A pair for each [`Side`], in their order.
    pairs: Vec<RefCell<Pair>>,
    /// Whether the host has vhost-net; if not, the reason.
    vhost: Result<(), String>,
    daemon: Daemon,
    lab: Lab,
    kernel: KernelChoice,
    image: ImageBuilder,
    accelerator: Accelerator,
    /// QEMU's version, and that of the guests' kernel.
    qemu: String,
    release: String,
    /// Rate that the storage can reach, where it is known.
    ceiling: Option<String>,
    cores: u32,
    /// Last, so that the images go after their users.
    disks: Folder,
}

impl Bed {
    /// Makes disks, starts the daemon and boots all VMs at once.
    pub fn boot(setup: &Setup, progress: &mut Progress) -> Result<Bed, BenchError> {
        progress.step("preparing kernel, guest image and disks");
        let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
        let accelerator =
            lab::acceleration(&lab).map_err(|e| BenchError::lab("start the lab", e))?;
        let image = ImageBuilder::default().program("fio");
        // Here, and not within the boot: the first run downloads and compiles.
        lab.image(&image, setup.kernel).map_err(|e| BenchError::lab("make the image", e))?;
        let disks = Folder::new(&setup.folder)?;
        progress.step("asking what the storage can do");
        let ceiling = storage::ceiling(&disks.image("ceiling.raw", DISK_LEN_BYTES)?);
        let vhost = lab::vhost_net();
        let peers = [Some(pair::TAP), vhost.is_ok().then_some(pair::VHOST)];
        let peers: Vec<pair::Peer> = peers.into_iter().flatten().collect();
        progress.step(&format!("starting the daemon and {} VMs", 2 + 2 * peers.len()));
        let ground = Ground { lab: &lab, kernel: setup.kernel, disks: &disks };
        let base = pair::Base { ground, image: &image };
        peers.iter().try_for_each(|peer| peer.bridge(&lab))?;
        let daemon = pair::daemon(&base, &setup.millrace)?;
        let mut pairs = vec![pair::millrace(&base, &daemon)?];
        for peer in &peers {
            pairs.push(peer.start(&base)?);
        }
        pairs.iter().try_for_each(Pair::wait_ready)?;
        progress.step("waiting until the VMs' memory is in huge pages");
        daemon.wait_for_huge_pages(MEMORY_RESTS).map_err(|e| BenchError::lab("move memory", e))?;
        let release = pairs[0].client.release().to_string();
        progress.step(&format!("all VMs run Linux {release}"));
        let cores = base::cpu::allowed_cpus().map_or(1, |c| c.len() as u32);
        let qemu = pair::qemu_version(&pairs[0].client)?;
        let pairs = pairs.into_iter().map(RefCell::new).collect();
        let kernel = setup.kernel;
        let accelerator = accelerator.accelerator;
        Ok(Bed {
            pairs,
            vhost,
            daemon,
            lab,
            kernel,
            image,
            accelerator,
            qemu,
            release,
            ceiling,
            cores,
            disks,
        })
    }

    fn pair(&self, side: Side) -> Ref<'_, Pair> {
        self.pairs[side as usize].borrow()
    }

    /// Processes of a side.
    fn pids(&self, side: usize) -> Vec<u32> {
        let mut pids = self.pairs[side].borrow().pids();
        if side == Side::Ours as usize {
            pids.extend(self.daemon.pids());
        }
        pids
    }

    /// Modes of the set-up, for the rows.
    pub fn modes(&self) -> Modes {
        Modes {
            net: "1 vCPU, 1 queue pair, offloads on".into(),
            vhost: self.vhost.is_ok(),
            disk: "raw, O_DIRECT, io_uring, 1 queue".into(),
            server: IpAddr::V4(SERVER),
            disk_path: "/dev/vda".into(),
            disk_len_bytes: DISK_LEN_BYTES,
        }
    }

    /// Sentences about the set-up, for the report.
    pub fn setup_text(&self) -> Vec<String> {
        let mut text = vec![
            format!(
                "{} VMs run at once, two a side; only one pair is loaded at a time. Each: {}, \
                 1 vCPU, Linux {}, a network card and a disk of {} MB.",
                2 * self.pairs.len(),
                self.qemu,
                self.release,
                DISK_LEN_BYTES >> 20
            ),
            "Millrace: one daemon with its defaults for this machine; vhost-user network on one \
             switch (split rings, mergeable buffers), vhost-user disk (raw, O_DIRECT, rings \
             and requests of the sizes that QEMU's own disk has), vsock; the VMs' memory is a \
             file in /dev/shm, aligned to 2 MiB, which they share with the daemon."
                .into(),
            "Peer: QEMU’s virtio-net on TAP (vnet_hdr, checksum and segmentation offloads) in a \
             Linux bridge of a private network namespace, without vhost; QEMU’s virtio-blk \
             on a file of the same content in the same folder (cache=none, aio=io_uring, a thread \
             of its own); the VMs' memory is their own, which QEMU asks the host to put into huge \
             pages."
                .into(),
        ];
        text.push(vhost_text(VHOST, &self.vhost));
        text.extend(self.ceiling.clone());
        text
    }
}

impl Shell for Bed {
    fn run(&self, side: Side, script: &str, timeout: Duration) -> Result<String, BenchError> {
        let pair = self.pair(side);
        let guest = &pair.client;
        let output = guest.run_for(script, timeout).and_then(lab::Output::ok);
        output.map_err(|e| BenchError::lab(format!("load on {}", guest.name()), e))
    }
}

impl runner::Bed for Bed {
    fn accounts(&self, side: Side) -> Accounts {
        let others = (0..self.pairs.len()).filter(|at| *at != side as usize);
        let other = others.flat_map(|at| self.pids(at)).collect();
        let side = self.pids(side as usize);
        Accounts { side, other, spinners: Vec::new(), cores: self.cores }
    }

    fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    fn renew(&self, side: Side) -> Result<(), BenchError> {
        self.pair(side).kill();
        let ground = Ground { lab: &self.lab, kernel: self.kernel, disks: &self.disks };
        let base = pair::Base { ground, image: &self.image };
        let fresh = match side {
            Side::Ours => pair::millrace(&base, &self.daemon)?,
            Side::Peer => pair::TAP.start(&base)?,
            Side::Vhost => pair::VHOST.start(&base)?,
        };
        fresh.wait_ready()?;
        self.pairs[side as usize].replace(fresh);
        Ok(())
    }
}
