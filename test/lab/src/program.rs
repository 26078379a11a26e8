//! Programs for the guest: the static agent, built from this workspace, Millrace's own guest
//! pieces, and host programs with the libraries they need.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xxhash_rust::xxh3::Xxh3;

use crate::process::run;
use crate::{Cache, LabError, apt};

/// The folder of the agent's sources.
fn agent_sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("agent")
}

/// Starts the guest's agent as its unit says.
pub const AGENT_SERVICE: &str = "agent service /usr/lib/systemd/system/millrace-agent.service";
/// File name of the agent's unit, in its sources and among its pieces.
const AGENT_UNIT: &str = "millrace-agent.service";

/// Files of Millrace's guest pieces: as built, and where they go in a guest.
const PIECES: [(&str, &str); 5] = [
    ("millrace-agent", "/usr/sbin/millrace-agent"),
    (AGENT_UNIT, "/usr/lib/systemd/system/millrace-agent.service"),
    ("libmillrace.so.1", "/usr/lib/libmillrace.so.1"),
    ("libmillrace-preload.so", "/usr/lib/libmillrace-preload.so"),
    ("mrpipe", "/usr/bin/mrpipe"),
];

/// All files below a folder, in order.
fn files_below(folder: &Path, into: &mut BTreeSet<PathBuf>) -> Result<(), LabError> {
    let what = format!("list {}", folder.display());
    for entry in fs::read_dir(folder).map_err(LabError::io(&what))? {
        let path = entry.map_err(LabError::io(&what))?.path();
        if path.is_dir() {
            files_below(&path, into)?;
        } else {
            into.insert(path);
        }
    }
    Ok(())
}

/// All files below a folder of an unpacked package. Links that lead to nothing, as absolute ones do
/// before a package is installed, are left out.
///
/// # Errors
/// The folder is not there.
pub(crate) fn files_in(folder: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    let mut files = BTreeSet::new();
    files_below(folder, &mut files)?;
    files.retain(|path| path.is_file());
    Ok(files)
}

/// The checked operations (`test/lab/fsx`) as a static program, built once for each state of its
/// sources.
///
/// # Errors
/// The sources are not there or do not compile.
pub(crate) fn fsx(cache: &Cache) -> Result<PathBuf, LabError> {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (sources, base) = (lab.join("fsx"), lab.join("../../core/base"));
    let name = format!("fsx-{:016x}", hash_of(&[&sources, &base])?);
    cache.get(&name, |part| {
        let built = cargo_build(cache, &sources, "millrace-lab-fsx")?;
        copy(&built, part)
    })
}

/// The agent as a static program: the file named by `MILLRACE_LAB_AGENT`, or built by cargo once
/// for each state of its sources.
///
/// # Errors
/// The sources are not there or do not compile.
pub fn agent(cache: &Cache) -> Result<PathBuf, LabError> {
    if let Some(path) = std::env::var_os("MILLRACE_LAB_AGENT") {
        return Ok(path.into());
    }
    let sources = agent_sources();
    // It asks the guest's agent for pipes, in that one's language.
    let language = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../core/guest-abi");
    let name = format!("agent-{:016x}", hash_of(&[&sources, &language])?);
    cache.get(&name, |part| {
        let built = cargo_build(cache, &sources, "millrace-lab-agent")?;
        copy(&built, part)
    })
}

/// Millrace's guest pieces, built once for each state of their sources: place in the guest → file.
///
/// # Errors
/// The sources are not there or do not compile.
pub(crate) fn guest_pieces(cache: &Cache) -> Result<Vec<(String, PathBuf)>, LabError> {
    let workspace = crate::cache::workspace();
    let [agent, library] =
        ["guest/agent", "guest/libmillrace"].map(|folder| workspace.join(folder));
    let sources: [&Path; 3] = [&agent, &library, &workspace.join("core/guest-abi")];
    // A folder of before may lack a piece.
    let pieces = xxhash_rust::xxh3::xxh3_64(format!("{PIECES:?}").as_bytes());
    let name = format!("guest-{:016x}", hash_of(&sources)? ^ pieces);
    let folder = cache.get(&name, |part| {
        let make = apt::need("make")?;
        run(Command::new(make).arg("-C").arg(&library).arg(format!("O={}", part.display())))?;
        copy(&agent.join(AGENT_UNIT), &part.join(AGENT_UNIT))?;
        copy(&cargo_build(cache, &agent, "millrace-agent")?, &part.join("millrace-agent"))
    })?;
    Ok(PIECES.iter().map(|(name, place)| ((*place).to_owned(), folder.join(name))).collect())
}

