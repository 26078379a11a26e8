//! The demo's cases: what runs in a guest and how its answer is read.

pub mod disk;
pub mod net;
pub mod program;

use crate::harness::error::BenchError;
use crate::harness::runner::Case;
use program::Program;

pub use program::{Modes, Shell};

/// Names of the demo's cases, in the order in which they run.
pub const NAMES: [&str; 6] =
    ["tcp_rr", "udp_rr", "tcp_stream", "udp_small", "disk_rand_4k", "disk_seq_1m"];

/// Names of all cases: the demo's, then those that run only where they are named.
pub fn known() -> Vec<&'static str> {
    let more = disk::SEQUENTIAL.iter().map(|(name, ..)| *name);
    NAMES.into_iter().chain(more.filter(|name| !NAMES.contains(name))).collect()
}

/// Makes the case of that name.
pub fn make<'a>(
    name: &str,
    shell: &'a dyn Shell,
    modes: &Modes,
) -> Result<Box<dyn Case + 'a>, BenchError> {
    let found = net::program(name, modes).or_else(|| disk::program(name, modes));
    let Some((spec, script, parse)) = found else {
        return Err(BenchError::UnknownCase { name: name.into(), known: known().join(", ") });
    };
    Ok(Box::new(Program { spec, shell, script, parse }))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::*;
    use crate::harness::runner::{Side, Window};

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
            vhost: false,
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
        for name in known() {
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
