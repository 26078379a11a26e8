//! Tests of the client against a host in this process that injects faults.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[allow(dead_code, reason = "shared with the relay's tests")]
mod common;

use std::time::Duration;

use common::{Backwards, Faults, Host};
use guest_abi::module::{Frame, failure, flag, kind};
use relay::raw::{self, Raw};
use relay::{Address, Client, Config, RelayError, client};
use zerocopy::IntoBytes;

const SHORT: Duration = Duration::from_millis(300);

fn config(host: &Host) -> Config {
    Config { timeout: Duration::from_secs(20), ..Config::new(host.address.clone(), "fake") }
}

#[test]
fn requests_are_answered_in_any_order() {
    let host = Host::start(Backwards);
    host.state().faults.reorder = true;
    let mut client = Client::connect(config(&host)).unwrap();
    let bodies: Vec<_> = (0..500u32).map(|n| n.to_le_bytes().repeat(n as usize)).collect();
    let sent: Vec<_> = bodies.iter().map(|body| client.send(body, false).unwrap()).collect();
    for (seq, body) in sent.iter().zip(&bodies).rev() {
        let backwards: Vec<_> = body.iter().rev().copied().collect();
        assert_eq!(client.wait_for(*seq).unwrap(), backwards);
    }
    client.ping(b"there?").unwrap();
    assert_eq!((client.connections(), client.lives()), (1, 0));
    client.goodbye().unwrap();
    common::wait_until("the host to forget the client", || host.state().clients() == 0);
}

#[test]
fn a_large_request_and_its_reply_pass_each_other() {
    let host = Host::start(Backwards);
    let mut client = Client::connect(config(&host)).unwrap();
    let body = vec![7; 15 << 20];
    let sent: Vec<_> = (0..4).map(|_| client.send(&body, true).unwrap()).collect();
    for seq in sent {
        assert_eq!(client.wait_for(seq).unwrap(), body);
    }
    assert!(matches!(
        client.send(&vec![0; (16 << 20) + 1], false),
        Err(RelayError::TooLong { .. })
    ));
}

#[test]
fn each_request_is_executed_once_however_often_the_connection_breaks() {
    let host = Host::start(Backwards);
    host.state().faults = Faults { break_one_of: Some(12), reorder: true, ..Faults::default() };
    let mut client = Client::connect(config(&host)).unwrap();
    let mut unanswered = std::collections::VecDeque::new();
    for n in 0..600u64 {
        unanswered.push_back((client.send(&n.to_le_bytes(), n % 3 == 0).unwrap(), n));
        if unanswered.len() == 20 {
            let (seq, n) = unanswered.pop_front().unwrap();
            assert_eq!(client.wait_for(seq).unwrap(), n.to_be_bytes());
        }
        if n % 100 == 50 {
            client.break_connection();
        }
    }
    for (seq, n) in unanswered {
        assert_eq!(client.wait_for(seq).unwrap(), n.to_be_bytes());
    }
    let state = host.state();
    assert_eq!((state.executed, client.lives()), (600, 0));
    assert!(client.connections() > 20 && state.again > 20, "{}", client.connections());
}

#[test]
fn a_module_that_forgot_is_noticed_and_cancels_are_said_again() {
    let host = Host::start(Backwards);
    let mut client = Client::connect(config(&host)).unwrap();
    client.call(b"a").unwrap();
    host.state().faults.is_silent = true;
    let seq = client.send(b"b", false).unwrap();
    client.cancel(seq).unwrap();
    common::wait_until("the cancel", || host.state().cancelled == [seq]);
    host.state().faults.is_silent = false;
    client.break_connection();
    assert_eq!(client.wait_for(seq).unwrap(), b"b");
    assert_eq!(client.lives(), 0);
    common::wait_until("the cancel again", || host.state().cancelled == [seq, seq]);
    assert!(matches!(client.cancel(seq), Err(RelayError::Unknown(_))));
    host.state().replace(Box::new(Backwards));
    client.break_connection();
    client.call(b"c").unwrap();
    assert_eq!(client.lives(), 1);
}

