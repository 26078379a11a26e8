//! The map: what is where, what is free, and in which order that changes.

pub mod claims;
pub mod epochs;
pub mod metadata;
pub mod refcounts;
pub mod slices;
pub mod syncs;
pub(crate) mod tables;

pub mod image;
pub mod open;
pub mod view;
pub mod writer;
