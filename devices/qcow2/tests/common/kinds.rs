//! Kinds of image, as `qemu-img` makes them.

use std::path::Path;
use std::process::Command;

/// A kind of image: how it is made.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// Options of `qemu-img create -o`.
    pub options: &'static str,
    pub len_kib: u64,
    pub backing: Backing,
    /// Filled with data before, by QEMU.
    pub filled: bool,
    /// Internal snapshots taken after that.
    pub snapshots: u32,
    /// Whether its content is compressed.
    pub compressed: bool,
    pub bitmap: bool,
    /// Whether its data is in `data.raw`.
    pub data_file: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    None,
    Raw,
    /// Shorter than the image.
    ShortRaw,
    /// Longer than the image: what is behind its end must never be seen.
    LongRaw,
    Qcow2,
}

const PLAIN: Kind = Kind {
    name: "",
    options: "",
    len_kib: 4096,
    backing: Backing::None,
    filled: false,
    snapshots: 0,
    compressed: false,
    bitmap: false,
    data_file: false,
};

const BITS_1: Kind =
    Kind { name: "bits-1", options: "refcount_bits=1,cluster_size=1k", len_kib: 1024, ..PLAIN };

/// Thirty and some.
pub const KINDS: &[Kind] = &[
    Kind { name: "v3", ..PLAIN },
    Kind { name: "v2", options: "compat=0.10", ..PLAIN },
    Kind { name: "v3-512", options: "cluster_size=512", len_kib: 1024, ..PLAIN },
    Kind { name: "v2-512", options: "compat=0.10,cluster_size=512", len_kib: 1024, ..PLAIN },
    Kind { name: "v3-4k", options: "cluster_size=4k", ..PLAIN },
    Kind { name: "v2-4k-full", options: "compat=0.10,cluster_size=4k", filled: true, ..PLAIN },
    Kind { name: "v3-2m", options: "cluster_size=2M", len_kib: 8192, ..PLAIN },
    Kind { name: "odd-size", options: "cluster_size=16k", len_kib: 1001, ..PLAIN },
    Kind { name: "huge", len_kib: 64 << 30, ..PLAIN },
    Kind { name: "huge-1k", options: "cluster_size=1k", len_kib: 32 << 20, ..PLAIN },
    BITS_1,
    Kind { name: "bits-64", options: "refcount_bits=64,cluster_size=512", len_kib: 700, ..PLAIN },
    Kind { name: "bits-8-lazy", options: "refcount_bits=8,lazy_refcounts=on", ..PLAIN },
    Kind { name: "full", filled: true, ..PLAIN },
    Kind { name: "metadata", options: "preallocation=metadata", ..PLAIN },
    Kind { name: "backed-raw", backing: Backing::Raw, ..PLAIN },
    Kind {
        name: "backed-raw-v2",
        options: "compat=0.10,cluster_size=8k",
        backing: Backing::Raw,
        ..PLAIN
    },
    Kind { name: "backed-short", options: "cluster_size=8k", backing: Backing::ShortRaw, ..PLAIN },
    Kind { name: "backed-long", options: "cluster_size=8k", backing: Backing::LongRaw, ..PLAIN },
    Kind { name: "backed-qcow2", options: "cluster_size=4k", backing: Backing::Qcow2, ..PLAIN },
    Kind { name: "snapshots", filled: true, snapshots: 2, ..PLAIN },
    Kind {
        name: "snapshots-v2",
        options: "compat=0.10,cluster_size=2k",
        filled: true,
        snapshots: 3,
        len_kib: 512,
        ..PLAIN
    },
    Kind { name: "compressed", filled: true, compressed: true, ..PLAIN },
    Kind {
        name: "compressed-zstd",
        options: "compression_type=zstd,cluster_size=8k",
        filled: true,
        compressed: true,
        ..PLAIN
    },
    Kind { name: "extended", options: "extended_l2=on,cluster_size=16k", ..PLAIN },
    Kind { name: "extended-full", options: "extended_l2=on", filled: true, snapshots: 1, ..PLAIN },
    Kind {
        name: "extended-backed",
        options: "extended_l2=on,cluster_size=32k",
        backing: Backing::Raw,
        ..PLAIN
    },
    Kind { name: "bitmap", bitmap: true, filled: true, ..PLAIN },
    Kind { name: "bits-1-compressed", compressed: true, filled: true, ..BITS_1 },
    Kind { name: "data-file", data_file: true, ..PLAIN },
    Kind { name: "data-file-odd", data_file: true, len_kib: 1001, filled: true, ..PLAIN },
    Kind { name: "data-file-raw", data_file: true, options: "data_file_raw=on", ..PLAIN },
    Kind {
        name: "data-file-extended",
        data_file: true,
        options: "extended_l2=on,cluster_size=16k",
        ..PLAIN
    },
    Kind {
        name: "data-file-backed",
        data_file: true,
        options: "cluster_size=8k",
        backing: Backing::ShortRaw,
        ..PLAIN
    },
];

