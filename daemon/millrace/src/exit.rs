//! Exit codes, as the manual page lists them. 2 is clap's own: the command line is wrong.

/// Everything went well.
pub const OK: u8 = 0;
/// The config or a file is wrong, or the daemon could not start.
pub const FAILED: u8 = 1;
/// No daemon answers on the control socket.
pub const UNREACHABLE: u8 = 3;
/// The daemon refused what was asked.
pub const REFUSED: u8 = 4;
