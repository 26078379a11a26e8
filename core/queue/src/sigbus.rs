//! Files truncated under us: the SIGBUS handler.
//!
//! A VMM may shrink the file behind a VM's memory after we mapped it; the next access then raises
//! SIGBUS, which would end the daemon and with it every other VM. One process-wide handler,
//! installed with the first mapping, replaces the lost pages by zero pages and notes which mapping
//! was hit; the port then fails at its next batch.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use base::sync::lock;

/// Most mappings at a time: 256 ports with all 64 regions, or 1,024 ports with 16 regions. The
/// table is static, because a signal handler may not allocate.
pub(crate) const MAX_MAPPINGS: usize = 16 * 1024;

/// One mapped range. `start` is 0 while the slot is free.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    hit: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page_bytes: AtomicUsize::new(0),
        hit: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// Slots below this were used at least once: bounds the handler's search.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);

/// Faults absorbed so far, in the whole process.
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Free slots below the high-water mark.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: written once, before the handler that reads it is installed.
unsafe impl Sync for Previous {}
static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::zeroed()));

static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();

/// Number of faults absorbed so far. One relaxed load: a ring compares it per batch, and looks at
/// its memory only when the number has changed.
#[inline]
pub(crate) fn fault_count() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// A mapping that the handler protects, until dropped.
#[derive(Debug)]
pub(crate) struct SigbusGuard(usize);

impl SigbusGuard {
    /// Protects `start..start + len_bytes`, mapped with pages of `page_bytes`. The error is a text
    /// for the operator.
    pub fn new(start: usize, len_bytes: usize, page_bytes: usize) -> Result<Self, String> {
        install()?;
        let index = {
            let mut free = lock(&FREE);
            match free.pop() {
                Some(index) => index,
                None => {
                    let next = HIGH_WATER.load(Ordering::Relaxed);
                    if next == MAX_MAPPINGS {
                        return Err(format!("{MAX_MAPPINGS} mappings exist; that is the limit"));
                    }
                    HIGH_WATER.store(next + 1, Ordering::Release);
                    next
                }
            }
        };
        let slot = &SLOTS[index];
        slot.hit.store(false, Ordering::Relaxed);
        slot.page_bytes.store(page_bytes, Ordering::Relaxed);
        slot.end.store(start + len_bytes, Ordering::SeqCst);
        slot.start.store(start, Ordering::SeqCst);
        Ok(Self(index))
    }

    /// Whether an access to the range hit a hole.
    pub fn was_hit(&self) -> bool {
        SLOTS[self.0].hit.load(Ordering::Acquire)
    }
}

impl Drop for SigbusGuard {
    fn drop(&mut self) {
        let slot = &SLOTS[self.0];
        // The start goes first: see the reader in `find`.
        slot.start.store(0, Ordering::SeqCst);
        slot.end.store(0, Ordering::SeqCst);
        lock(&FREE).push(self.0);
    }
}

fn install() -> Result<(), String> {
    let result = INSTALLED.get_or_init(|| {
        // SAFETY: `action` is fully initialised; the handler is async-signal-safe (it only uses
        // atomics and mmap); SA_ONSTACK so that a thread with a guard stack works.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut action.sa_mask);
            // Read the previous action first: the handler may run as soon as it is installed.
            let previous = (*PREVIOUS.0.get()).as_mut_ptr();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), previous) != 0
                || libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) != 0
            {
                return Err(*libc::__errno_location());
            }
        }
        Ok(())
    });
    result.map_err(|errno| format!("cannot install the SIGBUS handler: errno {errno}"))
}

/// The slot that holds `addr`. A slot may be freed and filled again while we read it: the start is
/// read on both sides of the end, and is zero while the end changes.
fn find(addr: usize) -> Option<(&'static Slot, usize)> {
    let count = HIGH_WATER.load(Ordering::Acquire).min(MAX_MAPPINGS);
    SLOTS[..count].iter().find_map(|slot| {
        let start = slot.start.load(Ordering::SeqCst);
        let end = slot.end.load(Ordering::SeqCst);
        let same = slot.start.load(Ordering::SeqCst) == start;
        (same && start != 0 && start <= addr && addr < end).then_some((slot, end))
    })
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, with an address for
    // SIGBUS; errno belongs to this thread.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        let addr = (*info).si_addr() as usize;
        let absorbed = (*info).si_code > 0 && absorb(addr);
        *errno = saved;
        if !absorbed {
            call_previous(signal, info, context);
        }
    }
}

/// Puts zero pages from the faulting page to the end of its mapping.
fn absorb(addr: usize) -> bool {
    let Some((slot, end)) = find(addr) else {
        return false;
    };
    let page = addr & !(slot.page_bytes.load(Ordering::Relaxed).max(1) - 1);
    slot.hit.store(true, Ordering::Release);
    FAULTS.fetch_add(1, Ordering::Release);
    // SAFETY: the range lies in a mapping of ours that is in use right now (it just faulted), so
    // nobody unmaps it; replacing its pages changes content only.
    let mapped = unsafe {
        libc::mmap(
            page as *mut libc::c_void,
            end - page,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Hands a fault outside our mappings to the handler that was there before.
///
/// # Safety
/// The arguments are those of the signal handler.
unsafe fn call_previous(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: filled before the handler was installed, never changed after.
    let previous = unsafe { (*PREVIOUS.0.get()).assume_init_ref() };
    let handler = previous.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // Back to the default action; the access is repeated on return and ends the process.
        // SAFETY: restoring a default action is async-signal-safe.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        type Action = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: SA_SIGINFO says that the address is a function of this type.
        let action: Action = unsafe { std::mem::transmute(handler) };
        action(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO it is a function of one argument.
        let action: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        action(signal);
    }
}
