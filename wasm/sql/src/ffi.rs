//! SQLite's functions. On WebAssembly the crate that has them wants a few of the system; nothing
//! that is used here needs them, since files, clock and chance are the [`crate::vfs`]'s.

#[cfg(not(target_arch = "wasm32"))]
pub use libsqlite3_sys::*;
#[cfg(target_arch = "wasm32")]
pub use sqlite_wasm_rs::*;

#[cfg(target_arch = "wasm32")]
mod system {
    /// Functions that answer that there is no such thing here.
    const UNSUPPORTED: i32 = 1;

    #[unsafe(no_mangle)]
    extern "C" fn rust_sqlite_wasm_host_sleep(_: u64, _: u32) {}

    #[unsafe(no_mangle)]
    extern "C" fn rust_sqlite_wasm_host_random(_: *mut u8, _: usize) -> usize {
        0
    }

    #[unsafe(no_mangle)]
    extern "C" fn rust_sqlite_wasm_host_epoch_timestamp_in_ms(_: *mut i64) -> i32 {
        UNSUPPORTED
    }

    #[unsafe(no_mangle)]
    extern "C" fn rust_sqlite_wasm_host_fill_entropy(_: *mut u8, _: usize) -> i32 {
        UNSUPPORTED
    }

    #[unsafe(no_mangle)]
    extern "C" fn rust_sqlite_wasm_host_localtime(_: i64, _: *mut core::ffi::c_void) -> i32 {
        UNSUPPORTED
    }
}
