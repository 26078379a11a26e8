use std::time::Duration;

use super::*;
use crate::harness::usage::Usage;
use crate::suites::peers::case;

/// Takes part in network cases, in the first only if it is installed.
struct Fake {
    name: &'static str,
    needs: &'static str,
}

impl Backend for Fake {
    fn name(&self) -> &'static str {
        self.name
    }
    fn needs(&self) -> &'static str {
        self.needs
    }
    fn refuses(&self, case: &Case) -> Option<&'static str> {
        match (case.is_net(), self.name) {
            (true, "small") => Some("no"),
            (true, _) => None,
            (false, _) => Some(""),
        }
    }
    fn start(&self, _: &Trial<'_>) -> Result<Running, BenchError> {
        Err(BenchError::lab("start", "this one only pretends"))
    }
}

fn fake(name: &'static str) -> Fake {
    Fake { name, needs: "sh" }
}

fn measure(ops_per_s: f64, delay: f64) -> Measure {
    let reading = Reading { ops_per_s, seconds: 1.0, ..Reading::default() };
    Measure { reading, usage: Some(Usage { cpu: 1.0, delay }), stolen: 0.0 }
}

fn plan(rounds: u32) -> Plan {
    Plan { rounds, window: Window { warm_up: Duration::ZERO, length: Duration::ZERO } }
}

fn run(load: Once, rounds: u32) -> CaseRuns {
    let all = [fake("millrace"), fake("x"), fake("y")];
    let all: Vec<&dyn Backend> = all.iter().map(|f| f as &dyn Backend).collect();
    let mut quiet = Progress::to(Box::new(std::io::sink()), false);
    run_case(&case::ALL[0], &all, plan(rounds), load, &mut quiet)
}

#[test]
fn the_order_moves_on_by_one_and_turns_round_after_a_lap() {
    let mut order = String::new();
    let runs = run(
        &mut |b| {
            order += b.name();
            order.push(' ');
            Ok(measure(1e6, 0.0))
        },
        5,
    );
    let (lap, back) =
        ("millrace x y x y millrace y millrace x ", "millrace y x x millrace y y x millrace ");
    assert_eq!(order, format!("{lap}{back}"));
    assert_eq!(runs.rounds.len(), 6);
    assert!(runs.rounds.iter().all(|r| r.samples.len() == 3));
}

#[test]
fn a_back_end_that_fails_twice_is_left_out_of_the_rest() {
    let mut asked = 0;
    let runs = run(
        &mut |b| {
            if b.name() == "x" {
                asked += 1;
                return Err(BenchError::lab("x", "hung"));
            }
            Ok(measure(1e6, 0.0))
        },
        5,
    );
    assert_eq!((asked, runs.failures_of("x"), runs.failures_of("y")), (2, 2, 0));
    assert_eq!(runs.failures[1].why, "x: hung");
    assert!(runs.rounds.iter().all(|r| r.samples.len() == 2));
}

#[test]
fn a_load_that_the_hypervisor_cut_into_is_run_again_twice_and_some_of_all() {
    let mut asked = 0;
    let mut load = |b: &dyn Backend| {
        asked += usize::from(b.name() == "x");
        // Ours is cut into all the time, x in its second load of each round.
        let stolen = if b.name() == "millrace" || asked % 2 == 1 { 0.2 } else { 0.0 };
        Ok(Measure { stolen: if b.name() == "y" { 0.0 } else { stolen }, ..measure(1e6, 0.0) })
    };
    let runs = run(&mut load, 5);
    let repeats = |who: &str| -> Vec<usize> {
        let all = runs.rounds.iter().flat_map(|r| &r.samples);
        all.filter(|s| s.back_end == who).map(|s| s.repeats).collect()
    };
    assert_eq!(repeats("y"), [0; 6]);
    let (ours, x) = (repeats("millrace"), repeats("x"));
    assert_eq!((ours[0], x[0]), (0, 0), "nobody needs the warm-up");
    assert!(ours.iter().all(|r| *r <= MAX_REPEATS), "{ours:?}");
    assert_eq!(ours.iter().chain(&x).sum::<usize>(), 8, "half of 15 loads: {ours:?} {x:?}");
    let last = runs.rounds[5].samples.iter().find(|s| s.back_end == "millrace").unwrap();
    assert!(last.disturbed, "what stands is told as it is");
}

#[test]
fn who_does_not_take_part_is_told_why_or_is_none_of_the_cases_business() {
    let all = [fake("millrace"), fake("small"), Fake { name: "rare", needs: "no-such-program" }];
    let all: Vec<&dyn Backend> = all.iter().map(|f| f as &dyn Backend).collect();
    let absent: Vec<Option<String>> =
        parts(&case::ALL[0], &all).into_iter().map(|p| p.absent).collect();
    assert_eq!(absent, [None, Some("no".into()), Some("not installed".into())]);
    let disk = case::ALL.iter().find(|c| !c.is_net()).unwrap();
    assert!(parts(disk, &all).is_empty());
}

#[test]
fn a_thread_that_waits_for_its_cpu_disturbs() {
    let s = sample("x", &measure(2e6, 0.031));
    assert!(s.disturbed);
    assert_eq!((s.cpu_us_per_op, s.back_delay), (Some(0.5), Some(0.031)));
    assert!(!sample("x", &measure(2e6, 0.03)).disturbed);
    let mut m = measure(2e6, 0.0);
    m.reading.cpu_delay_ns = 0.04e9;
    assert!(sample("x", &m).disturbed);
    let robbed = Measure { stolen: 0.031, ..measure(2e6, 0.0) };
    assert!(sample("x", &robbed).disturbed);
    m.usage = None;
    assert_eq!(sample("x", &m).cpu_us_per_op, None);
    m.reading.cpu_us_per_op = Some(3.0);
    assert_eq!(sample("x", &m).cpu_us_per_op, Some(3.0), "its own word, where there is no other");
}
