//! A guest's disks: fio with verification, and three file systems with a kernel's sources.

use std::path::{Path, PathBuf};
use std::process::Command;

use lab::Vm;
use lab::{Daemon, Disk, Guest, Image, Lab};

use crate::common::{GIB, LONG, MIB, amount, beside_others, boot, daemon};

fn host(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn guest(lab: &Lab, daemon: &Daemon, packed: bool, more: &[&str]) -> Guest {
    let disk = |port: &str| {
        let mut disk = Disk::vhost_user(daemon.socket("a", port));
        (disk.packed, disk.queues) = (packed, Some(2));
        disk
    };
    let image = ["ext4", "xfs", "btrfs"]
        .into_iter()
        .fold(Image::builder().program("fio").program("blkdiscard"), |i, m| i.module(m))
        .disk_tools();
    let mut builder = Guest::builder("a").memory_mb(512).image(image).disk(disk("d"));
    for port in more {
        builder = builder.disk(disk(port));
    }
    let [guest] = boot(lab, [builder]);
    guest
}

/// Random reads and writes of mixed sizes with checksums, flushes, then discards between writes.
fn fio_verify(guest: &Guest) {
    let len_mib = amount(2 * GIB) / MIB;
    let common = "--filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c \
                  --verify_fatal=1 --randseed=7 --group_reporting --output-format=terse";
    let mix = format!(
        "fio --name=mix --rw=randrw --bsrange=512-64k --bs_unaligned=0 --blockalign=512 \
         --size={len_mib}m --fsync=64 {common}"
    );
    guest.run_for(&mix, LONG).unwrap().ok().unwrap();
    let trim = format!(
        "fio --name=trim --rw=randtrimwrite --bs=64k --size={len_mib}m --fsync=64 {common}"
    );
    guest.run_for(&trim, LONG).unwrap().ok().unwrap();
    // What was discarded in whole reads as zeroes, and its neighbours stay.
    guest
        .run_for(
            "set -e; dd if=/dev/urandom of=/dev/vda bs=1M count=4 conv=fsync 2>/dev/null; \
             before=$(dd if=/dev/vda bs=1M skip=3 count=1 2>/dev/null | sha256sum); \
             blkdiscard -z -o 1048576 -l 2097152 /dev/vda; echo 3 > /proc/sys/vm/drop_caches; \
             dd if=/dev/vda bs=1M skip=1 count=2 2>/dev/null | cmp -n 2097152 - /dev/zero; \
             [ \"$before\" = \"$(dd if=/dev/vda bs=1M skip=3 count=1 2>/dev/null | sha256sum)\" ]",
            LONG,
        )
        .unwrap()
        .ok()
        .unwrap();
}

fn verify_on(format: &str, make: impl Fn(&Path), packed: bool) {
    let _beside = beside_others();
    let lab = Lab::new().unwrap();
    let path = lab.path("disk.img");
    make(&path);
    let options = format!("format = {format:?}\nqueues = 2\npath = {:?}", path.display());
    let daemon = daemon("d").vm(Vm::new("a", "").disk("d", &options)).start(&lab).unwrap();
    fio_verify(&guest(&lab, &daemon, packed, &[]));
}

#[test]
fn fio_verifies_raw() {
    verify_on("raw", |path| drop(host(&format!("truncate -s 5G {}", path.display()))), false);
}

#[test]
fn fio_verifies_raw_on_packed_rings() {
    verify_on("raw", |path| drop(host(&format!("truncate -s 5G {}", path.display()))), true);
}

#[test]
fn fio_verifies_qcow2() {
    let make = |path: &Path| {
        drop(host(&format!("qemu-img create -q -f qcow2 {} 5G", path.display())));
    };
    verify_on("qcow2", make, false);
}

/// An uncompressed archive of kernel sources and the hash of its files' content: the whole tree in
/// a soak run, the core of it otherwise. Kept in the lab's cache.
fn kernel_sources(lab: &Lab) -> (PathBuf, String) {
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let (name, parts) = if soak { ("whole", "") } else { ("core", "kernel lib mm") };
    let folder = lab.cache().root().join(format!("linux-source-{name}"));
    let (tar, hash) = (folder.join("src.tar"), folder.join("hash"));
    if !hash.exists() {
        let root = folder.display();
        host(&format!(
            "rm -rf {root}; mkdir -p {root}; cd {root}; apt-get download -q linux-source-6.1 >&2; \
             dpkg-deb -x *.deb x; cd x; \
             tar xf usr/src/linux-source-6.1.tar.xz \
               $(for p in {parts}; do echo linux-source-6.1/$p; done); \
             tar cf ../src.tar linux-source-6.1; \
             find linux-source-6.1 -type f | LC_ALL=C sort | tr '\\n' '\\0' | xargs -0 cat \
               | sha256sum > ../hash.part; cd ..; rm -rf x *.deb; mv hash.part hash"
        ));
    }
    (tar, std::fs::read_to_string(hash).unwrap().trim().to_owned())
}

fn unpacks_and_checks(guest: &Guest, mkfs: &str, fs: &str, fsck: &str, hash: &str) {
    let script = format!(
        "set -e; {mkfs} /dev/vda; mkdir -p /mnt; mount -t {fs} /dev/vda /mnt; \
         tar xf /dev/vdb -C /mnt; umount /mnt; {fsck} /dev/vda; \
         mount -t {fs} -o ro /dev/vda /mnt; cd /mnt; \
         find linux-source-6.1 -type f | LC_ALL=C sort | tr '\\n' '\\0' | xargs -0 cat | sha256sum"
    );
    let output = guest.run_for(&script, LONG).unwrap().ok().unwrap();
    assert_eq!(output.lines().last().unwrap(), hash, "{output}");
    guest.sh("umount /mnt").unwrap();
}

#[test]
fn kernel_sources_unpack_on_three_file_systems() {
    let _beside = beside_others();
    let lab = Lab::new().unwrap();
    let (tar, hash) = kernel_sources(&lab);
    let path = lab.scratch("disk.img", 8 * GIB).unwrap();
    let raw = |path: &Path, more: &str| {
        format!("format = \"raw\"\nqueues = 2\npath = {:?}\n{more}", path.display())
    };
    let vm = Vm::new("a", "").disk("d", &raw(&path, "")).disk("s", &raw(&tar, "read_only = true"));
    let daemon = daemon("d").vm(vm).start(&lab).unwrap();
    let guest = guest(&lab, &daemon, false, &["s"]);
    assert_eq!(guest.sh("cat /sys/block/vdb/ro").unwrap(), "1");
    unpacks_and_checks(&guest, "mke2fs -q -t ext4 -F", "ext4", "e2fsck -fn", &hash);
    unpacks_and_checks(&guest, "mkfs.xfs -q -f", "xfs", "xfs_repair -n", &hash);
    unpacks_and_checks(&guest, "mkfs.btrfs -q -f", "btrfs", "btrfs check", &hash);
}

#[test]
fn a_disk_grows_while_it_runs() {
    let _beside = beside_others();
    let lab = Lab::new().unwrap();
    let path = lab.scratch("disk.img", 64 * MIB).unwrap();
    let options = format!("format = \"raw\"\nqueues = 2\npath = {:?}", path.display());
    let daemon = daemon("d").vm(Vm::new("a", "").disk("d", &options)).start(&lab).unwrap();
    let guest = guest(&lab, &daemon, false, &[]);
    assert_eq!(guest.sh("cat /sys/block/vda/size").unwrap(), "131072");
    host(&format!("truncate -s 128M {}", path.display()));
    daemon.request("POST", "/v1/vms/a/disks/d/resize", Some(&serde_json::json!({}))).unwrap();
    // The interrupt for the changed configuration is on its way.
    let grown = "until [ $(cat /sys/block/vda/size) = 262144 ]; do sleep 0.05; done";
    guest.sh(grown).unwrap();
    guest.sh("dd if=/dev/zero of=/dev/vda bs=1M seek=127 count=1 conv=fsync").unwrap();
}
