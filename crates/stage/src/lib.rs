//! Interposition stages: the traits.
//!
//! # Theory of operation
//! A stage is one step on a port's way, as small as an app of Snabb: it is pushed a batch of
//! frames or requests and says for each what becomes of it. A stage only ever judges bytes that we
//! own: [`FrameView::header`] is our copy, made before any check, and the same copy is what is
//! delivered. Stages that must see (or change) payload ask for it with [`FrameStage::wants_payload`]
//! and then get an owned copy of the frame; ports without such a stage keep the single copy from
//! sender to receiver. Built-in stages come later; the engines call these traits from the first day.

/// Which way a frame or request goes, seen from the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The VM sends or writes.
    FromVm,
    /// The VM receives or reads.
    ToVm,
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on.
    Pass,
    /// It ends here; counted under the stage's name.
    Drop,
}

/// One frame as a stage sees it.
#[derive(Debug)]
pub struct FrameView<'a> {
    /// Our own copy of the first bytes (Ethernet, VLAN, IP and transport headers).
    pub header: &'a mut [u8],
    /// Our own copy of the rest, when a stage of the port wants payload; else empty.
    pub payload: &'a mut [u8],
    /// Length of the whole frame in bytes.
    pub len_bytes: u32,
}

/// A stage on a network port. Runs on the port's sidecore: no allocation, no lock, no system call.
pub trait FrameStage: Send {
    /// Name, for metrics and `status`.
    fn name(&self) -> &str;

    /// Whether [`FrameView::payload`] is needed (costs one more copy for the port).
    fn wants_payload(&self) -> bool {
        false
    }

    /// Judges one frame of a batch.
    fn push(&mut self, direction: Direction, frame: &mut FrameView<'_>) -> Verdict;
}

/// A stage on a disk: sees data that was read (before the guest does) or is to be written, in
/// buffers of ours.
pub trait BlockStage: Send {
    /// Name, for metrics and `status`.
    fn name(&self) -> &str;

    /// Whether it changes content (encryption): pipes must then read through the stages.
    fn changes_content(&self) -> bool;

    /// Sees (and may change) `data`, which belongs at `offset` bytes on the disk.
    fn push(&mut self, direction: Direction, offset: u64, data: &mut [u8]) -> Verdict;
}
