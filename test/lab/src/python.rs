//! Python for guests, with aioquic: the host's own Python and library, packages from Python's
//! registry by hash, everything compiled.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xxhash_rust::xxh3::Xxh3;

use crate::process::run;
use crate::program::{copy, files_in, libraries};
use crate::{Cache, LabError, apt};

/// The package with a pip that runs where no pip is installed, and its place.
const PIP: (&str, &str) = ("python3-pip-whl", "usr/share/python-wheels");
const MAKE_TREE: &str = include_str!("../quic/tree.py");
const REQUIREMENTS: &str = include_str!("../quic/requirements.txt");
/// Source of the QUIC client and server; guests have it as [`QUIC_PROGRAM`].
const QUIC: &str = include_str!("../quic/quic.py");

/// Path of the QUIC client and server in guests.
pub const QUIC_PROGRAM: &str = "/lab/quic.py";

/// A folder with a guest's `/usr/bin/python3`, all that it reads and the libraries it loads, made
/// once.
///
/// # Errors
/// A package cannot be had, or was changed at its registry.
pub(crate) fn quic_tree(cache: &Cache) -> Result<PathBuf, LabError> {
    let python = apt::need("python3")?;
    let version = run(Command::new(&python).arg("-VV"))?;
    let mut hash = Xxh3::new();
    for part in [&version, MAKE_TREE.as_bytes(), REQUIREMENTS.as_bytes(), QUIC.as_bytes()] {
        hash.update(part);
    }
    cache.get(&format!("python-{:016x}", hash.digest()), |part| {
        let pip = pip(cache)?;
        let lists = part.with_extension("lists");
        crate::cache::remove(&lists)?;
        let (make_tree, requirements) = (lists.join("tree.py"), lists.join("requirements.txt"));
        write(&make_tree, MAKE_TREE)?;
        write(&requirements, REQUIREMENTS)?;
        run(Command::new(&python).arg(make_tree).arg(part).arg(pip).arg(requirements))?;
        crate::cache::remove(&lists)?;
        write(&part.join(QUIC_PROGRAM.trim_start_matches('/')), QUIC)?;
        add_libraries(part)
    })
}

fn pip(cache: &Cache) -> Result<PathBuf, LabError> {
    let wheels = files_in(&apt::unpacked(cache, PIP.0)?.join(PIP.1))?;
    let is_pip = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pip-"))
    };
    wheels.into_iter().find(is_pip).ok_or_else(|| LabError::Missing {
        what: format!("pip in the package {}", PIP.0),
        remedy: "the package has another form than Debian 12's".into(),
    })
}

/// Copies what the program and the extension modules load to its own place in the tree.
fn add_libraries(tree: &Path) -> Result<(), LabError> {
    let mut found = BTreeSet::new();
    for file in files_in(tree)? {
        if file.extension().is_some_and(|end| end == "so") || file.ends_with("usr/bin/python3") {
            found.extend(libraries(&file)?);
        }
    }
    for library in found {
        let place = tree.join(library.strip_prefix("/").unwrap_or(&library));
        // A wheel's extension brings libraries of its own, which are there.
        if !place.exists() && !library.starts_with(tree) {
            make_folder(&place)?;
            copy(&library, &place)?;
        }
    }
    Ok(())
}

fn make_folder(path: &Path) -> Result<(), LabError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(LabError::io(format!("create {}", folder.display())))
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    make_folder(path)?;
    fs::write(path, text).map_err(LabError::io(format!("write {}", path.display())))
}
