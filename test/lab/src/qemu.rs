//! The QEMU that runs the guests: that of Debian's backports, Debian's own, or another.
//!
//! Users run QEMU 8 to 10, and 7.2 has faults of its own under emulation ([`crate::qemu72`]), so
//! guests run on the newest that Debian has for its release 12. It is unpacked into the cache and
//! not installed, from a package source of the lab's own: those of the host stay as they are. It
//! looks for firmware beside itself. Its libraries are those of Debian's own QEMU, which
//! `scripts/prepare` installs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use crate::process::run;
use crate::sources::{BACKPORTS, Sources};
use crate::{Accelerator, Cache, LabError, apt};

/// Environment variable that chooses: `10`, `7.2`, or the full path of a QEMU.
const CHOICE: &str = "MILLRACE_QEMU";
/// QEMU's program for guests of this architecture.
const PROGRAM: &str = "qemu-system-x86_64";
/// Packages of one version of QEMU with its firmware and its tools.
const PACKAGES: [&str; 6] = [
    "qemu-system-x86",
    "qemu-system-common",
    "qemu-system-data",
    "qemu-utils",
    "seabios",
    "ipxe-qemu",
];

/// Choice of a QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum QemuChoice {
    /// The newest of Debian's backports.
    #[default]
    Current,
    /// Debian 12's own, 7.2.
    Debian,
    /// The program of a full path.
    At(PathBuf),
}

impl QemuChoice {
    /// Choice by `MILLRACE_QEMU`; the current one if that is not set.
    ///
    /// # Errors
    /// It names none.
    pub fn from_env() -> Result<Self, LabError> {
        match env::var(CHOICE) {
            Ok(text) => text.parse().map_err(LabError::Refused),
            Err(_) => Ok(Self::default()),
        }
    }
}

impl FromStr for QemuChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "10" => Ok(Self::Current),
            "7.2" => Ok(Self::Debian),
            path if path.starts_with('/') => Ok(Self::At(path.into())),
            _ => Err(format!("{CHOICE}={text:?}: 10, 7.2 or the full path of a QEMU")),
        }
    }
}

/// A QEMU, its version, and what runs its guests' CPUs.
#[derive(Clone, Debug)]
pub struct Qemu {
    program: PathBuf,
    version: (u32, u32),
    accelerator: Accelerator,
}

impl Qemu {
    /// The QEMU that `MILLRACE_QEMU` chooses; fetched on first use. It emulates, unless
    /// [`under`](Self::under) says otherwise.
    ///
    /// # Errors
    /// As [`QemuChoice::from_env`] and [`Qemu::get`].
    pub fn chosen(cache: &Cache) -> Result<Self, LabError> {
        Self::get(cache, &QemuChoice::from_env()?)
    }

    /// The QEMU of a choice; fetched on first use.
    ///
    /// # Errors
    /// It cannot be had, or does not say its version.
    pub fn get(cache: &Cache, choice: &QemuChoice) -> Result<Self, LabError> {
        let program = match choice {
            QemuChoice::Current => {
                cache.get("qemu-backports", fetch)?.join("usr/bin").join(PROGRAM)
            }
            QemuChoice::Debian => apt::need(PROGRAM)?,
            QemuChoice::At(path) => apt::need(&path.to_string_lossy())?,
        };
        let said = run(Command::new(&program).arg("--version"))?;
        let said = String::from_utf8_lossy(&said);
        let version = version(&said).ok_or_else(|| {
            LabError::Refused(format!("{} --version says {said:?}", program.display()))
        })?;
        Ok(Self { program, version, accelerator: Accelerator::Tcg })
    }

    /// Path of the program for guests.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Path of another program of the same QEMU, such as `qemu-storage-daemon`.
    ///
    /// # Errors
    /// It is not beside the program for guests.
    pub fn tool(&self, name: &str) -> Result<PathBuf, LabError> {
        apt::need(&self.program.with_file_name(name).to_string_lossy())
    }

    /// Major and minor number of its version.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Accelerator of its guests.
    #[must_use]
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The same QEMU with another accelerator.
    #[must_use]
    pub fn under(self, accelerator: Accelerator) -> Self {
        Self { accelerator, ..self }
    }

    #[cfg(test)]
    pub(crate) fn of_version(major: u32, minor: u32) -> Self {
        Self { program: PROGRAM.into(), version: (major, minor), accelerator: Accelerator::Tcg }
    }
}

/// Numbers after "version" in what QEMU says of itself.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut words = said.split_ascii_whitespace();
    words.find(|word| *word == "version")?;
    let mut numbers = words.next()?.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn fetch(into: &Path) -> Result<(), LabError> {
    let work = into.with_extension("download");
    crate::cache::remove(&work)?;
    fs::create_dir_all(&work).map_err(LabError::io(format!("create {}", work.display())))?;
    Sources::open(&work, BACKPORTS)?.unpack(&PACKAGES, into)?;
    crate::cache::remove(&work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_a_version_or_a_path() {
        assert_eq!("10".parse(), Ok(QemuChoice::Current));
        assert_eq!("7.2".parse(), Ok(QemuChoice::Debian));
        assert_eq!("/opt/qemu".parse(), Ok(QemuChoice::At("/opt/qemu".into())));
        let error = "qemu".parse::<QemuChoice>().unwrap_err();
        assert!(error.contains("\"qemu\": 10, 7.2 or"), "{error}");
    }

    #[test]
    fn versions_are_read() {
        let said = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c)";
        assert_eq!(version(said), Some((10, 0)));
        assert_eq!(version("QEMU emulator version 7.2.22"), Some((7, 2)));
        assert_eq!(version("something else"), None);
        assert_eq!(version("version x.y"), None);
    }
}
