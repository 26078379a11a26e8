//! One life of a module: its memory, its calls, and what they asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_abi::module_call as abi;
use wasmtime::{
    Caller, Engine, Extern, Linker, Memory, Module, ResourceLimiter, Store, Trap, TypedFunc,
};

use crate::ModulesError;
use crate::budget::{Charge, Purse};
use crate::deadline::ticks;
use crate::folder::Folder;
use crate::imports;
use crate::limits::{LOG_LINES_PER_S, START_DEADLINE};

/// How a module is run.
#[derive(Debug, Clone)]
pub struct Limits {
    /// CPU time of a call.
    pub deadline: Duration,
    /// Its memory.
    pub memory_bytes: u64,
}

/// A reply that a module gave.
#[derive(Debug)]
pub struct Given {
    /// Whose.
    pub client: u32,
    /// Of which request.
    pub seq: u64,
    /// The client gets it once all is durable.
    pub durable: bool,
    /// Of its frame.
    pub flags: u16,
    /// Its body, with room for a frame's header in front.
    pub frame: Vec<u8>,
}

/// What the imports work on.
#[derive(Debug)]
pub(crate) struct State {
    pub memory: Option<Memory>,
    pub folder: Folder,
    pub given: Vec<Given>,
    /// What the replies of this call take of the process's memory.
    pub held: Charge,
    pub wake: Option<Instant>,
    pub began: Instant,
    pub name: String,
    lines: Lines,
    memory_bytes: u64,
}

/// Bounds what a module logs.
#[derive(Debug, Default)]
struct Lines {
    second: u64,
    told: u32,
    dropped: u64,
}

impl State {
    /// Whether one more line may be logged.
    pub fn may_log(&mut self) -> bool {
        let second = self.began.elapsed().as_secs();
        if second != self.lines.second {
            let dropped = std::mem::take(&mut self.lines.dropped);
            if dropped > 0 {
                tracing::warn!(module = %self.name, dropped, "it logs too much");
            }
            self.lines = Lines { second, ..Lines::default() };
        }
        self.lines.told += 1;
        let may = self.lines.told <= LOG_LINES_PER_S;
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

/// Elements of a module's table: its functions that are called through pointers.
const MAX_TABLE: usize = 100_000;

/// Why an instance is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// A call took too long.
    Deadline,
    /// It trapped: a panic, most often.
    Trap,
    /// It says so itself: a negative errno.
    Gave(i32),
    /// It does not export what it should.
    Exports,
    /// A sync of its files failed.
    Storage,
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Deadline => f.write_str("it computed for longer than its deadline"),
            Self::Trap => f.write_str("it trapped"),
            Self::Gave(errno) => write!(f, "it returned {errno}"),
            Self::Storage => f.write_str("the host's storage failed"),
            Self::Exports => f.write_str("its exports or imports are not those of a module"),
        }
    }
}

/// A running module.
pub struct Instance {
    store: Store<State>,
    memory: Memory,
    buffer: TypedFunc<i32, i32>,
    serve: TypedFunc<i32, i32>,
    deadline: Duration,
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("state", self.store.data()).finish_non_exhaustive()
    }
}

/// The imports, once per process.
///
/// # Errors
/// Never, with the names of this crate.
pub(crate) fn linker(engine: &Engine) -> Result<Linker<State>, ModulesError> {
    let mut linker = Linker::new(engine);
    imports::add(&mut linker).map_err(ModulesError::module("imports"))?;
    Ok(linker)
}

impl Instance {
    /// Makes an instance and starts it. On error the folder comes back.
    pub(crate) fn start(
        linker: &Linker<State>,
        module: &Module,
        name: &str,
        folder: Folder,
        limits: &Limits,
        purse: &Arc<Purse>,
    ) -> Result<Self, (Stopped, Box<Folder>)> {
        let state = State {
            memory: None,
            folder,
            given: Vec::new(),
            held: Charge::new(purse),
            wake: None,
            began: Instant::now(),
            name: name.into(),
            lines: Lines::default(),
            memory_bytes: limits.memory_bytes,
        };
        let mut store = Store::new(module.engine(), state);
        store.limiter(|state| state);
        match Self::entered(&mut store, linker, module) {
            Ok((memory, buffer, serve)) => {
                Ok(Self { store, memory, buffer, serve, deadline: limits.deadline })
            }
            Err(stopped) => Err((stopped, Box::new(closed(store.into_data())))),
        }
    }

