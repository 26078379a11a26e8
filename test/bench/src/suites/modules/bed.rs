//! The guest with its database, disks and stores, and the daemon with the host's store.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lab::mariadb::{self, MariaDb};
use lab::{
    CacheMode, Daemon, Disk, Guest, GuestBuilder, Image, ImageBuilder, Lab, Running, Vm, Vsock,
    rootfs,
};

use super::counts::{self, COUNTERS, Events, MARK};
use super::meter::{self, Meter};
use super::{Cell, Form, Sample, Setup, Shape, Side, load};
use crate::harness::cpu::Accounts;
use crate::harness::error::BenchError;
use crate::harness::folder::Folder;
use crate::harness::progress::Progress;

/// Folder of the files of shared memory.
const SHARED: &str = "/dev/shm";
/// Bytes of that.
const RING_BYTES: u64 = 16 << 20;
/// The guest's name.
const VM: &str = "db";
/// The server with its default buffers, the stores of three disks, and their files in the page
/// cache.
const MEMORY_MB: u32 = 1536;
/// Bytes of a disk besides its rows: the server's own files, the file system's journal.
const DISK_SPARE_BYTES: u64 = 512 << 20;
/// A log of rows, and the same again while it is compacted.
const TIMES_KEPT: u64 = 2;
/// Time for a guest to boot.
const BOOT: Duration = Duration::from_secs(180);
/// Time for a load.
const CALL: Duration = Duration::from_secs(600);
/// Time for a store to begin: in the guest the module is compiled first.
const BEGIN: Duration = Duration::from_secs(300);
/// Time for one try to reach it.
const TRY: Duration = Duration::from_secs(60);
/// Between two tries to reach a store that begins.
const AGAIN: Duration = Duration::from_millis(500);
/// Seed of all rows.
const SEED: u32 = 6;
/// CPU time of a call, ms: emulated, a large batch takes long. The same in the host.
const DEADLINE_MS: u32 = 10_000;
/// Folder of the guest's daemon's config, on the first disk with the daemon and the module.
const INNER: &str = "/virtio/inner";

/// Everything, running. It goes when this is dropped.
pub struct Bed {
    guest: Guest,
    _daemon: Daemon,
    meter: Meter,
    /// Events that a load without rows counts.
    empty: RefCell<HashMap<(Side, bool), Events>>,
    /// Checksums of all that was inserted, by rows and bytes of each.
    sums: RefCell<HashMap<(u32, u32), String>>,
    _lab: Lab,
    _disks: Folder,
    _memory: tempfile::TempDir,
}

impl Bed {
    /// Boots everything.
    pub fn boot(setup: &Setup, progress: &mut Progress) -> Result<Bed, BenchError> {
        progress.step("preparing kernel, guest image and disks");
        let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
        // The sockets of the guest's own stores are root's alone.
        let server = MariaDb::with_plugin(&setup.plugin).map(MariaDb::as_root);
        let server = server.map_err(|e| BenchError::lab("find the plugin", e))?;
        let folder = setup.out.join("modules-disks");
        let disks = Folder::new(&folder)?;
        let images = images(setup, &disks, &folder)?;
        progress.step("starting the daemon and the guest");
        let memory = tempfile::tempdir_in(SHARED);
        let memory =
            memory.map_err(|e| BenchError::file("make a folder in", Path::new(SHARED), e))?;
        let ring = memory.path().join("ring");
        let daemon = daemon(&lab, setup, &folder, &images, &ring)?;
        let recipe = server.add_to(image(), lab.cache());
        let recipe = recipe.map_err(|e| BenchError::lab("make MariaDB's image", e))?;
        let guest = guest(setup, &daemon, &images, &ring).image(recipe);
        let booted = lab::boot(&lab, [guest], BOOT);
        let [guest] = booted.map_err(|e| BenchError::lab("boot the guest", e))?;
        inside(&guest, setup, &server, progress)?;
        let module = meter::module_process(daemon.pid())
            .ok_or_else(|| BenchError::lab("find the module's process", "there is none"))?;
        let meter = meter(&guest, &daemon, module)?;
        let bed = Bed {
            guest,
            _daemon: daemon,
            meter,
            empty: RefCell::default(),
            sums: RefCell::default(),
            _lab: lab,
            _disks: disks,
            _memory: memory,
        };
        Ok(bed)
    }

    /// Switches the probes.
    pub fn probes(&self, on: bool) -> Result<(), BenchError> {
        counts::switch(&self.guest, on)
    }

