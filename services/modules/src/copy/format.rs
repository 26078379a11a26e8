//! The stream of a copy.
//!
//! [`MAGIC`], then records: a [`Head`] (little endian) and a body of `len` bytes, but for [`ZERO`],
//! which has none.
//!
//! | kind | file | at | len | body |
//! | --- | --- | --- | --- | --- |
//! | 1 `ABOUT`, first | 0 | 0 | of the body | JSON: [`About`] |
//! | 2 `DATA` | which, counted from 0 | where in it | up to 1 MiB | bytes |
//! | 3 `ZERO` | the same | the same | any | none: that many zeroes |
//! | 4 `END` | 0 | 0 | of the body | JSON: [`FileEntry`] of each file |
//! | 5 `HASH`, last | 0 | 0 | 32 | SHA-256 of all bytes before this record |
//! | 6 `FAILED`, last | 0 | 0 | of the body | text: why there is no whole copy |
//! | 7 `GONE` | which | 0 | 0 | none: it was removed while the copy was taken, and is not named again |
//!
//! Later records are above earlier ones. A file ends where `END` says, and one that it does not
//! name is none, as if it were `GONE`. Nothing comes behind the last record.

use std::io::{self, Read, Write};

use guest_abi::module_call::MAX_FOLDER_FILES;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::CopyError;

/// Beginning of a copy; the last digit is the version.
pub const MAGIC: [u8; 16] = *b"millrace-copy-1\n";

pub const ABOUT: u32 = 1;
pub const DATA: u32 = 2;
pub const ZERO: u32 = 3;
pub const END: u32 = 4;
pub const HASH: u32 = 5;
pub const FAILED: u32 = 6;
pub const GONE: u32 = 7;

/// Longest body of `DATA`.
pub const MAX_DATA_BYTES: usize = 1 << 20;

/// Longest body of the others: the names of all files of a folder take less.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Longest reason of `FAILED`.
const MAX_REASON_BYTES: usize = 4096;

/// Limit of files of a copy, with those that were removed meanwhile.
pub const MAX_COPIED: u32 = 16 * MAX_FOLDER_FILES as u32;

/// The head of a record.
#[derive(Debug, Clone, Copy, IntoBytes, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Head {
    kind: U32,
    file: U32,
    at: U64,
    len: U64,
}

const HEAD_BYTES: usize = size_of::<Head>();

/// Origin of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Name of the VM.
    pub vm: String,
    /// The module.
    pub module: String,
    /// SHA-256 of the WebAssembly that served them, in hexadecimal digits.
    #[serde(rename = "sha256")]
    pub hash: String,
    /// Time when it was begun, in seconds since 1970.
    pub begun_s: u64,
    /// The version that took it.
    pub version: String,
}

/// A file of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Number of the file in the stream.
    pub file: u32,
    /// Name of the file in the folder.
    pub name: String,
    /// Length of the file in bytes.
    pub len_bytes: u64,
}

/// Summary of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Origin.
    #[serde(flatten)]
    pub about: About,
    /// Files.
    pub files: u64,
    /// Total length of the files.
    pub files_bytes: u64,
    /// The copy itself.
    pub copy_bytes: u64,
}

impl About {
    /// Whether it is fit to be shown: a copy may come from anywhere.
    fn is_plain(&self) -> bool {
        let plain = |text: &str| {
            text.len() <= 64
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-+".contains(&b))
        };
        [&self.vm, &self.module, &self.hash, &self.version].into_iter().all(|text| plain(text))
    }
}

/// Writes a stream.
pub struct Writer<'a> {
    to: &'a mut dyn Write,
    hash: Sha256,
}

impl<'a> Writer<'a> {
    /// Begins it.
    pub fn new(to: &'a mut dyn Write, about: &About) -> Result<Self, CopyError> {
        let mut this = Self { to, hash: Sha256::new() };
        this.put(&MAGIC)?;
        this.record(ABOUT, 0, 0, &text(about)?)?;
        Ok(this)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), CopyError> {
        self.hash.update(bytes);
        self.to.write_all(bytes).map_err(CopyError::Write)
    }

    fn record(&mut self, kind: u32, file: u32, at: u64, body: &[u8]) -> Result<(), CopyError> {
        self.put(head(kind, file, at, body.len() as u64).as_bytes())?;
        self.put(body)
    }

