//! The deadline of a call, in CPU time of the thread that makes it.
//!
//! The kernel's timer of a thread's CPU time ticks only while the thread computes: a module that
//! waits for a disk is not late, a machine with much else to do does not make it late, and a thread
//! without work costs nothing. Each tick counts the engine's epoch up; a call ends when its own
//! number of ticks is over.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use wasmtime::Engine;

use crate::ModulesError;
use crate::limits::TICK;

/// A real-time signal that nothing else here uses.
fn signal() -> c_int {
    libc::SIGRTMIN() + 1
}

extern "C" fn tick(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands over the value of the timer, which is an engine that is never freed.
    // Counting up is an atomic addition, allowed in a handler.
    unsafe {
        let engine = (*info).si_value().sival_ptr.cast::<Engine>();
        if let Some(engine) = engine.as_ref() {
            engine.increment_epoch();
        }
    }
}

/// Handles the signal of all [`Ticker`]s, from now on.
///
/// # Errors
/// The signal cannot be had.
pub fn init() -> Result<(), ModulesError> {
    // SAFETY: all zeroes is a valid `sigaction`; the handler is a function for the life of the
    // process, and does nothing that is not allowed in one.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = tick as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(signal(), &action, ptr::null_mut())
    };
    check(done, "handling the deadlines' signal")
}

fn check(done: c_int, what: &str) -> Result<(), ModulesError> {
    if done == 0 { Ok(()) } else { Err(ModulesError::io(what)(io::Error::last_os_error())) }
}

/// Ticks while the thread that made it computes.
#[derive(Debug)]
pub struct Ticker(libc::timer_t);

impl Ticker {
    /// Makes a ticker for the calling thread and the engine that it runs, both for the life of the
    /// process, after [`init`].
    ///
    /// # Errors
    /// There are no more timers.
    pub fn new(engine: &Engine) -> Result<Self, ModulesError> {
        // A tick may be under way when the ticker goes: the engine stays.
        let engine: &'static Engine = Box::leak(Box::new(engine.clone()));
        let mut timer = MaybeUninit::uninit();
        // SAFETY: all zeroes is a valid `sigevent`; the thread named is this one, and the id is
        // read only if the call filled it in.
        let timer = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal();
            event.sigev_value.sival_ptr = ptr::from_ref(engine).cast_mut().cast();
            event.sigev_notify_thread_id = libc::gettid();
            let clock = libc::CLOCK_THREAD_CPUTIME_ID;
            check(libc::timer_create(clock, &mut event, timer.as_mut_ptr()), "making a timer")?;
            timer.assume_init()
        };
        let ticker = Self(timer);
        let every = libc::timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as libc::c_long };
        let spec = libc::itimerspec { it_interval: every, it_value: every };
        // SAFETY: the timer is ours, the specification is read only.
        check(unsafe { libc::timer_settime(ticker.0, 0, &spec, ptr::null_mut()) }, "a timer")?;
        Ok(ticker)
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and not used after this.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Ticks that are at least so much CPU time, but for one that may have begun before.
#[must_use]
pub fn ticks(deadline: Duration) -> u64 {
    (deadline.as_nanos().div_ceil(TICK.as_nanos()) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_rounded_up() {
        assert_eq!(ticks(Duration::ZERO), 1);
        assert_eq!(ticks(Duration::from_millis(100)), 10);
        assert_eq!(ticks(Duration::from_millis(101)), 11);
    }
}
