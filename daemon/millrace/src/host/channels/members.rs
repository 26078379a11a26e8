//! Seam between the candidates and the crate `channel`.

use channel::{Ceiling, ChannelError, Flow, MemberConfig, MemberInfo};

use super::addresses::Addresses;

/// Operations of the crate `channel` that candidates use; a seam for tests.
pub trait Members: Send + Sync {
    /// Waits until the VM is a member.
    fn join(&self, config: MemberConfig) -> Result<(), ChannelError>;
    /// Waits until the VM is no member any more.
    fn leave(&self, vm: &str) -> Result<(), ChannelError>;
    /// Changes the addresses by which peers know the VM.
    fn set_addresses(&self, vm: &str, addresses: &Addresses) -> Result<(), ChannelError>;
    /// Changes what the VM may send.
    fn set_ceiling(&self, vm: &str, ceiling: Ceiling) -> Result<(), ChannelError>;
    /// Waits until the VM keeps exactly these flows off the channels.
    fn exclude(&self, vm: &str, flows: &[Flow]) -> Result<(), ChannelError>;
    /// Lists all members.
    fn list(&self) -> Vec<MemberInfo>;
}

impl Members for channel::Channels {
    fn join(&self, config: MemberConfig) -> Result<(), ChannelError> {
        Self::join(self, config)
    }

    fn leave(&self, vm: &str) -> Result<(), ChannelError> {
        Self::leave(self, vm)
    }

    fn set_addresses(&self, vm: &str, addresses: &Addresses) -> Result<(), ChannelError> {
        Self::set_addresses(self, vm, &addresses.macs, &addresses.ips)
    }

    fn set_ceiling(&self, vm: &str, ceiling: Ceiling) -> Result<(), ChannelError> {
        Self::set_ceiling(self, vm, ceiling)
    }

    fn exclude(&self, vm: &str, flows: &[Flow]) -> Result<(), ChannelError> {
        Self::exclude(self, vm, flows)
    }

    fn list(&self) -> Vec<MemberInfo> {
        Self::list(self)
    }
}