    /// One load; with `count` also its events, less those of one without rows.
    pub fn load(
        &self,
        side: Side,
        cell: Cell,
        rows: u32,
        count: bool,
    ) -> Result<(Sample, Option<Events>), BenchError> {
        if !count {
            return Ok((self.run(side, cell, rows)?.0, None));
        }
        let known = (side, cell.form.durable);
        if !self.empty.borrow().contains_key(&known) {
            let (_, events) = self.run(side, cell, 0)?;
            self.empty.borrow_mut().insert(known, events);
        }
        let (sample, events) = self.run(side, cell, rows)?;
        let empty = self.empty.borrow().get(&known).copied().unwrap_or_default();
        Ok((sample, Some(events.per_row(&empty, rows))))
    }

    /// Empties the table, inserts, checks what is there.
    fn run(&self, side: Side, cell: Cell, rows: u32) -> Result<(Sample, Events), BenchError> {
        let bytes = cell.size_bytes;
        let script = |sql: String| mariadb::sql_script(&sql);
        let text = format!(
            "set -e\n{}sync\n{COUNTERS}\necho {MARK}\n{}echo {MARK}\n{COUNTERS}\n{}",
            script(load::empty(side, cell.form)),
            script(load::insert(side, cell.form, (rows, bytes, SEED))),
            script(load::sum(side, cell.form))
        );
        let what = || format!("insert {rows} rows of {bytes} bytes into {}", side.name());
        let failed = |e| BenchError::lab(what(), e);
        let mut running = self.guest.spawn(&text).map_err(failed)?;
        let line =
            |running: &mut Running, word: &str| running.wait_line(word, CALL).map_err(failed);
        line(&mut running, load::BEGIN)?;
        let calls = self.meter.calls();
        let before = self.meter.snapshot()?;
        let took = line(&mut running, load::TOOK)?;
        let after = self.meter.snapshot()?;
        let calls = calls.and_then(|calls| calls.count().ok());
        let text = running.wait(CALL).and_then(lab::Output::ok).map_err(failed)?;
        let wrong = |why: String| BenchError::lab(what(), why);
        let sum = load::said(&text, load::SUM).unwrap_or_default();
        if !load::is_whole(sum, rows, bytes) {
            return Err(wrong(format!("rows, bytes and checksum are {sum:?}")));
        }
        let mut sums = self.sums.borrow_mut();
        let known = sums.entry((rows, bytes)).or_insert_with(|| sum.into());
        if known != sum {
            return Err(wrong(format!("the checksum is {sum:?}, that of others {known:?}")));
        }
        let us = load::said(&took, load::TOOK).and_then(|us| us.parse::<f64>().ok());
        let us = us.ok_or_else(|| wrong(format!("it said {took:?}")))?;
        let (cpu, foreign) = self.meter.between(&before, &after, rows);
        let events = counts::between(&text).ok_or_else(|| wrong(format!("it counted {text}")))?;
        let sample = Sample {
            us: us / f64::from(rows.max(1)),
            cpu,
            system_calls: calls.map(|calls| meter::per_row(calls, rows)),
            foreign,
        };
        Ok((sample, events))
    }
}

/// File systems, the guest's daemon, the server, its tables.
fn inside(
    guest: &Guest,
    setup: &Setup,
    server: &MariaDb,
    progress: &mut Progress,
) -> Result<(), BenchError> {
    let sh = |script: &str| {
        let done = guest.run_for(script, CALL).and_then(lab::Output::ok);
        done.map_err(|e| BenchError::lab(format!("{script} on {VM}"), e))
    };
    progress.step("starting the database and the guest's own stores");
    // Inode tables that are still to be cleared would be, while we measure.
    sh("set -e; modprobe ata_piix; modprobe sd_mod; \
        for i in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/sda ] || sleep 0.5; done; \
        m() { mkdir -p /$2; mount -t ext4 -o noinit_itable $1 /$2; }; \
        m /dev/vda virtio; m /dev/sda ide; m /dev/vdb disk; mkdir -p /run/millrace /var/lib/millrace")?;
    sh(&format!(
        "{INNER}/millrace serve -c {INNER}/millrace.toml > /tmp/millrace.log 2>&1 < /dev/null &"
    ))?;
    let spin = format!("--loose-millrace-spin-us={}", setup.spin_us);
    let started = server.start(guest, "/virtio/mysql", &["--max-allowed-packet=64M", &spin]);
    started.map_err(|e| BenchError::lab("start the database", e))?;
    sh(&mariadb::sql_script(&load::prepare(&setup.sides, setup.batch)))?;
    counts::prepare(guest)?;
    for side in &setup.sides {
        progress.step(&format!("a first table: {}", side.name()));
        first_table(guest, *side)?;
    }
    Ok(())
}

