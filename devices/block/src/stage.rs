//! The seam of a disk: stages, which see (and may change) its data between guest and image.
//!
//! A port with stages copies all data through buffers of ours, so that a stage only judges bytes
//! that nobody else can change meanwhile. Ports without stages pay for a comparison. Nothing in the
//! tree is a stage yet but tests.

/// Direction of data, seen from the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The VM writes.
    FromVm,
    /// The VM reads.
    ToVm,
}

/// Verdict of a stage on data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The data goes on.
    Pass,
    /// The request fails; counted under the stage's name.
    Drop,
}

/// A stage on a disk: sees data that was read (before the guest does) or is to be written, in
/// buffers of ours. Runs on the port's sidecore: no allocation, no lock, no system call.
pub trait BlockStage: Send {
    /// Name, for metrics and `status`.
    fn name(&self) -> &str;

    /// Whether it changes content (encryption): pipes must then read through the stages.
    fn changes_content(&self) -> bool;

    /// Sees (and may change) `data`, which belongs at `offset` bytes on the disk.
    fn push(&mut self, direction: Direction, offset: u64, data: &mut [u8]) -> Verdict;
}