/// Debian's compiler, whose standard library's sources `scripts/prepare` installs.
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// The guest without an operating system (`test/lab/foreign`), built once for each state of its
/// sources. Its standard library is built with it, as that of WebAssembly modules is
/// (`scripts/modules`), for a target that nobody has installed.
///
/// # Errors
/// Debian's compiler or the sources are not there; they do not compile.
pub fn foreign(cache: &Cache) -> Result<PathBuf, LabError> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("foreign");
    let name = format!("foreign-{:016x}", hash_of(&[&sources])?);
    let linker = apt::need("ld.lld-19")?;
    let script = sources.join("link.ld");
    let flags = format!("-C relocation-model=static -C link-arg=-T{}", script.display());
    cache.get(&name, |part| {
        let target = cache.root().join("foreign-target");
        run(Command::new(apt::need(DEBIAN_CARGO)?)
            .args(["build", "--quiet", "--release", "--locked", "-Zbuild-std=core,alloc"])
            .args(["--target", "x86_64-unknown-none"])
            .arg("--manifest-path")
            .arg(sources.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(&target)
            .env("RUSTC", DEBIAN_RUSTC)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_TARGET_X86_64_UNKNOWN_NONE_LINKER", linker)
            .env("RUSTFLAGS", flags)
            .env_remove("RUSTUP_TOOLCHAIN")
            .env_remove("CARGO_ENCODED_RUSTFLAGS"))?;
        copy(&target.join("x86_64-unknown-none/release/foreign"), part)?;
        crate::cache::remove(&target)
    })
}

/// Hash of the names and content of all files below some folders.
pub(crate) fn hash_of(folders: &[&Path]) -> Result<u64, LabError> {
    let mut hash = Xxh3::new();
    for folder in folders {
        let mut files = BTreeSet::new();
        files_below(folder, &mut files)?;
        for path in &files {
            let what = format!("read {}", path.display());
            hash.update(path.strip_prefix(folder).unwrap_or(path).as_os_str().as_encoded_bytes());
            hash.update(&fs::read(path).map_err(LabError::io(what))?);
        }
    }
    Ok(hash.digest())
}

pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), LabError> {
    fs::copy(from, to).map_err(LabError::io(format!("copy {}", from.display()))).map(|_| ())
}

/// Builds a static program; where it is.
fn cargo_build(cache: &Cache, sources: &Path, program: &str) -> Result<PathBuf, LabError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Cargo tells crates of two checkouts apart by their times alone, so each has a folder of its
    // own.
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).as_os_str().as_encoded_bytes();
    let hash = xxhash_rust::xxh3::xxh3_64(checkout);
    let target = cache.root().join(format!("agent-target-{hash:016x}"));
    // The target is named so that build scripts and macros, which run on the host, are not linked
    // statically; the strip keeps the image small.
    run(Command::new(cargo)
        .args(["build", "--quiet", "--release", "--bin", program])
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .arg("--manifest-path")
        .arg(sources.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS"))?;
    Ok(target.join("x86_64-unknown-linux-gnu/release").join(program))
}

/// Libraries that a host program loads, by `ldd`; none for a static program.
///
/// # Errors
/// A library is missing on the host.
pub(crate) fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    libraries_in(program, &[])
}

/// Folders in which a package has its libraries.
pub(crate) const LIBRARY_FOLDERS: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// Finds libraries as [`libraries`] does; those in some folders are taken rather than the host's.
///
/// # Errors
/// A library is missing in both.
pub(crate) fn libraries_in(
    program: &Path,
    folders: &[PathBuf],
) -> Result<BTreeSet<PathBuf>, LabError> {
    let ldd = apt::need("ldd")?;
    let path = std::env::join_paths(folders).map_err(|error| {
        LabError::io(format!("look into {folders:?}"))(std::io::Error::other(error))
    })?;
    let output = Command::new(&ldd)
        .arg(program)
        .env("LD_LIBRARY_PATH", path)
        .output()
        .map_err(LabError::io(format!("run ldd {}", program.display())))?;
    // ldd fails for what is not dynamic: a static program or a script.
    if !output.status.success() {
        return Ok(BTreeSet::new());
    }
    parse_ldd(&String::from_utf8_lossy(&output.stdout), program)
}

/// Path of a library in a guest: its own, or the system's if it was unpacked below the cache.
pub(crate) fn place_of(library: &Path, cache: &Path) -> String {
    match library.file_name() {
        Some(name) if library.starts_with(cache) => {
            format!("/{}/{}", LIBRARY_FOLDERS[1], name.to_string_lossy())
        }
        _ => library.to_string_lossy().into_owned(),
    }
}

/// `name => /path (address)`, `/path (address)`, or the kernel's own object without a path.
fn parse_ldd(text: &str, program: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.contains("=> not found") {
            return Err(LabError::Missing {
                what: format!("library {} of {}", line.trim(), program.display()),
                remedy: "install its package again".into(),
            });
        }
        let path = line.split_ascii_whitespace().find(|word| word.starts_with('/'));
        found.extend(path.map(PathBuf::from));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_lines_of_all_forms() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x2)\n";
        let got = parse_ldd(text, Path::new("p")).unwrap();
        let want = ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"];
        assert!(got.iter().eq(want.map(Path::new)), "{got:?}");
        let error = parse_ldd("\tliba.so => not found\n", Path::new("p")).unwrap_err();
        assert!(error.to_string().contains("liba.so"));
    }

    #[test]
    fn libraries_of_packages_go_where_the_system_looks() {
        let place = |library: &str| place_of(Path::new(library), Path::new("/c"));
        assert_eq!(place("/c/package-x/usr/lib/x/libx.so.1"), "/lib/x86_64-linux-gnu/libx.so.1");
        assert_eq!(place("/usr/lib/liby.so.1"), "/usr/lib/liby.so.1");
    }

    #[test]
    fn a_real_program_brings_its_loader() {
        let got = libraries(Path::new("/bin/ls")).unwrap();
        assert!(got.iter().any(|path| path.to_string_lossy().contains("ld-linux")), "{got:?}");
    }
}
