//! Programs for the guest: the static agent, built from this workspace, and host programs with
//! the libraries they need.

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
    let mut files = BTreeSet::new();
    files_below(&sources, &mut files)?;
    let mut hash = Xxh3::new();
    for path in &files {
        let what = format!("read {}", path.display());
        hash.update(path.strip_prefix(&sources).unwrap_or(path).as_os_str().as_encoded_bytes());
        hash.update(&fs::read(path).map_err(LabError::io(what))?);
    }
    let name = format!("agent-{:016x}", hash.digest());
    cache.get(&name, |part| {
        let target = cache.root().join("agent-target");
        build_agent(&sources, &target)?;
        let built = target.join("x86_64-unknown-linux-gnu/release/millrace-lab-agent");
        fs::copy(&built, part)
            .map_err(LabError::io(format!("copy {}", built.display())))
            .map(|_| ())
    })
}

fn build_agent(sources: &Path, target: &Path) -> Result<(), LabError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The target is named so that build scripts and macros, which run on the host, are not linked
    // statically; the strip keeps the image small.
    run(Command::new(cargo)
        .args(["build", "--quiet", "--release", "--bin", "millrace-lab-agent"])
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .arg("--manifest-path")
        .arg(sources.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(target)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS"))
    .map(|_| ())
}

/// Libraries that a host program loads, by `ldd`; none for a static program.
///
/// # Errors
/// A library is missing on the host.
pub(crate) fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>, LabError> {
    let ldd = apt::need("ldd")?;
    let output = Command::new(&ldd)
        .arg(program)
        .output()
        .map_err(LabError::io(format!("run ldd {}", program.display())))?;
    // ldd fails for what is not dynamic: a static program or a script.
    if !output.status.success() {
        return Ok(BTreeSet::new());
    }
    parse_ldd(&String::from_utf8_lossy(&output.stdout), program)
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
    fn a_real_program_brings_its_loader() {
        let got = libraries(Path::new("/bin/ls")).unwrap();
        assert!(got.iter().any(|path| path.to_string_lossy().contains("ld-linux")), "{got:?}");
    }
}
