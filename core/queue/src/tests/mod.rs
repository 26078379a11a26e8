//! Tests that need the inside of the crate. Those that do not are in `tests/`.

mod corrupt;
mod crash;
mod model;
