//! Speed of the host's own reads from a disk image.

use std::path::Path;
use std::process::Command;

/// Rate that the host itself gets from an image, past its page cache: no guest can have more. Read
/// only. None where fio cannot tell.
pub fn ceiling(image: &Path) -> Option<String> {
    let sequential = host_fio(image, &["--rw=read", "--bs=1m", "--iodepth=8"])?;
    let random = host_fio(image, &["--rw=randread", "--bs=4k", "--iodepth=32"])?;
    Some(format!(
        "Storage: the host’s own fio (io_uring, O_DIRECT) reads such an image at {:.0} MB/s in \
         1 MiB requests at depth 8, and at {:.0} requests of 4 KiB per second at depth 32.",
        sequential["bw_bytes"].as_f64()? / 1e6,
        random["iops"].as_f64()?
    ))
}

/// The read part of fio's answer.
fn host_fio(image: &Path, load: &[&str]) -> Option<serde_json::Value> {
    let out = Command::new("fio")
        .args(["--name=host", "--direct=1", "--ioengine=io_uring", "--readonly"])
        .args(["--time_based", "--runtime=1", "--output-format=json"])
        .arg(format!("--filename={}", image.display()))
        .args(load)
        .output()
        .ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    let mut answer: serde_json::Value = serde_json::from_str(text.get(text.find('{')?..)?).ok()?;
    Some(answer["jobs"][0]["read"].take())
}
