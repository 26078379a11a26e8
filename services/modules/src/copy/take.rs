//! Takes a copy of a folder whose module may be serving.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use guest_abi::module_call::MAX_FOLDER_FILES;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::CopyError;
use super::format::{About, FileEntry, MAX_COPIED, Writer};
use crate::control::CopyStep;
use crate::folder::written::{Extent, MAX_EXTENTS, Written};
use crate::limits::{COPY_BYTES, COPY_ROUNDS, HELD_BYTES, LITTLE_BYTES};

/// Steps of a copy, done by the process that writes the files. It may lie: its answers only say
/// where to read.
pub trait Steps {
    /// Does a step; an error: why it cannot.
    fn step(&mut self, step: CopyStep) -> Result<Written, String>;
}

/// Takes a part of a file: the file's number, where, and its bytes.
type Give<'a> = dyn FnMut(u32, u64, &[u8]) -> Result<(), CopyError> + 'a;

/// A file of the folder.
struct Named {
    name: String,
    inode: u64,
    len_bytes: u64,
}

/// A copy that is being taken.
struct Taking<'a> {
    folder: &'a OwnedFd,
    files: HashMap<u64, Known>,
    /// The next one's number.
    next: u32,
    piece: Vec<u8>,
    /// Bytes of files that were read.
    read_bytes: u64,
}

/// An inode that the copy has.
struct Known {
    /// Number of the file in the stream.
    number: u32,
    /// Parts that it does not have yet; all of a file at first.
    owed: Vec<(u64, u64)>,
}

/// Parts that were read while the files were held still.
struct Held {
    parts: Vec<(u32, u64, Vec<u8>)>,
    gone: Vec<u32>,
    files: Vec<FileEntry>,
}

/// Ends the hold, come what may.
struct Holding<'a> {
    steps: &'a mut dyn Steps,
    held: bool,
}

impl Holding<'_> {
    fn step(&mut self, step: CopyStep) -> Result<Written, CopyError> {
        let written = self.steps.step(step).map_err(CopyError::Module)?;
        self.held = step == CopyStep::Hold;
        Ok(written)
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        if self.held {
            // It goes on by itself, too.
            let _ = self.steps.step(CopyStep::End);
        }
    }
}

/// Takes a copy; returns the bytes of files that were read for it. When it fails, the stream says
/// why.
///
/// # Errors
/// See [`CopyError`].
pub fn take(
    folder: &OwnedFd,
    steps: &mut dyn Steps,
    about: &About,
    to: &mut dyn Write,
) -> Result<u64, CopyError> {
    let mut writer = Writer::new(to, about)?;
    let piece = vec![0; COPY_BYTES];
    let mut taking = Taking { folder, files: HashMap::new(), next: 0, piece, read_bytes: 0 };
    match taking.run(steps, &mut writer) {
        Ok(files) => writer.end(&files)?,
        Err(e) => {
            // Who reads it may be the one that failed.
            let _ = writer.fail(&e.to_string());
            return Err(e);
        }
    }
    Ok(taking.read_bytes)
}

