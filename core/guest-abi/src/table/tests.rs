use super::*;

#[test]
fn bytes_are_where_the_specification_says() {
    assert_eq!(size_of::<Batch>(), 24);
    assert_eq!(size_of::<Op>(), 24);
    assert_eq!(size_of::<Reply>(), 16);
    assert_eq!(size_of::<Answer>(), 16);
    assert_eq!(size_of::<Row>(), 12);
    assert_eq!(size_of::<Opened>(), 16);
    assert_eq!((size_of::<Filter>(), size_of::<Term>(), size_of::<Speaks>()), (16, 16, 8));
    let term = Term {
        part: part::VALUE,
        test: test::AT_LEAST,
        reserved: U16::ZERO,
        offset: U32::new(3),
        len_bytes: U32::new(8),
        operand_bytes: U32::new(2),
    };
    assert_eq!(term.as_bytes(), [1, 4, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0]);
    let op = Op {
        kind: op::SCAN,
        index: 2,
        flags: U16::new(op_flag::FETCH | op_flag::BACKWARD),
        table: U32::new(7),
        key_bytes: U32::new(1),
        value_bytes: U32::new(2),
        extra: U64::new(limits(10, 0x1000)),
    };
    let bytes = [6, 2, 24, 0, 7, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 10, 0, 0, 0, 0, 0x10, 0, 0];
    assert_eq!(op.as_bytes(), bytes);
}

#[test]
fn the_longest_entry_fits_in_a_frame() {
    let headers = size_of::<Batch>() + size_of::<Op>();
    let longest = headers + MAX_KEY_BYTES + MAX_VALUE_BYTES;
    assert!(longest <= crate::module::MAX_BODY_BYTES as usize);
    let headers = size_of::<Reply>() + size_of::<Answer>() + size_of::<Row>();
    let longest = headers + 2 * MAX_KEY_BYTES + MAX_VALUE_BYTES;
    assert!(longest <= crate::module::MAX_BODY_BYTES as usize);
}
