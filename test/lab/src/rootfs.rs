//! Root disks for guests that run more than the initramfs holds.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::{Cache, LabError, apt};

/// Builds an ext4 image from Debian packages, unpacked and not configured, or finds it in the
/// cache. The name of every needed package must be given: nothing is resolved. Use it with
/// [`crate::GuestBuilder::root_on_first_disk`], on a copy or behind a snapshot.
///
/// # Errors
/// A package is not in the sources; the image is too small; a program is missing.
pub fn ext4_from_packages(
    cache: &Cache,
    packages: &[&str],
    size_mb: u32,
) -> Result<PathBuf, LabError> {
    let recipe = format!("{size_mb} {}", packages.join(" "));
    let name = format!("root-{:032x}.ext4", xxhash_rust::xxh3::xxh3_128(recipe.as_bytes()));
    cache.get(&name, |part| {
        let tree = part.with_extension("tree");
        crate::cache::remove(&tree)?;
        let built = fill(&tree, packages).and_then(|()| ext4_from_folder(&tree, part, size_mb));
        crate::cache::remove(&tree)?;
        built
    })
}

fn fill(tree: &Path, packages: &[&str]) -> Result<(), LabError> {
    // Debian's merged layout: package files in /bin end up in /usr/bin.
    for folder in ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "root", "var", "etc"] {
        let path = tree.join(folder);
        std::fs::create_dir_all(&path)
            .map_err(LabError::io(format!("create {}", path.display())))?;
    }
    for folder in ["bin", "sbin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{folder}"), tree.join(folder))
            .map_err(LabError::io(format!("link /{folder}")))?;
    }
    let download = tree.with_extension("download");
    for package in packages {
        apt::unpack(package, &download, tree)?;
    }
    crate::cache::remove(&download)
}

/// Makes an ext4 image with a folder's content.
///
/// # Errors
/// The image is too small or cannot be written.
pub fn ext4_from_folder(folder: &Path, image: &Path, size_mb: u32) -> Result<(), LabError> {
    run(Command::new(apt::need("mke2fs")?)
        .args(["-q", "-t", "ext4", "-E", "lazy_itable_init=1,nodiscard", "-d"])
        .arg(folder)
        .arg(image)
        .arg(format!("{size_mb}M")))
    .map(|_| ())
}
