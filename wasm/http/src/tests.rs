use super::*;
use alloc::string::String;
use alloc::vec::Vec;
use proptest::prelude::*;
use sdk::stream::testing::Program;
use sdk::testing::{Call, TestHost};

struct Setting {
    host: TestHost,
    http: Http,
    publisher: Program,
    reader: Program,
}

fn start_on(mut host: TestHost) -> Setting {
    let mut http = Http::start(&mut host).unwrap();
    let mut publisher = Program::connect(&mut host, &mut http, 0);
    assert!(publisher.say(&mut host, &mut http, executor::PUBLISH_LINE).is_empty());
    let reader = Program::connect(&mut host, &mut http, 1);
    Setting { host, http, publisher, reader }
}

fn start() -> Setting {
    start_on(TestHost::new(1))
}

impl Setting {
    fn publish(&mut self, text: &str) -> String {
        let said = self.publisher.say(&mut self.host, &mut self.http, text.as_bytes());
        String::from_utf8(said).unwrap()
    }

    fn put(&mut self, path: &str, body: &str) -> String {
        let len = body.len();
        let fields = "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length";
        self.publish(&std::format!(
            "PUT {path} HTTP/1.1\r\nHost: a\r\n{fields}: {len}\r\n\r\n{body}"
        ))
    }

    fn read(&mut self, text: &str) -> String {
        let said = self.reader.say(&mut self.host, &mut self.http, text.as_bytes());
        String::from_utf8(said).unwrap()
    }

    fn get(&mut self, path: &str, fields: &str) -> String {
        self.read(&std::format!("GET {path} HTTP/1.1\r\nHost: a\r\n{fields}\r\n"))
    }
}

fn status(answer: &str) -> u16 {
    answer[9..12].parse().unwrap()
}