    /// A part of a file.
    pub fn data(&mut self, file: u32, at: u64, bytes: &[u8]) -> Result<(), CopyError> {
        if bytes.iter().all(|byte| *byte == 0) {
            return self.put(head(ZERO, file, at, bytes.len() as u64).as_bytes());
        }
        bytes.chunks(MAX_DATA_BYTES).enumerate().try_for_each(|(n, chunk)| {
            self.record(DATA, file, at + (n * MAX_DATA_BYTES) as u64, chunk)
        })
    }

    /// A file was removed.
    pub fn gone(&mut self, file: u32) -> Result<(), CopyError> {
        self.put(head(GONE, file, 0, 0).as_bytes())
    }

    /// Ends it.
    pub fn end(mut self, files: &[FileEntry]) -> Result<(), CopyError> {
        self.record(END, 0, 0, &text(&files)?)?;
        let hash = self.hash.clone().finalize();
        self.record(HASH, 0, 0, &hash)?;
        self.to.flush().map_err(CopyError::Write)
    }

    /// Ends it, as one that is not whole.
    pub fn fail(mut self, why: &str) -> Result<(), CopyError> {
        let end =
            (0..=MAX_REASON_BYTES.min(why.len())).rev().find(|end| why.is_char_boundary(*end));
        self.record(FAILED, 0, 0, &why.as_bytes()[..end.unwrap_or(0)])?;
        self.to.flush().map_err(CopyError::Write)
    }
}

fn head(kind: u32, file: u32, at: u64, len: u64) -> Head {
    Head { kind: U32::new(kind), file: U32::new(file), at: U64::new(at), len: U64::new(len) }
}

fn text(what: &impl Serialize) -> Result<Vec<u8>, CopyError> {
    serde_json::to_vec(what).map_err(|e| CopyError::Write(e.into()))
}

/// A record as it is read. Its body is lent.
#[derive(Debug, PartialEq, Eq)]
pub enum Record<'a> {
    About(About),
    Data {
        file: u32,
        at: u64,
        bytes: &'a [u8],
    },
    Zero {
        file: u32,
        at: u64,
        len_bytes: u64,
    },
    Gone {
        file: u32,
    },
    End(Vec<FileEntry>),
    /// All before it is whole and right, and nothing comes behind it.
    Whole,
}

/// Reads a stream, and checks it. What it gave is to be believed once [`Record::Whole`] has come.
pub struct Reader<'a> {
    from: &'a mut dyn Read,
    hash: Sha256,
    at: u64,
    body: Vec<u8>,
    /// Kinds that may come now.
    may: &'static [u32],
    /// Sink for a duplicate of what is read.
    tee: Option<&'a mut dyn Write>,
}

impl<'a> Reader<'a> {
    /// Begins with a stream that is at its beginning.
    pub fn new(from: &'a mut dyn Read) -> Self {
        let (hash, body) = (Sha256::new(), Vec::new());
        Self { from, hash, at: 0, body, may: &[ABOUT], tee: None }
    }

