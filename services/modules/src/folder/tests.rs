#![allow(non_snake_case)]

use super::*;
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

fn folder(limit_bytes: u64) -> (tempfile::TempDir, Folder) {
    let temp = tempfile::tempdir().unwrap();
    let fd = fs::File::open(temp.path()).unwrap().into();
    (temp, Folder::new(fd, limit_bytes).unwrap())
}

#[test]
fn abuse_M_names_that_could_lead_elsewhere_are_refused() {
    let (_temp, mut files) = folder(1 << 20);
    let long = "a".repeat(MAX_FILE_NAME_BYTES + 1);
    let wrong: [&[u8]; 9] =
        [b"", b".", b"..", b"a/b", b"/etc/passwd", b".hidden", b"A", b"a\0b", long.as_bytes()];
    for name in wrong {
        assert_eq!(files.open(name, open::CREATE), Err(Errno::INVAL), "{name:?}");
        assert_eq!(files.remove(name), Err(Errno::INVAL));
        assert_eq!(files.rename(name, b"a"), Err(Errno::INVAL));
        assert_eq!(files.rename(b"a", name), Err(Errno::INVAL));
    }
}

#[test]
fn abuse_M_links_and_other_kinds_are_not_opened() {
    let (temp, mut files) = folder(1 << 20);
    symlink("/etc/passwd", temp.path().join("link")).unwrap();
    fs::create_dir(temp.path().join("folder")).unwrap();
    assert_eq!(files.open(b"link", 0), Err(Errno::LOOP));
    assert!(files.open(b"folder", 0).is_err());
}

#[test]
fn what_is_written_is_read() {
    let (temp, mut files) = folder(1 << 20);
    let log = files.open(b"log", open::CREATE).unwrap();
    assert_eq!(files.append(log, b"abc"), Ok(0));
    assert_eq!(files.append(log, b"def"), Ok(3));
    files.write(log, 1, b"X").unwrap();
    files.sync(log).unwrap();
    let mut bytes = [0; 10];
    assert_eq!(files.read(log, 0, &mut bytes), Ok(6));
    assert_eq!(&bytes[..6], b"aXcdef");
    assert_eq!(files.read(log, 100, &mut bytes), Ok(0));
    files.rename(b"log", b"old").unwrap();
    assert_eq!(files.list().unwrap(), ["old"]);
    assert_eq!(fs::read(temp.path().join("old")).unwrap(), b"aXcdef");
    files.close(log).unwrap();
    assert_eq!(files.len(log), Err(Errno::BADF));
}

#[test]
fn the_folder_has_a_limit() {
    let (temp, mut files) = folder(10);
    let a = files.open(b"a", open::CREATE).unwrap();
    files.append(a, &[1; 6]).unwrap();
    let b = files.open(b"b", open::CREATE).unwrap();
    assert_eq!(files.append(b, &[2; 5]), Err(Errno::NOSPC));
    assert_eq!(files.write(b, 5, &[2]), Err(Errno::NOSPC));
    assert_eq!(files.truncate(b, 5), Err(Errno::NOSPC));
    files.write(b, 0, &[2; 4]).unwrap();
    assert_eq!(files.used_bytes(), 10);
    files.write(b, 0, &[3; 4]).unwrap();
    files.truncate(a, 1).unwrap();
    files.rename(b"b", b"a").unwrap();
    assert_eq!(files.used_bytes(), 5);
    files.close(a).unwrap();
    assert_eq!(files.used_bytes(), 4);
    files.remove(b"a").unwrap();
    files.close(b).unwrap();
    assert_eq!(files.used_bytes(), 0);
    // Counted anew by who comes next.
    files.close_all();
    fs::write(temp.path().join("c"), [0; 7]).unwrap();
    let again = Folder::new(fs::File::open(temp.path()).unwrap().into(), 10).unwrap();
    assert_eq!(again.used_bytes(), 7);
}

#[test]
fn a_file_that_is_open_twice_is_counted_once() {
    let (_temp, mut files) = folder(10);
    let (a, b) = (files.open(b"a", open::CREATE).unwrap(), files.open(b"a", 0).unwrap());
    files.append(a, &[1; 6]).unwrap();
    assert_eq!((files.len(b), files.used_bytes()), (Ok(6), 6));
    assert_eq!(files.append(b, &[2; 4]), Ok(6));
    assert_eq!(files.append(a, &[3]), Err(Errno::NOSPC));
    files.truncate(b, 2).unwrap();
    assert_eq!((files.len(a), files.used_bytes()), (Ok(2), 2));
    files.close(a).unwrap();
    let mut bytes = [0; 4];
    assert_eq!(files.read(b, 0, &mut bytes), Ok(2));
    // Nothing is written so far behind the end.
    files.write(b, 1 << 40, &[]).unwrap();
    assert_eq!(files.len(b), Ok(2));
}

