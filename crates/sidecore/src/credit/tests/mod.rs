//! The scheme in virtual time.

mod limits;
mod shares;
mod sim;