/// Runs a tool of QEMU's; its output when it succeeds.
pub fn qemu(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args:?}: {error}{text}");
    text
}

/// Bytes of the backing file: no sector like another.
pub fn base_data(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 512 * 7 + at % 512 + 1) as u8 | 1).collect()
}

impl Kind {
    pub fn len_bytes(&self) -> u64 {
        self.len_kib << 10
    }

    /// Whether the disk can be made larger while it is served.
    pub fn can_grow(&self) -> bool {
        let is_v2 = self.options.contains("compat=0.10");
        // The L1 table is longer than what one refcount block counts.
        let is_long = self.options.contains("cluster_size=1k") && self.len_kib > 8 << 20;
        let is_shadowed = is_v2 && (self.snapshots > 0 || self.backing == Backing::LongRaw);
        !self.bitmap && !is_long && !is_shadowed
    }

    /// Bytes of the backing file.
    fn backing_len(&self) -> u64 {
        match self.backing {
            Backing::None => 0,
            Backing::ShortRaw => self.len_bytes() / 2 + 512,
            Backing::LongRaw => self.len_bytes() + (100 << 10),
            Backing::Raw | Backing::Qcow2 => self.len_bytes(),
        }
    }

    /// Makes `disk.qcow2` and what it stands on in `dir`.
    pub fn make(&self, dir: &Path) {
        let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
        let image = path("disk.qcow2");
        let size = format!("{}k", self.len_kib);
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if !self.options.is_empty() {
            args.extend(["-o", self.options]);
        }
        let data_file = format!("data_file={}", path("data.raw"));
        if self.data_file {
            args.extend(["-o", &data_file]);
        }
        if self.backing != Backing::None {
            std::fs::write(path("base.raw"), base_data(self.backing_len() as usize)).unwrap();
        }
        match self.backing {
            Backing::None => {}
            Backing::Raw | Backing::ShortRaw | Backing::LongRaw => {
                args.extend(["-b", "base.raw", "-F", "raw"]);
            }
            Backing::Qcow2 => {
                let (raw, base) = (path("base.raw"), path("base.qcow2"));
                qemu("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &base]);
                args.extend(["-b", "base.qcow2", "-F", "qcow2"]);
            }
        }
        args.extend([&*image, &*size]);
        qemu("qemu-img", &args);
        if self.compressed {
            std::fs::write(path("full.raw"), base_data(self.len_bytes() as usize)).unwrap();
            let mut args = vec!["convert", "-c", "-f", "raw", "-O", "qcow2"];
            if !self.options.is_empty() {
                args.extend(["-o", self.options]);
            }
            qemu("qemu-img", &[&args[..], &[&path("full.raw"), &image]].concat());
        } else if self.filled {
            let write = format!("write -P 0x5a 0 {}k", self.len_kib);
            qemu("qemu-io", &["-f", "qcow2", "-c", &write, &image]);
        }
        for n in 0..self.snapshots {
            qemu("qemu-img", &["snapshot", "-c", &format!("s{n}"), &image]);
            let write = format!("write -P {} {}k 64k", n + 1, n * 100);
            qemu("qemu-io", &["-f", "qcow2", "-c", &write, &image]);
        }
        if self.bitmap {
            qemu("qemu-img", &["bitmap", "--add", &image, "b0"]);
        }
    }
}
