//! Credits: who may move how many bytes next.

pub mod ledger;

pub use ledger::Ledger;
