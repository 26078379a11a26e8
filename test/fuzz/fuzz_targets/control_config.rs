//! A config file with any content: a config or problems, not more than are told at once, each with
//! its text; and each port of a config can be taken out, and attached again from its own
//! description.

#![cfg_attr(fuzzing, no_main)]

use std::path::Path;

use config::{AttachBody, MAX_PROBLEMS, parse};
use harness::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut config = match parse(Path::new("m.toml"), text) {
        Ok(config) => config,
        Err(problems) => {
            assert!((1..=MAX_PROBLEMS).contains(&problems.problems.len()));
            assert!(problems.problems.iter().all(|problem| !problem.what.is_empty()));
            assert!(!problems.to_string().is_empty());
            return;
        }
    };
    let before = config.clone();
    for vm in &before.vms {
        for port in vm.ports() {
            let trust_domain = vm.trust_domain.as_deref();
            let body = AttachBody { port: &port, trust_domain, weight: vm.credit.weight };
            let body = serde_json::to_value(body).expect("JSON");
            // VMs with pipes or modules do not let go of what those need.
            if config.detach(&vm.name, port.name()).is_none() {
                continue;
            }
            let again = config.attach_again(&vm.name, &body);
            assert_eq!(again.as_ref().ok(), Some(&port), "{body}: {again:?}");
        }
    }
});
