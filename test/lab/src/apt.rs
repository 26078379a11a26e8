//! Debian packages: host programs the lab needs, and kernels to unpack without installing.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::{Cache, LabError};

/// Host programs and the package each comes from.
pub const PROGRAMS: [(&str, &str); 39] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("cpio", "cpio"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("depmod", "kmod"),
    ("modinfo", "kmod"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("ldd", "libc-bin"),
    ("cc", "gcc"),
    ("strip", "binutils"),
    ("make", "make"),
    ("pahole", "pahole"),
    ("sparse", "sparse"),
    ("perl", "perl"),
    ("python3", "python3"),
    ("lz4", "lz4"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("gzip", "gzip"),
    ("tar", "tar"),
    ("fio", "fio"),
    ("iperf3", "iperf3"),
    ("ethtool", "ethtool"),
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("xfs_repair", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("virsh", "libvirt-clients"),
    // With the user that its QEMUs run as.
    ("libvirtd", "libvirt-daemon-system"),
    ("xmllint", "libxml2-utils"),
    // Debian's compiler for browsers, which comes with its standard library's sources.
    ("/usr/bin/cargo", "cargo-web"),
    ("/usr/bin/rustc", "rustc-web"),
    ("ld.lld-19", "lld-19"),
    // Without the service of the package dnsmasq.
    ("dnsmasq", "dnsmasq-base"),
];

/// Folders in which programs are looked for; `PATH` of a test run often lacks the `sbin` folders.
const FOLDERS: [&str; 6] =
    ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin"];

/// The full path of a host program.
#[must_use]
pub fn which(program: &str) -> Option<PathBuf> {
    if program.starts_with('/') {
        return Some(PathBuf::from(program)).filter(|path| path.is_file());
    }
    FOLDERS.iter().map(|folder| Path::new(folder).join(program)).find(|path| path.is_file())
}

/// Like [`which`], with the remedy in the error.
///
/// # Errors
/// [`LabError::Missing`].
pub fn need(program: &str) -> Result<PathBuf, LabError> {
    which(program).ok_or_else(|| {
        let package = PROGRAMS.iter().find(|(name, _)| *name == program).map(|(_, from)| from);
        LabError::Missing {
            what: format!("program {program}"),
            remedy: match package {
                Some(package) => format!("run `lab setup` (or install {package})"),
                None => "install the package that has it".into(),
            },
        }
    })
}

/// Packages of [`PROGRAMS`] whose programs are not there.
#[must_use]
pub fn missing_packages() -> Vec<&'static str> {
    let mut packages: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| which(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    packages.dedup();
    packages
}

/// A command of apt that asks nothing and shows errors alone.
pub(crate) fn apt_get(arguments: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command
        .args(["-qq", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Sandbox::User=root"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Runs an apt command; when it fails, refreshes the package lists once and tries again.
fn with_update(mut command: impl FnMut() -> Command) -> Result<(), LabError> {
    if run(&mut command()).is_ok() {
        return Ok(());
    }
    run(&mut apt_get(&["update"]))?;
    run(&mut command()).map(|_| ())
}

/// Installs packages with their needs and nothing more.
///
/// # Errors
/// Not root, or apt's own failure with its text.
pub fn install(packages: &[&str]) -> Result<(), LabError> {
    if packages.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(LabError::Missing {
            what: format!("packages {}", packages.join(" ")),
            remedy: "run `lab setup` as root".into(),
        });
    }
    with_update(|| {
        let mut command = apt_get(&["install", "--no-install-recommends"]);
        command.args(packages);
        command
    })
}

/// Names of available packages that match a regular expression, without their descriptions.
///
/// # Errors
/// apt-cache fails.
pub fn search(expression: &str) -> Result<Vec<String>, LabError> {
    let ask = || run(Command::new("apt-cache").args(["search", "--names-only", expression]));
    let mut found = ask()?;
    if found.is_empty() && rustix::process::geteuid().is_root() {
        run(&mut apt_get(&["update"]))?;
        found = ask()?;
    }
    Ok(names(&found))
}

/// Names in what `apt-cache search` says.
pub(crate) fn names(found: &[u8]) -> Vec<String> {
    let found = String::from_utf8_lossy(found);
    found.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

/// The folder of a package's content, unpacked into the cache and not installed.
///
/// # Errors
/// Those of [`unpack`].
pub fn unpacked(cache: &Cache, package: &str) -> Result<PathBuf, LabError> {
    cache.get(&format!("package-{package}"), |part| {
        let download = part.with_extension("download");
        crate::cache::remove(&download)?;
        unpack(package, &download, part)?;
        crate::cache::remove(&download)
    })
}

/// Downloads a package into a folder and unpacks it into another, without installing it. Returns
/// the package's version.
///
/// # Errors
/// The sources do not have it, the network fails, or the archive is broken.
pub fn unpack(package: &str, download: &Path, into: &Path) -> Result<String, LabError> {
    std::fs::create_dir_all(download)
        .map_err(LabError::io(format!("create {}", download.display())))?;
    with_update(|| {
        let mut command = apt_get(&["download", package]);
        command.current_dir(download);
        command
    })?;
    unpack_all(download, into)
}

/// Unpacks and removes all packages' archives of a folder, of which there must be one. Returns the
/// version of one of them.
///
/// # Errors
/// There is none; an archive is broken.
pub(crate) fn unpack_all(download: &Path, into: &Path) -> Result<String, LabError> {
    let archives = archives(download)?;
    let last = archives.last().ok_or_else(|| {
        LabError::Refused(format!("apt-get download left no file in {}", download.display()))
    })?;
    let version = run(Command::new("dpkg-deb").arg("-f").arg(last).arg("Version"))?;
    archives.iter().try_for_each(|archive| unpack_archive(archive, into))?;
    Ok(String::from_utf8_lossy(&version).trim().to_owned())
}

/// Archives of packages in a folder.
fn archives(folder: &Path) -> Result<Vec<PathBuf>, LabError> {
    let entries =
        std::fs::read_dir(folder).map_err(LabError::io(format!("list {}", folder.display())))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    Ok(paths.filter(|path| path.extension().is_some_and(|end| end == "deb")).collect())
}

fn unpack_archive(archive: &Path, into: &Path) -> Result<(), LabError> {
    run(Command::new("dpkg-deb").arg("-x").arg(archive).arg(into))?;
    std::fs::remove_file(archive).map_err(LabError::io(format!("remove {}", archive.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        assert!(which("sh").is_some());
        let error = need("no-such-program-at-all").unwrap_err().to_string();
        assert!(error.contains("no-such-program-at-all"), "{error}");
    }

    /// A machine that has only what `scripts/prepare` installs must boot the guests.
    #[test]
    fn prepare_installs_every_package() {
        /// Essential in Debian: always there.
        const ESSENTIAL: [&str; 6] = ["dash", "dpkg", "gzip", "libc-bin", "tar", "util-linux"];
        let prepare = include_str!("../../../scripts/prepare");
        let (_, list) = prepare.split_once("PACKAGES=(").unwrap();
        let (list, _) = list.split_once(')').unwrap();
        let installed: Vec<&str> = list.split_whitespace().collect();
        for (program, package) in PROGRAMS {
            let known = installed.contains(&package) || ESSENTIAL.contains(&package);
            assert!(known, "scripts/prepare does not install {package} for {program}");
        }
    }
}
