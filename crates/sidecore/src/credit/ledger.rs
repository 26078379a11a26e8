//! The ledger of one sidecore: the credits of every VM there.

/// See the module's text. Belongs to one thread, which hands it to its workers.
#[derive(Debug, Default)]
pub struct Ledger {}

impl Ledger {
    /// The sidecore has asked every worker once.
    pub fn end_round(&mut self) {}
}
