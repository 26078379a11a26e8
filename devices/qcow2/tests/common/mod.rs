//! An image under random operations, with a model of what a guest may find after a death.

// Each test uses a part of it.
#![allow(dead_code, unused_imports)]

pub mod kinds;
pub mod model;
pub mod mutate;
pub mod oracle;
pub mod sample;
mod world;

pub use kinds::KINDS;
pub use world::World;
