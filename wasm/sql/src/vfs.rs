//! SQLite's files are those of the module's folder: what SQLite calls a VFS.
//!
//! # Theory of operation
//! An instance has one [`Disk`], which SQLite knows by a name of its own. It holds the host for the
//! time of a call of the module, and is the only way to the host meanwhile. The index of a
//! database's log, which SQLite wants in memory that all connections share, is ordinary memory: all
//! connections are here.
//!
//! Without a host, as when everything is dropped, every call fails and files stay as they are.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::ffi::CString;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU32, Ordering};

use sdk::{Errno, File, Host, open};

use crate::ffi;
use crate::locks::{Held, Locks};

/// Longest name of a file that SQLite may use: a database's name with what is put behind it.
const MAX_NAME_BYTES: usize = 64;
/// Random bytes that the host gives at a time.
const RANDOM_BYTES: usize = 4096;
/// Bytes of a piece of an index, in words.
const REGION_WORDS: usize = (32 << 10) / 8;

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// State that the connections to one database share.
#[derive(Debug, Default)]
struct Shared {
    locks: RefCell<Locks>,
    /// The index of the log. Its pieces never move while somebody has it.
    regions: RefCell<Vec<Box<[u64; REGION_WORDS]>>>,
    users: Cell<u32>,
}

/// The files of an instance.
pub struct Disk {
    host: Cell<Option<NonNull<dyn Host>>>,
    databases: RefCell<BTreeMap<String, Rc<Shared>>>,
    vfs: Cell<*mut ffi::sqlite3_vfs>,
    name: CString,
}

