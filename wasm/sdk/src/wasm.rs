//! The imports and exports themselves.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::cell::UnsafeCell;

use guest_abi::module_call::VERSION;

use crate::{Errno, Events, File, Host, Module};

#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// Version that `millrace_abi` returns.
pub const ABI: i32 = VERSION as i32;

mod import {
    #[link(wasm_import_module = "millrace")]
    unsafe extern "C" {
        pub safe fn reply(client: i32, seq: i64, flags: i32, ptr: i32, len: i32) -> i32;
        pub safe fn file_open(name: i32, len: i32, flags: i32) -> i32;
        pub safe fn file_close(handle: i32) -> i32;
        pub safe fn file_len(handle: i32) -> i64;
        pub fn file_read(handle: i32, at: i64, ptr: i32, len: i32) -> i32;
        pub safe fn file_write(handle: i32, at: i64, ptr: i32, len: i32) -> i32;
        pub safe fn file_append(handle: i32, ptr: i32, len: i32) -> i64;
        pub safe fn file_sync(handle: i32) -> i32;
        pub safe fn file_truncate(handle: i32, len: i64) -> i32;
        pub safe fn file_rename(from: i32, from_len: i32, to: i32, to_len: i32) -> i32;
        pub safe fn file_remove(name: i32, len: i32) -> i32;
        pub fn file_list(ptr: i32, len: i32) -> i32;
        pub safe fn clock_ms() -> i64;
        pub fn random(ptr: i32, len: i32) -> i32;
        pub safe fn wake_after(ms: i32) -> i32;
        pub safe fn log(level: i32, ptr: i32, len: i32) -> i32;
    }
}

fn at(bytes: &[u8]) -> (i32, i32) {
    (bytes.as_ptr() as i32, bytes.len() as i32)
}

fn into(bytes: &mut [u8]) -> (i32, i32) {
    (bytes.as_mut_ptr() as i32, bytes.len() as i32)
}

fn checked(returned: i32) -> Result<u64, Errno> {
    Errno::check(returned.into())
}

/// The host of a WebAssembly module.
struct Outside;

impl Host for Outside {
    fn reply(&mut self, client: u32, seq: u64, flags: u32, body: &[u8]) -> Result<(), Errno> {
        let (ptr, len) = at(body);
        checked(import::reply(client as i32, seq as i64, flags as i32, ptr, len)).map(drop)
    }

    fn open(&mut self, name: &str, flags: u32) -> Result<File, Errno> {
        let (ptr, len) = at(name.as_bytes());
        Ok(File(checked(import::file_open(ptr, len, flags as i32))? as i32))
    }

    fn close(&mut self, file: File) {
        import::file_close(file.0);
    }

    fn len(&mut self, file: File) -> Result<u64, Errno> {
        Errno::check(import::file_len(file.0))
    }

    fn read(&mut self, file: File, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
        let (ptr, len) = into(bytes);
        // SAFETY: the host writes at most `len` bytes at `ptr`, which are borrowed for that.
        let read = unsafe { import::file_read(file.0, offset as i64, ptr, len) };
        Ok(checked(read)? as usize)
    }

