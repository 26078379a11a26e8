use super::*;
use alloc::string::String;
use alloc::vec::Vec;
use proptest::prelude::*;
use sdk::stream::testing::Program;
use sdk::testing::TestHost;

struct Setting {
    host: TestHost,
    kv: Kv,
    program: Program,
}

fn start() -> Setting {
    let mut host = TestHost::new(1);
    let mut kv = Kv::start(&mut host).unwrap();
    let program = Program::connect(&mut host, &mut kv, 0);
    Setting { host, kv, program }
}

impl Setting {
    fn say(&mut self, text: &str) -> String {
        let said = self.program.say(&mut self.host, &mut self.kv, text.as_bytes());
        String::from_utf8(said).unwrap()
    }

    fn expect(&mut self, pairs: &[(&str, &str)]) {
        for (line, answer) in pairs {
            assert_eq!(self.say(line), *answer, "{line}");
        }
    }
}

#[test]
fn values_are_stored_and_found() {
    start().expect(&[
        ("get a\r\n", "END\r\n"),
        ("set a 5 0 3\r\nabc\r\n", "STORED\r\n"),
        ("get b a  a\r\n", "VALUE a 5 3\r\nabc\r\nVALUE a 5 3\r\nabc\r\nEND\r\n"),
        ("add a 0 0 1\r\nx\r\n", "NOT_STORED\r\n"),
        ("replace a 6 0 1\r\nx\r\n", "STORED\r\n"),
        ("append a 9 0 2\r\nyz\r\n", "STORED\r\n"),
        ("prepend a 9 0 2\nvw\r\n", "STORED\r\n"),
        ("gets a\n", "VALUE a 6 5 4\r\nvwxyz\r\nEND\r\n"),
        ("cas a 1 0 1 3\r\nn\r\n", "EXISTS\r\n"),
        ("cas a 1 0 1 4\r\nn\r\n", "STORED\r\n"),
        ("cas b 1 0 1 4\r\nn\r\n", "NOT_FOUND\r\n"),
        ("append b 0 0 1\r\nn\r\n", "NOT_STORED\r\n"),
        ("delete a\r\n", "DELETED\r\n"),
        ("delete a\r\n", "NOT_FOUND\r\n"),
        ("set e 0 0 0\r\n\r\nget e\r\n", "STORED\r\nVALUE e 0 0\r\n\r\nEND\r\n"),
        ("set \u{fc} 0 0 1\r\n1\r\nget \u{fc}\r\n", "STORED\r\nVALUE \u{fc} 0 1\r\n1\r\nEND\r\n"),
    ]);
}

#[test]
fn numbers_count() {
    start().expect(&[
        ("incr n 1\r\n", "NOT_FOUND\r\n"),
        ("set n 3 0 2\r\n10\r\n", "STORED\r\n"),
        ("incr n 5\r\n", "15\r\n"),
        ("decr n 6\r\nget n\r\n", "9\r\nVALUE n 3 1\r\n9\r\nEND\r\n"),
        ("decr n 100\r\n", "0\r\n"),
        (
            "decr n 0\r\nincr n 18446744073709551615\r\nincr n 2\r\n",
            "0\r\n18446744073709551615\r\n1\r\n",
        ),
        (
            "set n 0 0 1\r\nx\r\nincr n 1\r\n",
            "STORED\r\nCLIENT_ERROR cannot increment or decrement non-numeric value\r\n",
        ),
        ("incr n -1\r\n", "CLIENT_ERROR invalid numeric delta argument\r\n"),
    ]);
}

#[test]
fn time_passes() {
    let mut s = start();
    s.expect(&[
        (
            "set a 0 10 1\r\n1\r\nset b 0 -1 1\r\n1\r\nset c 0 0 1\r\n1\r\n",
            "STORED\r\nSTORED\r\nSTORED\r\n",
        ),
        ("get a b c\r\n", "VALUE a 0 1\r\n1\r\nVALUE c 0 1\r\n1\r\nEND\r\n"),
        (
            "set d 0 2592001 1\r\n1\r\n",
            "SERVER_ERROR expiry as a date (over 30 days) is not supported\r\n",
        ),
    ]);
    s.host.advance(9_999);
    s.expect(&[("touch a 10\r\n", "TOUCHED\r\n"), ("append a 0 0 1\r\n2\r\n", "STORED\r\n")]);
    s.host.advance(9_999);
    s.expect(&[("gat 10 a\r\n", "VALUE a 0 2\r\n12\r\nEND\r\n"), ("incr a 1\r\n", "13\r\n")]);
    s.host.advance(10_000);
    s.expect(&[("get a\r\n", "END\r\n"), ("touch a 0\r\n", "NOT_FOUND\r\n")]);
    s.expect(&[("flush_all 5\r\n", "OK\r\n"), ("get c\r\n", "VALUE c 0 1\r\n1\r\nEND\r\n")]);
    s.host.advance(5_000);
    s.expect(&[("get c\r\n", "END\r\n"), ("set c 0 0 1\r\n1\r\n", "STORED\r\n")]);
    s.expect(&[("flush_all noreply\r\nget c\r\n", "END\r\n")]);
}

#[test]
fn no_reply_is_none() {
    start().expect(&[
        ("set a 0 0 1 noreply\r\n1\r\nincr a 1 noreply\r\ntouch a 0 noreply\r\n", ""),
        ("get a\r\n", "VALUE a 0 1\r\n2\r\nEND\r\n"),
        ("delete a noreply\r\ndelete a noreply\r\nverbosity 1 noreply\r\n", ""),
    ]);
}

