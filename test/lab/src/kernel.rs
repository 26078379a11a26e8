//! Debian's cloud kernels, unpacked from their packages into the cache.

use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::modules::ModuleTable;
use crate::process::run;
use crate::sources::{OLD_RELEASE, Sources};
use crate::{Cache, LabError, apt};

/// Kernel that a guest boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelChoice {
    /// Debian 12's own kernel.
    #[default]
    V6_1,
    /// The newer kernel that the same archive carries.
    V6_12,
    /// The oldest kernel that Debian's mirrors still have: that of Debian 11.
    V5_10,
}

impl KernelChoice {
    /// Kernels of Debian 12, for which Millrace's own kernel modules are built.
    pub const CURRENT: [Self; 2] = [Self::V6_1, Self::V6_12];
    /// All of them.
    pub const ALL: [Self; 3] = [Self::V6_1, Self::V6_12, Self::V5_10];

    fn series(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::V5_10 => "5.10",
        }
    }
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.series())
    }
}

impl FromStr for KernelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|choice| choice.series() == text)
            .ok_or_else(|| format!("no kernel {text:?}: 6.1, 6.12 or 5.10"))
    }
}

/// Description of an unpacked kernel in the cache.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct About {
    package: String,
    version: String,
    release: String,
}

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    folder: PathBuf,
    about: About,
}

impl Kernel {
    /// The kernel of a choice: what the cache has, or else the newest the package sources offer.
    ///
    /// # Errors
    /// It is in neither place; the network or the disk fails.
    pub fn get(cache: &Cache, choice: KernelChoice) -> Result<Self, LabError> {
        let folder = cache.get(&format!("linux-{choice}"), |part| fetch(choice, part))?;
        let path = folder.join("about.json");
        let what = format!("read {}", path.display());
        let text = fs::read(&path).map_err(LabError::io(&what))?;
        let about = serde_json::from_slice(&text)
            .map_err(|error| LabError::Refused(format!("{what}: {error}; run `lab clean`")))?;
        Ok(Self { folder, about })
    }

    /// Debian's package name.
    #[must_use]
    pub fn package(&self) -> &str {
        &self.about.package
    }

    /// Debian's package version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.about.version
    }

    /// Release, as `uname -r` prints it in the guest.
    #[must_use]
    pub fn release(&self) -> &str {
        &self.about.release
    }

    /// The uncompressed kernel; QEMU enters it by its PVH note, which saves the unpacking.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// The kernel as its package has it, for boot loaders (`bzImage`).
    #[must_use]
    pub fn compressed_image(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    /// The folder that holds `kernel/` and the tables of `depmod`; modules are uncompressed.
    #[must_use]
    pub fn modules_folder(&self) -> PathBuf {
        self.folder.join("lib/modules").join(&self.about.release)
    }

    /// The dependency tables.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn modules(&self) -> Result<ModuleTable, LabError> {
        ModuleTable::read(&self.modules_folder())
    }
}

/// Numbers of a package name, for "which is newest".
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// The newest signed cloud kernel of a series among package names.
fn newest(names: &[String], series: &str) -> Option<String> {
    let start = format!("linux-image-{series}.");
    names
        .iter()
        .filter(|name| name.starts_with(&start) && name.ends_with("-cloud-amd64"))
        .max_by_key(|name| numbers(name))
        .cloned()
}

/// Unpacks the newest package of a series; its name and version.
fn unpack(choice: KernelChoice, into: &Path) -> Result<(String, String), LabError> {
    const NAMES: &str = "^linux-image-.*cloud-amd64$";
    let download = into.join("download");
    let newest = |names: &[String]| {
        newest(names, choice.series()).ok_or_else(|| LabError::Missing {
            what: format!("a linux-image-{choice}.*-cloud-amd64 package"),
            remedy: "the configured package sources do not carry this series".into(),
        })
    };
    if choice == KernelChoice::V5_10 {
        fs::create_dir_all(&download)
            .map_err(LabError::io(format!("create {}", download.display())))?;
        let sources = Sources::open(&download, OLD_RELEASE)?;
        let package = newest(&sources.search(NAMES)?)?;
        let version = sources.unpack(&[&package], into)?;
        return Ok((package, version));
    }
    let package = newest(&apt::search(NAMES)?)?;
    let version = apt::unpack(&package, &download, into)?;
    Ok((package, version))
}

