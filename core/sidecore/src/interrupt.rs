//! Interruption and CPU time of other threads. The signal ends the system call that a thread sleeps
//! in, and does nothing else.

use std::io;
use std::sync::OnceLock;

/// Signal that is ignored where no handler is installed: one that goes astray, or reaches a program
/// that the daemon starts, kills nothing. The daemon uses it for nothing else.
const SIGNAL: i32 = libc::SIGURG;

static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

extern "C" fn nothing(_signal: i32) {}

/// Makes the signal harmless, process-wide. Without `SA_RESTART`: that is what it is for.
pub(crate) fn install() -> io::Result<()> {
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: all zeroes is a valid `sigaction`: no flags, no restorer, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        // SAFETY: the handler touches nothing, so it may run at any time on any thread.
        match unsafe { libc::sigaction(SIGNAL, &action, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// Unblocks the signal for the calling thread: the parent of the daemon may have blocked it, and
/// masks are inherited.
pub(crate) fn accept() {
    // SAFETY: both calls only fill the set that is given, which lives here.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, SIGNAL);
        // Fails only for an unknown first argument.
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
    }
}

/// Interrupts a thread of this process. A thread of another process that got the number of an ended
/// one is left alone: the process is part of the address.
pub(crate) fn send(thread: i32) {
    // SAFETY: three numbers; no memory is involved.
    let _ = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, SIGNAL) };
}

/// CPU time of a thread of this process in nanoseconds; none when it has ended.
pub(crate) fn cpu_ns(thread: i32) -> Option<u64> {
    // Linux makes a clock's number of a thread's (`CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED`), the
    // way pthread_getcpuclockid() does; 0 would be the calling thread.
    if thread <= 0 {
        return None;
    }
    let clock = !thread << 3 | 6;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills `time`, which lives here; a wrong clock is an error.
    let answer = unsafe { libc::clock_gettime(clock, &mut time) };
    (answer == 0).then(|| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_with_work_and_ends_with_the_thread() {
        // SAFETY: no argument, and it cannot fail.
        let thread = unsafe { libc::gettid() };
        let before_ns = cpu_ns(thread).unwrap();
        let after_ns = std::iter::repeat_with(|| cpu_ns(thread).unwrap()).find(|t| *t > before_ns);
        assert!(after_ns.is_some());
        assert_eq!(cpu_ns(0), None);
        // Above the kernel's highest thread number.
        assert_eq!(cpu_ns((4 << 20) + 1), None);
    }
}
