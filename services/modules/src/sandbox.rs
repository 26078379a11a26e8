//! Sandbox: the rights that a process of modules keeps, once it is set up.
//!
//! Two fences, either of which would do: landlock leaves the folders of the VM's modules and
//! nothing else of any file system, and seccomp leaves the system calls of [`CALLS`] and ends the
//! process at any other. No capabilities, no new memory that can be executed.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySets;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::ModulesError;

/// A system call that is allowed, and what for.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// Number of the call.
    pub number: i64,
    /// Name of the call, as strace has it.
    pub name: &'static str,
    /// Whether it is needed only where things go wrong, or in another version of the C library, so
    /// that a run without trouble does not show it.
    pub rare: bool,
}

macro_rules! calls {
    ($($name:ident $number:ident $($rare:ident)?;)*) => {
        &[$(Call {
            number: libc::$number,
            name: stringify!($name),
            rare: !stringify!($($rare)?).is_empty(),
        },)*]
    };
}

/// All calls. A test compares them with what a process really uses.
pub const CALLS: &[Call] = calls! {
    // Connections and the daemon.
    epoll_wait SYS_epoll_wait rare;
    epoll_pwait SYS_epoll_pwait rare;
    epoll_pwait2 SYS_epoll_pwait2 rare;
    epoll_ctl SYS_epoll_ctl;
    poll SYS_poll rare;
    ppoll SYS_ppoll;
    read SYS_read;
    write SYS_write;
    recvfrom SYS_recvfrom;
    recvmsg SYS_recvmsg;
    sendto SYS_sendto;
    sendmsg SYS_sendmsg;
    close SYS_close;
    // Files.
    openat SYS_openat;
    pread64 SYS_pread64;
    pwrite64 SYS_pwrite64;
    fdatasync SYS_fdatasync;
    fsync SYS_fsync rare;
    ftruncate SYS_ftruncate rare;
    fstat SYS_fstat;
    newfstatat SYS_newfstatat;
    statx SYS_statx rare;
    getdents64 SYS_getdents64;
    lseek SYS_lseek rare;
    renameat SYS_renameat rare;
    renameat2 SYS_renameat2 rare;
    unlinkat SYS_unlinkat rare;
    fcntl SYS_fcntl rare;
    // Memory: nothing that can be executed, see `arguments`.
    mmap SYS_mmap;
    mprotect SYS_mprotect;
    munmap SYS_munmap;
    mremap SYS_mremap rare;
    madvise SYS_madvise rare;
    brk SYS_brk rare;
    // Threads, time, signals.
    futex SYS_futex;
    clock_gettime SYS_clock_gettime rare;
    clock_nanosleep SYS_clock_nanosleep rare;
    getrandom SYS_getrandom;
    timer_create SYS_timer_create;
    timer_settime SYS_timer_settime;
    timer_delete SYS_timer_delete rare;
    gettid SYS_gettid;
    getpid SYS_getpid rare;
    sigaltstack SYS_sigaltstack;
    rt_sigaction SYS_rt_sigaction rare;
    rt_sigprocmask SYS_rt_sigprocmask rare;
    rt_sigreturn SYS_rt_sigreturn rare;
    restart_syscall SYS_restart_syscall rare;
    sched_yield SYS_sched_yield rare;
    sched_getaffinity SYS_sched_getaffinity rare;
    tgkill SYS_tgkill rare;
    exit SYS_exit;
    exit_group SYS_exit_group;
};

