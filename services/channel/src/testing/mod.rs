//! Helpers of tests of all members together.

pub(crate) mod fake_guest;
pub(crate) mod fake_qemu;

use rustix::fs::MemfdFlags;
use tempfile::TempDir;

use crate::{Ceiling, Channels, ChannelsConfig, MemberConfig, MemberMemory, MemoryRegion};
use fake_guest::FakeGuest;
use fake_qemu::FakeQemu;

/// Bytes of each member's memory; peers see 2 MiB of it.
pub(crate) const MEMORY_LEN: u64 = 3 << 20;

/// Channels, and a folder for what they keep.
pub(crate) struct World {
    pub channels: Channels,
    pub folder: TempDir,
}

impl World {
    pub fn new(change: impl FnOnce(&mut ChannelsConfig)) -> Self {
        let folder = TempDir::new().unwrap();
        let mut config = ChannelsConfig::new(folder.path());
        // Nothing may hang on these but what a test is about.
        (config.drain_timeout_ms, config.exclude_timeout_ms) = (60_000, 60_000);
        change(&mut config);
        Self { channels: Channels::start(config).unwrap(), folder }
    }

    /// Another daemon takes over.
    pub fn restart(self) -> Self {
        let Self { channels, folder } = self;
        channels.stop();
        let mut config = ChannelsConfig::new(folder.path());
        (config.drain_timeout_ms, config.exclude_timeout_ms) = (60_000, 60_000);
        Self { channels: Channels::start(config).unwrap(), folder }
    }

    /// Starts a VM with so many root ports and makes it a member.
    pub fn vm(&self, vm: &str, ports: u32) -> (FakeQemu, FakeGuest) {
        let qemu = FakeQemu::new(ports);
        self.channels.join(config(vm, &qemu)).unwrap();
        let guest = FakeGuest::of(&qemu);
        (qemu, guest)
    }

    /// Entry of a VM in the list.
    pub fn info(&self, vm: &str) -> crate::MemberInfo {
        self.channels.list().into_iter().find(|info| info.vm == vm).unwrap()
    }
}

/// A VM of the domain `t`.
pub(crate) fn config(vm: &str, qemu: &FakeQemu) -> MemberConfig {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("memory", flags).unwrap();
    rustix::fs::ftruncate(&file, MEMORY_LEN).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    MemberConfig {
        vm: vm.into(),
        domain: "t".into(),
        qmp: qemu.path().into(),
        root_ports: "millrace".into(),
        memory: MemberMemory {
            file: file.into(),
            regions: vec![MemoryRegion { gpa: 0, len: MEMORY_LEN, off: 0 }],
        },
        allow_unsealed: false,
        macs: vec![[2, 0, 0, 0, 0, 1]],
        addresses: vec!["10.0.0.1".parse().unwrap()],
        excludes: Vec::new(),
        ceiling: Ceiling::default(),
    }
}
