//! The scheme in virtual time.

mod limits;
mod moves;
mod outside;
mod shares;
mod sim;
mod turns;
