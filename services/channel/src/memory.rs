//! Memory file of a member, as peers get it: for reading only.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use base::peer_fd::PeerFd;
use guest_abi::channel::{MAX_REGIONS, PAGE_LEN};
use rustix::fs::{FileType, Mode, OFlags, SealFlags};

use crate::error::ChannelError;

/// Least window: no VM has a smaller memory file.
pub const MIN_WINDOW_LEN_BYTES: u64 = 1 << 20;
/// Most window: more does not fit into a guest's address space beside others.
pub const MAX_WINDOW_LEN_BYTES: u64 = 1 << 40;

/// Range of guest-physical memory and its place in the memory file. All in bytes, in whole
/// pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address of its first byte.
    pub gpa: u64,
    /// Length.
    pub len: u64,
    /// Offset in the file.
    pub off: u64,
}

/// Memory of a VM: one shared file.
#[derive(Debug)]
pub struct MemberMemory {
    /// File, which is opened anew for reading; this descriptor may be writable.
    pub file: PeerFd,
    /// Regions of guest-physical memory, 1 to [`MAX_REGIONS`].
    pub regions: Vec<MemoryRegion>,
}

/// Memory file that can only be read, with the window that peers see.
#[derive(Debug)]
pub(crate) struct Memory {
    pub file: Arc<PeerFd>,
    pub regions: Vec<MemoryRegion>,
    pub window_len: u64,
}

/// Length of a memory file's window for peers, from its beginning. QEMU ends itself over a BAR
/// whose size is no power of two, and over one that is larger than the file nothing good is known.
pub(crate) fn window_len(file_len: u64) -> Option<u64> {
    let len = 1u64 << file_len.checked_ilog2()?;
    (len >= MIN_WINDOW_LEN_BYTES).then_some(len.min(MAX_WINDOW_LEN_BYTES))
}

impl Memory {
    /// Opens the file anew and checks its settings. Shortening a file that is not sealed ends the
    /// VMs that have it mapped: it is taken only if that is allowed.
    pub fn new(vm: &str, memory: MemberMemory, allow_unsealed: bool) -> Result<Self, ChannelError> {
        let file = read_only(&memory.file).map_err(|source| ChannelError::Memory {
            vm: vm.into(),
            what: "opening the memory file for reading",
            source,
        })?;
        let stat = rustix::fs::fstat(&file).map_err(|error| ChannelError::Memory {
            vm: vm.into(),
            what: "looking at the memory file",
            source: error.into(),
        })?;
        let bad = |what: &'static str, value: String, rule: String| {
            Err(ChannelError::BadMember { vm: vm.into(), what, value, rule })
        };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let rule = "a memfd or a regular file is expected".into();
            return bad("the memory file's mode", format!("{:#o}", stat.st_mode), rule);
        }
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        let Some(window_len) = window_len(file_len) else {
            let rule = format!("at least {MIN_WINDOW_LEN_BYTES} bytes are expected");
            return bad("the memory file's length", file_len.to_string(), rule);
        };
        if memory.regions.is_empty() || memory.regions.len() > MAX_REGIONS {
            let rule = format!("1 to {MAX_REGIONS} are expected");
            return bad("the number of memory regions", memory.regions.len().to_string(), rule);
        }
        if let Some(region) = memory.regions.iter().find(|region| !is_fine(region, file_len)) {
            let rule = format!("whole pages within the file's {file_len:#x} bytes are expected");
            return bad("a memory region", format!("{region:x?}"), rule);
        }
        let sealed =
            rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !sealed && !allow_unsealed {
            let rule = "one that is sealed against shrinking is expected, as QEMU's \
                        memory-backend-memfd is: whoever shortens another one ends the VMs of its \
                        peers; `allow_unsealed = true` in its [vm.channel] takes it all the same";
            return bad("the seals of the memory file", "no F_SEAL_SHRINK".into(), rule.into());
        }
        if !sealed {
            tracing::warn!(
                vm,
                "the memory file is not sealed against shrinking: whoever shortens it ends the \
                 VMs of its peers"
            );
        }
        Ok(Self {
            file: Arc::new(PeerFd::from(file).checked()),
            regions: memory.regions,
            window_len,
        })
    }
}

