//! Traffic to others than members: what the hook costs packets that it does not take.
//!
//! Round trips with the host's end of the TAP bridge, as PIVOT's tables III and IV have them, and
//! datagrams to an address behind a device that drops everything, so that little but the stack
//! and the hook is measured. Each with `millrace_net` loaded and not, by turns.

use std::time::Duration;

use super::bed::{Bed, HOST, sh};
use super::case::{Case, Test};
use super::route::{Route, Sample};
use super::{HookLoad, Measured, OthersLoad, Setup, with_repeat};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::runner::GRACE;
use crate::harness::runner::{Window, metered};

/// Address at which nobody is.
const NOBODY: &str = "10.9.9.9:9";
const NOBODYS_NET: &str = "ip link add nobody type dummy && ip link set nobody up && \
     ip addr add 10.9.9.1/24 dev nobody";
/// Length of a datagram, and of a message.
const BYTES: u32 = 64;
/// From the start of the guest's program until CPU time counts.
const SETTLE: Duration = Duration::from_millis(150);
/// Longest time of one datagram: an emulated guest takes a tenth of it.
const PACKET: Duration = Duration::from_micros(100);

/// Name of a side, as in results.
pub fn side(hook: bool) -> &'static str {
    if hook { "hook" } else { "no-hook" }
}

/// The row's name.
pub fn case(test: Test) -> String {
    format!("others_{}_{BYTES}", test.name())
}

/// The row of [`HookLoad`]s.
pub const HOOK_CASE: &str = "hook_udp_64";

/// Everything once.
pub fn round(
    bed: &Bed,
    setup: &Setup,
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<(), BenchError> {
    if round == 0 {
        prepare(bed)?;
    }
    // The channel's polling may have its effect on nobody else.
    bed.take(Route::TapBridge)?;
    for hook in order_for_round(&[true, false], round) {
        // It is loaded before and after.
        if !hook {
            bed.load_hook(false)?;
        }
        for test in [Test::TcpRr, Test::UdpRr] {
            let name = case(test);
            let load = || round_trips(bed, test, setup.length);
            let done = with_repeat((&name, side(hook)), round, measured, progress, load);
            let Some(sample) = done else { continue };
            progress.step(&format!("{name}, {}: {:.0}/s", side(hook), sample.value));
            measured.others.push(OthersLoad { round, test, hook, sample });
        }
        let load = || datagrams(bed, setup.hook_packets);
        let done = with_repeat((HOOK_CASE, side(hook)), round, measured, progress, load);
        if let Some(packet_ns) = done {
            progress.step(&format!("{HOOK_CASE}, {}: {packet_ns:.0} ns", side(hook)));
            measured.hook.push(HookLoad { round, hook, packet_ns });
        }
        if !hook {
            bed.load_hook(true)?;
        }
    }
    Ok(())
}

/// A device that drops everything, in the client, and a server on the host.
fn prepare(bed: &Bed) -> Result<(), BenchError> {
    sh(bed.guests()[0], &format!("modprobe dummy && {NOBODYS_NET}"))?;
    let failed = |e: &dyn std::fmt::Display| BenchError::lab("start a server on the host", e);
    let server = bed.lab().net().inside(|| lab_agent::tools::rr::server(lab_agent::tools::RR_PORT));
    // Its threads serve on without it.
    server.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
    Ok(())
}

fn round_trips(bed: &Bed, test: Test, length: Duration) -> Result<Sample, BenchError> {
    let kind = if test == Test::TcpRr { "tcp" } else { "udp" };
    let total = SETTLE + length;
    let script = format!("exec agent rr {kind} {HOST} {:.2} {BYTES}", total.as_secs_f64());
    let accounts = bed.accounts(Route::TapBridge);
    let load = || bed.tool(&script, total + GRACE);
    let (answer, usage) = metered(Window { settle: SETTLE, length }, &accounts, load)?;
    let read = Case::new(test, BYTES).read(&answer);
    let (mut sample, ops_per_s, _) =
        read.ok_or_else(|| BenchError::lab(script, format!("it answered {answer}")))?;
    sample.cpu_us_per_op = usage.side * 1e6 / ops_per_s;
    sample.foreign = usage.foreign;
    Ok(sample)
}

fn datagrams(bed: &Bed, count: u32) -> Result<f64, BenchError> {
    let script = format!("exec agent udp-send {NOBODY} {count} {BYTES}");
    let answer = bed.tool(&script, PACKET * count + GRACE)?;
    let ns = answer["ns_p50"].as_f64().filter(|ns| *ns > 0.0);
    ns.ok_or_else(|| BenchError::lab(script, format!("it answered {answer}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_short_names() {
        assert_eq!(case(Test::TcpRr), "others_tcp_rr_64");
        assert_eq!((side(true), side(false)), ("hook", "no-hook"));
        assert!(HOOK_CASE.ends_with(&BYTES.to_string()));
    }
}
