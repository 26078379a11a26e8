//! Which disk a file system lies on, and where on it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{HOLE, NO_DISK, PROBE_BLOCK_BYTES, Probe, kind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, major, minor};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::host::{Call, Line, Outcome, lock};
use crate::wake::Wake;
use crate::{fiemap, mounts};

/// File systems whose self-tests are remembered.
pub const MAX_FILE_SYSTEMS: usize = 64;
/// A failed self-test is not repeated for so long.
pub const RETRY_TIME: Duration = Duration::from_secs(30);
/// The daemon's time to look for a block.
const PROBE_TIME: Duration = Duration::from_secs(5);
/// What the kernel counts partitions in.
const SECTOR_BYTES: u64 = 512;

/// A file system's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Device {
    number: u64,
    /// The disk's sequence number: another disk in the same place has another one.
    sequence: u64,
    /// Where the file system begins on it, in bytes.
    base: u64,
}

/// Where a file system is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The daemon's number of the disk.
    pub disk: u32,
    /// Where the file system begins on it, in bytes.
    pub base: u64,
}

/// A self-test's result, and for which stream to the daemon it holds.
#[derive(Debug)]
struct Test {
    generation: u64,
    result: Result<u32, Reason>,
    at: Instant,
}

/// A whole disk that was found before: paths in `/sys` are slow.
#[derive(Debug)]
struct Known {
    device: Device,
    /// The open file of its sequence number, which cannot be read when the disk has gone.
    sequence: File,
}

/// All file systems seen so far.
#[derive(Debug, Default)]
pub struct Disks {
    known: Mutex<HashMap<u64, Arc<Known>>>,
    tests: Mutex<HashMap<Device, Arc<Mutex<Option<Test>>>>>,
    any_device: bool,
}

impl Disks {
    /// With `any_device` also what is stacked, such as a loop device, is believed if it passes the
    /// self-test. Only for tests: a self-test says nothing of the blocks beside it.
    pub fn new(any_device: bool) -> Self {
        Self { any_device, ..Self::default() }
    }

    /// Where a file's file system is; tests it if it has not been.
    ///
    /// # Errors
    /// It is on no disk, not on one alone, or has failed the self-test.
    pub fn place_of(&self, file: &File, line: &Arc<Line>) -> Result<Place, Reason> {
        let number = fstat(file).map_err(|_| Reason::NotAFile)?.st_dev;
        let device = self.device(number)?;
        let test = self.test_of(device);
        // Others who ask for the same file system wait for the result.
        let mut test = lock(&test);
        let known = test.as_ref().filter(|test| {
            let fails = test.result.is_err();
            test.generation == line.generation && !(fails && test.at.elapsed() > RETRY_TIME)
        });
        let result = match known {
            Some(test) => test.result,
            None => {
                let result = self_test(device, line);
                if let Err(reason) = result {
                    let (major, minor) = (major(number), minor(number));
                    eprintln!("file system {major}:{minor}: no pipes: {}", reason.text());
                }
                let (generation, at) = (line.generation, Instant::now());
                *test = Some(Test { generation, result, at });
                result
            }
        };
        result.map(|disk| Place { disk, base: device.base })
    }

    /// The device with a number, from what is known while it holds.
    fn device(&self, number: u64) -> Result<Device, Reason> {
        let known = lock(&self.known).get(&number).cloned();
        if let Some(known) = known.filter(|known| known.holds()) {
            return Ok(known.device);
        }
        let (device, sequence) = Device::find(number, self.any_device)?;
        let mut known = lock(&self.known);
        known.remove(&number);
        if let Some(sequence) = sequence {
            if known.len() >= MAX_FILE_SYSTEMS {
                known.clear();
            }
            known.insert(number, Arc::new(Known { device, sequence }));
        }
        Ok(device)
    }

    /// The daemon does not know the disk any more: all are asked for again.
    pub fn forget(&self) {
        lock(&self.tests).clear();
    }

    fn test_of(&self, device: Device) -> Arc<Mutex<Option<Test>>> {
        let mut tests = lock(&self.tests);
        if tests.len() >= MAX_FILE_SYSTEMS && !tests.contains_key(&device) {
            tests.clear();
        }
        tests.entry(device).or_default().clone()
    }
}

impl Known {
    /// True while it is the same disk.
    fn holds(&self) -> bool {
        // Of a decimal number.
        let mut bytes = [0; 24];
        let read = self.sequence.read_at(&mut bytes, 0).ok();
        let text = read.and_then(|len| std::str::from_utf8(&bytes[..len]).ok());
        text.and_then(|text| text.trim().parse().ok()) == Some(self.device.sequence)
    }
}

