//! List of the ports attached at run time.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::ControlError;
use crate::run_list::{Kept, RunList};

/// One port: its VM, and the body it was attached with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachedPort {
    /// VM.
    pub vm: String,
    /// Name of the port.
    pub port: String,
    /// Body of the request, for [`config::Config::attach`].
    pub body: Value,
}

impl Kept for AttachedPort {
    const FILE: &'static str = "attached.json";
    const WHAT: &'static str = "the ports attached at run time";
}

/// List of the ports attached at run time.
pub type AttachedList = RunList<AttachedPort>;

impl AttachedList {
    /// Adds one.
    pub fn add(&mut self, port: AttachedPort) -> Result<(), ControlError> {
        self.change(|ports| ports.push(port))
    }

    /// Removes one, if it is there.
    pub fn remove(&mut self, vm: &str, port: &str) -> Result<(), ControlError> {
        self.retain(|p| p.vm != vm || p.port != port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str) -> AttachedPort {
        let body = serde_json::json!({ "disk": { "name": name } });
        AttachedPort { vm: "web".into(), port: name.into(), body }
    }

    #[test]
    fn ports_survive_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut list = AttachedList::load(dir.path()).unwrap();
        list.add(port("a")).unwrap();
        list.add(port("b")).unwrap();
        list.remove("web", "a").unwrap();
        list.remove("web", "nothing").unwrap();
        assert_eq!(AttachedList::load(dir.path()).unwrap().entries(), [port("b")]);
    }
}
