//! Guests that boot as machines do: by a firmware, and a boot loader of their disk.
//!
//! A disk of [`boot_disk`] is laid out as those of installed systems: a table of partitions with
//! GRUB's first sector, GRUB's core image behind it, a system partition for UEFI with GRUB's
//! program, and an ext4 file system with kernel, initial file system and GRUB's menu. BIOS and UEFI
//! both boot it. GRUB and UEFI's firmware are Debian's, unpacked into the cache.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::{BootFiles, Cache, Lab, LabError, apt, rootfs};

/// Firmware of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// SeaBIOS, which QEMU brings.
    Bios,
    /// OVMF of Debian.
    Uefi,
}

/// Package of UEFI's firmware, and its two flash images: program and variables.
const OVMF: &str = "ovmf";
const OVMF_CODE: &str = "usr/share/OVMF/OVMF_CODE_4M.fd";
const OVMF_VARIABLES: &str = "usr/share/OVMF/OVMF_VARS_4M.fd";

const SECTOR: u64 = 512;
/// First partition's place: usual since disks have sectors of 4 KiB, with room for GRUB before it.
const FIRST_PARTITION: u64 = 1 << 20;
/// Size of the system partition, as heads of 32 sectors for `mformat`: 8 MiB.
const SYSTEM_HEADS: u64 = 64;
const SYSTEM_TRACKS: u64 = 8;
const SYSTEM_SECTORS: u64 = 32;
const SYSTEM_BYTES: u64 = SYSTEM_HEADS * SYSTEM_TRACKS * SYSTEM_SECTORS * SECTOR;
/// Room in the file system besides its files, in MiB.
const SPARE_MB: u64 = 16;

/// Place of the partition table in the first sector, behind the boot loader's code.
const TABLE: std::ops::Range<usize> = 446..510;
const SYSTEM_PARTITION: u8 = 0xef;
const LINUX_PARTITION: u8 = 0x83;

/// Modules of GRUB's core image for BIOS, to read the file system and to boot Linux.
const BIOS_MODULES: [&str; 8] =
    ["biosdisk", "part_msdos", "ext2", "normal", "linux", "serial", "terminal", "echo"];
/// Folder of GRUB's programs of Debian for UEFI; they look for their menu in `/EFI/debian`.
const EFI_PROGRAMS: &str = "usr/lib/grub/x86_64-efi/monolithic";

impl Firmware {
    /// Arguments of QEMU for a guest with it.
    pub(crate) fn arguments(self, lab: &Lab, guest: &str) -> Result<Vec<String>, LabError> {
        if self == Self::Bios {
            return Ok(Vec::new());
        }
        let firmware = apt::unpacked(lab.cache(), OVMF)?;
        let variables = lab.path(&format!("{guest}.variables"));
        crate::program::copy(&firmware.join(OVMF_VARIABLES), &variables)?;
        let code = firmware.join(OVMF_CODE);
        let flash = |unit: u8, path: &Path, more: &str| {
            let path = crate::device::quoted(path);
            ["-drive".into(), format!("if=pflash,unit={unit},format=raw,file={path}{more}")]
        };
        let words = [flash(0, &code, ",readonly=on"), flash(1, &variables, "")];
        Ok(words.into_iter().flatten().collect())
    }
}

/// Writes a disk image into the session's folder, from which either firmware boots the guest's
/// kernel and image with its command line.
///
/// # Errors
/// A package cannot be had; the disk is full.
pub fn boot_disk(lab: &Lab, name: &str, files: &BootFiles) -> Result<PathBuf, LabError> {
    let work = lab.path(&format!("{name}.work"));
    let (system, root) = (work.join("system"), work.join("root"));
    create_folder(&work.join("tree/boot/grub"))?;
    let menu = work.join("tree/boot/grub/grub.cfg");
    crate::program::copy(&files.compressed_kernel, &work.join("tree/boot/vmlinuz"))?;
    crate::program::copy(&files.initrd, &work.join("tree/boot/initrd.img"))?;
    write(&menu, menu_text(&files.append).as_bytes())?;
    let root_mb = (len_of(&files.compressed_kernel)? + len_of(&files.initrd)?) / (1 << 20);
    let root_mb = u32::try_from(root_mb + SPARE_MB).unwrap_or(u32::MAX);
    rootfs::ext4_from_folder(&work.join("tree"), &root, root_mb)?;
    system_partition(lab.cache(), &work, &system)?;
    let first = first_sectors(lab.cache(), &work, len_of(&root)?)?;
    let image = lab.path(name);
    let what = format!("write {}", image.display());
    let assemble = || -> std::io::Result<()> {
        let mut disk = File::create(&image)?;
        disk.write_all(&first)?;
        for (place, part) in [(FIRST_PARTITION, &system), (FIRST_PARTITION + SYSTEM_BYTES, &root)] {
            disk.seek(SeekFrom::Start(place))?;
            std::io::copy(&mut File::open(part)?, &mut disk)?;
        }
        Ok(())
    };
    assemble().map_err(LabError::io(what))?;
    crate::cache::remove(&work)?;
    Ok(image)
}

