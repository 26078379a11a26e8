//! List of the credit that VMs were granted at run time (`millrace vm set`).
//!
//! A grant holds for later daemons, too, as long as the VM begins with the settings that it had
//! before the grant: a config file with other settings is newer than the grant.

use config::{Config, CreditConfig};
use serde::{Deserialize, Serialize};

use crate::error::ControlError;
use crate::run_list::{Kept, RunList};

/// Grant to one VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grant {
    /// Name of the VM.
    pub vm: String,
    /// Settings before the grant: those of the config file, or of the request that made the VM.
    pub was: CreditConfig,
    /// Settings of now.
    pub is: CreditConfig,
}

impl Kept for Grant {
    const FILE: &'static str = "granted.json";
    const WHAT: &'static str = "what VMs were granted at run time";
}

/// List of all grants.
pub type GrantList = RunList<Grant>;

impl GrantList {
    /// Settings of a VM before its first grant; none: it has no grant.
    pub fn was(&self, vm: &str) -> Option<CreditConfig> {
        self.entries().iter().find(|g| g.vm == vm).map(|g| g.was)
    }

    /// Notes that `vm`, whose settings were `was`, has `is` now.
    pub fn grant(
        &mut self,
        vm: &str,
        was: CreditConfig,
        is: CreditConfig,
    ) -> Result<(), ControlError> {
        self.change(|grants| {
            match grants.iter_mut().find(|g| g.vm == vm) {
                Some(grant) => grant.is = is,
                None => grants.push(Grant { vm: vm.into(), was, is }),
            }
            grants.retain(|g| g.was != g.is);
        })
    }

    /// Forgets a VM.
    pub fn forget(&mut self, vm: &str) -> Result<(), ControlError> {
        self.retain(|g| g.vm != vm)
    }

    /// Applies the grants to the VMs of a new daemon. Grants whose VM has other settings than
    /// before the grant, or is gone, are returned and forgotten.
    pub fn restore(&mut self, config: &mut Config) -> Result<Vec<Grant>, ControlError> {
        let mut stale = Vec::new();
        self.retain(|grant| {
            let now = config.vms.iter().find(|v| v.name == grant.vm).map(|v| v.credit);
            // By the same rules as when it was granted: the file may be of another version.
            let holds = now == Some(grant.was)
                && serde_json::to_value(grant.is)
                    .is_ok_and(|is| config.set_credit(&grant.vm, &is).is_ok());
            if !holds {
                stale.push(grant.clone());
            }
            holds
        })?;
        Ok(stale)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn credit(weight: u32) -> CreditConfig {
        CreditConfig { weight, ceiling_ops_per_s: 7, ..CreditConfig::default() }
    }

    fn config(weight: u32) -> Config {
        let text = format!("[[vm]]\nname = \"web\"\nweight = {weight}\nceiling_ops_per_s = 7\n");
        config::parse(Path::new("m.toml"), &text).unwrap()
    }

    #[test]
    fn a_grant_holds_until_the_file_says_something_new() {
        let dir = tempfile::tempdir().unwrap();
        let mut list = GrantList::load(dir.path()).unwrap();
        list.grant("web", credit(100), credit(200)).unwrap();
        // What it was is what the file said, not the grant before.
        list.grant("web", credit(200), credit(300)).unwrap();
        for (file, has, stays) in [(100, 300, true), (50, 50, false), (100, 100, false)] {
            let mut list = GrantList::load(dir.path()).unwrap();
            let mut config = config(file);
            let stale = list.restore(&mut config).unwrap();
            assert_eq!(config.vms[0].credit, credit(has));
            assert_eq!(list.was("web").is_some(), stays);
            assert_eq!(stale.len(), usize::from(file == 50));
        }
    }

    #[test]
    fn what_is_as_it_was_is_no_grant() {
        let dir = tempfile::tempdir().unwrap();
        let mut list = GrantList::load(dir.path()).unwrap();
        list.grant("web", credit(100), credit(200)).unwrap();
        list.grant("db", credit(1), credit(2)).unwrap();
        list.grant("web", credit(200), credit(100)).unwrap();
        list.forget("db").unwrap();
        assert_eq!(GrantList::load(dir.path()).unwrap().entries(), []);
    }

    #[test]
    fn one_that_no_rule_allows_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let mut list = GrantList::load(dir.path()).unwrap();
        list.grant("web", credit(100), credit(0)).unwrap();
        let mut config = config(100);
        assert_eq!(list.restore(&mut config).unwrap().len(), 1);
        assert_eq!(config.vms[0].credit, credit(100));
    }
}
