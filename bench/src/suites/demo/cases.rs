//! The demo's cases: what runs in a guest and how its answer is read.

pub mod disk;
pub mod net;

use std::time::Duration;

use crate::harness::error::BenchError;
use crate::harness::runner::{Case, GRACE, Rate, Side, Spec, Window};
use crate::harness::stats::Better;

/// Names of all cases, in the order in which they run.
pub const NAMES: [&str; 6] =
    ["tcp_rr", "udp_rr", "tcp_stream", "udp_small", "disk_rand_4k", "disk_seq_1m"];

/// A place where a command can be run: a guest of each side.
pub trait Shell {
    /// Runs `script` in the guest that puts on the load and returns its standard output.
    fn run(&self, side: Side, script: &str, timeout: Duration) -> Result<String, BenchError>;
}

/// What to run for a load of some length.
type Script = Box<dyn Fn(Window) -> String>;
/// Reads what the script wrote.
type Parse = fn(&serde_json::Value) -> Option<Rate>;

/// A case made of one guest program that prints JSON.
pub struct Program<'a> {
    spec: Spec,
    shell: &'a dyn Shell,
    script: Script,
    parse: Parse,
}

impl Case for Program<'_> {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn run(&mut self, side: Side, window: Window) -> Result<Rate, BenchError> {
        let length = window.settle + window.length;
        let text = self.shell.run(side, &(self.script)(window), length + GRACE)?;
        read(&text, self.parse).ok_or_else(|| {
            let what = format!("{} on {}", self.spec.name, side.name());
            BenchError::lab(what, format!("the program's answer is not as expected: {text}"))
        })
    }
}

/// Programs may warn before their JSON; it begins at the first brace.
fn read(text: &str, parse: Parse) -> Option<Rate> {
    let json = &text[text.find('{')?..];
    let mut values = serde_json::Deserializer::from_str(json).into_iter();
    parse(&values.next()?.ok()?)
}

/// Facts about the bed that rows must tell.
#[derive(Debug, Clone)]
pub struct Modes {
    /// How both network sides are set up.
    pub net: String,
    /// How both disks are set up.
    pub disk: String,
    /// Address of the guest that answers the load.
    pub server: std::net::IpAddr,
    /// Disk in the guest that puts on the load.
    pub disk_path: String,
    /// Bytes of that disk.
    pub disk_len_bytes: u64,
}

/// Makes the case of that name.
pub fn make<'a>(
    name: &str,
    shell: &'a dyn Shell,
    modes: &Modes,
) -> Result<Box<dyn Case + 'a>, BenchError> {
    let found = net::program(name, modes).or_else(|| disk::program(name, modes));
    let Some((spec, script, parse)) = found else {
        return Err(BenchError::UnknownCase { name: name.into(), known: NAMES.join(", ") });
    };
    Ok(Box::new(Program { spec, shell, script, parse }))
}

fn spec(name: &'static str, unit: &'static str, operation: &'static str) -> Spec {
    Spec {
        name,
        unit,
        operation,
        better: Better::Higher,
        target: None,
        aim: None,
        ours: "",
        peer: "",
        mode: String::new(),
        latency: false,
        settle: Duration::from_millis(600),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Answers every script with the same text and remembers it.
    pub struct Canned {
        pub answer: String,
        pub seen: RefCell<Vec<String>>,
    }

    impl Canned {
        pub fn new(answer: &str) -> Canned {
            Canned { answer: answer.into(), seen: RefCell::default() }
        }
    }

    impl Shell for Canned {
        fn run(&self, side: Side, script: &str, _: Duration) -> Result<String, BenchError> {
            self.seen.borrow_mut().push(format!("{}: {script}", side.name()));
            Ok(self.answer.clone())
        }
    }

    pub fn modes() -> Modes {
        Modes {
            net: "1 vCPU".into(),
            disk: "raw, cache=none".into(),
            server: [10, 0, 0, 2].into(),
            disk_path: "/dev/vda".into(),
            disk_len_bytes: 256 << 20,
        }
    }

    pub fn window() -> Window {
        Window { settle: Duration::from_millis(500), length: Duration::from_millis(2000) }
    }

    #[test]
    fn every_name_makes_a_case_and_an_unknown_one_is_told() {
        let shell = Canned::new("");
        for name in NAMES {
            assert_eq!(make(name, &shell, &modes()).unwrap().spec().name, name);
        }
        let text = make("tcp_cc", &shell, &modes()).err().unwrap().to_string();
        assert!(text.starts_with("no case is named tcp_cc; there are: tcp_rr, udp_rr"), "{text}");
    }

    #[test]
    fn floors_are_the_issues() {
        let shell = Canned::new("");
        let floor = |name| make(name, &shell, &modes()).unwrap().spec().target;
        let floors: Vec<Option<f64>> = NAMES.iter().map(|n| floor(n)).collect();
        assert_eq!(floors, [Some(1.0), Some(1.0), Some(1.2), None, Some(1.1), None]);
    }

    #[test]
    fn an_answer_that_is_no_number_is_an_error_with_the_answer() {
        for answer in ["", "Segmentation fault", "{\"rate\": \"many\"}", "{\"rate\":"] {
            let shell = Canned::new(answer);
            let mut case = make("tcp_rr", &shell, &modes()).unwrap();
            let text = case.run(Side::Peer, window()).unwrap_err().to_string();
            assert!(text.contains("tcp_rr on peer") && text.contains(answer), "{text}");
        }
    }
}
