//! The agent's log: lines on standard error, which a service manager keeps.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Writes a line. Its reader may have gone: `eprintln!` would panic then, in an agent that answers
/// for bytes of programs.
pub fn say(line: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
