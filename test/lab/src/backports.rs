//! Packages of Debian's backports, for a host whose own package sources do not have them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::{LabError, apt};

/// Release whose mirror has the backports too.
const RELEASE: &str = "bookworm";
/// Key with which Debian signs its lists.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Package lists of the lab's own in a folder of its own.
pub(crate) struct Backports {
    folder: PathBuf,
}

impl Backports {
    /// Fetches the lists of a release and its backports into an empty folder, from the mirror that
    /// the host's own package sources name.
    ///
    /// # Errors
    /// The host has no source of that release; the network fails.
    pub fn open(folder: &Path) -> Result<Self, LabError> {
        let mirror = mirror()?;
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(LabError::io(format!("write {}", path.display())))
        };
        let source = |suite: &str| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        write("sources.list", source(RELEASE) + &source(&format!("{RELEASE}-backports")))?;
        for place in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(place);
            fs::create_dir_all(&path)
                .map_err(LabError::io(format!("create {}", path.display())))?;
        }
        let lists = Self { folder: folder.to_owned() };
        run(lists.apt_get().arg("update"))?;
        Ok(lists)
    }

    /// Unpacks packages into one folder, each in its newest version.
    ///
    /// # Errors
    /// The sources do not have one, the network fails, or an archive is broken.
    pub fn unpack(&self, packages: &[&str], into: &Path) -> Result<(), LabError> {
        let downloads = self.folder.join("downloads");
        fs::create_dir_all(&downloads)
            .map_err(LabError::io(format!("create {}", downloads.display())))?;
        let suite = format!("{RELEASE}-backports");
        run(self
            .apt_get()
            .args(["-t", &suite, "download"])
            .args(packages)
            .current_dir(&downloads))?;
        fs::create_dir_all(into).map_err(LabError::io(format!("create {}", into.display())))?;
        apt::unpack_all(&downloads, into)
    }

    /// A command of apt that sees these lists alone.
    fn apt_get(&self) -> Command {
        let place = |name: &str, path: &str| format!("{name}={}", self.folder.join(path).display());
        let mut command = apt::apt_get(&[]);
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
        remedy: "name another QEMU: MILLRACE_QEMU=7.2 (Debian's own) or /PATH".into(),
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