    fn damaged<T>(&self, what: impl Into<String>) -> Result<T, CopyError> {
        Err(CopyError::Damaged { at: self.at, what: what.into() })
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), CopyError> {
        match self.from.read_exact(into) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return self.damaged("it ends"),
            Err(e) => return Err(CopyError::Read(e)),
        }
        self.at += into.len() as u64;
        match &mut self.tee {
            Some(tee) => tee.write_all(into).map_err(CopyError::Write),
            None => Ok(()),
        }
    }

    /// The next record.
    pub fn next(&mut self) -> Result<Record<'_>, CopyError> {
        if self.at == 0 {
            let mut magic = [0; MAGIC.len()];
            self.fill(&mut magic)?;
            if magic != MAGIC {
                return self.damaged("it does not begin as one, or is of another version");
            }
            self.hash.update(magic);
        }
        let began = self.at;
        let mut bytes = [0; HEAD_BYTES];
        self.fill(&mut bytes)?;
        let head: Head = zerocopy::transmute!(bytes);
        let (kind, file, at, len) =
            (head.kind.get(), head.file.get(), head.at.get(), head.len.get());
        if kind != FAILED && !self.may.contains(&kind) {
            return self.damaged(format!("a record of kind {kind}"));
        }
        let limit = match kind {
            DATA => MAX_DATA_BYTES,
            HASH => 32,
            FAILED => MAX_REASON_BYTES,
            ZERO | GONE => 0,
            _ => MAX_TEXT_BYTES,
        };
        let of_file = matches!(kind, DATA | ZERO | GONE);
        if of_file && file >= MAX_COPIED {
            return self.damaged(format!("file {file}, of {MAX_COPIED} at most"));
        }
        if of_file && at.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return self.damaged(format!("{len} bytes at {at} of a file"));
        }
        if !of_file && (file, at) != (0, 0) {
            return self.damaged(format!("a record of kind {kind} with a place"));
        }
        if kind != ZERO && len > limit as u64 {
            return self.damaged(format!("a body of {len} bytes, of {limit} at most"));
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(if kind == ZERO { 0 } else { len as usize }, 0);
        let filled = self.fill(&mut body);
        self.body = body;
        filled?;
        if kind == HASH {
            return self.is_whole(began);
        }
        self.hash.update(bytes);
        self.hash.update(&self.body);
        match kind {
            ABOUT => {
                self.may = &[DATA, ZERO, GONE, END];
                match serde_json::from_slice::<About>(&self.body) {
                    Ok(about) if about.is_plain() => Ok(Record::About(about)),
                    Ok(_) => self.damaged("what it is of has names that are none"),
                    Err(e) => self.damaged(format!("what it is of: {e}")),
                }
            }
            DATA => Ok(Record::Data { file, at, bytes: &self.body }),
            GONE => Ok(Record::Gone { file }),
            ZERO => Ok(Record::Zero { file, at, len_bytes: len }),
            END => {
                self.may = &[HASH];
                let files = serde_json::from_slice(&self.body);
                let files = files.or_else(|e| self.damaged(format!("its files: {e}")))?;
                self.checked(files)
            }
            _ => Err(CopyError::Failed(String::from_utf8_lossy(&self.body).into_owned())),
        }
    }

    fn checked(&self, files: Vec<FileEntry>) -> Result<Record<'_>, CopyError> {
        if files.len() > MAX_FOLDER_FILES {
            return self.damaged(format!("{} files, of {MAX_FOLDER_FILES} at most", files.len()));
        }
        let mut names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
        names.sort_unstable();
        let wrong = files.iter().find(|f| {
            crate::folder::checked(f.name.as_bytes()).is_err()
                || f.file >= MAX_COPIED
                || f.len_bytes > i64::MAX as u64
        });
        if let Some(file) = wrong {
            return self.damaged(format!("a file {file:?}"));
        }
        let mut numbers: Vec<u32> = files.iter().map(|file| file.file).collect();
        numbers.sort_unstable();
        let twice = names.windows(2).any(|pair| pair[0] == pair[1])
            || numbers.windows(2).any(|pair| pair[0] == pair[1]);
        if twice {
            return self.damaged("a file twice");
        }
        Ok(Record::End(files))
    }

    fn is_whole(&mut self, began: u64) -> Result<Record<'_>, CopyError> {
        if self.hash.clone().finalize()[..] != self.body[..] {
            self.at = began;
            return self.damaged("its SHA-256 is another one: bytes were changed");
        }
        let mut more = [0];
        let n = loop {
            match self.from.read(&mut more) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                n => break n.map_err(CopyError::Read)?,
            }
        };
        if n > 0 {
            return self.damaged("there is something behind its end");
        }
        self.may = &[];
        Ok(Record::Whole)
    }
}

/// Passes a copy on, and checks it; an error: what was passed on is not a whole one.
///
/// # Errors
/// See [`CopyError`].
pub fn pass(from: &mut dyn Read, to: &mut dyn Write) -> Result<Summary, CopyError> {
    let mut reader = Reader::new(from);
    reader.tee = Some(to);
    let (mut about, mut ends) = (None, Vec::new());
    loop {
        match reader.next()? {
            Record::About(of) => about = Some(of),
            Record::End(files) => ends = files,
            Record::Data { .. } | Record::Zero { .. } | Record::Gone { .. } => {}
            Record::Whole => break,
        }
    }
    let copy_bytes = reader.at;
    if let Some(tee) = reader.tee {
        tee.flush().map_err(CopyError::Write)?;
    }
    let Some(about) = about else {
        return Err(CopyError::Damaged { at: 0, what: "it does not say what it is of".into() });
    };
    let files_bytes = ends.iter().fold(0u64, |sum, file| sum.saturating_add(file.len_bytes));
    Ok(Summary { about, files: ends.len() as u64, files_bytes, copy_bytes })
}
