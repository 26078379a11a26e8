//! QEMU's storage daemon.

use std::path::{Path, PathBuf};

use lab::{Cache, Qemu};

use crate::harness::error::BenchError;
use crate::harness::process;
use crate::suites::peers::bed::Bed;
use crate::suites::peers::case::{Case, Load, Medium};
use crate::suites::peers::images::Disk;
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// QEMU's program.
const PROGRAM: &str = "qemu-storage-daemon";
/// Size of the disk that is not there, as ours.
const NULL_LEN_BYTES: u64 = 1 << 40;

/// Back end of qemu-storage-daemon, by what it does with a request.
pub enum Qsd {
    /// Answers it at once.
    Null,
    /// Reads a file through io_uring.
    IoUring,
    /// Reads a file from threads.
    Threads,
}

impl Backend for Qsd {
    fn name(&self) -> &'static str {
        match self {
            Qsd::Null => "qsd",
            Qsd::IoUring => "qsd-uring",
            Qsd::Threads => "qsd-threads",
        }
    }

    fn needs(&self) -> &'static str {
        PROGRAM
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match (case.load, self) {
            (Load::Read { medium: Medium::Null, .. }, Qsd::Null) => None,
            (Load::Read { medium: Medium::Null, .. }, _) => NOT_MINE,
            (Load::Read { .. } | Load::Qcow2 { .. }, Qsd::IoUring | Qsd::Threads) => None,
            _ => NOT_MINE,
        }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, .. } = *trial;
        let mut command = process::command(storage_daemon()?, Some(bed.back_cpu));
        let disk = match case.image() {
            Some(_) => self.image(&bed.disk(case)?, case),
            None => self.disk(bed, case),
        };
        command.args(["--blockdev", &disk, "--export"]);
        command.arg(format!(
            "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={},writable={}",
            trial.sockets().0.display(),
            on(case.writes())
        ));
        trial.launch_disk(self.name(), &mut command)
    }
}

/// The storage daemon of the QEMU that runs guests.
fn storage_daemon() -> Result<PathBuf, BenchError> {
    let find = || Qemu::chosen(&Cache::open()?)?.tool(PROGRAM);
    find().map_err(|e| BenchError::lab("find QEMU's storage daemon", e))
}

impl Qsd {
    fn disk(&self, bed: &Bed, case: &Case) -> String {
        let aio = self.aio();
        if matches!(self, Qsd::Null) {
            // It does not even clear the buffers.
            return format!("driver=null-co,node-name=n,size={NULL_LEN_BYTES},read-zeroes=off");
        }
        let (file, direct) = match case.medium() {
            Some(Medium::Disk) => (&bed.disk_file, "on"),
            _ => (&bed.tmpfs_file, "off"),
        };
        // The kernel keeps the lock of one that was killed until its io_uring is gone, a moment
        // later.
        format!(
            "driver=file,node-name=n,filename={},aio={aio},cache.direct={direct},read-only=on,\
             locking=off",
            file.display()
        )
    }

    fn aio(&self) -> &'static str {
        if matches!(self, Qsd::Threads) { "threads" } else { "io_uring" }
    }

    /// A qcow2 image on a file, and its raw backing file, with QEMU's default caches. Locks as
    /// above.
    fn image(&self, disk: &Disk, case: &Case) -> String {
        let file = |at: &str, path: &Path| {
            let (path, aio) = (path.display(), self.aio());
            format!(
                "{at}.driver=file,{at}.filename={path},{at}.aio={aio},{at}.cache.direct=off,\
                 {at}.locking=off"
            )
        };
        let backing = disk.base.as_ref().map_or(String::new(), |base| {
            let file = file("backing.file", base);
            format!(",backing.driver=raw,backing.read-only=on,{file}")
        });
        format!(
            "driver=qcow2,node-name=n,read-only={},discard=unmap,cache.direct=off,\
             {},file.discard=unmap{backing}",
            on(!case.writes()),
            file("file", &disk.path)
        )
    }
}

fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;

    #[test]
    fn the_disk_goes_past_the_cache_and_the_tmpfs_file_does_not() {
        let case = |name: &str| case::ALL.into_iter().find(|c| c.name() == name).unwrap();
        let bed = Bed::pretend();
        assert_eq!(
            Qsd::Threads.disk(&bed, &case("disk_d1")),
            "driver=file,node-name=n,filename=/t/disk.raw,aio=threads,cache.direct=on,read-only=on,\
             locking=off"
        );
        let text = Qsd::IoUring.disk(&bed, &case("tmpfs_d1"));
        assert!(text.contains("/t/shm/disk.raw,aio=io_uring,cache.direct=off"), "{text}");
    }

    #[test]
    fn an_image_and_its_backing_file_have_the_same_aio() {
        let case = |name: &str| case::ALL.into_iter().find(|c| c.name() == name).unwrap();
        let disk = |base: Option<&str>| Disk { path: "/t/live".into(), base: base.map(Into::into) };
        assert_eq!(
            Qsd::IoUring.image(&disk(None), &case("qcow2_read_4k_d1")),
            "driver=qcow2,node-name=n,read-only=on,discard=unmap,cache.direct=off,file.driver=file,\
             file.filename=/t/live,file.aio=io_uring,file.cache.direct=off,file.locking=off,\
             file.discard=unmap"
        );
        let text = Qsd::Threads.image(&disk(Some("/t/base")), &case("qcow2_backed_4k_d1"));
        assert!(text.contains("read-only=off") && text.contains("file.aio=threads"), "{text}");
        assert!(
            text.ends_with(
                ",file.discard=unmap,backing.driver=raw,backing.read-only=on,backing.file.driver=file,\
                 backing.file.filename=/t/base,backing.file.aio=threads,\
                 backing.file.cache.direct=off,backing.file.locking=off"
            ),
            "{text}"
        );
    }
}
