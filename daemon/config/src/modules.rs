//! Modules: `[[module]]`, and `[vm.modules]` of each VM that has some.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use guest_abi::module::MAX_NAME_BYTES;
use guest_abi::module_ring::{MAX_REGION_BYTES, MIN_REGION_BYTES};

use crate::first_use::FirstUses;
use crate::model::{Config, ModuleConfig, RingConfig, VmModulesConfig};
use crate::node::{Node, Value};
use crate::reader::{Context, Reader};
use crate::value::{nearest, parse_sha256, plain_path};

/// Memory of a module: less has no room for a request, and its pointers reach no more.
const MEMORY_BYTES: (u64, u64) = (1 << 20, 4 << 30);

/// CPU time of a call: below 10 ms it cannot be measured, and nobody waits for longer than 10 s.
const DEADLINE_MS: (u64, u64) = (10, 10_000);

/// Share of a core of a module's thread: there is one, so that 100 is no limit.
const CPU_PERCENT: (u64, u64) = (1, 100);

/// Files of a module.
const DISK_BYTES: (u64, u64) = (1 << 20, 1 << 40);

/// Memory for rings: less has no room for three, and more is for more clients than a module has.
const RING_BYTES: (u64, u64) = (MIN_REGION_BYTES, MAX_REGION_BYTES);

/// How long a module's thread may look at rings before it sleeps.
const RING_SPIN_US: RangeInclusive<u64> = 0..=10_000;

/// Most modules of a VM: they are handed to its process in one message.
const MAX_OF_VM: usize = 16;

const DEFAULT_MEMORY_BYTES: u64 = 256 << 20;
const DEFAULT_DEADLINE_MS: u64 = 100;
const DEFAULT_DISK_BYTES: u64 = 10 << 30;
// Room for 63 clients.
const DEFAULT_RING_BYTES: u64 = 16 << 20;
const DEFAULT_RING_SPIN_US: u64 = 50;

/// Reads one `[[module]]`.
pub(crate) fn module(mut r: Reader<'_, '_>) -> ModuleConfig {
    let name = r.required("name", "\"...\"");
    if let Some(name) = name {
        name_fits(&mut r, name);
    }
    let name = name.unwrap_or_default().to_owned();
    let path = r.path("path").unwrap_or_default();
    if r.get("path").is_none() {
        r.bad("path", "is missing", "add the file of its WebAssembly, an absolute path");
    }
    let sha256 = sha256(&mut r);
    let memory_bytes = sized(&mut r, "memory", DEFAULT_MEMORY_BYTES, MEMORY_BYTES, "1MiB to 4GiB");
    let deadline = DEADLINE_MS.0..=DEADLINE_MS.1;
    let deadline_ms = r.int("deadline_ms", DEFAULT_DEADLINE_MS, deadline) as u32;
    r.finish();
    ModuleConfig { name, path, sha256, memory_bytes, deadline_ms }
}

/// Checks the name of a module: its folder has that name, and guests ask for it.
fn name_fits(r: &mut Reader<'_, '_>, name: &str) {
    let plain = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
        let fix = format!("use 1 to {MAX_NAME_BYTES} of lower-case letters, digits, `_` and `-`");
        r.bad("name", format!("{name:?} is no name of a module"), fix);
    }
}

fn sha256(r: &mut Reader<'_, '_>) -> [u8; 32] {
    let fix = "write what `sha256sum` says of the file: 64 hexadecimal digits";
    if r.get("sha256").is_none() {
        r.bad("sha256", "is missing: the file must be the one that you mean", fix);
    }
    let Some(text) = r.string("sha256") else { return [0; 32] };
    parse_sha256(text).unwrap_or_else(|| {
        r.bad("sha256", format!("{text:?} is no SHA-256"), fix);
        [0; 32]
    })
}

/// Reads a size inside a range.
fn sized(
    r: &mut Reader<'_, '_>,
    key: &'static str,
    default: u64,
    (low, high): (u64, u64),
    range: &str,
) -> u64 {
    let Some(bytes) = r.size(key) else { return default };
    if !(low..=high).contains(&bytes) {
        r.limit(key, format!("is {bytes} bytes"), range);
    }
    bytes.clamp(low, high)
}

/// Reads the optional `[vm.modules]` of the VM `name`, which `r` reads. Checked here and not in
/// `check.rs`: a vsock port that is detached later must not make a config wrong.
pub(crate) fn of_vm(
    r: &mut Reader<'_, '_>,
    name: &str,
    state_dir: &Path,
    has_vsock: bool,
) -> Option<VmModulesConfig> {
    let node = r.get("modules")?;
    let path = format!("{}.modules", r.path);
    let mut inner = Reader::new(&mut *r.ctx, path, node);
    let names = names(&mut inner);
    let disk_bytes = sized(&mut inner, "disk", DEFAULT_DISK_BYTES, DISK_BYTES, "1MiB to 1TiB");
    let share = CPU_PERCENT.0..=CPU_PERCENT.1;
    let cpu_percent = inner.int("cpu_percent", CPU_PERCENT.1, share) as u32;
    let dir = inner.path("dir").unwrap_or_else(|| state_dir.join(name));
    let socket = inner.path("socket");
    if let Some(socket) = &socket {
        inner.socket_fits("socket", socket, 0);
    }
    let guest_users = inner.bool("guest_users", false);
    let ring = ring(&mut inner);
    let reached = has_vsock || inner.get("socket").is_some();
    inner.finish();
    if !reached {
        let what = "is for a VM without vsock, and has no `socket`: nobody reaches its modules";
        r.bad(
            "modules",
            what,
            "add a [vm.vsock] for the guest, or a `socket` for programs of the host",
        );
    }
    Some(VmModulesConfig { names, disk_bytes, cpu_percent, dir, socket, guest_users, ring })
}

