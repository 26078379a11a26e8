use super::*;
use std::fs;
use std::os::unix::fs::symlink;

fn folder(limit_bytes: u64) -> (tempfile::TempDir, Folder) {
    let temp = tempfile::tempdir().unwrap();
    let fd = fs::File::open(temp.path()).unwrap().into();
    (temp, Folder::new(fd, limit_bytes).unwrap())
}

#[test]
fn names_that_could_lead_elsewhere_are_refused() {
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
fn links_and_other_kinds_are_not_opened() {
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
    assert_eq!(files.used_bytes(), 4);
    files.remove(b"a").unwrap();
    assert_eq!(files.used_bytes(), 0);
    // Counted anew by who comes next.
    files.close_all();
    fs::write(temp.path().join("c"), [0; 7]).unwrap();
    let again = Folder::new(fs::File::open(temp.path()).unwrap().into(), 10).unwrap();
    assert_eq!(again.used_bytes(), 7);
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
