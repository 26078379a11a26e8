//! Place where back ends run: CPUs, files, network namespace and huge pages.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use lab::NetLab;

use super::front_end::Kind;
use super::window::Plan;
use super::{case, images, interrupts, virtio_user};
use crate::harness::cleanup::Cleanup;
use crate::harness::error::BenchError;
use crate::harness::folder::Folder;
use crate::harness::process;
use crate::harness::progress::Progress;

/// Huge pages of 2 MiB: a front end and a DPDK back end with its buffers.
const HUGE_PAGES: u64 = 512;
/// Bytes of each disk's file: many times what a read-ahead or a device's cache holds.
const DISK_LEN_BYTES: u64 = 512 << 20;

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Cases to run.
    pub cases: Vec<case::Case>,
    /// Peers by name or the start of it; all when empty.
    pub peers: Vec<String>,
    /// How often and how long.
    pub plan: Plan,
    /// CPUs of back end and front end; exchanged for device-bound loads if the disk interrupts the
    /// latter.
    pub cpus: (usize, usize),
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// Kind of the front end.
    pub kind: Kind,
    /// Program of the front end: for virtio-user this one, which drives testpmd.
    pub front: PathBuf,
    /// Folder of the results and, meanwhile, the disk's file.
    pub out: PathBuf,
    /// Use huge pages if the machine has them.
    pub hugepages: bool,
}

/// Test bed in which back ends run.
pub struct Bed {
    /// The CPUs as they were asked for: back end, front end.
    cpus: (usize, usize),
    /// The disk interrupts the second of them.
    disk_interrupts_front: bool,
    /// CPU of the back end's polling thread.
    pub back_cpu: usize,
    /// CPU of the front end.
    pub front_cpu: usize,
    /// Kind of the front end.
    pub kind: Kind,
    /// Program of the front end.
    pub front: PathBuf,
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// Whether front end and back ends use huge pages.
    pub hugepages: bool,
    /// File on tmpfs; an empty path when no case needs it.
    pub tmpfs_file: PathBuf,
    /// File on the disk; an empty path when no case needs it.
    pub disk_file: PathBuf,
    /// Images in qcow2 format; none when no case needs them.
    images: Option<images::Images>,
    /// Network devices live in there.
    pub net: Option<NetLab>,
    /// Sockets and logs, one folder for each start.
    run: PathBuf,
    next: AtomicU32,
    /// The folders of the files, removed with them.
    _folders: Vec<Folder>,
    /// Last: it gives back what all others use.
    _cleanup: Option<Cleanup>,
}

impl Bed {
    /// Makes files, reserves huge pages and a network namespace.
    pub fn new(setup: &Setup, progress: &mut Progress) -> Result<Bed, BenchError> {
        for program in [&setup.millrace, &setup.front] {
            if !program.is_file() {
                let why = format!("there is no {}; build it, or name it", program.display());
                return Err(BenchError::lab("find what is measured", why));
            }
        }
        if setup.kind == Kind::VirtioUser && process::find(virtio_user::PROGRAM).is_none() {
            let why = format!("{} is not installed; scripts/peers does it", virtio_user::PROGRAM);
            return Err(BenchError::lab("find the front end", why));
        }
        let mut cleanup = Cleanup::new()?;
        // Unix socket paths hold 107 bytes, so not within the output folder.
        let run = std::env::temp_dir().join(format!("millrace-peers-{}", std::process::id()));
        cleanup.remove(&run)?;
        std::fs::create_dir_all(&run).map_err(|e| BenchError::file("make folder", &run, e))?;
        let hugepages = setup.hugepages && cleanup.reserve_huge_pages(HUGE_PAGES)?;
        let mut bed = Bed {
            cpus: setup.cpus,
            disk_interrupts_front: false,
            back_cpu: setup.cpus.0,
            front_cpu: setup.cpus.1,
            kind: setup.kind,
            front: absolute(&setup.front)?,
            millrace: absolute(&setup.millrace)?,
            hugepages,
            tmpfs_file: PathBuf::new(),
            disk_file: PathBuf::new(),
            images: None,
            net: Some(NetLab::new().map_err(|e| BenchError::lab("make a namespace", e))?),
            run,
            next: AtomicU32::new(0),
            _folders: Vec::new(),
            _cleanup: None,
        };
        let on = |medium| setup.cases.iter().any(|c| c.medium() == Some(medium));
        if on(case::Medium::Tmpfs) {
            progress.step("filling a file on tmpfs");
            bed.tmpfs_file = bed.file(&shm("raw"), &mut cleanup)?;
        }
        if setup.cases.iter().any(|c| c.image().is_some()) {
            progress.step("filling a qcow2 image on tmpfs");
            let folder = shm("images");
            cleanup.remove(&folder)?;
            bed.images = Some(images::Images::new(Folder::new(&folder)?, images::LEN_BYTES)?);
        }
        if on(case::Medium::Disk) {
            progress.step("filling a file on the disk");
            std::fs::create_dir_all(&setup.out)
                .map_err(|e| BenchError::file("make folder", &setup.out, e))?;
            bed.disk_file = bed.file(&absolute(&setup.out)?.join("peers-disk"), &mut cleanup)?;
            // Not every file system takes O_DIRECT: then that is for the cases to say.
            let found = interrupts::interrupted_cpu(&bed.disk_file, setup.cpus.0);
            if !matches!(found, Ok(Some(_))) {
                progress.step("which CPU the disk interrupts is not known: CPUs as given");
            }
            bed.disk_interrupts_front = matches!(found, Ok(Some(cpu)) if cpu == setup.cpus.1);
        }
        bed._cleanup = Some(cleanup);
        Ok(bed)
    }

