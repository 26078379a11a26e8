//! Instance of a module: its memory, its start, its calls.

use std::sync::Arc;
use std::time::Duration;

use guest_abi::module_call as abi;
use wasmtime::{Engine, Extern, Linker, Memory, Module, Store, Trap, TypedFunc};

use crate::ModulesError;
use crate::budget::Purse;
use crate::deadline::ticks;
use crate::folder::Folder;
use crate::imports;
use crate::instance_state::State;
use crate::limits::START_DEADLINE;

/// Limits of a module.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Limit of the CPU time of a call.
    pub deadline: Duration,
    /// Limit of its memory.
    pub memory_bytes: u64,
}

/// Reason why an instance is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A call took too long.
    Deadline,
    /// The module trapped: a panic, most often.
    Trap,
    /// The module returned a negative errno.
    Returned(i32),
    /// The module does not export what it should.
    Exports,
    /// A sync of its files failed.
    Storage,
}

impl std::fmt::Display for StopReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Deadline => f.write_str("it computed for longer than its deadline"),
            Self::Trap => f.write_str("it trapped"),
            Self::Returned(errno) => write!(f, "it returned {errno}"),
            Self::Storage => f.write_str("the host's storage failed"),
            Self::Exports => f.write_str("its exports or imports are not those of a module"),
        }
    }
}

/// Running instance of a module.
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

/// Links the imports, once per process.
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
    ) -> Result<Self, (StopReason, Box<Folder>)> {
        let state = State::new(name, folder, limits.memory_bytes, purse);
        let mut store = Store::new(module.engine(), state);
        store.limiter(|state| state);
        match Self::enter(&mut store, linker, module) {
            Ok((memory, buffer, serve)) => {
                Ok(Self { store, memory, buffer, serve, deadline: limits.deadline })
            }
            Err(stopped) => Err((stopped, Box::new(close_files(store.into_data())))),
        }
    }

    #[expect(clippy::type_complexity, reason = "the parts of an instance, once")]
    fn enter(
        store: &mut Store<State>,
        linker: &Linker<State>,
        module: &Module,
    ) -> Result<(Memory, TypedFunc<i32, i32>, TypedFunc<i32, i32>), StopReason> {
        // A start function is the module's code as well.
        store.set_epoch_deadline(ticks(START_DEADLINE));
        let instance = linker.instantiate(&mut *store, module).map_err(|e| {
            let name = &store.data().name;
            tracing::error!(module = %name, "module {name} cannot be instantiated: {e:#}");
            StopReason::Exports
        })?;
        let Some(Extern::Memory(memory)) = instance.get_export(&mut *store, "memory") else {
            return Err(StopReason::Exports);
        };
        store.data_mut().memory = Some(memory);
        let function = |store: &mut Store<State>, name| {
            instance.get_typed_func::<i32, i32>(store, name).map_err(|_| StopReason::Exports)
        };
        let buffer = function(store, "millrace_buffer")?;
        let serve = function(store, "millrace_serve")?;
        let no_arguments = |store: &mut Store<State>, name| {
            instance.get_typed_func::<(), i32>(store, name).map_err(|_| StopReason::Exports)
        };
        let version = no_arguments(store, "millrace_abi")?;
        let start = no_arguments(store, "millrace_start")?;
        if version.call(&mut *store, ()).map_err(|e| stop_reason(&e))? != abi::VERSION as i32 {
            return Err(StopReason::Exports);
        }
        match start.call(&mut *store, ()).map_err(|e| stop_reason(&e))? {
            0 => Ok((memory, buffer, serve)),
            errno => Err(StopReason::Returned(errno)),
        }
    }

    /// Calls the module with events. Its replies are in the state, also after an error.
    pub(crate) fn serve(&mut self, events: &[u8]) -> Result<(), StopReason> {
        let state = self.store.data_mut();
        state.wake = None;
        let len = i32::try_from(events.len()).map_err(|_| StopReason::Exports)?;
        self.store.set_epoch_deadline(ticks(self.deadline));
        let at = self.buffer.call(&mut self.store, len).map_err(|e| stop_reason(&e))?;
        let at = usize::try_from(at).ok().filter(|at| *at != 0).ok_or(StopReason::Trap)?;
        self.memory.write(&mut self.store, at, events).map_err(|_| StopReason::Trap)?;
        match self.serve.call(&mut self.store, len).map_err(|e| stop_reason(&e))? {
            0 => Ok(()),
            errno => Err(StopReason::Returned(errno)),
        }
    }

    pub(crate) fn state(&mut self) -> &mut State {
        self.store.data_mut()
    }

    /// Size of its memory in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.data_size(&self.store) as u64
    }

    /// Ends it; its files are closed.
    pub(crate) fn end(self) -> Folder {
        close_files(self.store.into_data())
    }
}

fn close_files(state: State) -> Folder {
    let mut folder = state.folder;
    folder.close_all();
    folder
}

fn stop_reason(error: &wasmtime::Error) -> StopReason {
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => StopReason::Deadline,
        _ => {
            tracing::debug!("a module trapped: {error:#}");
            StopReason::Trap
        }
    }
}
