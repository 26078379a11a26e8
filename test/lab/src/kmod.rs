//! Millrace's kernel modules, built from `guest/kmod` for a cached kernel, and their checks.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::headers::headers;
use crate::process::run;
use crate::program::{copy, hash_of};
use crate::{Cache, Kernel, LabError, apt};

/// Folder of the kernel modules in an image.
pub const GUEST_FOLDER: &str = "/kmod";

/// The package that brings the kernel's own style checker, and what of it is kept. No smaller
/// package has it.
const CHECKPATCH_PACKAGE: &str = "linux-source-6.1";
const CHECKPATCH: [&str; 3] = ["checkpatch.pl", "spelling.txt", "const_structs.checkpatch"];
/// Complaints of the style checker that do not apply:
/// - `LINUX_VERSION_CODE`: one source serves both kernels, which in-tree code need not.
/// - `CONSTANT_COMPARISON`: takes `LINUX_VERSION_CODE` for the constant in these.
/// - `FILE_PATH_CHANGES`: asks for an entry in the kernel's own list of maintainers.
const IGNORED: &str = "LINUX_VERSION_CODE,CONSTANT_COMPARISON,FILE_PATH_CHANGES";

/// The folder of the modules' sources.
#[must_use]
pub fn sources() -> PathBuf {
    crate::cache::workspace().join("guest/kmod")
}

/// A folder with the modules of some sources for a kernel, built once for each state of the
/// sources. Every warning is an error. What only a debugger reads is left out.
///
/// # Errors
/// They do not compile, with all that the compiler said; the kernel's headers cannot be had.
pub fn build(cache: &Cache, kernel: &Kernel, sources: &Path) -> Result<PathBuf, LabError> {
    let name = format!("kmod-{}-{:016x}", kernel.release(), hash_of(&[sources])?);
    cache.get(&name, |part| {
        let work = part.with_extension("build");
        let built = make(cache, kernel, sources, &work, "strict").and_then(|()| keep(&work, part));
        crate::cache::remove(&work)?;
        built
    })
}

/// Builds some sources with the kernel's type checker on every file, and nothing of it is kept.
///
/// # Errors
/// As [`build`]; the checker's warnings are errors.
pub fn check_types(cache: &Cache, kernel: &Kernel, sources: &Path) -> Result<(), LabError> {
    apt::need("sparse")?;
    let name = format!("kmod-check-{}", kernel.release());
    let _lock = cache.lock(&name)?;
    let work = cache.root().join(format!(".{name}"));
    let checked = make(cache, kernel, sources, &work, "check");
    crate::cache::remove(&work)?;
    checked
}

/// Checks the style of some sources by the kernel's own checker.
///
/// # Errors
/// All that it said.
pub fn check_style(cache: &Cache, sources: &Path) -> Result<(), LabError> {
    let folder = checkpatch(cache)?;
    let mut command = Command::new(apt::need("perl")?);
    // It leaves a file in the folder where it runs, and another one in a git work tree.
    command.current_dir(&folder).env_remove("GIT_DIR");
    command.arg(CHECKPATCH[0]).args(["--no-tree", "--strict", "--max-line-length=100"]);
    command.args(["--quiet", "--show-types", &format!("--ignore={IGNORED}"), "-f"]);
    run(command.args(code_in(sources)?)).map(|_| ())
}

/// The modules of a built folder.
pub(crate) fn modules_in(folder: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    let mut files = crate::program::files_in(folder)?;
    files.retain(|path| path.extension().is_some_and(|end| end == "ko"));
    Ok(files)
}

/// Modules that a module says it needs.
pub(crate) fn needs(module: &Path) -> Result<Vec<String>, LabError> {
    let told = run(Command::new(apt::need("modinfo")?).args(["-F", "depends"]).arg(module))?;
    let told = String::from_utf8_lossy(&told);
    Ok(told.trim().split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

fn make(
    cache: &Cache,
    kernel: &Kernel,
    sources: &Path,
    work: &Path,
    target: &str,
) -> Result<(), LabError> {
    let headers = headers(cache, kernel)?;
    crate::cache::remove(work)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut command = Command::new(apt::need("make")?);
    // All that is wrong is told at once, and nothing else.
    command.args(["--silent", "--no-print-directory", "--keep-going", &format!("-j{jobs}")]);
    command.arg("-C").arg(sources).arg(target);
    command.arg(format!("KDIR={}", headers.display())).arg(format!("BUILD={}", work.display()));
    // What a `make` above us was told is not for the kernel's.
    for name in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "CROSS_COMPILE", "KBUILD_OUTPUT"] {
        command.env_remove(name);
    }
    run(&mut command).map(|_| ()).map_err(|error| at_sources(error, work, sources))
}

/// An error of the compiler speaks of files that somebody can open.
fn at_sources(error: LabError, work: &Path, sources: &Path) -> LabError {
    let (work, sources) = (work.to_string_lossy(), sources.to_string_lossy());
    match error {
        LabError::HostCommand { command, status, output } => {
            LabError::HostCommand { command, status, output: output.replace(&*work, &sources) }
        }
        other => other,
    }
}

/// Copies the modules of a build into a folder.
fn keep(work: &Path, into: &Path) -> Result<(), LabError> {
    fs::create_dir_all(into).map_err(LabError::io(format!("create {}", into.display())))?;
    for module in modules_in(work)? {
        let Some(name) = module.file_name() else { continue };
        let kept = into.join(name);
        copy(&module, &kept)?;
        run(Command::new(apt::need("strip")?).arg("--strip-debug").arg(&kept))?;
    }
    Ok(())
}

/// All files of C. Empty ones, at which the style checker would stop and say that all is well, are
/// left out.
fn code_in(sources: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    let mut files = crate::program::files_in(sources)?;
    files.retain(|path| {
        let name = path.to_string_lossy();
        let code = (name.ends_with(".c") || name.ends_with(".h")) && !name.ends_with(".mod.c");
        code && fs::metadata(path).is_ok_and(|found| found.len() > 0)
    });
    Ok(files)
}

/// The folder of the style checker, taken out of the kernel's sources.
fn checkpatch(cache: &Cache) -> Result<PathBuf, LabError> {
    cache.get("checkpatch", |part| {
        let tree = part.with_extension("tree");
        crate::cache::remove(&tree)?;
        apt::unpack(CHECKPATCH_PACKAGE, &tree.join("download"), &tree)?;
        fs::create_dir_all(part).map_err(LabError::io(format!("create {}", part.display())))?;
        let archive = tree.join(format!("usr/src/{CHECKPATCH_PACKAGE}.tar.xz"));
        let members = CHECKPATCH.map(|name| format!("{CHECKPATCH_PACKAGE}/scripts/{name}"));
        let mut tar = Command::new(apt::need("tar")?);
        tar.args(["--occurrence=1", "--strip-components=2", "-xJf"]).arg(archive);
        run(tar.arg("-C").arg(part).args(members))?;
        crate::cache::remove(&tree)
    })
}
