//! CPU affinity, CPU time, time slices, and features of the CPU.

use std::io;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

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

/// CPU time of the calling thread since its start.
pub fn thread_time() -> Duration {
    // It is never negative.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Asks the scheduler for slices of `slice_ns` (100,000 to 100,000,000) for the calling thread,
/// instead of its usual few milliseconds. Its share of a CPU stays the same; but a thread that
/// wakes with a shorter slice than that of the running thread does not wait for the end of that
/// slice (EEVDF, Linux 6.12: sched(7), `sched_runtime` in sched_setattr(2)). Older kernels accept
/// the call and do nothing.
pub fn shorten_slice(slice_ns: u64) -> io::Result<()> {
    // SAFETY: plain integers.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: thread 0 is the caller; the kernel writes at most `size` bytes.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    (attr.size, attr.sched_runtime) = (size, slice_ns);
    // SAFETY: the kernel reads `size` bytes.
    let set = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the CPU has `tpause`: CPUID leaf 7, ECX bit 5 (Intel SDM volume 2, CPUID).
#[cfg(target_arch = "x86_64")]
pub fn has_waitpkg() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let has_leaf_7 = __cpuid(0).eax >= 7;
    has_leaf_7 && __cpuid_count(7, 0).ecx & 1 << 5 != 0
}

/// Whether the CPU has `tpause`: only x86 has it.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_waitpkg() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_what_the_kernel_takes_and_nothing_else_changes() {
        std::thread::spawn(|| {
            let nice = || {
                let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
                stat.rsplit(')').next().unwrap().split_whitespace().nth(16).unwrap().to_string()
            };
            let before = nice();
            shorten_slice(200_000).unwrap();
            assert_eq!(nice(), before);
        })
        .join()
        .unwrap();
    }

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
