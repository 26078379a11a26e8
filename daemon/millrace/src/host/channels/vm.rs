//! VM that has channels.

use config::{ChannelConfig, VmConfig};

/// A VM with a `[vm.channel]`.
#[derive(Debug)]
pub struct Vm {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM.
    pub domain: String,
    /// Settings of its `[vm.channel]`.
    pub config: ChannelConfig,
}

impl Vm {
    /// The VM of a config; none for one without channels.
    pub fn of(vm: &VmConfig) -> Option<Self> {
        let (domain, config) = (vm.trust_domain.clone()?, vm.channel.clone()?);
        Some(Self { name: vm.name.clone(), domain, config })
    }
}