impl core::fmt::Debug for Disk {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Disk").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Disk {
    /// Known to SQLite from now on.
    pub fn new() -> Result<Rc<Self>, Errno> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(format!("millrace{number}")).map_err(|_| Errno::INVAL)?;
        let disk = Rc::new(Self {
            host: Cell::new(None),
            databases: RefCell::default(),
            vfs: Cell::new(ptr::null_mut()),
            name,
        });
        let vfs = Box::into_raw(Box::new(description(&disk)));
        disk.vfs.set(vfs);
        // SAFETY: the description and what it points to live until `drop` takes it back.
        let done = unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        if done == ffi::SQLITE_OK { Ok(disk) } else { Err(Errno::NOMEM) }
    }

    /// The name that SQLite knows it by.
    pub fn name(&self) -> &CStr {
        &self.name
    }

    /// Gives it the host while `work` is done.
    pub fn lend<T>(&self, host: &mut dyn Host, work: impl FnOnce() -> T) -> T {
        let host: *mut (dyn Host + '_) = host;
        // SAFETY: only the lifetime changes; it is taken back below, before the borrow ends. Nobody
        // unwinds: a panic ends the instance, or the test.
        let host = unsafe { core::mem::transmute::<*mut (dyn Host + '_), *mut dyn Host>(host) };
        self.host.set(NonNull::new(host));
        let done = work();
        self.host.set(None);
        done
    }

    /// Calls the host, if there is one.
    pub fn call<T>(
        &self,
        call: impl FnOnce(&mut dyn Host) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut host = self.host.get().ok_or(Errno::IO)?;
        // SAFETY: it is lent for now, and only through here; no call of the host comes back here.
        call(unsafe { host.as_mut() })
    }

    /// The monotonic clock.
    pub fn now_ms(&self) -> u64 {
        self.call(|host| Ok(host.now_ms())).unwrap_or(0)
    }

    fn shared(&self, name: &str) -> Rc<Shared> {
        Rc::clone(self.databases.borrow_mut().entry(name.to_string()).or_default())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let vfs = self.vfs.get();
        // SAFETY: registered in `new`, and all connections hold the disk, so none is left.
        unsafe {
            ffi::sqlite3_vfs_unregister(vfs);
            drop(Box::from_raw(vfs));
        }
    }
}

/// An open file, as SQLite sees it: in front what it wants there, then what is ours.
#[repr(C)]
struct Open {
    base: ffi::sqlite3_file,
    body: *mut Body,
}

struct Body {
    disk: *const Disk,
    file: File,
    /// State of the database, if it is a database's file.
    shared: Option<Rc<Shared>>,
    held: Held,
    has_index: bool,
}

fn description(disk: &Rc<Disk>) -> ffi::sqlite3_vfs {
    ffi::sqlite3_vfs {
        iVersion: 2,
        szOsFile: size_of::<Open>() as c_int,
        mxPathname: MAX_NAME_BYTES as c_int,
        pNext: ptr::null_mut(),
        zName: disk.name.as_ptr(),
        pAppData: Rc::as_ptr(disk).cast_mut().cast(),
        xOpen: Some(x_open),
        xDelete: Some(x_delete),
        xAccess: Some(x_access),
        xFullPathname: Some(x_full_pathname),
        xDlOpen: None,
        xDlError: None,
        xDlSym: None,
        xDlClose: None,
        xRandomness: Some(x_randomness),
        xSleep: Some(x_sleep),
        xCurrentTime: Some(x_current_time),
        xGetLastError: Some(x_last_error),
        xCurrentTimeInt64: None,
        xSetSystemCall: None,
        xGetSystemCall: None,
        xNextSystemCall: None,
    }
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 2,
    xClose: Some(x_close),
    xRead: Some(x_read),
    xWrite: Some(x_write),
    xTruncate: Some(x_truncate),
    xSync: Some(x_sync),
    xFileSize: Some(x_file_size),
    xLock: Some(x_lock),
    xUnlock: Some(x_unlock),
    xCheckReservedLock: Some(x_check_reserved),
    xFileControl: Some(x_file_control),
    xSectorSize: Some(x_sector_size),
    xDeviceCharacteristics: Some(x_characteristics),
    xShmMap: Some(x_shm_map),
    xShmLock: Some(x_shm_lock),
    xShmBarrier: Some(x_shm_barrier),
    xShmUnmap: Some(x_shm_unmap),
    xFetch: None,
    xUnfetch: None,
};

type Vfs = *mut ffi::sqlite3_vfs;
type Raw = *mut ffi::sqlite3_file;

/// # Safety
/// SQLite gives the description that [`Disk::new`] made.
unsafe fn disk<'a>(vfs: Vfs) -> &'a Disk {
    // SAFETY: it points to the disk, which outlives all its connections.
    unsafe { &*(*vfs).pAppData.cast::<Disk>() }
}

/// # Safety
/// SQLite gives a file that [`x_open`] made, and calls one function on it at a time.
unsafe fn body<'a>(file: Raw) -> (&'a Disk, &'a mut Body) {
    // SAFETY: the body is there from `x_open` to `x_close`; the disk outlives all files.
    unsafe {
        let body = &mut *(*file.cast::<Open>()).body;
        (&*body.disk, body)
    }
}

/// # Safety
/// SQLite gives a string that ends with a zero.
unsafe fn text<'a>(name: *const c_char) -> Option<&'a str> {
    if name.is_null() {
        return None;
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(name) }.to_str().ok()
}

fn code(result: Result<(), Errno>, otherwise: c_int) -> c_int {
    match result {
        Ok(()) => ffi::SQLITE_OK,
        Err(Errno::NOSPC) => ffi::SQLITE_FULL,
        Err(Errno::NOMEM) => ffi::SQLITE_NOMEM,
        Err(_) => otherwise,
    }
}

unsafe extern "C" fn x_open(
    vfs: Vfs,
    name: *const c_char,
    file: Raw,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: SQLite gives `szOsFile` bytes for the file.
    unsafe { (*file).pMethods = ptr::null() };
    // SAFETY: as the functions say.
    let (disk, name) = unsafe { (disk(vfs), text(name)) };
    // Temporary files are in memory: one without a name is not expected.
    let Some(name) = name else { return ffi::SQLITE_CANTOPEN };
    let how = if flags & ffi::SQLITE_OPEN_CREATE != 0 { open::CREATE } else { 0 };
    let Ok(opened) = disk.call(|host| host.open(name, how)) else { return ffi::SQLITE_CANTOPEN };
    let is_database = flags & ffi::SQLITE_OPEN_MAIN_DB != 0;
    let shared = is_database.then(|| disk.shared(name));
    let held = Held::default();
    let body = Box::new(Body { disk, file: opened, shared, held, has_index: false });
    // SAFETY: as above; the flags may be null.
    unsafe {
        (*file.cast::<Open>()).body = Box::into_raw(body);
        (*file).pMethods = &METHODS;
        if !out_flags.is_null() {
            *out_flags = flags;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_close(file: Raw) -> c_int {
    // SAFETY: SQLite closes a file once; the body was made by `x_open`.
    let mut body = unsafe { Box::from_raw((*file.cast::<Open>()).body) };
    // SAFETY: the disk outlives its files.
    let disk = unsafe { &*body.disk };
    if let Some(shared) = &body.shared {
        shared.locks.borrow_mut().drop_all(&mut body.held);
    }
    let file = body.file;
    let _ = disk.call(|host| {
        host.close(file);
        Ok(())
    });
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_delete(vfs: Vfs, name: *const c_char, _: c_int) -> c_int {
    // SAFETY: as the functions say.
    let (disk, name) = unsafe { (disk(vfs), text(name)) };
    let Some(name) = name else { return ffi::SQLITE_IOERR_DELETE };
    match disk.call(|host| host.remove(name)) {
        Err(Errno::NOENT) => ffi::SQLITE_IOERR_DELETE_NOENT,
        done => code(done, ffi::SQLITE_IOERR_DELETE),
    }
}

unsafe extern "C" fn x_access(vfs: Vfs, name: *const c_char, _: c_int, out: *mut c_int) -> c_int {
    // SAFETY: as the functions say.
    let (disk, name) = unsafe { (disk(vfs), text(name)) };
    let Ok(names) = disk.call(|host| host.list()) else { return ffi::SQLITE_IOERR_ACCESS };
    let is_there = name.is_some_and(|name| names.iter().any(|n| n == name));
    // SAFETY: SQLite gives a place for the answer.
    unsafe { *out = c_int::from(is_there) };
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_full_pathname(
    _: Vfs,
    name: *const c_char,
    len: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: a string that ends with a zero.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
    if bytes.len() > len as usize {
        return ffi::SQLITE_CANTOPEN;
    }
    // SAFETY: SQLite gives room for `len` bytes, elsewhere.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_randomness(vfs: Vfs, len: c_int, out: *mut c_char) -> c_int {
    // SAFETY: SQLite gives room for `len` bytes.
    let (disk, bytes) =
        unsafe { (disk(vfs), core::slice::from_raw_parts_mut(out.cast::<u8>(), len as usize)) };
    bytes.fill(0);
    for piece in bytes.chunks_mut(RANDOM_BYTES) {
        let _ = disk.call(|host| host.random(piece));
    }
    len
}

unsafe extern "C" fn x_sleep(_: Vfs, us: c_int) -> c_int {
    us
}

/// A module has no calendar.
unsafe extern "C" fn x_current_time(_: Vfs, _: *mut f64) -> c_int {
    ffi::SQLITE_ERROR
}

unsafe extern "C" fn x_last_error(_: Vfs, _: c_int, _: *mut c_char) -> c_int {
    0
}

unsafe extern "C" fn x_read(file: Raw, to: *mut c_void, len: c_int, at: i64) -> c_int {
    // SAFETY: SQLite gives room for `len` bytes.
    let ((disk, body), bytes) =
        unsafe { (body(file), core::slice::from_raw_parts_mut(to.cast::<u8>(), len as usize)) };
    let read = disk.call(|host| host.read(body.file, at as u64, bytes));
    match read {
        Ok(n) if n == bytes.len() => ffi::SQLITE_OK,
        Ok(n) => {
            bytes[n..].fill(0);
            ffi::SQLITE_IOERR_SHORT_READ
        }
        Err(_) => ffi::SQLITE_IOERR_READ,
    }
}

unsafe extern "C" fn x_write(file: Raw, from: *const c_void, len: c_int, at: i64) -> c_int {
    // SAFETY: SQLite gives `len` bytes.
    let ((disk, body), bytes) =
        unsafe { (body(file), core::slice::from_raw_parts(from.cast::<u8>(), len as usize)) };
    code(disk.call(|host| host.write(body.file, at as u64, bytes)), ffi::SQLITE_IOERR_WRITE)
}

unsafe extern "C" fn x_truncate(file: Raw, len: i64) -> c_int {
    // SAFETY: as of `body`.
    let (disk, body) = unsafe { body(file) };
    code(disk.call(|host| host.truncate(body.file, len as u64)), ffi::SQLITE_IOERR_TRUNCATE)
}

unsafe extern "C" fn x_sync(file: Raw, _: c_int) -> c_int {
    // SAFETY: as of `body`.
    let (disk, body) = unsafe { body(file) };
    code(disk.call(|host| host.sync(body.file)), ffi::SQLITE_IOERR_FSYNC)
}

unsafe extern "C" fn x_file_size(file: Raw, out: *mut i64) -> c_int {
    // SAFETY: as of `body`.
    let (disk, body) = unsafe { body(file) };
    let Ok(len) = disk.call(|host| host.len(body.file)) else { return ffi::SQLITE_IOERR_FSTAT };
    // SAFETY: SQLite gives a place for the answer.
    unsafe { *out = len as i64 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_lock(file: Raw, wanted: c_int) -> c_int {
    // SAFETY: as of `body`.
    let (_, body) = unsafe { body(file) };
    let Some(shared) = &body.shared else { return ffi::SQLITE_OK };
    match shared.locks.borrow_mut().raise(&mut body.held, wanted) {
        Ok(()) => ffi::SQLITE_OK,
        Err(_) => ffi::SQLITE_BUSY,
    }
}

unsafe extern "C" fn x_unlock(file: Raw, wanted: c_int) -> c_int {
    // SAFETY: as of `body`.
    let (_, body) = unsafe { body(file) };
    if let Some(shared) = &body.shared {
        shared.locks.borrow_mut().lower(&mut body.held, wanted);
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_check_reserved(file: Raw, out: *mut c_int) -> c_int {
    // SAFETY: as of `body`; SQLite gives a place for the answer.
    unsafe {
        let (_, body) = body(file);
        *out = c_int::from(body.shared.as_ref().is_some_and(|s| s.locks.borrow().is_reserved()));
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_file_control(_: Raw, _: c_int, _: *mut c_void) -> c_int {
    ffi::SQLITE_NOTFOUND
}

unsafe extern "C" fn x_sector_size(_: Raw) -> c_int {
    4096
}

unsafe extern "C" fn x_characteristics(_: Raw) -> c_int {
    // A write changes no byte but its own, whatever happens.
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

unsafe extern "C" fn x_shm_map(
    file: Raw,
    number: c_int,
    _: c_int,
    extend: c_int,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: as of `body`.
    let (_, body) = unsafe { body(file) };
    let Some(shared) = &body.shared else { return ffi::SQLITE_IOERR_SHMMAP };
    if !core::mem::replace(&mut body.has_index, true) {
        shared.users.set(shared.users.get() + 1);
    }
    let mut regions = shared.regions.borrow_mut();
    while extend != 0 && regions.len() <= number as usize {
        regions.push(Box::new([0; REGION_WORDS]));
    }
    let region = regions.get_mut(number as usize);
    let at = region.map_or(ptr::null_mut(), |region| region.as_mut_ptr().cast());
    // SAFETY: SQLite gives a place for the answer. It may write to the region as long as it has the
    // index: nobody here looks into it.
    unsafe { *out = at };
    ffi::SQLITE_OK
}

unsafe extern "C" fn x_shm_lock(file: Raw, first: c_int, count: c_int, flags: c_int) -> c_int {
    // SAFETY: as of `body`.
    let (_, body) = unsafe { body(file) };
    let Some(shared) = &body.shared else { return ffi::SQLITE_IOERR_SHMLOCK };
    let mut locks = shared.locks.borrow_mut();
    let (first, count) = (first as usize, count as usize);
    if flags & ffi::SQLITE_SHM_UNLOCK != 0 {
        locks.give(&mut body.held, first, count);
        return ffi::SQLITE_OK;
    }
    let is_exclusive = flags & ffi::SQLITE_SHM_EXCLUSIVE != 0;
    match locks.take(&mut body.held, first, count, is_exclusive) {
        Ok(()) => ffi::SQLITE_OK,
        Err(_) => ffi::SQLITE_BUSY,
    }
}

unsafe extern "C" fn x_shm_barrier(_: Raw) {}

unsafe extern "C" fn x_shm_unmap(file: Raw, _: c_int) -> c_int {
    // SAFETY: as of `body`.
    let (_, body) = unsafe { body(file) };
    let Some(shared) = &body.shared else { return ffi::SQLITE_OK };
    if core::mem::take(&mut body.has_index) {
        let left = shared.users.get() - 1;
        shared.users.set(left);
        if left == 0 {
            // The next one makes it from the log.
            shared.regions.borrow_mut().clear();
        }
    }
    ffi::SQLITE_OK
}
