//! The `[Service]` section of a unit file.

use std::collections::{BTreeMap, BTreeSet};

/// System calls and their numbers, by group.
const CALLS: &str = include_str!("syscalls.txt");
const CAPABILITIES: [(&str, u32); 5] = [
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_NET_BIND_SERVICE", 10),
    ("CAP_LEASE", 28),
];
const FAMILIES: [(&str, u64); 5] =
    [("AF_UNIX", 1), ("AF_INET", 2), ("AF_INET6", 10), ("AF_NETLINK", 16), ("AF_VSOCK", 40)];
/// They deny a program nothing, or nothing that one could do without the calls and capabilities that
/// others take.
const ELSEWHERE: [&str; 14] = [
    "Type",
    "Restart",
    "RestartSec",
    "TimeoutStopSec",
    "RuntimeDirectoryPreserve",
    "MemoryMax",
    "TasksMax",
    "AmbientCapabilities",
    "LockPersonality",
    "ProtectClock",
    "ProtectHostname",
    "RestrictRealtime",
    "RestrictSUIDSGID",
    "SystemCallArchitectures",
];

/// What a unit says of its program.
#[derive(Debug, Default)]
pub struct Unit {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Below `/run`.
    pub runtime_folders: Vec<String>,
    pub max_files: Option<u64>,
    /// Numbers of those that it may have.
    pub capabilities: BTreeSet<u32>,
    /// Of sockets that it may make.
    pub families: BTreeSet<u64>,
    /// Numbers of those that it may make.
    pub calls: BTreeSet<i64>,
    pub denies_writable_code: bool,
    pub denies_namespaces: bool,
}

impl Unit {
    /// # Errors
    /// What is not understood, with the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut unit = Self::default();
        let mut section = "";
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if line.starts_with('[') {
                section = line;
            } else if section == "[Service]" {
                let (key, value) = line.split_once('=').ok_or(format!("no directive: {line}"))?;
                unit.set(key, value).map_err(|what| format!("{what}: {line}"))?;
            }
        }
        match unit.command.is_empty() || unit.calls.is_empty() {
            true => Err("it has no ExecStart or no SystemCallFilter".into()),
            false => Ok(unit),
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let words = || value.split_whitespace();
        match key {
            "ExecStart" => self.command = words().map(Into::into).collect(),
            "RuntimeDirectory" => self.runtime_folders = words().map(Into::into).collect(),
            "LimitNOFILE" => self.max_files = Some(value.parse().map_err(|_| "no number")?),
            "CapabilityBoundingSet" => self.capabilities = numbers(words(), &CAPABILITIES)?,
            "RestrictAddressFamilies" => self.families = numbers(words(), &FAMILIES)?,
            "SystemCallFilter" => self.filter(value)?,
            "MemoryDenyWriteExecute" => self.denies_writable_code = yes(value)?,
            "RestrictNamespaces" => self.denies_namespaces = yes(value)?,
            // Filters need it too.
            "NoNewPrivileges" => drop(yes(value)?),
            "SystemCallErrorNumber" if value == "EPERM" => (),
            _ if ELSEWHERE.contains(&key) => (),
            _ => return Err("a directive that is not known here".into()),
        }
        Ok(())
    }

    /// The first line allows and denies all others; later ones add, or take away with `~`.
    fn filter(&mut self, value: &str) -> Result<(), String> {
        let (takes, names) = value.strip_prefix('~').map_or((false, value), |rest| (true, rest));
        if self.calls.is_empty() {
            match takes {
                true => return Err("a list of what is denied first".into()),
                false => self.calls.extend(group("@default")?.into_values()),
            }
        }
        for name in names.split_whitespace() {
            let calls = calls_of(name)?;
            match takes {
                true => self.calls.retain(|call| !calls.contains(call)),
                false => self.calls.extend(calls),
            }
        }
        Ok(())
    }
}

fn yes(value: &str) -> Result<bool, String> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err("neither yes nor no".into()),
    }
}

fn numbers<'a, N: Copy + Ord>(
    names: impl Iterator<Item = &'a str>,
    known: &[(&str, N)],
) -> Result<BTreeSet<N>, String> {
    let number = |name: &str| known.iter().find(|(known, _)| *known == name).map(|(_, n)| *n);
    names.map(|name| number(name).ok_or(format!("{name} is not known here"))).collect()
}

/// The numbers of a group, or of one system call.
fn calls_of(name: &str) -> Result<BTreeSet<i64>, String> {
    if name.starts_with('@') {
        return Ok(group(name)?.into_values().collect());
    }
    for title in CALLS.lines().filter(|line| line.starts_with(['@', 'o'])) {
        if let Some(number) = group(title)?.get(name) {
            return Ok([*number].into());
        }
    }
    Err(format!("{name} is no system call of syscalls.txt"))
}

fn group(title: &str) -> Result<BTreeMap<&'static str, i64>, String> {
    let mut lines = CALLS.lines().skip_while(|line| *line != title);
    lines.next().ok_or(format!("{title} is no group of syscalls.txt"))?;
    let words = lines.take_while(|line| line.starts_with(' ')).flat_map(str::split_whitespace);
    words
        .map(|word| {
            let (name, number) = word.split_once('=').ok_or(format!("syscalls.txt: {word}"))?;
            Ok((name, number.parse().map_err(|_| format!("syscalls.txt: {word}"))?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGENTS: &str = include_str!("../../../../../guest/agent/millrace-agent.service");

    #[test]
    fn the_agents_unit_is_understood() {
        let unit = Unit::parse(AGENTS).unwrap();
        assert_eq!(unit.command, ["/usr/sbin/millrace-agent"]);
        assert_eq!(unit.runtime_folders, ["millrace"]);
        assert_eq!((unit.max_files, unit.capabilities.len()), (Some(4096), 5));
        assert!(unit.denies_writable_code && unit.denies_namespaces);
        let may = |name| unit.calls.contains(calls_of(name).unwrap().first().unwrap());
        let allowed = ["read", "ioctl", "socket", "execve", "setfsuid", "mincore"];
        assert!(allowed.into_iter().all(may));
        let denied = ["setuid", "chown", "open_by_handle_at", "sched_setaffinity", "ptrace"];
        // Of ptrace nothing is known: it is in no group that is allowed.
        assert!(!denied[..4].iter().any(|name| may(name)));
        assert!(calls_of(denied[4]).is_err());
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        let least =
            "[Unit]\nAfter=x\n[Service]\nExecStart=/a b\nSystemCallFilter=@system-service\n";
        assert_eq!(Unit::parse(least).unwrap().command, ["/a", "b"]);
        for (line, what) in [
            ("ProtectHome=yes", "not known here: ProtectHome"),
            ("SystemCallFilter=@nothing", "@nothing is no group"),
            ("SystemCallFilter=~nothing", "nothing is no system call"),
            ("RestrictAddressFamilies=AF_X25", "AF_X25 is not known here"),
            ("CapabilityBoundingSet=CAP_KILL", "CAP_KILL is not known here"),
            ("MemoryDenyWriteExecute=maybe", "neither yes nor no"),
            ("SystemCallErrorNumber=EACCES", "not known here"),
            ("nothing", "no directive: nothing"),
        ] {
            let error = Unit::parse(&format!("{least}{line}\n")).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        let denies_first = Unit::parse("[Service]\nExecStart=/a\nSystemCallFilter=~@privileged\n");
        assert!(denies_first.unwrap_err().contains("denied first"));
        assert!(Unit::parse("[Unit]\nExecStart=/a\n").is_err());
    }
}