/// Makes a side's table, as soon as its store has begun.
fn first_table(guest: &Guest, side: Side) -> Result<(), BenchError> {
    let until = Instant::now() + BEGIN;
    let table = load::empty(side, Form { durable: true, shape: Shape::One });
    let make = || guest.run_for(&mariadb::sql_script(&table), TRY).and_then(lab::Output::ok);
    while let Err(e) = make() {
        if !side.is_stored() || Instant::now() > until {
            let logs = guest.sh("tail -n 20 /tmp/millrace.log /tmp/mariadbd.log");
            let why = format!("{e}\n{}", logs.unwrap_or_default());
            return Err(BenchError::lab(format!("make a table: {}", side.name()), why));
        }
        std::thread::sleep(AGAIN);
    }
    Ok(())
}

/// Bytes that all disks and stores of a run may hold.
fn kept_bytes(setup: &Setup) -> u64 {
    let bytes = |cell: &Cell| u64::from(cell.rows(setup) + 1) * u64::from(cell.size_bytes);
    let round: u64 = setup.cells().iter().map(bytes).sum();
    DISK_SPARE_BYTES + TIMES_KEPT * round * u64::from(setup.rounds + 1)
}

/// Raw files of the guest's disks.
struct Images {
    virtio: PathBuf,
    ide: PathBuf,
    disk: PathBuf,
}

/// Disks with an ext4 each, all of whose blocks the host has; on the first the guest's daemon.
fn images(setup: &Setup, disks: &Folder, folder: &Path) -> Result<Images, BenchError> {
    let inner = folder.join("tree/inner");
    let none = folder.join("none");
    for path in [&inner, &none] {
        std::fs::create_dir_all(path).map_err(|e| BenchError::file("make folder", path, e))?;
    }
    let copy = |from: &Path, name: &str| {
        let to = inner.join(name);
        std::fs::copy(from, &to).map_err(|e| BenchError::file("copy", from, e))?;
        Ok::<PathBuf, BenchError>(to)
    };
    let program = copy(&setup.millrace, "millrace")?;
    command(Command::new("strip").arg(&program))?;
    copy(&setup.module, "table.wasm")?;
    let text = inner_config(&sha256(&setup.module)?);
    let config = inner.join("millrace.toml");
    std::fs::write(&config, text).map_err(|e| BenchError::file("write", &config, e))?;
    let size_bytes = kept_bytes(setup).next_multiple_of(1 << 20);
    let make = |name: &str, tree: &Path| {
        let image = disks.image(name, size_bytes)?;
        rootfs::ext4_from_folder(tree, &image, (size_bytes >> 20) as u32)
            .map_err(|e| BenchError::lab("make a file system", e))?;
        Ok::<PathBuf, BenchError>(image)
    };
    let virtio = make("virtio.raw", &folder.join("tree"))?;
    Ok(Images { virtio, ide: make("ide.raw", &none)?, disk: make("disk.raw", &none)? })
}

fn command(command: &mut Command) -> Result<String, BenchError> {
    let what = format!("{command:?}");
    let out = command.output().map_err(|e| BenchError::lab(&what, e))?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
        false => Err(BenchError::lab(what, String::from_utf8_lossy(&out.stderr))),
    }
}

fn sha256(path: &Path) -> Result<String, BenchError> {
    let text = command(Command::new("sha256sum").arg("-b").arg(path))?;
    Ok(text.split_ascii_whitespace().next().unwrap_or_default().trim_start_matches('\\').into())
}

fn module(path: &str, sha256: &str) -> String {
    format!(
        "[[module]]\nname = \"table\"\npath = {path:?}\nsha256 = {sha256:?}\n\
         deadline_ms = {DEADLINE_MS}\n"
    )
}

