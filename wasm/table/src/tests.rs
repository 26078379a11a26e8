//! Tests of the store over several files.

mod basic;
mod beside;
mod chores;
mod crash;
mod damage;
mod filter;
mod full;
mod isolation;
mod lock;
mod log;
mod model;
mod prepared;
mod reserve;
mod savepoint;
mod torn;
