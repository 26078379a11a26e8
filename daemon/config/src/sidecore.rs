//! Reader of `[sidecore]`: how many polling threads, where, and how they wait.

use crate::model::{PauseKind, Placement, SidecoreConfig, SpinKind};
use crate::node::{Node, Value};
use crate::reader::Reader;

/// Most sidecores: more threads than that polling is a typing error.
const MAX_SIDECORES: u64 = 64;

/// Highest CPU number taken (the size of the kernel's default CPU set).
const MAX_CPU: u64 = 1023;

/// Longest poll without work: beyond 10 ms a sleep costs nothing in comparison.
const MAX_SPIN_US: u64 = 10_000;

/// Reads `[sidecore]`.
pub(crate) fn sidecore(mut r: Reader<'_, '_>) -> SidecoreConfig {
    let count = number(&mut r, "count", 1..=MAX_SIDECORES).map(|n| n as usize);
    let cpus = cpus(&mut r);
    let max = number(&mut r, "max", 1..=MAX_SIDECORES).map(|n| n as usize);
    let min = number(&mut r, "min", 1..=MAX_SIDECORES).map(|n| n as usize);
    if count.is_some() && cpus.is_some() {
        r.bad("count", "is given together with `cpus`", "keep one: `cpus` implies the count");
    }
    if count.is_some() && max.is_some() {
        r.bad("max", "is given together with `count`", "keep one: `count` is the most, too");
    }
    let placement = match (cpus, count.or(max)) {
        (Some(cpus), _) => Placement::Cpus(cpus),
        (None, Some(most)) => Placement::Count(most),
        (None, None) => Placement::Auto,
    };
    let threads = match &placement {
        Placement::Auto => None,
        Placement::Count(count) => Some(*count),
        Placement::Cpus(cpus) => Some(cpus.len()),
    };
    if let (Some(max), Placement::Cpus(cpus)) = (max, &placement)
        && max > cpus.len()
    {
        let what = format!("is {max}, and there are {} in `cpus`", cpus.len());
        r.bad("max", what, "name more CPUs, or lower `max`");
    }
    if let (Some(min), Some(most)) = (min, max.or(threads))
        && min > most
    {
        let fix = format!("lower `min` to {most} at most, or allow more");
        r.bad("min", format!("is {min}, and at most {most} may be active"), fix);
    }
    let config = SidecoreConfig {
        placement,
        min,
        max,
        spin_us: number(&mut r, "spin_us", 0..=MAX_SPIN_US).and_then(|n| u32::try_from(n).ok()),
        spin: r.choice("spin", &[("adaptive", SpinKind::Adaptive), ("fixed", SpinKind::Fixed)]),
        pause: r.choice(
            "pause",
            &[
                ("auto", PauseKind::Auto),
                ("spin", PauseKind::Spin),
                ("c0.1", PauseKind::C01),
                ("c0.2", PauseKind::C02),
            ],
        ),
        yields: r.bool_or_auto("yield"),
    };
    r.finish();
    config
}

/// Reads a number; none where the daemon is to choose.
fn number(
    r: &mut Reader<'_, '_>,
    key: &'static str,
    range: std::ops::RangeInclusive<u64>,
) -> Option<u64> {
    match r.get(key)? {
        Node { value: Value::Str(s), .. } if s == "auto" => None,
        node => r.int_of(key, node, range),
    }
}

fn cpus(r: &mut Reader<'_, '_>) -> Option<Vec<usize>> {
    if let Some(Node { value: Value::Str(s), .. }) = r.get("cpus")
        && s == "auto"
    {
        return None;
    }
    let here = r.get("cpus").is_some();
    let mut cpus: Vec<usize> = Vec::new();
    for (_, node) in r.list("cpus") {
        let Some(cpu) = r.int_of("cpus", node, 0..=MAX_CPU) else {
            continue;
        };
        let cpu = cpu as usize;
        if cpus.contains(&cpu) {
            r.bad("cpus", format!("names CPU {cpu} twice"), "name each CPU once");
        }
        cpus.push(cpu);
    }
    if here && cpus.is_empty() {
        r.bad("cpus", "names no CPU", "name at least one, or take it out");
    }
    (!cpus.is_empty()).then_some(cpus)
}
