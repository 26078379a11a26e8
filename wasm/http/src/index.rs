//! The index: which path has which object. A log in the file `index`, and a map of it in memory.
//!
//! Each record is durable before the next is written. So after a crash at most the last one is not
//! whole, and then nobody was told of it: it is cut off. A record that is wrong elsewhere is
//! damage, which is told and not mended.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use guest_abi::module_call::log;
use sdk::{Errno, File, Host, open};
use xxhash_rust::xxh3::xxh3_64;

use crate::path::MAX_PATH_BYTES;

/// The file, and what becomes it.
const NAME: &str = "index";
const NEW_NAME: &str = "index-new";
/// First bytes of the file.
const MAGIC: &[u8; 8] = b"MLRHTTP1";
/// Bytes before a record: its length, and its hash.
const FRAME_BYTES: usize = 12;
/// Behind a path: id, length, hash, date.
const OBJECT_BYTES: usize = 40;
const MAX_RECORD_BYTES: usize = FRAME_BYTES + OBJECT_BYTES + MAX_PATH_BYTES;
/// Bytes beyond those needed after which the file is written anew.
const SPARE_BYTES: u64 = 256 << 10;

/// Object of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Names its file.
    pub id: u64,
    /// Bytes.
    pub len: u64,
    /// XXH3-128 of them.
    pub hash: u128,
    /// Time when it was changed, in seconds since 1970; 0: nobody said.
    pub modified: u64,
}

impl Object {
    /// Value of its `ETag`.
    pub fn tag(&self) -> String {
        format!("\"{:032x}\"", self.hash)
    }
}

/// Index: the objects by their paths, kept in a file.
#[derive(Debug)]
pub struct Index {
    map: BTreeMap<Box<[u8]>, Object>,
    file: File,
    len: u64,
    /// Bytes of the records that count.
    needed: u64,
    /// The file's end is not known any more.
    is_broken: bool,
}

impl Index {
    /// Reads it; makes it if it is not there.
    ///
    /// # Errors
    /// The storage failed, or the file is damaged.
    pub fn open(host: &mut dyn Host) -> Result<Self, Errno> {
        let file = host.open(NAME, open::CREATE)?;
        let len = usize::try_from(host.len(file)?).map_err(|_| Errno::NOMEM)?;
        let mut bytes = vec![0; len];
        let read = host.read(file, 0, &mut bytes)?;
        bytes.truncate(read);
        let mut index = Self { map: BTreeMap::new(), file, len: 0, needed: 0, is_broken: false };
        if bytes.len() < MAGIC.len() && MAGIC.starts_with(&bytes) {
            host.truncate(file, 0)?;
            host.append(file, MAGIC)?;
            host.sync(file)?;
            (index.len, index.needed) = (MAGIC.len() as u64, MAGIC.len() as u64);
            return Ok(index);
        }
        index.replay(host, &bytes)?;
        index.shrink(host)?;
        Ok(index)
    }

    fn replay(&mut self, host: &mut dyn Host, bytes: &[u8]) -> Result<(), Errno> {
        let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return Err(damaged(host, 0)) };
        self.needed = MAGIC.len() as u64;
        while let Some((record, after)) = split(rest) {
            self.apply(record).ok_or_else(|| damaged(host, bytes.len() - rest.len()))?;
            rest = after;
        }
        self.len = (bytes.len() - rest.len()) as u64;
        if rest.len() > MAX_RECORD_BYTES {
            return Err(damaged(host, self.len as usize));
        }
        if !rest.is_empty() {
            host.log(log::INFO, "index: the last record is not whole; it is cut off");
            host.truncate(self.file, self.len)?;
            host.sync(self.file)?;
        }
        Ok(())
    }

    /// A path and its object, or a path that has none any more. None: it is neither.
    fn apply(&mut self, record: &[u8]) -> Option<()> {
        let (path_len, record) = record.split_first_chunk::<2>()?;
        let path_len = usize::from(u16::from_le_bytes(*path_len));
        let (path, object) = record.split_at_checked(path_len)?;
        let object = if object.is_empty() { None } else { Some(decode(object)?) };
        self.change(path, object);
        Some(())
    }

    fn change(&mut self, path: &[u8], object: Option<Object>) -> Option<Object> {
        let bytes = record_bytes(path) as u64;
        let old = match object {
            Some(object) => {
                self.needed += bytes;
                self.map.insert(path.into(), object)
            }
            None => self.map.remove(path),
        };
        if old.is_some() {
            self.needed -= bytes;
        }
        old
    }

    /// A path's object.
    pub fn get(&self, path: &[u8]) -> Option<&Object> {
        self.map.get(path)
    }

    /// Number of paths.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// All objects.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.map.values()
    }

    /// Gives a path an object, or none, durably; returns the one that it had.
    ///
    /// # Errors
    /// The storage failed: nothing has changed.
    pub fn set(
        &mut self,
        host: &mut dyn Host,
        path: &[u8],
        object: Option<Object>,
    ) -> Result<Option<Object>, Errno> {
        if self.is_broken {
            self.cut(host)?;
        }
        let mut record = Vec::new();
        encode(&mut record, path, object.as_ref());
        let written = host.append(self.file, &record).and_then(|_| host.sync(self.file));
        if let Err(errno) = written {
            self.is_broken = true;
            // At best at once; else before the next record.
            let _ = self.cut(host);
            return Err(errno);
        }
        self.len += record.len() as u64;
        let old = self.change(path, object);
        // The record counts already: that there is no room for a shorter index changes nothing.
        let _ = self.shrink(host);
        Ok(old)
    }

    fn cut(&mut self, host: &mut dyn Host) -> Result<(), Errno> {
        host.truncate(self.file, self.len)?;
        host.sync(self.file)?;
        self.is_broken = false;
        Ok(())
    }

    /// Writes the index anew when most of it does not count any more.
    fn shrink(&mut self, host: &mut dyn Host) -> Result<(), Errno> {
        if self.len < 2 * self.needed + SPARE_BYTES {
            return Ok(());
        }
        let mut bytes = MAGIC.to_vec();
        self.map.iter().for_each(|(path, object)| encode(&mut bytes, path, Some(object)));
        let new = host.open(NEW_NAME, open::CREATE | open::TRUNCATE)?;
        let written = host
            .append(new, &bytes)
            .and_then(|_| host.sync(new))
            .and_then(|()| host.rename(NEW_NAME, NAME));
        if let Err(errno) = written {
            host.close(new);
            return Err(errno);
        }
        host.close(self.file);
        (self.file, self.len) = (new, bytes.len() as u64);
        Ok(())
    }
}