fn failed(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> ModulesError {
    move |why| ModulesError::Sandbox(format!("{what}: {why}"))
}

/// Leaves only these folders of all file systems, for this thread and those it makes later.
///
/// # Errors
/// The kernel has no landlock (5.13), or it is switched off.
pub(crate) fn leave_folders<'a>(
    folders: impl Iterator<Item = BorrowedFd<'a>>,
) -> Result<(), ModulesError> {
    let failed = failed("landlock");
    // Newer kernels know more kinds of access, older ones fewer: all that this one knows is fenced
    // off.
    let abi = ABI::V6;
    let allowed = AccessFs::ReadFile
        | AccessFs::WriteFile
        | AccessFs::ReadDir
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
        | AccessFs::Truncate;
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .and_then(|r| r.handle_access(AccessNet::from_all(abi)))
        .and_then(|r| r.scope(Scope::from_all(abi)))
        .and_then(Ruleset::create)
        .map_err(|e| failed(&e))?;
    for folder in folders {
        rules = rules.add_rule(PathBeneath::new(folder, allowed)).map_err(|e| failed(&e))?;
    }
    let status = rules.restrict_self().map_err(|e| failed(&e))?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err(failed(&"the kernel does not enforce it (Linux 5.13, CONFIG_LSM)"));
    }
    Ok(())
}

/// Gives away capabilities, and bounds what the process may have.
///
/// # Errors
/// The kernel refused.
pub(crate) fn give_up_rights(
    memory_bytes: u64,
    files: u64,
    file_bytes: u64,
) -> Result<(), ModulesError> {
    let failed = failed("rights");
    let none = rustix::thread::CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let bounds = [
        (Resource::Data, memory_bytes),
        (Resource::Nofile, files),
        (Resource::Fsize, file_bytes),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
    ];
    for (resource, most) in bounds {
        // Never more than there is: that would take a right.
        let most = getrlimit(resource).maximum.map_or(most, |hard| most.min(hard));
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        setrlimit(resource, limit).map_err(|e| failed(&e))?;
    }
    rustix::thread::set_no_new_privs(true).map_err(|e| failed(&e))?;
    rustix::thread::set_capabilities(None, sets).map_err(|e| failed(&e))?;
    Ok(())
}

/// Leaves only [`CALLS`] to all threads of the process.
///
/// # Errors
/// The kernel refused.
pub(crate) fn leave_calls() -> Result<(), ModulesError> {
    let failed = failed("seccomp");
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|e| failed(&e))?;
    let mut rules = BTreeMap::new();
    for call in CALLS {
        rules.insert(call.number, arguments(call.number).map_err(|e| failed(&e))?);
    }
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)
        .map_err(|e| failed(&e))?;
    let program = BpfProgram::try_from(filter).map_err(|e| failed(&e))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|e| failed(&e))
}

/// Conditions on a call's arguments; empty: none.
fn arguments(number: i64) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let is =
        |argument, how, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value);
    let without = |argument, bits: i32| is(argument, SeccompCmpOp::MaskedEq(bits as u64), 0);
    // Nothing that can be executed, and no memory that is not counted as the process's own.
    let data = without(2, libc::PROT_EXEC)?;
    let own = without(3, libc::MAP_SHARED)?;
    let rules = match number {
        libc::SYS_mmap => vec![vec![data, own]],
        libc::SYS_mprotect => vec![vec![data]],
        // Its own threads alone: it has the daemon's user.
        libc::SYS_tgkill => vec![vec![is(0, SeccompCmpOp::Eq, std::process::id().into())?]],
        // Neither signals to others nor flags that the daemon shares.
        libc::SYS_fcntl => vec![
            vec![is(1, SeccompCmpOp::Eq, libc::F_GETFD as u64)?],
            vec![is(1, SeccompCmpOp::Eq, libc::F_GETFL as u64)?],
            vec![is(1, SeccompCmpOp::Eq, libc::F_DUPFD_CLOEXEC as u64)?],
        ],
        // The daemon's log may be a file.
        libc::SYS_pwrite64 | libc::SYS_ftruncate => vec![vec![is(0, SeccompCmpOp::Gt, 2)?]],
        _ => return Ok(Vec::new()),
    };
    rules.into_iter().map(SeccompRule::new).collect()
}

#[cfg(test)]
mod tests;
