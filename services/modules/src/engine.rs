//! The WebAssembly engine, the same for whoever compiles and whoever runs, and compiled files.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};
use wasmtime::{Config, Engine, Module};

use crate::ModulesError;
use crate::limits::{MAX_WASM_BYTES, STACK_BYTES};

/// A SHA-256.
pub type Hash = [u8; 32];

/// Encodes a hash in lower case hexadecimal digits.
#[must_use]
pub fn hex(hash: &Hash) -> String {
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

/// Decodes a hash from [`hex`].
#[must_use]
pub fn from_hex(text: &str) -> Option<Hash> {
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// An engine. Calls are interrupted by its epoch, which a timer of the calling thread's CPU time
/// counts up ([`crate::deadline`]).
///
/// # Errors
/// This machine cannot run it.
pub fn engine() -> Result<Engine, ModulesError> {
    let mut config = Config::new();
    config.epoch_interruption(true).max_wasm_stack(STACK_BYTES);
    // Images of memories would be memory files, made while the process is confined already.
    config.memory_init_cow(false);
    Engine::new(&config).map_err(ModulesError::module("engine"))
}

/// Reads a module's file, at most [`MAX_WASM_BYTES`].
///
/// # Errors
/// It cannot be read, or is too long.
pub fn read_wasm(name: &str, path: &Path) -> Result<(Vec<u8>, Hash), ModulesError> {
    let what = || format!("module {name}: reading {}", path.display());
    let file = File::open(path).map_err(ModulesError::io(what()))?;
    let mut bytes = Vec::new();
    file.take(MAX_WASM_BYTES + 1).read_to_end(&mut bytes).map_err(ModulesError::io(what()))?;
    let len_bytes = bytes.len() as u64;
    if len_bytes > MAX_WASM_BYTES {
        let (name, path) = (name.to_owned(), path.to_owned());
        return Err(ModulesError::TooLong { name, path, len_bytes, limit_bytes: MAX_WASM_BYTES });
    }
    let hash = Sha256::digest(&bytes).into();
    Ok((bytes, hash))
}

/// Path of a module's native code.
#[must_use]
pub fn compiled_path(folder: &Path, hash: &Hash) -> PathBuf {
    folder.join(format!("{}.cwasm", hex(hash)))
}

/// Compiles a module's bytes into `folder`, unless that was done before, by this version; the path.
///
/// The result is native code and runs with the rights of whoever loads it: the folder belongs to
/// the daemon alone.
///
/// # Errors
/// It is no WebAssembly, or the folder cannot be written.
pub fn compile(
    name: &str,
    wasm: &[u8],
    hash: &Hash,
    folder: &Path,
) -> Result<PathBuf, ModulesError> {
    private_folder(folder)?;
    let path = compiled_path(folder, hash);
    let engine = engine()?;
    if !path.is_file() || load(&engine, name, &path).is_err() {
        let code = native(&engine, name, wasm)?;
        write_whole(&path, &code)
            .map_err(ModulesError::io(format!("module {name}: writing {}", path.display())))?;
    }
    Ok(path)
}

#[cfg(feature = "compiler")]
fn native(engine: &Engine, name: &str, wasm: &[u8]) -> Result<Vec<u8>, ModulesError> {
    engine.precompile_module(wasm).map_err(ModulesError::module(name))
}

#[cfg(not(feature = "compiler"))]
fn native(_: &Engine, name: &str, _: &[u8]) -> Result<Vec<u8>, ModulesError> {
    let why = "it was not compiled before, and this program has no compiler".into();
    Err(ModulesError::Module { name: name.into(), why })
}

/// Writes a file as a whole: nobody loads half of it, also not after the machine failed.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let partial = path.with_extension(format!("{process}.{count}.partial"));
    fs::write(&partial, bytes)?;
    File::open(&partial)?.sync_all()?;
    fs::rename(&partial, path)
}

/// Loads what [`compile`] made.
///
/// # Errors
/// It was made by another version, or for another machine.
pub fn load(engine: &Engine, name: &str, path: &Path) -> Result<Module, ModulesError> {
    let file = File::open(path)
        .map_err(ModulesError::io(format!("module {name}: opening {}", path.display())))?;
    load_open(engine, name, file)
}

/// Loads native code from an open file.
///
/// # Errors
/// See [`load`].
pub fn load_open(engine: &Engine, name: &str, file: File) -> Result<Module, ModulesError> {
    // SAFETY: the file is one that `compile` made, in a folder where only the daemon's user writes.
    unsafe { Module::deserialize_open_file(engine, file) }.map_err(ModulesError::module(name))
}

/// Makes a folder for the daemon alone, or checks that it is.
///
/// # Errors
/// It cannot be made, or others may write there.
pub fn private_folder(path: &Path) -> Result<(), ModulesError> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let what = || format!("making the folder {}", path.display());
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(ModulesError::io(what()))?;
    let meta = fs::symlink_metadata(path).map_err(ModulesError::io(what()))?;
    let ours = meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw();
    if !ours || meta.mode() & 0o022 != 0 {
        let why = "it must be a folder of the daemon's user, writable by nobody else";
        return Err(ModulesError::io(what())(std::io::Error::other(why)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_the_same_there_and_back() {
        let hash: Hash = std::array::from_fn(|i| i as u8 * 7);
        assert_eq!(from_hex(&hex(&hash)), Some(hash));
        for wrong in ["", "00", &"g".repeat(64), &"+1".repeat(32), &"0".repeat(66)] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_module_is_compiled_once() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("code");
        let wasm = b"\0asm\x01\0\0\0";
        let hash = Sha256::digest(wasm).into();
        let path = compile("empty", wasm, &hash, &folder).unwrap();
        let made = fs::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(compile("empty", wasm, &hash, &folder).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), made);
        let error = compile("none", b"no WebAssembly", &[0; 32], &folder).unwrap_err();
        assert!(error.to_string().starts_with("module none: "), "{error}");
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(private_folder(folder.path()).is_err());
    }
}
