//! Files into and out of the guest.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use xxhash_rust::xxh3::Xxh3;

use crate::AgentError;
use crate::proto::{CHUNK_BYTES, Reply};

/// A file on its way in: written beside its place and renamed when its hash is right, so that a
/// program never sees half of it.
pub(crate) struct Incoming {
    path: PathBuf,
    part: PathBuf,
    file: File,
    hash: Xxh3,
    len: u64,
}

impl Incoming {
    /// Creates the file and the folders above it.
    pub(crate) fn open(path: &str, mode: u32, id: u32) -> Result<Self, AgentError> {
        let path = PathBuf::from(path);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(AgentError::file("create folder", folder))?;
        }
        let mut part = path.clone().into_os_string();
        part.push(format!(".{id}.part"));
        let part = PathBuf::from(part);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&part)
            .map_err(AgentError::file("create", &part))?;
        Ok(Self { path, part, file, hash: Xxh3::new(), len: 0 })
    }

    /// Appends bytes.
    pub(crate) fn data(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        self.file.write_all(bytes).map_err(AgentError::file("write", &self.part))
    }

    /// Checks the hash and puts the file in its place.
    pub(crate) fn end(self, hash: u128) -> Result<Reply, AgentError> {
        let got = self.hash.digest128();
        if got != hash {
            // The answer below says what matters; a leftover part file does no harm.
            let _ = fs::remove_file(&self.part);
            return Err(AgentError::Mismatch(format!(
                "{}: {} bytes arrived with hash {got:032x}, sent was {hash:032x}",
                self.path.display(),
                self.len
            )));
        }
        fs::rename(&self.part, &self.path).map_err(AgentError::file("rename", &self.part))?;
        Ok(Reply::Done { len: self.len, hash })
    }
}

/// Sends a file in chunks.
pub(crate) fn send_file(
    path: &str,
    send: &mut dyn FnMut(Reply) -> Result<(), AgentError>,
) -> Result<Reply, AgentError> {
    let mut file = File::open(path).map_err(AgentError::file("open", path))?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut hash = Xxh3::new();
    let mut sent = 0;
    loop {
        let len = file.read(&mut chunk).map_err(AgentError::file("read", path))?;
        if len == 0 {
            return Ok(Reply::Done { len: sent, hash: hash.digest128() });
        }
        hash.update(&chunk[..len]);
        sent += len as u64;
        send(Reply::Data(chunk[..len].to_vec()))?;
    }
}
