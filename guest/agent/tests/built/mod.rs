//! The C library, the shim and their programs, compiled.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Folder of the built files.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libmillrace");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libmillrace");
        let mut make = Command::new("make");
        make.arg("-s").arg("-C").arg(sources).arg(format!("O={}", out.display()));
        assert!(make.args(["all", "check-program"]).status().unwrap().success());
        out
    })
}
