//! Modules whose native code and folders are there.

use std::path::PathBuf;

use super::config::{ModuleConfig, VmModulesConfig};
use crate::ModulesError;
use crate::control::ModuleSetup;
use crate::engine;

/// Module whose native code is there.
#[derive(Debug)]
pub(super) struct Prepared {
    pub setup: ModuleSetup,
    pub code: PathBuf,
    pub folder: PathBuf,
}

/// Checks modules, compiles those that are not yet, and makes their folders.
pub(super) fn prepare(
    config: &VmModulesConfig,
    modules: &[ModuleConfig],
) -> Result<Vec<Prepared>, ModulesError> {
    let one = |module: &ModuleConfig| {
        let (wasm, hash) = engine::read_wasm(&module.name, &module.path)?;
        if hash != module.hash {
            return Err(ModulesError::Hash {
                name: module.name.clone(),
                path: module.path.clone(),
                found: engine::hex(&hash),
                wanted: engine::hex(&module.hash),
            });
        }
        let code = engine::compile(&module.name, &wasm, &hash, &config.code_dir)?;
        let folder = config.state_dir.join(&module.name);
        engine::private_folder(&folder)?;
        let setup = ModuleSetup {
            name: module.name.clone(),
            hash: engine::hex(&hash),
            deadline_ms: module.deadline_ms,
            cpu_percent: module.cpu_percent,
            memory_bytes: module.memory_bytes,
            disk_bytes: module.disk_bytes,
        };
        Ok(Prepared { setup, code, folder })
    };
    modules.iter().map(one).collect()
}
