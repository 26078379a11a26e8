use proptest::prelude::*;

use super::*;
use crate::errors::{SqlError, code};

proptest! {
    #[test]
    fn numbers_come_back_in_the_shortest_form(
        number: u64,
        rest in proptest::collection::vec(any::<u8>(), 0..9),
    ) {
        let mut bytes = Vec::new();
        put_number(&mut bytes, number);
        let wanted = match number {
            0..=250 => 1,
            251..=0xffff => 3,
            0x1_0000..=0xff_ffff => 4,
            _ => 9,
        };
        prop_assert_eq!(bytes.len(), wanted);
        for cut in 0..bytes.len() {
            prop_assert_eq!(get_number(&bytes[..cut]), None);
        }
        bytes.extend_from_slice(&rest);
        prop_assert_eq!(get_number(&bytes), Some((number, &rest[..])));
    }

    #[test]
    fn packets_come_back_however_they_are_cut(
        payloads in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..300),
            1..5,
        ),
        cut: prop::sample::Index,
    ) {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes, 254);
        for payload in &payloads {
            prop_assert!(writer.packet(|p| p.extend_from_slice(payload)));
        }
        let (mut rest, mut number) = (&bytes[..], 254u8);
        for payload in &payloads {
            let (n, got, used) = take(rest).unwrap();
            prop_assert_eq!((n, got), (number, &payload[..]));
            number = number.wrapping_add(1);
            rest = &rest[used..];
        }
        prop_assert!(rest.is_empty());
        let first = HEAD_BYTES + payloads[0].len();
        prop_assert!(take(&bytes[..cut.index(first)]).is_none());
    }

    #[test]
    fn any_login_is_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = login(&bytes);
    }
}

#[test]
fn logins_name_a_database_or_none_in_each_form() {
    let of = |capabilities: u32, tail: &[u8]| {
        let mut bytes = capabilities.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 28]);
        bytes.extend_from_slice(b"me\0");
        bytes.extend_from_slice(tail);
        login(&bytes).map(|login| login.database)
    };
    use capability::{CONNECT_WITH_DB, LENENC_AUTH, PROTOCOL_41, SECURE_CONNECTION};
    let with = PROTOCOL_41 | CONNECT_WITH_DB;
    assert_eq!(of(with | SECURE_CONNECTION, b"\x03abcd\0"), Some(Some(b"d".to_vec())));
    assert_eq!(of(with | LENENC_AUTH, b"\0d"), Some(Some(b"d".to_vec())));
    assert_eq!(of(with, b"proof\0d\0x"), Some(Some(b"d".to_vec())));
    assert_eq!(of(with | SECURE_CONNECTION, b"\0\0plugin\0"), Some(None));
    assert_eq!(of(PROTOCOL_41 | SECURE_CONNECTION, b"\0"), Some(None));
    assert_eq!(of(with | SECURE_CONNECTION, b"\x09abc"), None);
    assert_eq!(of(SECURE_CONNECTION, b"\0"), None, "a protocol of before 4.1");
}

#[test]
fn answers_are_as_clients_know_them() {
    let mut bytes = Vec::new();
    Writer::new(&mut bytes, 1).ok(1, 300, status::AUTOCOMMIT);
    assert_eq!(bytes, [9, 0, 0, 1, 0, 1, 0xfc, 44, 1, 2, 0, 0, 0]);
    bytes.clear();
    Writer::new(&mut bytes, 1).error(&SqlError::new(code::DUPLICATE, "x"));
    assert_eq!(bytes, b"\x0a\0\0\x01\xff\x26\x04#23000x");
    bytes.clear();
    assert!(
        !Writer::new(&mut bytes, 1).packet(|p| p.resize(HEAD_BYTES + MAX_PAYLOAD_BYTES + 1, 0))
    );
    assert!(bytes.is_empty());
    assert!(is_too_long(&[0xff, 0xff, 0xff, 0]));
    assert!(!is_too_long(&[0xfe, 0xff]));
}