#[test]
fn a_file_without_a_name_counts_until_it_is_closed() {
    let (_temp, mut files) = folder(10);
    let a = files.open(b"a", open::CREATE).unwrap();
    files.append(a, &[1; 6]).unwrap();
    files.remove(b"a").unwrap();
    assert_eq!(files.used_bytes(), 6);
    files.append(a, &[1; 4]).unwrap();
    let b = files.open(b"b", open::CREATE).unwrap();
    assert_eq!(files.append(b, &[2]), Err(Errno::NOSPC));
    files.close(a).unwrap();
    assert_eq!((files.used_bytes(), files.append(b, &[2; 9])), (0, Ok(0)));
    // One that another took the name of.
    let c = files.open(b"c", open::CREATE).unwrap();
    files.rename(b"c", b"b").unwrap();
    assert_eq!((files.used_bytes(), files.append(c, &[3; 2])), (9, Err(Errno::NOSPC)));
    files.close_all();
    assert_eq!(files.used_bytes(), 0);
}

#[test]
fn files_are_bounded() {
    let (_temp, mut files) = folder(1 << 20);
    let name = |i: usize| format!("f{i}").into_bytes();
    for i in 0..MAX_FOLDER_FILES {
        let handle = files.open(&name(i), open::CREATE).unwrap();
        files.close(handle).unwrap();
    }
    assert_eq!(files.open(b"one-more", open::CREATE), Err(Errno::NOSPC));
    let known = files.open(b"f7", open::CREATE).unwrap();
    files.close(known).unwrap();
    files.rename(b"f0", b"f1").unwrap();
    files.open(b"one-more", open::CREATE).unwrap();
    assert_eq!(files.open(b"two-more", open::CREATE), Err(Errno::NOSPC));
    files.remove(b"f2").unwrap();
    files.open(b"two-more", open::CREATE).unwrap();
}

#[test]
fn only_what_was_written_is_synced() {
    let (temp, mut files) = folder(1 << 20);
    fs::write(temp.path().join("old"), "left by another process").unwrap();
    let mut files = {
        let a = files.open(b"a", open::CREATE).unwrap();
        files.append(a, b"abc").unwrap();
        files.close(a).unwrap();
        assert_eq!(files.counts().syncs, 1);
        Folder::new(fs::File::open(temp.path()).unwrap().into(), 1 << 20).unwrap()
    };
    for round in 1..=3 {
        // Once in the life of a process.
        for name in [&b"a"[..], b"old"] {
            let handle = files.open(name, 0).unwrap();
            files.close(handle).unwrap();
        }
        assert_eq!(files.counts().syncs, 2, "round {round}");
    }
    // What an instance left is not forgotten.
    let a = files.open(b"a", 0).unwrap();
    files.append(a, b"def").unwrap();
    files.close_all();
    let a = files.open(b"a", 0).unwrap();
    files.sync_all().unwrap();
    files.sync_all().unwrap();
    files.close(a).unwrap();
    assert_eq!(files.counts().syncs, 3);
}

/// Inode of a file.
fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

#[test]
fn after_a_failed_sync_all_is_written_anew() {
    let (temp, mut files) = folder(1 << 20);
    let path = |name: &str| temp.path().join(name);
    let a = files.open(b"a", open::CREATE).unwrap();
    files.append(a, &vec![7; 3 << 18]).unwrap();
    files.append(a, b"end").unwrap();
    let b = files.open(b"b", open::CREATE).unwrap();
    files.close(b).unwrap();
    let before = inode(&path("a"));
    files.fail(Errno::IO);
    // Nothing is durable, whatever the kernel says.
    assert_eq!(files.sync(a), Err(Errno::IO));
    assert_eq!(files.sync_all(), Err(Errno::IO));
    assert_eq!(files.rename(b"b", b"c"), Err(Errno::IO));
    assert_eq!(files.close(a), Err(Errno::IO));
    // Nor for the next process.
    drop(files);
    let mut files = Folder::new(fs::File::open(temp.path()).unwrap().into(), 1 << 20).unwrap();
    assert!(files.has_failed() && path(".suspect").exists());
    // The disk has no room for it yet.
    fs::create_dir(path(".rewrite")).unwrap();
    files.mend().unwrap_err();
    assert!(files.has_failed() && path(".suspect").exists());
    fs::remove_dir(path(".rewrite")).unwrap();
    files.mend().unwrap();
    assert!(!files.has_failed() && !path(".suspect").exists() && !path(".rewrite").exists());
    assert_ne!(inode(&path("a")), before);
    assert_eq!(fs::read(path("a")).unwrap(), [&vec![7; 3 << 18][..], b"end"].concat());
    assert_eq!(files.list().unwrap(), ["a", "c"]);
    assert_eq!(files.used_bytes(), (3 << 18) + 3);
    let a = files.open(b"a", 0).unwrap();
    files.append(a, b"!").unwrap();
    files.sync_all().unwrap();
}

