//! What the relay says on standard error, which a service manager keeps.

use std::fmt::Arguments;
use std::io::{self, Write};

/// A line. Whoever reads it may have gone: `eprintln!` would panic then.
pub fn say(line: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
