//! Package lists of the lab's own: suites that the host's own package sources do not have. Those
//! stay as they are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::{LabError, apt};

/// Release whose mirror has the other suites, too.
const RELEASE: &str = "bookworm";
/// Newer packages for that release.
pub(crate) const BACKPORTS: &str = "bookworm-backports";
/// The release before it, with the oldest kernel that the mirror still has.
pub(crate) const OLD_RELEASE: &str = "bullseye";
/// Key with which Debian signs its lists.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Package lists in a folder, of the host's release and of one other suite.
pub(crate) struct Sources {
    folder: PathBuf,
    suite: &'static str,
}

impl Sources {
    /// Fetches the lists into an empty folder, from the mirror that the host's own package sources
    /// name.
    ///
    /// # Errors
    /// The host has no source of its release; the network fails.
    pub fn open(folder: &Path, suite: &'static str) -> Result<Self, LabError> {
        let mirror = mirror()?;
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(LabError::io(format!("write {}", path.display())))
        };
        let source = |suite: &str| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        write("sources.list", source(RELEASE) + &source(suite))?;
        for place in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(place);
            fs::create_dir_all(&path)
                .map_err(LabError::io(format!("create {}", path.display())))?;
        }
        let sources = Self { folder: folder.to_owned(), suite };
        run(sources.with_lists(apt::apt_get(&[])).arg("update"))?;
        Ok(sources)
    }

    /// Names of available packages, as [`apt::search`] finds them.
    ///
    /// # Errors
    /// apt-cache fails.
    pub fn search(&self, expression: &str) -> Result<Vec<String>, LabError> {
        let mut command = self.with_lists(Command::new("apt-cache"));
        Ok(apt::names(&run(command.args(["search", "--names-only", expression]))?))
    }

    /// Unpacks packages into one folder, each in its version of the suite. Returns the version of
    /// one of them.
    ///
    /// # Errors
    /// The sources do not have one, the network fails, or an archive is broken.
    pub fn unpack(&self, packages: &[&str], into: &Path) -> Result<String, LabError> {
        let downloads = self.folder.join("downloads");
        fs::create_dir_all(&downloads)
            .map_err(LabError::io(format!("create {}", downloads.display())))?;
        run(self
            .with_lists(apt::apt_get(&["-t", self.suite, "download"]))
            .args(packages)
            .current_dir(&downloads))?;
        fs::create_dir_all(into).map_err(LabError::io(format!("create {}", into.display())))?;
        apt::unpack_all(&downloads, into)
    }

    /// Lets a command of apt see these lists alone.
    fn with_lists(&self, mut command: Command) -> Command {
        let place = |name: &str, path: &str| format!("{name}={}", self.folder.join(path).display());
        for option in [
            place("Dir::Etc::sourcelist", "sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            place("Dir::State::lists", "lists"),
            place("Dir::Cache", "cache"),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

/// Address of the release's mirror in the host's package sources.
fn mirror() -> Result<String, LabError> {
    let format = "$(REPO_URI) $(RELEASE)";
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let lines = run(&mut command)?;
    find_mirror(&String::from_utf8_lossy(&lines)).ok_or_else(|| LabError::Missing {
        what: format!("a package source of Debian's {RELEASE}"),
        remedy: "for QEMU, name another: MILLRACE_QEMU=7.2 (Debian's own) or /PATH".into(),
    })
}

/// The address in the first line, of address and release, that is of our release.
fn find_mirror(lines: &str) -> Option<String> {
    let mut lines = lines.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(_, release)| *release == RELEASE).map(|(mirror, _)| mirror.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_that_of_the_release_itself() {
        let lines = "http://a/security/ bookworm-security\nhttp://b/debian/ bookworm-updates\n\
                     http://c/debian/ bookworm\nhttp://d/debian/ bookworm\n";
        assert_eq!(find_mirror(lines).as_deref(), Some("http://c/debian/"));
        assert_eq!(find_mirror("http://a/debian/ trixie\n"), None);
    }
}
