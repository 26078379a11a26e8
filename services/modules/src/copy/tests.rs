//! Copies of files that are written, renamed and removed meanwhile.
#![allow(non_snake_case)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;

use guest_abi::module_call::open;
use proptest::prelude::*;

use super::format::{DATA, MAX_DATA_BYTES, Writer};
use super::{About, CopyError, LockedFolder, Put, Steps, pass, put, take};
use crate::control::CopyStep;
use crate::folder::Folder;
use crate::folder::written::{Extent, MAX_EXTENTS, Written};
use crate::limits::HELD_BYTES;

/// Most bytes of the files of these tests.
const DISK_BYTES: u64 = 1 << 30;

/// Operation of a module on its files.
#[derive(Debug, Clone)]
enum Op {
    Write {
        file: u8,
        at: u64,
        len: usize,
        byte: u8,
    },
    Append {
        file: u8,
        len: usize,
        byte: u8,
    },
    Truncate {
        file: u8,
        len: u64,
    },
    Rename {
        from: u8,
        to: u8,
    },
    Remove {
        file: u8,
    },
    /// The instance ends, and files are closed with it.
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let (file, byte) = (0u8..5, any::<u8>);
    prop_oneof![
        4 => (file.clone(), 0u64..60_000, 1usize..9000, byte())
            .prop_map(|(file, at, len, byte)| Op::Write { file, at, len, byte }),
        4 => (file.clone(), 1usize..20_000, byte())
            .prop_map(|(file, len, byte)| Op::Append { file, len, byte }),
        2 => (file.clone(), 0u64..80_000).prop_map(|(file, len)| Op::Truncate { file, len }),
        2 => (file.clone(), file.clone()).prop_map(|(from, to)| Op::Rename { from, to }),
        2 => file.prop_map(|file| Op::Remove { file }),
        1 => Just(Op::Restart),
    ]
}

type Files = BTreeMap<String, Vec<u8>>;

fn files(folder: &Path) -> Files {
    let read = |entry: io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    std::fs::read_dir(folder).unwrap().map(read).collect()
}

/// A module that goes on while it is copied.
struct Module {
    dir: tempfile::TempDir,
    folder: Folder,
    handles: BTreeMap<String, i32>,
    /// Operations that are still to do, the next one last.
    ops: Vec<Op>,
    held: bool,
    /// Files of the module at the time when they were held.
    then: Option<Files>,
}

fn name(file: u8) -> String {
    format!("file-{file}")
}

impl Module {
    fn new(ops: Vec<Op>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        std::fs::create_dir(&path).unwrap();
        let folder = Folder::new(OwnedFd::from(File::open(&path).unwrap()), DISK_BYTES).unwrap();
        Self { dir, folder, handles: BTreeMap::new(), ops, held: false, then: None }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("m")
    }

    fn handle(&mut self, file: u8) -> i32 {
        let folder = &mut self.folder;
        let open = || folder.open(name(file).as_bytes(), open::CREATE).unwrap();
        *self.handles.entry(name(file)).or_insert_with(open)
    }

    fn close(&mut self, file: u8) {
        if let Some(handle) = self.handles.remove(&name(file)) {
            self.folder.close(handle).unwrap();
        }
    }

    fn go_on(&mut self) {
        let Some(op) = self.ops.pop() else { return };
        match op {
            Op::Write { file, at, len, byte } => {
                let handle = self.handle(file);
                self.folder.write(handle, at, &vec![byte; len]).unwrap();
            }
            Op::Append { file, len, byte } => {
                let handle = self.handle(file);
                let _ = self.folder.append(handle, &vec![byte; len]).unwrap();
            }
            Op::Truncate { file, len } => {
                let handle = self.handle(file);
                self.folder.truncate(handle, len).unwrap();
            }
            Op::Rename { from, to } => {
                self.close(from);
                self.close(to);
                let _ = self.folder.rename(name(from).as_bytes(), name(to).as_bytes());
            }
            Op::Remove { file } => {
                // Its inode is the next file's.
                let _ = self.folder.remove(name(file).as_bytes());
                self.close(file);
            }
            Op::Restart => {
                self.handles.clear();
                self.folder.close_all();
            }
        }
    }
}

/// Receiver of the copy: with each piece of it the module goes on.
struct Busy(Rc<RefCell<Module>>, Vec<u8>);

