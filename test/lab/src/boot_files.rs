//! Files from which a guest boots, for those that boot it otherwise than the lab does.

use std::path::PathBuf;

/// Kernel and image of a guest.
#[derive(Clone, Debug)]
pub struct BootFiles {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the same kernel in the form for boot loaders.
    pub compressed_kernel: PathBuf,
    /// Path of its initial file system.
    pub initrd: PathBuf,
    /// Command line of the kernel.
    pub append: String,
    /// Memory that they need, in MiB.
    pub memory_mb: u64,
}
