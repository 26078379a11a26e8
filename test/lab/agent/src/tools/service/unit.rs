//! The `[Service]` section of a unit file.

use std::collections::{BTreeMap, BTreeSet};

/// System calls and their numbers, by group.
const CALLS: &str = include_str!("syscalls.txt");
const CAPABILITIES: [(&str, u32); 8] = [
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_NET_BIND_SERVICE", 10),
    ("CAP_NET_ADMIN", 12),
    ("CAP_SYS_ADMIN", 21),
    ("CAP_SYS_NICE", 23),
    ("CAP_LEASE", 28),
];
/// Kinds of namespaces, by the flags of `clone(2)`.
const NAMESPACES: [(&str, i32); 7] = [
    ("cgroup", libc::CLONE_NEWCGROUP),
    ("ipc", libc::CLONE_NEWIPC),
    ("mnt", libc::CLONE_NEWNS),
    ("net", libc::CLONE_NEWNET),
    ("pid", libc::CLONE_NEWPID),
    ("user", libc::CLONE_NEWUSER),
    ("uts", libc::CLONE_NEWUTS),
];
const FAMILIES: [(&str, u64); 5] =
    [("AF_UNIX", 1), ("AF_INET", 2), ("AF_INET6", 10), ("AF_NETLINK", 16), ("AF_VSOCK", 40)];