impl Write for Busy {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut module = self.0.borrow_mut();
        assert!(!module.held, "nothing is passed on while the files are held");
        module.go_on();
        self.1.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Asked(Rc<RefCell<Module>>);

impl Steps for Asked {
    fn step(&mut self, step: CopyStep) -> Result<Written, String> {
        let mut module = self.0.borrow_mut();
        match step {
            CopyStep::Begin => {
                module.folder.log_written(true);
                Ok(Written::Extents(Vec::new()))
            }
            CopyStep::Look => Ok(module.folder.take_written().unwrap()),
            CopyStep::Hold => {
                module.held = true;
                module.then = Some(files(&module.path()));
                Ok(module.folder.take_written().unwrap())
            }
            CopyStep::End => {
                module.held = false;
                module.folder.log_written(false);
                Ok(Written::Extents(Vec::new()))
            }
        }
    }
}

fn about() -> About {
    let hash = "00".repeat(32);
    About { vm: "v".into(), module: "m".into(), hash, begun_s: 7, version: "0".into() }
}

/// A copy, and the files when it was made.
fn copied(ops: Vec<Op>, before: usize) -> (Vec<u8>, Files) {
    let mut module = Module::new(ops);
    (0..before).for_each(|_| module.go_on());
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let module = Rc::new(RefCell::new(module));
    let mut to = Busy(Rc::clone(&module), Vec::new());
    take(&folder, &mut Asked(Rc::clone(&module)), &about(), &mut to).unwrap();
    let then = module.borrow_mut().then.take().unwrap();
    (to.1, then)
}

/// A folder of modules, and what is in that of `m` after a copy was put there.
fn restored(copy: &[u8], disk_bytes: u64) -> Result<Files, CopyError> {
    let dir = tempfile::tempdir().unwrap();
    let module = dir.path().join("m");
    std::fs::create_dir(&module).unwrap();
    std::fs::write(module.join("old"), "old").unwrap();
    let place = Put { state_dir: dir.path(), module: "m", disk_bytes };
    let received = put(&place, &mut &copy[..]);
    let entries = || std::fs::read_dir(dir.path()).unwrap().count();
    let mut received = match received {
        Ok(received) => received,
        Err(e) => {
            assert_eq!(entries(), 1, "nothing is left of it");
            assert_eq!(files(&module).keys().collect::<Vec<_>>(), ["old"]);
            return Err(e);
        }
    };
    received.exchange(&place).unwrap();
    let now = files(&module);
    received.exchange(&place).unwrap();
    assert_eq!(files(&module).keys().collect::<Vec<_>>(), ["old"]);
    received.exchange(&place).unwrap();
    received.discard_old();
    assert_eq!((entries(), &files(&module)), (1, &now));
    Ok(now)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_copy_is_the_files_of_one_moment(
        ops in proptest::collection::vec(op(), 0..120),
        before in 0usize..60,
    ) {
        let (copy, then) = copied(ops, before);
        let summary = pass(&mut &copy[..], &mut io::sink()).unwrap();
        prop_assert_eq!(
            (summary.files, summary.copy_bytes),
            (then.len() as u64, copy.len() as u64)
        );
        prop_assert_eq!(restored(&copy, DISK_BYTES).unwrap(), then);
    }

    #[test]
    fn a_copy_that_was_changed_or_cut_is_none(
        ops in proptest::collection::vec(op(), 1..20),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let (copy, _) = copied(ops, 9);
        let at = at.index(copy.len());
        prop_assert!(restored(&copy[..at], DISK_BYTES).is_err());
        let mut changed = copy.clone();
        changed[at] ^= 1 << bit;
        prop_assert!(restored(&changed, DISK_BYTES).is_err(), "byte {}", at);
        let longer = [&copy[..], b"x"].concat();
        prop_assert!(pass(&mut &longer[..], &mut io::sink()).is_err());
    }

    #[test]
    fn nonsense_is_no_copy(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(pass(&mut &bytes[..], &mut io::sink()).is_err());
        let with_magic = [&super::format::MAGIC[..], &bytes].concat();
        prop_assert!(pass(&mut &with_magic[..], &mut io::sink()).is_err());
    }
}

#[test]
fn what_is_passed_on_is_what_came() {
    let ops = vec![Op::Append { file: 1, len: 100_000, byte: 9 }];
    let (copy, then) = copied(ops, 1);
    let mut passed = Vec::new();
    let summary = pass(&mut &copy[..], &mut passed).unwrap();
    assert_eq!((passed, summary.files_bytes, summary.about), (copy, 100_000, about()));
    assert_eq!(then["file-1"].len(), 100_000);
}

#[test]
fn holes_stay_and_blocks_of_zeroes_stay_blocks() {
    use std::os::unix::fs::MetadataExt;
    let mut module = Module::new(Vec::new());
    let handle = module.handle(1);
    module.folder.write(handle, 64 << 20, b"end").unwrap();
    let handle = module.handle(2);
    module.folder.write(handle, 0, &vec![0; 4 << 20]).unwrap();
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let mut copy = Vec::new();
    take(&folder, &mut LockedFolder::new(&folder).unwrap(), &about(), &mut copy).unwrap();
    assert!(copy.len() < 8192, "{}", copy.len());
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("m")).unwrap();
    let place = Put { state_dir: dir.path(), module: "m", disk_bytes: DISK_BYTES };
    let mut received = put(&place, &mut &copy[..]).unwrap();
    received.exchange(&place).unwrap();
    let stat = |file| std::fs::metadata(dir.path().join("m").join(name(file))).unwrap();
    assert_eq!((stat(1).len(), stat(2).len()), ((64 << 20) + 3, 4 << 20));
    assert!(stat(1).blocks() * 512 < 1 << 20 && stat(2).blocks() * 512 >= 4 << 20);
}