fn fetch(choice: KernelChoice, into: &Path) -> Result<(), LabError> {
    let (package, version) = unpack(choice, into)?;
    let release = package.trim_start_matches("linux-image-").to_owned();
    let compressed = into.join(format!("boot/vmlinuz-{release}"));
    let bytes =
        fs::read(&compressed).map_err(LabError::io(format!("read {}", compressed.display())))?;
    let vmlinux = decompress(payload(&bytes)?)?;
    let write = |name: &str, bytes: &[u8]| {
        let path = into.join(name);
        fs::write(&path, bytes).map_err(LabError::io(format!("write {}", path.display())))
    };
    write("vmlinux", &vmlinux)?;
    write("vmlinuz", &bytes)?;
    let modules = into.join("lib/modules").join(&release);
    // Decompressed once here instead of at every load in a slow guest.
    run(Command::new("find")
        .arg(&modules)
        .args(["-name", "*.ko.xz", "-exec", "xz", "-dq"])
        .args(["{}", "+"]))?;
    run(Command::new(apt::need("depmod")?).arg("-b").arg(into).arg(&release))?;
    for useless in ["boot", "usr", "download"] {
        crate::cache::remove(&into.join(useless))?;
    }
    let about = About { package, version, release };
    let about = serde_json::to_vec_pretty(&about)
        .map_err(|error| LabError::Refused(format!("about.json: {error}")))?;
    write("about.json", &about)
}

/// The compressed kernel inside a bzImage (kernel documentation, `arch/x86/boot`, protocol 2.08:
/// `setup_sects` at 0x1f1, `payload_offset` at 0x248, `payload_length` at 0x24c).
fn payload(image: &[u8]) -> Result<&[u8], LabError> {
    let bad = |what: &str| LabError::Refused(format!("vmlinuz: {what}"));
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize)
    };
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(bad("no boot protocol header at 0x202"));
    }
    let sectors = usize::from(*image.get(0x1f1).ok_or_else(|| bad("too short"))?);
    let (Some(offset), Some(len)) = (word(0x248), word(0x24c)) else {
        return Err(bad("too short"));
    };
    let start = (sectors + 1) * 512 + offset;
    // The last four bytes are the uncompressed length, which no decompressor expects.
    start
        .checked_add(len)
        .and_then(|end| image.get(start..end.checked_sub(4)?))
        .ok_or_else(|| bad("payload outside the file"))
}

/// Decompresses by the first bytes' magic with the host's program.
fn decompress(payload: &[u8]) -> Result<Vec<u8>, LabError> {
    let program = match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => "lz4",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        [0x1f, 0x8b, ..] => "gzip",
        _ => return Err(LabError::Refused("vmlinuz: unknown compression".into())),
    };
    let mut child = Command::new(apt::need(program)?)
        .arg("-dcq")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(LabError::io(format!("start {program}")))?;
    let input = child.stdin.take();
    let output = std::thread::scope(|scope| {
        scope.spawn(move || {
            // A decompressor that stops early says so by its exit code.
            if let Some(mut input) = input {
                let _ = input.write_all(payload);
            }
        });
        child.wait_with_output()
    })
    .map_err(LabError::io(format!("run {program}")))?;
    if !output.status.success() || output.stdout.get(..4) != Some(b"\x7fELF") {
        return Err(LabError::Refused(format!("{program}: {}; no ELF kernel", output.status)));
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_signed_package_of_the_series_is_taken() {
        let names: Vec<String> = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-dbg",
            "linux-image-6.1.0-58-cloud-amd64-unsigned",
            "linux-image-6.12.9+deb12-cloud-amd64",
            "linux-image-6.12.111+deb12-cloud-amd64",
            "linux-image-6.12-cloud-amd64",
        ]
        .map(String::from)
        .to_vec();
        assert_eq!(newest(&names, "6.1").unwrap(), "linux-image-6.1.0-56-cloud-amd64");
        assert_eq!(newest(&names, "6.12").unwrap(), "linux-image-6.12.111+deb12-cloud-amd64");
        assert_eq!(newest(&names, "6.13"), None);
    }

    #[test]
    fn a_payload_outside_the_file_is_refused() {
        let mut image = vec![0; 2048];
        assert!(payload(&image).is_err());
        assert!(payload(&image[..10]).is_err());
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&104u32.to_le_bytes());
        assert_eq!(payload(&image).unwrap().len(), 100);
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(payload(&image).is_err());
    }
}