    fn write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let (ptr, len) = at(bytes);
        checked(import::file_write(file.0, offset as i64, ptr, len)).map(drop)
    }

    fn append(&mut self, file: File, bytes: &[u8]) -> Result<u64, Errno> {
        let (ptr, len) = at(bytes);
        Errno::check(import::file_append(file.0, ptr, len))
    }

    fn sync(&mut self, file: File) -> Result<(), Errno> {
        checked(import::file_sync(file.0)).map(drop)
    }

    fn truncate(&mut self, file: File, len_bytes: u64) -> Result<(), Errno> {
        checked(import::file_truncate(file.0, len_bytes as i64)).map(drop)
    }

    fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        let ((from, from_len), (to, to_len)) = (at(from.as_bytes()), at(to.as_bytes()));
        checked(import::file_rename(from, from_len, to, to_len)).map(drop)
    }

    fn remove(&mut self, name: &str) -> Result<(), Errno> {
        let (ptr, len) = at(name.as_bytes());
        checked(import::file_remove(ptr, len)).map(drop)
    }

    fn list(&mut self) -> Result<Vec<String>, Errno> {
        let mut names = Vec::new();
        loop {
            let (ptr, len) = into(&mut names);
            // SAFETY: as in `read`.
            let needed = checked(unsafe { import::file_list(ptr, len) })? as usize;
            if needed <= names.len() {
                names.truncate(needed);
                break;
            }
            names = vec![0; needed];
        }
        let name = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| Errno::INVAL);
        names.split(|&b| b == 0).filter(|n| !n.is_empty()).map(name).collect()
    }

    fn now_ms(&mut self) -> u64 {
        import::clock_ms() as u64
    }

    fn random(&mut self, bytes: &mut [u8]) -> Result<(), Errno> {
        let (ptr, len) = into(bytes);
        // SAFETY: as in `read`.
        checked(unsafe { import::random(ptr, len) }).map(drop)
    }

    fn wake_after(&mut self, ms: u32) {
        import::wake_after(ms.min(i32::MAX as u32) as i32);
    }

    fn log(&mut self, level: u32, text: &str) {
        let (ptr, len) = at(text.as_bytes());
        import::log(level as i32, ptr, len);
    }
}

/// State of the one instance.
struct State<M> {
    module: Option<M>,
    buffer: Vec<u8>,
}

/// The one instance of a module.
pub struct Instance<M>(UnsafeCell<State<M>>);

// SAFETY: a module has one thread.
unsafe impl<M> Sync for Instance<M> {}

impl<M: Module> Instance<M> {
    /// Makes an instance that is not started yet.
    #[expect(clippy::new_without_default, reason = "made in a static")]
    pub const fn new() -> Self {
        Self(UnsafeCell::new(State { module: None, buffer: Vec::new() }))
    }

    #[expect(clippy::mut_from_ref, reason = "see below")]
    fn state(&self) -> &mut State<M> {
        // SAFETY: one thread, and no import calls an export: each export has it for itself.
        unsafe { &mut *self.0.get() }
    }

    /// `millrace_start`.
    pub fn start(&self) -> i32 {
        match M::start(&mut Outside) {
            Ok(module) => {
                self.state().module = Some(module);
                0
            }
            Err(errno) => -errno.0,
        }
    }

    /// `millrace_buffer`.
    pub fn buffer(&self, len: i32) -> i32 {
        let buffer = &mut self.state().buffer;
        let Ok(len) = usize::try_from(len) else { return 0 };
        // A large one was for a large row: it does not stay.
        if buffer.len() < len || (buffer.len() > KEPT_BYTES && len <= KEPT_BYTES) {
            *buffer = Vec::new();
            if buffer.try_reserve_exact(len).is_err() {
                return 0;
            }
            buffer.resize(len, 0);
        }
        buffer.as_mut_ptr() as i32
    }

    /// `millrace_serve`.
    pub fn serve(&self, len: i32) -> i32 {
        let State { module, buffer } = self.state();
        let bytes = usize::try_from(len).ok().and_then(|len| buffer.get(..len));
        let (Some(module), Some(bytes)) = (module, bytes) else { return -Errno::INVAL.0 };
        match module.serve(&mut Outside, Events::new(bytes)) {
            Ok(()) => 0,
            Err(errno) => -errno.0,
        }
    }
}

/// Largest buffer for events that stays.
const KEPT_BYTES: usize = 1 << 20;

#[panic_handler]
fn panicked(info: &core::panic::PanicInfo<'_>) -> ! {
    use core::fmt::Write;
    let mut text = String::new();
    let _ = write!(text, "{info}");
    Outside.log(guest_abi::module_call::log::ERROR, &text);
    core::arch::wasm32::unreachable()
}
