//! Executor of a connection: requests in, answers out.

use alloc::format;
use alloc::vec::Vec;

use guest_abi::stream::PIECE_BYTES;
use sdk::stream::Step;
use sdk::{Errno, File, Host};

use crate::answer::{self, After};
use crate::condition::{self, Part};
use crate::date;
use crate::head::{self, Head, Method};
use crate::site::{self, Site, Upload};
use crate::types;

/// Line with which a stream begins that may change the site.
pub const PUBLISH_LINE: &[u8] = b"millrace-publish/1\r\n";
/// Length of the longest object.
pub const MAX_OBJECT_BYTES: u64 = 16 << 30;
/// Output that suffices for a reply, in bytes: one more, so that it is known that there is more.
const ENOUGH_BYTES: usize = PIECE_BYTES + 1;

/// State of a connection.
#[derive(Debug, Default)]
enum State {
    /// The publisher's line may come.
    #[default]
    Begun,
    /// The next request may come.
    Idle,
    /// An object goes out.
    Sending { id: u64, file: File, at: u64, end: u64, keeps: bool },
    /// An object comes in.
    Receiving { upload: Upload, path: Vec<u8>, modified: u64, left: u64, after: After },
}

/// Executor of one client's requests.
#[derive(Debug, Default)]
pub struct Executor {
    state: State,
    is_publisher: bool,
}

impl sdk::stream::Executor for Executor {
    type Shared = Site;

    fn step(
        &mut self,
        site: &mut Site,
        host: &mut dyn Host,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        match &self.state {
            State::Begun => self.begin(input),
            State::Idle => self.request(site, host, input, out),
            State::Sending { .. } => self.send(site, host, out),
            State::Receiving { .. } => self.receive(site, host, input, out),
        }
    }

    fn end(&mut self, site: &mut Site, host: &mut dyn Host) {
        match core::mem::take(&mut self.state) {
            State::Sending { id, .. } => site.close(host, id),
            State::Receiving { upload, .. } => site.abandon(host, upload),
            State::Begun | State::Idle => {}
        }
    }
}

impl Executor {
    fn begin(&mut self, input: &[u8]) -> Step {
        if input.len() < PUBLISH_LINE.len() && PUBLISH_LINE.starts_with(input) {
            return Step::wait();
        }
        self.state = State::Idle;
        self.is_publisher = input.starts_with(PUBLISH_LINE);
        Step::go_on(if self.is_publisher { PUBLISH_LINE.len() } else { 0 })
    }

    fn request(
        &mut self,
        site: &mut Site,
        host: &mut dyn Host,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        // Some clients send an empty line behind a body.
        if input.starts_with(b"\r\n") {
            return Step::go_on(2);
        }
        let end = match head::end(input) {
            Ok(Some(end)) => end,
            Ok(None) => return Step::wait(),
            Err(status) => return refuse(out, status),
        };
        let head = match head::parse(&input[..end]) {
            Ok(head) => head,
            Err(status) => return refuse(out, status),
        };
        let is_closing = match head.method {
            Method::Get | Method::Head => self.get(site, host, &head, out),
            Method::Put if self.is_publisher => return self.put(site, host, &head, end, out),
            Method::Delete if self.is_publisher => delete(site, host, &head, out),
            _ => self.no_method(&head, out),
        };
        Step { used: end, ..if is_closing { Step::close() } else { Step::go_on(0) } }
    }

    fn no_method(&self, head: &Head<'_>, out: &mut Vec<u8>) -> bool {
        let allow = if self.is_publisher {
            "Allow: GET, HEAD, PUT, DELETE\r\n"
        } else {
            "Allow: GET, HEAD\r\n"
        };
        say(head, out, 405, allow)
    }

    /// Answers, or begins to. True: the connection ends.
    fn get(
        &mut self,
        site: &mut Site,
        host: &mut dyn Host,
        head: &Head<'_>,
        out: &mut Vec<u8>,
    ) -> bool {
        let after = after(head);
        let mut path = head.path.clone();
        if path.ends_with(b"/") {
            path.extend_from_slice(b"index.html");
        }
        let Some(object) = site.get(&path).copied() else { return say(head, out, 404, "") };
        match condition::check(head, Some(&object)) {
            Some(304) => {
                answer::not_modified(out, &object, after);
                return !after.keeps;
            }
            Some(status) => return say(head, out, status, &answer::validators(&object)),
            None => {}
        }
        let range = match condition::part(head, &object) {
            Part::None => {
                return say(head, out, 416, &format!("Content-Range: bytes */{}\r\n", object.len));
            }
            Part::Whole => None,
            Part::Range(first, end) => Some((first, end)),
        };
        let (at, end) = range.unwrap_or((0, object.len));
        let has_body = head.method == Method::Get && at < end;
        if has_body {
            let file = match site.read_from(host, object.id) {
                Ok(file) => file,
                Err(errno) => return say(head, out, status_of(errno), ""),
            };
            self.state = State::Sending { id: object.id, file, at, end, keeps: after.keeps };
        }
        answer::object(out, &object, types::of(&path), range, after);
        !after.keeps && !has_body
    }

