//! The `millrace` daemon under test.
/// x
#[derive(Debug)]
pub struct Daemon;
/// x
#[derive(Debug)]
pub struct DaemonBuilder;