/// Reads the optional `[vm.modules.ring]`.
fn ring(r: &mut Reader<'_, '_>) -> Option<RingConfig> {
    let node = r.get("ring")?;
    let path = format!("{}.ring", r.path);
    let mut inner = Reader::new(&mut *r.ctx, path, node);
    let path = inner.path("path").unwrap_or_default();
    if inner.get("path").is_none() {
        inner.bad("path", "is missing", "add the file that QEMU is to map, an absolute path");
    }
    let bytes = sized(&mut inner, "size", DEFAULT_RING_BYTES, RING_BYTES, "1MiB to 1GiB");
    if !bytes.is_power_of_two() {
        let what = format!("is {bytes} bytes, and no power of two");
        inner.bad("size", what, "use 1MiB, 2MiB, 4MiB and so on: it is a memory BAR of the guest");
    }
    let spin_us = inner.int("spin_us", DEFAULT_RING_SPIN_US, RING_SPIN_US) as u32;
    let required = inner.bool("required", false);
    inner.finish();
    Some(RingConfig { path, bytes, spin_us, required })
}

fn names(r: &mut Reader<'_, '_>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let nodes = r.list("use");
    match r.get("use") {
        None => r.bad("use", "is missing", "name its modules: use = [\"table\"]"),
        Some(Node { value: Value::Array(_), .. }) if nodes.is_empty() => {
            r.bad("use", "names no module", "name one, or take [vm.modules] out");
        }
        Some(_) => {}
    }
    if nodes.len() > MAX_OF_VM {
        r.limit("use", format!("has {} modules", nodes.len()), MAX_OF_VM);
    }
    for (_, Node { value, .. }) in nodes.into_iter().take(MAX_OF_VM) {
        let Value::Str(name) = value else {
            r.bad("use", format!("has {}", value.kind()), "write names: [\"table\"]");
            continue;
        };
        if all.contains(name) {
            r.bad("use", format!("names {name:?} twice"), "name it once");
        } else {
            all.push(name.clone());
        }
    }
    all
}

/// Checks modules across tables: names, references, folders, ring files.
pub(crate) fn check(ctx: &mut Context, config: &Config) {
    let mut names = FirstUses::new("the name", "names must differ");
    for (i, module) in config.modules.iter().enumerate().filter(|(_, m)| !m.name.is_empty()) {
        names.take(ctx, &module.name, &format!("{:?}", module.name), &format!("module[{i}].name"));
    }
    let known: Vec<&str> = config.modules.iter().map(|m| m.name.as_str()).collect();
    for (i, vm) in config.vms.iter().enumerate() {
        let used = vm.modules.iter().flat_map(|modules| &modules.names);
        for name in used.filter(|name| !known.contains(&name.as_str())) {
            let fix = match (nearest(name, &known), known.as_slice()) {
                (Some(word), _) => format!("did you mean {word:?}?"),
                (None, []) => "add a [[module]] with this name".into(),
                (None, names) => format!("add a [[module]], or name one of: {}", names.join(", ")),
            };
            let what = format!("there is no [[module]] {name:?}");
            ctx.note(&format!("vm[{i}].modules.use"), what, fix, None);
        }
    }
    folders(ctx, config);
    rings(ctx, config);
}

/// Checks that each folder belongs to one VM alone. Links are not followed: files may not exist
/// yet, and a process locks its folders.
fn folders(ctx: &mut Context, config: &Config) {
    let code = config.code_dir();
    let mut taken: Vec<(PathBuf, String)> =
        vec![(plain_path(&code), "native code of modules".into())];
    for (i, vm) in config.vms.iter().enumerate() {
        let Some(modules) = &vm.modules else { continue };
        let (field, dir) = (format!("vm[{i}].modules.dir"), plain_path(&modules.dir));
        if dir.components().any(|part| part == Component::ParentDir) {
            let what = format!("{} has a `..`", modules.dir.display());
            ctx.note(&field, what, "write where it leads to".into(), None);
            continue;
        }
        let shared =
            taken.iter().find(|(other, _)| dir.starts_with(other) || other.starts_with(&dir));
        if let Some((_, by)) = shared {
            let what = format!("the folder {}, or one around or in it, is of {by}", dir.display());
            let fix = "give each VM a folder of its own, with `dir`";
            ctx.note(&field, what, fix.into(), None);
        } else {
            taken.push((dir, field));
        }
    }
}

/// Checks that each ring file belongs to one VM alone: a second VM would read its requests.
fn rings(ctx: &mut Context, config: &Config) {
    let mut files = FirstUses::new("the file", "give each VM a file of its own");
    for (i, vm) in config.vms.iter().enumerate() {
        let Some(ring) = vm.modules.as_ref().and_then(|modules| modules.ring.as_ref()) else {
            continue;
        };
        let path = plain_path(&ring.path);
        let shown = path.display().to_string();
        files.take(ctx, path, &shown, &format!("vm[{i}].modules.ring.path"));
    }
}