    fn send(&mut self, site: &mut Site, host: &mut dyn Host, out: &mut Vec<u8>) -> Step {
        let State::Sending { id, file, at, end, keeps } = &mut self.state else {
            return Step::close();
        };
        let room = ENOUGH_BYTES.saturating_sub(out.len()).max(1) as u64;
        let len = (*end - *at).min(room);
        if site::read(host, *file, *at, len as usize, out).is_err() {
            // The length is out already: that the connection ends tells the client.
            return Step::close();
        }
        *at += len;
        if at < end {
            return Step::go_on(0);
        }
        let (id, keeps) = (*id, *keeps);
        site.close(host, id);
        self.state = State::Idle;
        if keeps { Step::go_on(0) } else { Step::close() }
    }

    fn put(
        &mut self,
        site: &mut Site,
        host: &mut dyn Host,
        head: &Head<'_>,
        used: usize,
        out: &mut Vec<u8>,
    ) -> Step {
        let refused = match (head.length, condition::check(head, site.get(&head.path))) {
            (None, _) => Some(411),
            _ if head.path.ends_with(b"/") || head.path == b"*" => Some(400),
            (Some(len), _) if len > MAX_OBJECT_BYTES => Some(413),
            (_, status) => status,
        };
        let begun = match refused {
            Some(status) => Err(status),
            None => site.begin(host, &head.path).map_err(status_of),
        };
        let upload = match begun {
            Ok(upload) => upload,
            Err(status) => {
                let is_closing = say(head, out, status, "");
                return Step { used, ..if is_closing { Step::close() } else { Step::go_on(0) } };
            }
        };
        if head.expects && !head.is_old {
            answer::go_on(out);
        }
        let left = head.length.unwrap_or(0);
        let modified = head.last_modified.and_then(date::parse).unwrap_or(0);
        let path = head.path.clone();
        let after = After { keeps: head.keeps, is_old: head.is_old };
        self.state = State::Receiving { upload, path, modified, left, after };
        Step::go_on(used)
    }

    fn receive(
        &mut self,
        site: &mut Site,
        host: &mut dyn Host,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Step {
        let State::Receiving { upload, left, .. } = &mut self.state else { return Step::close() };
        if *left > 0 && input.is_empty() {
            return Step::wait();
        }
        let used = (*left).min(input.len() as u64);
        let written = match used {
            0 => Ok(()),
            _ => Site::write(host, upload, &input[..used as usize]),
        };
        *left -= used;
        if written.is_ok() && *left > 0 {
            return Step::go_on(used as usize);
        }
        let State::Receiving { upload, path, modified, left, after } =
            core::mem::replace(&mut self.state, State::Idle)
        else {
            return Step::close();
        };
        let done = match written {
            Ok(()) => site.finish(host, upload, &path, modified),
            Err(errno) => {
                site.abandon(host, upload);
                Err(errno)
            }
        };
        let keeps = after.keeps && left == 0;
        let after = After { keeps, ..after };
        match done {
            Ok((is_new, object)) => {
                let status = if is_new { 201 } else { 204 };
                answer::status(out, status, after, true, &answer::validators(&object));
            }
            Err(errno) => answer::status(out, status_of(errno), after, true, ""),
        }
        Step { used: used as usize, ..if keeps { Step::go_on(0) } else { Step::close() } }
    }
}

/// Step after an answer to a request whose body, if it has one, is not read.
fn after(head: &Head<'_>) -> After {
    After { keeps: head.keeps && !head.has_body() && !head.expects, is_old: head.is_old }
}

/// Answers with a status alone. True: the connection ends.
fn say(head: &Head<'_>, out: &mut Vec<u8>, status: u16, fields: &str) -> bool {
    let after = after(head);
    answer::status(out, status, after, head.method != Method::Head, fields);
    !after.keeps
}

/// A request that makes no sense: nobody knows where the next begins.
fn refuse(out: &mut Vec<u8>, status: u16) -> Step {
    answer::status(out, status, After::CLOSE, true, "");
    Step::close()
}

fn delete(site: &mut Site, host: &mut dyn Host, head: &Head<'_>, out: &mut Vec<u8>) -> bool {
    let refused = condition::check(head, site.get(&head.path));
    let status = match refused {
        Some(status) => status,
        None => match site.remove(host, &head.path) {
            Ok(true) => 204,
            Ok(false) => 404,
            Err(errno) => status_of(errno),
        },
    };
    say(head, out, status, "")
}

fn status_of(errno: Errno) -> u16 {
    match errno {
        Errno::NOSPC => 507,
        Errno::MFILE => 503,
        _ => 500,
    }
}
