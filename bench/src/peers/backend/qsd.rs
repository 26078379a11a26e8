//! QEMU's storage daemon.

use std::path::Path;

use crate::error::BenchError;
use crate::peers::Bed;
use crate::peers::case::{Case, Load, Medium};
use crate::peers::front::{self, Window};
use crate::peers::process::{self, Process};

use super::{Backend, NOT_MINE, Running, ports};

/// Size of the disk that is not there, as ours.
const NULL_LEN_BYTES: u64 = 1 << 40;

/// What it does with a request.
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
        "qemu-storage-daemon"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match (case.load, self) {
            (Load::Read { medium: Medium::Null, .. }, Qsd::Null) => None,
            (Load::Read { medium: Medium::Null, .. }, _) => NOT_MINE,
            (Load::Read { .. }, Qsd::IoUring | Qsd::Threads) => None,
            _ => NOT_MINE,
        }
    }

    fn start(
        &self,
        bed: &Bed,
        case: &Case,
        window: Window,
        folder: &Path,
    ) -> Result<Running, BenchError> {
        let socket = ports(folder).0;
        let mut command = process::command(self.needs(), Some(bed.back_cpu));
        command.args(["--blockdev", &self.disk(bed, case), "--export"]);
        command.arg(format!(
            "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={},writable=off",
            socket.display()
        ));
        let mut qsd = Process::start(self.name(), &mut command, folder)?;
        qsd.wait_listening(&[&socket])?;
        let load = front::disk(bed, case, window, &socket);
        Ok(Running { processes: vec![qsd], load })
    }
}

impl Qsd {
    fn disk(&self, bed: &Bed, case: &Case) -> String {
        let aio = match self {
            // It does not even clear the buffers.
            Qsd::Null => {
                return format!("driver=null-co,node-name=n,size={NULL_LEN_BYTES},read-zeroes=off");
            }
            Qsd::IoUring => "io_uring",
            Qsd::Threads => "threads",
        };
        let (file, direct) = match case.medium() {
            Some(Medium::Disk) => (&bed.disk_file, "on"),
            _ => (&bed.tmpfs_file, "off"),
        };
        // The kernel keeps the lock of one that was killed until its io_uring is gone, a moment later.
        format!(
            "driver=file,node-name=n,filename={},aio={aio},cache.direct={direct},read-only=on,\
             locking=off",
            file.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::case;

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
}