    #[expect(clippy::type_complexity, reason = "the parts of an instance, once")]
    fn entered(
        store: &mut Store<State>,
        linker: &Linker<State>,
        module: &Module,
    ) -> Result<(Memory, TypedFunc<i32, i32>, TypedFunc<i32, i32>), Stopped> {
        // A start function is the module's code as well.
        store.set_epoch_deadline(ticks(START_DEADLINE));
        let instance = linker.instantiate(&mut *store, module).map_err(|e| {
            tracing::error!(module = %store.data().name, "instantiating: {e:#}");
            Stopped::Exports
        })?;
        let Some(Extern::Memory(memory)) = instance.get_export(&mut *store, "memory") else {
            return Err(Stopped::Exports);
        };
        store.data_mut().memory = Some(memory);
        let function = |store: &mut Store<State>, name| {
            instance.get_typed_func::<i32, i32>(store, name).map_err(|_| Stopped::Exports)
        };
        let buffer = function(store, "millrace_buffer")?;
        let serve = function(store, "millrace_serve")?;
        let no_arguments = |store: &mut Store<State>, name| {
            instance.get_typed_func::<(), i32>(store, name).map_err(|_| Stopped::Exports)
        };
        let version = no_arguments(store, "millrace_abi")?;
        let start = no_arguments(store, "millrace_start")?;
        if version.call(&mut *store, ()).map_err(|e| why(&e))? != abi::VERSION as i32 {
            return Err(Stopped::Exports);
        }
        match start.call(&mut *store, ()).map_err(|e| why(&e))? {
            0 => Ok((memory, buffer, serve)),
            errno => Err(Stopped::Gave(errno)),
        }
    }

    /// Hands events over. What came of them is in the state, also after an error.
    pub(crate) fn serve(&mut self, events: &[u8]) -> Result<(), Stopped> {
        let state = self.store.data_mut();
        state.wake = None;
        let len = i32::try_from(events.len()).map_err(|_| Stopped::Exports)?;
        self.store.set_epoch_deadline(ticks(self.deadline));
        let at = self.buffer.call(&mut self.store, len).map_err(|e| why(&e))?;
        let at = usize::try_from(at).ok().filter(|at| *at != 0).ok_or(Stopped::Trap)?;
        self.memory.write(&mut self.store, at, events).map_err(|_| Stopped::Trap)?;
        match self.serve.call(&mut self.store, len).map_err(|e| why(&e))? {
            0 => Ok(()),
            errno => Err(Stopped::Gave(errno)),
        }
    }

    pub(crate) fn state(&mut self) -> &mut State {
        self.store.data_mut()
    }

    /// Bytes of its memory now.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.data_size(&self.store) as u64
    }

    /// Ends it; its files are closed.
    pub(crate) fn end(self) -> Folder {
        closed(self.store.into_data())
    }
}

fn closed(state: State) -> Folder {
    let mut folder = state.folder;
    folder.close_all();
    folder
}

fn why(error: &wasmtime::Error) -> Stopped {
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => Stopped::Deadline,
        _ => {
            tracing::debug!("a module trapped: {error:#}");
            Stopped::Trap
        }
    }
}

/// A module's memory, with the state.
pub(crate) fn split<'a>(
    caller: &'a mut Caller<'_, State>,
) -> Result<(&'a mut [u8], &'a mut State), rustix::io::Errno> {
    let memory = caller.data().memory.ok_or(rustix::io::Errno::FAULT)?;
    Ok(memory.data_and_store_mut(caller))
}