#[test]
fn objects_are_stored_and_sent() {
    let mut s = start();
    assert_eq!(status(&s.put("/index.html", "hello")), 201);
    let answer = s.get("/", "");
    assert_eq!(
        answer,
        "HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 5\r\n\
         Accept-Ranges: bytes\r\nETag: \"b5e9c1ad071b3e7fc779cfaa5e523818\"\r\n\
         Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\nhello"
    );
    let head = s.read("HEAD /index.html HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(head, answer[..answer.len() - 5]);
    assert_eq!(status(&s.put("/index.html", "other")), 204);
    assert!(s.get("/index.html?x", "").ends_with("other"));
    assert_eq!(s.host.names().len(), 2);
    assert_eq!(status(&s.put("/empty", "")), 201);
    assert!(s.get("/empty", "").contains("Content-Length: 0\r\n"));
    assert_eq!(status(&s.publish("DELETE /empty HTTP/1.1\r\nHost: a\r\n\r\n")), 204);
    assert_eq!(status(&s.publish("DELETE /empty HTTP/1.1\r\nHost: a\r\n\r\n")), 404);
    assert_eq!(status(&s.get("/empty", "")), 404);
}

#[test]
fn only_a_publisher_publishes() {
    let mut s = start();
    s.put("/a", "1");
    for (request, closes) in [
        ("DELETE /a HTTP/1.1\r\nHost: a\r\n\r\n", false),
        ("POST /a HTTP/1.1\r\nHost: a\r\n\r\n", false),
        ("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", false),
        ("PUT /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n2", true),
    ] {
        let answer = s.read(request);
        assert_eq!(status(&answer), 405);
        assert!(answer.contains("Allow: GET, HEAD\r\n"));
        assert_eq!(s.reader.is_closed, closes);
    }
    let mut late = Program::connect(&mut s.host, &mut s.http, 2);
    let text = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nmillrace-publish/1\r\n\r\n";
    let said = late.say(&mut s.host, &mut s.http, text);
    assert!(String::from_utf8(said).unwrap().contains("HTTP/1.1 400 "));
    assert!(late.is_closed);
    assert!(
        s.publish("PATCH /a HTTP/1.1\r\nHost: a\r\n\r\n").contains("Allow: GET, HEAD, PUT, DELETE")
    );
}

#[test]
fn ranges_and_conditions() {
    let mut s = start();
    s.put("/a.bin", "0123456789");
    let part = s.get("/a.bin", "Range: bytes=2-4\r\n");
    assert_eq!(status(&part), 206);
    assert!(part.contains("Content-Range: bytes 2-4/10\r\n") && part.ends_with("\r\n\r\n234"));
    assert!(s.get("/a.bin", "Range: bytes=-3\r\n").ends_with("\r\n\r\n789"));
    let none = s.get("/a.bin", "Range: bytes=10-\r\n");
    assert!(status(&none) == 416 && none.contains("Content-Range: bytes */10\r\n"));
    let tag = part.split("ETag: ").nth(1).unwrap().split("\r\n").next().unwrap().to_owned();
    let same = s.get("/a.bin", &std::format!("If-None-Match: {tag}\r\n"));
    assert!(status(&same) == 304 && same.ends_with("\r\n\r\n") && !same.contains("Content-Length"));
    assert_eq!(status(&s.get("/a.bin", "If-None-Match: \"x\"\r\n")), 200);
    assert_eq!(status(&s.get("/a.bin", "If-Match: \"x\"\r\n")), 412);
    let since = "If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
    assert_eq!(status(&s.get("/a.bin", since)), 304);
    assert!(!s.reader.is_closed);
}

#[test]
fn large_objects_come_in_pieces_and_stay_while_they_are_read() {
    let mut s = start();
    let body: String = (0..400_000).map(|n| std::format!("{n:06}")).collect();
    assert_eq!(status(&s.put("/large", &body)), 201);
    let request = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\nGET /none HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut said = s.reader.request(&mut s.host, &mut s.http, request);
    assert!(s.reader.has_more());
    assert_eq!(status(&s.put("/large", "small")), 204);
    assert_eq!(s.host.names().len(), 3);
    while s.reader.has_more() {
        said.extend(s.reader.request(&mut s.host, &mut s.http, b""));
    }
    let said = String::from_utf8(said).unwrap();
    let (head, rest) = said.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("Content-Length: 2400000"));
    assert!(rest.starts_with(&body) && rest[body.len()..].starts_with("HTTP/1.1 404 "));
    assert_eq!(s.host.names().len(), 2);
    // A reader that goes in the middle leaves nothing open.
    s.put("/large", &body);
    s.reader.request(&mut s.host, &mut s.http, &request[..33]);
    s.publish("DELETE /large HTTP/1.1\r\nHost: a\r\n\r\n");
    s.reader.close(&mut s.host, &mut s.http);
    assert_eq!(s.host.names(), ["index"]);
}

