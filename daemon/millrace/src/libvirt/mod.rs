//! `libvirt`: a VM of the config as libvirt takes it. Needs no daemon.

mod device;
mod domain;
mod existing;
#[cfg(test)]
mod tests;
mod xml;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};
use config::{Config, VmConfig};

use crate::cli::Libvirt;
use crate::process::print;
use crate::{exit, journal};

/// `libvirt`.
pub fn run(args: &Libvirt) -> anyhow::Result<u8> {
    match config::load(&args.config) {
        Ok(config) => {
            print(&text(args, &config)?)?;
            Ok(exit::OK)
        }
        Err(problems) => {
            journal::print_error(&problems.to_string());
            Ok(exit::FAILED)
        }
    }
}

/// XML of a whole VM, or of one device.
fn text(args: &Libvirt, config: &Config) -> anyhow::Result<String> {
    let vm = find(args, config)?;
    match (&args.device, &args.domain) {
        (Some(port), _) => domain::write_device(args, vm, port),
        (None, Some(file)) => {
            let changed = read(file).and_then(|domain| existing::write(vm, &domain));
            changed.with_context(|| file.display().to_string())
        }
        (None, None) => {
            check_memory(args.memory, vm)?;
            domain::write(args, vm)
        }
    }
}

/// Reads a file, or the standard input where it is `-`; one byte more than a domain may have.
fn read(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let most = existing::MAX_DOMAIN_BYTES as u64 + 1;
    if file == Path::new("-") {
        std::io::stdin().take(most).read_to_string(&mut text)?;
    } else {
        File::open(file)?.take(most).read_to_string(&mut text)?;
    }
    Ok(text)
}

fn find<'a>(args: &Libvirt, config: &'a Config) -> anyhow::Result<&'a VmConfig> {
    if let Some(vm) = config.vms.iter().find(|vm| vm.name == args.vm) {
        return Ok(vm);
    }
    let file = args.config.display();
    let known: Vec<&str> = config.vms.iter().map(|vm| vm.name.as_str()).collect();
    match known.as_slice() {
        [] => bail!("{file} has no VM"),
        known => bail!("{file} has no VM {:?}; it has: {}", args.vm, known.join(", ")),
    }
}

/// Refuses memory that the daemon would refuse.
fn check_memory(memory_bytes: u64, vm: &VmConfig) -> anyhow::Result<()> {
    match vm.memory_limit_bytes {
        Some(limit) if memory_bytes > limit => bail!(
            "{} MiB of memory are more than VM {} may share: its memory_limit is {} MiB",
            memory_bytes >> 20,
            vm.name,
            limit >> 20
        ),
        _ => Ok(()),
    }
}
