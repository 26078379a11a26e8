//! Transactions whose record is staged in the log.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::clients::ActiveRequest;
use crate::fail::Fail;
use crate::record::kind;
use crate::reserve::Purpose;
use crate::tx::Tx;

/// End of a transaction, or its preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The transaction is committed.
    Commit,
    /// The transaction is prepared, with this name.
    Prepare(Box<[u8]>),
    /// A prepared transaction is committed.
    CommitPrepared(Box<[u8]>),
    /// A prepared transaction is undone.
    RollbackPrepared(Box<[u8]>),
    /// The transaction is undone: nothing is in the log.
    Rollback,
}

impl Ending {
    /// Kind of its record.
    pub fn record_kind(&self) -> u32 {
        match self {
            Self::Commit | Self::Rollback => kind::COMMIT,
            Self::Prepare(_) => kind::PREPARE,
            Self::CommitPrepared(_) => kind::COMMIT_PREPARED,
            Self::RollbackPrepared(_) => kind::ROLLBACK_PREPARED,
        }
    }

    /// Name of the prepared transaction; empty: it has none.
    pub fn name(&self) -> &[u8] {
        match self {
            Self::Commit | Self::Rollback => &[],
            Self::Prepare(name) | Self::CommitPrepared(name) | Self::RollbackPrepared(name) => name,
        }
    }

    /// Whether it is a commit, which has a number.
    pub fn is_commit(&self) -> bool {
        matches!(self, Self::Commit | Self::CommitPrepared(_))
    }

    /// Whether it ends a transaction that was prepared before.
    pub fn is_of_prepared(&self) -> bool {
        matches!(self, Self::CommitPrepared(_) | Self::RollbackPrepared(_))
    }

    /// Purpose of its record.
    pub fn purpose(&self, tx: &Tx) -> Purpose {
        match self {
            Self::Commit | Self::Prepare(_) => tx.purpose(),
            _ => Purpose::Free,
        }
    }
}

/// Transaction whose record is staged.
#[derive(Debug)]
pub struct StagedTx {
    /// Request that waits for the record.
    pub request: Box<ActiveRequest>,
    /// Transaction.
    pub tx: Box<Tx>,
    /// End that the record makes.
    pub ending: Ending,
    /// Number of the commit; 0: it is none.
    pub commit: u64,
    /// Offset of the ops in the record's body.
    pub ops_at: usize,
}

/// Transactions on their way into the log.
#[derive(Debug, Default)]
pub struct Staging {
    /// Transactions whose record is staged, in the log's order.
    pub staged: Vec<StagedTx>,
    /// Transactions whose record was appended, or could not be; their clients know nothing of it
    /// yet.
    pub appended: Vec<(StagedTx, Result<(), Fail>)>,
}
