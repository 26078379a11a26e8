//! Tests of the module over several files.

mod crash;
mod statements;
