//! Images in qcow2 format for the cases that have one, in memory: the same content for everybody,
//! fresh for each load that writes.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::error::BenchError;
use crate::harness::folder::Folder;

use super::case::{Case, Image};
use crate::harness::process;

/// Bytes of each disk: what the front end uses of one at most, 16,384 clusters.
pub const LEN_BYTES: u64 = 1 << 30;

/// Folder with the source files of images. Holds up to three times their length.
pub struct Images {
    folder: Folder,
    /// Random bytes: the backing file.
    base: PathBuf,
    /// The same as a qcow2 image, each cluster with data, in order. It is the raw disk, too, byte
    /// by byte: of two files of one content one may be a fifth slower, by where its pages are.
    mapped: PathBuf,
    len_bytes: u64,
}

/// The disk of one load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// File of the image.
    pub path: PathBuf,
    /// Raw backing file of the image, in the same folder.
    pub base: Option<PathBuf>,
}

impl Images {
    /// Makes the content in `folder`.
    pub fn new(folder: Folder, len_bytes: u64) -> Result<Images, BenchError> {
        let base = folder.image("base.raw", len_bytes)?;
        let mapped = base.with_file_name("mapped.qcow2");
        let mut convert = qemu_img("convert");
        convert.args(["-f", "raw", "-O", "qcow2"]).arg(&base).arg(&mapped);
        process::run(&mut convert)?;
        Ok(Images { folder, base, mapped, len_bytes })
    }

    /// The disk of a case's next load. The one of the load before, which has ended, is gone then.
    pub fn disk(&self, case: &Case) -> Result<Disk, BenchError> {
        let path = self.folder.path().join("live");
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(BenchError::file("remove", &path, e));
            }
            _ => {}
        }
        let base = (case.image() == Some(Image::Backed)).then(|| self.base.clone());
        match case.image() {
            // As the raw disks that are only read.
            Some(Image::Mapped) if !case.writes() => {
                return Ok(Disk { path: self.mapped.clone(), base });
            }
            Some(Image::Mapped) => {
                std::fs::copy(&self.mapped, &path)
                    .map_err(|e| BenchError::file("copy to", &path, e))?;
            }
            _ => self.create(&path, base.as_deref())?,
        }
        Ok(Disk { path, base })
    }

    fn create(&self, path: &Path, base: Option<&Path>) -> Result<(), BenchError> {
        let mut create = qemu_img("create");
        create.args(["-q", "-f", "qcow2"]);
        if let Some(base) = base {
            create.arg("-b").arg(base).args(["-F", "raw"]);
        }
        create.arg(path).arg(self.len_bytes.to_string());
        process::run(&mut create).map(drop)
    }
}

fn qemu_img(what: &str) -> Command {
    let mut command = process::command("qemu-img", None);
    command.arg(what);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::peers::case;

    const LEN: u64 = 4 << 20;

    fn json(what: &str, disk: &Disk) -> serde_json::Value {
        let mut command = qemu_img(what);
        let text = process::run(command.arg("--output=json").arg(&disk.path)).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn clusters(disk: &Disk) -> u64 {
        json("check", disk)["allocated-clusters"].as_u64().unwrap_or(0)
    }

    #[test]
    fn each_load_that_writes_has_a_fresh_image_with_what_its_case_says() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::new(&dir.path().join("images")).unwrap();
        let images = Images::new(folder, LEN).unwrap();
        let disk = |name: &str| {
            let case = case::ALL.into_iter().find(|c| c.name() == name).unwrap();
            images.disk(&case).unwrap()
        };
        let all = LEN / u64::from(case::CLUSTER_BYTES);
        let read = disk("qcow2_read_4k_d1");
        assert_eq!((read.path.ends_with("mapped.qcow2"), clusters(&read)), (true, all));

        let write = disk("qcow2_write_4k_d1");
        assert_eq!((&write.base, clusters(&write)), (&None, all));
        assert_ne!(write.path, read.path, "nobody writes to what others read");
        let empty = disk("qcow2_alloc_4k_d1");
        assert_eq!((&empty.base, clusters(&empty)), (&None, 0), "not the one before");

        let backed = disk("qcow2_backed_4k_d1");
        assert_eq!(clusters(&backed), 0);
        let info = json("info", &backed);
        assert_eq!(info["backing-filename-format"], "raw");
        assert_eq!(info["virtual-size"], LEN);
        assert_eq!(Path::new(info["backing-filename"].as_str().unwrap()), backed.base.unwrap());
    }
}
