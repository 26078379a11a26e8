//! Random and sequential disk access in a guest, by fio, past the guest's page cache.

use std::time::Duration;

use serde_json::Value;

use super::program::{Modes, Parse, Script, spec};
use crate::harness::runner::{Rate, Spec, Window};

/// Requests in flight of the random case.
const RANDOM_DEPTH: u32 = 32;
/// Requests in flight of the demo's sequential case.
const SEQUENTIAL_DEPTH: u32 = 8;

/// Sequential loads: direction, size and requests in flight, by name.
pub(super) const SEQUENTIAL: [(&str, Direction, u32, u32); 13] = [
    ("disk_seq_1m", Direction::Read, MIB, SEQUENTIAL_DEPTH),
    ("disk_read_128k_d1", Direction::Read, MIB / 8, 1),
    ("disk_read_128k_d8", Direction::Read, MIB / 8, 8),
    ("disk_read_1m_d1", Direction::Read, MIB, 1),
    ("disk_read_1m_d8", Direction::Read, MIB, 8),
    ("disk_read_4m_d1", Direction::Read, 4 * MIB, 1),
    ("disk_read_4m_d8", Direction::Read, 4 * MIB, 8),
    ("disk_write_128k_d1", Direction::Write, MIB / 8, 1),
    ("disk_write_128k_d8", Direction::Write, MIB / 8, 8),
    ("disk_write_1m_d1", Direction::Write, MIB, 1),
    ("disk_write_1m_d8", Direction::Write, MIB, 8),
    ("disk_write_4m_d1", Direction::Write, 4 * MIB, 1),
    ("disk_write_4m_d8", Direction::Write, 4 * MIB, 8),
];
const MIB: u32 = 1 << 20;

/// Direction of a sequential load.
#[derive(Debug, Clone, Copy)]
pub(super) enum Direction {
    Read,
    Write,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// Time before fio counts. It loads 90 MB of libraries, which takes a second under emulation. It
/// runs for as long again before it counts, so that both it and the CPU meter see the steady load
/// only.
const SETTLE: Duration = Duration::from_millis(1300);

/// A disk case by name.
pub(super) fn program(name: &str, modes: &Modes) -> Option<(Spec, Script, Parse)> {
    let (spec, job, parse, what) = random_load(name).or_else(|| sequential_load(name))?;
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

/// A row's names, fio's options, the reading of its answer, and how a row tells it.
type Load = (Spec, String, Parse, String);

fn random_load(name: &str) -> Option<Load> {
    (name == "disk_rand_4k").then(|| {
        (
            spec("disk_rand_4k", "1/s", "request of 4 KiB"),
            format!("--rw=randrw --rwmixread=70 --bs=4k --iodepth={RANDOM_DEPTH} --norandommap"),
            random as Parse,
            format!("70/30 read/write, depth {RANDOM_DEPTH}"),
        )
    })
}

fn sequential_load(name: &str) -> Option<Load> {
    let (name, direction, bytes, depth) = SEQUENTIAL.into_iter().find(|(n, ..)| *n == name)?;
    let operation = match bytes / 1024 {
        128 => "request of 128 KiB",
        1024 => "request of 1 MiB",
        _ => "request of 4 MiB",
    };
    let rw = direction.name();
    let parse: Parse = match direction {
        Direction::Read => |answer| sequential(answer, "read"),
        Direction::Write => |answer| sequential(answer, "write"),
    };
    let job = format!("--rw={rw} --bs={bytes} --iodepth={depth}");
    Some((spec(name, "MB/s", operation), job, parse, format!("{rw}, depth {depth}")))
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

fn sequential(answer: &Value, direction: &str) -> Option<Rate> {
    let part = job(answer)?.get(direction)?;
    let bytes_per_s = part.get("bw_bytes")?.as_f64()?;
    Some(Rate { value: bytes_per_s / 1e6, ops_per_s: part.get("iops")?.as_f64()?, lost: None })
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
        let r = read(ANSWER, |answer| sequential(answer, "read")).unwrap();
        assert_eq!((r.value, r.ops_per_s), (524.288, 700.5));
        let r = read(ANSWER, |answer| sequential(answer, "write")).unwrap();
        assert_eq!((r.value, r.ops_per_s), (3e-6, 300.5));
    }

    #[test]
    fn a_job_that_failed_has_no_rate() {
        let failed = ANSWER.replace("\"error\":0", "\"error\":5");
        let sequential = |answer: &Value| sequential(answer, "read");
        assert!(read(&failed, random).is_none() && read(&failed, sequential).is_none());
    }

    #[test]
    fn the_row_tells_the_mode() {
        let mode = program("disk_rand_4k", &modes()).unwrap().0.mode;
        assert_eq!(mode, "raw, cache=none, 70/30 read/write, depth 32");
        let (spec, script, _) = program("disk_write_4m_d1", &modes()).unwrap();
        assert_eq!(spec.mode, "raw, cache=none, write, depth 1");
        assert!(script(window()).contains("--rw=write --bs=4194304 --iodepth=1 "));
    }
}