#[test]
fn errors_leave_the_stream_in_step() {
    let long = "k".repeat(251);
    let mut s = start();
    s.expect(&[
        ("what\r\n\r\n", "ERROR\r\nERROR\r\n"),
        (
            &std::format!("set {long} 0 0 5\r\nget a\r\nversion\r\n"),
            "CLIENT_ERROR bad command line format\r\nVERSION 0.1.0-millrace\r\n",
        ),
        ("set a 0 0 1\r\n1\r\n", "STORED\r\n"),
    ]);
    let large = std::format!("set a 0 0 2000000\r\n{}\r\nget a\r\n", "x".repeat(2_000_000));
    assert_eq!(s.say(&large), "SERVER_ERROR object too large for cache\r\nEND\r\n");
    assert!(s.say("stats\r\n").contains("STAT curr_connections 1\r\n"));
    assert_eq!(s.say("stats items\r\n"), "END\r\n");
    assert!(!s.program.is_closed);
}

#[test]
fn what_nobody_can_go_on_after_closes() {
    let endless = "x".repeat(65_536);
    for (text, answer) in [
        ("set a 0 0 1\r\n12\r\nflush_all\r\n", "CLIENT_ERROR bad data chunk\r\n"),
        ("set a 0 0 x\r\nflush_all\r\n", "CLIENT_ERROR bad data chunk\r\n"),
        (endless.as_str(), "CLIENT_ERROR line too long\r\n"),
        ("quit\r\nget a\r\n", ""),
    ] {
        let mut s = start();
        assert_eq!(s.say(text), answer);
        assert!(s.program.is_closed);
    }
    let mut s = start();
    assert!(s.program.say(&mut s.host, &mut s.kv, &[0x80, 0, 0, 0]).is_empty());
    assert!(s.program.is_closed);
}

#[test]
fn many_large_values_come_in_pieces() {
    let mut s = start();
    let value = "v".repeat(1 << 20);
    assert_eq!(s.say(&std::format!("set a 0 0 1048576\r\n{value}\r\n")), "STORED\r\n");
    let got = s.say(&std::format!("get{}\r\n", " a".repeat(50)));
    assert_eq!(got.len(), 50 * ((1 << 20) + "VALUE a 0 1048576\r\n\r\n".len()) + 5);
    assert_eq!(s.kv.streams.held_bytes(), 0);
}

#[test]
fn memory_is_what_the_file_says() {
    for (text, mib) in [("2\n", 2), ("0", 64), ("x", 64)] {
        let mut host = TestHost::new(1);
        host.put("memory-mib", text.as_bytes());
        let mut kv = Kv::start(&mut host).unwrap();
        let program = Program::connect(&mut host, &mut kv, 0);
        let mut s = Setting { host, kv, program };
        assert!(
            s.say("stats\r\n").contains(&std::format!("STAT limit_maxbytes {}\r\n", mib << 20))
        );
        assert_eq!(s.host.lines.len(), usize::from(mib == 64));
        for n in 0..300 {
            s.say(&std::format!("set {n} 0 0 10000 noreply\r\n{}\r\n", "x".repeat(10_000)));
        }
        assert_eq!(s.say("stats\r\n").contains("STAT evictions 0\r\n"), mib == 64);
    }
}

/// Commands and rubbish, as a stream.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof!["[a-c]", "[0-9]{1,3}", "noreply", "[ -~]{0,5}"];
    let name = prop_oneof![
        "get|gets|gat|set|add|cas|append|prepend|replace|delete|incr|decr|touch|flush_all|stats|version",
        "[a-z]{0,4}",
    ];
    let line = (name, prop::collection::vec(word, 0..5))
        .prop_map(|(name, words)| std::format!("{name} {}\r\n", words.join(" ")).into_bytes());
    let set = ("[a-c]", prop::collection::vec(any::<u8>(), 0..40), any::<bool>()).prop_map(
        |(key, data, quiet)| {
            let tail = if quiet { " noreply" } else { "" };
            let mut bytes = std::format!("set {key} 1 0 {}{tail}\r\n", data.len()).into_bytes();
            bytes.extend(data);
            bytes.extend(b"\r\n");
            bytes
        },
    );
    let rubbish = prop::collection::vec(any::<u8>(), 0..30);
    let part = prop_oneof![6 => set, 6 => line, 1 => rubbish];
    prop::collection::vec(part, 0..25).prop_map(|parts| parts.concat())
}

fn whole(bytes: &[u8], cuts: &[usize]) -> (Vec<u8>, bool) {
    let mut s = start();
    let (mut said, mut rest) = (Vec::new(), bytes);
    for cut in cuts.iter().cycle() {
        let (piece, after) = rest.split_at((*cut).min(rest.len()));
        said.extend(s.program.say(&mut s.host, &mut s.kv, piece));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    (said, s.program.is_closed)
}

proptest! {
    #[test]
    fn it_does_not_matter_where_the_stream_is_cut(
        bytes in stream(),
        cuts in prop::collection::vec(1..40usize, 1..12),
    ) {
        prop_assert_eq!(whole(&bytes, &cuts), whole(&bytes, &[usize::MAX]));
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        whole(&bytes, &[100]);
    }
}