#[test]
fn files_from_before_stay_until_somebody_says_that_they_are_of_no_use() {
    let (copy, _) = copied(vec![Op::Append { file: 1, len: 9, byte: 9 }], 1);
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("m")).unwrap();
    std::fs::write(dir.path().join("m/old"), "old").unwrap();
    let place = Put { state_dir: dir.path(), module: "m", disk_bytes: DISK_BYTES };
    // Half of one that was cut short is in nobody's way.
    std::fs::create_dir(dir.path().join(".receive-m")).unwrap();
    let mut received = put(&place, &mut &copy[..]).unwrap();
    received.exchange(&place).unwrap();
    let old = dir.path().join(".restore-m");
    assert_eq!((received.has_old(), received.folder()), (true, old.as_path()));
    drop(received);
    assert_eq!(std::fs::read(old.join("old")).unwrap(), b"old");
    // And nobody takes it for what may go.
    let text = put(&place, &mut &copy[..]).unwrap_err().to_string();
    assert!(text.contains(".restore-m is there, of a restore that was cut short"), "{text}");
    assert_eq!(std::fs::read(old.join("old")).unwrap(), b"old");
    assert_eq!(files(&dir.path().join("m")).len(), 1);
}

/// A step of a module that renames a file between a listing of the folder and the file's opening.
#[test]
fn a_file_that_is_renamed_before_it_is_opened_is_copied_all_the_same() {
    for pieces in 0..40 {
        // While the first file is passed on, the next one gets another name, and that again later.
        let mut ops = vec![Op::Rename { from: 4, to: 2 }, Op::Rename { from: 2, to: 4 }];
        ops.extend((0..pieces).map(|_| Op::Append { file: 0, len: 1, byte: 1 }));
        ops.push(Op::Append { file: 2, len: 3_000_000, byte: 7 });
        ops.push(Op::Append { file: 1, len: 3_000_000, byte: 5 });
        let (copy, then) = copied(ops, 2);
        assert_eq!(restored(&copy, DISK_BYTES).unwrap(), then, "{pieces}");
    }
}

#[test]
fn abuse_M_a_process_that_lies_about_extents_is_not_believed() {
    struct Lies(Vec<Extent>, std::path::PathBuf);
    impl Steps for Lies {
        fn step(&mut self, step: CopyStep) -> Result<Written, String> {
            if step == CopyStep::Hold {
                // It grows after it was said how long it is.
                File::options().write(true).open(&self.1).unwrap().set_len(HELD_BYTES + 1).unwrap();
            }
            Ok(Written::Extents(self.0.clone()))
        }
    }
    let mut module = Module::new(Vec::new());
    let handle = module.handle(1);
    module.folder.write(handle, 0, b"short").unwrap();
    let path = module.path().join(name(1));
    let inode = std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    let all = Extent { inode, at: 0, len_bytes: u64::MAX };
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let lie = |extents: Vec<Extent>| {
        take(&folder, &mut Lies(extents, path.clone()), &about(), &mut io::sink()).unwrap_err()
    };
    let odd = Extent { inode: 7, at: u64::MAX, len_bytes: u64::MAX };
    let failed = lie(vec![all, all, odd]);
    assert!(matches!(failed, CopyError::TooFast { .. }), "{failed}");
    let failed = lie(vec![all; MAX_EXTENTS + 1]).to_string();
    assert_eq!(failed, "513 extents were told, of 512 at most");
}

#[test]
fn names_that_are_none_are_not_shown() {
    let mut copy = Vec::new();
    let evil = About { vm: "a\u{1b}[2J".into(), ..about() };
    Writer::new(&mut copy, &evil).unwrap().end(&[]).unwrap();
    let text = pass(&mut &copy[..], &mut io::sink()).unwrap_err().to_string();
    assert!(text.ends_with("what it is of has names that are none"), "{text}");
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let (copy, _) = copied(vec![Op::Append { file: 1, len: 10_000, byte: 9 }], 1);
    assert!(restored(&copy, 10_000).is_ok());
    let text = restored(&copy, 9999).unwrap_err().to_string();
    assert_eq!(text, "its files have 10000 bytes, the module may have 9999 (disk)");
    let dir = tempfile::tempdir().unwrap();
    let place = Put { state_dir: dir.path(), module: "other", disk_bytes: DISK_BYTES };
    let text = put(&place, &mut &copy[..]).unwrap_err().to_string();
    assert_eq!(text, "the copy is of module m, not of other");
}

