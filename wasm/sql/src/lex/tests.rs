use proptest::prelude::*;

use super::*;

fn lex(text: &[u8]) -> Vec<Token<'_>> {
    Lexer::new(text, 0).all().unwrap()
}

#[test]
fn words_strings_numbers_and_comments() {
    let text = b"SELECT `a``b`, 'it''s', \"x\\\"y\" -- comment\n \
                 FROM t # more\n WHERE a<=>1.5e-3 /*! no */";
    let tokens = lex(text);
    assert_eq!(
        tokens,
        [
            Token::Word("SELECT"),
            Token::Name("a`b".into()),
            Token::Op(","),
            Token::Text(b"it's".to_vec()),
            Token::Op(","),
            Token::Text(b"x\"y".to_vec()),
            Token::Word("FROM"),
            Token::Word("t"),
            Token::Word("WHERE"),
            Token::Word("a"),
            Token::Op("<=>"),
            Token::Number("1.5e-3"),
        ]
    );
    assert_eq!(
        lex(b"x'0aF' 0xfff x"),
        [Token::Hex(vec![0, 0xaf]), Token::Hex(vec![0x0f, 0xff]), Token::Word("x")]
    );
    assert_eq!(
        lex(b"5--3"),
        [Token::Number("5"), Token::Op("-"), Token::Op("-"), Token::Number("3")]
    );
}

#[test]
fn what_does_not_end_and_what_is_too_large_is_refused() {
    for text in ["'abc", "'abc\\", "`abc", "/* abc", "``", "x'0g'", "\u{1}"] {
        assert!(Lexer::new(text.as_bytes(), 0).all().is_err(), "{text}");
    }
    let error = Lexer::new(b"18446744073709551615", 0).all().unwrap_err();
    assert_eq!(error.code, 1264);
    lex(b"-9223372036854775808");
}

/// Writes a string as FederatedX and the clients' libraries do.
fn quoted(bytes: &[u8]) -> Vec<u8> {
    let mut text = vec![b'\''];
    for &b in bytes {
        match b {
            0 => text.extend_from_slice(b"\\0"),
            b'\n' => text.extend_from_slice(b"\\n"),
            b'\r' => text.extend_from_slice(b"\\r"),
            0x1a => text.extend_from_slice(b"\\Z"),
            b'\'' | b'"' | b'\\' => text.extend_from_slice(&[b'\\', b]),
            _ => text.push(b),
        }
    }
    text.push(b'\'');
    text
}

proptest! {
    #[test]
    fn any_bytes_come_through_a_string(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let text = quoted(&bytes);
        prop_assert_eq!(lex(&text), vec![Token::Text(bytes)]);
    }

    #[test]
    fn anything_ends(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Lexer::new(&bytes, 0).all();
    }
}
