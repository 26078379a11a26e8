//! VM that has channels.

use std::sync::Mutex;

use base::sync::lock;
use channel::Ceiling;
use config::{ChannelConfig, CreditConfig, VmConfig};

/// A VM with a `[vm.channel]`.
#[derive(Debug)]
pub struct Vm {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM.
    pub domain: String,
    /// Settings of its `[vm.channel]`.
    pub config: ChannelConfig,
    /// Most that it may send over its channels.
    ceiling: Mutex<Ceiling>,
}

impl Vm {
    /// The VM of a config; none for one without channels.
    pub fn of(vm: &VmConfig) -> Option<Self> {
        let (domain, config) = (vm.trust_domain.clone()?, vm.channel.clone()?);
        Some(Self::new(vm.name.clone(), domain, config, &vm.credit))
    }

    /// A VM that is granted `credit`.
    pub fn new(name: String, domain: String, config: ChannelConfig, credit: &CreditConfig) -> Self {
        Self { name, domain, config, ceiling: Mutex::new(ceiling(credit)) }
    }

    /// Most that it may send over its channels now.
    pub fn ceiling(&self) -> Ceiling {
        *lock(&self.ceiling)
    }

    /// Changes what it is granted; its thread tells its member.
    pub fn grant(&self, credit: &CreditConfig) {
        *lock(&self.ceiling) = ceiling(credit);
    }
}

/// Ceiling of a VM's channels: the figures of its account, which does not see them.
fn ceiling(credit: &CreditConfig) -> Ceiling {
    let ceiling = Ceiling {
        bytes_per_s: credit.ceiling_bytes_per_s,
        ops_per_s: credit.ceiling_ops_per_s,
        burst_ms: credit.ceiling_burst_ms,
    };
    if ceiling.is_none() { Ceiling::default() } else { ceiling }
}
