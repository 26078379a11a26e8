//! The headers of a cached kernel, unpacked beside it: what Kbuild needs to make modules for it.
//! Nothing is installed, so those of several kernels lie side by side.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Cache, Kernel, LabError, apt};

/// Folder of Debian's headers, below the root.
const SOURCES: &str = "usr/src";

/// The folder for `make -C` that belongs to a kernel, unpacked on first use.
///
/// # Errors
/// The package sources do not have the headers of this very kernel (any more).
pub fn headers(cache: &Cache, kernel: &Kernel) -> Result<PathBuf, LabError> {
    let package = package_of(kernel.release());
    let root = cache.get(&format!("headers-{}", kernel.release()), |part| fetch(&package, part))?;
    Ok(root.join(SOURCES).join(package))
}

fn package_of(release: &str) -> String {
    format!("linux-headers-{release}")
}

fn fetch(package: &str, into: &Path) -> Result<(), LabError> {
    let download = into.join("download");
    let unpack = |package: &str| {
        apt::unpack(package, &download, into).map_err(|error| LabError::Missing {
            what: format!("{package}, which the cached kernel's modules need ({error}),"),
            remedy: "run `lab clean` to take a kernel that the package sources still have".into(),
        })
    };
    unpack(package)?;
    let folder = into.join(SOURCES).join(package);
    let makefile = folder.join("Makefile");
    let what = format!("rewrite {}", makefile.display());
    let text = fs::read_to_string(&makefile).map_err(LabError::io(&what))?;
    let scripts = fs::read_link(folder.join("scripts"))
        .map_err(LabError::io(format!("read the links of {}", folder.display())))?;
    for wanted in others(&text, &scripts)? {
        unpack(&wanted)?;
    }
    // The only absolute path in all of them. `make` reads it in the folder of the Makefile.
    fs::write(&makefile, text.replace("/usr/src/", "../")).map_err(LabError::io(what))?;
    for useless in [download, into.join("usr/share")] {
        crate::cache::remove(&useless)?;
    }
    Ok(())
}

/// The packages that the headers lead to: by the common Makefile that they include, and by the link
/// to Kbuild's scripts. Their names follow other rules in each series.
fn others(makefile: &str, scripts: &Path) -> Result<[String; 2], LabError> {
    let common = makefile.split('/').find(|word| word.starts_with("linux-headers-"));
    let scripts = scripts.to_string_lossy();
    let kbuild = scripts.split('/').find(|word| word.starts_with("linux-kbuild-"));
    match (common, kbuild) {
        (Some(common), Some(kbuild)) => Ok([common.to_owned(), kbuild.to_owned()]),
        _ => Err(LabError::Refused(format!(
            "kernel headers of another form: Makefile {makefile:?}, scripts -> {scripts}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_packages_are_found_by_what_refers_to_them() {
        let of = |release: &str, kbuild: &str| {
            let makefile = format!("include /usr/src/linux-headers-{release}-common/Makefile\n");
            others(&makefile, Path::new(&format!("../../lib/{kbuild}/scripts"))).unwrap()
        };
        assert_eq!(
            of("6.1.0-56", "linux-kbuild-6.1"),
            ["linux-headers-6.1.0-56-common", "linux-kbuild-6.1"]
        );
        assert_eq!(
            of("6.12.9+deb12", "linux-kbuild-6.12.9+deb12"),
            ["linux-headers-6.12.9+deb12-common", "linux-kbuild-6.12.9+deb12"]
        );
        assert!(others("include other\n", Path::new("scripts")).is_err());
    }
}
