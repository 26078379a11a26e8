use super::*;

#[test]
fn bytes_are_where_the_specification_says() {
    assert_eq!(FRAME_BYTES, 24);
    assert_eq!(size_of::<Hello>(), 64);
    assert_eq!(size_of::<Welcome>(), 40);
    assert_eq!(size_of::<ModuleInfo>(), 64);
    assert_eq!(size_of::<Failure>(), 8);
    let frame = Frame::new(0x0201, 0x0403, 0x0807_0605_0403_0201, 0x4030);
    let bytes = [0x30, 0x40, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(frame.as_bytes(), bytes);
}

#[test]
fn the_seed_covers_every_field() {
    let base = Frame::new(kind::REQUEST, 0, 7, 100);
    let others = [
        Frame::new(kind::REPLY, 0, 7, 100),
        Frame::new(kind::REQUEST, flag::AGAIN, 7, 100),
        Frame::new(kind::REQUEST, 0, 8, 100),
        Frame::new(kind::REQUEST, 0, 7, 101),
    ];
    assert_eq!(base.seed(), (3 << 32 | 100) ^ 7u64.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    for other in others {
        assert_ne!(base.seed(), other.seed());
    }
}
