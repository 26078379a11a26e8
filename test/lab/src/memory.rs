//! Kinds of a guest's memory.

/// Folder of a file system in memory, where POSIX has it.
const SHM: &str = "/dev/shm";

/// Least room there, in guests of the asked size: files in it take memory as they are touched, and
/// a guest that finds none is killed.
const ROOM: u64 = 4;

/// Kind of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// QEMU's own, which it asks the host to put into huge pages.
    Private,
    /// A memfd that is shared with back ends. QEMU maps it at an address where the CPU cannot have
    /// a huge page as one.
    Memfd,
    /// A file that is shared with back ends, at an address where it can; a memfd without room for
    /// it.
    Aligned,
}

impl Memory {
    /// The object `mem` of QEMU's command line.
    pub fn object(self, memory_mb: u64) -> String {
        let backend = match self {
            Self::Private => "ram".into(),
            Self::Aligned if has_room(memory_mb) => {
                format!("file,mem-path={SHM},share=on,align=2M")
            }
            Self::Memfd | Self::Aligned => String::from("memfd,share=on"),
        };
        format!("memory-backend-{backend},id=mem,size={memory_mb}M")
    }
}

fn has_room(memory_mb: u64) -> bool {
    let room = rustix::fs::statvfs(SHM);
    room.is_ok_and(|room| room.f_bavail.saturating_mul(room.f_frsize) >> 20 >= ROOM * memory_mb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_aligned_and_a_memfd_is_there_without_room() {
        assert_eq!(Memory::Private.object(64), "memory-backend-ram,id=mem,size=64M");
        let memfd = Memory::Memfd.object(1 << 40);
        assert_eq!(memfd, "memory-backend-memfd,share=on,id=mem,size=1099511627776M");
        assert_eq!(Memory::Aligned.object(1 << 40), memfd);
        assert_eq!(
            Memory::Aligned.object(0),
            "memory-backend-file,mem-path=/dev/shm,share=on,align=2M,id=mem,size=0M"
        );
    }
}
