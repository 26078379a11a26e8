//! A made-up run for this module's tests: the channel makes 3,000 round trips a second and the TAP
//! 1,000, each round faster than the one before.

use std::time::Duration;

use lab::KernelChoice;

use super::case::{Case, SIZES, Test};
use super::counters::Counters;
use super::programs::Program;
use super::{HookLoad, Load, Measured, OthersLoad, ProgramLoad, Route, Sample, Setup};

pub fn setup() -> Setup {
    let cases = Test::ALL.iter().flat_map(|test| SIZES.map(|size| Case::new(*test, size)));
    Setup {
        rounds: 3,
        length: Duration::from_millis(600),
        cases: cases.collect(),
        ways: Route::ALL.to_vec(),
        hook_packets: 1_000_000,
        programs: vec![Program::Redis],
        poll_us: 1_000,
        vcpus: 1,
        pinned: true,
        patience: Duration::ZERO,
        kernel: KernelChoice::V6_1,
        millrace: "millrace".into(),
        out: "out".into(),
    }
}

/// How much faster than the TAP.
fn speed(way: Route) -> f64 {
    match way {
        Route::TapBridge => 1.0,
        Route::TapBridgeBusy | Route::TapVhost | Route::Switch => 1.25,
        Route::OvsNormal => 0.5,
        Route::Loopback => 2.0,
        Route::ChannelCopy => 1.5,
        Route::Channel => 2.0,
        Route::ChannelPoll => 3.0,
        Route::ChannelBusy => 4.0,
    }
}

fn sample(round: u32, way: Route, case: Case) -> Sample {
    let rate = 1000.0 * speed(way) * f64::from(round + 1);
    let latency = case.test.is_rr().then_some(1e6 / rate);
    Sample {
        // Larger messages carry more, but for the largest.
        value: match case.test.is_rr() {
            true => rate,
            false if case.bytes > 16 << 10 => rate * 3.0,
            false => rate * f64::from(case.bytes) / 4096.0,
        },
        mean_us: latency,
        p50_us: latency,
        p99_us: latency.map(|us| us * 2.0),
        lost: None,
        cpu_us_per_op: 600.0 / speed(way),
        foreign: 0.01,
        apart_ns: Some(if round == 3 { [300.0; 2] } else { [60.0; 2] }),
    }
}

pub fn measured() -> Measured {
    let setup = setup();
    let mut measured = Measured::default();
    for round in 0..=setup.rounds {
        for case in &setup.cases {
            for way in Route::ALL.into_iter().filter(|way| case.runs_over(*way)) {
                let sample = sample(round, way, *case);
                let counted = Counters::default();
                measured.loads.push(Load { round, case: *case, way, sample, counted });
            }
        }
        for hook in [true, false] {
            for test in [Test::TcpRr, Test::UdpRr] {
                let sample = sample(round, Route::TapBridge, Case::new(test, 64));
                measured.others.push(OthersLoad { round, test, hook, sample });
            }
            let packet_ns = if hook { 5_100.0 } else { 5_000.0 } + f64::from(round);
            measured.hook.push(HookLoad { round, hook, packet_ns });
        }
        for way in super::programs::WAYS {
            let value = 1000.0 * speed(way);
            measured.programs.push(ProgramLoad {
                round,
                case: "redis_get_1".into(),
                way,
                value,
                latency_us: Some(1e6 / value),
                cpu_us_per_op: if way == Route::Loopback { 600.0 } else { 900.0 },
                foreign: 0.0,
            });
        }
    }
    measured
}
