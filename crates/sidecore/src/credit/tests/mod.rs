//! The scheme in virtual time.

mod limits;
mod moves;
mod shares;
mod sim;
mod turns;