/// Settings that deny a program nothing, or nothing that one could do without the calls and
/// capabilities that others take.
const ELSEWHERE: [&str; 24] = [
    "Group",
    "OOMPolicy",
    "OOMScoreAdjust",
    "KillMode",
    "RuntimeDirectoryMode",
    "UMask",
    "ExecStartPre",
    "StateDirectory",
    "WatchdogSec",
    "Type",
    "Restart",
    "RestartSec",
    "TimeoutStartSec",
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

/// Settings that give a program a view of files that is not the lab's, whose files are in other
/// places.
const VIEWS: [&str; 11] = [
    "PrivateDevices",
    "PrivateNetwork",
    "ProtectSystem",
    "ReadWritePaths",
    "ProtectHome",
    "PrivateTmp",
    "ProtectControlGroups",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
];

/// Settings of a unit for its program.
#[derive(Debug, Default)]
pub struct Unit {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Below `/run`.
    pub runtime_folders: Vec<String>,
    pub max_files: Option<u64>,
    pub max_locked_bytes: Option<u64>,
    /// Numbers of those that it may have.
    pub capabilities: BTreeSet<u32>,
    /// Address families of sockets that it may make.
    pub families: BTreeSet<u64>,
    /// Numbers of those that it may make.
    pub calls: BTreeSet<i64>,
    pub denies_writable_code: bool,
    /// Flags of `clone(2)`.
    pub denied_namespaces: BTreeSet<i32>,
}

impl Unit {
    /// Parses a unit and its drop-ins.
    ///
    /// # Errors
    /// The line that is not understood, and why.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut unit = Self::default();
        for text in texts {
            unit.add(text)?;
        }
        match unit.command.is_empty() || unit.calls.is_empty() {
            true => Err("it has no ExecStart or no SystemCallFilter".into()),
            false => Ok(unit),
        }
    }

    fn add(&mut self, text: &str) -> Result<(), String> {
        let mut section = "";
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if line.starts_with('[') {
                section = line;
            } else if section == "[Service]" {
                let (key, value) = line.split_once('=').ok_or(format!("no directive: {line}"))?;
                self.set(key, value).map_err(|what| format!("{what}: {line}"))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let words = || value.split_whitespace();
        match key {
            "ExecStart" => self.command = words().map(Into::into).collect(),
            "RuntimeDirectory" => self.runtime_folders = words().map(Into::into).collect(),
            "LimitNOFILE" => self.max_files = Some(number(value)?),
            "LimitMEMLOCK" => self.max_locked_bytes = Some(number(value)?),
            // Of several lines all count; an empty one takes back those before.
            "CapabilityBoundingSet" if value.is_empty() => self.capabilities.clear(),
            "CapabilityBoundingSet" => self.capabilities.extend(numbers(words(), &CAPABILITIES)?),
            "RestrictAddressFamilies" => self.families.extend(numbers(words(), &FAMILIES)?),
            "SystemCallFilter" => self.filter(value)?,
            "MemoryDenyWriteExecute" => self.denies_writable_code = yes(value)?,
            "RestrictNamespaces" => self.denied_namespaces = denied_namespaces(value)?,
            // Filters need it too.
            "NoNewPrivileges" => drop(yes(value)?),
            "SystemCallErrorNumber" if value == "EPERM" => (),
            _ if ELSEWHERE.contains(&key) || VIEWS.contains(&key) => (),
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

/// `yes` denies all, a list those that are not in it.
fn denied_namespaces(value: &str) -> Result<BTreeSet<i32>, String> {
    let all = NAMESPACES.iter().map(|(_, flag)| *flag);
    match value {
        "yes" => Ok(all.collect()),
        "no" | "" => Ok(BTreeSet::new()),
        list => {
            let allowed = numbers(list.split_whitespace(), &NAMESPACES)?;
            Ok(all.filter(|flag| !allowed.contains(flag)).collect())
        }
    }
}

/// With a suffix to the base of 1024.
fn number(value: &str) -> Result<u64, String> {
    let (digits, shift) = match value.strip_suffix('M') {
        Some(digits) => (digits, 20),
        None => (value, 0),
    };
    Ok(digits.parse::<u32>().map(u64::from).map_err(|_| "no number")? << shift)
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

    const DAEMONS: &str = include_str!("../../../../../../packaging/millrace.service");
    const PIPES: &str = include_str!("../../../../../../packaging/millrace-pipes.conf");
    const AGENTS: &str = include_str!("../../../../../../guest/agent/millrace-agent.service");

    #[test]
    fn the_agents_unit_is_understood() {
        let unit = Unit::parse([AGENTS]).unwrap();
        assert_eq!(unit.command, ["/usr/sbin/millrace-agent"]);
        assert_eq!(unit.runtime_folders, ["millrace"]);
        assert_eq!((unit.max_files, unit.capabilities.len()), (Some(4096), 5));
        assert!(unit.denies_writable_code && unit.denied_namespaces.len() == NAMESPACES.len());
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
        assert_eq!(Unit::parse([least]).unwrap().command, ["/a", "b"]);
        for (line, what) in [
            ("PrivateUsers=yes", "not known here: PrivateUsers"),
            ("SystemCallFilter=@nothing", "@nothing is no group"),
            ("SystemCallFilter=~nothing", "nothing is no system call"),
            ("RestrictAddressFamilies=AF_X25", "AF_X25 is not known here"),
            ("CapabilityBoundingSet=CAP_KILL", "CAP_KILL is not known here"),
            ("MemoryDenyWriteExecute=maybe", "neither yes nor no"),
            ("SystemCallErrorNumber=EACCES", "not known here"),
            ("nothing", "no directive: nothing"),
        ] {
            let error = Unit::parse([&*format!("{least}{line}\n")]).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        let denies_first =
            Unit::parse(["[Service]\nExecStart=/a\nSystemCallFilter=~@privileged\n"]);
        assert!(denies_first.unwrap_err().contains("denied first"));
        assert!(Unit::parse(["[Unit]\nExecStart=/a\n"]).is_err());
    }

    #[test]
    fn a_drop_in_adds() {
        let unit = Unit::parse([DAEMONS]).unwrap();
        assert_eq!((unit.max_files, unit.max_locked_bytes), (Some(524_288), Some(64 << 20)));
        assert_eq!(unit.denied_namespaces.len(), NAMESPACES.len());
        let with_pipes = Unit::parse([DAEMONS, PIPES]).unwrap();
        assert_eq!(with_pipes.denied_namespaces.len(), NAMESPACES.len() - 1);
        assert!(!with_pipes.denied_namespaces.contains(&libc::CLONE_NEWNET));
        assert!(with_pipes.capabilities.is_superset(&unit.capabilities));
        assert_eq!(with_pipes.capabilities.len(), unit.capabilities.len() + 1);
        assert_eq!(with_pipes.families, [1, 2, 10, 16].into());
    }
}
