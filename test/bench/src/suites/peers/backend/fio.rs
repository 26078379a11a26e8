//! Load by fio on the disk's file itself: what a device-bound disk can give at all.

use crate::harness::error::BenchError;
use crate::harness::process;
use crate::suites::peers::case::{Case, Load, Medium};
use crate::suites::peers::reading::{Program, Reading};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

/// No back end: the reference.
pub struct Fio;

impl Backend for Fio {
    fn name(&self) -> &'static str {
        "fio"
    }

    fn is_reference(&self) -> bool {
        true
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        if case.medium() == Some(Medium::Disk) { None } else { NOT_MINE }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, window, .. } = *trial;
        let depth = if let Load::Read { depth, .. } = case.load { depth } else { 1 };
        let mut command = process::command("fio", None);
        command.args(["--name=raw", "--ioengine=io_uring", "--direct=1", "--readonly"]);
        command.args(["--rw=randread", "--bs=4k", "--thread", "--time_based"]);
        command.args(["--output-format=json", "--percentile_list=50:99"]);
        // Of the whole request: this kernel may be stopped by its hypervisor, for the device, while
        // it submits, and then finds the answer at once.
        command.args(["--lat_percentiles=1", "--clat_percentiles=0"]);
        command.arg(format!("--iodepth={depth}")).arg(format!("--cpus_allowed={}", bed.back_cpu));
        command.arg(format!("--filename={}", bed.disk_file.display()));
        command.arg(format!("--ramp_time={}ms", window.warm_up.as_millis()));
        command.arg(format!("--runtime={}ms", window.length.as_millis()));
        let load = Program { command, parse, ends_by_itself: false };
        Ok(Running { processes: Vec::new(), load })
    }
}

fn parse(text: &str) -> Option<Reading> {
    let answer: serde_json::Value = serde_json::from_str(text.get(text.find('{')?..)?).ok()?;
    let (job, read) = (&answer["jobs"][0], &answer["jobs"][0]["read"]);
    if job["error"].as_i64() != Some(0) {
        return None;
    }
    let busy = (job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?) / 100.0;
    let ops_per_s = read["iops"].as_f64()?;
    let percentile = |name: &str| read["lat_ns"]["percentile"][name].as_f64();
    Some(Reading {
        ops: read["total_ios"].as_f64()?,
        ops_per_s,
        bytes_per_s: read["bw_bytes"].as_f64()?,
        seconds: read["runtime"].as_f64()? / 1e3,
        p50_ns: percentile("50.000000"),
        p99_ns: percentile("99.000000"),
        cpu_us_per_op: Some(busy * 1e6 / ops_per_s),
        ..Reading::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_fios_answer() {
        let text = r#"fio: warning
            {"jobs":[{"error":0,"usr_cpu":1.5,"sys_cpu":0.5,"read":{"total_ios":10,"iops":5.0,"bw_bytes":20480,"runtime":2000,
            "clat_ns":{"percentile":{"99.000000":1}},
            "lat_ns":{"percentile":{"50.000000":900,"99.000000":4000}}}}]}"#;
        let r = parse(text).unwrap();
        assert_eq!((r.ops_per_s, r.seconds, r.p99_ns), (5.0, 2.0, Some(4000.0)));
        assert_eq!(r.cpu_us_per_op, Some(4000.0));
        assert_eq!(parse(&text.replace("\"error\":0", "\"error\":5")), None);
    }
}
