//! CPU affinity, and what a CPU can.

use std::io;

/// Pins the calling thread to one CPU. Fails when the CPU does not exist or is not allowed.
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("CPU {cpu} is above the limit {}", rustix::thread::CpuSet::MAX_CPU),
        ));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

/// The CPUs this process may use.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect())
}

/// Whether the CPU has `tpause`: CPUID leaf 7, ECX bit 5 (Intel SDM volume 2, CPUID).
#[cfg(target_arch = "x86_64")]
pub fn has_waitpkg() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let has_leaf_7 = __cpuid(0).eax >= 7;
    has_leaf_7 && __cpuid_count(7, 0).ecx & 1 << 5 != 0
}

/// Only x86 has it.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_waitpkg() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_sees_the_same_cpu() {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = info.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
        assert_eq!(has_waitpkg(), flags.split_whitespace().any(|f| f == "waitpkg"));
    }

    #[test]
    fn pins_to_an_allowed_cpu_and_refuses_a_missing_one() {
        let cpu = allowed_cpus().unwrap()[0];
        std::thread::spawn(move || {
            pin_current_thread(cpu).unwrap();
            assert_eq!(allowed_cpus().unwrap(), vec![cpu]);
        })
        .join()
        .unwrap();
        assert!(pin_current_thread(1 << 20).is_err());
    }
}
