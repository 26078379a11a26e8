//! QEMU as an oracle: its verdict on an image.

use std::path::Path;
use std::process::Command;

/// Outcome of `qemu-img check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Clean,
    /// Clusters that nobody refers to.
    Leaks,
    Errors,
}

/// Checks an image as it is.
pub fn check(path: &Path) -> (Verdict, String) {
    run(&["check", "-f", "qcow2", path.to_str().unwrap()])
}

/// Has QEMU mend it.
pub fn mend(path: &Path) -> (Verdict, String) {
    run(&["check", "-r", "all", "-f", "qcow2", path.to_str().unwrap()])
}

fn run(args: &[&str]) -> (Verdict, String) {
    let out = Command::new("qemu-img").args(args).output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let verdict = match out.status.code() {
        Some(0) => Verdict::Clean,
        Some(3) => Verdict::Leaks,
        _ => Verdict::Errors,
    };
    (verdict, text)
}
