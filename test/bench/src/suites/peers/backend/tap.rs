//! Two TAP devices in a Linux bridge, without a VM: what the kernel's own way costs at least.

use std::cell::OnceCell;

use crate::harness::error::BenchError;
use crate::harness::process;
use crate::suites::peers::case::{Case, LARGE_FRAME_BYTES, Load, Ring};
use crate::suites::peers::reading::{Program, parse};
use crate::suites::peers::trial::{Backend, NOT_MINE, Running, Trial};

const BRIDGE: &str = "br0";
/// The kernel cuts packets from 64 KiB on into segments, Ethernet header included.
const MAX_FRAME_BYTES: u32 = 65_535;
const TAPS: [&str; 2] = ["tap-a", "tap-b"];

/// The reference; made once, idle devices cost nothing.
#[derive(Default)]
pub struct TapBridge {
    made: OnceCell<()>,
}

impl Backend for TapBridge {
    fn name(&self) -> &'static str {
        "tap-bridge"
    }

    fn is_reference(&self) -> bool {
        true
    }

    fn needs(&self) -> &'static str {
        "nsenter"
    }

    fn refuses(&self, case: &Case) -> Option<&'static str> {
        // There are no rings: once is enough.
        let wanted = matches!(
            case.load,
            Load::Flood { frame_bytes: LARGE_FRAME_BYTES } | Load::RoundTrip { .. }
        );
        if wanted && case.ring == Ring::Split { None } else { NOT_MINE }
    }

    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError> {
        let Trial { bed, case, window, .. } = *trial;
        let none = || BenchError::lab("tap-bridge", "there is no network namespace");
        let net = bed.net.as_ref().ok_or_else(none)?;
        if self.made.get().is_none() {
            net.bridge(BRIDGE).map_err(|e| BenchError::lab("make the bridge", e))?;
            for tap in TAPS {
                net.tap(tap, Some(BRIDGE)).map_err(|e| BenchError::lab("make a TAP", e))?;
            }
            // Where br_netfilter is loaded, frames would take the way through iptables.
            let mut plain = net.command("sh");
            plain.args(["-c", "echo 0 >/proc/sys/net/bridge/bridge-nf-call-iptables"]);
            // Elsewhere there is nothing to switch off.
            let _ = process::run(&mut plain);
            // Made now, and not before.
            let _ = self.made.set(());
        }
        let us = std::env::current_exe().map_err(|e| BenchError::lab("find this program", e))?;
        let (mode, frame_bytes) = match case.load {
            Load::RoundTrip { frame_bytes } => ("rr", frame_bytes),
            Load::Flood { frame_bytes } => ("flood", frame_bytes),
            Load::Read { .. } | Load::Qcow2 { .. } => return Err(none()),
        };
        let mut command = process::command("nsenter", None);
        command.arg(format!("--net={}", net.path().display())).arg(us).arg("tap");
        command.args([
            "--mode",
            mode,
            "--frame-bytes",
            &frame_bytes.min(MAX_FRAME_BYTES).to_string(),
        ]);
        command.args(["--a", TAPS[0], "--b", TAPS[1]]);
        command.arg(format!("--cpus={},{}", bed.back_cpu, bed.front_cpu));
        command.args(["--warmup", &window.warm_up.as_secs_f64().to_string()]);
        command.args(["--secs", &window.length.as_secs_f64().to_string()]);
        let load = Program { command, parse, ends_by_itself: false };
        Ok(Running { processes: Vec::new(), load })
    }
}
