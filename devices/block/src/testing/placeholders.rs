//! Handlers of placeholder requests, for tests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};

use guest_abi::pipe::{PLACEHOLDER_MAGIC, Placeholder, SECTOR_BYTES};
use zerocopy::IntoBytes;

use super::Rig;
use crate::placeholder::{
    Answers, PlaceholderConfig, PlaceholderHandler, PlaceholderRequest, TargetFile,
};

pub(crate) const TAG: [u8; 16] = *b"0123456789abcdef";

/// Handler that takes requests with [`TAG`], and sends them to a test.
#[derive(Debug)]
pub(crate) struct TagHandler {
    pub any: AtomicBool,
    taken: Mutex<Sender<PlaceholderRequest>>,
}

impl TagHandler {
    pub fn new() -> (Arc<Self>, Receiver<PlaceholderRequest>) {
        let (taken, receiver) = mpsc::channel();
        (Arc::new(Self { any: AtomicBool::new(true), taken: Mutex::new(taken) }), receiver)
    }
}

impl PlaceholderHandler for TagHandler {
    fn has_any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn take(&self, write: PlaceholderRequest) -> Option<PlaceholderRequest> {
        if write.tag() != TAG {
            return Some(write);
        }
        self.taken.lock().unwrap().send(write).unwrap();
        None
    }
}

/// Handler that completes requests at once.
#[derive(Debug)]
pub(crate) struct ImmediateHandler;

impl PlaceholderHandler for ImmediateHandler {
    fn has_any(&self) -> bool {
        true
    }
    fn take(&self, write: PlaceholderRequest) -> Option<PlaceholderRequest> {
        if write.tag() != TAG {
            return Some(write);
        }
        write.complete(Ok(()));
        None
    }
}

/// Gives a rig's engine a handler.
pub(crate) fn offer_to(rig: &mut Rig, handler: Arc<dyn PlaceholderHandler>) -> Arc<Answers> {
    let target = TargetFile::new(tempfile::tempfile().unwrap(), false, None);
    let config = Arc::new(PlaceholderConfig { handler, target, align_bytes: SECTOR_BYTES as u64 });
    let answers = Arc::new(Answers::new(256).unwrap());
    rig.engine.set_placeholders(config, Arc::clone(&answers), None).unwrap();
    answers
}

/// Gives a rig's engine a [`TagHandler`].
pub(crate) fn known(rig: &mut Rig) -> (Arc<TagHandler>, Receiver<PlaceholderRequest>) {
    let (handler, taken) = TagHandler::new();
    offer_to(rig, handler.clone());
    (handler, taken)
}

/// A placeholder sector.
pub(crate) fn sector(tag: [u8; 16], at: u64) -> Vec<u8> {
    let head = Placeholder { magic: PLACEHOLDER_MAGIC.into(), at: at.into(), tag };
    let mut bytes = head.as_bytes().to_vec();
    bytes.resize(SECTOR_BYTES, 0);
    bytes
}

/// `len` bytes of placeholder sectors.
pub(crate) fn sectors(tag: [u8; 16], at: u64, len: usize) -> Vec<u8> {
    (0..len as u64).step_by(SECTOR_BYTES).flat_map(|done| sector(tag, at + done)).collect()
}