    fn file(&mut self, folder: &Path, cleanup: &mut Cleanup) -> Result<PathBuf, BenchError> {
        cleanup.remove(folder)?;
        let folder = Folder::new(folder)?;
        let file = folder.image("disk.raw", DISK_LEN_BYTES)?;
        self._folders.push(folder);
        Ok(file)
    }

    /// Chooses the CPUs for a case.
    pub fn prepare(&mut self, case: &case::Case) {
        let (back, front) = self.cpus;
        let exchange = case.medium() == Some(case::Medium::Disk) && self.disk_interrupts_front;
        (self.back_cpu, self.front_cpu) = if exchange { (front, back) } else { (back, front) };
    }

    /// The disk that a case's load is for; see [`images::Images::disk`].
    pub fn disk(&self, case: &case::Case) -> Result<images::Disk, BenchError> {
        let none = || BenchError::lab(case.name(), "its image was not made");
        self.images.as_ref().ok_or_else(none)?.disk(case)
    }

    /// A folder for the sockets and logs of one start.
    pub fn folder(&self) -> Result<PathBuf, BenchError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let folder = self.run.join(number.to_string());
        std::fs::create_dir(&folder).map_err(|e| BenchError::file("make folder", &folder, e))?;
        Ok(folder)
    }

    /// Sentences about the set-up, for the report.
    pub fn setup_text(&self) -> Vec<String> {
        let memory = match self.hugepages {
            true => "huge pages of 2 MiB for the front end’s rings and buffers and for DPDK",
            false => "pages of 4 KiB everywhere: no huge pages could be had",
        };
        let mut text = vec![format!(
            "Every back end polls on CPU {}, the front end on CPU {}, with the same front end, \
             queues of 256 and {memory}. Each is started anew for each case and round, alone.",
            self.cpus.0, self.cpus.1
        )];
        text.extend(self.disk_interrupts_front.then(|| {
            format!(
                "For device-bound disks the CPUs are exchanged: the disk interrupts CPU {}, and \
                 what its interrupts cost belongs to the back end.",
                self.cpus.1
            )
        }));
        text.extend(self.images.is_some().then(|| {
            "qcow2 images (1 GiB, clusters of 64 KiB, qemu-img’s other defaults) are on tmpfs and go \
             through the page cache, with the default sizes of both sides’ caches and the driver’s write \
             cache on; each load that writes has a fresh one. Where each write is to a cluster that is \
             not there, a load writes once to each in an order that is the same for all, an eighth of \
             them before it counts, and takes as long as it takes. ours-raw is our own daemon on the \
             same bytes as a raw disk."
                .into()
        }));
        text.extend((self.kind == Kind::VirtioUser).then(|| {
            "The front end is DPDK’s virtio-user in testpmd: 192 frames circulate, sent on one \
             port, received on the other and sent again as they are."
                .into()
        }));
        text.extend([
            "Millrace runs as it is shipped: a learning switch with MAC lookup, bound MAC and IP \
             addresses and counters; disks through its engine. DPDK’s testpmd forwards between two \
             fixed ports (`io`), or also rewrites the MAC addresses (`mac`). Open vSwitch with \
             DPDK has one flow a direction (`ovs-flow`), or its learning action (`ovs-normal`)."
                .into(),
            "References are measured without vhost-user, for orientation: `tap-bridge` writes into \
             one TAP device and reads from another in the same Linux bridge, from two CPUs, with \
             no VM; `fio` reads the disk’s file itself through io_uring."
                .into(),
        ]);
        text
    }

    /// A bed for tests that only look at command lines.
    #[cfg(test)]
    pub fn pretend() -> Bed {
        Bed {
            cpus: (0, 1),
            disk_interrupts_front: false,
            back_cpu: 0,
            front_cpu: 1,
            kind: Kind::Ours,
            front: "/t/frontend".into(),
            millrace: "/t/millrace".into(),
            hugepages: false,
            tmpfs_file: "/t/shm/disk.raw".into(),
            disk_file: "/t/disk.raw".into(),
            images: None,
            net: None,
            run: std::env::temp_dir(),
            next: AtomicU32::new(0),
            _folders: Vec::new(),
            _cleanup: None,
        }
    }
}

/// A folder of this run in memory.
fn shm(what: &str) -> PathBuf {
    format!("/dev/shm/millrace-peers-{}-{what}", std::process::id()).into()
}

fn absolute(path: &Path) -> Result<PathBuf, BenchError> {
    std::path::absolute(path).map_err(|e| BenchError::file("find", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_back_end_of_a_device_bound_load_gets_the_interrupts() {
        let cpus = |interrupts_front| {
            let mut bed = Bed { disk_interrupts_front: interrupts_front, ..Bed::pretend() };
            ["null_d1", "disk_d32", "tmpfs_d1", "disk_d1"].map(|name| {
                bed.prepare(&case::select(&[name.into()]).unwrap()[0]);
                (bed.back_cpu, bed.front_cpu)
            })
        };
        assert_eq!(cpus(false), [(0, 1); 4]);
        assert_eq!(cpus(true), [(0, 1), (1, 0), (0, 1), (1, 0)]);
    }
}
