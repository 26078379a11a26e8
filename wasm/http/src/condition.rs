//! Ranges, and what a request wants to be so before it is done.

use crate::date;
use crate::head::{Head, Method};
use crate::index::Object;

/// Part of an object that is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All.
    Whole,
    /// Bytes from one up to another, which is not sent.
    Range(u64, u64),
    /// The range begins behind its end.
    None,
}

/// Whether the request is to be done; none: it is, else the status that is the answer.
pub fn check(head: &Head<'_>, object: Option<&Object>) -> Option<u16> {
    let modified = object.map_or(0, |o| o.modified);
    let is_changed_after =
        |text: &[u8]| modified != 0 && date::parse(text).is_some_and(|d| modified > d);
    if !head.if_match.is_empty() {
        if !any_matches(&head.if_match, object, true) {
            return Some(412);
        }
    } else if head.if_unmodified_since.is_some_and(is_changed_after) {
        return Some(412);
    }
    let is_reading = matches!(head.method, Method::Get | Method::Head);
    if !head.if_none_match.is_empty() {
        let status = if is_reading { 304 } else { 412 };
        return any_matches(&head.if_none_match, object, false).then_some(status);
    }
    let since = head.if_modified_since.filter(|_| is_reading && modified != 0);
    let is_old = since.and_then(date::parse).is_some_and(|d| modified <= d);
    is_old.then_some(304)
}

/// Whether one of the lists has the object's tag. `*` is any object.
fn any_matches(lists: &[&[u8]], object: Option<&Object>, strong: bool) -> bool {
    let Some(object) = object else { return false };
    let tag = object.tag();
    let words = lists.iter().flat_map(|list| list.split(|&b| b == b',')).map(<[u8]>::trim_ascii);
    words.into_iter().any(|word| {
        // Our tags are strong; one that came back weak is the same for a comparison that allows it.
        let word = if strong { word } else { word.strip_prefix(b"W/").unwrap_or(word) };
        word == b"*" || word == tag.as_bytes()
    })
}

/// Finds the part of the object that the request wants.
pub fn part(head: &Head<'_>, object: &Object) -> Part {
    let range = head.range.filter(|_| head.method == Method::Get);
    let Some(range) = range else { return Part::Whole };
    let is_same = head.if_range.is_none_or(|wanted| {
        let is_date = object.modified != 0 && date::parse(wanted) == Some(object.modified);
        is_date || wanted == object.tag().as_bytes()
    });
    if is_same { parse(range, object.len) } else { Part::Whole }
}

/// A range of so many bytes. What makes no sense, or is more than one, is all of them.
fn parse(text: &[u8], len: u64) -> Part {
    let (Some(unit), Some(range)) = (text.get(..6), text.get(6..)) else { return Part::Whole };
    if !unit.eq_ignore_ascii_case(b"bytes=") {
        return Part::Whole;
    }
    let range = range.trim_ascii();
    let Some(dash) = range.iter().position(|&b| b == b'-') else { return Part::Whole };
    let (first, last) = (&range[..dash], &range[dash + 1..]);
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first > last => Part::Whole,
        (Some(first), _) if first >= len && (last.is_empty() || number(last).is_some()) => {
            Part::None
        }
        (Some(first), Some(last)) => Part::Range(first, last.saturating_add(1).min(len)),
        (Some(first), None) if last.is_empty() => Part::Range(first, len),
        (None, Some(0)) if first.is_empty() => Part::None,
        (None, Some(_)) if first.is_empty() && len == 0 => Part::None,
        (None, Some(count)) if first.is_empty() => Part::Range(len.saturating_sub(count), len),
        _ => Part::Whole,
    }
}

