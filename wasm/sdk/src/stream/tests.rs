use super::testing::Program;
use super::*;
use crate::testing::{EventBytes, TestHost};
use crate::{Errno, Events, Module};

/// Lines of digits: it says so many letters. A line `q` ends it.
#[derive(Debug, Default)]
struct Letters {
    left: usize,
}

/// How many talks have ended.
type Ended = usize;

impl Executor for Letters {
    type Shared = Ended;

    fn step(&mut self, _: &mut Ended, _: &mut dyn Host, input: &[u8], out: &mut Vec<u8>) -> Step {
        if self.left > 0 {
            let now = self.left.min(100_000);
            self.left -= now;
            out.resize(out.len() + now, b'x');
            return Step::go_on(0);
        }
        let Some(end) = input.iter().position(|&b| b == b'\n') else { return Step::wait() };
        if &input[..end] == b"q" {
            out.extend_from_slice(b"bye");
            return Step::close();
        }
        self.left = std::str::from_utf8(&input[..end]).unwrap().parse().unwrap();
        Step::go_on(end + 1)
    }

    fn end(&mut self, ended: &mut Ended, _: &mut dyn Host) {
        *ended += 1;
    }
}

#[derive(Debug)]
struct Speaker {
    streams: Streams<Letters>,
    ended: Ended,
}

impl Module for Speaker {
    fn start(_: &mut dyn Host) -> Result<Self, Errno> {
        let limits = Limits { unused_bytes: 100, all_bytes: 2 << 20, clients: 2 };
        Ok(Self { streams: Streams::new(limits), ended: 0 })
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        events.for_each(|event| self.streams.take(&mut self.ended, host, event));
        Ok(())
    }
}

fn start() -> (TestHost, Speaker) {
    let mut host = TestHost::new(1);
    let module = Speaker::start(&mut host).unwrap();
    (host, module)
}

#[test]
fn what_is_said_comes_in_pieces_when_it_is_asked_for() {
    let (mut host, mut module) = start();
    let mut program = Program::connect(&mut host, &mut module, 4);
    assert!(program.request(&mut host, &mut module, b"60").is_empty());
    let first = program.request(&mut host, &mut module, b"0000\n3\n5");
    assert_eq!((first.len(), program.has_more()), (PIECE_BYTES, true));
    let mut rest = 0;
    while program.has_more() {
        rest += program.request(&mut host, &mut module, b"").len();
    }
    assert_eq!(rest, 600_003 - PIECE_BYTES);
    assert_eq!(program.say(&mut host, &mut module, b"\n").len(), 5);
    assert_eq!(module.streams.held_bytes(), 0);
}

#[test]
fn the_end_comes_behind_all_that_was_said_and_stays() {
    let (mut host, mut module) = start();
    let mut program = Program::connect(&mut host, &mut module, 0);
    let said = program.say(&mut host, &mut module, b"300000\nq\n7\n");
    assert_eq!((said.len(), said.ends_with(b"xbye")), (300_003, true));
    assert!(program.is_closed && program.say(&mut host, &mut module, b"7\n").is_empty());
    assert!(program.is_closed && module.ended == 1);
    program.close(&mut host, &mut module);
    assert_eq!((module.ended, module.streams.len()), (1, 0));
}

#[test]
fn a_stream_that_another_life_began_is_ended() {
    let (mut host, mut module) = start();
    let events =
        EventBytes::new().opened(0, [1; 16]).request(0, 2, 0, b"3\n").request(0, 3, 0, b"");
    host.serve(&mut module, &events).unwrap();
    let bodies: Vec<_> = host.replies().into_iter().map(|r| r.body).collect();
    assert_eq!(bodies, [[reply_flag::CLOSE]; 2]);
    // And one that nobody opened.
    host.serve(&mut module, &EventBytes::new().request(9, 1, 0, b"3\n")).unwrap();
    assert_eq!(host.replies()[0].body, [reply_flag::CLOSE]);
}

#[test]
fn limits_end_the_one_who_exceeds_them() {
    let (mut host, mut module) = start();
    let mut first = Program::connect(&mut host, &mut module, 0);
    let mut second = Program::connect(&mut host, &mut module, 1);
    let mut third = Program::connect(&mut host, &mut module, 2);
    assert!(third.say(&mut host, &mut module, b"1\n").is_empty() && third.is_closed);
    // What is never used.
    first.say(&mut host, &mut module, &[b'1'; 101]);
    assert!(first.is_closed && !second.is_closed);
    assert_eq!(second.say(&mut host, &mut module, b"3\n"), b"xxx");
    // What comes while there is more to say.
    second.request(&mut host, &mut module, b"100000000\n");
    while !second.is_closed {
        second.request(&mut host, &mut module, &[b'1'; 100_000]);
        assert!(module.streams.held_bytes() <= 2 << 20);
    }
    assert_eq!((module.streams.held_bytes(), module.ended), (0, 2));
}
