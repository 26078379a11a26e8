//! Puts a copy in place.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};

use super::CopyError;
use super::format::{About, FileEntry, Reader, Record};

/// Zeroes that are written at a time.
const ZEROES: &[u8] = &[0; 64 << 10];

/// Limit of bytes that are written before they are made durable.
const SYNC_BYTES: usize = 64 << 20;

/// Place for a copy, and what the copy must be to fit.
#[derive(Debug, Clone)]
pub struct Put<'a> {
    /// The folder of the VM's modules.
    pub state_dir: &'a Path,
    /// The module.
    pub module: &'a str,
    /// Limit of the bytes of its files.
    pub disk_bytes: u64,
}

/// A copy that was read, checked and made durable, beside the files that it is to replace.
///
/// Dropped, it is removed. But it is left where it is while it has the files from before: see
/// [`Received::discard_old`].
#[derive(Debug)]
pub struct Received {
    folder: PathBuf,
    has_old: bool,
    /// Origin of the copy.
    pub about: About,
    /// Summary of its files.
    pub files: u64,
    /// Total length of the files.
    pub files_bytes: u64,
}

impl Drop for Received {
    fn drop(&mut self) {
        if self.has_old {
            return tracing::warn!("the files from before are in {}", self.folder.display());
        }
        if let Err(e) = remove(&self.folder) {
            tracing::warn!("{e}");
        }
    }
}

impl Received {
    /// Has the module's folder and this one change places. Once more, and all is as it was. The
    /// module's folder is to be locked by nobody else.
    ///
    /// # Errors
    /// The file system refuses, and nothing has changed; or not even that can be had, and it says
    /// so.
    pub fn exchange(&mut self, place: &Put<'_>) -> Result<(), CopyError> {
        let target = place.state_dir.join(place.module);
        let state_dir =
            File::open(place.state_dir).map_err(CopyError::files("opening the modules' folder"))?;
        let old = old_folder(place);
        if self.folder != old {
            // From here on it may be all that there is of the files from before.
            let what = CopyError::files(format!("naming {}", old.display()));
            rename(&self.folder, &old, RenameFlags::NOREPLACE).map_err(what)?;
            self.folder = old;
        }
        let what = || CopyError::files(format!("putting {} in place", self.folder.display()));
        rename(&self.folder, &target, RenameFlags::EXCHANGE).map_err(what())?;
        self.has_old = !self.has_old;
        let Err(e) = state_dir.sync_all() else { return Ok(()) };
        if rename(&self.folder, &target, RenameFlags::EXCHANGE).is_ok() {
            self.has_old = !self.has_old;
        }
        let what = format!("making {} durable", place.state_dir.display());
        Err(CopyError::files(what)(e))
    }

    /// Whether the files that were in place before are here.
    #[must_use]
    pub fn has_old(&self) -> bool {
        self.has_old
    }

    /// Path of it, for people.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files from before are of no use any more: what is in place is good. Removes them.
    pub fn discard_old(mut self) {
        self.has_old = false;
    }
}

fn rename(from: &Path, to: &Path, how: RenameFlags) -> Result<(), rustix::io::Errno> {
    rustix::fs::renameat_with(CWD, from, CWD, to, how)
}

/// Path of the files that a copy took the place of, until the copy is known to be good. No module
/// is named so.
fn old_folder(place: &Put<'_>) -> PathBuf {
    place.state_dir.join(format!(".restore-{}", place.module))
}

/// Reads a copy, checks it, and makes it durable beside the module's folder. Nothing of that
/// changes.
///
/// # Errors
/// See [`CopyError`]: it is damaged, another module's, or too long; an earlier one was put in place
/// half way.
pub fn put(place: &Put<'_>, from: &mut dyn Read) -> Result<Received, CopyError> {
    let old = old_folder(place);
    if old.symlink_metadata().is_ok() {
        let text = format!(
            "{} is there, of a restore that was cut short: it may have the files from before. Look at it, and \
             move it away",
            old.display()
        );
        return Err(CopyError::Unfit(text));
    }
    // Of a copy that was never whole.
    let folder = place.state_dir.join(format!(".receive-{}", place.module));
    remove(&folder)?;
    let what = || CopyError::files(format!("making {}", folder.display()));
    std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(what())?;
    let (about, files, files_bytes) = receive(place, &folder, from).inspect_err(|_| {
        let _ = remove(&folder);
    })?;
    Ok(Received { folder, has_old: false, about, files, files_bytes })
}

fn remove(folder: &Path) -> Result<(), CopyError> {
    match std::fs::remove_dir_all(folder) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(CopyError::files(format!("removing {}", folder.display()))(e)),
    }
}

fn sync_folder(folder: &Path) -> Result<(), CopyError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(CopyError::files(format!("making {} durable", folder.display())))
}

/// Files that are being written, by their numbers.
struct Files<'a> {
    folder: &'a Path,
    /// The one that was written last.
    open: Option<(u32, File)>,
    /// Ends of all, by number.
    ends: Vec<u64>,
    limit_bytes: u64,
    /// Bytes that were written since the last sync.
    unsynced_bytes: usize,
}