/// Digits, as many as there are: what is too large for a number is very large.
fn number(digits: &[u8]) -> Option<u64> {
    let fine = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    fine.then(|| core::str::from_utf8(digits).ok().and_then(|d| d.parse().ok()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object() -> Object {
        Object { id: 1, len: 100, hash: 0xabc, modified: 784_111_777 }
    }

    fn head<'a>(method: Method) -> Head<'a> {
        let bytes = b"GET / HTTP/1.0\r\n\r\n";
        Head { method, ..crate::head::parse(bytes).unwrap() }
    }

    #[test]
    fn ranges_are_within_the_object() {
        for (text, part) in [
            ("bytes=0-9", Part::Range(0, 10)),
            ("Bytes=5-", Part::Range(5, 100)),
            ("bytes=90-1000", Part::Range(90, 100)),
            ("bytes=90-99999999999999999999999", Part::Range(90, 100)),
            ("bytes=-1", Part::Range(99, 100)),
            ("bytes=-1000", Part::Range(0, 100)),
            ("bytes=100-", Part::None),
            ("bytes=100-200", Part::None),
            ("bytes=-0", Part::None),
            ("bytes=9-1", Part::Whole),
            ("bytes=200-100", Part::Whole),
            ("bytes=1-2,4-5", Part::Whole),
            ("bytes=200-,1-2", Part::Whole),
            ("bytes=a-b", Part::Whole),
            ("bytes=-", Part::Whole),
            ("bytes=", Part::Whole),
            ("lines=1-2", Part::Whole),
            ("\u{fc}\u{fc}\u{fc}\u{fc}", Part::Whole),
        ] {
            assert_eq!(parse(text.as_bytes(), 100), part, "{text}");
        }
        assert_eq!(parse(b"bytes=0-", 0), Part::None);
        assert_eq!(parse(b"bytes=-5", 0), Part::None);
    }

    #[test]
    fn a_range_is_of_the_object_that_the_client_knows() {
        let (tag, date) = (object().tag(), date::format(object().modified));
        let weak = std::format!("W/{tag}");
        for (if_range, part) in [
            (tag.as_str(), Part::Range(0, 2)),
            (&date, Part::Range(0, 2)),
            ("\"other\"", Part::Whole),
            (&weak, Part::Whole),
            ("Sun, 06 Nov 1994 08:49:38 GMT", Part::Whole),
        ] {
            let range = Some(b"bytes=0-1".as_slice());
            let head = Head { range, if_range: Some(if_range.as_bytes()), ..head(Method::Get) };
            assert_eq!(super::part(&head, &object()), part, "{if_range}");
        }
    }

    #[test]
    fn tags_and_dates_decide() {
        let tag = object().tag();
        let list = std::format!("\"x\", W/{tag}");
        let (lists, weak) = ([list.as_bytes()], [b"*".as_slice()]);
        let none = |lists: &[&'static [u8]], method| Head {
            if_none_match: lists.to_vec(),
            ..head(method)
        };
        let get = Head { if_none_match: lists.to_vec(), ..head(Method::Get) };
        assert_eq!(check(&get, Some(&object())), Some(304));
        assert_eq!(check(&none(&weak, Method::Put), Some(&object())), Some(412));
        assert_eq!(check(&none(&weak, Method::Put), None), None);
        let strong = Head { if_match: lists.to_vec(), ..head(Method::Put) };
        assert_eq!(check(&strong, Some(&object())), Some(412));
        let strong = Head { if_match: vec![tag.as_bytes()], ..head(Method::Put) };
        assert_eq!(check(&strong, Some(&object())), None);
        assert_eq!(check(&strong, None), Some(412));
        for (date, since, not_since) in [
            ("Sun, 06 Nov 1994 08:49:36 GMT", None, Some(412)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(304), None),
            ("yesterday", None, None),
        ] {
            let since_head = Head { if_modified_since: Some(date.as_bytes()), ..head(Method::Get) };
            assert_eq!(check(&since_head, Some(&object())), since, "{date}");
            let not_head = Head { if_unmodified_since: Some(date.as_bytes()), ..head(Method::Get) };
            assert_eq!(check(&not_head, Some(&object())), not_since, "{date}");
        }
        // A tag is more than a date.
        let both = Head {
            if_none_match: vec![b"\"x\""],
            if_modified_since: Some(b"Sun, 06 Nov 1994 08:49:37 GMT"),
            ..head(Method::Get)
        };
        assert_eq!(check(&both, Some(&object())), None);
    }
}
