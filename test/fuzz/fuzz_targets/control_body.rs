//! JSON of any kind as a request's body to the control API, or from a list that an earlier daemon
//! left: what is refused changes nothing, and what is taken can be taken again from its own
//! description.

#![cfg_attr(fuzzing, no_main)]

use std::path::Path;

use config::{AttachBody, Config, check_log_filter, parse, parse_size};
use harness::fuzz_target;
use serde_json::Value;

const BEFORE: &str = "[[switch]]\nname='lan'\n[[vm]]\nname='web'\ntrust_domain='t'\n\
    [[vm.net]]\nname='net0'\nswitch='lan'\nmac='02:00:00:00:00:01'\n[vm.vsock]\ncid=3\npath='/v'\n";

fn before() -> Config {
    parse(Path::new("m.toml"), BEFORE).expect("a config")
}

fn attach(vm: &str, body: &Value) {
    let mut config = before();
    let Ok(port) = config.attach(vm, body) else {
        assert_eq!(config, before(), "{body} was refused");
        return;
    };
    let of = config.vms.iter().find(|known| known.name == vm).expect("the port's VM");
    let trust_domain = of.trust_domain.as_deref();
    let again = AttachBody { port: &port, trust_domain, weight: of.credit.weight };
    let again = serde_json::to_value(again).expect("JSON");
    let mut second = before();
    second.attach(vm, &again).unwrap_or_else(|error| panic!("{body} as {again}: {error}"));
    assert_eq!(second, config, "{body}");
    assert!(config.detach(vm, port.name()).is_some());
    let rest = config.vms.iter().find(|known| known.name == vm);
    assert!(rest.is_none_or(|vm| vm.ports().all(|other| other.name() != port.name())));
}

fn set_credit(body: &Value) {
    let mut config = before();
    match config.set_credit("web", body) {
        Ok(credit) => {
            let credit = credit.expect("the VM");
            let mut second = before();
            let body = serde_json::to_value(credit).expect("JSON");
            assert_eq!(second.set_credit("web", &body).ok(), Some(Some(credit)));
            assert_eq!(second, config);
        }
        Err(_) => assert_eq!(config, before(), "{body} was refused"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = (check_log_filter(text), parse_size(text));
    }
    let Ok(body) = serde_json::from_slice::<Value>(bytes) else { return };
    attach("web", &body);
    attach("new", &body);
    set_credit(&body);
});