#[derive(Debug, Clone)]
enum CopyStep {
    Open(u8, bool),
    Close(usize),
    Append(usize, u16),
    Write(usize, u16, u16),
    Truncate(usize, u16),
    Rename(u8, u8),
    Remove(u8),
    End,
}

fn step() -> impl Strategy<Value = CopyStep> {
    let (name, len) = (0u8..5, 0u16..500);
    let at = 0usize..6;
    prop_oneof![
        3 => (name.clone(), any::<bool>()).prop_map(|(n, cut)| CopyStep::Open(n, cut)),
        2 => at.clone().prop_map(CopyStep::Close),
        3 => (at.clone(), len.clone()).prop_map(|(h, len)| CopyStep::Append(h, len)),
        3 => (at.clone(), len.clone(), len.clone())
            .prop_map(|(h, at, len)| CopyStep::Write(h, at, len)),
        1 => (at, len).prop_map(|(h, len)| CopyStep::Truncate(h, len)),
        2 => (name.clone(), name.clone()).prop_map(|(a, b)| CopyStep::Rename(a, b)),
        2 => name.prop_map(CopyStep::Remove),
        1 => Just(CopyStep::End),
    ]
}

/// Bytes of all files that have a name or a handle, as the kernel has them.
fn real_bytes(folder: &Path, open: &[(i32, fs::File)]) -> u64 {
    let named = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    let open = open.iter().map(|(_, file)| file.metadata().unwrap());
    named
        .chain(open)
        .map(|meta| (meta.ino(), meta.len()))
        .collect::<BTreeMap<_, _>>()
        .values()
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_counted_is_what_is_there(steps in proptest::collection::vec(step(), 1..60)) {
        const LIMIT: u64 = 1500;
        let (temp, mut files) = folder(LIMIT);
        let name = |n: u8| vec![b'a' + n];
        let mut open: Vec<(i32, fs::File)> = Vec::new();
        for step in steps {
            let handle = |at: usize| open.get(at).map_or(-1, |(handle, _)| *handle);
            let more = vec![1; 500];
            match step {
                CopyStep::Open(n, cut) => {
                    let flags = open::CREATE | if cut { open::TRUNCATE } else { 0 };
                    let handle = files.open(&name(n), flags).unwrap();
                    let path = temp.path().join(String::from_utf8(name(n)).unwrap());
                    open.push((handle, fs::File::open(path).unwrap()));
                }
                CopyStep::Close(at) => if files.close(handle(at)).is_ok() {
                    open.remove(at);
                }
                CopyStep::Append(at, len) => drop(files.append(handle(at), &more[..len.into()])),
                CopyStep::Write(at, to, len) => {
                    let _ = files.write(handle(at), to.into(), &more[..len.into()]);
                }
                CopyStep::Truncate(at, len) => drop(files.truncate(handle(at), len.into())),
                CopyStep::Rename(a, b) => drop(files.rename(&name(a), &name(b))),
                CopyStep::Remove(n) => drop(files.remove(&name(n))),
                CopyStep::End => {
                    files.close_all();
                    open.clear();
                }
            }
            for (handle, file) in &open {
                prop_assert_eq!(files.len(*handle).unwrap(), file.metadata().unwrap().len());
            }
            let real = real_bytes(temp.path(), &open);
            prop_assert_eq!(files.used_bytes(), real);
            prop_assert!(real <= LIMIT);
            prop_assert_eq!(files.names, fs::read_dir(temp.path()).unwrap().count());
        }
    }
}

#[test]
fn handles_are_bounded_and_used_again() {
    let (_temp, mut files) = folder(1 << 20);
    for _ in 0..MAX_FILES {
        files.open(b"a", open::CREATE).unwrap();
    }
    assert_eq!(files.open(b"a", 0), Err(Errno::MFILE));
    files.close(7).unwrap();
    assert_eq!(files.open(b"a", 0), Ok(7));
}
