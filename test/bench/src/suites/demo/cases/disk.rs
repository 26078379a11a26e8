//! Random and sequential disk access in a guest, by fio, past the guest's page cache.

use std::time::Duration;

use serde_json::Value;

use super::program::{Modes, Parse, Script, spec};
use crate::harness::runner::{Rate, Spec, Window};

/// Requests in flight of the random case.
const RANDOM_DEPTH: u32 = 32;
/// Requests in flight of the sequential case.
const SEQUENTIAL_DEPTH: u32 = 8;

/// Time before fio counts. It loads 90 MB of libraries, which takes a second under emulation. It
/// runs for as long again before it counts, so that both it and the CPU meter see the steady load
/// only.
const SETTLE: Duration = Duration::from_millis(1300);

/// A disk case by name.
pub(super) fn program(name: &str, modes: &Modes) -> Option<(Spec, Script, Parse)> {
    let (spec, job, parse, what): (Spec, String, Parse, String) = match name {
        "disk_rand_4k" => (
            spec("disk_rand_4k", "1/s", "request of 4 KiB"),
            format!("--rw=randrw --rwmixread=70 --bs=4k --iodepth={RANDOM_DEPTH} --norandommap"),
            random,
            format!("70/30 read/write, depth {RANDOM_DEPTH}"),
        ),
        "disk_seq_1m" => (
            spec("disk_seq_1m", "MB/s", "request of 1 MiB"),
            format!("--rw=read --bs=1m --iodepth={SEQUENTIAL_DEPTH}"),
            sequential,
            format!("read, depth {SEQUENTIAL_DEPTH}"),
        ),
        _ => return None,
    };
    let (path, len) = (modes.disk_path.clone(), modes.disk_len_bytes);
    let script = move |window: Window| {
        let (ramp, length) = (window.settle.as_millis(), window.length.as_millis());
        format!(
            "exec fio --name=load --filename={path} --size={len} --direct=1 --ioengine=libaio \
             --thread --randrepeat=1 {job} --time_based --ramp_time={ramp}ms --runtime={length}ms \
             --output-format=json"
        )
    };
    let mode = format!("{}, {what}", modes.disk);
    // The floor is one of requests per second. 1 MiB at a time the storage itself is the limit, for
    // both sides: see the host's own rates in the report.
    let (target, aim) = if name == "disk_rand_4k" { (Some(1.1), Some(1.5)) } else { (None, None) };
    let (ours, peer) = ("vhost-user-blk", "qemu-virtio-blk");
    let spec = Spec { target, aim, ours, peer, mode, settle: SETTLE, ..spec };
    Some((spec, Box::new(script), parse))
}

fn job(answer: &Value) -> Option<&Value> {
    let job = answer.get("jobs")?.get(0)?;
    (job.get("error")?.as_i64()? == 0).then_some(job)
}

fn random(answer: &Value) -> Option<Rate> {
    let iops = |direction| job(answer)?.get(direction)?.get("iops")?.as_f64();
    let sum = iops("read")? + iops("write")?;
    Some(Rate { value: sum, ops_per_s: sum, lost: None })
}

fn sequential(answer: &Value) -> Option<Rate> {
    let read = job(answer)?.get("read")?;
    let bytes_per_s = read.get("bw_bytes")?.as_f64()?;
    Some(Rate { value: bytes_per_s / 1e6, ops_per_s: read.get("iops")?.as_f64()?, lost: None })
}

#[cfg(test)]
mod tests {
    use super::super::make;
    use super::super::program::read;
    use super::super::tests::{Canned, modes, window};
    use super::*;
    use crate::harness::runner::Side;

    const ANSWER: &str = r#"fio: note before the JSON
{"fio version":"fio-3.33","jobs":[{"jobname":"load","error":0,
 "read":{"io_bytes":1,"bw_bytes":524288000,"iops":700.5},
 "write":{"io_bytes":1,"bw_bytes":3,"iops":300.5}}]}"#;

    #[test]
    fn the_script_bypasses_caches_and_names_the_disk() {
        let shell = Canned::new(ANSWER);
        let rate = make("disk_rand_4k", &shell, &modes()).unwrap().run(Side::Peer, window());
        assert_eq!(rate.unwrap().value, 1001.0);
        let seen = &shell.seen.borrow()[0];
        for part in [
            "peer: exec fio",
            "--filename=/dev/vda --size=268435456 --direct=1",
            "--rw=randrw --rwmixread=70 --bs=4k --iodepth=32",
            "--ramp_time=500ms --runtime=2000ms",
        ] {
            assert!(seen.contains(part), "lacks {part}: {seen}");
        }
    }

    #[test]
    fn answers_become_rates() {
        let r = read(ANSWER, sequential).unwrap();
        assert_eq!((r.value, r.ops_per_s), (524.288, 700.5));
    }

    #[test]
    fn a_job_that_failed_has_no_rate() {
        let failed = ANSWER.replace("\"error\":0", "\"error\":5");
        assert!(read(&failed, random).is_none() && read(&failed, sequential).is_none());
    }

    #[test]
    fn the_row_tells_the_mode() {
        let mode = program("disk_rand_4k", &modes()).unwrap().0.mode;
        assert_eq!(mode, "raw, cache=none, 70/30 read/write, depth 32");
    }
}