#[test]
fn errors_name_their_cause() {
    let host = Host::start(Backwards);
    let mut client = Client::connect(config(&host)).unwrap();
    let error = client.call(b"fail").unwrap_err().to_string();
    assert_eq!(error, "the host failed request 1: module stopped: as the test wants it");
    assert_eq!(client.call(b"ab").unwrap(), b"ba");
    host.state().faults.wrong_check = true;
    assert!(client.call(b"x").unwrap_err().to_string().contains("check of frame 3"));
    let other = Config { module: Some("other".into()), ..config(&host) };
    let error = Client::connect(other).unwrap_err().to_string();
    assert!(error.contains("no such module"), "{error}");
    let name = Config { module: Some("No Name".into()), ..config(&host) };
    assert!(matches!(Client::connect(name), Err(RelayError::Name(_))));
    host.state().faults = Faults { goodbye: Some(failure::LIMIT), ..Faults::default() };
    assert!(matches!(Client::connect(config(&host)), Err(RelayError::Goodbye(_))));
    let nobody = Address::Unix("/nonexistent/host".into());
    let config = Config { patience: SHORT, ..Config::new(nobody, "fake") };
    assert!(matches!(Client::connect(config), Err(RelayError::Gone { .. })));
}

#[test]
fn a_service_that_ends_is_looked_for_again_until_the_time_is_over() {
    let host = Host::start(Backwards);
    host.state().faults = Faults { goodbye: Some(failure::ENDING), ..Faults::default() };
    let short = Config { timeout: SHORT, ..config(&host) };
    assert!(matches!(Client::connect(short), Err(RelayError::Timeout(_))));
    assert!(host.state().connections < 20);
    let state = host.clone();
    std::thread::spawn(move || {
        std::thread::sleep(SHORT);
        state.state().faults = Faults::default();
    });
    Client::connect(config(&host)).unwrap().call(b"x").unwrap();
    host.state().faults.is_silent = true;
    let mut client = Client::connect(Config { timeout: SHORT, ..config(&host) }).unwrap();
    assert!(matches!(client.call(b"x"), Err(RelayError::Timeout(_))));
}

#[test]
fn the_same_client_replaces_itself() {
    let host = Host::start(Backwards);
    let config = Config { id: Some([9; 16]), ..config(&host) };
    let mut first = Client::connect(config.clone()).unwrap();
    first.call(b"x").unwrap();
    let second = Client::connect(config).unwrap();
    assert_eq!(second.greeting().unwrap().known_seq, 1);
    let Err(RelayError::Goodbye(why)) = first.call(b"y") else { panic!() };
    assert_eq!(why.code, failure::REPLACED);
}

#[test]
fn modules_are_listed() {
    let host = Host::start(Backwards);
    let greeting = client::list(host.address.clone(), SHORT).unwrap();
    assert_eq!((greeting.modules[0].name.as_str(), greeting.instance), ("fake", 0));
}

#[test]
fn raw_frames_may_be_wrong() {
    let host = Host::start(Backwards);
    let open = || {
        let mut raw = Raw::connect(&host.address, Duration::from_secs(5)).unwrap();
        let module = relay::address::module_name("fake").unwrap();
        raw.send(kind::HELLO, 0, 0, raw::hello([1; 16], module).as_bytes()).unwrap();
        assert_eq!(raw.receive().unwrap().unwrap().kind, kind::WELCOME);
        raw
    };
    let mut right = open();
    right.send(kind::REQUEST, flag::REPEATABLE, 1, b"ab").unwrap();
    assert_eq!(right.receive().unwrap().unwrap().body, b"ba");
    right.finish().unwrap();
    assert!(right.receive().unwrap().is_none());
    for wrong in [
        common::head(&Frame::new(kind::REQUEST, 0, 1, 0)),
        common::head(&raw::frame(99, 0, 1, b"")),
        common::head(&Frame::new(kind::PING, 0, 1, 65)),
    ] {
        let mut raw = open();
        raw.send_bytes(&wrong).unwrap();
        assert_eq!(raw.receive().unwrap().unwrap().kind, kind::GOODBYE);
        assert!(raw.receive().unwrap().is_none());
    }
}
