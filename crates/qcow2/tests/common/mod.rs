//! An image under random operations, with a model of what a guest may find after a death.

mod kinds;
mod model;
mod oracle;
mod world;

pub use kinds::KINDS;
pub use world::World;
