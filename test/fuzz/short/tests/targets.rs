//! Every fuzz target for five seconds (`FUZZ_SECONDS`) on its seeds and on changes of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// A test for each target, and their names.
macro_rules! targets {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*
    };
}

include!("../names.rs");

fn run(target: &str) {
    let out = Command::new(env!("CARGO_BIN_EXE_fuzz-short")).arg(target).output().unwrap();
    print!("{}", String::from_utf8_lossy(&out.stdout));
    let told = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{target}: {}\n{told}", out.status);
}

/// None is built in one way only: `make fuzz` has all files, and so have this and the module `sql`.
#[test]
fn every_file_is_a_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = std::fs::read_dir(folder.join("fuzz_targets")).unwrap();
    let names = files.filter_map(|file| {
        let path = file.unwrap().path();
        let is_target = path.extension().is_some_and(|ext| ext == "rs");
        is_target.then(|| path.file_stem().unwrap().to_str().unwrap().to_owned())
    });
    let files = names.collect::<BTreeSet<String>>();
    let here = NAMES.iter().copied().chain(["sql_client"]).map(str::to_owned);
    assert_eq!(here.collect::<BTreeSet<_>>(), files);
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let listed = files
        .iter()
        .map(|name| format!("[[bin]]\nname = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\n"));
    for target in listed {
        assert!(manifest.contains(&target), "{target}");
    }
    assert_eq!(manifest.matches("[[bin]]").count(), files.len());
}