/// The daemon in the guest: the same module, a store on each disk.
fn inner_config(sha256: &str) -> String {
    let mut text = format!(
        "[daemon]\nrun_dir = \"/run/millrace\"\nstate_dir = \"/var/lib/millrace\"\n\
         [sidecore]\ncount = 1\n{}",
        module(&format!("{INNER}/table.wasm"), sha256)
    );
    for name in Side::ALL.into_iter().filter_map(load::inner) {
        text.push_str(&format!(
            "[[vm]]\nname = {name:?}\n[vm.modules]\nuse = [\"table\"]\ndir = \"/{name}/store\"\n\
             socket = {:?}\n",
            load::socket(name)
        ));
    }
    text
}

fn daemon(
    lab: &Lab,
    setup: &Setup,
    folder: &Path,
    images: &Images,
    ring: &Path,
) -> Result<Daemon, BenchError> {
    let folder = folder.canonicalize().map_err(|e| BenchError::file("find folder", folder, e))?;
    let wasm = setup.module.canonicalize();
    let wasm = wasm.map_err(|e| BenchError::file("find", &setup.module, e))?;
    let store = folder.join("store");
    let disk = format!("format = \"raw\"\npath = {:?}\ndirect = {}", images.disk, setup.direct);
    let modules = format!(
        "[vm.modules]\nuse = [\"table\"]\ndir = {store:?}\nguest_users = true\n\
         [vm.modules.ring]\npath = {ring:?}\nspin_us = {}\n",
        setup.spin_us
    );
    let daemon = Daemon::builder("modules")
        .binary(&setup.millrace)
        .daemon(&format!("state_dir = {:?}", folder.join("state")))
        .vm(Vm::new(VM, "").disk("disk0", &disk).vsock(7).more(&modules))
        .toml(&module(&wasm.to_string_lossy(), &sha256(&setup.module)?));
    daemon.start(lab).map_err(|e| BenchError::lab("start the daemon", e))
}

fn image() -> ImageBuilder {
    ["ata_piix", "sd_mod", "ext4"].into_iter().fold(Image::builder(), ImageBuilder::module)
}

fn guest(setup: &Setup, daemon: &Daemon, images: &Images, ring: &Path) -> GuestBuilder {
    let mut virtio = Disk::file(&images.virtio);
    virtio.cache = if setup.direct { CacheMode::None } else { CacheMode::Writeback };
    let direct = if setup.direct { "on" } else { "off" };
    let ide = images.ide.to_string_lossy().replace(',', ",,");
    let ide = [
        "-blockdev".into(),
        format!(
            "driver=file,node-name=idefile,filename={ide},aio=io_uring,cache.direct={direct},\
             cache.no-flush=off"
        ),
        "-blockdev".into(),
        format!("driver=raw,node-name=ide,file=idefile,cache.direct={direct},cache.no-flush=off"),
        "-device".into(),
        "piix3-ide,id=pata".into(),
        "-device".into(),
        "ide-hd,bus=pata.0,drive=ide".into(),
    ];
    Guest::builder(VM)
        .kernel(setup.kernel)
        .memory_mb(MEMORY_MB)
        .disk(virtio)
        .disk(Disk::vhost_user(daemon.socket(VM, "disk0")))
        .vsock(Vsock::vhost_user(daemon.socket(VM, "vsock")))
        .qemu_args::<String>(ide)
        .shared_memory(ring, RING_BYTES)
}

fn meter(guest: &Guest, daemon: &Daemon, module: u32) -> Result<Meter, BenchError> {
    let (qemu, daemon) = (guest.pid(), daemon.pid());
    let cores = base::cpu::allowed_cpus().map_or(1, |c| c.len() as u32);
    let accounts = Accounts { side: vec![qemu, daemon, module], cores, ..Accounts::default() };
    let vcpus = crate::harness::fleet::vcpus(guest)?;
    Ok(Meter { qemu, vcpus, daemon, module, accounts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::modules::testing::setup;

    #[test]
    fn the_guests_daemon_has_a_store_on_each_disk() {
        let text = inner_config("00");
        for name in ["virtio", "ide", "disk"] {
            assert!(text.contains(&format!("dir = \"/{name}/store\"")), "{text}");
            assert!(text.contains(&format!("socket = \"/run/millrace/{name}.sock\"")), "{text}");
        }
        assert_eq!(text.matches("[[module]]").count(), 1);
    }

    #[test]
    fn disks_grow_with_what_is_written() {
        let few = kept_bytes(&Setup { rounds: 1, ..setup() });
        assert!(few > DISK_SPARE_BYTES && kept_bytes(&Setup { rounds: 9, ..setup() }) > few);
    }
}
