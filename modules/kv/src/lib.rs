//! To be written.
#![cfg_attr(target_arch = "wasm32", no_std)]

use sdk::{Errno, Events, Host, Module};

/// Nothing yet.
#[derive(Debug)]
pub struct Nothing;

impl Module for Nothing {
    fn start(_: &mut dyn Host) -> Result<Self, Errno> {
        Ok(Self)
    }

    fn serve(&mut self, _: &mut dyn Host, _: Events<'_>) -> Result<(), Errno> {
        Ok(())
    }
}

sdk::export!(Nothing);
