//! A signal that does nothing but end whatever system call a thread sleeps in.

use std::io;
use std::sync::OnceLock;

/// Ignored where nobody handles it, so that one that comes astray, or one for a program that we
/// start, kills nobody; used by nothing else here.
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

/// Lets the signal through to the calling thread: who started the daemon may have blocked it, and
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

/// Interrupts a thread of this process. One that has ended is left alone, as is a stranger that got
/// its number: the process is part of the address.
pub(crate) fn send(thread: i32) {
    // SAFETY: three numbers; no memory is involved.
    let _ = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, SIGNAL) };
}