#[test]
fn many_who_read_cost_little() {
    let mut s = start();
    s.put("/large", &"x".repeat(1 << 20));
    for client in 10..1000 {
        let mut program = Program::connect(&mut s.host, &mut s.http, client);
        let request = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n";
        program.request(&mut s.host, &mut s.http, request);
        program.request(&mut s.host, &mut s.http, b"");
        assert!(program.has_more());
    }
    assert!(s.http.streams.held_bytes() <= 1000);
    s.publish("DELETE /large HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(s.host.names().len(), 2);
}

#[test]
fn connections_end_when_they_should() {
    for (request, code) in [
        ("GET /a HTTP/1.0\r\n\r\n", 200),
        ("GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 200),
        ("GET /none HTTP/1.0\r\n\r\n", 404),
        ("GET /a HTTP/1.1\r\n\r\n", 400),
        ("GET /%2e%2e/a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nGET", 200),
        ("GET /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        ("GET /a HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        ("GET /a HTTP/1.1\nHost: a\n\n", 400),
        (&std::format!("GET /{} HTTP/1.1\r\n", "a".repeat(20_000)), 414),
        (&std::format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(2000)), 414),
        (&std::format!("GET / HTTP/1.1\r\n{}", "a: b\r\n".repeat(4000)), 431),
    ] {
        let mut s = start();
        s.put("/a", "1");
        let answer = s.read(&std::format!("{request}GET /a HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert_eq!(status(&answer), code, "{request}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{request}");
        assert!(s.reader.is_closed && answer.contains("Connection: close\r\n"), "{request}");
    }
    let mut s = start();
    s.put("/a", "1");
    assert!(
        s.read("GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            .contains("Connection: keep-alive")
    );
    assert!(!s.reader.is_closed);
}

#[test]
fn uploads_are_whole_or_not_at_all() {
    let mut s = start();
    s.put("/a", "old");
    let head = "PUT /a HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\nExpect: 100-continue\r\n\r\n";
    assert_eq!(s.publish(head), "HTTP/1.1 100 Continue\r\n\r\n");
    assert_eq!(s.publish("new"), "");
    assert!(s.get("/a", "").ends_with("old"));
    assert!(s.publish("er").is_empty() && status(&s.publish("!")) == 204);
    assert!(s.get("/a", "").ends_with("newer!"));
    // The publisher goes.
    s.publish(head);
    s.publish("abc");
    let gone = std::mem::replace(&mut s.publisher, Program::connect(&mut s.host, &mut s.http, 5));
    gone.close(&mut s.host, &mut s.http);
    assert_eq!(s.host.names().len(), 2);
    s.publish("millrace-publish/1\r\n");
    for (fields, code) in [
        ("If-None-Match: *\r\nContent-Length: 1\r\n", 412),
        ("Content-Length: 99999999999\r\n", 413),
        ("", 411),
    ] {
        let mut other = Program::connect(&mut s.host, &mut s.http, 6);
        let text = std::format!("millrace-publish/1\r\nPUT /a HTTP/1.1\r\nHost: a\r\n{fields}\r\n");
        let said = other.say(&mut s.host, &mut s.http, text.as_bytes());
        assert_eq!(status(&String::from_utf8(said).unwrap()), code);
        other.close(&mut s.host, &mut s.http);
    }
    assert_eq!(status(&s.publish("PUT /a/ HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")), 400);
}

#[test]
fn a_full_disk_and_a_broken_one_are_told_and_harm_nothing() {
    for (call, errno, code) in [
        (Call::Write, Errno::NOSPC, 507),
        (Call::Sync, Errno::IO, 500),
        (Call::Append, Errno::NOSPC, 507),
        (Call::Open, Errno::MFILE, 503),
    ] {
        let mut s = start();
        s.put("/a", "old");
        s.host.fail(Some(call), 0, 1, errno);
        assert_eq!(status(&s.put("/a", "new")), code);
        s.host.heal();
        assert!(s.get("/a", "").ends_with("old"));
        assert_eq!(s.host.names().len(), 2);
    }
    let mut s = start();
    s.put("/a", "old");
    s.host.fail(Some(Call::Read), 0, 1, Errno::IO);
    assert!(s.get("/a", "").ends_with("\r\n\r\n") && s.reader.is_closed);
}

#[test]
fn files_stay_open_until_others_need_the_place() {
    let mut s = start();
    for n in 0..site::MAX_OPEN + 50 {
        s.put(&std::format!("/{n}"), "x");
    }
    for _ in 0..3 {
        assert_eq!(status(&s.get("/0", "")), 200);
    }
    let opened = s.host.calls["open"];
    assert_eq!(status(&s.get("/0", "")), 200);
    assert_eq!(s.host.calls["open"], opened);
    for n in 0..site::MAX_OPEN + 50 {
        assert_eq!(status(&s.get(&std::format!("/{n}"), "")), 200);
    }
    assert_eq!(status(&s.publish("DELETE /0 HTTP/1.1\r\nHost: a\r\n\r\n")), 204);
    assert_eq!(s.host.names().len(), site::MAX_OPEN + 50);
}

#[test]
fn too_many_uploads_are_refused() {
    let mut s = start();
    let text = b"millrace-publish/1\r\nPUT /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n1";
    let mut all: Vec<_> = (10..10 + site::MAX_UPLOADS as u32)
        .map(|client| {
            let mut program = Program::connect(&mut s.host, &mut s.http, client);
            assert!(program.say(&mut s.host, &mut s.http, text).is_empty());
            program
        })
        .collect();
    assert_eq!(status(&s.put("/b", "1")), 503);
    all.pop().unwrap().close(&mut s.host, &mut s.http);
    let mut again = start_on(s.host.clone());
    assert_eq!(again.host.names(), ["index"]);
    assert_eq!(status(&again.put("/b", "1")), 201);
}

#[test]
fn what_was_answered_survives_a_crash_at_any_call() {
    for seed in 0..300 {
        let mut s = start_on(TestHost::new(seed));
        s.put("/a", "first");
        s.host.die_after(seed % 12);
        let request = b"PUT /a HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nsecond";
        let events = sdk::testing::EventBytes::new().request(0, 3, 0, request);
        let _ = s.host.serve(&mut s.http, &events);
        let replies = s.host.replies();
        let said = replies.first().is_some_and(|r| r.body[1..].starts_with(b"HTTP/1.1 204"));
        if seed % 2 == 0 {
            s.host.crash()
        } else {
            s.host.kill()
        }
        let mut s = start_on(s.host);
        let answer = s.get("/a", "");
        assert!(answer.ends_with("second") || (!said && answer.ends_with("first")), "{answer}");
        assert_eq!(s.host.names().len(), 2);
    }
}

/// Requests and rubbish, as a stream.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let path = prop_oneof!["/[a-c]", "/", "/%[0-9a-f]{2}", "[ -~]{0,8}"];
    let field = prop_oneof![
        4 => Just("Host: a\r\n".to_owned()),
        1 => "(Range|If-None-Match|Connection|Expect|Transfer-Encoding|X): [ -~]{0,12}\r\n",
        1 => "Range: bytes=[0-3]{0,2}-[0-9]{0,2}\r\n",
        1 => Just("Connection: keep-alive\r\n".to_owned()),
        1 => Just("Expect: 100-continue\r\n".to_owned()),
    ];
    let body =
        prop_oneof![2 => Just(None), 1 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Some)];
    let request = (
        "(GET|HEAD|PUT|PUT|DELETE|POST)",
        path,
        prop_oneof![6 => Just("1.1"), 1 => Just("1.0"), 1 => Just("2.0")],
        prop::collection::vec(field, 0..3),
        body,
    );
    let request = request.prop_map(|(method, path, version, fields, body)| {
        let len = body.as_ref().map(|b| std::format!("Content-Length: {}\r\n", b.len()));
        let mut bytes = std::format!(
            "{method} {path} HTTP/{version}\r\n{}{}\r\n",
            fields.concat(),
            len.unwrap_or_default()
        )
        .into_bytes();
        bytes.extend(body.unwrap_or_default());
        bytes
    });
    let rubbish = prop::collection::vec(any::<u8>(), 0..30);
    let part = prop_oneof![12 => request, 1 => rubbish, 1 => Just(b"\r\n".to_vec())];
    (any::<bool>(), prop::collection::vec(part, 0..12)).prop_map(|(publishes, parts)| {
        let line: &[u8] = if publishes { executor::PUBLISH_LINE } else { b"" };
        [line, &parts.concat()].concat()
    })
}

fn whole(bytes: &[u8], cuts: &[usize]) -> (Vec<u8>, bool) {
    let mut s = start();
    s.put("/a", "0123456789");
    s.put("/index.html", "hello");
    let (mut said, mut rest) = (Vec::new(), bytes);
    for cut in cuts.iter().cycle() {
        let (piece, after) = rest.split_at((*cut).min(rest.len()));
        said.extend(s.reader.say(&mut s.host, &mut s.http, piece));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    (said, s.reader.is_closed)
}

proptest! {
    #[test]
    fn it_does_not_matter_where_the_stream_is_cut(
        bytes in stream(),
        cuts in prop::collection::vec(1..60usize, 1..12),
    ) {
        prop_assert_eq!(whole(&bytes, &cuts), whole(&bytes, &[usize::MAX]));
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        whole(&bytes, &[100]);
    }
}
