//! List of the holders that daemons used before: one that the config no longer names may still have
//! sessions.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::ControlError;
use crate::run_list::{Kept, RunList};

/// A holder that a daemon used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UsedHolder {
    /// Socket of the holder.
    pub socket: PathBuf,
}

impl Kept for UsedHolder {
    const FILE: &'static str = "holders.json";
    const WHAT: &'static str = "the holders of earlier daemons";
}

/// List of the holders that daemons used.
pub type HolderList = RunList<UsedHolder>;

impl HolderList {
    /// Replaces the list, if it changes.
    pub fn set(&mut self, sockets: Vec<PathBuf>) -> Result<(), ControlError> {
        let next: Vec<_> = sockets.into_iter().map(|socket| UsedHolder { socket }).collect();
        if next == self.entries() { Ok(()) } else { self.change(|all| *all = next) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_remembered_and_nothing_is_written_for_none() {
        let dir = tempfile::tempdir().unwrap();
        let load = || HolderList::load(dir.path()).unwrap();
        load().set(Vec::new()).unwrap();
        assert!(!dir.path().join("holders.json").exists());
        load().set(vec!["/a".into(), "/b".into()]).unwrap();
        assert_eq!(load().entries()[1].socket, PathBuf::from("/b"));
    }
}
