//! CPU that a disk interrupts.
//!
//! A device with one queue interrupts one CPU, whoever asked it. If that is the front end's, the
//! front end waits while completions of the back end's requests are taken, and a reference without
//! front end has a second core that works for it. NVMe disks have a queue for each CPU and
//! interrupt the one that asked: the back end's. So it is here, too: device-bound loads run with
//! the back end on the CPU that the disk interrupts.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Reads that are made to find out, and their length.
const READS: u64 = 256;
const READ_LEN_BYTES: usize = 4096;

/// An interrupt counts as the disk's from so many: other devices make a few meanwhile.
const ENOUGH: u64 = READS / 2;

/// The CPU that is interrupted when a thread on `cpu` reads `file` past the page cache; none if no
/// interrupt is that clearly the disk's (several reads may share one, but not half of them).
pub fn interrupted_cpu(file: &Path, cpu: usize) -> io::Result<Option<usize>> {
    let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(file)?;
    let reader = std::thread::spawn(move || -> io::Result<Option<usize>> {
        base::cpu::pin_current_thread(cpu)?;
        let before = counts()?;
        read_all(&file)?;
        Ok(most(&before, &counts()?))
    });
    reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader panicked")))
}

/// One read after the other, spread over the file.
fn read_all(file: &File) -> io::Result<()> {
    let step = (file.metadata()?.len() / READS).next_multiple_of(READ_LEN_BYTES as u64);
    let mut memory = vec![0u8; 2 * READ_LEN_BYTES];
    // O_DIRECT wants it aligned.
    let skip = memory.as_ptr().align_offset(READ_LEN_BYTES);
    let buffer = &mut memory[skip..skip + READ_LEN_BYTES];
    for k in 0..READS {
        // Short at the end of the file: as good.
        let _ = file.read_at(buffer, k * step)?;
    }
    Ok(())
}

fn counts() -> io::Result<Vec<(String, Vec<u64>)>> {
    Ok(parse(&std::fs::read_to_string("/proc/interrupts")?))
}

/// Device interrupts by name, each with its count on every CPU (proc(5), `/proc/interrupts`).
fn parse(text: &str) -> Vec<(String, Vec<u64>)> {
    let mut lines = text.lines();
    let cpus = lines.next().unwrap_or_default().split_whitespace().count();
    let row = |line: &str| {
        let (name, rest) = line.trim().split_once(':')?;
        // Timers and calls between CPUs have letters for a name.
        name.parse::<u32>().ok()?;
        let counts = rest.split_whitespace().take(cpus).map_while(|n| n.parse().ok()).collect();
        Some((name.to_string(), counts))
    };
    lines.filter_map(row).collect()
}

/// The CPU with the most new interrupts of one kind. With CPUs offline columns are not numbers of
/// CPUs; then the answer is of no use, and does no harm.
fn most(before: &[(String, Vec<u64>)], after: &[(String, Vec<u64>)]) -> Option<usize> {
    let mut best = (ENOUGH, None);
    for (name, now) in after {
        let old = before.iter().find(|(n, _)| n == name).map_or(&[][..], |(_, counts)| counts);
        for (cpu, &count) in now.iter().enumerate() {
            let new = count.saturating_sub(old.get(cpu).copied().unwrap_or(0));
            if new >= best.0 {
                best = (new, Some(cpu));
            }
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "           CPU0       CPU1
 28:          0          0 PCI-MSIX-0000:00:01.0   0-edge      virtio0-config
 36:          7   13969544 PCI-MSIX-0000:00:02.0   1-edge      virtio1-req.0
LOC:    5000000    6000000   Local timer interrupts
ERR:          0
";

    #[test]
    fn the_device_with_the_most_new_interrupts_tells() {
        let before = parse(BEFORE);
        assert_eq!(before.len(), 2, "{before:?}");
        assert_eq!(before[1], ("36".into(), vec![7, 13_969_544]));
        let after = |old: &str, new: &str| parse(&BEFORE.replace(old, new));
        assert_eq!(most(&before, &after("13969544", "13969800")), Some(1));
        assert_eq!(most(&before, &after("36:          7", "36:        263")), Some(0));
        assert_eq!(most(&before, &after("13969544", "13969580")), None, "too few");
        assert_eq!(most(&before, &after("6000000", "7000000")), None, "a timer");
        assert_eq!(most(&[], &before), Some(1), "a device that came meanwhile");
    }

    #[test]
    fn the_reads_reach_every_part_of_a_real_file() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let cpu = base::cpu::allowed_cpus().unwrap()[0];
        // Holes interrupt nobody; whatever another program's disk does is below the limit or not.
        interrupted_cpu(file.path(), cpu).unwrap();
        let missing = interrupted_cpu(Path::new("/var/tmp/there/is/none"), cpu).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
