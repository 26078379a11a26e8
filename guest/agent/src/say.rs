//! What the agent says on standard error, which a service manager keeps.

use std::fmt::Arguments;
use std::io::{self, Write};

/// A line. Whoever reads it may have gone: `eprintln!` would panic then, in an agent that answers for bytes
/// of programs.
pub fn say(line: Arguments<'_>) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