impl Taking<'_> {
    fn run(
        &mut self,
        steps: &mut dyn Steps,
        writer: &mut Writer<'_>,
    ) -> Result<Vec<FileEntry>, CopyError> {
        let mut holding = Holding { steps, held: false };
        let _ = holding.step(CopyStep::Begin)?;
        self.pass_on(&self.list()?, true, writer)?;
        let mut rounds = 0;
        loop {
            let (before, written) = (self.read_bytes, holding.step(CopyStep::Look)?);
            let list = self.list()?;
            self.owe(written)?;
            self.pass_on(&list, false, writer)?;
            rounds += 1;
            if self.read_bytes - before <= LITTLE_BYTES || rounds == COPY_ROUNDS {
                break;
            }
        }
        let written = holding.step(CopyStep::Hold)?;
        let held = self.hold(written)?;
        let _ = holding.step(CopyStep::End)?;
        held.gone.iter().try_for_each(|file| writer.gone(*file))?;
        held.parts.iter().try_for_each(|(file, at, bytes)| writer.data(*file, *at, bytes))?;
        Ok(held.files)
    }

    /// Notes what was written. Files that the copy does not have yet are owed whole, whatever is
    /// written of them.
    fn owe(&mut self, written: Written) -> Result<(), CopyError> {
        match written {
            Written::All => {
                self.files.values_mut().for_each(|known| known.owed = vec![(0, u64::MAX)])
            }
            Written::Extents(extents) if extents.len() > MAX_EXTENTS => {
                let text = format!("{} extents were told, of {MAX_EXTENTS} at most", extents.len());
                return Err(CopyError::Module(text));
            }
            Written::Extents(extents) => {
                for Extent { inode, at, len_bytes } in extents {
                    if let Some(known) = self.files.get_mut(&inode) {
                        known.owed.push((at, at.saturating_add(len_bytes)));
                    }
                }
            }
        }
        Ok(())
    }

    /// Forgets files that have no name any more, and knows the new ones; who has gone.
    fn meet(&mut self, list: &[Named]) -> Result<Vec<u32>, CopyError> {
        let here: HashSet<u64> = list.iter().map(|file| file.inode).collect();
        let gone = self.files.extract_if(|inode, _| !here.contains(inode));
        let gone = gone.map(|(_, known)| known.number).collect();
        for file in list {
            if self.files.contains_key(&file.inode) {
                continue;
            }
            if self.next >= MAX_COPIED {
                let text =
                    format!("more than {MAX_COPIED} files came and went while it was copied");
                return Err(CopyError::Unfit(text));
            }
            let known = Known { number: self.next, owed: vec![(0, u64::MAX)] };
            self.files.insert(file.inode, known);
            self.next += 1;
        }
        Ok(gone)
    }

    /// Passes on what is owed.
    fn pass_on(
        &mut self,
        list: &[Named],
        skip_holes: bool,
        writer: &mut Writer<'_>,
    ) -> Result<(), CopyError> {
        self.meet(list)?.into_iter().try_for_each(|file| writer.gone(file))?;
        self.pay(list, skip_holes, &mut |file, at, bytes| writer.data(file, at, bytes))
    }

    /// Reads what is left, and the names.
    fn hold(&mut self, written: Written) -> Result<Held, CopyError> {
        let list = self.list()?;
        self.owe(written)?;
        let (gone, mut parts, mut left_bytes) = (self.meet(&list)?, Vec::new(), 0);
        self.pay(&list, false, &mut |file, at, bytes| {
            left_bytes += bytes.len() as u64;
            if left_bytes > HELD_BYTES {
                return Err(CopyError::TooFast { left_bytes, limit_bytes: HELD_BYTES });
            }
            parts.push((file, at, bytes.to_vec()));
            Ok(())
        })?;
        let mut files = Vec::new();
        for Named { name, inode, len_bytes } in list {
            match self.files.get(&inode) {
                Some(Known { number: file, owed }) if owed.is_empty() => {
                    files.push(FileEntry { file: *file, name, len_bytes });
                }
                _ => {
                    let text = format!("{name} came or went while the files were held still");
                    return Err(CopyError::Module(text));
                }
            }
        }
        Ok(Held { parts, gone, files })
    }

    /// The files that a module may name. One that goes meanwhile is left out.
    fn list(&self) -> Result<Vec<Named>, CopyError> {
        let failed = || CopyError::files("reading the module's folder");
        let mut all = Vec::new();
        for entry in rustix::fs::Dir::read_from(self.folder).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            let Ok(name) = crate::folder::checked(entry.file_name().to_bytes()) else { continue };
            match rustix::fs::statat(self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() => {
                    let len_bytes = u64::try_from(stat.st_size).unwrap_or(0);
                    all.push(Named { name: name.to_owned(), inode: stat.st_ino, len_bytes });
                    if all.len() > MAX_FOLDER_FILES {
                        let text = format!("the folder has more than {MAX_FOLDER_FILES} files");
                        return Err(CopyError::Unfit(text));
                    }
                }
                Ok(_) | Err(Errno::NOENT) => {}
                Err(e) => return Err(failed()(e)),
            }
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Opens a file; none: it has gone, or another one has its name.
    fn open(&self, file: &Named) -> Result<Option<File>, CopyError> {
        let what = || CopyError::files(format!("opening {}", file.name));
        let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = match rustix::fs::openat(self.folder, &file.name, how, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(what()(e)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(what())?;
        Ok((stat.st_ino == file.inode).then(|| File::from(fd)))
    }

    /// Gives what is owed of these files. Bytes behind a file's end are not there. What cannot be
    /// opened by its name now stays owed: it was renamed, most likely.
    fn pay(
        &mut self,
        list: &[Named],
        skip_holes: bool,
        give: &mut Give<'_>,
    ) -> Result<(), CopyError> {
        for named in list {
            let Some(known) = self.files.get(&named.inode).filter(|known| !known.owed.is_empty())
            else {
                continue;
            };
            let number = known.number;
            let Some(file) = self.open(named)? else { continue };
            let owed =
                self.files.get_mut(&named.inode).map(|known| std::mem::take(&mut known.owed));
            for (from, to) in merged(owed.unwrap_or_default(), named.len_bytes) {
                let mut at = from;
                while skip_holes && let Some((from, end)) = data(&file, at, to) {
                    self.read(&file, &named.name, (from, end), number, give)?;
                    at = end;
                }
                if !skip_holes {
                    self.read(&file, &named.name, (from, to), number, give)?;
                }
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        file: &File,
        name: &str,
        (from, to): (u64, u64),
        number: u32,
        give: &mut Give<'_>,
    ) -> Result<(), CopyError> {
        let mut at = from;
        while at < to {
            let want = self.piece.len().min(usize::try_from(to - at).unwrap_or(usize::MAX));
            let got = match file.read_at(&mut self.piece[..want], at) {
                // It was cut: that is told with the next step.
                Ok(0) => return Ok(()),
                Ok(got) => got,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(CopyError::files(format!("reading {name}"))(e)),
            };
            give(number, at, &self.piece[..got])?;
            at += got as u64;
            self.read_bytes += got as u64;
        }
        Ok(())
    }
}

/// Parts up to a file's end, in order, each byte once.
fn merged(mut parts: Vec<(u64, u64)>, end: u64) -> Vec<(u64, u64)> {
    parts.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::new();
    for (from, to) in parts.into_iter().map(|(from, to)| (from, to.min(end))).filter(|p| p.0 < p.1)
    {
        match all.last_mut() {
            Some(last) if last.1 >= from => last.1 = last.1.max(to),
            _ => all.push((from, to)),
        }
    }
    all
}

/// The next run of data of a file, up to `end`.
fn data(file: &File, at: u64, end: u64) -> Option<(u64, u64)> {
    if at >= end {
        return None;
    }
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(from) if from < end => {
            let to = rustix::fs::seek(file, SeekFrom::Hole(from)).unwrap_or(end);
            Some((from, to.min(end)))
        }
        Ok(_) | Err(Errno::NXIO) => None,
        // The file system knows of no holes.
        Err(_) => Some((at, end)),
    }
}
