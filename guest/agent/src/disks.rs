//! Places of file systems on disks of the VM, shown by self-tests.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use rustix::fs::{major, minor};

use crate::line::Line;
use crate::log::log;
use crate::self_test;
use base::sync::lock;

/// Most file systems whose self-tests are remembered.
pub const MAX_FILE_SYSTEMS: usize = 64;
/// Time for which a failed self-test is not repeated.
pub const RETRY_TIME: Duration = Duration::from_secs(30);
/// Unit in which the kernel counts partitions.
const SECTOR_BYTES: u64 = 512;

/// A file system's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Device {
    number: u64,
    /// The disk's sequence number: another disk in the same place has another one.
    sequence: u64,
    /// Offset of the file system on the disk, in bytes.
    base: u64,
}

/// Place of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The daemon's number of the disk.
    pub disk: u32,
    /// Offset of the file system on the disk, in bytes.
    pub base: u64,
}

/// Results of a file system's self-tests, with the stream to the daemon for which they hold.
#[derive(Debug)]
struct SelfTests {
    generation: u64,
    read: TestResult<u32>,
    write: Option<TestResult<()>>,
    read_over: Option<TestResult<()>>,
}

/// Ability of a file system that a pipe needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// The daemon finds bytes of files on a disk.
    Place,
    /// Files can be written by placeholders.
    Write,
    /// Files can be read over placeholders.
    ReadOver,
}

/// A self-test's result.
#[derive(Debug, Clone, Copy)]
struct TestResult<T> {
    result: Result<T, Reason>,
    at: Instant,
}

impl<T> TestResult<T> {
    fn new(result: Result<T, Reason>) -> Self {
        Self { result, at: Instant::now() }
    }

    /// Whether the result holds; else the test is to be repeated.
    fn holds(&self) -> bool {
        self.result.is_ok() || self.at.elapsed() <= RETRY_TIME
    }
}

/// Whole disk that was found before. Remembered because lookups in `/sys` are slow.
#[derive(Debug)]
struct KnownDisk {
    device: Device,
    /// The open file of its sequence number, which cannot be read when the disk has gone.
    sequence: File,
}

/// All file systems seen so far.
#[derive(Debug, Default)]
pub struct Disks {
    known: Mutex<HashMap<u64, Arc<KnownDisk>>>,
    tests: Mutex<HashMap<Device, Arc<Mutex<Option<SelfTests>>>>>,
    /// Held during a self-test with placeholders: the daemon expects one at a time.
    placing: Mutex<()>,
    any_device: bool,
}

impl Disks {
    /// Empty table of file systems. With `any_device`, stacked devices (such as loop devices) that
    /// pass the self-test are accepted too. Only for tests: a self-test shows nothing about the
    /// blocks beside the tested one.
    pub fn new(any_device: bool) -> Self {
        Self { any_device, ..Self::default() }
    }

    /// Place of the file system with a device number. Runs the self-test unless its result is
    /// known.
    ///
    /// # Errors
    /// The file system is not on exactly one disk, or has failed the self-test.
    pub fn place_of(&self, number: u64, line: &Arc<Line>) -> Result<Place, Reason> {
        self.tested_place(number, line, Need::Place)
    }

    /// Place of a file system whose files can be written by placeholders.
    ///
    /// # Errors
    /// Those of [`Disks::place_of`], or the self-test for writing has failed.
    pub fn place_to_write(&self, number: u64, line: &Arc<Line>) -> Result<Place, Reason> {
        self.tested_place(number, line, Need::Write)
    }

    /// Place of a file system whose files can be read over placeholders.
    ///
    /// # Errors
    /// Those of [`Disks::place_of`], or the self-test for that has failed.
    pub fn place_to_read_over(&self, number: u64, line: &Arc<Line>) -> Result<Place, Reason> {
        self.tested_place(number, line, Need::ReadOver)
    }

