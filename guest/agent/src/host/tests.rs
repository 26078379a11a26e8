use super::*;
use crate::line::Event;
use crate::line::tests::{Streams, event, greeted, line};
use crate::wake::Wake;
use std::sync::mpsc;

#[test]
fn the_next_stream_is_found_and_none_after_the_end() {
    let (streams, dial) = mpsc::channel();
    let host = Host::start(Streams(dial), Heartbeat::default(), Vec::new()).unwrap();
    assert_eq!(host.line().unwrap_err(), Reason::NotOffered);
    let daemon = greeted(&streams);
    let (line, wake) = (line(&host), Arc::new(Wake::new().unwrap()));
    assert_eq!((line.max_len_bytes, line.generation), (1 << 30, 1));
    let call = line.call(kind::PIPE, kind::DONE, b"body", &wake).unwrap();
    drop(daemon);
    assert_eq!(event(&call), Event::Lost);
    assert_eq!(line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap_err(), Reason::HostGone);
    let _daemon = greeted(&streams);
    assert_eq!(crate::line::tests::line(&host).generation, 2);
    host.stop();
    assert_eq!(host.line().unwrap_err(), Reason::HostGone);
}
