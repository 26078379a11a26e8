//! Markdown of the reference pages: tables, and text that is no markup.

/// Placeholder of an empty cell.
const EMPTY: &str = "–";

/// A table with a head; each row has a cell for each column.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(head.to_vec());
    text.push_str(&format!("|{}\n", "---|".repeat(head.len())));
    for row in rows {
        text.push_str(&line(row.iter().map(|c| if c.is_empty() { EMPTY } else { c }).collect()));
    }
    text
}

/// Text with what tables and HTML would take as markup escaped, outside of code.
pub fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for (i, part) in text.split('`').enumerate() {
        if i > 0 {
            escaped.push('`');
        }
        let is_code = i % 2 == 1;
        for c in part.chars() {
            match c {
                '|' => escaped.push_str("\\|"),
                '<' if !is_code => escaped.push_str("&lt;"),
                '>' if !is_code => escaped.push_str("&gt;"),
                '*' | '_' if !is_code => {
                    escaped.push('\\');
                    escaped.push(c);
                }
                c => escaped.push(c),
            }
        }
    }
    escaped
}

/// A span of code in a table's cell.
pub fn code(text: &str) -> String {
    let text = text.replace('|', "\\|");
    if text.contains('`') { format!("`` {text} ``") } else { format!("`{text}`") }
}

/// Text with pages of `docs/operate` as links.
pub fn link_pages(text: &str) -> String {
    let mut parts = text.split("docs/operate/");
    let mut linked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(".md") {
            Some((page, rest)) => {
                linked.push_str(&format!("[{page}](../operate/{page}.md){rest}"));
            }
            None => linked.push_str(part),
        }
    }
    linked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_escaped_outside_of_code() {
        assert_eq!(escape("a_b <c> `d_<e>` x|y"), "a\\_b &lt;c&gt; `d_<e>` x\\|y");
        assert_eq!(code("a `b` | c"), "`` a `b` \\| c ``");
    }

    #[test]
    fn empty_cells_have_a_dash() {
        let text = table(&["A", "B"], &[vec!["x".to_owned(), String::new()]]);
        assert_eq!(text, "| A | B |\n|---|---|\n| x | – |\n");
    }
}
