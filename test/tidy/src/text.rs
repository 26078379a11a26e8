//! Rust as text: comments and string literals told apart from code, also in what macros hold.

/// One comment of one line, or one line of a block comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comment {
    /// Line, counted from 1.
    pub line: usize,
    /// Text with its marks (`//`, `///`, `//!`).
    pub text: String,
    /// Whether nothing but blanks stands before it on its line.
    pub is_alone: bool,
}

/// One part of a string literal that lies on one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Literal {
    /// Line, counted from 1.
    pub line: usize,
    /// Columns that it takes, with its quotes.
    pub columns: usize,
}

/// Comments, literals and code of a Rust file.
#[derive(Debug, Default)]
pub struct RustText {
    /// The file with comments and the content of literals replaced by blanks: as many lines.
    pub code: String,
    /// Comments in their order.
    pub comments: Vec<Comment>,
    /// String literals in their order, those of several lines in parts.
    pub literals: Vec<Literal>,
}

impl RustText {
    /// Takes a file apart. Text that is no Rust gives nonsense, but no panic.
    pub fn parse(text: &str) -> RustText {
        let mut scan = Scan { text, at: 0, line: 1, out: RustText::default() };
        scan.run();
        scan.out
    }
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    line: usize,
    out: RustText,
}

impl Scan<'_> {
    fn run(&mut self) {
        while self.at < self.text.len() {
            let rest = &self.text[self.at..];
            let is_plain = |b: u8| !matches!(b, b'/' | b'"' | b'\'' | b'r' | b'b' | b'c');
            let plain = rest.bytes().position(|b| !is_plain(b)).unwrap_or(rest.len());
            if plain > 0 {
                self.code(plain);
                continue;
            }
            let before = self.text[..self.at].chars().next_back();
            let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
            if rest.starts_with("//") {
                let len = rest.find('\n').unwrap_or(rest.len());
                self.comment(len);
            } else if rest.starts_with("/*") {
                self.comment(block_comment_len(rest));
            } else if let Some(len) = string_len(rest, in_word) {
                self.literal(len);
            } else if let Some(len) = char_len(rest) {
                self.blank(len);
            } else {
                self.code(1);
            }
        }
    }

    fn comment(&mut self, len: usize) {
        let text = &self.text[self.at..self.at + len];
        let line_start = self.text[..self.at].rfind('\n').map_or(0, |i| i + 1);
        let mut is_alone = self.text[line_start..self.at].trim().is_empty();
        for (i, part) in text.split('\n').enumerate() {
            let text = part.trim_end().to_owned();
            self.out.comments.push(Comment { line: self.line + i, text, is_alone });
            is_alone = true;
        }
        self.blank(len);
    }

    fn literal(&mut self, len: usize) {
        for (i, part) in self.text[self.at..self.at + len].split('\n').enumerate() {
            let columns = part.chars().count();
            self.out.literals.push(Literal { line: self.line + i, columns });
        }
        self.blank(len);
    }

    fn blank(&mut self, len: usize) {
        for c in self.text[self.at..self.at + len].chars() {
            let is_end = c == '\n';
            self.line += usize::from(is_end);
            self.out.code.push(if is_end { '\n' } else { ' ' });
        }
        self.at += len;
    }

    fn code(&mut self, len: usize) {
        let text = &self.text[self.at..self.at + len];
        self.line += text.bytes().filter(|&b| b == b'\n').count();
        self.out.code.push_str(text);
        self.at += len;
    }
}

fn block_comment_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0);
    while at < bytes.len() {
        match &bytes[at..(at + 2).min(bytes.len())] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Length of the string literal that `text` begins with.
fn string_len(text: &str, in_word: bool) -> Option<usize> {
    let prefix = match text.as_bytes() {
        [b'"', ..] => 0,
        [b'r' | b'b' | b'c', b'"' | b'#', ..] if !in_word => 1,
        [b'b' | b'c', b'r', b'"' | b'#', ..] if !in_word => 2,
        _ => return None,
    };
    let is_raw = text[..prefix].ends_with('r');
    let body = &text[prefix..];
    let hashes = body.bytes().take_while(|&b| b == b'#').count();
    if (hashes > 0 && !is_raw) || body.as_bytes().get(hashes) != Some(&b'"') {
        return None;
    }
    let from = prefix + hashes + 1;
    if is_raw {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(text[from..].find(&end).map_or(text.len(), |i| from + i + end.len()));
    }
    let mut is_escaped = false;
    for (i, b) in text.bytes().enumerate().skip(from) {
        match b {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return Some(i + 1),
            _ => {}
        }
    }
    Some(text.len())
}

/// Length of the character literal that `text` begins with; a lifetime is none.
fn char_len(text: &str) -> Option<usize> {
    let body = text.strip_prefix('\'')?;
    if let Some(escape) = body.strip_prefix('\\') {
        let skipped = escape.chars().next()?.len_utf8();
        return escape[skipped..].find('\'').map(|i| 2 + skipped + i + 1);
    }
    let first = body.chars().next()?.len_utf8();
    body[first..].starts_with('\'').then_some(1 + first + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_not_code() {
        let text = RustText::parse(
            "let a = \"// no\"; // yes\nlet b = r#\"x\"y\"#; /* two\nlines */ fn c<'a>() {}\n",
        );
        let comments: Vec<_> = text.comments.iter().map(|c| (c.line, c.text.as_str())).collect();
        assert_eq!(comments, [(1, "// yes"), (2, "/* two"), (3, "lines */")]);
        assert_eq!(text.literals.iter().map(|l| l.columns).collect::<Vec<_>>(), [7, 8]);
        assert!(text.code.contains("fn c<'a>() {}"));
        assert_eq!(text.code.lines().count(), 3);
        assert!(!text.code.contains("yes") && !text.code.contains("no"));
    }

    #[test]
    fn quotes_in_characters_open_no_string() {
        let text = RustText::parse("let a = ['\"', '\\'', '\\u{22}', b'\"']; // end");
        assert_eq!(text.literals, []);
        assert_eq!(text.comments.len(), 1);
    }

    #[test]
    fn escaped_quotes_end_no_string() {
        let text = RustText::parse("f(\"a\\\"b // c\\\\\"); unsafe {}");
        assert!(text.comments.is_empty() && text.code.ends_with("; unsafe {}"));
    }
}
