//! Accounts of single threads of the host: CPU time and waiting for it, wake-ups, system calls; and
//! the machine's interrupts.

use std::os::fd::{FromRawFd, OwnedFd};

use crate::harness::error::BenchError;

/// A thread of any process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thread {
    /// Process of the thread.
    pub pid: u32,
    /// Itself; a process's first thread has the process's number.
    pub tid: u32,
}

impl Thread {
    /// The calling one.
    pub fn current() -> Thread {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        Thread { pid: std::process::id(), tid: tid.unsigned_abs() }
    }
}

fn read(path: &str) -> Result<String, BenchError> {
    std::fs::read_to_string(path).map_err(|e| accounting(path, e))
}

fn accounting(what: &str, why: impl std::fmt::Display) -> BenchError {
    BenchError::Accounting { what: what.into(), why: why.to_string() }
}

/// Threads of a process whose names begin with `prefix`. None at all is an error: it would be
/// accounted as a process that does nothing.
pub fn named(pid: u32, prefix: &str) -> Result<Vec<Thread>, BenchError> {
    let folder = format!("/proc/{pid}/task");
    let tasks = std::fs::read_dir(&folder).map_err(|e| accounting(&folder, e))?;
    let mut found = Vec::new();
    for task in tasks.flatten() {
        // A thread that ended meanwhile is none.
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let tid = task.file_name().to_str().and_then(|t| t.parse().ok());
        if let (true, Some(tid)) = (name.starts_with(prefix), tid) {
            found.push(Thread { pid, tid });
        }
    }
    match found.is_empty() {
        true => Err(accounting(&folder, format!("no thread is named {prefix}*"))),
        false => Ok(found),
    }
}

/// Times from a thread's `schedstat` (proc(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// CPU time.
    pub ran_ns: u64,
    /// How long it was ready and did not run.
    pub waited_ns: u64,
}

/// Times of a thread so far.
pub fn times(thread: Thread) -> Result<Times, BenchError> {
    let path = format!("/proc/{}/task/{}/schedstat", thread.pid, thread.tid);
    schedstat(&read(&path)?).ok_or_else(|| accounting(&path, "unexpected format"))
}

fn schedstat(text: &str) -> Option<Times> {
    let mut fields = text.split_ascii_whitespace().map_while(|f| f.parse().ok());
    Some(Times { ran_ns: fields.next()?, waited_ns: fields.next()? })
}

/// CPU time of some threads so far, nanoseconds.
pub fn cpu_ns(threads: &[Thread]) -> Result<u64, BenchError> {
    threads.iter().try_fold(0, |sum, t| Ok(sum + times(*t)?.ran_ns))
}

/// How often some threads went to sleep so far, and so were woken: voluntary context switches.
pub fn sleeps(threads: &[Thread]) -> Result<u64, BenchError> {
    threads.iter().try_fold(0, |sum, t| {
        let path = format!("/proc/{}/task/{}/status", t.pid, t.tid);
        let count = voluntary(&read(&path)?);
        Ok(sum + count.ok_or_else(|| accounting(&path, "unexpected format"))?)
    })
}

fn voluntary(status: &str) -> Option<u64> {
    status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok())
}

/// Interrupts of the machine so far, all CPUs, without local timers: devices and other CPUs.
pub fn interrupts() -> Result<u64, BenchError> {
    let path = "/proc/interrupts";
    let none = || accounting(path, "unexpected format");
    all_but_timers(&read(path)?).ok_or_else(none)
}

fn all_but_timers(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    let cpus = lines.next()?.split_ascii_whitespace().count();
    let counts = |line: &str| -> u64 {
        line.split_ascii_whitespace().take(cpus).map_while(|n| n.parse::<u64>().ok()).sum()
    };
    let kinds = lines.filter_map(|l| l.split_once(':'));
    Some(kinds.filter(|(name, _)| name.trim() != "LOC").map(|(_, rest)| counts(rest)).sum())
}

/// Counts the system calls of threads from when it is made, through the kernel's tracepoint: the
/// threads run on undisturbed, which they do not under `strace`.
pub struct SystemCalls {
    all: Vec<OwnedFd>,
    yields: Vec<OwnedFd>,
}

/// System calls of some threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Calls {
    /// All but the next.
    pub work: u64,
    /// `sched_yield`: a polling thread that lets others run. They come with time, not with work.
    pub yields: u64,
}

/// `struct perf_event_attr` in its first version (`PERF_ATTR_SIZE_VER0`, include/uapi/linux/
/// perf_event.h).
#[repr(C)]
#[derive(Default)]
struct PerfEventAttr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    bp_addr: u64,
}

/// `PERF_TYPE_TRACEPOINT`.
const TRACEPOINT: u32 = 2;
/// `PERF_FLAG_FD_CLOEXEC`, which libc does not have.
const CLOSE_ON_EXEC: libc::c_ulong = 1 << 3;
/// Folders in which the kernel's tracing file system may be.
const TRACING: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

impl SystemCalls {
    /// Begins to count.
    ///
    /// # Errors
    /// No tracing file system, or no right to use it.
    pub fn start(threads: &[Thread]) -> Result<SystemCalls, BenchError> {
        let open = |name| {
            let id = tracepoint(name)?;
            threads.iter().map(|t| open_counter(id, t.tid)).collect::<Result<Vec<_>, _>>()
        };
        let all = open("raw_syscalls/sys_enter")?;
        Ok(SystemCalls { all, yields: open("syscalls/sys_enter_sched_yield")? })
    }

    /// System calls of all threads since the start.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn count(&self) -> Result<Calls, BenchError> {
        let (all, yields) = (sum(&self.all)?, sum(&self.yields)?);
        Ok(Calls { work: all.saturating_sub(yields), yields })
    }
}

fn sum(counters: &[OwnedFd]) -> Result<u64, BenchError> {
    counters.iter().try_fold(0, |sum, fd| {
        let mut word = [0; 8];
        let len = rustix::io::read(fd, &mut word).map_err(|e| accounting("a counter", e))?;
        match len {
            8 => Ok(sum + u64::from_ne_bytes(word)),
            _ => Err(accounting("a counter", format!("{len} bytes instead of 8"))),
        }
    })
}

fn tracepoint(name: &str) -> Result<u64, BenchError> {
    let paths = TRACING.map(|folder| format!("{folder}/events/{name}/id"));
    let text = paths.iter().find_map(|p| std::fs::read_to_string(p).ok());
    let id = text.and_then(|t| t.trim().parse().ok());
    id.ok_or_else(|| accounting(&paths[0], "no tracing file system is mounted, or no right to it"))
}

fn open_counter(id: u64, tid: u32) -> Result<OwnedFd, BenchError> {
    let size = size_of::<PerfEventAttr>() as u32;
    let attr = PerfEventAttr { kind: TRACEPOINT, size, config: id, ..Default::default() };
    let (any_cpu, no_group) = (-1, -1);
    // SAFETY: the kernel only reads `attr`, which lives across the call and whose `size` says how
    // much of it there is; the other arguments are plain numbers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(&attr),
            tid as libc::pid_t,
            any_cpu,
            no_group,
            CLOSE_ON_EXEC,
        )
    };
    match i32::try_from(fd) {
        // SAFETY: the call just returned this descriptor, and nobody else knows it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => {
            let error = std::io::Error::last_os_error();
            Err(accounting(&format!("the system calls of thread {tid}"), error))
        }
    }
}

#[cfg(test)]
mod tests;