#[test]
fn a_stream_that_takes_more_room_than_there_may_be_is_refused() {
    // Zeroes without an end, in a few bytes.
    let mut copy = Vec::new();
    let mut writer = Writer::new(&mut copy, &about()).unwrap();
    writer.data(1, (2 << 20) - 1, b"x").unwrap();
    writer.data(2, 0, b"x").unwrap();
    writer.end(&[]).unwrap();
    let text = restored(&copy, 1 << 20).unwrap_err().to_string();
    assert!(text.starts_with("its files have 2097153 bytes"), "{text}");
}

#[test]
fn a_copy_that_failed_says_why() {
    struct Refuses;
    impl Steps for Refuses {
        fn step(&mut self, step: CopyStep) -> Result<Written, String> {
            match step {
                CopyStep::Begin => Ok(Written::All),
                _ => Err("module m: it has ended".into()),
            }
        }
    }
    let module = Module::new(Vec::new());
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let mut copy = Vec::new();
    let text = take(&folder, &mut Refuses, &about(), &mut copy).unwrap_err().to_string();
    assert_eq!(text, "module m: it has ended");
    let text = restored(&copy, DISK_BYTES).unwrap_err().to_string();
    assert_eq!(text, "the copy failed when it was taken: module m: it has ended");
}

#[test]
fn files_are_not_held_for_more_than_a_moment_takes() {
    /// A module that writes all of a large file, all the time.
    struct Writes(u64);
    impl Steps for Writes {
        fn step(&mut self, step: CopyStep) -> Result<Written, String> {
            match step {
                CopyStep::Begin | CopyStep::End => Ok(Written::Extents(Vec::new())),
                CopyStep::Look | CopyStep::Hold => {
                    self.0 += 1;
                    Ok(Written::All)
                }
            }
        }
    }
    let mut module = Module::new(Vec::new());
    let handle = module.handle(1);
    module.folder.truncate(handle, HELD_BYTES + 1).unwrap();
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let mut steps = Writes(0);
    let failed = take(&folder, &mut steps, &about(), &mut io::sink()).unwrap_err();
    assert!(
        matches!(failed, CopyError::TooFast { left_bytes, .. } if left_bytes == HELD_BYTES + 1)
    );
    assert_eq!(steps.0, u64::from(crate::limits::COPY_ROUNDS) + 1);
}

#[test]
fn a_folder_that_somebody_serves_or_whose_sync_failed_is_not_still() {
    let module = Module::new(Vec::new());
    let open = || OwnedFd::from(File::open(module.path()).unwrap());
    let first = LockedFolder::new(&open()).unwrap();
    let text = LockedFolder::new(&open()).unwrap_err().to_string();
    assert!(text.starts_with("the module's folder is locked by process "), "{text}");
    drop(first);
    std::fs::write(module.path().join(".suspect"), "").unwrap();
    let text = LockedFolder::new(&open()).unwrap_err().to_string();
    assert!(text.starts_with("a sync of its files failed"), "{text}");
}

#[test]
fn links_and_folders_are_no_files_of_a_module() {
    let module = Module::new(Vec::new());
    std::os::unix::fs::symlink("/etc/passwd", module.path().join("link")).unwrap();
    std::fs::create_dir(module.path().join("folder")).unwrap();
    std::fs::write(module.path().join("Upper"), "x").unwrap();
    let folder = OwnedFd::from(File::open(module.path()).unwrap());
    let mut copy = Vec::new();
    take(&folder, &mut LockedFolder::new(&folder).unwrap(), &about(), &mut copy).unwrap();
    assert_eq!(pass(&mut &copy[..], &mut io::sink()).unwrap().files, 0);
}

#[test]
fn longer_pieces_are_several_records() {
    let mut copy = Vec::new();
    let mut writer = Writer::new(&mut copy, &about()).unwrap();
    writer.data(0, 5, &vec![1; 2 * MAX_DATA_BYTES + 1]).unwrap();
    writer.end(&[super::FileEntry { file: 0, name: "f".into(), len_bytes: 5 }]).unwrap();
    let records =
        copy.windows(8).filter(|w| **w == [&DATA.to_le_bytes()[..], &[0; 4]].concat()).count();
    assert!(records >= 3);
    assert_eq!(restored(&copy, DISK_BYTES).unwrap()["f"], [0; 5]);
}
