//! The command `bench`.
fn main() {}