fn is_fine(region: &MemoryRegion, file_len: u64) -> bool {
    let whole = [region.gpa, region.len, region.off].iter().all(|n| n.is_multiple_of(PAGE_LEN));
    let inside = region.off.checked_add(region.len).is_some_and(|end| end <= file_len);
    whole && inside && region.len > 0 && region.gpa.checked_add(region.len).is_some()
}

/// Opens the same file anew, for reading only: a duplicate would share the rights.
fn read_only(fd: &PeerFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
        return Err(io::Error::other(format!("the new descriptor can be written ({flags:?})")));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use proptest::prelude::*;
    use rustix::fs::MemfdFlags;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(len: u64) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("memory", flags).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    }

    fn memory(len: u64, regions: &[[u64; 3]]) -> Result<Memory, ChannelError> {
        let file = file(len);
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let regions =
            regions.iter().map(|[gpa, len, off]| MemoryRegion { gpa: *gpa, len: *len, off: *off });
        Memory::new("a", MemberMemory { file: file.into(), regions: regions.collect() }, false)
    }

    #[test]
    fn abuse_V9_memory_that_can_be_shortened_is_taken_only_if_that_is_allowed() {
        let memory = |allow| {
            let regions = vec![MemoryRegion { gpa: 0, len: MIB, off: 0 }];
            Memory::new("a", MemberMemory { file: file(MIB).into(), regions }, allow)
        };
        let error = memory(false).unwrap_err().to_string();
        for words in ["VM a", "no F_SEAL_SHRINK", "memory-backend-memfd", "allow_unsealed = true"] {
            assert!(error.contains(words), "{error}");
        }
        memory(true).unwrap();
    }

    proptest! {
        #[test]
        fn a_window_is_the_largest_power_of_two_inside(len in MIN_WINDOW_LEN_BYTES..1 << 41) {
            let window = window_len(len).unwrap();
            prop_assert!(window.is_power_of_two() && window <= len);
            prop_assert!(window * 2 > len || window == MAX_WINDOW_LEN_BYTES);
        }
    }

    #[test]
    fn no_window_of_a_small_file() {
        for len in [0, 1, MIN_WINDOW_LEN_BYTES - 1] {
            assert_eq!(window_len(len), None);
        }
        assert_eq!(window_len(u64::MAX), Some(MAX_WINDOW_LEN_BYTES));
    }

    #[test]
    fn abuse_I_peers_get_a_file_that_cannot_be_written() {
        let memory = memory(3 * MIB, &[[0, 3 * MIB, 0]]).unwrap();
        assert_eq!(memory.window_len, 2 * MIB);
        assert!(rustix::io::write(&*memory.file, b"x").is_err());
        assert!(rustix::fs::ftruncate(&*memory.file, 0).is_err());
    }

    #[test]
    fn wrong_memory_is_refused() {
        let nine = [[0, 4096, 0]; 9];
        let cases: [(u64, &[[u64; 3]], &str); 7] = [
            (MIB - 1, &[[0, 4096, 0]], "memory file's length is 1048575"),
            (MIB, &[], "number of memory regions is 0; 1 to 8"),
            (MIB, &nine, "number of memory regions is 9; 1 to 8"),
            (MIB, &[[0, MIB, 4096]], "a memory region is"),
            (MIB, &[[1, 4096, 0]], "whole pages"),
            (MIB, &[[0, 0, 0]], "whole pages"),
            (MIB, &[[u64::MAX - 4095, 4096, 0]], "within the file's 0x100000 bytes"),
        ];
        for (len, regions, text) in cases {
            let error = memory(len, regions).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("VM a"), "{error}");
        }
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let error =
            Memory::new("a", MemberMemory { file: reader.into(), regions: Vec::new() }, false);
        assert!(error.unwrap_err().to_string().contains("regular file is expected"));
    }
}