impl Device {
    /// Looks a device up in `/sys`. Only what is a disk, or a partition of one, is taken: whatever
    /// else there is (device mapper, RAID, loop, caches) puts blocks elsewhere, or changes them.
    ///
    /// For a whole disk, by which it is known again, the open file of its sequence number too. A
    /// partition may begin elsewhere the next time, and its disk is the same.
    fn find(number: u64, any: bool) -> Result<(Self, Option<File>), Reason> {
        let link = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        let own = fs::canonicalize(link).map_err(|_| Reason::NoDisk)?;
        let is_partition = own.join("partition").exists();
        let (disk, base) = match read_number(&own.join("start")) {
            Some(sectors) if is_partition => {
                let base = sectors.checked_mul(SECTOR_BYTES).ok_or(Reason::NoDisk)?;
                (own.parent().unwrap_or(&own).to_owned(), base)
            }
            _ => (own, 0),
        };
        let stacked = !disk.join("device").exists()
            || fs::read_dir(disk.join("slaves")).is_ok_and(|mut slaves| slaves.next().is_some());
        if stacked && !any {
            return Err(Reason::Stacked);
        }
        // Not there before Linux 5.15.
        let path = disk.join("diskseq");
        let sequence = read_number(&path).unwrap_or(0);
        let file = File::open(path).ok().filter(|_| !is_partition);
        Ok((Self { number, sequence, base }, file))
    }
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Writes a secret and lets the daemon look for it; the disk's number.
fn self_test(device: Device, line: &Arc<Line>) -> Result<u32, Reason> {
    let file = temporary_file(device.number)?;
    let mut secret = [0; 32];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())
        .map_err(|_| Reason::SelfTest)?;
    let block = secret.repeat(PROBE_BLOCK_BYTES / secret.len());
    std::io::Write::write_all(&mut &file, &block).map_err(|_| Reason::SelfTest)?;
    file.sync_all().map_err(|_| Reason::SelfTest)?;
    let len = PROBE_BLOCK_BYTES as u64;
    let extents = fiemap::extents(file.as_fd(), 0, len, device.base, 1)?;
    let offset = match extents.as_slice() {
        [whole] if whole.len_bytes.get() == len && whole.offset.get() != HOLE => whole.offset.get(),
        _ => return Err(Reason::SelfTest),
    };
    ask(&Probe { offset: U64::new(offset), secret }, line)
}

/// A file without a name somewhere on a device: it goes when it is closed.
fn temporary_file(device: u64) -> Result<File, Reason> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|_| Reason::SelfTest)?;
    let mut reason = Reason::SelfTest;
    for mount in mounts::parse(&table) {
        if mount.device != (major(device), minor(device)) {
            continue;
        }
        // Content goes to the journal first, and to its place at some later time.
        if mount.options.split(',').any(|option| option == "data=journal") {
            return Err(Reason::FileSystem);
        }
        match open_at(&mount.point, device) {
            Ok(file) => return Ok(file),
            Err(rustix::io::Errno::OPNOTSUPP) => reason = Reason::FileSystem,
            // Read-only, a mount of a single file, or hidden below another mount.
            Err(_) => {}
        }
    }
    Err(reason)
}

fn open_at(folder: &PathBuf, device: u64) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?;
    if fstat(&file)?.st_dev == device { Ok(file.into()) } else { Err(rustix::io::Errno::XDEV) }
}

fn ask(probe: &Probe, line: &Arc<Line>) -> Result<u32, Reason> {
    let wake = Arc::new(Wake::new().map_err(|_| Reason::SelfTest)?);
    let call = line.call(kind::PROBE, kind::PROBED, probe.as_bytes(), &wake)?;
    match wait(&call, &wake) {
        Some(Outcome::Probed(probed)) if probed.disk.get() != NO_DISK => Ok(probed.disk.get()),
        Some(Outcome::Probed(probed)) => Err(match Reason::from_number(probed.reason.get()) {
            Reason::Complete => Reason::NoDisk,
            reason => reason,
        }),
        Some(_) => Err(Reason::HostGone),
        None => Err(Reason::SelfTest),
    }
}

/// The answer, if it comes in time.
fn wait(call: &Call, wake: &Wake) -> Option<Outcome> {
    let until = Instant::now() + PROBE_TIME;
    loop {
        wake.clear();
        let left = until.saturating_duration_since(Instant::now());
        if let Some(outcome) = call.outcome() {
            return Some(outcome);
        }
        if left.is_zero() {
            return None;
        }
        let left = Timespec::try_from(left).ok();
        // Interrupted, it looks again.
        let _ = poll(&mut [PollFd::new(wake, PollFlags::IN)], left.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn devices_are_found_or_refused() {
        let whole = fs::read_dir("/sys/block").unwrap().flatten().map(|entry| entry.path());
        for path in whole {
            let text = fs::read_to_string(path.join("dev")).unwrap();
            let (major, minor) = text.trim().split_once(':').unwrap();
            let number = rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap());
            let got = Device::find(number, false);
            assert_eq!(got.is_ok(), path.join("device").exists(), "{}", path.display());
            let (device, sequence) = Device::find(number, true).unwrap();
            assert_eq!(device.base, 0);
            if let Some(sequence) = sequence {
                let other = Device { sequence: device.sequence + 1, ..device };
                let same = Known { device, sequence: sequence.try_clone().unwrap() };
                assert!(same.holds() && !Known { device: other, sequence }.holds());
            }
            let disks = Disks::new(true);
            assert_eq!(disks.device(number), disks.device(number));
        }
        let no_disk = fs::metadata("/proc/self/stat").unwrap().dev();
        assert_eq!(Device::find(no_disk, true).unwrap_err(), Reason::NoDisk);
    }
}