/// GRUB's menu: one entry, taken at once, and words on the serial console.
fn menu_text(append: &str) -> String {
    format!(
        "serial --unit=0\nterminal_output serial\nset timeout=0\nmenuentry lab {{\n\
         echo GRUB loads Linux\nlinux /boot/vmlinuz {append}\ninitrd /boot/initrd.img\n}}\n"
    )
}

/// The file system for UEFI, with GRUB in the place for disks that the firmware does not know.
fn system_partition(cache: &Cache, work: &Path, image: &Path) -> Result<(), LabError> {
    let mtools = apt::unpacked(cache, "mtools")?.join("usr/bin");
    let grub = apt::unpacked(cache, "grub-efi-amd64-bin")?.join(EFI_PROGRAMS);
    let tool = |name: &str| {
        let mut command = Command::new(mtools.join(name));
        command.arg("-i").arg(image);
        command
    };
    let menu = work.join("system.cfg");
    let found = "search --file --set=root /boot/grub/grub.cfg\n";
    write(&menu, format!("{found}configfile /boot/grub/grub.cfg\n").as_bytes())?;
    let [heads, tracks, sectors] =
        [SYSTEM_HEADS, SYSTEM_TRACKS, SYSTEM_SECTORS].map(|number| number.to_string());
    run(tool("mformat").args(["-C", "-h", &heads, "-t", &tracks, "-s", &sectors, "::"]))?;
    run(tool("mmd").args(["::/EFI", "::/EFI/BOOT", "::/EFI/debian"]))?;
    run(tool("mcopy").arg(grub.join("grubx64.efi")).arg("::/EFI/BOOT/BOOTX64.EFI"))?;
    run(tool("mcopy").arg(menu).arg("::/EFI/debian/grub.cfg")).map(|_| ())
}

/// Sectors before the first partition: GRUB's first sector with the partition table, and GRUB's
/// core image from the second sector on, where the first one looks for it.
fn first_sectors(cache: &Cache, work: &Path, root_bytes: u64) -> Result<Vec<u8>, LabError> {
    let grub = apt::unpacked(cache, "grub-pc-bin")?.join("usr/lib/grub/i386-pc");
    let core = work.join("core.img");
    let mkimage = apt::unpacked(cache, "grub-common")?.join("usr/bin/grub-mkimage");
    run(Command::new(mkimage)
        .args(["-O", "i386-pc", "-p", "(hd0,msdos2)/boot/grub", "-d"])
        .arg(&grub)
        .arg("-o")
        .arg(&core)
        .args(BIOS_MODULES))?;
    let core = read(&core)?;
    let mut sectors = read(&grub.join("boot.img"))?;
    let room = FIRST_PARTITION - SECTOR;
    if sectors.len() as u64 != SECTOR || core.len() as u64 > room {
        return Err(LabError::Refused(format!(
            "GRUB's first sector has {} bytes and its core {}: {SECTOR}, and at most {room}",
            sectors.len(),
            core.len()
        )));
    }
    // The jump over this code is there for floppy disks alone.
    sectors[0x66..0x68].copy_from_slice(&[0x90, 0x90]);
    let root = FIRST_PARTITION + SYSTEM_BYTES;
    let partitions =
        [(SYSTEM_PARTITION, FIRST_PARTITION, SYSTEM_BYTES), (LINUX_PARTITION, root, root_bytes)];
    // GRUB has code for floppy disks there, too.
    sectors[TABLE].fill(0);
    for (entry, (kind, start, len)) in sectors[TABLE].chunks_mut(16).zip(partitions) {
        entry.copy_from_slice(&partition(kind, start, len));
    }
    sectors.extend(core);
    Ok(sectors)
}

/// Entry of the partition table. Nobody asks for cylinders, heads and sectors any more.
fn partition(kind: u8, start: u64, len_bytes: u64) -> [u8; 16] {
    const NO_CYLINDERS: [u8; 3] = [0xfe, 0xff, 0xff];
    let mut entry = [0; 16];
    entry[1..4].copy_from_slice(&NO_CYLINDERS);
    entry[4] = kind;
    entry[5..8].copy_from_slice(&NO_CYLINDERS);
    for (place, bytes) in [(8, start), (12, len_bytes)] {
        let sectors = u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
        entry[place..place + 4].copy_from_slice(&sectors.to_le_bytes());
    }
    entry
}

fn create_folder(path: &Path) -> Result<(), LabError> {
    fs::create_dir_all(path).map_err(LabError::io(format!("create {}", path.display())))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    fs::write(path, bytes).map_err(LabError::io(format!("write {}", path.display())))
}

fn read(path: &Path) -> Result<Vec<u8>, LabError> {
    fs::read(path).map_err(LabError::io(format!("read {}", path.display())))
}

fn len_of(path: &Path) -> Result<u64, LabError> {
    let found = fs::metadata(path).map_err(LabError::io(format!("stat {}", path.display())))?;
    Ok(found.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_is_counted_in_sectors() {
        let entry = partition(SYSTEM_PARTITION, FIRST_PARTITION, SYSTEM_BYTES);
        assert_eq!((entry[0], entry[4]), (0, 0xef));
        assert_eq!(entry[8..12], 2048u32.to_le_bytes());
        assert_eq!(entry[12..16], 16384u32.to_le_bytes());
    }
}
