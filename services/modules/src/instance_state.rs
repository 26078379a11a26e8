//! State of an instance that its imports work on.

use std::sync::Arc;
use std::time::Instant;

use wasmtime::{Caller, Memory, ResourceLimiter};

use crate::budget::{Charge, Purse};
use crate::folder::Folder;
use crate::limits::LOG_LINES_PER_S;

/// Reply that a module gave.
#[derive(Debug)]
pub struct ModuleReply {
    /// Number of the client.
    pub client: u32,
    /// Number of the request.
    pub seq: u64,
    /// Whether the client gets it once all is durable.
    pub durable: bool,
    /// Flags of its frame.
    pub flags: u16,
    /// Body, with room for a frame's header in front.
    pub frame: Vec<u8>,
}

/// State of an instance.
#[derive(Debug)]
pub(crate) struct State {
    pub memory: Option<Memory>,
    pub folder: Folder,
    /// Replies that the module gave in this call.
    pub replies: Vec<ModuleReply>,
    /// Memory of the process that these replies take.
    pub held: Charge,
    /// Time at which the module wants to be called.
    pub wake: Option<Instant>,
    pub began: Instant,
    pub name: String,
    lines: Lines,
    memory_bytes: u64,
}

/// Count of the lines that a module logs in a second.
#[derive(Debug, Default)]
struct Lines {
    second: u64,
    logged: u32,
    dropped: u64,
}

impl State {
    /// State at the start of an instance.
    pub fn new(name: &str, folder: Folder, memory_bytes: u64, purse: &Arc<Purse>) -> Self {
        Self {
            memory: None,
            folder,
            replies: Vec::new(),
            held: Charge::new(purse),
            wake: None,
            began: Instant::now(),
            name: name.into(),
            lines: Lines::default(),
            memory_bytes,
        }
    }

    /// Whether one more line may be logged.
    pub fn may_log(&mut self) -> bool {
        let second = self.began.elapsed().as_secs();
        if second != self.lines.second {
            let dropped = std::mem::take(&mut self.lines.dropped);
            if dropped > 0 {
                let name = &self.name;
                tracing::warn!(module = %name, dropped, "module {name} logs too much");
            }
            self.lines = Lines { second, ..Lines::default() };
        }
        self.lines.logged += 1;
        let may = self.lines.logged <= LOG_LINES_PER_S;
        self.lines.dropped += u64::from(!may);
        may
    }
}

impl ResourceLimiter for State {
    fn memory_growing(
        &mut self,
        _: usize,
        wanted: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(wanted as u64 <= self.memory_bytes)
    }

    fn table_growing(
        &mut self,
        _: usize,
        wanted: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(wanted <= MAX_TABLE)
    }

    fn memories(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        1
    }

    fn instances(&self) -> usize {
        1
    }
}

/// Limit of elements of a module's table: its functions that are called through pointers.
const MAX_TABLE: usize = 100_000;

/// Splits a caller: the module's memory, and the state.
pub(crate) fn split<'a>(
    caller: &'a mut Caller<'_, State>,
) -> Result<(&'a mut [u8], &'a mut State), rustix::io::Errno> {
    let memory = caller.data().memory.ok_or(rustix::io::Errno::FAULT)?;
    Ok(memory.data_and_store_mut(caller))
}