impl Files<'_> {
    /// A file, and room in it. What was removed while the copy was taken takes room, too.
    fn at(&mut self, number: u32, end: u64) -> Result<&File, CopyError> {
        let index = number as usize;
        if self.ends.len() <= index {
            self.ends.resize(index + 1, 0);
        }
        self.ends[index] = self.ends[index].max(end);
        let all = self.ends.iter().fold(0u64, |sum, end| sum.saturating_add(*end));
        if all > self.limit_bytes.saturating_mul(2) {
            return Err(too_long(all, self.limit_bytes));
        }
        if self.open.as_ref().is_none_or(|(open, _)| *open != number) {
            self.open = Some((number, self.open(number)?));
        }
        match &self.open {
            Some((_, file)) => Ok(file),
            None => Err(CopyError::Unfit(format!("file {number} is not open"))),
        }
    }

    fn path(&self, number: u32) -> PathBuf {
        // A module's files have no dot in front.
        self.folder.join(format!(".{number}"))
    }

    fn open(&self, number: u32) -> Result<File, CopyError> {
        let path = self.path(number);
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(CopyError::files(format!("opening {}", path.display())))
    }

    fn write(&mut self, number: u32, at: u64, bytes: &[u8]) -> Result<(), CopyError> {
        let what = || CopyError::files("writing a file of the copy");
        let file = self.at(number, at.saturating_add(bytes.len() as u64))?;
        file.write_all_at(bytes, at).map_err(what())?;
        // Else all of it would wait for the end, and whoever asked with it.
        self.unsynced_bytes += bytes.len();
        if self.unsynced_bytes >= SYNC_BYTES
            && let Some((_, file)) = &self.open
        {
            file.sync_data().map_err(what())?;
            self.unsynced_bytes = 0;
        }
        Ok(())
    }

    /// Removes it, and frees its room.
    fn gone(&mut self, number: u32) -> Result<(), CopyError> {
        self.open = None;
        if let Some(end) = self.ends.get_mut(number as usize) {
            *end = 0;
        }
        match std::fs::remove_file(self.path(number)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(CopyError::files("removing a file of the copy")(e))
            }
            _ => Ok(()),
        }
    }

    /// Zeroes are written: a file that had room on the disk has it again.
    fn zero(&mut self, number: u32, at: u64, len_bytes: u64) -> Result<(), CopyError> {
        self.at(number, at.saturating_add(len_bytes))?;
        let mut done = 0;
        while done < len_bytes {
            let n = (len_bytes - done).min(ZEROES.len() as u64);
            self.write(number, at + done, &ZEROES[..n as usize])?;
            done += n;
        }
        Ok(())
    }

    /// Gives the files their names and lengths, durably, and removes the others.
    fn end(&mut self, files: &[FileEntry]) -> Result<(), CopyError> {
        self.open = None;
        for file in files {
            let what = || CopyError::files(format!("making {} durable", file.name));
            let open = self.open(file.file)?;
            open.set_len(file.len_bytes).map_err(what())?;
            open.sync_all().map_err(what())?;
            std::fs::rename(self.path(file.file), self.folder.join(&file.name)).map_err(what())?;
        }
        (0..self.ends.len() as u32).try_for_each(|number| self.gone(number))?;
        sync_folder(self.folder)
    }
}

fn too_long(found: u64, limit: u64) -> CopyError {
    CopyError::Unfit(format!("its files have {found} bytes, the module may have {limit} (disk)"))
}

fn receive(
    place: &Put<'_>,
    folder: &Path,
    from: &mut dyn Read,
) -> Result<(About, u64, u64), CopyError> {
    let mut reader = Reader::new(from);
    let (mut about, mut ends) = (None, Vec::new());
    let limit_bytes = place.disk_bytes;
    let mut files = Files { folder, open: None, ends: Vec::new(), limit_bytes, unsynced_bytes: 0 };
    loop {
        match reader.next()? {
            Record::About(of) if of.module != place.module => {
                let text = format!("the copy is of module {}, not of {}", of.module, place.module);
                return Err(CopyError::Unfit(text));
            }
            Record::About(of) => about = Some(of),
            Record::Data { file, at, bytes } => files.write(file, at, bytes)?,
            Record::Zero { file, at, len_bytes } => files.zero(file, at, len_bytes)?,
            Record::Gone { file } => files.gone(file)?,
            Record::End(entries) => {
                let all = entries.iter().fold(0u64, |sum, file| sum.saturating_add(file.len_bytes));
                if all > limit_bytes {
                    return Err(too_long(all, limit_bytes));
                }
                ends = entries;
            }
            Record::Whole => break,
        }
    }
    files.end(&ends)?;
    let Some(about) = about else {
        return Err(CopyError::Unfit("the copy does not say what it is of".into()));
    };
    let files_bytes = ends.iter().map(|file| file.len_bytes).sum();
    Ok((about, ends.len() as u64, files_bytes))
}
