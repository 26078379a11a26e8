//! XML, written line by line.

use anyhow::bail;

/// XML in the making.
#[derive(Default)]
pub struct Xml {
    text: String,
    depth: usize,
    /// First value that XML cannot hold.
    unfit: Option<String>,
}

/// Attributes of an element: names and values.
pub type Attributes<'a> = &'a [(&'a str, &'a str)];

impl Xml {
    /// XML that is to stand inside of so many elements.
    pub fn at(depth: usize) -> Self {
        Self { depth, ..Self::default() }
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Writes what is XML already.
    pub fn raw(&mut self, text: &str) {
        self.line(text);
    }

    /// Writes an element with others inside.
    pub fn within(
        &mut self,
        name: &str,
        attributes: Attributes<'_>,
        inside: impl FnOnce(&mut Self),
    ) {
        self.line(&format!("<{name}{}>", self.attributes(attributes)));
        self.note_unfit(attributes.iter().map(|(_, value)| *value));
        self.depth += 1;
        inside(self);
        self.depth -= 1;
        self.line(&format!("</{name}>"));
    }

    /// Writes an element without content.
    pub fn empty(&mut self, name: &str, attributes: Attributes<'_>) {
        self.line(&format!("<{name}{}/>", self.attributes(attributes)));
        self.note_unfit(attributes.iter().map(|(_, value)| *value));
    }

    /// Writes an element with a text inside.
    pub fn leaf(&mut self, name: &str, attributes: Attributes<'_>, text: &str) {
        let line = format!("<{name}{}>{}</{name}>", self.attributes(attributes), escape(text));
        self.line(&line);
        self.note_unfit(attributes.iter().map(|(_, value)| *value).chain([text]));
    }

    /// Writes a comment, each of its lines on one of its own.
    pub fn comment(&mut self, text: &str) {
        // Two dashes would end it.
        let text = text.replace("--", "- -");
        let indent = "  ".repeat(self.depth);
        self.line(&format!("<!-- {} -->", text.replace('\n', &format!("\n{indent}     "))));
        self.note_unfit([text.as_str()]);
    }

    /// The whole text; an error where a value has characters that XML does not know.
    pub fn finish(self) -> anyhow::Result<String> {
        match self.unfit {
            Some(value) => bail!("{value:?} has a control character, which XML cannot hold"),
            None => Ok(self.text),
        }
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn attributes(&self, attributes: Attributes<'_>) -> String {
        let one = |(name, value): &(&str, &str)| format!(" {name}='{}'", escape(value));
        attributes.iter().map(one).collect()
    }

    fn note_unfit<'a>(&mut self, values: impl IntoIterator<Item = &'a str>) {
        // XML 1.0, 2.2: of the characters below 0x20 it has only these three.
        let unfit = |c: char| {
            c < ' ' && !matches!(c, '\t' | '\n' | '\r') || matches!(c, '\u{fffe}' | '\u{ffff}')
        };
        if self.unfit.is_none() {
            self.unfit = values.into_iter().find(|value| value.contains(unfit)).map(String::from);
        }
    }
}

/// Escapes what has a meaning in XML, and white space that a parser would change.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&apos;"),
            '"' => escaped.push_str("&quot;"),
            '\t' => escaped.push_str("&#9;"),
            '\n' => escaped.push_str("&#10;"),
            '\r' => escaped.push_str("&#13;"),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_indented_by_depth() {
        let mut xml = Xml::default();
        xml.within("a", &[("b", "1"), ("c", "2")], |xml| {
            xml.empty("d", &[]);
            xml.leaf("e", &[("f", "3")], "4");
            xml.comment("two\nlines -- of it");
        });
        let wanted = "<a b='1' c='2'>\n  <d/>\n  <e f='3'>4</e>\n  <!-- two\n       lines - - of \
                      it -->\n</a>\n";
        assert_eq!(xml.finish().unwrap(), wanted);
    }

    #[test]
    fn a_value_brings_no_element_of_its_own() {
        let mut xml = Xml::default();
        let value = "'/><x y=\"&\t\n\r";
        xml.empty("a", &[("b", value)]);
        xml.leaf("a", &[], value);
        let escaped = "&apos;/&gt;&lt;x y=&quot;&amp;&#9;&#10;&#13;";
        assert_eq!(xml.finish().unwrap(), format!("<a b='{escaped}'/>\n<a>{escaped}</a>\n"));
        let mut xml = Xml::default();
        xml.leaf("a", &[], "\u{1}");
        assert!(xml.finish().unwrap_err().to_string().contains("control character"));
    }
}
