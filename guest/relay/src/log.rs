//! Log of the relay on standard error, which a service manager keeps.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Writes a line. Ignores errors: `eprintln!` would panic when the reader has gone.
pub fn log(line: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
