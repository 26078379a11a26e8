//! From a front end's memory table to a member's memory.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, bail};
use channel::{MIN_WINDOW_LEN_BYTES, MemberMemory, MemoryRegion};
use vhost_user::SharedRegion;

/// Device and inode: which file it is.
pub type FileId = (u64, u64);

/// The one file that all RAM of a VM is in, and what of it lies where.
pub fn of(table: &[SharedRegion]) -> anyhow::Result<(FileId, MemberMemory)> {
    let mut files: BTreeMap<FileId, Vec<&SharedRegion>> = BTreeMap::new();
    for region in table {
        let stat = rustix::fs::fstat(&region.file).context("looking at the VM's memory file")?;
        // Smaller ones are no RAM: the mailbox of the channel itself is shared memory, too.
        if u64::try_from(stat.st_size).unwrap_or(0) >= MIN_WINDOW_LEN_BYTES {
            files.entry((stat.st_dev, stat.st_ino)).or_default().push(region);
        }
    }
    let mut found = files.iter();
    let (Some((id, regions)), None) = (found.next(), found.next()) else {
        bail!("{}", refusal(&files));
    };
    let Some(first) = regions.first() else { bail!("{}", refusal(&files)) };
    let file = first.file.try_clone().context("copying the descriptor of the VM's memory file")?;
    let file = file.checked();
    Ok((*id, MemberMemory { file, regions: joined(regions) }))
}

fn refusal(files: &BTreeMap<FileId, Vec<&SharedRegion>>) -> String {
    let mut text = format!("the VM's memory is in {} files; channels need it in one", files.len());
    for regions in files.values() {
        if let Some(region) = regions.first() {
            let _ = write!(text, ", {:#x} bytes at {:#x}", region.len_bytes, region.guest_addr);
        }
    }
    text.push_str(": give QEMU one memory-backend-memfd with share=on for all of it");
    text
}

/// By guest-physical address, neighbours as one: QEMU splits RAM around what devices have in it.
fn joined(regions: &[&SharedRegion]) -> Vec<MemoryRegion> {
    let mut sorted: Vec<MemoryRegion> = regions
        .iter()
        .map(|r| MemoryRegion { gpa: r.guest_addr, len: r.len_bytes, off: r.mmap_offset })
        .collect();
    sorted.sort_by_key(|region| region.gpa);
    let mut all: Vec<MemoryRegion> = Vec::new();
    for region in sorted {
        match all.last_mut() {
            Some(last)
                if last.gpa.checked_add(last.len) == Some(region.gpa)
                    && last.off.checked_add(last.len) == Some(region.off) =>
            {
                last.len += region.len;
            }
            _ => all.push(region),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::peer_fd::PeerFd;
    use rustix::fs::MemfdFlags;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(len: u64) -> Arc<PeerFd> {
        let file = rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        Arc::new(file.into())
    }

    fn region(file: &Arc<PeerFd>, gpa: u64, len: u64, off: u64) -> SharedRegion {
        SharedRegion { guest_addr: gpa, len_bytes: len, mmap_offset: off, file: file.clone() }
    }

    #[test]
    fn a_pc_s_memory_is_two_regions_of_one_file() {
        let ram = file(8 * MIB);
        // The same file under another descriptor: the front end sends one for each region.
        let again = Arc::new(ram.try_clone().unwrap());
        let table = [
            region(&ram, 1 << 32, 4 * MIB, 4 * MIB),
            region(&again, 0, 0xa0000, 0),
            region(&ram, 0xc0000, MIB - 0xc0000, 0xc0000),
            region(&again, MIB, 3 * MIB, MIB),
            // The mailbox.
            region(&file(65536), 1 << 40, 65536, 0),
        ];
        let (id, memory) = of(&table).unwrap();
        let found: Vec<_> = memory.regions.iter().map(|r| (r.gpa, r.len, r.off)).collect();
        let high = (1 << 32, 4 * MIB, 4 * MIB);
        assert_eq!(found, [(0, 0xa0000, 0), (0xc0000, 4 * MIB - 0xc0000, 0xc0000), high]);
        let stat = rustix::fs::fstat(&memory.file).unwrap();
        assert_eq!(id, (stat.st_dev, stat.st_ino));
    }

    #[test]
    fn memory_in_several_files_is_refused_with_its_places() {
        let table = [region(&file(MIB), 0, MIB, 0), region(&file(MIB), 1 << 32, MIB, 0)];
        let error = of(&table).unwrap_err().to_string();
        for words in ["in 2 files", "at 0x0", "at 0x100000000", "one memory-backend-memfd"] {
            assert!(error.contains(words), "{error}");
        }
        let error = of(&[region(&file(65536), 0, 65536, 0)]).unwrap_err().to_string();
        assert!(error.contains("in 0 files"), "{error}");
    }

    #[test]
    fn neighbours_in_the_guest_that_are_none_in_the_file_stay_apart() {
        let ram = file(4 * MIB);
        let table = [region(&ram, 0, MIB, MIB), region(&ram, MIB, MIB, 0)];
        assert_eq!(of(&table).unwrap().1.regions.len(), 2);
    }
}
