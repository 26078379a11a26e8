//! Disk that replaces placeholders by bytes, as the daemon's does: a file of FUSE, for a loop
//! device on it.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use guest_abi::pipe::{PLACEHOLDER_MAGIC, Placeholder, SECTOR_BYTES};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAX_WRITE: usize = 1 << 20;

/// State of the disk.
#[derive(Debug)]
pub struct Disk {
    /// Bytes by their tag.
    known: Mutex<HashMap<[u8; 16], Vec<u8>>>,
    /// Whether it takes placeholders for ordinary bytes.
    pub is_blind: AtomicBool,
    /// Sectors that were replaced.
    pub replaced: AtomicU64,
}

impl Disk {
    /// Serves the bytes of the file `store` at `path`, in a thread; both are there.
    pub fn serve(store: &Path, path: &Path) -> Arc<Self> {
        let (known, is_blind, replaced) = Default::default();
        let disk = Arc::new(Self { known, is_blind, replaced });
        let (served, store, path) = (disk.clone(), store.to_owned(), path.to_owned());
        let (ready, is_ready) = channel();
        std::thread::spawn(move || served.serve_at(&store, &path, &ready));
        is_ready.recv().unwrap();
        disk
    }

    fn serve_at(&self, store: &Path, path: &Path, ready: &Sender<()>) {
        // Nobody else in this process may have the descriptor: if the process is killed while
        // others of its threads wait for this disk, it must be closed before they can end.
        close_all();
        let open = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
        let (store, fuse) = (open(store), open(Path::new("/dev/fuse")));
        let options = format!("fd={},rootmode=100600,user_id=0,group_id=0", fuse.as_raw_fd());
        let options = CString::new(options).unwrap();
        mount("disk", path, "fuse", MountFlags::empty(), Some(&*options)).unwrap();
        ready.send(()).unwrap();
        let mut bytes = vec![0; MAX_WRITE + 4096];
        loop {
            match rustix::io::read(&fuse, &mut *bytes) {
                Ok(len) => self.answer(&store, &fuse, &mut bytes[..len]),
                // Who asked has gone before it was taken.
                Err(Errno::NOENT | Errno::INTR) => {}
                // Unmounted.
                Err(_) => return,
            }
        }
    }

    /// Sets the bytes that replace placeholders with that tag.
    pub fn know(&self, tag: [u8; 16], bytes: Vec<u8>) {
        self.known.lock().unwrap().insert(tag, bytes);
    }

    pub fn forget(&self, tag: &[u8; 16]) {
        self.known.lock().unwrap().remove(tag);
    }

    fn replace(&self, bytes: &mut [u8]) {
        let known = self.known.lock().unwrap();
        for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
            let head = Placeholder::read_from_prefix(sector).unwrap().0;
            if head.magic.get() != PLACEHOLDER_MAGIC || self.is_blind.load(Ordering::Acquire) {
                continue;
            }
            assert!(sector[size_of::<Placeholder>()..].iter().all(|byte| *byte == 0));
            let at = head.at.get() as usize;
            let Some(stand_in) = known.get(&head.tag) else { continue };
            sector.copy_from_slice(&stand_in[at..at + SECTOR_BYTES]);
            self.replaced.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn answer(&self, store: &File, fuse: &File, bytes: &mut [u8]) {
        let (head, rest) = In::read_from_prefix(bytes).unwrap();
        let range = || Range::read_from_prefix(rest).unwrap().0;
        let mut body = Vec::new();
        let mut error = 0;
        match head.opcode {
            // INIT
            26 => body.extend(Init::default().as_bytes()),
            // GETATTR, SETATTR
            3 | 4 => {
                let size = store.metadata().unwrap().len();
                body.extend(
                    Attributes {
                        valid: 1,
                        ino: 1,
                        size,
                        mode: 0o100600,
                        links: 1,
                        ..Default::default()
                    }
                    .as_bytes(),
                );
            }
            // OPEN, without a page cache.
            14 => body.extend([0_u64, 1].as_bytes()),
            // READ
            15 => {
                body.resize(range().size as usize, 0);
                let read = store.read_at(&mut body, range().offset).unwrap();
                body.truncate(read);
            }
            // WRITE
            16 => {
                let range = range();
                let data = &mut bytes[size_of::<In>() + size_of::<Range>()..];
                self.replace(data);
                store.write_all_at(data, range.offset).unwrap();
                body.extend(u64::from(range.size).as_bytes());
            }
            // RELEASE, FSYNC, FLUSH
            18 | 20 | 25 => {}
            // FORGET, INTERRUPT, BATCH_FORGET: no answer.
            2 | 36 | 42 => return,
            _ => error = -libc::ENOSYS,
        }
        let len = (size_of::<Out>() + body.len()) as u32;
        let out = Out { len, error, unique: head.unique };
        // Fails when who asked has gone.
        let _ = rustix::io::write(fuse, &[out.as_bytes(), &body].concat());
    }
}

/// Gives this thread descriptors of its own: the standard ones.
fn close_all() {
    let (first, last) = (3, u32::MAX);
    // SAFETY: what is closed are copies, as the thread's table is its own from then on; the thread
    // has opened nothing yet, and drops nothing that others have opened.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_UNSHARE) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C, packed)]
struct In {
    len: u32,
    opcode: u32,
    unique: u64,
    not_used: [u64; 3],
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Out {
    len: u32,
    error: i32,
    unique: u64,
}

/// Body of a read or a write.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C, packed)]
struct Range {
    handle: u64,
    offset: u64,
    size: u32,
    not_used: [u32; 5],
}

#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct Init {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    background: [u16; 2],
    max_write: u32,
    time_gran: u32,
    max_pages: u16,
    alignment: u16,
    not_used: [u32; 8],
}

impl Default for Init {
    fn default() -> Self {
        // BIG_WRITES, MAX_PAGES.
        let flags = 1 << 5 | 1 << 22;
        let (max_write, max_pages) = (MAX_WRITE as u32, (MAX_WRITE / 4096) as u16);
        let (major, minor, time_gran) = (7, 31, 1);
        let (max_readahead, background, alignment, not_used) = Default::default();
        Self {
            major,
            minor,
            max_readahead,
            flags,
            background,
            max_write,
            time_gran,
            max_pages,
            alignment,
            not_used,
        }
    }
}

#[derive(Default, IntoBytes, Immutable)]
#[repr(C)]
struct Attributes {
    valid: u64,
    not_used: u64,
    ino: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    not_used2: [u32; 5],
}
