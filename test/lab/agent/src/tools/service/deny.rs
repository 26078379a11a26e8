//! Denials of a unit, enforced by the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use super::unit::Unit;
use crate::AgentError;

/// Beyond what any kernel knows: the first that it does not know ends the search.
const MAX_CAPABILITIES: u32 = 64;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Takes all other capabilities from the programs that this process executes.
pub fn capabilities(kept: &BTreeSet<u32>) -> Result<(), AgentError> {
    for capability in (0..MAX_CAPABILITIES).filter(|number| !kept.contains(number)) {
        // SAFETY: prctl(PR_CAPBSET_DROP) takes a number and reads no memory.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        match io::Error::last_os_error() {
            _ if result == 0 => (),
            error if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            error => return Err(AgentError::io(format!("drop capability {capability}"))(error)),
        }
    }
    Ok(())
}

/// Filters of system calls, as systemd has them: one for each directive, and the strictest answer
/// counts.
pub fn calls(unit: &Unit) -> Result<(), AgentError> {
    let families = rule(unit.families.iter().map(|n| condition(0, SeccompCmpOp::Ne, *n)).collect());
    apply([(libc::SYS_socket, vec![families?])].into(), libc::EAFNOSUPPORT)?;
    if unit.denies_writable_code {
        apply(writable_code()?, libc::EPERM)?;
    }
    if !unit.denied_namespaces.is_empty() {
        apply(namespaces(&unit.denied_namespaces)?, libc::EPERM)?;
        // Its flags are in memory, where a filter cannot look: programs fall back to clone(2).
        apply([(libc::SYS_clone3, vec![])].into(), libc::ENOSYS)?;
    }
    let allowed = unit.calls.iter().map(|call| (*call, vec![])).collect();
    install(allowed, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)
}

fn writable_code() -> Result<Rules, AgentError> {
    let has = |argument, bits: i32| {
        let bits = bits as u64;
        rule(vec![condition(argument, SeccompCmpOp::MaskedEq(bits), bits)])
    };
    Ok([
        (libc::SYS_mmap, vec![has(2, libc::PROT_WRITE | libc::PROT_EXEC)?]),
        (libc::SYS_mprotect, vec![has(2, libc::PROT_EXEC)?]),
        (libc::SYS_pkey_mprotect, vec![has(2, libc::PROT_EXEC)?]),
        (libc::SYS_shmat, vec![has(2, libc::SHM_EXEC)?]),
    ]
    .into())
}

fn namespaces(kinds: &BTreeSet<i32>) -> Result<Rules, AgentError> {
    let has_one = |argument| {
        let has = |kind: &i32| {
            let kind = *kind as u64;
            rule(vec![condition(argument, SeccompCmpOp::MaskedEq(kind), kind)])
        };
        kinds.iter().map(has).collect::<Result<Vec<_>, _>>()
    };
    let mut entered = has_one(1)?;
    // Of whatever kind it is.
    entered.push(rule(vec![condition(1, SeccompCmpOp::Eq, 0)])?);
    Ok([
        (libc::SYS_unshare, has_one(0)?),
        (libc::SYS_clone, has_one(0)?),
        (libc::SYS_setns, entered),
    ]
    .into())
}

fn condition(
    argument: u8,
    op: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
}

fn rule(
    conditions: Vec<Result<SeccompCondition, seccompiler::BackendError>>,
) -> Result<SeccompRule, AgentError> {
    let conditions = conditions.into_iter().collect::<Result<_, _>>().map_err(failed)?;
    SeccompRule::new(conditions).map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> AgentError {
    AgentError::Refused(format!("a filter of system calls: {error}"))
}

/// Has these calls fail with an error; all others are allowed.
fn apply(rules: Rules, error: i32) -> Result<(), AgentError> {
    install(rules, SeccompAction::Allow, SeccompAction::Errno(error as u32))
}

fn install(rules: Rules, other: SeccompAction, matching: SeccompAction) -> Result<(), AgentError> {
    let filter = SeccompFilter::new(rules, other, matching, TargetArch::x86_64).map_err(failed)?;
    let program = BpfProgram::try_from(filter).map_err(failed)?;
    seccompiler::apply_filter(&program).map_err(failed)
}
