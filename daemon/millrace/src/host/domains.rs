//! Domains of vsock: one for each trust domain, and one for each VM that is in none. The latter
//! have nothing to say to each other, and so share no buffers and no limits either.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use config::Config;
use vsock::{Domain, DomainConfig, VsockError, VsockPort, VsockPortConfig};

/// Owner of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// A trust domain's: its VMs may talk to each other.
    Trust(String),
    /// A single VM's.
    Vm(String),
}

impl Key {
    /// The domain of a VM of `config`.
    pub fn of(config: &Config, vm: &str) -> Self {
        let entry = config.vms.iter().find(|v| v.name == vm);
        match entry.and_then(|v| v.trust_domain.clone()) {
            Some(name) => Self::Trust(name),
            None => Self::Vm(vm.into()),
        }
    }

    fn config(&self) -> DomainConfig {
        match self {
            Self::Trust(name) => DomainConfig::new(name, true),
            // Not to be taken for the trust domain of that name.
            Self::Vm(name) => DomainConfig::new(format!("VM {name}"), false),
        }
    }
}

/// The domains that have ports.
#[derive(Debug, Default)]
pub struct Domains(HashMap<Key, Domain>);

impl Domains {
    /// Adds a port; its domain is made by `make` with the first one. On error nothing is left.
    pub fn add_port(
        &mut self,
        key: Key,
        port: VsockPortConfig,
        make: impl FnOnce(DomainConfig) -> Result<Domain, VsockError>,
    ) -> Result<Arc<VsockPort>, VsockError> {
        match self.0.entry(key) {
            Entry::Occupied(domain) => domain.get().add_port(port),
            Entry::Vacant(free) => {
                let domain = make(free.key().config())?;
                let port = domain.add_port(port)?;
                free.insert(domain);
                Ok(port)
            }
        }
    }

    /// Removes a port; its domain goes with the last one.
    pub fn remove_port(&mut self, key: &Key, name: &str) -> Result<(), VsockError> {
        let Some(domain) = self.0.get(key) else { return Ok(()) };
        let removed = domain.remove_port(name);
        if domain.ports().is_empty() {
            self.0.remove(key);
        }
        removed
    }

    /// Drops the domain of this name, which serves nobody any more. Returns its owner.
    pub fn drop_named(&mut self, name: &str) -> Option<Key> {
        let key = self.0.keys().find(|key| key.config().name == name)?.clone();
        self.0.remove(&key);
        Some(key)
    }

    /// Drops all domains.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// How many domains there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