fn damaged(host: &mut dyn Host, at: usize) -> Errno {
    host.log(log::ERROR, &format!("index: damaged at byte {at}"));
    Errno::BADMSG
}

fn record_bytes(path: &[u8]) -> usize {
    FRAME_BYTES + 2 + path.len() + OBJECT_BYTES
}

fn encode(into: &mut Vec<u8>, path: &[u8], object: Option<&Object>) {
    let start = into.len();
    into.resize(start + FRAME_BYTES, 0);
    into.extend_from_slice(&(path.len() as u16).to_le_bytes());
    into.extend_from_slice(path);
    if let Some(object) = object {
        into.extend_from_slice(&object.id.to_le_bytes());
        into.extend_from_slice(&object.len.to_le_bytes());
        into.extend_from_slice(&object.hash.to_le_bytes());
        into.extend_from_slice(&object.modified.to_le_bytes());
    }
    let (len, check) = (into.len() - start - FRAME_BYTES, xxh3_64(&into[start + FRAME_BYTES..]));
    into[start..start + 4].copy_from_slice(&(len as u32).to_le_bytes());
    into[start + 4..start + FRAME_BYTES].copy_from_slice(&check.to_le_bytes());
}

fn decode(bytes: &[u8]) -> Option<Object> {
    let bytes: &[u8; OBJECT_BYTES] = bytes.try_into().ok()?;
    let number = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?));
    let hash = u128::from(number(16)?) | u128::from(number(24)?) << 64;
    Some(Object { id: number(0)?, len: number(8)?, hash, modified: number(32)? })
}

/// A record and what follows it; none: there is no whole one.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let (check, rest) = rest.split_first_chunk::<8>()?;
    let (record, after) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    (xxh3_64(record) == u64::from_le_bytes(*check)).then_some((record, after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdk::testing::{Call, TestHost};

    fn object(id: u64) -> Option<Object> {
        Some(Object { id, len: id * 2, hash: u128::from(id) << 64 | 5, modified: 7 })
    }

    #[test]
    fn what_was_said_survives_any_crash() {
        for seed in 0..200 {
            let mut host = TestHost::new(seed);
            let mut index = Index::open(&mut host).unwrap();
            index.set(&mut host, b"/a", object(1)).unwrap();
            index.set(&mut host, b"/b", object(2)).unwrap();
            assert_eq!(index.set(&mut host, b"/a", None).unwrap(), object(1));
            host.die_after(seed % 3);
            let said = index.set(&mut host, b"/c", object(3));
            host.crash();
            let index = Index::open(&mut host).unwrap();
            assert_eq!((index.get(b"/a"), index.get(b"/b").copied()), (None, object(2)));
            assert!(index.get(b"/c").is_some() || said.is_err());
        }
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        for call in [Call::Append, Call::Sync] {
            let mut host = TestHost::new(1);
            let mut index = Index::open(&mut host).unwrap();
            host.fail(Some(call), 0, 2, Errno::NOSPC);
            assert_eq!(index.set(&mut host, b"/a", object(1)), Err(Errno::NOSPC));
            assert_eq!(index.get(b"/a"), None);
            host.heal();
            index.set(&mut host, b"/b", object(2)).unwrap();
            let index = Index::open(&mut host).unwrap();
            assert_eq!((index.len(), index.get(b"/b").copied()), (1, object(2)));
        }
    }

    #[test]
    fn it_stays_short_and_damage_is_told() {
        let mut host = TestHost::new(1);
        let mut index = Index::open(&mut host).unwrap();
        for n in 0..20_000 {
            index.set(&mut host, b"/again", object(n)).unwrap();
        }
        assert!(host.bytes("index").unwrap().len() < 2 * SPARE_BYTES as usize);
        assert_eq!(Index::open(&mut host).unwrap().get(b"/again").copied(), object(19_999));
        let mut bytes = host.bytes("index").unwrap().clone();
        bytes[100] ^= 1;
        bytes.extend([0; MAX_RECORD_BYTES]);
        host.put("index", &bytes);
        assert_eq!(Index::open(&mut host).unwrap_err(), Errno::BADMSG);
        host.put("index", b"something else");
        assert_eq!(Index::open(&mut host).unwrap_err(), Errno::BADMSG);
    }
}