    fn tested_place(&self, number: u64, line: &Arc<Line>, need: Need) -> Result<Place, Reason> {
        let device = self.device(number)?;
        let tests = self.tests_of(device);
        // Other requests for the same file system wait for the result.
        let mut tests = lock(&tests);
        let holds = |tests: &SelfTests| tests.generation == line.generation && tests.read.holds();
        let tests = match tests.take().filter(holds) {
            Some(known) => tests.insert(known),
            None => {
                let read = self_test::read(number, device.base, line);
                let read = TestResult::new(report_failure(number, "no pipes", read));
                tests.insert(SelfTests {
                    generation: line.generation,
                    read,
                    write: None,
                    read_over: None,
                })
            }
        };
        let disk = tests.read.result?;
        let (known, test, what): (_, fn(_, _, &_) -> _, _) = match need {
            Need::Place => return Ok(Place { disk, base: device.base }),
            Need::Write => (&mut tests.write, self_test::write, "no pipes into files"),
            Need::ReadOver => {
                let what = "no pipes from files that are open for writing";
                (&mut tests.read_over, self_test::read_over, what)
            }
        };
        let placed = known.filter(TestResult::holds).unwrap_or_else(|| {
            let _alone = lock(&self.placing);
            TestResult::new(report_failure(number, what, test(number, disk, line)))
        });
        *known = Some(placed);
        placed.result.map(|()| Place { disk, base: device.base })
    }

    /// The device with a number, from the cache while that holds.
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
            known.insert(number, Arc::new(KnownDisk { device, sequence }));
        }
        Ok(device)
    }

    /// Forgets all self-tests: the daemon does not know a disk any more.
    pub fn forget(&self) {
        lock(&self.tests).clear();
    }

    fn tests_of(&self, device: Device) -> Arc<Mutex<Option<SelfTests>>> {
        let mut tests = lock(&self.tests);
        if tests.len() >= MAX_FILE_SYSTEMS && !tests.contains_key(&device) {
            tests.clear();
        }
        tests.entry(device).or_default().clone()
    }
}

impl KnownDisk {
    /// Whether the disk is the same as before.
    fn holds(&self) -> bool {
        // Enough for a decimal number.
        let mut bytes = [0; 24];
        let read = self.sequence.read_at(&mut bytes, 0).ok();
        let text = read.and_then(|len| std::str::from_utf8(&bytes[..len]).ok());
        text.and_then(|text| text.trim().parse().ok()) == Some(self.device.sequence)
    }
}

impl Device {
    /// Looks a device up in `/sys`. Accepts only a disk or a partition of one: other block devices
    /// (device mapper, RAID, loop, caches) move or change blocks.
    ///
    /// Of a whole disk, also returns the open file of its sequence number, which identifies it
    /// later. A partition may begin elsewhere at the next lookup, on the same disk.
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
        // Missing before Linux 5.15.
        let path = disk.join("diskseq");
        let sequence = read_number(&path).unwrap_or(0);
        let file = File::open(path).ok().filter(|_| !is_partition);
        Ok((Self { number, sequence, base }, file))
    }
}

/// Logs that a self-test has failed.
fn report_failure<T>(number: u64, what: &str, result: Result<T, Reason>) -> Result<T, Reason> {
    result.inspect_err(|reason| {
        let (major, minor) = (major(number), minor(number));
        log(format_args!("file system {major}:{minor}: {what}: {}", reason.text()));
    })
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
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
                let same = KnownDisk { device, sequence: sequence.try_clone().unwrap() };
                assert!(same.holds() && !KnownDisk { device: other, sequence }.holds());
            }
            let disks = Disks::new(true);
            assert_eq!(disks.device(number), disks.device(number));
        }
        let no_disk = fs::metadata("/proc/self/stat").unwrap().dev();
        assert_eq!(Device::find(no_disk, true).unwrap_err(), Reason::NoDisk);
    }
}
